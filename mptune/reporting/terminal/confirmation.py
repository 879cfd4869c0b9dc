"""A confirmation on the terminal: the search's figures, the device's, and whether the rankings agree."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, TextIO

from mptune.reporting.terminal.console import make_console, print_facts, print_table, print_text
from mptune.reporting.terminal.front import model_fact, print_answer, print_warnings
from mptune.reporting.text import (
    confirmation_rows,
    describe_engine,
    error_source,
    latency_source,
    sources_before,
    verdicts,
)
from mptune.tuning.fronts.texts import format_interval, metric_cell

if TYPE_CHECKING:
    from mptune.tuning.confirmation import Confirmation

_STYLES = {"chosen": "bold green", "front": "", "failed": "red", "": "dim"}


def print_confirmation(
    confirmation: Confirmation, stream: TextIO | None = None, *, warned: Collection[str] = ()
) -> None:
    """Print a confirmation: the table of both, Kendall's tau, the verdict in words, warnings, and the answer.

    Warnings in ``warned`` have been printed before.
    """
    console = make_console(stream)
    front, searched = confirmation.front, confirmation.searched
    facts = [
        model_fact(front),
        ("searched", f"{searched.name}, latency {searched.latency_source}, error {searched.error_source}"),
        ("device", describe_engine(front)),
        ("latency", latency_source(front)),
        ("error", error_source(front)),
    ]
    print_facts(console, facts)
    console.print()
    latency, error = ({"predicted": "pred.", "emulated": "emul."}.get(w, w) for w in sources_before(confirmation))
    figures = (f"{latency} ms", "ms", "95 %", f"{latency} x", "x", f"{error} err", "err")
    records, rows = confirmation_rows(confirmation), []
    for plan, record in zip(confirmation.plans, records, strict=True):
        cells = [record[key] for key in ("plan", "ms", "measured ms")]
        cells.append("" if plan.measured is None else format_interval(plan.measured))
        cells += [record[key].removesuffix("x") for key in ("speedup", "measured speedup")]
        cells += [record[key] for key in ("error", "measured error")]
        metrics = front.metrics.values()
        cells += ["-" if plan.measured is None else metric_cell(plan.measured, metric) for metric in metrics]
        rows.append((*cells, record["became"], record["origin"]))
    print_table(
        console,
        ("plan", *figures, *front.metrics, "", "origin"),
        rows,
        right=(*figures, *front.metrics),
        optional=("95 %", f"{latency} x"),
        shorten=("origin",),
        styles=[_STYLES[record["became"]] for record in records],
        header_style="bold",
    )
    if any("(" in cell for row in rows for cell in row[:-1]):
        print_text(console, "in brackets: on the search samples", "dim")
    console.print()
    for plan, record in zip(confirmation.plans, records, strict=True):
        if plan.measured is None:
            print_text(console, f"failed: {record['plan']} ({record['origin']}): {plan.failure}")
    for line in verdicts(confirmation):
        print_text(console, line)
    console.print()
    print_warnings(console, front, warned)
    print_answer(console, front)
