"""``--explain`` on the terminal: the search, what breaks in FP16, and each group's error, gain and reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mptune.graph.plan import Precision
from mptune.printable import cut
from mptune.reporting.terminal.console import make_console, plain_table, print_fact, print_text, room_beside
from mptune.reporting.terminal.front import model_fact, print_facts
from mptune.reporting.text import (
    KEPT_BECAUSE,
    breaking_findings,
    breaking_precision,
    cut_front,
    describe_engine,
    error_source,
    explain_kept,
    finding_lines,
    finding_page,
    latency_source,
    neighbour_lines,
    unique,
)
from mptune.tuning.front import is_held_out
from mptune.tuning.fronts.texts import error_text, format_error

if TYPE_CHECKING:
    from mptune.tuning.front import Front

_SHORTEST_NAME = 12
_LONGEST = 1000
"""Characters of a finding: names in it may be of any length."""


def print_explanation(front: Front, stream: TextIO | None = None) -> None:
    """Print what each group costs and gains, and why groups stay FP32 in the chosen plan."""
    console, explanation = make_console(stream), front.explanation
    failed = f", {front.failures} of them failed" if front.failures else ""
    samples = "held-out samples" if is_held_out(front) else "the search samples"
    plans = f"{front.evaluations} plan{'s' * (front.evaluations != 1)}"
    facts = [
        model_fact(front),
        ("target", front.target),
        ("engine", describe_engine(front)),
        ("latency", latency_source(front)),
        ("error", f"{error_source(front)}; on {samples}"),
        ("searched", f"{plans}{failed}; {len(front.points)} on the front"),
        *neighbour_lines(front),
    ]
    print_facts(console, facts)
    console.print()
    _print_breaking(console, front)
    if not explanation.groups:
        console.print("this run holds nothing to explain: run the same `mptune search` again to add the reasons")
        return
    console.print(Text("groups, by error per millisecond gained", style="bold"))
    console.print(_group_table(front, console.width))
    console.print()
    gains = "unknown" if explanation.gains_from is None else f"from {explanation.gains_from}, without Casts"
    print_text(console, f"errors: {front.metric}, with this group alone reduced; gains: {gains}")
    print_text(console, "reduced in: points of the front where it is not FP32; plan: what the chosen plan does")
    # Of all-FP32 every group is kept: then those of all-FP16 are of more use.
    plan = front.chosen if front.chosen is not None and front.chosen.plan != front.fp32.plan else front.fp16
    if plan is not None and (kept := explanation.of(plan.plan.fingerprint)):
        console.print()
        console.print(Text(f"{plan.plan.fingerprint}: {KEPT_BECAUSE}", style="bold"))
        for group in kept:
            head = f"{group.worth.group}  "
            print_fact(console, head, explain_kept(group).partition(" ")[2], len(head), "")
        console.print()


def _print_breaking(console: Console, front: Front) -> None:
    """The findings about values that FP16 cannot hold; a warning is one that the chosen plan does not avoid."""
    findings = breaking_findings(front)
    print_text(console, f"What breaks in {breaking_precision(front)}, and why", "bold")
    for line in finding_lines(findings, lambda f: f"{f.severity}: {f.code} ({', '.join(f.where.groups)}): {f.message}"):
        print_text(console, cut(line, _LONGEST), "yellow" if line.startswith("warning") else "", indent=2)
    if findings:
        print_text(console, f"see {', '.join(unique(finding_page(f.code) for f in findings))}", "dim", indent=2)
    else:
        error = ""
        if front.fp16 is not None and front.fp16.is_finite:
            error = f"; the error of {front.fp16_name} is {error_text(front.fp16)}"
        print_text(console, f"nothing that breaks was found on the samples{error}", indent=2)
    console.print()


def _group_table(front: Front, width: int) -> Table:
    """Each group's error alone, gain and Casts, and what the chosen plan does with it, and why."""
    worths, chosen = front.explanation.groups, front.chosen
    kept = () if chosen is None else front.explanation.of(chosen.plan.fingerprint)
    words = {each.worth.group: f": {each.word}" for each in kept}
    heads = ("group", "kind", "error", "gain ms", "Casts ms", "reduced in", "plan")
    rows = []
    for worth in worths:
        precision = "-" if chosen is None else chosen.plan.precision.get(worth.group, Precision.FP32).name
        times = ("-" if ms is None else f"{ms:.2g}" for ms in (worth.gain_ms, worth.casts_ms))
        figures = format_error(worth.one_group_error), *times
        plan = precision + words.get(worth.group, "")
        rows.append((worth.group, worth.kind, *figures, f"{worth.fp16_points}/{len(front.points)}", plan))
    left = max(room_beside(width, heads, rows), _SHORTEST_NAME)
    table = plain_table((heads[0], "name", *heads[1:]), heads[2:-1], "dim")
    for worth, (group, *others) in zip(worths, rows, strict=True):
        cells = map(Text, (group, cut_front(worth.name, left), *others))
        table.add_row(*cells, style="yellow" if worth.group in words else "")
    return table
