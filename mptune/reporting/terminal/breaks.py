"""The section of a terminal's output that stands first: what breaks in FP16, and why."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mptune.reporting.breaks import Break, breaks_in_fp16, heading
from mptune.reporting.terminal.console import print_text
from mptune.reporting.text import cut_front, error_text, short_path
from mptune.tuning.front import Front

MOST_SHOWN = 4
"""So many places are named; ``mptune report RUN --explain`` names all."""


def print_breaks(console: Console, front: Front, *, every: bool = False) -> None:
    """Print the findings about values that FP16 cannot hold: node, value, sample, and what plain FP16 gives.

    Args:
        console: where to print.
        front: of the run.
        every: name all places.
    """
    found = breaks_in_fp16(front)
    print_text(console, heading(front), "bold")
    for one in found if every else found[:MOST_SHOWN]:
        _print_break(console, one)
    if not found:
        print_text(console, _nothing(front), indent=2)
    elif len(found) > MOST_SHOWN and not every:
        rest = f"and {len(found) - MOST_SHOWN} more: mptune report {short_path(front.run_dir)} --explain"
        print_text(console, rest, "dim", 2)
    console.print()


def _print_break(console: Console, one: Break) -> None:
    style = "dim" if one.kept else "yellow"
    longest = 2 * console.width if console.is_terminal else None
    place = one.where if longest is None else cut_front(one.where, longest)
    head = Text.assemble((one.code, "" if one.kept else "yellow"), f": {place}")
    print_text(console, head, indent=2)
    more = "" if not one.others else f"; so for {one.others} more value{'s' if one.others > 1 else ''} there"
    print_text(console, f"{one.seen}{more}", indent=4)
    print_text(console, one.outcome, style, 4)


def _nothing(front: Front) -> str:
    error = ""
    if front.fp16 is not None and front.fp16.is_finite:
        error = f"; the error of {front.fp16_name} is {error_text(front.fp16)}"
    return f"nothing that breaks was found on the samples{error}"
