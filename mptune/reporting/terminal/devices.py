"""One plan on several devices, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from mptune.reporting.terminal.console import make_console, plain_table, print_text
from mptune.tuning.fronts.limits import format_error

if TYPE_CHECKING:
    from mptune.tuning.runs.devices import DeviceFigures


def print_devices(rows: Sequence[DeviceFigures], stream: TextIO | None = None) -> None:
    """Print a row for each device, and what the figures do not show."""
    console = make_console(stream)
    for plan in dict.fromkeys(row.plan for row in rows):
        print_text(console, f"plan {plan}", "bold")
        table = plain_table(("from", "ms", "", "error", "", "device"), ("ms", "error"))
        for row in (row for row in rows if row.plan == plan):
            figures = (f"{row.latency_ms:.4g}", row.latency_source, format_error(row.error), row.error_source)
            table.add_row(*map(Text, (row.origin, *figures, f"{row.device}, {row.engine}")))
        for column in table.columns[:-1]:  # The device gives way on a narrow terminal.
            column.min_width = max(len(str(cell)) for cell in column.cells)
        table.columns[-1].overflow = "fold"
        console.print(table)
    for row in rows:
        if row.samples is not None:
            text = f"{row.origin}: {row.metric} on {row.samples} samples"
            if row.is_plan is not True:
                state = "is not what the plan says" if row.is_plan is False else "was not held against the plan"
                text += f"; the engine {state}: its figures are not the plan's"
            print_text(console, text, "dim" if row.is_plan else "yellow")
