"""The finding for one output of a comparison: which known cause its difference has, with the numbers that show it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mptune.diagnosis.patterns.orders import Order, find_order, find_row_order
from mptune.diagnosis.patterns.roundings import Explanation, explain, is_half_precise
from mptune.diagnosis.patterns.scaled import FP32_ROUNDING, Compared
from mptune.diagnosis.patterns.stale import Stale, find_stale, shift_of
from mptune.diagnosis.runner import Outputs
from mptune.diagnosis.sides import Side, arrays_of
from mptune.finding import CODES, Finding, OutputColumns, Where
from mptune.graph.writing.tf32 import ROUNDINGS

STRUCTURAL = frozenset(
    {"stale-rows", "torn-rows", "outputs-permuted", "attribute-differs", "not-deterministic", "data-do-not-fit"}
)
"""Causes that are no rounding: with one of them the verdict is always ``differs``."""

_SYNCHRONISE = (
    "synchronise the stream before the outputs are read (cudaStreamSynchronize, or stream.synchronize()), and give each"
    " run in flight buffers of its own"
)
_ONE_ROW = (
    "see whether the batch was fixed at 1 where the model was exported or the engine built (dynamic axes, optimisation"
    " profile), and whether the input is copied for each run"
)


def structural_finding(side: Side) -> Finding | None:
    """Another order, sign or complement, stale or torn rows; None where the difference has none of these causes."""
    sides = side.sides
    if side.name in sides.moved:
        return _moved(side, sides.moved[side.name])
    swapped = _swapped(side)
    if swapped is not None:
        return swapped
    compared = side.compared()
    if compared is None or compared.distance <= compared.exact or (side.is_within and sides.has_row_set(side.name)):
        return None
    order = find_order(compared)
    if order is not None:
        return _ordered(side, order)
    stale = find_stale(compared, sides.batch) if sides.origin != "model" else None
    rows = find_row_order(compared)
    if rows is not None and (stale is None or not _is_late(stale, len(compared.got), sides.batch)):
        return _ordered(side, rows)
    if stale is not None and stale.is_ahead:
        return _ahead(side, stale)
    if stale is not None and (lag := stale.delay(len(compared.got), sides.batch)) is not None:
        return _delayed(side, stale, lag)
    return None if stale is None else stale_finding(side, stale)


def rounding_cause(side: Side) -> Explanation | None:
    """The rounding that makes the difference of an output; None where none does."""
    sides = side.sides
    compared = side.compared()
    if compared is None or compared.distance <= compared.exact or (side.is_within and sides.has_row_set(side.name)):
        return None
    exact = side.rows(sides.runner.exact)

    def change(rows: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            changed: np.ndarray = (np.asarray(rows, np.float64) - np.asarray(exact, np.float64)) / compared.scale
        return changed

    tf32 = [
        found for way in (ROUNDINGS if sides.origin != "model" else ()) if (found := sides.runner.tf32(way)) is not None
    ]

    def changes(outputs: Iterable[Outputs]) -> list[np.ndarray]:
        return [change(rows) for each in outputs if (rows := side.rows(each)).shape == exact.shape]

    plans = [plan for plan in dict.fromkeys((sides.plan, sides.runner.all_fp16)) if plan.reduced_groups]
    by_precision = [
        changes(sides.runner.emulated(plan) for plan in plans if bool(plan.bf16_groups) is has_bf16)
        for has_bf16 in (False, True)
    ]
    difference, products = compared.got - compared.wanted, changes(tf32)
    is_half = is_half_precise(np.concatenate([array.ravel() for array in side.got]))
    cause = explain(difference, products, by_precision[0], is_half=is_half, bf16=by_precision[1])
    if cause is None and sides.origin != "model":  # an engine may be BF16 throughout, which nothing says
        plan = sides.runner.all_bf16
        cause = explain(difference, products, (), is_half=is_half, bf16=changes([sides.runner.emulated(plan)]))
    return cause


def rounding_finding(side: Side, cause: Explanation | None) -> Finding | None:
    """TF32, or agreement; None where the difference is beyond tolerance and no TF32."""
    if cause is not None and cause.cause.startswith("tf32"):
        return _tf32(side, cause)
    if not side.is_within:
        return None
    known = "equals the reference" if side.error == 0 else f"has {side.limit.sentence(side.judged)}"
    exact = side.error <= FP32_ROUNDING
    what = "what FP32 rounding gives" if exact else "the size of FP16 rounding"
    beside = f"FP16 throughout, emulated, gives {side.judged_fp16:.3g}"
    if not exact and side.error > 2 * side.emulated:
        what = "within the tolerance given, and more than FP16 rounding gives"
    text = f"output {str(side.where)!r} {known}" + (f": {what}" if side.error else "") + f" ({beside})"
    return finding(
        "agrees",
        (side.where,),
        side.evidence,
        text,
        "",
    )


def finding(
    code: str,
    outputs: tuple[OutputColumns, ...],
    evidence: dict[str, int | float | str],
    text: str,
    cure: str,
    *,
    samples: tuple[int, ...] = (),
    nodes: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    tensors: tuple[str, ...] = (),
) -> Finding:
    """A finding of a comparison, with its code's severity."""
    where = Where(nodes=nodes, groups=groups, tensors=tensors, outputs=outputs, samples=samples)
    return Finding(code, CODES[code].severity, "compare", where, evidence, text, cure)


def stale_finding(side: Side, stale: Stale) -> Finding:
    """Stale or torn rows."""
    code = "torn-rows" if stale.torn else "stale-rows"
    count = side.row_count
    rows, example = stale.torn or stale.whole, stale.example
    source = stale.source[example]
    which = f"row {example} equals the reference's row {source}"
    if stale.torn:
        which = f"row {example} is part its own result and part that of row {source}"
    whole = f", {len(stale.whole)} are wholly another row's" if stale.torn and stale.whole else ""
    lag = f"the source is most often {stale.lag} row{'s' * (abs(stale.lag) != 1)} before" if stale.lag > 0 else ""
    cure = f"no plan repairs this: {_SYNCHRONISE}"
    if stale.single is not None:
        lag, cure = f"so do all {len(rows)} that differ", f"no plan repairs this: {_ONE_ROW}"
    if stale.repeated is not None and stale.repeated > 0:
        lag = f"rows {rows[0]} to {rows[-1]} repeat it"
        cure = f"no plan repairs this: see why nothing new was computed, or recorded, after row {stale.repeated}"
    text = f"output {side.name!r}: {len(rows)} of {count} rows are {code.split('-')[0]}{whole}: {which}"
    return finding(
        code,
        (OutputColumns(side.name),),
        {
            "share": stale.share,
            "rows": len(stale.rows),
            "torn": len(stale.torn),
            "lag": stale.lag,
            "row": example,
            "source_row": source,
            "error": side.error,
        },
        f"{text}; {lag}" if lag else text,
        cure,
        samples=side.samples_of(stale.rows),
    )


def _is_late(stale: Stale, rows: int, batch: int) -> bool:
    """Whether rows in another order are those of the run before, as where a deployment runs the data in a circle."""
    if not stale.is_closed:
        return True
    return shift_of(stale.source, rows) in (1, 2, batch)


def _ahead(side: Side, stale: Stale) -> Finding:
    """Rows that are those of later samples."""
    rows, example = stale.rows, stale.example
    return finding(
        "outputs-permuted",
        (OutputColumns(side.name),),
        {"kind": "rows", "rows": len(rows), "lag": stale.lag, "row": example, "source_row": stale.source[example]},
        f"output {side.name!r}: from row {rows[0]} on, {len(rows)} of {side.row_count} rows are those of later samples"
        f" (row {example} equals the reference's row {stale.source[example]}): as where a sample was left out",
        "give the rows in the order of the data, one for each sample: see which sample the recording lacks",
        samples=side.samples_of(rows),
    )


def _delayed(side: Side, stale: Stale, lag: int) -> Finding:
    """Rows that all come late by the same number of rows."""
    batch = side.sides.batch
    runs = f" ({lag // batch} runs)" if batch > 1 and lag % batch == 0 else ""
    return finding(
        "outputs-permuted",
        (OutputColumns(side.name),),
        {"kind": "rows", "rows": len(stale.rows), "lag": lag, "row": stale.example, "error": side.error},
        f"output {side.name!r}: every row from {lag} on is the reference's {lag} rows{runs} before it (row"
        f" {stale.example} equals the reference's row {stale.source[stale.example]}): a delay that stays the same, as"
        " of a queue or a pipeline; a missing synchronisation gives no such delay",
        f"give each row with the sample that it was computed of: the first {lag} rows of the recording belong to none",
        samples=side.samples_of(stale.rows),
    )


def _swapped(side: Side) -> Finding | None:
    """Whether the output holds what the reference calls another output."""
    sides, known = side.sides, side.compared()
    own = np.inf if known is None else known.distance
    if side.name not in sides.taken and (known is None or own <= known.exact):
        return None
    for other in sides.layouts:
        if other == side.name:
            continue
        got = arrays_of(sides.candidate, side.name)
        there = sides.output(other)
        if side.name in sides.taken:
            # The recording of this name has the shape of ``other``; what has this one's shape stands here already.
            found = known is not None and sides.taken[side.name] == other and (own <= known.half or side.is_within)
        else:
            compared = there.compared(got) if [a.shape for a in got] == [a.shape for a in there.wanted] else None
            found = compared is not None and compared.distance <= compared.half and _is_clearly_below(compared, own)
        if found:
            text = f"outputs are exchanged: {side.name!r} of one side is {other!r} of the other"
            if there.error <= FP32_ROUNDING:  # that output is right itself
                text = f"output {side.name!r} holds what is {other!r} of the reference, as {other!r} does, too"
            return finding(
                "outputs-permuted",
                (OutputColumns(side.name), OutputColumns(other)),
                {"kind": "outputs", "error": side.error, "output": other},
                text,
                "read outputs by name, not by position, or exchange the two",
            )
    return None


def _is_clearly_below(compared: Compared, own: float) -> bool:
    return compared.distance <= 0.1 * own


def _moved(side: Side, axes: tuple[int, ...]) -> Finding:
    order = ", ".join(map(str, axes))
    return finding(
        "outputs-permuted",
        (OutputColumns(side.name),),
        {"kind": "axes", "axes": order, "error": side.error},
        f"output {side.name!r} has its axes in another order: axes ({order}) of the recording are the reference's",
        f"transpose the recorded output: numpy.transpose(y, ({order}))",
    )


def _ordered(side: Side, order: Order) -> Finding:
    columns = order.entries if order.kind in ("sign", "complement") else None
    which = "" if columns is None else f" in column{'s' * (len(columns) > 1)} {_few(columns)}"
    evidence: dict[str, int | float | str] = {"kind": order.kind, "error": side.error, "left_share": order.left}
    texts = {"sign": "has the opposite sign", "complement": "is the complement of the reference (1 - x)"}
    cures = {"sign": "negate it", "complement": "take 1 - x", "rows": "give the rows in the order of the data"}
    if order.kind in texts:
        text = f"output {side.name!r}{which} {texts[order.kind]}"
    else:
        assert order.entries is not None
        assert order.axis is not None
        moved = [k for k, entry in enumerate(order.entries) if k != entry]
        what = "rows" if order.kind == "rows" else f"entries along axis {order.axis}"
        shown = ", ".join(f"{k} is the reference's {order.entries[k]}" for k in moved[:3])
        dots = ", ..." if len(moved) > 3 else ""
        count = f"{len(moved)} of {len(order.entries)} moved ({shown}{dots})"
        text = f"output {side.name!r} has its {what} in another order: {count}"
        evidence |= {"moved": len(moved), "axis": order.axis, "order": _few(order.entries)}
        columns = tuple(moved) if order.kind == "columns" else None
    text += f"; undone, {100 * order.left:.2g} % of the difference is left"
    samples = (
        side.samples_of(tuple(k for k, e in enumerate(order.entries or ()) if k != e)) if order.kind == "rows" else ()
    )
    cure = cures.get(order.kind, "bring the entries into the reference's order, or compare them by what they mean")
    return finding("outputs-permuted", (OutputColumns(side.name, columns),), evidence, text, cure, samples=samples)


def _tf32(side: Side, cause: Explanation) -> Finding:
    which = cause.cause.removeprefix("tf32-")
    name = side.sides.reference_name if which == "reference" else side.sides.candidate_name
    cure = "compute the reference with TF32 off" if which == "reference" else "switch TF32 off where this matters"
    cure += ": use_tf32=0 for ONNX Runtime's CUDA provider, clear_flag(BuilderFlag.TF32) for TensorRT"
    cure += ", or NVIDIA_TF32_OVERRIDE=0 in the environment"
    return finding(
        cause.cause,
        (OutputColumns(side.name),),
        side.evidence | {"left_share": cause.left, "size_ratio": cause.size},
        f"output {side.name!r}: TF32 in the {which} ({name}) makes the difference of {side.error:.3g}: emulated, it has"
        f" {cause.size:.2f} times its size, and {100 * cause.left:.2g} % of the difference is left without it",
        cure,
    )


def _few(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
