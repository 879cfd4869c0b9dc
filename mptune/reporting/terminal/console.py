"""The rich consoles that progress and tables are written on."""

from __future__ import annotations

import shutil
from typing import TextIO

from rich.console import Console

PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask."""


class _OurConsole(Console):
    """rich's own would end the process with exit code 1 when the reader of a pipe leaves."""

    def on_broken_pipe(self) -> None:
        """Pass the ``BrokenPipeError`` on that is being handled: the command line knows what it means."""
        self.quiet = True
        raise


def make_console(stream: TextIO) -> Console:
    """A console that keeps within the terminal, and within 100 columns where there is none.

    ``NO_COLOR`` and ``COLUMNS`` are honoured by rich itself. A reader that leaves is a ``BrokenPipeError``.
    """
    width = None if stream.isatty() else shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    return _OurConsole(file=stream, width=width, highlight=False, soft_wrap=False)
