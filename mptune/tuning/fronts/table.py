"""A front as rows: records, and the one table that terminals and Python show."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mptune.printable import WIDEST, cut, printable
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import reason_counts
from mptune.tuning.fronts.limits import metric_values
from mptune.tuning.fronts.texts import (
    error_cell,
    format_interval,
    group_counts,
    latency_text,
    memory_text,
    metric_cell,
    part_text,
    speedup_of,
)

if TYPE_CHECKING:
    from mptune.tuning.front import Front

MOST_ROWS = 12
"""A longer front is shown by this many of its rows: the ends, the baselines, the choice, and an even spread."""

_WIDTH = 100
"""Of the table where it is no terminal that shows it."""

_TEXTS = ("", "plan", "worst part", "FP32 because", "origin")
"""Columns that hold no numbers."""

_DROPPED = ("memory", "95 %", "FP32 because", "worst part")
"""Columns that are left out, one after the other, where the width does not hold all."""


@dataclass(frozen=True)
class Row:
    """One line of the table; ``name`` is which baseline the plan is, or who proposed it."""

    evaluation: Evaluation
    name: str
    is_chosen: bool
    is_baseline: bool
    on_front: bool


def front_rows(front: Front) -> tuple[Row, ...]:
    """The points of the front, both baselines and the chosen plan, sorted by latency."""
    by_plan = {point.plan: point for point in front.points}
    on_front = set(by_plan)
    for extra in (front.chosen, front.fp32, front.fp16):
        if extra is not None:
            by_plan.setdefault(extra.plan, extra)
    baselines = {} if front.fp16 is None else {front.fp16.plan: front.fp16_name}
    baselines[front.fp32.plan] = "all-FP32"
    rows = [
        Row(
            evaluation,
            name=baselines.get(plan, evaluation.origin.label),
            is_chosen=front.chosen is not None and plan == front.chosen.plan,
            is_baseline=plan in baselines,
            on_front=plan in on_front,
        )
        for plan, evaluation in by_plan.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.evaluation.latency.median_ms))


def shown_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """At most ``MOST_ROWS`` of the rows: chosen plan, ends of the front and baselines, then an even spread."""
    if len(rows) <= MOST_ROWS:
        return rows
    points = [k for k, row in enumerate(rows) if row.on_front]
    kept = {*points[:1], *points[-1:], *(k for k, row in enumerate(rows) if row.is_chosen or row.is_baseline)}
    while len(kept) < MOST_ROWS:  # the middle of the widest gap
        low, high = max(pairwise(sorted(kept)), key=lambda pair: pair[1] - pair[0])
        kept.add((low + high) // 2)
    return tuple(rows[k] for k in sorted(kept))


def front_records(front: Front) -> list[dict[str, Any]]:
    """List the points of a front and both baselines as dictionaries, which CSV files and ``pandas.DataFrame`` take.

    Sorted by latency. Each metric's own value stands under its name, and that on the held-out samples under
    ``held_out_NAME``.
    """
    roles = {beside.evaluation.plan: beside.role for beside in front.neighbours}
    records = []
    for row in front_rows(front):
        evaluation = row.evaluation
        plan, memory = evaluation.plan, evaluation.memory
        record: dict[str, Any] = {
            "plan": plan.fingerprint,
            "latency_ms": evaluation.latency.median_ms,
            "p99_ms": evaluation.latency.p99_ms,
            "speedup": evaluation.speedup,
            "error": evaluation.error_value,
            "part": part_text(evaluation, WIDEST) or None,
            "held_out_error": evaluation.held_out_value,
            "fp16_groups": len(plan.fp16_groups),
            "bf16_groups": len(plan.bf16_groups),
            "fp32_groups": len(plan.fp32_groups),
            "memory_bytes": None if memory is None else memory.total_bytes,
            "origin": str(evaluation.origin),
            "latency_source": evaluation.latency.source,
            "error_source": evaluation.error_source,
            "remeasured": evaluation.remeasured,
            "confirmed": evaluation.confirmed,
            "fp32_because": because(front, evaluation),
            "neighbour": roles.get(plan, ""),
            "on_front": row.on_front,
            "chosen": row.is_chosen,
        }
        for name, metric in front.metrics.items():
            column = metric if name in record or f"held_out_{name}" in record else name
            record[column], record[f"held_out_{column}"] = metric_values(evaluation, metric)
        records.append(record)
    return records


def because(front: Front, evaluation: Evaluation, most: int | None = None) -> str:
    """Why a plan's FP32 groups are FP32, as ``reason_counts``; all-FP32 is the baseline, and needs no reason."""
    is_baseline = evaluation.plan == front.fp32.plan
    return "" if is_baseline else reason_counts(front.explanation.of(evaluation.plan.fingerprint), most)


def is_held_out(front: Front) -> bool:
    """Whether errors are those of the held-out samples, but for rows that were not measured again."""
    return any(row.evaluation.held_out is not None for row in front_rows(front))


def front_table(front: Front, rows: Sequence[Row], width: int) -> Table:
    """The table of these rows, one line each, with the columns that the width holds."""
    plans = [row.evaluation for row in rows]
    is_predicted = any(plan.latency.source == "predicted" for plan in plans)
    has_bf16 = any(plan.plan.bf16_groups for plan in plans)
    parts = list(map(part_text, plans))
    names_parts = len(set(parts)) > 1 or any("[" in part for part in parts)  # of a single output it says nothing
    columns = [
        ("", [">" if row.is_chosen else "" if row.on_front else "-" for row in rows]),
        ("plan", [plan.plan.fingerprint for plan in plans]),
        ("pred. ms" if is_predicted else "ms", list(map(latency_text, plans))),
        ("95 %", list(map(format_interval, plans))),
        ("speedup", [speedup_of(plan, front.fp32) for plan in plans]),
        ("error", [_mark(front, plan) + error_cell(plan) for plan in plans]),
        *((cut(name, WIDEST // 3), [metric_cell(plan, m) for plan in plans]) for name, m in front.metrics.items()),
        ("worst part", parts if names_parts else []),
        ("FP16+BF16/32" if has_bf16 else "FP16/32", [group_counts(plan.plan) for plan in plans]),
        ("memory", list(map(memory_text, plans))),
        ("FP32 because", [because(front, plan, 2) for plan in plans]),
    ]
    columns = [(head, cells) for head, cells in columns if not head or set(cells) - {"", "-"}]
    origins = [row.name for row in rows]
    for dropped in ("", *_DROPPED):
        if dropped:
            columns = [column for column in columns if column[0] != dropped]
        used = sum(max(map(len, (head, *cells))) + len("  ") for head, cells in columns)
        if used + max(map(len, ("origin", *origins))) <= width:
            break
    room = max(width - used, len("origin"))
    columns.append(("origin", [textwrap.shorten(name, room, placeholder="...") for name in origins]))
    # A table that is wider than the terminal is not cut: each line says something different.
    whole = used + max(map(len, ("origin", *columns[-1][1])))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", width=whole)
    for head, _ in columns:
        table.add_column(Text(printable(head)), justify="left" if head in _TEXTS else "right", no_wrap=True)
    for row, cells in zip(rows, zip(*(cells for _, cells in columns), strict=True), strict=True):
        style = "bold green" if row.is_chosen else "" if row.on_front else "dim"
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return table


def _mark(front: Front, plan: Evaluation) -> str:
    """``*`` before an error of the search samples in a column of held-out errors."""
    return "*" if plan.held_out is None and plan.is_finite and is_held_out(front) else ""


def table_notes(front: Front, rows: Sequence[Row], more: str = "") -> str:
    """What the marks in the table mean, and how many rows it leaves out, with ``more`` behind their count."""
    plans = [row.evaluation for row in rows]
    cells = (*map(error_cell, plans), *(metric_cell(plan, m) for plan in plans for m in front.metrics.values()))
    left = len(front_rows(front)) - len(rows)
    notes = [
        ("> chosen", any(row.is_chosen for row in rows)),
        ("- not on the front", any(not row.on_front and not row.is_chosen for row in rows)),
        ("* of the search samples", any(_mark(front, plan) for plan in plans)),
        ("in brackets: on the search samples", any("(" in cell for cell in cells)),
        (f"{left} more rows{more}", left > 0),
    ]
    texts = [text for text, holds in notes if holds]
    return "" if texts == ["> chosen"] else "; ".join(texts)


def front_text(front: Front) -> str:
    """What ``print(front)`` and a notebook show: what was searched, the table, the choice; under 2,000 characters."""
    rows = shown_rows(front_rows(front))
    failed = f", {front.failures} failed" if front.failures else ""
    samples = " on held-out samples" if is_held_out(front) else ""
    stream = io.StringIO()
    console = Console(file=stream, width=_WIDTH, no_color=True, highlight=False, force_terminal=False)
    console.print(front_table(front, rows, _WIDTH), crop=False)
    plan = "none" if front.chosen is None else front.chosen.plan.fingerprint
    lines = (
        f"Front of {cut(front.model_path.name)} on {cut(front.target)}: {len(front.points)} points from"
        f" {front.evaluations} plans{failed}",
        f"latency {front.fp32.latency.source} ({cut(front.engine)}, {cut(front.device)}), error: {cut(front.metric)}"
        f"{samples}",
        *map(str.rstrip, stream.getvalue().splitlines()),
        table_notes(front, rows),
        f"chosen: {plan}, {cut(front.chosen_reason, 2 * WIDEST)}",
    )
    return "\n".join(printable(line) for line in lines if line)
