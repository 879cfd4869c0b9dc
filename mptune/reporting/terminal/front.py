"""A front on the terminal: the table, the choice, warnings and files."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from mptune.finding import BREAKING_CODES
from mptune.reporting.terminal.breaks import print_breaks
from mptune.reporting.terminal.console import make_console, print_fact, print_text
from mptune.reporting.terminal.table import print_table
from mptune.reporting.text import (
    KEPT_BECAUSE,
    describe_engine,
    error_source,
    error_text,
    explain_kept,
    front_warnings,
    latency_source,
    latency_text,
    neighbour_lines,
    short_path,
    speedup_text,
)
from mptune.targets.unsearched import NOTHING
from mptune.tuning.fronts.table import is_held_out

if TYPE_CHECKING:
    from mptune.tuning.front import Front

_WIDTH = len("more exact ")

MOST_KEPT = 4
"""At most this many of the chosen plan's FP32 groups are named."""


def print_front(front: Front, stream: TextIO | None = None, *, every: bool = False, said: Collection[str] = ()) -> None:
    """Print a front: what breaks in FP16, the source, the table, the choice, the warnings, the files, what comes next.

    Warnings in ``said`` have been printed before.
    """
    console = make_console(sys.stdout if stream is None else stream)
    nothing = [text for text in front.warnings if NOTHING in text]
    for text in nothing:
        print_text(console, f"warning: {text}", "yellow")
    print_breaks(console, front)
    searched = f"{front.evaluations} plan{'s' * (front.evaluations != 1)}"
    failed = f", {front.failures} of them failed" if front.failures else ""
    samples = "held-out samples" if is_held_out(front) else "the search samples"
    _facts(
        console,
        [
            ("model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"),
            ("target", front.target),
            ("engine", describe_engine(front)),
            ("latency", latency_source(front)),
            ("error", f"{error_source(front)}; on {samples}"),
            ("searched", f"{searched}{failed}; {len(front.points)} on the front"),
        ],
    )
    console.print()
    print_table(console, front, every=every)
    console.print()
    _facts(console, [("chosen", _chosen(front)), *neighbour_lines(front)])
    _print_kept(console, front)
    _facts(console, [*_written(front), *_other_devices(front)])
    for text in front_warnings(front, BREAKING_CODES):
        if text not in (*said, *nothing):
            print_text(console, f"warning: {text}", "yellow")
    if not front.limits_met:
        print_text(console, f"limits not met: {front.choice.unmet}", "bold yellow")


def _facts(console: Console, facts: list[tuple[str, str]]) -> None:
    for name, value in facts:
        print_fact(console, name, value, _WIDTH)


def _chosen(front: Front) -> str:
    if front.chosen is None:
        return f"none: {front.chosen_reason}"
    chosen = front.chosen
    return (
        f"{chosen.plan.fingerprint}: {latency_text(chosen)} ms "
        f"({speedup_text(chosen, front.fp32)}), error {error_text(chosen)}; {front.chosen_reason}"
    )


def _print_kept(console: Console, front: Front) -> None:
    """The first of the chosen plan's FP32 groups, each with its reason."""
    if front.chosen is None or front.chosen.plan == front.fp32.plan:
        return
    kept = front.explanation.of(front.chosen.plan.fingerprint)
    lines = [explain_kept(group) for group in kept[:MOST_KEPT]]
    if len(kept) > MOST_KEPT:
        lines.append(f"and {len(kept) - MOST_KEPT} more: mptune report {short_path(front.run_dir)} --explain")
    if lines:
        print_text(console, KEPT_BECAUSE, "dim")
    for line in lines:
        print_text(console, line, indent=2)


def _written(front: Front) -> list[tuple[str, str]]:
    chosen, page = front.run_dir / "chosen", front.run_dir / "report.html"
    files = (("model", chosen / "model.onnx"), ("engine", chosen / "model.engine"), ("try it", chosen / "infer.py"))
    written = [
        (name, f"{'python ' * (name == 'try it')}{short_path(path)}")
        for name, path in (*files, ("page", page))
        if path.exists()
    ]
    other = "--max-error X, --max-latency-ms X, --max-memory X, --knee or --plan ID"
    return [*written, ("another", f"mptune pick {short_path(front.run_dir)} with {other}")]


def _other_devices(front: Front) -> list[tuple[str, str]]:
    """The fronts of other devices of the same search, and where they are."""
    return [
        ("also on" if index == 0 else "", f"{other.device} ({other.engine}): mptune report {short_path(other.run_dir)}")
        for index, other in enumerate(front.other_devices)
    ]
