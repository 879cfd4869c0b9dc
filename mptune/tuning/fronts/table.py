"""A Front as rows: records, and the one table that terminals, Python and notebooks show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mptune.data.metrics.paired import is_compared_by_ratio
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.printable import WIDEST, cut, printable
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import reason_counts
from mptune.tuning.fronts.content import FrontContent
from mptune.tuning.fronts.dominance import LEAST_EXACTER, faster_beyond_noise, shared_errors
from mptune.tuning.fronts.limits import error_cell, format_error, is_larger_in_search, metric_cell, metric_values

MOST_ROWS = 12
"""A longer front is shown by this many of its rows: the ends, the baselines, the choice, and an even spread."""

_FP32_ROUNDING = 1e-6
"""A ratio to an error below this says nothing."""

_WIDTH = 100
"""Of the table where it is no terminal that shows it."""
_GAP = "  "
_BECAUSE = "FP32 because"
_FEW_REASONS = 2
"""Reasons that are named where there is no room for all of them."""


def format_ms(value: float, noise_ms: float = 0.0) -> str:
    """Milliseconds without the unit, to the microsecond, finer under 0.1 ms and coarser from 100 ms on.

    The last digit is worth no less than a tenth of the noise, half of the 95 % interval: 5.912 +- 0.83 is 5.9.
    """
    if not math.isfinite(value):
        return "-"
    return f"{value:.{_decimals(noise_ms, 5 if value < 0.1 else 3 if value < 100 else 1)}f}"


def _decimals(noise: float, most: int) -> int:
    return min(most, max(0, math.ceil(-math.log10(noise)))) if 0 < noise < math.inf else most


def noise_ms(evaluation: Evaluation) -> float:
    """Half of the 95 % interval of a measured median; 0 of one that is predicted, or whose interval is not known."""
    low, high = evaluation.latency.ci95_ms
    return (high - low) / 2 if evaluation.latency.source == "measured" and math.isfinite(high - low) else 0.0


def format_interval(evaluation: Evaluation) -> str:
    """Half the width of the 95 % interval of a measured median, in percent; empty for a predicted one."""
    noise, median_ms = noise_ms(evaluation), evaluation.latency.median_ms
    return f"+-{100 * noise / median_ms:.1f}%" if noise > 0 and median_ms > 0 else ""


def latency_text(evaluation: Evaluation) -> str:
    """The median in milliseconds, with the digits that its noise supports."""
    return format_ms(evaluation.latency.median_ms, noise_ms(evaluation))


def speedup_of(evaluation: Evaluation, fp32: Evaluation | None = None) -> str:
    """The speedup against all-FP32, with the digits that the noise of both supports; that of all-FP32 is exact."""
    if fp32 is not None and evaluation.plan == fp32.plan:
        return format_speedup(evaluation.speedup)
    evaluations = (evaluation, *(() if fp32 is None else (fp32,)))
    shares = [noise_ms(each) / each.latency.median_ms for each in evaluations if each.latency.median_ms > 0]
    return format_speedup(evaluation.speedup, evaluation.speedup * math.hypot(*shares))


def compared(evaluation: Evaluation, chosen: Evaluation) -> str:
    """What a plan gives instead of the chosen one, such as ``0.31 ms less (12 %), error 48 times larger``."""
    delta_ms = evaluation.latency.median_ms - chosen.latency.median_ms
    if faster_beyond_noise(evaluation, chosen) or faster_beyond_noise(chosen, evaluation):
        amount = format_ms(abs(delta_ms), math.hypot(noise_ms(evaluation), noise_ms(chosen)))
        share = abs(delta_ms) / chosen.latency.median_ms if chosen.latency.median_ms > 0 else math.inf
        latency = f"{amount} ms {'less' if delta_ms < 0 else 'more'} ({two_digits(100 * share)} %)"
    else:
        latency = "the same latency" + (" within noise" if evaluation.latency.source == "measured" else "")
    if not evaluation.is_finite:
        return f"{latency}, outputs not finite"
    return f"{latency}, {error_change(*shared_errors(chosen, evaluation), evaluation.metric)}"


def error_change(before: float, after: float, metric: str) -> str:
    """How an error changes, such as ``error 48 times larger`` or ``error from 0 to 3.1e-04``."""
    if before == after:
        return "the same error"
    low, high = sorted((before, after))
    if not is_compared_by_ratio(metric) or low < _FP32_ROUNDING:
        return f"error from {format_error(before)} to {format_error(after)}"
    if high < LEAST_EXACTER * low:
        return "the same error within 10 %"
    return f"error {two_digits(high / low)} times {'larger' if before < after else 'smaller'}"


def two_digits(value: float) -> str:
    """A number rounded to two digits, without an exponent where it is short."""
    return f"{float(f'{value:.2g}'):g}"


def because(front: FrontContent, evaluation: Evaluation, most: int | None = None) -> str:
    """Why a plan's FP32 groups are FP32, as ``reason_counts``; all-FP32 is the baseline, and needs no reason."""
    is_baseline = evaluation.plan == front.fp32.plan
    return "" if is_baseline else reason_counts(front.explanation.of(evaluation.plan.fingerprint), most)


def format_speedup(value: float, noise: float = 0.0) -> str:
    """A ratio of latencies, such as ``2.31x``; ``noise`` as of ``format_ms``."""
    return f"{value:.{_decimals(noise, 2)}f}x" if math.isfinite(value) else "-"


def format_bytes(value: int | None) -> str:
    """Bytes in MB (10^6) or GB; ``-`` where they are not known."""
    if value is None:
        return "-"
    return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"


def memory_text(evaluation: Evaluation) -> str:
    """What a plan's engine takes; ``~`` before it where the context is predicted."""
    memory = evaluation.memory
    if memory is None:
        return "-"
    return ("~" if memory.source == "predicted" else "") + format_bytes(memory.total_bytes)


def memory_details(evaluation: Evaluation) -> str:
    """The parts of ``memory_text``, with their source."""
    memory = evaluation.memory
    if memory is None:
        return "not known"
    parts = (("engine", memory.engine_bytes), ("context", memory.context_bytes), ("weights", memory.weight_bytes))
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in parts) + f" ({memory.source})"


def group_counts(plan: PrecisionPlan) -> str:
    """FP16 groups / FP32 groups; with BF16 groups FP16+BF16/FP32, likewise with others."""
    others = (count for precision, count in plan.reduced_counts.items() if precision is not Precision.FP16)
    return f"{'+'.join(map(str, (len(plan.fp16_groups), *others)))}/{len(plan.fp32_groups)}"


@dataclass(frozen=True)
class Row:
    """One line of the table; ``name`` is which baseline the plan is, or who proposed it."""

    evaluation: Evaluation
    name: str
    is_chosen: bool
    is_baseline: bool
    on_front: bool


def part_text(evaluation: Evaluation, width: int = 24) -> str:
    """The output, or the columns of it, whose error is the plan's; empty where the metric sees all at once."""
    return "" if evaluation.part is None else cut(str(evaluation.part), width)


def has_parts(rows: Sequence[Row]) -> bool:
    """Whether it says something which part of the outputs decides."""
    parts = {row.evaluation.part for row in rows}
    return len(parts) > 1 or any(part is not None and part.columns is not None for part in parts)


def front_rows(front: FrontContent) -> tuple[Row, ...]:
    """The points of the front and both baselines, sorted by latency."""
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


def error_marks(rows: Sequence[Row], front: FrontContent) -> tuple[str, ...]:
    """Marks before errors: ``~`` emulated, ``*`` of the search samples, ``!`` larger on these than held out."""
    is_mixed = len({row.evaluation.error_source for row in front_rows(front)}) > 1
    of_held_out = is_held_out(front)
    marks = []
    for row in rows:
        plan = row.evaluation
        emulated = "~" if is_mixed and plan.error_source == "emulated" else ""
        larger = "!" if is_larger_in_search(plan) else ""
        marks.append(emulated + ("*" if of_held_out and plan.held_out is None and plan.is_finite else larger))
    return tuple(marks)


def is_held_out(front: FrontContent) -> bool:
    """Whether errors are those of the held-out samples, but for rows that were not measured again."""
    return any(row.evaluation.held_out is not None for row in front_rows(front))


def front_records(front: FrontContent) -> list[dict[str, Any]]:
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


def shown_rows(rows: tuple[Row, ...], wanted: Collection[PrecisionPlan] = ()) -> tuple[Row, ...]:
    """At most ``MOST_ROWS`` of the rows.

    The chosen plan, both ends of the front, the baselines and wanted plans first, then rows that lie evenly between.
    """
    if len(rows) <= MOST_ROWS:
        return rows
    points = [k for k, row in enumerate(rows) if row.on_front]
    kept = {*points[:1], *points[-1:]}
    kept |= {k for k, row in enumerate(rows) if row.is_chosen or row.is_baseline or row.evaluation.plan in wanted}
    while len(kept) < MOST_ROWS:  # the middle of the widest gap
        low, high = max(pairwise(sorted(kept)), key=lambda pair: pair[1] - pair[0])
        kept.add((low + high) // 2)
    return tuple(rows[k] for k in sorted(kept))


@dataclass(frozen=True)
class _Column:
    """A column: its head, and a cell for each row. Rank 0 is always shown; others where there is room, lowest first."""

    head: str
    cells: tuple[str, ...]
    is_number: bool = True
    rank: int = 0

    @property
    def width(self) -> int:
        return max(map(len, (self.head, *self.cells)))

    def line(self, text: str) -> str:
        return text.rjust(self.width) if self.is_number else text.ljust(self.width)


def table_lines(front: FrontContent, rows: Sequence[Row], width: int) -> list[str]:
    """The table as text: the header, then a line for each row, with as many columns as the width holds."""
    for most in (None, _FEW_REASONS):
        columns = _fitting(_columns(front, rows, most), width)
        if any(column.head == _BECAUSE for column in columns):
            break
    header = _GAP.join(column.line(column.head) for column in columns).rstrip()
    lines = (_GAP.join(column.line(column.cells[k]) for column in columns).rstrip() for k in range(len(rows)))
    return [header, *lines]


def table_notes(front: FrontContent, rows: Sequence[Row], more: str = "") -> str:
    """What the marks in the table mean, and how many rows it leaves out, with ``more`` behind their count."""
    notes = ["- not on the front"] if any(not row.on_front and not row.is_chosen for row in rows) else []
    shown = "".join(error_marks(rows, front))
    meanings = ("~ emulated", "* of the search samples", "! larger on the search samples")
    notes += [text for text in meanings if text[0] in shown]
    plans = [row.evaluation for row in rows]
    cells = (*map(error_cell, plans), *(metric_cell(plan, m) for plan in plans for m in front.metrics.values()))
    notes += ["in brackets: on the search samples"] if any("(" in cell for cell in cells) else []
    left = len(front_rows(front)) - len(rows)
    notes += [f"{left} more rows{more}"] if left else []
    return "; ".join(["> chosen", *notes] if notes and any(row.is_chosen for row in rows) else notes)


def front_text(front: FrontContent) -> str:
    """What ``print(front)`` and a notebook show: what was searched, the table, the choice; under 2,000 characters."""
    rows = shown_rows(front_rows(front))
    failed = f", {front.failures} failed" if front.failures else ""
    samples = " on held-out samples" if is_held_out(front) else ""
    plan = "none" if front.chosen is None else front.chosen.plan.fingerprint
    lines = (
        f"Front of {cut(front.model_path.name)} on {cut(front.target)}: {len(front.points)} points from"
        f" {front.evaluations} plans{failed}",
        f"latency {front.fp32.latency.source} ({cut(front.engine)}, {cut(front.device)}), error: {cut(front.metric)}"
        f"{samples}",
        *table_lines(front, rows, _WIDTH),
        table_notes(front, rows),
        f"chosen: {plan}, {cut(front.chosen_reason, 2 * WIDEST)}",
    )
    return "\n".join(printable(line) for line in lines if line)


def _columns(front: FrontContent, rows: Sequence[Row], most_reasons: int | None) -> list[_Column]:
    plans = [row.evaluation for row in rows]
    predicted = any(plan.latency.source == "predicted" for plan in plans)
    has_bf16 = any(plan.plan.bf16_groups for plan in plans)
    marks = (">" if row.is_chosen else "" if row.on_front else "-" for row in rows)
    before = error_marks(rows, front)
    errors = (mark + error_cell(plan) for mark, plan in zip(before, plans, strict=True))
    columns = [
        _Column("", tuple(marks), is_number=False),
        _Column("plan", tuple(plan.plan.fingerprint for plan in plans), is_number=False),
        _Column("pred. ms" if predicted else "ms", _latencies(plans)),
        _Column("95 %", tuple(map(format_interval, plans)), rank=3),
        _Column("speedup", tuple(speedup_of(plan, front.fp32) for plan in plans)),
        _Column("error", tuple(errors)),
        *(
            _Column(cut(name, WIDEST // 3), tuple(metric_cell(plan, m) for plan in plans))
            for name, m in front.metrics.items()
        ),
        _Column("worst part", tuple(map(part_text, plans)), is_number=False, rank=1),
        _Column("FP16+BF16/32" if has_bf16 else "FP16/32", tuple(group_counts(plan.plan) for plan in plans)),
        _Column("memory", tuple(map(memory_text, plans)), rank=4),
        _Column(_BECAUSE, tuple(because(front, plan, most_reasons) for plan in plans), is_number=False, rank=2),
        _Column("origin", tuple(row.name for row in rows), is_number=False),
    ]
    unknown = {"worst part": not has_parts(rows), "memory": all(plan.memory is None for plan in plans)}
    return [column for column in columns if not column.rank or (any(column.cells) and not unknown.get(column.head))]


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The columns that the width holds: those of rank 0, whose last one is cut between words, then the others."""
    fixed = [column for column in columns if not column.rank]
    last = fixed[-1]
    left = max(width - sum(column.width + len(_GAP) for column in fixed[:-1]), len(last.head))
    last = _Column(
        last.head, tuple(textwrap.shorten(cell, left, placeholder="...") for cell in last.cells), is_number=False
    )
    left -= last.width
    shown = {}
    for column in sorted((column for column in columns if column.rank), key=lambda column: column.rank):
        if column.width + len(_GAP) <= left:
            shown[column.head] = column
            left -= column.width + len(_GAP)
    return [*(column for column in columns[:-1] if not column.rank or column.head in shown), last]


def _latencies(plans: Sequence[Evaluation]) -> tuple[str, ...]:
    """Of each plan, the decimal points below each other."""
    texts = list(map(latency_text, plans))
    decimals = [len(text) - len(text.partition(".")[0]) for text in texts]
    return tuple(text + " " * (max(decimals) - count) for text, count in zip(texts, decimals, strict=True))
