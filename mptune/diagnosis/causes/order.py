"""Outputs, axes, columns or rows in another order; another sign, or complements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mptune.diagnosis.causes.explained import finding
from mptune.diagnosis.patterns.orders import Order, find_order, find_row_order
from mptune.diagnosis.patterns.scaled import FP32_ROUNDING
from mptune.diagnosis.patterns.stale import Stale, find_stale, shift_of
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
    if side.name not in sides.taken and (own is None or own.distance <= own.exact):
        return None
    distance = np.inf if own is None else own.distance
    for other in sides.layouts:
        if other == side.name:
            continue
        there = sides.output(other)
        if side.name in sides.taken:
            # The recording of this name has the shape of ``other``; what has this one's shape stands here already.
            is_other = own is not None and sides.taken[side.name] == other and (distance <= own.half or side.is_within)
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
