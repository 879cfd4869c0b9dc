"""A confirmation on the terminal: the search's figures, the device's, and whether the rankings agree."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from mptune.reporting.confirmation_text import place_of, sources_before, verdicts
from mptune.reporting.terminal.console import make_console, plain_table, print_text, room_beside
from mptune.reporting.terminal.front import model_fact, print_answer, print_facts, print_warnings
from mptune.reporting.text import describe_engine, error_source, latency_source
from mptune.tuning.fronts.texts import error_cell, format_interval, format_speedup, latency_text, metric_cell

if TYPE_CHECKING:
    from mptune.tuning.confirmation import Confirmation


WIDE = 112
"""Minimum columns for the intervals."""

_LEAST_ORIGIN = 8
_STYLES = {"chosen": "bold green", "front": "", "failed": "red", "": "dim"}


def print_confirmation(
    confirmation: Confirmation, stream: TextIO | None = None, *, warned: Collection[str] = ()
) -> None:
    """Print a confirmation: the table of both, Kendall's tau, the verdict in words, warnings, and the answer.

    Warnings in ``warned`` have been printed before.
    """
    console = make_console(stream)
    front, searched = confirmation.front, confirmation.searched
    print_facts(
        console,
        [
            model_fact(front),
            ("searched", f"{searched.name}, latency {searched.latency_source}, error {searched.error_source}"),
            ("device", describe_engine(front)),
            ("latency", latency_source(front)),
            ("error", error_source(front)),
        ],
    )
    console.print()
    table, has_two_errors = _table(confirmation, console.width)
    console.print(table)
    if has_two_errors:
        print_text(console, "in brackets: on the search samples", "dim")
    console.print()
    for plan in confirmation.plans:
        if plan.measured is None:
            name, origin = plan.searched.plan.fingerprint, plan.searched.origin.label
            print_text(console, f"failed: {name} ({origin}): {plan.failure}")
    for line in verdicts(confirmation):
        print_text(console, line)
    console.print()
    print_warnings(console, front, warned)
    print_answer(console, front)


def _table(confirmation: Confirmation, width: int) -> tuple[Table, bool]:
    """Both figures of every plan; and whether a figure stands beside that of the search samples, in brackets."""
    front = confirmation.front
    latency, error = ({"predicted": "pred.", "emulated": "emul."}.get(w, w) for w in sources_before(confirmation))
    interval = ["95 %"] if width >= WIDE else []
    figures = [f"{latency} ms", "meas. ms", *interval, f"{latency} x", "meas. x", f"{error} err", "meas. err"]
    heads = ("plan", *figures, *front.metrics, "")
    rows = []
    for plan in confirmation.plans:
        seen, now = plan.searched, plan.measured
        rows.append(
            (
                seen.plan.fingerprint,
                latency_text(seen),
                "-" if now is None else latency_text(now),
                *("" if now is None else format_interval(now) for _ in interval),
                format_speedup(seen.speedup).removesuffix("x"),
                "-" if now is None else format_speedup(now.speedup).removesuffix("x"),
                error_cell(seen),
                "-" if now is None or now.held_out is None else error_cell(now),
                *("-" if now is None else metric_cell(now, metric) for metric in front.metrics.values()),
                place_of(confirmation, plan),
            )
        )
    table = plain_table((*heads, "origin"), heads[1:-1])
    for column, cells in zip(table.columns, zip(heads, *rows, strict=True), strict=False):
        column.min_width = max(map(len, cells))  # only the origin is cut
    table.columns[-1].max_width = max(_LEAST_ORIGIN, room_beside(width, heads, rows))
    for plan, row in zip(confirmation.plans, rows, strict=True):
        table.add_row(*map(Text, (*row, plan.searched.origin.label)), style=_STYLES[row[-1]])
    return table, any("(" in cell for row in rows for cell in row)
