"""The table of a front: one line a plan, as many columns as the width holds, no word cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from mptune.reporting.text import (
    because,
    error_cell,
    format_interval,
    format_ms,
    front_rows,
    group_counts,
    latency_text,
    memory_text,
    metric_cell,
    speedup_of,
)
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front, knee
from mptune.tuning.fronts.table import Row, error_marks, has_parts, mark_notes, part_text, shown_rows

_GAP = "  "
_MOST_DIGITS = 6

_BECAUSE = "FP32 because"
_FEW_REASONS = 2
"""So many are named where all of them have no room."""


@dataclass(frozen=True)
class _Column:
    """A column: its head and its cells.

    Attributes:
        head: its name.
        cells: a text for each row.
        is_number: stands at the right.
        rank: 0 is always shown; others where there is room, the lowest first.
    """

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
    """Print the front: a dozen rows, or all of them, then what their marks mean.

    Args:
        console: where to print.
        front: the front.
        every: all rows; in a terminal the header comes again on each screen.
    """
    rows, left = front_rows(front), 0
    if not every:
        middle = knee(front.points)
        shown, left = shown_rows(rows, () if middle is None else (middle.plan,))
        rows = tuple(shown)
    for most in (None, _FEW_REASONS):
        columns = _fitting(_columns(front, rows, most), console.width)
        if any(column.head == _BECAUSE for column in columns):
            break
    header = Text(_GAP.join(column.line(column.head) for column in columns).rstrip(), style="bold")
    page = max(console.height - 4, 10) if console.is_terminal else len(rows) + 1
    for place, row in enumerate(rows):
        if place % page == 0:
            console.print(header, soft_wrap=True)
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
        _Column("pred. ms" if predicted else "ms", _latencies(plans, predicted=predicted)),
        _Column("95 %", tuple(map(format_interval, plans)), rank=3),
        _Column("speedup", tuple(speedup_of(plan, front.fp32) for plan in plans)),
        _Column("error", tuple(errors)),
        *(_Column(name, tuple(metric_cell(plan, one) for plan in plans)) for name, one in front.metrics.items()),
        _Column("worst part", tuple(map(part_text, plans)), is_number=False, rank=1),
        _Column("FP16+BF16/32" if has_bf16 else "FP16/32", tuple(group_counts(plan.plan) for plan in plans)),
        _Column("memory", tuple(map(memory_text, plans)), rank=4),
        _Column(_BECAUSE, tuple(because(front, row.evaluation, most_reasons) for row in rows), is_number=False, rank=2),
        _Column("origin", tuple(row.name for row in rows), is_number=False),
    ]
    unknown = {"worst part": not has_parts(rows), "memory": all(plan.memory is None for plan in plans)}
    return [column for column in columns if not column.rank or (any(column.cells) and not unknown.get(column.head))]


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The columns that the width holds: those of rank 0, whose last one is cut between words, then the others."""
    fixed = [column for column in columns if not column.rank]
    taken = sum(column.width + len(_GAP) for column in fixed[:-1])
    last = fixed[-1]
    left = max(width - taken, len(last.head))
    last = _Column(last.head, tuple(_cut_words(cell, left) for cell in last.cells), is_number=False)
    left -= last.width
    shown = {}
    for column in sorted((column for column in columns if column.rank), key=lambda column: column.rank):
        if column.width + len(_GAP) <= left:
            shown[column.head] = column
            left -= column.width + len(_GAP)
    return [*(column for column in columns[:-1] if not column.rank or column.head in shown), last]


def _cut_words(text: str, width: int) -> str:
    """The text, or as many whole words of it as fit, with dots after them."""
    if len(text) <= width:
        return text
    words = text[: max(0, width - 2)].split(" ")
    whole = " ".join(words[:-1] or [text[: max(0, width - 3)]])
    return f"{whole}..."


def _latencies(plans: Sequence[Evaluation], *, predicted: bool) -> tuple[str, ...]:
    """Of each plan, the decimal points below each other."""
    if predicted:
        return distinct_ms([plan.latency.median_ms for plan in plans])
    texts = list(map(latency_text, plans))
    most = max(len(text) - len(text.partition(".")[0]) for text in texts)
    return tuple(text + " " * (most - len(text) + len(text.partition(".")[0])) for text in texts)


def distinct_ms(values: Sequence[float]) -> tuple[str, ...]:
    """Milliseconds, with as many digits as tell different ones apart, and never fewer than anywhere else."""
    texts = list(map(format_ms, values))
    least = min((len(text.partition(".")[2]) for text in texts), default=0)
    for digits in range(least + 1, _MOST_DIGITS + 1):
        alike: dict[str, set[float]] = {}
        for value, text in zip(values, texts, strict=True):
            alike.setdefault(text, set()).add(value)
        texts = [
            f"{value:.{digits}f}" if len(alike[text]) > 1 and digits > len(text.partition(".")[2]) else text
            for value, text in zip(values, texts, strict=True)
        ]
    return tuple(texts)


def _notes(front: Front, rows: Sequence[Row], left: int) -> str:
    """What the marks mean, and how many rows are not shown."""
    notes = ["- not on the front"] if any(not row.on_front and not row.is_chosen for row in rows) else []
    notes += mark_notes(error_marks(rows, front))
    plans = [row.evaluation for row in rows]
    cells = (*map(error_cell, plans), *(metric_cell(plan, one) for plan in plans for one in front.metrics.values()))
    notes += ["in brackets: on the search samples"] if any("(" in cell for cell in cells) else []
    notes += [f"{left} more rows: --all"] if left else []
    return "; ".join(["> chosen", *notes] if notes and any(row.is_chosen for row in rows) else notes)
