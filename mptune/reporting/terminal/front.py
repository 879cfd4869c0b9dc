"""A front on the terminal: warnings, the table, and the answer: the choice, what it gains, and the files."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TextIO

from rich.console import Console

from mptune.data.metrics.paired import is_compared_by_ratio
from mptune.finding import BREAKING_CODES
from mptune.findings.engine import NOTHING
from mptune.reporting.terminal.console import make_console, print_facts, print_text
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

_FILES = {
    "model": "chosen/model.onnx",
    "engine": "chosen/model.engine",
    "try it": "chosen/infer.py",
    "page": "report.html",
}
"""The files of a run that a person looks at, by what each is for."""


def print_front(
    front: Front, stream: TextIO | None = None, *, every: bool = False, warned: Collection[str] = ()
) -> None:
    """Print a front: new warnings, the table (a dozen rows, or all of them), and the answer.

    Warnings in ``warned`` have been printed before.
    """
    console = make_console(stream)
    print_warnings(console, front, warned)
    table, notes = front_table(front, console.width, every=every, more=": --all")
    console.print(table, crop=False)
    if notes:
        print_text(console, notes, "dim")
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
    chosen, fp16, run = front.chosen, front.fp16, shell_path(front.run_dir)
    plan = "none" if chosen is None else chosen.plan.fingerprint
    facts = [("chosen", f"{plan}: {front.chosen_reason}")]
    if chosen is not None:
        latency = f"{speedup_text(chosen, front.fp32)}: {latency_text(chosen)} ms"
        if chosen.plan != front.fp32.plan:
            latency += f", all-FP32 {latency_text(front.fp32)} ms"
        if front.tf32 is not None:
            latency += f", in TF32 {latency_text(front.tf32)} ms (error {error_text(front.tf32)})"
        error = f"error {error_text(chosen)}"
        if fp16 is not None and chosen.plan != fp16.plan:
            ratio = fp16.judged_error / chosen.judged_error if chosen.judged_error > 0 else math.inf
            is_ratio = is_compared_by_ratio(front.metric) and math.isfinite(ratio) and fp16.is_finite
            error = f"{f'{two_digits(ratio)} times: ' if is_ratio else ''}{error}, {front.fp16_name} {error_text(fp16)}"
        facts.append(("faster", latency + ("" if chosen.latency.source == "measured" else ", predicted")))
        facts.append(("more exact", error + ("" if chosen.error_source == "measured" else ", emulated")))
    places = unique(f"{f.code} ({', '.join(f.where.groups) or 'no single group'})" for f in breaking_findings(front))
    if places:
        more = f" and {len(places) - _MOST_BREAKS} more" if len(places) > _MOST_BREAKS else ""
        facts.append(("breaks", f"in {breaking_precision(front)}: {', '.join(places[:_MOST_BREAKS])}{more}"))
    print_facts(console, facts)
    if chosen is not None and (reasons := because(front, chosen)):
        print_text(console, f"{KEPT_BECAUSE}: {reasons}")
    for name, path in ((name, front.run_dir / file) for name, file in _FILES.items()):
        if path.exists():
            print_facts(console, [(name, f"python {shell_path(path)}" if name == "try it" else short_path(path))])
    if chosen is not None and front.neighbours:  # the more exact one, or the faster one where there is none
        beside = front.neighbours[-1]
        what = f"{beside.role}, {compared(beside.evaluation, chosen)}:"
        print_facts(
            console, [("another", what), ("", f"mptune pick {run} --plan {beside.evaluation.plan.fingerprint}")]
        )
    print_facts(console, [("details", f"mptune report {run} --explain")])
    if not front.limits_met:
        print_text(console, f"limits not met: {front.unmet}", "bold yellow")


def model_fact(front: Front) -> tuple[str, str]:
    """The model's path, and the beginning of its hash."""
    return "model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"
