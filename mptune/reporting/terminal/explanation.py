"""``--explain`` on the terminal: the search, what breaks in FP16, and each group's error, gain and reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from mptune.graph.plan import Precision
from mptune.printable import cut
from mptune.reporting.terminal.console import make_console, print_facts, print_table, print_text
from mptune.reporting.terminal.front import model_fact
from mptune.reporting.text import (
    KEPT_BECAUSE,
    breaking_findings,
    breaking_precision,
    describe_engine,
    error_source,
    explain_kept,
    finding_lines,
    latency_source,
    neighbour_lines,
    unique,
)
from mptune.tuning.front import is_held_out
from mptune.tuning.fronts.texts import error_text, format_error

if TYPE_CHECKING:
    from mptune.tuning.front import Front

_LONGEST = 1000
"""Characters of a finding: names in it may be of any length."""


def print_explanation(front: Front, stream: TextIO | None = None) -> None:
    """Print what each group costs and gains, and why groups stay FP32 in the chosen plan."""
    console, explanation, chosen = make_console(stream), front.explanation, front.chosen
    failed = f", {front.failures} of them failed" if front.failures else ""
    samples = "held-out samples" if is_held_out(front) else "the search samples"
    facts = [
        model_fact(front),
        ("target", front.target),
        ("engine", describe_engine(front)),
        ("latency", latency_source(front)),
        ("error", f"{error_source(front)}; on {samples}"),
        ("searched", f"{front.evaluations} plans{failed}; {len(front.points)} on the front"),
    ]
    print_facts(console, [*facts, *neighbour_lines(front)])
    console.print()
    # A warning is a finding that the chosen plan does not avoid.
    findings = breaking_findings(front)
    print_text(console, f"What breaks in {breaking_precision(front)}, and why", "bold")
    for line in finding_lines(findings, lambda f: f"{f.severity}: {f.code} ({', '.join(f.where.groups)}): {f.message}"):
        print_text(console, cut(line, _LONGEST), "yellow" if line.startswith("warning") else "", indent=2)
    if findings:
        pages = unique(f"docs/reference/findings.md#{finding.code}" for finding in findings)
        print_text(console, f"see {', '.join(pages)}", "dim", indent=2)
    else:
        is_finite = front.fp16 is not None and front.fp16.is_finite
        error = f"; the error of {front.fp16_name} is {error_text(front.fp16)}" if front.fp16 and is_finite else ""
        print_text(console, f"nothing that breaks was found on the samples{error}", indent=2)
    console.print()
    if not explanation.groups:
        console.print("this run holds nothing to explain: run the same `mptune search` again to add the reasons")
        return
    words = {} if chosen is None else {k.worth.group: f": {k.word}" for k in explanation.of(chosen.plan.fingerprint)}
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
    # Of all-FP32 every group is kept: then those of all-FP16 are of more use.
    shown = chosen if chosen is not None and chosen.plan != front.fp32.plan else front.fp16
    if shown is not None and (kept := explanation.of(shown.plan.fingerprint)):
        console.print()
        print_text(console, f"{shown.plan.fingerprint}: {KEPT_BECAUSE}", "bold")
        for group in kept:
            head = f"{group.worth.group}  "
            print_facts(console, [(head, explain_kept(group).partition(" ")[2])], len(head), "")
        console.print()
