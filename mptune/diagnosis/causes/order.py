"""Outputs, axes, columns or rows in another order; rows that are stale or torn; outputs that were not computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mptune.diagnosis.causes.half import fp16_explanation
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.patterns.orders import Order, Stale, find_order, find_stale, shift_of
from mptune.diagnosis.sides import Side, arrays_of
from mptune.finding import Finding, OutputColumns, Where
from mptune.findings.wording import listed

_LISTED = 8
"""Columns or rows that are listed."""

_EXCHANGED = 0.1
"""Share of its difference that an output has at most from the reference of another to be that."""


def other_order(outputs: Sequence[Side]) -> list[Finding]:
    """``outputs-permuted``."""
    return [permuted for side in outputs if (permuted := _of_output(side)) is not None]


def _of_output(side: Side) -> Finding | None:
    difference = side.difference
    if difference is None:
        return None
    if (exchanged := _exchanged(side)) is not None:
        return exchanged
    order = find_order(difference, range(1, difference.got.ndim))
    if order is not None:
        return _ordered(side, order)
    stale = find_stale(difference, side.sides.batch) if side.sides.origin != "model" else None
    rows = find_order(difference, (0,))
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
        "ahead",
        (OutputColumns(side.name),),
        {"kind": "rows", "rows": len(rows), "lag": stale.lag, "row": example, "source_row": stale.source[example]},
        Where(samples=side.samples_of(rows)),
        begin=rows[0],
        of_rows=side.row_count,
    )


def _exchanged(side: Side) -> Finding | None:
    """Whether the output holds what the reference calls another output."""
    sides, distance = side.sides, side.compared.distance if side.compared is not None else np.inf
    for other in sides.layouts:
        if other == side.name:
            continue
        compared = sides.output(other).compared_with(arrays_of(sides.candidate, side.name))
        if compared is None or compared.distance > min(compared.half, _EXCHANGED * distance):
            continue
        return finding(
            "outputs-permuted",
            "exchanged",
            (OutputColumns(side.name),),
            {"kind": "outputs", "error": side.error, "output": other},
            name=side.name,
            other=other,
        )
    return None


def _ordered(side: Side, order: Order) -> Finding:
    moved = tuple(k for k, entry in enumerate(order.entries) if k != entry)
    is_of_rows = order.axis == 0
    return finding(
        "outputs-permuted",
        "rows" if is_of_rows else "entries",
        (OutputColumns(side.name, None if is_of_rows else moved),),
        {
            "kind": "rows" if is_of_rows else "columns",
            "error": side.error,
            "left_share": order.left,
            "moved": len(moved),
            "axis": order.axis,
            "order": listed(order.entries, _LISTED),
        },
        Where(samples=side.samples_of(moved) if is_of_rows else ()),
        along=order.axis,
        entries=len(order.entries),
        shown=listed([f"{k} is the reference's {order.entries[k]}" for k in moved], 3),
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
    evidence: dict[str, int | float | str] = {
        "share": stale.share,
        "rows": len(stale.rows),
        "torn": len(stale.torn),
        "lag": stale.lag,
        "row": stale.example,
        "source_row": stale.source[stale.example],
        "error": side.error,
    }
    return finding(
        "torn-rows" if stale.torn else "stale-rows",
        "one row" if stale.is_one_row else "",
        (OutputColumns(side.name),),
        evidence,
        Where(samples=side.samples_of(stale.rows)),
        count=len(stale.torn or stale.whole),
        of_rows=side.row_count,
        whole=len(stale.whole) or None,
        before=max(stale.lag, 0),
    )


def not_computed(outputs: Sequence[Side]) -> list[Finding]:
    """``not-computed``, of recorded outputs, unless FP16 makes them so."""
    findings = []
    for side in outputs:
        if side.is_within or side.sides.origin != "recorded" or side.compared is None:
            continue
        kind = _not_computed(side.rows(side.sides.candidate), side.rows(side.sides.reference))
        if kind and fp16_explanation(side) is None:
            evidence = {"error": side.error, "rows": side.row_count}
            findings.append(finding("not-computed", kind, (OutputColumns(side.name),), evidence, output=side.name))
    return findings


def _not_computed(got: np.ndarray, wanted: np.ndarray) -> str:
    """How rows show that they were not computed; "" where they do not."""
    if not got.any() and wanted.any():
        return "zero"
    is_one = len(got) > 1 and bool((got == got[:1]).all())
    # Rows of one label each are equal by chance.
    return "equal rows" if is_one and got.dtype.kind == "f" and not (wanted == wanted[:1]).all() else ""
