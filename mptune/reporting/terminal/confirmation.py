"""A confirmation on the terminal: the search's figures, the device's, and whether the rankings agree."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, TextIO

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mptune.reporting.confirmation_text import (
    INTERVAL,
    cells_of,
    failures,
    has_two_errors,
    headings,
    place_of,
    verdicts,
)
from mptune.reporting.terminal.console import make_console, plain_table, print_fact, print_text
from mptune.reporting.terminal.front import print_breaks, print_end, written_files
from mptune.reporting.text import (
    describe_engine,
    error_source,
    error_text,
    latency_source,
    latency_text,
    short_path,
)

if TYPE_CHECKING:
    from mptune.tuning.runs.confirmation import Confirmation


WIDE = 112
"""Minimum columns for the intervals."""

_LEAST_ORIGIN = 8
_STYLES = {"chosen": "bold green", "front": "", "failed": "red", "": "dim"}


def print_confirmation(
    confirmation: Confirmation, stream: TextIO | None = None, *, warned: Collection[str] = ()
) -> None:
    """Print a confirmation: the table of both, Kendall's tau, the verdict in words, the choice, warnings and files.

    What breaks in FP16 stands first. Warnings in ``warned`` have been printed before.
    """
    console = make_console(sys.stdout if stream is None else stream)
    front, searched = confirmation.front, confirmation.searched
    print_breaks(console, front)
    facts = [
        ("model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"),
        ("searched", f"{searched.name}, latency {searched.latency_source}, error {searched.error_source}"),
        ("device", describe_engine(front)),
        ("latency", latency_source(front)),
        ("error", error_source(front)),
    ]
    for name, value in facts:
        print_fact(console, name, value)
    console.print()
    console.print(_table(confirmation, console.width))
    if any(has_two_errors(confirmation, plan) for plan in confirmation.plans):
        print_text(console, "in brackets: on the search samples", "dim")
    console.print()
    for line in (*failures(confirmation), *verdicts(confirmation)):
        print_text(console, line)
    console.print()
    for name, value in _outcome(confirmation):
        print_fact(console, name, value)
    print_end(console, front, warned)


def _outcome(confirmation: Confirmation) -> list[tuple[str, str]]:
    front = confirmation.front
    if front.chosen is None:
        chosen = f"none: {front.chosen_reason}"
    else:
        point = front.chosen
        chosen = f"{point.plan.fingerprint}: {latency_text(point)} ms, error {error_text(point)}; {front.chosen_reason}"
    files = [(name, path) for name, path in written_files(front) if name != "try it"]
    another = f"mptune pick {short_path(front.run_dir)} with a limit, --knee or --plan ID"
    return [("chosen", chosen), *files, ("another", another)]


def _table(confirmation: Confirmation, width: int) -> Table:
    shown = [name for name in headings(confirmation) if name != INTERVAL or width >= WIDE]
    lines = []
    for plan in confirmation.plans:
        name, figures, origin = cells_of(confirmation, plan)
        numbers = dict(zip(headings(confirmation), figures, strict=True))
        lines.append(([name, *(numbers[head] for head in shown), place_of(confirmation, plan)], origin))
    heads = ["plan", *shown, ""]
    widths = [max(len(head), *(len(cells[k]) for cells, _ in lines)) for k, head in enumerate(heads)]
    left = max(_LEAST_ORIGIN, width - sum(widths) - 2 * len(widths) - 1)
    table = plain_table((*heads, "origin"), shown)
    for column, column_width in zip(table.columns, widths, strict=False):
        column.min_width = column_width
    for cells, origin in lines:
        last = Text(origin)
        last.truncate(left, overflow="ellipsis")
        table.add_row(*map(escape, cells), last, style=_STYLES[cells[-1]])
    return table
