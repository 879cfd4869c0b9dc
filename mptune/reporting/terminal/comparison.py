"""``mptune compare`` on the terminal: the verdict, what makes the difference, and the figures of each output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.table import Table
from rich.text import Text

from mptune.finding import OutputColumns
from mptune.reporting.terminal.console import make_console

if TYPE_CHECKING:
    from mptune.diagnosis.comparison import Comparison

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def print_comparison(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print a comparison; to stdout by default."""
    console = make_console(sys.stdout if stream is None else stream)
    whole = not console.is_terminal
    style = "green" if comparison.agrees else "bold red"
    console.print(Text.assemble(("verdict    ", "dim"), (comparison.verdict, style)))
    for name, value in (
        ("reference", comparison.reference),
        ("candidate", comparison.candidate),
        ("samples", str(comparison.samples)),
    ):
        console.print(Text.assemble((f"{name:<11}", "dim"), value), soft_wrap=whole)
    console.print()
    for finding in comparison.findings:
        heading = (f"{finding.severity}: {finding.code}  ", _STYLES[finding.severity])
        console.print(Text.assemble(heading, finding.text), soft_wrap=whole)
        if finding.cure:
            console.print(Text(f"  {finding.cure}"), soft_wrap=whole)
    if not comparison.agrees and not comparison.findings and not comparison.warnings:
        console.print(
            Text(
                "No known cause explains the difference: none of the roundings, stale rows, orders and inputs tried"
                " gives it."
            ),
            soft_wrap=whole,
        )
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("output", overflow="fold")
    for column in ("error", "limit", "FP16 throughout, emulated", "largest difference"):
        table.add_column(column, justify="right")
    for name, statistics in comparison.outputs.items():
        limit = comparison.limits[name]
        figures = (limit.text(statistics[key]) for key in ("judged", "limit", "judged_fp16"))
        table.add_row(str(OutputColumns(name, limit.columns)), *figures, f"{statistics['largest_difference']:.3g}")
    console.print(table)
    for text in comparison.warnings:
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=whole)
