"""A front on the terminal: warnings, the table, and the answer: the choice, what it gains, and the files."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from mptune.data.metrics.paired import is_compared_by_ratio
from mptune.finding import BREAKING_CODES
from mptune.findings.engine import NOTHING
from mptune.reporting.terminal.console import make_console, print_fact, print_text
from mptune.reporting.text import (
    KEPT_BECAUSE,
    breaking_findings,
    breaking_precision,
    front_warnings,
    shell_path,
    short_path,
    speedup_text,
    unique,
)
from mptune.tuning.front import Front, because, front_table
from mptune.tuning.fronts.texts import compared, error_text, latency_text, two_digits

_MOST_BREAKS = 2
"""Places that are named; ``mptune report RUN --explain`` names all."""

_WIDTH = len("more exact ")


def print_table(console: Console, front: Front, *, every: bool = False) -> None:
    """Print the front: a dozen rows, or all of them, then what their marks mean."""
    table, notes = front_table(front, console.width, every=every, more=": --all")
    console.print(table, crop=False)
    if notes:
        console.print(Text(notes, style="dim"))


def print_front(
    front: Front, stream: TextIO | None = None, *, every: bool = False, warned: Collection[str] = ()
) -> None:
    """Print a front: new warnings, the table, and the answer.

    Warnings in ``warned`` have been printed before.
    """
    console = make_console(stream)
    print_warnings(console, front, warned)
    print_table(console, front, every=every)
    console.print()
    print_answer(console, front)


def print_warnings(console: Console, front: Front, warned: Collection[str]) -> None:
    """Print what a person must know and has not read yet; that nothing depends on the precisions comes first."""
    nothing = [finding.message for finding in front.findings if finding.code == NOTHING]
    new = [text for text in unique((*nothing, *front_warnings(front, BREAKING_CODES))) if text not in warned]
    for text in new:
        print_text(console, f"warning: {text}", "yellow")
    if new:
        console.print()


def print_answer(console: Console, front: Front) -> None:
    """Print the choice, what it gains, and the files; last, where no plan meets the limits, that."""
    print_facts(console, [("chosen", _chosen(front)), *_gains(front), *_breaks(front)])
    if front.chosen is not None and (reasons := because(front, front.chosen)):
        print_text(console, f"{KEPT_BECAUSE}: {reasons}")
    print_facts(console, [*_written_files(front), *_another(front)])
    print_fact(console, "details", f"mptune report {shell_path(front.run_dir)} --explain", _WIDTH)
    if not front.limits_met:
        print_text(console, f"limits not met: {front.unmet}", "bold yellow")


def model_fact(front: Front) -> tuple[str, str]:
    """The model's path, and the beginning of its hash."""
    return "model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print names with a paragraph beside each."""
    for name, value in facts:
        print_fact(console, name, value, _WIDTH)


def _chosen(front: Front) -> str:
    if front.chosen is None:
        return f"none: {front.chosen_reason}"
    return f"{front.chosen.plan.fingerprint}: {front.chosen_reason}"


def _gains(front: Front) -> list[tuple[str, str]]:
    """How much faster than all-FP32 the chosen plan is, and how much more exact than all-FP16."""
    chosen, fp16 = front.chosen, front.fp16
    if chosen is None:
        return []
    predicted = "" if chosen.latency.source == "measured" else ", predicted"
    emulated = "" if chosen.error_source == "measured" else ", emulated"
    latency = f"{speedup_text(chosen, front.fp32)}: {latency_text(chosen)} ms"
    error = f"error {error_text(chosen)}"
    if chosen.plan != front.fp32.plan:
        latency += f", all-FP32 {latency_text(front.fp32)} ms"
    if front.tf32 is not None:
        latency += f", in TF32 {latency_text(front.tf32)} ms (error {error_text(front.tf32)})"
    if fp16 is not None and chosen.plan != fp16.plan:
        ratio = fp16.judged_error / chosen.judged_error if chosen.judged_error > 0 else math.inf
        is_ratio = is_compared_by_ratio(front.metric) and math.isfinite(ratio) and fp16.is_finite
        error = f"{f'{two_digits(ratio)} times: ' if is_ratio else ''}{error}, {front.fp16_name} {error_text(fp16)}"
    return [("faster", latency + predicted), ("more exact", error + emulated)]


def _breaks(front: Front) -> list[tuple[str, str]]:
    """The findings about values that FP16 cannot hold, by their codes."""
    places = unique(f"{f.code} ({', '.join(f.where.groups) or 'no single group'})" for f in breaking_findings(front))
    more = f" and {len(places) - _MOST_BREAKS} more" if len(places) > _MOST_BREAKS else ""
    return [("breaks", f"in {breaking_precision(front)}: {', '.join(places[:_MOST_BREAKS])}{more}")] if places else []


def _another(front: Front) -> list[tuple[str, str]]:
    """The command that chooses the more exact neighbour, or the faster one where there is none."""
    if front.chosen is None or not front.neighbours:
        return []
    beside = front.neighbours[-1]
    command = f"mptune pick {shell_path(front.run_dir)} --plan {beside.evaluation.plan.fingerprint}"
    return [("another", f"{beside.role}, {compared(beside.evaluation, front.chosen)}:"), ("", command)]


_FILES = {
    "model": "chosen/model.onnx",
    "engine": "chosen/model.engine",
    "try it": "chosen/infer.py",
    "page": "report.html",
}


def _written_files(front: Front) -> list[tuple[str, str]]:
    """The files of a run that a person looks at, by what each is for; those that are there."""
    paths = ((name, front.run_dir / path) for name, path in _FILES.items())
    return [
        (name, f"python {shell_path(path)}" if name == "try it" else short_path(path))
        for name, path in paths
        if path.exists()
    ]
