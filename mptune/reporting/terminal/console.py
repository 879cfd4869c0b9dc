"""The rich consoles that progress and tables are written on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Span, Text

from mptune.printable import printable, printable_character

PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask."""

SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


class _OurConsole(Console):
    """Shows no character that is not printable, wherever a text stands; and leaves it to the caller to end."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render a text, or a table with its texts, after they are cleaned."""
        if isinstance(renderable, Table):
            for column in renderable.columns:
                column._cells = [_cleaned(cell) for cell in column._cells]
        return super().render(_cleaned(renderable), options)

    def on_broken_pipe(self) -> None:
        """Pass the ``BrokenPipeError`` on that is being handled: the command line knows what it means."""
        self.quiet = True
        raise


def _cleaned(renderable: RenderableType) -> RenderableType:
    """A text with what is not printable written out; anything else as it is."""
    if isinstance(renderable, str):
        return printable(renderable)
    if not isinstance(renderable, Text) or renderable.plain.isprintable():
        return renderable
    places = [0]
    for character in renderable.plain:
        places.append(places[-1] + len(printable_character(character)))
    clean = renderable.blank_copy(printable(renderable.plain))
    clean.spans = [Span(places[start], places[end], style) for start, end, style in renderable.spans]
    return clean


def make_console(stream: TextIO | None = None) -> Console:
    """A console, by default on stdout, that keeps within the terminal, and within 100 columns where there is none.

    ``NO_COLOR`` and ``COLUMNS`` are honoured by rich itself. Texts are cleaned (``mptune.printable``), and a reader
    that leaves is a ``BrokenPipeError``.
    """
    stream = stream or sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    return _OurConsole(file=stream, width=width, highlight=False, soft_wrap=False)


def print_text(console: Console, text: str | Text, style: str = "", indent: int = 0) -> None:
    """A paragraph that keeps its indentation where a terminal wraps it; one line where there is no terminal.

    Words stay whole, but for those that are longer than the line.
    """
    words = text if isinstance(text, Text) else Text(text, style=style)
    if console.is_terminal:
        console.print(Padding(words, (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent).append_text(words), soft_wrap=True)


def print_fact(console: Console, name: str, value: str, width: int = 9, style: str = "dim") -> None:
    """A name, and a paragraph beside it."""
    if not console.is_terminal:
        console.print(Text.assemble((f"{name:<{width}}", style), value), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=width, style=style, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(name), Text(value))
    console.print(grid)


def plain_table(heads: Sequence[str], right: Sequence[str] = (), style: str = "bold") -> Table:
    """A table without lines; the columns named in ``right`` hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=style)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", no_wrap=True)
    return table


def room_beside(width: int, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """What columns with these cells leave of a width."""
    return width - sum(max(map(len, column)) + 2 for column in zip(heads, *rows, strict=True))
