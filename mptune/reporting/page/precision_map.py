"""Which groups each plan of the front keeps in FP32, as inline SVG: a row per plan, a column per layer group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.printable import printable_html as escape
from mptune.reporting.text import format_error, format_ms, front_rows
from mptune.tuning.front import Front

WIDTH = 1000
LABEL = 178
ROW = 22
MAX_ROWS = 24
"""Fronts are thinned to about this many rows; the chosen plan always stays."""


def precision_map(front: Front, groups: Sequence[LayerGroup]) -> str:
    """Draw the plans of the front, the fastest first, over the groups in the order of the model."""
    rows = [row for row in front_rows(front) if row.on_front or row.is_chosen]
    step = -(-len(rows) // MAX_ROWS)
    rows = [row for place, row in enumerate(rows) if place % step == 0 or row.is_chosen] if rows else []
    if not rows or not groups:
        return ""
    cell = (WIDTH - LABEL) / len(groups)
    height = len(rows) * ROW
    parts = [f'<svg class="map" viewBox="0 0 {WIDTH} {height + 6}" role="img" aria-label="Precision of every group">']
    for place, row in enumerate(rows):
        y = 3 + place * ROW
        style = "map-chosen" if row.is_chosen else "map-label"
        latency, error = f"{format_ms(row.evaluation.latency.median_ms)} ms", format_error(row.evaluation.judged_error)
        for x, text in ((LABEL - 86, latency), (LABEL - 12, error)):
            parts.append(f'<text class="{style}" x="{x}" y="{y + 14}" text-anchor="end">{escape(text)}</text>')
        parts += _runs(row.evaluation.plan, groups, cell, y)
        if row.is_chosen:
            parts.append(
                f'<rect class="map-frame" x="{LABEL - 2}" y="{y - 1}" width="{WIDTH - LABEL + 2}" height="{ROW - 2}"/>'
            )
    for column, group in enumerate(groups):
        title = escape(describe_group(group))
        parts.append(
            f'<rect class="hover" x="{LABEL + column * cell:.2f}" y="0" width="{cell:.2f}" height="{height + 6}">'
            f"<title>{title}</title></rect>"
        )
    return "\n".join([*parts, "</svg>"])


def _runs(plan: PrecisionPlan, groups: Sequence[LayerGroup], cell: float, y: float) -> list[str]:
    """Neighbours of one precision as one rectangle, so that large models stay small pages."""
    parts = []
    states = [(_state(plan, group), column) for column, group in enumerate(groups)]
    for state, run in groupby(states, key=lambda pair: pair[0]):
        columns = [column for _, column in run]
        gap = 1.0 if cell > 4 else 0.0
        x, width = LABEL + columns[0] * cell, len(columns) * cell - gap
        parts.append(f'<rect class="{state}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}"/>')
    return parts


def _state(plan: PrecisionPlan, group: LayerGroup) -> str:
    if group.pinned is not None:
        return "pinned"
    return "fp16" if plan.precision.get(group.id) is Precision.FP16 else "fp32"


def describe_ops(group: LayerGroup) -> str:
    """The operators of a group, such as ``MatMul, Add x2``."""
    return ", ".join(op if count == 1 else f"{op} x{count}" for op, count in group.ops.items())


def describe_group(group: LayerGroup) -> str:
    """What a group's hover title says, unescaped."""
    pinned = "" if group.pinned is None else f"\nalways FP32: {group.pinned}"
    return f"{group.id}  {group.name}\n{group.kind}: {describe_ops(group)}{pinned}"
