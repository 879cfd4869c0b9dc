"""Results that rounding the operands moves far: steep functions, norms of an offset, whole numbers, small columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mptune.graph.grouping.lookup import Lookup
from mptune.graph.hazards.hazard import Hazard, kept_out, largest, spacing
from mptune.graph.hazards.probes import NORMS, REDUCTIONS, ProbeRecord
from mptune.graph.hazards.reductions import index_reader
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import Node
from mptune.graph.plan import Precision

_MOVED_SPREAD: Mapping[Precision, float] = {Precision.FP16: 0.03, Precision.BF16: 0.1}
"""Of a function, a norm or a sum: its own rounding to FP16 is 3e-4 of its standard deviation, to BF16 2e-3."""
_MOVED_COLUMN: Mapping[Precision, float] = {Precision.FP16: 0.05, Precision.BF16: 0.2}
_OFFSET = 10.0
"""A column whose mean is so many deviations is no small difference: its offset is what FP16 rounds."""
_ROUNDING_OF_SUMS = 1e-5
"""Share of a mean square below which the variance is what summing in FP32 leaves of nothing."""
_FEWEST_MOVED = 2.0
_MOVED_ROWS: Mapping[Precision, float] = {Precision.FP16: 0.05, Precision.BF16: 0.1}
"""Share of the whole numbers that rounding makes others."""


def _moved_spread(facts: Mapping[str, Sequence[float]], column: int | None = None) -> float | None:
    """What rounding changes of a result, in standard deviations of it; None where it hardly varies or is not finite.

    Facts are of samples, or where ``column`` is given the means over them of its columns.
    """
    error, mean, square = (
        facts[name][column] if column is not None else sum(facts[name]) / len(facts[name])
        for name in ("error", "mean", "square")
    )
    variance = square - mean**2
    if not math.isfinite(error + square) or variance <= _ROUNDING_OF_SUMS * square:
        return None
    return math.sqrt(error / variance)


def _place(record: ProbeRecord) -> tuple[int, float, float]:
    """The sample that rounding changes most, the largest magnitude there, and the spacing at it."""
    worst = largest(record.scalars["error"])
    magnitude = record.scalars["magnitude"][worst]
    return worst, magnitude, spacing(magnitude, record.precision)


def steep_hazards(seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    """Functions, norms and sums whose results rounding moves by a part of their spread."""
    moved = _moved_spread(record.scalars)
    if moved is None or moved < _MOVED_SPREAD[record.precision]:
        return []
    worst, magnitude, apart = _place(record)
    name = record.precision.name
    why = (
        f"values reach {magnitude:.4g}, where {name}'s spacing is {apart:.3g}: once they are rounded, {node.op_type}"
        f" changes by {moved:.1%} of its results' standard deviation"
    )
    code = "cancellation" if node.op_type in NORMS | REDUCTIONS else "spacing"
    evidence = {"magnitude": magnitude, "spacing": apart, "relative_error": moved}
    return [_warning(seen, record, node, group, code, node.inputs[0], moved, why, evidence, worst)]


def step_hazards(look: Lookup, seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    """Whole numbers that rounding makes others."""
    moved, rows = (sum(record.scalars[name]) for name in ("moved", "rows"))
    if not rows or not moved >= max(_FEWEST_MOVED, _MOVED_ROWS[record.precision] * rows):
        return []
    reader, spread = index_reader(look, node), _moved_spread(record.scalars)
    if reader is None and (spread is None or spread < _MOVED_SPREAD[record.precision]):
        return []
    worst, magnitude, apart = _place(record)
    share = moved / rows
    use = (
        f"of which {reader.op_type} {reader.name!r} makes an index or a size"
        if reader is not None
        else f"which changes its results by {spread:.1%} of their standard deviation"
    )
    why = (
        f"values reach {magnitude:.4g}, where {record.precision.name}'s spacing is {apart:.3g}: once they are rounded,"
        f" {node.op_type} gives another whole number for {share:.1%} of them, {use}"
    )
    code = "spacing" if reader is None else "index-in-float"
    evidence = {"magnitude": magnitude, "spacing": apart, "share": share}
    return [_warning(seen, record, node, group, code, node.inputs[0], share, why, evidence, worst)]


def column_hazards(seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    """Columns of a sum that rounding moves by a part of their own spread, which that of all columns hides."""
    facts = record.vectors
    moved = {c: _moved_spread(facts, c) or 0.0 for c in range(len(facts["error"]))}
    columns = [c for c in moved if moved[c] >= _MOVED_COLUMN[record.precision]]
    if not columns:
        return []
    worst = max(columns, key=lambda c: moved[c])
    spread = math.sqrt(facts["square"][worst] - facts["mean"][worst] ** 2)
    is_small = abs(facts["mean"][worst]) < _OFFSET * spread
    listed = ", ".join(map(str, columns))
    why = (
        f"rounding the operands of {node.op_type} to {record.precision.name} changes column {worst} of its result by"
        f" {moved[worst]:.1%} of that column's standard deviation, which is {spread:.3g}"
        + (f" (columns {listed})" if len(columns) > 1 else "")
    )
    code = "cancellation" if is_small else "spacing"
    evidence: dict[str, int | float | str] = {"column": worst, "relative_error": moved[worst], "deviation": spread}
    return [_warning(seen, record, node, group, code, node.outputs[0], moved[worst], why, evidence, None)]


def _warning(
    seen: Seen,
    record: ProbeRecord,
    node: Node,
    group: str,
    code: str,
    tensor: str,
    value: float,
    why: str,
    evidence: Mapping[str, int | float | str],
    sample: int | None,
) -> Hazard:
    return Hazard(
        "warning",
        record.kind,
        group,
        node.name,
        tensor,
        value,
        why,
        f"{kept_out(record.precision)}, with what computes its operands",
        code,
        evidence,
        () if sample is None else (seen.sample(sample),),
        record.precision,
    )
