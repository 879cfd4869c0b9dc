"""A front on the terminal: warnings, the table, and the answer: the choice, what it gains, and the files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.text import Text

from mptune.data.metrics.paired import is_compared_by_ratio
from mptune.finding import BREAKING_CODES
from mptune.findings.engine import NOTHING
from mptune.reporting.breaks import breaks_in_fp16
from mptune.reporting.terminal.console import make_console, print_fact, print_text
from mptune.reporting.text import (
    KEPT_BECAUSE,
    format_interval,
    front_warnings,
    shell_path,
    short_path,
    speedup_text,
    unique,
)
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front, knee
from mptune.tuning.fronts.limits import error_cell, error_text, metric_cell
from mptune.tuning.fronts.table import (
    Row,
    because,
    compared,
    error_marks,
    front_rows,
    group_counts,
    has_parts,
    latency_text,
    mark_notes,
    memory_text,
    part_text,
    shown_rows,
    speedup_of,
    two_digits,
)

_GAP = "  "
_BECAUSE = "FP32 because"
_FEW_REASONS = 2
"""Reasons that are named where there is no room for all of them."""

_MOST_BREAKS = 2
"""Places that are named; ``mptune report RUN --explain`` names all."""

_WIDTH = len("more exact ")


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


def print_table(console: Console, front: Front, *, every: bool = False) -> None:
    """Print the front: a dozen rows, or all of them, then what their marks mean."""
    rows, left = front_rows(front), 0
    if not every:
        middle = knee(front.points)
        shown, left = shown_rows(rows, () if middle is None else (middle.plan,))
        rows = tuple(shown)
    for most in (None, _FEW_REASONS):
        columns = _fitting(_columns(front, rows, most), console.width)
        if any(column.head == _BECAUSE for column in columns):
            break
    header = _GAP.join(column.line(column.head) for column in columns).rstrip()
    console.print(Text(header, style="bold"), soft_wrap=True)
    for place, row in enumerate(rows):
        line = _GAP.join(column.line(column.cells[place]) for column in columns).rstrip()
        style = "bold green" if row.is_chosen else "" if row.on_front else "dim"
        console.print(Text(line, style=style), soft_wrap=True)
    notes = _notes(front, rows, left)
    if notes:
        console.print(Text(notes, style="dim"))


def _columns(front: Front, rows: Sequence[Row], most_reasons: int | None) -> list[_Column]:
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
        *(_Column(name, tuple(metric_cell(plan, m) for plan in plans)) for name, m in front.metrics.items()),
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


def _notes(front: Front, rows: Sequence[Row], left: int) -> str:
    """What the marks mean, and how many rows are not shown."""
    notes = ["- not on the front"] if any(not row.on_front and not row.is_chosen for row in rows) else []
    notes += mark_notes(error_marks(rows, front))
    plans = [row.evaluation for row in rows]
    cells = (*map(error_cell, plans), *(metric_cell(plan, m) for plan in plans for m in front.metrics.values()))
    notes += ["in brackets: on the search samples"] if any("(" in cell for cell in cells) else []
    notes += [f"{left} more rows: --all"] if left else []
    return "; ".join(["> chosen", *notes] if notes and any(row.is_chosen for row in rows) else notes)


def print_front(
    front: Front, stream: TextIO | None = None, *, every: bool = False, warned: Collection[str] = ()
) -> None:
    """Print a front: new warnings, the table, and the answer.

    Warnings in ``warned`` have been printed before.
    """
    console = make_console(stream)
    print_warnings(console, front, warned)
    print_table(console, front, every=every)
    console.print()
    print_answer(console, front)


def print_warnings(console: Console, front: Front, warned: Collection[str]) -> None:
    """Print what a person must know and has not read yet; that nothing depends on the precisions comes first."""
    nothing = [finding.message for finding in front.findings if finding.code == NOTHING]
    new = [text for text in unique((*nothing, *front_warnings(front, BREAKING_CODES))) if text not in warned]
    for text in new:
        print_text(console, f"warning: {text}", "yellow")
    if new:
        console.print()


def print_answer(console: Console, front: Front) -> None:
    """Print the choice, what it gains, and the files; last, where no plan meets the limits, that."""
    print_facts(console, [("chosen", _chosen(front)), *_gains(front), *_breaks(front)])
    if front.chosen is not None and (reasons := because(front, front.chosen)):
        print_text(console, f"{KEPT_BECAUSE}: {reasons}")
    print_facts(console, [*_written_files(front), *_another(front)])
    print_fact(console, "details", f"mptune report {shell_path(front.run_dir)} --explain", _WIDTH)
    if not front.limits_met:
        print_text(console, f"limits not met: {front.choice.unmet}", "bold yellow")


def model_fact(front: Front) -> tuple[str, str]:
    """The model's path, and the beginning of its hash."""
    return "model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print names with a paragraph beside each."""
    for name, value in facts:
        print_fact(console, name, value, _WIDTH)


def _chosen(front: Front) -> str:
    if front.chosen is None:
        return f"none: {front.chosen_reason}"
    return f"{front.chosen.plan.fingerprint}: {front.choice.text}"


def _gains(front: Front) -> list[tuple[str, str]]:
    """How much faster than all-FP32 the chosen plan is, and how much more exact than all-FP16."""
    chosen, fp16 = front.chosen, front.fp16
    if chosen is None:
        return []
    predicted = "" if chosen.latency.source == "measured" else ", predicted"
    emulated = "" if chosen.error_source == "measured" else ", emulated"
    latency = f"{speedup_text(chosen, front.fp32)}: {latency_text(chosen)} ms"
    error = f"error {error_text(chosen)}"
    if chosen.plan != front.fp32.plan:
        latency += f", all-FP32 {latency_text(front.fp32)} ms"
    if fp16 is not None and chosen.plan != fp16.plan:
        ratio = fp16.judged_error / chosen.judged_error if chosen.judged_error > 0 else math.inf
        is_ratio = is_compared_by_ratio(front.metric) and math.isfinite(ratio) and fp16.is_finite
        error = f"{f'{two_digits(ratio)} times: ' if is_ratio else ''}{error}, {front.fp16_name} {error_text(fp16)}"
    return [("faster", latency + predicted), ("more exact", error + emulated)]


def _breaks(front: Front) -> list[tuple[str, str]]:
    """The findings about values that FP16 cannot hold, by their codes."""
    places = breaks_in_fp16(front)
    shown = [f"{place.code} ({', '.join(place.place.groups) or 'no single group'})" for place in places[:_MOST_BREAKS]]
    more = f" and {len(places) - _MOST_BREAKS} more" if len(places) > _MOST_BREAKS else ""
    return [("breaks", f"in {places[0].precision.name}: {', '.join(shown)}{more}")] if places else []


def _another(front: Front) -> list[tuple[str, str]]:
    """The command that chooses the more exact neighbour, or the faster one where there is none."""
    if not front.neighbours:
        return []
    beside = front.neighbours[-1]
    command = f"mptune pick {shell_path(front.run_dir)} --plan {beside.evaluation.plan.fingerprint}"
    return [("another", f"{beside.role}, {compared(beside.evaluation, beside.chosen)}:"), ("", command)]


_FILES = {
    "model": "chosen/model.onnx",
    "engine": "chosen/model.engine",
    "try it": "chosen/infer.py",
    "page": "report.html",
}


def _written_files(front: Front) -> list[tuple[str, str]]:
    """The files of a run that a person looks at, by what each is for; those that are there."""
    paths = ((name, front.run_dir / path) for name, path in _FILES.items())
    return [
        (name, f"python {shell_path(path)}" if name == "try it" else short_path(path))
        for name, path in paths
        if path.exists()
    ]
