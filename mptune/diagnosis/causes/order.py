"""Outputs, axes, columns or rows in another order; another sign, or complements; rows that are stale or torn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mptune.diagnosis.comparison import finding
from mptune.diagnosis.patterns.orders import Order, Stale, find_order, find_row_order, find_stale, shift_of
from mptune.diagnosis.patterns.roundings import FP32_ROUNDING
from mptune.diagnosis.sides import Side, arrays_of
from mptune.finding import Finding, OutputColumns

_EXCHANGED = 0.1
"""Share of its difference that an output has at most from the reference of another to be that."""


def other_order(outputs: Sequence[Side]) -> list[Finding]:
    """``outputs-permuted``."""
    return [permuted for side in outputs if (permuted := _of_output(side)) is not None]


def _of_output(side: Side) -> Finding | None:
    if side.name in side.sides.moved:
        return _moved(side, side.sides.moved[side.name])
    if (exchanged := _exchanged(side)) is not None:
        return exchanged
    difference = side.difference
    if difference is None:
        return None
    order = find_order(difference)
    if order is not None:
        return _ordered(side, order)
    stale = find_stale(difference, side.sides.batch) if side.sides.origin != "model" else None
    rows = find_row_order(difference)
    if rows is not None and (stale is None or not _is_late(stale, len(difference.got), side.sides.batch)):
        return _ordered(side, rows)
    return _ahead(side, stale) if stale is not None and stale.is_ahead else None


def _is_late(stale: Stale, rows: int, batch: int) -> bool:
    """Whether rows in another order are those of the run before, as where a deployment runs the data in a circle."""
    return not stale.is_closed or shift_of(stale.source, rows) in (1, 2, batch)


def _ahead(side: Side, stale: Stale) -> Finding:
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


def _exchanged(side: Side) -> Finding | None:
    """Whether the output holds what the reference calls another output."""
    sides, own = side.sides, side.compared
    if side.name not in sides.exchanged and (own is None or own.distance <= own.exact):
        return None
    distance = np.inf if own is None else own.distance
    for other in sides.layouts:
        if other == side.name:
            continue
        there = sides.output(other)
        if side.name in sides.exchanged:
            # The recording of this name has the shape of ``other``; what has this one's shape stands here already.
            is_other = (
                own is not None and sides.exchanged[side.name] == other and (distance <= own.half or side.is_within)
            )
        else:
            compared = there.compared_with(arrays_of(sides.candidate, side.name))
            is_other = compared is not None and compared.distance <= min(compared.half, _EXCHANGED * distance)
        if not is_other:
            continue
        is_right = there.error <= FP32_ROUNDING
        text = f"outputs are exchanged: {side.name!r} of one side is {other!r} of the other"
        if is_right:
            text = f"output {side.name!r} holds what is {other!r} of the reference, as {other!r} does, too"
        return finding(
            "outputs-permuted",
            (OutputColumns(side.name), *(() if is_right else (OutputColumns(other),))),
            {"kind": "outputs", "error": side.error, "output": other},
            text,
            "read outputs by name, not by position, or exchange the two",
        )
    return None


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
    evidence: dict[str, int | float | str] = {"kind": order.kind, "error": side.error, "left_share": order.left}
    columns: tuple[int, ...] | None = None
    samples: tuple[int, ...] = ()
    if order.kind in ("sign", "complement"):
        columns = order.entries
        which = "" if columns is None else f" in column{'s' * (len(columns) > 1)} {_few(columns)}"
        is_sign = order.kind == "sign"
        what = "has the opposite sign" if is_sign else "is the complement of the reference (1 - x)"
        text, cure = f"output {side.name!r}{which} {what}", "negate it" if is_sign else "take 1 - x"
    else:
        assert order.entries is not None
        moved = tuple(k for k, entry in enumerate(order.entries) if k != entry)
        what = "rows" if order.kind == "rows" else f"entries along axis {order.axis}"
        shown = ", ".join(f"{k} is the reference's {order.entries[k]}" for k in moved[:3])
        count = f"{len(moved)} of {len(order.entries)} moved ({shown}{', ...' * (len(moved) > 3)})"
        text = f"output {side.name!r} has its {what} in another order: {count}"
        evidence |= {"moved": len(moved), "axis": order.axis or 0, "order": _few(order.entries)}
        if order.kind == "rows":
            samples, cure = side.samples_of(moved), "give the rows in the order of the data"
        else:
            columns, cure = moved, "bring the entries into the reference's order, or compare them by what they mean"
    text += f"; undone, {100 * order.left:.2g} % of the difference is left"
    return finding("outputs-permuted", (OutputColumns(side.name, columns),), evidence, text, cure, samples=samples)


def _few(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


_SYNCHRONISE = (
    "no plan repairs this: synchronise the stream before the outputs are read (cudaStreamSynchronize, or"
    " stream.synchronize()), and give each run in flight buffers of its own"
)

_ONE_ROW = (
    "no plan repairs this: see whether the batch was fixed at 1 where the model was exported or the engine built"
    " (dynamic axes, optimisation profile), and whether the input is copied for each run"
)


def stale_rows(outputs: Sequence[Side]) -> list[Finding]:
    """``stale-rows`` and ``torn-rows``; not of two models, which ran here."""
    findings = []
    for side in outputs:
        if side.difference is None or side.sides.origin == "model":
            continue
        stale = find_stale(side.difference, side.sides.batch)
        if stale is not None:
            findings.append(stale_finding(side, stale))
    return findings


def stale_finding(side: Side, stale: Stale) -> Finding:
    """The finding for one output."""
    code = "torn-rows" if stale.torn else "stale-rows"
    rows, example = stale.torn or stale.whole, stale.example
    source = stale.source[example]
    which = f"row {example} equals the reference's row {source}"
    if stale.torn:
        which = f"row {example} is part its own result and part that of row {source}"
    whole = f", {len(stale.whole)} are wholly another row's" if stale.torn and stale.whole else ""
    lag = f"the source is most often {stale.lag} row{'s' * (stale.lag != 1)} before" if stale.lag > 0 else ""
    if stale.is_one_row:
        lag = f"so do all {len(rows)} that differ"
    text = f"output {side.name!r}: {len(rows)} of {side.row_count} rows are {code.split('-')[0]}{whole}: {which}"
    evidence: dict[str, int | float | str] = {
        "share": stale.share,
        "rows": len(stale.rows),
        "torn": len(stale.torn),
        "lag": stale.lag,
        "row": example,
        "source_row": source,
        "error": side.error,
    }
    return finding(
        code,
        (OutputColumns(side.name),),
        evidence,
        f"{text}; {lag}" if lag else text,
        _ONE_ROW if stale.is_one_row else _SYNCHRONISE,
        samples=side.samples_of(stale.rows),
    )
