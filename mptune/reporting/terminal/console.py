"""The rich consoles that everything is printed on, and the paragraphs and tables that it is made of.

Names of models and runs may hold any character: what is printed here is made printable (``mptune.printable``).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mptune.printable import printable
from mptune.reporting.text import cut_middle

PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask."""

FACT_WIDTH = len("more exact ")
"""Of the names that stand before facts."""

SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}

_LEAST = 12
"""Columns that a text keeps that is shortened."""

_GAP = 2


class _OurConsole(Console):
    def on_broken_pipe(self) -> None:
        """Pass the ``BrokenPipeError`` on that is being handled: the command line knows what it means."""
        self.quiet = True
        raise


def make_console(stream: TextIO | None = None) -> Console:
    """A console, by default on stdout, that keeps within the terminal, and within 100 columns where there is none.

    ``NO_COLOR`` and ``COLUMNS`` are honoured by rich itself. A reader that leaves is a ``BrokenPipeError``.
    """
    stream = stream or sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    return _OurConsole(file=stream, width=width, highlight=False, soft_wrap=False)


def styled(*parts: tuple[str, str] | str) -> Text:
    """A line of texts, each alone or with its style."""
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(text), style) for text, style in pairs))


def print_text(console: Console, text: str | Text, style: str = "", indent: int = 0) -> None:
    """A paragraph that keeps its indentation where a terminal wraps it; one line where there is no terminal.

    Words stay whole, but for those that are longer than the line.
    """
    words = text if isinstance(text, Text) else Text(printable(text), style=style)
    if console.is_terminal:
        console.print(Padding(words, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append_text(words), soft_wrap=True)


def print_facts(
    console: Console, facts: Iterable[tuple[str, object]], width: int = FACT_WIDTH, style: str = "dim"
) -> None:
    """Names, each with a paragraph beside it."""
    for name, value in facts:
        if not console.is_terminal:
            console.print(styled((f"{name:<{width}}", style), str(value)), soft_wrap=True)
            continue
        grid = Table.grid(padding=(0, 0))
        grid.add_column(width=width, style=style, no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(printable(name)), Text(printable(value)))
        console.print(grid)


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    optional: Sequence[str] = (),
    shorten: Sequence[str] = (),
    fold: str = "",
    styles: Sequence[str] = (),
    header_style: str = "dim",
) -> None:
    """Print a table without lines.

    Columns without any text are left out. Where it is wider than the console, its columns give way in this order:
    those in ``optional`` are left out, one after the other; texts in those of ``shorten`` lose their middle; those of
    the column ``fold`` are wrapped. Other cells are never cut: each says something different.
    ``right`` names columns of numbers; ``styles`` has one for each row.
    """
    columns = {head: [printable(row[k]) for row in rows] for k, head in enumerate(heads)}
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    longest = {head: max(map(len, (head, *cells))) for head, cells in columns.items()}
    widths = {head: min(width, _LEAST if head in (*shorten, fold) else width) for head, width in longest.items()}
    for head in optional:
        if sum(widths.values()) + _GAP * (len(widths) - 1) > console.width:
            del columns[head], widths[head]
    spare = console.width - sum(widths.values()) - _GAP * (len(widths) - 1)
    for head in (*shorten, fold):
        if head in widths:
            more = max(0, min(spare, longest[head] - widths[head]))
            widths[head], spare = widths[head] + more, spare - more
    whole = sum(widths.values()) + _GAP * (len(widths) - 1)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style=header_style, width=whole)
    for head, width in widths.items():
        justify, is_folded = "right" if head in right else "left", head == fold
        table.add_column(Text(head), justify=justify, width=width, no_wrap=not is_folded, overflow="fold")  # type: ignore[arg-type]
    for k in range(len(rows)):
        cells = (cut_middle(cells[k], widths[h] if h in shorten else len(cells[k])) for h, cells in columns.items())
        table.add_row(*map(Text, cells), style=styles[k] if styles else "")
    console.print(table, crop=False)
