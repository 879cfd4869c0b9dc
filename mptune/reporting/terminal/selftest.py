"""The self-test on the terminal: one line for each check."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from mptune.reporting.terminal.console import make_console

if TYPE_CHECKING:
    from mptune.selftest.run import SelfTest

_STYLES = {"holds": "green", "does not hold": "bold red", "cannot be checked here": "yellow"}


def print_selftest(result: SelfTest, stream: TextIO | None = None) -> None:
    """Print what the self-test found; to stdout by default."""
    console = make_console(sys.stdout if stream is None else stream)
    console.print()
    for check in result.checks:
        limit = "" if check.figure is None else f" (limit {check.limit})"
        parts = (f"{check.engine:<17}{check.name:<13}", (check.status, _STYLES[check.status]), f": {check.text}{limit}")
        console.print(Text.assemble(*parts), soft_wrap=True)
    failed = sum(check.status == "does not hold" for check in result.checks)
    verdict = "every check that can be taken here holds"
    if not result.holds:
        verdict = f"{failed} of {len(result.checks)} checks do not hold" if failed else "nothing could be checked"
    console.print()
    console.print(Text(f"self-test: {verdict}, after {result.seconds:.0f} s"), soft_wrap=True)
    if not result.holds:
        console.print(Text("report it with the output of: mptune doctor --selftest --json"), soft_wrap=True)
