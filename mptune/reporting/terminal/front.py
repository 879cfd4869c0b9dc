"""A front on the terminal: its table and the answer, ``--explain``, and a confirmation of it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from mptune.data.metrics.accuracy import is_compared_by_ratio
from mptune.finding import BREAKING_CODES
from mptune.findings.engine import NOTHING, TARGET_CODE
from mptune.graph.plan import Precision
from mptune.printable import cut
from mptune.processes.child import SECONDS
from mptune.reporting import text
from mptune.reporting.terminal.console import make_console, print_facts, print_table, print_text
from mptune.reporting.text import shell_path, short_path, speedup_text, unique
from mptune.tuning.dominance import LEAST_EXACTER
from mptune.tuning.explanation import reasons_text
from mptune.tuning.front import Front, front_table, is_held_out
from mptune.tuning.texts import compared, error_text, format_error, latency_text, metric_cell, two_digits

if TYPE_CHECKING:
    from mptune.tuning.confirmation import Confirmation

_MOST_BREAKS = 2  # places that are named; ``mptune report RUN --explain`` names all
_LONGEST_FINDING = 1000  # characters: names in it may be of any length

_FILES = {
    "model": "chosen/model.onnx",
    "engine": "chosen/model.engine",
    "try it": "chosen/infer.py",
    "page": "report.html",
}
"""The files of a run that a person looks at, by what each is for."""

_PLACE_STYLES = {"chosen": "bold green", "front": "", "failed": "red", "": "dim"}


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
    # A search says once where latency is predicted; the table and the answer say it at each figure.
    others = replace(front, findings=tuple(finding for finding in front.findings if finding.code != TARGET_CODE))
    new = [line for line in unique((*nothing, *text.front_warnings(others, BREAKING_CODES))) if line not in warned]
    for line in new:
        print_text(console, f"warning: {line}", "yellow")
    if new:
        console.print()


def print_answer(console: Console, front: Front) -> None:
    """Print the choice, what it gains, and the files; last, where no plan meets the limits, that."""
    chosen, fp16, run = front.chosen, front.fp16, shell_path(front.run_dir)
    plan = "none" if chosen is None else chosen.plan.fingerprint
    facts = [("chosen", f"{plan}: {front.chosen_reason}")]
    if chosen is not None:
        latency = f"{latency_text(chosen)} ms"
        if chosen.plan != front.fp32.plan:
            latency = f"{speedup_text(chosen, front.fp32)}: {latency}, all-FP32 {latency_text(front.fp32)} ms"
        if front.tf32 is not None:
            latency += f", in TF32 {latency_text(front.tf32)} ms (error {error_text(front.tf32)})"
        error, ratio = error_text(chosen), ""
        if fp16 is not None and chosen.plan != fp16.plan:
            error += f", {front.fp16_name} {error_text(fp16)}"
            times = fp16.judged_error / chosen.judged_error if chosen.judged_error > 0 else math.inf
            if is_compared_by_ratio(front.metric) and LEAST_EXACTER <= times < math.inf and fp16.is_finite:
                ratio = f"{two_digits(times)}x"
        name = "latency" if chosen.plan == front.fp32.plan else "faster"
        facts.append((name, latency + ("" if chosen.latency.source == "measured" else ", predicted")))
        emulated = "" if chosen.error_source == "measured" else ", emulated"
        facts.append(("more exact", f"{ratio}: error {error}{emulated}") if ratio else ("error", f"{error}{emulated}"))
    places = unique(
        f"{f.code} ({', '.join(f.where.groups) or 'no single group'})" for f in text.breaking_findings(front)
    )
    if places:
        more = f" and {len(places) - _MOST_BREAKS} more" if len(places) > _MOST_BREAKS else ""
        line = f"in {text.breaking_precision(front)}: {', '.join(places[:_MOST_BREAKS])}{more}"
        facts.append(("breaks", f"{line}{text.unpinned_text(front)}"))
    print_facts(console, facts)
    if chosen is not None and chosen.plan != front.fp32.plan:  # the baseline needs no reasons
        reasons = reasons_text(front.explanation.fp32_groups(chosen.plan.fingerprint))
        if reasons:
            print_text(console, f"kept in FP32: {reasons}")
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


def print_seconds(stream: TextIO | None = None) -> None:
    """Print where the time of this process went, if jobs ran."""
    if SECONDS:
        total_s = time.time() - psutil.Process().create_time()
        spent = {**SECONDS, "think, read and write": max(total_s - sum(SECONDS.values()), 0.0)}
        parts = ", ".join(f"{spent[part]:.0f} to {part}" for part in sorted(spent, key=lambda part: -spent[part]))
        print_facts(make_console(stream), [("time", f"{total_s:.0f} s: {parts}")])


def model_fact(front: Front) -> tuple[str, str]:
    """The model's path, and the beginning of its hash."""
    return "model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"


def print_explanation(front: Front, stream: TextIO | None = None) -> None:
    """Print what each group costs and gains, and why groups stay FP32 in the chosen plan."""
    console, explanation, chosen = make_console(stream), front.explanation, front.chosen
    failed = f", {front.failures} of them failed" if front.failures else ""
    samples = "held-out samples" if is_held_out(front) else "the search samples"
    facts = [
        model_fact(front),
        ("target", front.target),
        ("engine", text.describe_engine(front)),
        ("latency", text.latency_source(front)),
        ("error", f"{text.error_source(front)}; on {samples}"),
        ("searched", f"{front.evaluations} plans{failed}; {len(front.points)} on the front"),
    ]
    print_facts(console, [*facts, *text.neighbour_lines(front)])
    console.print()
    # A warning is a finding that the chosen plan does not avoid.
    findings = text.breaking_findings(front)
    print_text(console, f"What breaks in {text.breaking_precision(front)}, and why", "bold")
    for line in text.finding_lines(
        findings, lambda f: f"{f.severity}: {f.code} ({', '.join(f.where.groups)}): {f.message}"
    ):
        print_text(console, cut(line, _LONGEST_FINDING), "yellow" if line.startswith("warning") else "", indent=2)
    if findings:
        pages = unique(f"docs/reference/findings.md#{finding.code}" for finding in findings)
        print_text(console, f"see {', '.join(pages)}", "dim", indent=2)
    else:
        print_text(console, "nothing that breaks was found on the samples", indent=2)
    console.print()
    if not explanation.groups:
        console.print("this run contains no reasons: run the same `mptune search` again to add them")
        return
    in_fp32 = () if chosen is None else explanation.fp32_groups(chosen.plan.fingerprint)
    words = {group.worth.group: f": {group.word}" for group in in_fp32}
    rows = []
    for worth in explanation.groups:
        precision = "-" if chosen is None else chosen.plan.precision.get(worth.group, Precision.FP32).name
        gain, casts = ("-" if ms is None else f"{ms:.2g}" for ms in (worth.gain_ms, worth.casts_ms))
        points = f"{worth.fp16_points}/{len(front.points)}"
        plan = precision + words.get(worth.group, "")
        rows.append(
            (worth.group, worth.name, worth.kind, format_error(worth.one_group_error), gain, casts, points, plan)
        )
    print_text(console, "groups, by error per millisecond gained", "bold")
    print_table(
        console,
        ("group", "name", "kind", "error", "gain ms", "Casts ms", "reduced in", "plan"),
        rows,
        right=("error", "gain ms", "Casts ms", "reduced in"),
        optional=("kind",),
        shorten=("name",),
        styles=["yellow" if worth.group in words else "" for worth in explanation.groups],
    )
    console.print()
    gains = "unknown" if explanation.gains_from is None else f"from {explanation.gains_from}, without Casts"
    print_text(console, f"errors: {front.metric}, with this group alone reduced; gains: {gains}")
    print_text(console, "reduced in: points of the front where it is not FP32; plan: what the chosen plan does")
    # Of all-FP32 every group is kept: then those of all-FP16 are of more use, where there are any.
    shown = chosen if chosen is not None and chosen.plan != front.fp32.plan else front.fp16
    if shown is None or not explanation.fp32_groups(shown.plan.fingerprint):
        shown = chosen
    if shown is not None and (reasons := explanation.fp32_groups(shown.plan.fingerprint)):
        console.print()
        print_text(console, f"{shown.plan.fingerprint}: {text.KEPT_BECAUSE}", "bold")
        for group in reasons:
            head = f"{group.worth.group}  "
            print_facts(console, [(head, text.explain_kept(group).partition(" ")[2])], len(head), "")
        console.print()


def print_confirmation(
    confirmation: Confirmation, stream: TextIO | None = None, *, warned: Collection[str] = ()
) -> None:
    """Print a confirmation: the table of both, Kendall's tau, the verdict in words, warnings, and the answer.

    Warnings in ``warned`` have been printed before.
    """
    console = make_console(stream)
    front, searched = confirmation.front, confirmation.searched
    facts = [
        model_fact(front),
        ("searched", f"{searched.name}, latency {searched.latency_source}, error {searched.error_source}"),
        ("device", text.describe_engine(front)),
        ("latency", text.latency_source(front)),
        ("error", text.error_source(front)),
    ]
    print_facts(console, facts)
    console.print()
    latency = "pred." if searched.latency_source == "predicted" else "earlier"
    error = "emul." if searched.error_source == "emulated" else "earlier"
    figures = (f"{latency} ms", "ms", "95 %", f"{latency} x", "x", f"{error} err", "err")
    records, rows = text.confirmation_rows(confirmation), []
    for plan, record in zip(confirmation.plans, records, strict=True):
        cells = [record[key] for key in ("plan", "ms", "measured ms", "95 %")]
        cells += [record[key].removesuffix("x") for key in ("speedup", "measured speedup")]
        cells += [record[key] for key in ("error", "measured error")]
        metrics = front.metrics.values()
        cells += ["-" if plan.measured is None else metric_cell(plan.measured, metric) for metric in metrics]
        rows.append((*cells, record["became"], record["origin"]))
    print_table(
        console,
        ("plan", *figures, *front.metrics, "", "origin"),
        rows,
        right=(*figures, *front.metrics),
        optional=("95 %", f"{latency} x"),
        shorten=("origin",),
        styles=[_PLACE_STYLES[record["became"]] for record in records],
        header_style="bold",
    )
    if any("(" in cell for row in rows for cell in row[:-1]):
        print_text(console, "in brackets: on the search samples", "dim")
    console.print()
    for plan, record in zip(confirmation.plans, records, strict=True):
        if plan.measured is None:
            print_text(console, f"failed: {record['plan']} ({record['origin']}): {plan.failure}")
    for line in text.verdicts(confirmation):
        print_text(console, line)
    console.print()
    print_warnings(console, front, warned)
    print_answer(console, front)
