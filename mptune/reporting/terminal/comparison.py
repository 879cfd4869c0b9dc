"""``mptune compare`` on the terminal: the verdict, what makes the difference, and the figures of each output."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from mptune.finding import OutputColumns
from mptune.reporting.terminal.console import (
    SEVERITY_STYLES,
    make_console,
    print_facts,
    print_table,
    print_text,
    styled,
)

if TYPE_CHECKING:
    from mptune.diagnosis.comparison import Comparison

_FIGURES = {"judged": "error", "limit": "limit", "judged_fp16": "FP16 throughout, emulated"}
"""Statistic in the unit of the limit -> its title."""


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print a comparison; to stdout by default."""
    console = make_console(stream)
    style = "green" if comparison.agrees else "bold red"
    console.print(styled(("verdict    ", "dim"), (comparison.verdict, style)))
    print_facts(console, [(name, getattr(comparison, name)) for name in ("reference", "candidate", "samples")])
    console.print()
    for finding in comparison.findings:
        heading = (f"{finding.severity}: {finding.code}  ", SEVERITY_STYLES[finding.severity])
        print_text(console, styled(heading, finding.text))
        if finding.cure:
            print_text(console, finding.cure, indent=2)
    if comparison.findings:
        console.print()
    shown = [key for key in _FIGURES if all(key in by for by in comparison.outputs.values())]
    rows = []
    for name, statistics in comparison.outputs.items():
        limit = comparison.limits[name]
        part = str(OutputColumns(name, limit.columns))  # the part that is worst against its limit
        judged = [limit.text(statistics[key]) for key in shown]
        rows.append((part, *judged, f"{statistics['largest_difference']:.3g}"))
    titles = (*(_FIGURES[key] for key in shown), "largest difference")
    print_table(console, ("output", *titles), rows, right=titles, fold="output")
    for text in comparison.warnings:
        print_text(console, f"warning: {text}", "yellow")
