"""``mptune compare`` on the terminal: the verdict, what makes the difference, and the figures of each output."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from mptune.finding import OutputColumns
from mptune.reporting.terminal.console import SEVERITY_STYLES, make_console, print_fact, print_text

if TYPE_CHECKING:
    from mptune.diagnosis.comparison import Comparison

_FIGURES = {
    "judged": "error",
    "limit": "limit",
    "judged_fp16": "FP16 throughout, emulated",
    "largest_difference": "largest difference",
}
"""Statistic -> its title; all but the last are in the unit of the limit."""


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print a comparison; to stdout by default."""
    console = make_console(stream)
    style = "green" if comparison.agrees else "bold red"
    console.print(Text.assemble(("verdict    ", "dim"), (comparison.verdict, style)))
    for name in ("reference", "candidate", "samples"):
        print_fact(console, name, str(getattr(comparison, name)), 11)
    console.print()
    for finding in comparison.findings:
        heading = (f"{finding.severity}: {finding.code}  ", SEVERITY_STYLES[finding.severity])
        print_text(console, Text.assemble(heading, finding.text))
        if finding.cure:
            print_text(console, finding.cure, indent=2)
    if comparison.findings:
        console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("output", overflow="fold")
    shown = [key for key in _FIGURES if all(key in by for by in comparison.outputs.values())]
    for key in shown:
        table.add_column(_FIGURES[key], justify="right")
    for name, statistics in comparison.outputs.items():
        limit = comparison.limits[name]
        *judged, largest = (statistics[key] for key in shown)
        part = str(OutputColumns(name, limit.columns))  # the part that is worst against its limit
        table.add_row(part, *map(limit.text, judged), f"{largest:.3g}")
    console.print(table)
    for text in comparison.warnings:
        print_text(console, f"warning: {text}", "yellow")
