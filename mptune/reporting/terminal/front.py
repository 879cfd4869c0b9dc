"""A front on the terminal: the table, the choice, warnings and files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mptune.reporting.terminal.console import make_console
from mptune.reporting.text import (
    by_importance,
    describe_engine,
    error_source,
    explain_kept,
    format_difference,
    format_error,
    format_interval,
    format_ms,
    format_speedup,
    front_rows,
    front_warnings,
    group_counts,
    latency_source,
    memory_text,
    reason_counts,
    short_path,
)
from mptune.tuning.fronts.neighbours import neighbours
from mptune.tuning.fronts.table import has_parts, part_text

if TYPE_CHECKING:
    from mptune.tuning.evaluation import Evaluation
    from mptune.tuning.front import Front

WIDE = 100
"""Minimum columns for the intervals or the reasons."""

WIDER = 110
"""Minimum columns for both."""

WIDEST = 130
"""Minimum columns for the memory as well."""

MOST_KEPT = 4
"""At most this many of the chosen plan's FP32 groups are named."""


def print_front(front: Front, stream: TextIO | None = None) -> None:
    """Print a front: its source, the table, the choice, the warnings, the files and what to do next.

    Args:
        front: what ``mptune.api.search``, ``report`` or ``pick`` returned.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    failed = f", {front.failures} of them failed" if front.failures else ""
    _facts(
        console,
        [
            ("model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"),
            ("target", front.target),
            ("engine", describe_engine(front)),
            ("latency", latency_source(front)),
            ("error", error_source(front)),
            ("searched", f"{front.evaluations} plans{failed}; {len(front.points)} on the front"),
        ],
    )
    console.print()
    console.print(_table(front, console.width))
    console.print()
    _facts(
        console, [("chosen", _chosen(front)), *_beside(front), *_kept(front), *_written(front), *_other_devices(front)]
    )
    for text in front_warnings(front):
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=not console.is_terminal)
    if not front.limits_met:
        console.print(Text(f"limits not met: {front.chosen_reason}", style="bold yellow"))


def _facts(console: Console, facts: list[tuple[str, str]]) -> None:
    for name, value in facts:
        console.print(Text.assemble((f"{name:<9}", "dim"), value), soft_wrap=True)


def _chosen(front: Front) -> str:
    if front.chosen is None:
        return f"none: {front.chosen_reason}"
    chosen = front.chosen
    return (
        f"{chosen.plan.fingerprint}: {format_ms(chosen.latency.median_ms)} ms "
        f"({format_speedup(chosen.speedup)}), error {format_error(chosen.judged_error)}; {front.chosen_reason}"
    )


def _beside(front: Front) -> list[tuple[str, str]]:
    """What the next faster and the next slower point of the front would give instead."""
    if front.chosen is None:
        return []
    lines = []
    for other in neighbours(front.points, front.chosen):
        delta_ms = other.latency_ms_delta
        name, word = ("faster", "less") if delta_ms < 0 else ("slower", "more")
        error = "" if other.error is None else f", {format_difference(other.error)}"
        lines.append((name, f"{other.evaluation.plan.fingerprint}: {format_ms(abs(delta_ms))} ms {word}{error}"))
    return lines


def _kept(front: Front) -> list[tuple[str, str]]:
    """The most important of the chosen plan's FP32 groups, each with its reason."""
    if front.chosen is None or front.chosen.plan == front.fp32.plan:
        return []
    kept = by_importance(front.explanation.of(front.chosen.plan.fingerprint))
    lines = [explain_kept(group) for group in kept[:MOST_KEPT]]
    if len(kept) > MOST_KEPT:
        lines.append(f"and {len(kept) - MOST_KEPT} more: mptune report {short_path(front.run_dir)} --explain")
    return [("in FP32" if index == 0 else "", line) for index, line in enumerate(lines)]


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


def _because(front: Front, evaluation: Evaluation) -> str:
    """All-FP32 is the baseline, and needs no reason."""
    if evaluation.plan == front.fp32.plan:
        return ""
    return reason_counts(front.explanation.of(evaluation.plan.fingerprint), most=2)


def _table(front: Front, width: int) -> Table:
    rows = front_rows(front)
    emulated = {row.evaluation.error_source for row in rows} == {"measured", "emulated"}
    predicted = any(row.evaluation.latency.source == "predicted" for row in rows)
    explained = width >= WIDE and bool(front.explanation.kept)
    interval = width >= (WIDER if explained else WIDE) and any(format_interval(row.evaluation) for row in rows)
    memory = width >= WIDEST and any(row.evaluation.memory is not None for row in rows)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True, width=1)
    table.add_column("plan", no_wrap=True)
    table.add_column("pred. ms" if predicted else "ms", justify="right", no_wrap=True)
    if interval:
        table.add_column("95 %", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("held-out", justify="right", no_wrap=True)
    parts = has_parts(rows)
    if parts:
        table.add_column("worst part", no_wrap=True)
    table.add_column("FP16/32", justify="right", no_wrap=True)
    if memory:
        table.add_column("memory", justify="right", no_wrap=True)
    if explained:
        table.add_column("FP32 because", no_wrap=True)
    table.add_column("origin", min_width=len("all-FP32"))
    for row in rows:
        evaluation = row.evaluation
        mark = "~" if emulated and evaluation.error_source == "emulated" else ""
        cells = [
            ">" if row.is_chosen else "",
            evaluation.plan.fingerprint,
            format_ms(evaluation.latency.median_ms),
            *([format_interval(evaluation)] if interval else []),
            format_speedup(evaluation.speedup),
            mark + format_error(evaluation.error_value),
            format_error(evaluation.held_out_value),
            *([part_text(evaluation)] if parts else []),
            group_counts(evaluation.plan),
            *([memory_text(evaluation)] if memory else []),
            *([_because(front, evaluation)] if explained else []),
            row.note,
        ]
        table.add_row(
            *(escape(cell) for cell in cells), style="bold green" if row.is_chosen else "" if row.on_front else "dim"
        )
    return table
