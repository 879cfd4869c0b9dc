"""A Front as rows, and as the short table that Python and notebooks print."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mptune.data.metrics.paired import is_compared_by_ratio
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.printable import WIDEST, cut, printable
from mptune.printable import printable_html as escape
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import reason_counts
from mptune.tuning.fronts.content import FrontContent
from mptune.tuning.fronts.dominance import LEAST_EXACTER, faster_beyond_noise, shared_errors
from mptune.tuning.fronts.limits import error_cell, format_error, is_larger_in_search, metric_cell, metric_values

MOST_ROWS = 12
"""A longer front is shown by this many of its rows: the ends, the baselines, the choice, and an even spread."""

_FP32_ROUNDING = 1e-6
"""A ratio to an error below this says nothing."""

_HEADER = ("", "plan", "ms", "speedup", "error", "FP16/32", "origin")


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
    """One line of the table; marks are any of chosen, all-FP32, all-FP16, not on the front, and not finite."""

    evaluation: Evaluation
    marks: tuple[str, ...]
    on_front: bool
    fp16_name: str = "all-FP16"

    @property
    def is_chosen(self) -> bool:
        """Whether this is the plan in ``chosen/``."""
        return "chosen" in self.marks

    @property
    def is_baseline(self) -> bool:
        """Whether this is all-FP32 or all-FP16."""
        return "all-FP32" in self.marks or "all-FP16" in self.marks

    @property
    def name(self) -> str:
        """Which baseline this is, or who proposed the plan."""
        if "all-FP32" in self.marks:
            return "all-FP32"
        return self.fp16_name if "all-FP16" in self.marks else self.evaluation.origin.label

    @property
    def note(self) -> str:
        """Who proposed the plan, and what else there is to say about it."""
        words = ["all-FP32"] if "all-FP32" in self.marks else []
        words += [self.fp16_name] if "all-FP16" in self.marks else []
        others = [mark for mark in self.marks if mark in ("not finite", "not on the front")]
        return ", ".join([*(words or [self.evaluation.origin.label]), *others])


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
    rows = []
    for plan, evaluation in by_plan.items():
        marks = []
        if front.chosen is not None and plan == front.chosen.plan:
            marks.append("chosen")
        if plan == front.fp32.plan:
            marks.append("all-FP32")
        if front.fp16 is not None and plan == front.fp16.plan:
            marks.append("all-FP16")
        if not evaluation.is_finite:
            marks.append("not finite")
        elif plan not in on_front:
            marks.append("not on the front")
        rows.append(Row(evaluation, tuple(marks), plan in on_front, front.fp16_name))
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


def front_text(front: FrontContent) -> str:
    """A few lines for ``repr``: what was searched, the table, the choice; under 2,000 characters."""
    shown, left = shown_rows(front_rows(front))
    marks = error_marks(shown, front)
    cells = [_header(front), *(_cells(front, row, mark) for row, mark in zip(shown, marks, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(_justify(line, widths)).rstrip() for line in cells]
    lines = (*_facts(front), *table, *_rest(left, marks), f"chosen: {_chosen(front)}")
    return "\n".join(map(printable, lines))


def front_html(front: FrontContent) -> str:
    """The front as an HTML table, for notebooks. The chosen row is bold."""
    shown, left = shown_rows(front_rows(front))
    head = "".join(f"<th>{escape(name)}</th>" for name in _header(front))
    body = []
    marks = error_marks(shown, front)
    for row, mark in zip(shown, marks, strict=True):
        style = "font-weight: bold" if row.is_chosen else "" if row.on_front else "opacity: 0.6"
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(front, row, mark))
        body.append(f'<tr style="{style}">{cells}</tr>')
    lines = "".join(f"<div>{escape(text)}</div>" for text in _facts(front))
    last = "".join(f"<div>{escape(text)}</div>" for text in (*_rest(left, marks), f"chosen: {_chosen(front)}"))
    return f"<div>{lines}<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{last}</div>"


def front_records(front: FrontContent) -> list[dict[str, Any]]:
    """The rows as dictionaries, for ``Front.to_dataframe``: one per point, and the baselines.

    Each metric's own value stands under its name, and that on the held-out samples under ``held_out_NAME``.
    """
    roles = {beside.evaluation.plan: beside.role for beside in front.neighbours}
    records: list[dict[str, Any]] = [
        {
            "plan": row.evaluation.plan.fingerprint,
            "latency_ms": row.evaluation.latency.median_ms,
            "p99_ms": row.evaluation.latency.p99_ms,
            "speedup": row.evaluation.speedup,
            "error": row.evaluation.error_value,
            "part": part_text(row.evaluation, WIDEST) or None,
            "held_out_error": row.evaluation.held_out_value,
            "fp16_groups": len(row.evaluation.plan.fp16_groups),
            "bf16_groups": len(row.evaluation.plan.bf16_groups),
            "fp32_groups": len(row.evaluation.plan.fp32_groups),
            "memory_bytes": None if row.evaluation.memory is None else row.evaluation.memory.total_bytes,
            "origin": str(row.evaluation.origin),
            "latency_source": row.evaluation.latency.source,
            "error_source": row.evaluation.error_source,
            "remeasured": row.evaluation.remeasured,
            "confirmed": row.evaluation.confirmed,
            "fp32_because": because(front, row.evaluation),
            "neighbour": roles.get(row.evaluation.plan, ""),
            "on_front": row.on_front,
            "chosen": row.is_chosen,
        }
        for row in front_rows(front)
    ]
    for record, row in zip(records, front_rows(front), strict=True):
        for name, metric in front.metrics.items():
            column = metric if name in record or f"held_out_{name}" in record else name
            record[column], record[f"held_out_{column}"] = metric_values(row.evaluation, metric)
    return records


def shown_rows(rows: Sequence[Row], wanted: Collection[PrecisionPlan] = ()) -> tuple[Sequence[Row], int]:
    """At most ``MOST_ROWS`` of the rows, and how many are left out.

    The chosen plan, both ends of the front, the baselines and wanted plans first, then rows that lie evenly between.
    """
    if len(rows) <= MOST_ROWS:
        return rows, 0
    points = [k for k, row in enumerate(rows) if row.on_front]
    kept = {*points[:1], *points[-1:]}
    kept |= {k for k, row in enumerate(rows) if row.is_chosen or row.is_baseline or row.evaluation.plan in wanted}
    while len(kept) < MOST_ROWS:  # the middle of the widest gap
        low, high = max(pairwise(sorted(kept)), key=lambda pair: pair[1] - pair[0])
        kept.add((low + high) // 2)
    return [rows[k] for k in sorted(kept)], len(rows) - len(kept)


def _facts(front: FrontContent) -> tuple[str, str]:
    source = front.fp32.latency.source
    failed = f", {front.failures} failed" if front.failures else ""
    samples = " on held-out samples" if is_held_out(front) else ""
    return (
        f"Front of {cut(front.model_path.name)} on {cut(front.target)}: {len(front.points)} points from"
        f" {front.evaluations} plans{failed}",
        f"latency {source} ({cut(front.engine)}, {cut(front.device)}), error: {cut(front.metric)}{samples}",
    )


def _rest(left: int, marks: Sequence[str]) -> tuple[str, ...]:
    """How many rows are not shown, and what the marks before errors mean."""
    notes = mark_notes(marks)
    return (*((f"... and {left} more",) if left else ()), *(("; ".join(notes),) if notes else ()))


def mark_notes(marks: Sequence[str]) -> list[str]:
    """What the marks before errors mean."""
    shown = "".join(marks)
    every = ("~ emulated", "* of the search samples", "! larger on the search samples")
    return [text for text in every if text[0] in shown]


def _chosen(front: FrontContent) -> str:
    plan = "none" if front.chosen is None else front.chosen.plan.fingerprint
    if front.chosen is not None and has_parts(front_rows(front)):
        plan += f" (worst part: {part_text(front.chosen)})"
    return f"{plan}, {cut(front.chosen_reason, 2 * WIDEST)}"


def _header(front: FrontContent) -> tuple[str, ...]:
    predicted = front.fp32.latency.source == "predicted"
    names = ("pred. ms" if name == "ms" and predicted else name for name in _HEADER)
    return (*names, *(cut(name, WIDEST // 3) for name in front.metrics))


def _cells(front: FrontContent, row: Row, mark: str) -> tuple[str, ...]:
    evaluation = row.evaluation
    return (
        ">" if row.is_chosen else "",
        evaluation.plan.fingerprint,
        latency_text(evaluation),
        speedup_of(evaluation, front.fp32),
        mark + error_cell(evaluation),
        group_counts(evaluation.plan),
        cut(row.note, WIDEST // 2),
        *(metric_cell(evaluation, metric) for metric in front.metrics.values()),
    )


def _justify(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Numbers to the right, words to the left."""
    words = {0, 1, len(_HEADER) - 1}
    return [
        text.ljust(width) if column in words else text.rjust(width)
        for column, (text, width) in enumerate(zip(line, widths, strict=True))
    ]
