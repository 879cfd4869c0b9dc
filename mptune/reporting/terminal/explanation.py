"""``--explain`` on the terminal: the search, what breaks in FP16, and each group's error, gain and reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mptune.finding import CODES
from mptune.reporting.breaks import breaks_in_fp16, heading
from mptune.reporting.terminal.console import make_console, plain_table, print_fact, print_text, room_beside
from mptune.reporting.terminal.front import model_fact, print_facts
from mptune.reporting.text import (
    KEPT_BECAUSE,
    cut_front,
    describe_engine,
    error_source,
    explain_kept,
    finding_page,
    latency_source,
    neighbour_lines,
    reasons_of,
    reduced_names,
)
from mptune.tuning.explanation import REASON_WORDS, Reason
from mptune.tuning.front import front_rows, is_held_out
from mptune.tuning.fronts.texts import error_text, format_error, latency_text

if TYPE_CHECKING:
    from mptune.tuning.explanation import GroupWorth
    from mptune.tuning.front import Front

WIDE = 116
"""Minimum columns for what the Casts cost."""

_SHORTEST_NAME = 12


def print_explanation(front: Front, stream: TextIO | None = None) -> None:
    """Print what each group costs and gains, and why groups stay FP32 in each plan of the front."""
    console = make_console(stream)
    _facts(console, front)
    _print_breaks(console, front)
    explanation = front.explanation
    if not explanation.groups:
        console.print("this run holds nothing to explain: run the same `mptune search` again to add the reasons")
        return
    console.print(Text("groups, by error per millisecond gained", style="bold"))
    words = {} if front.chosen is None else {k.group: k.word for k in explanation.of(front.chosen.plan.fingerprint)}
    console.print(_groups(explanation.groups, console.width, words))
    console.print()
    gains = explanation.gains_from
    gains_text = "unknown: the search did not measure them" if gains is None else f"from {gains}, without Casts"
    reduced = reduced_names(point.plan for point in front.points)
    alone = "FP16, or in BF16 where FP16 cannot hold its values" if reduced == "FP16 and BF16" else reduced
    print_text(console, f"errors: {front.metric} with this group alone in {alone}; gains: {gains_text}")
    where = reduced.replace(" and ", " or ")
    print_text(console, f"reduced in: points of the front where it is {where}; plan: what the chosen plan does")
    console.print()
    _why(console, front)
    console.print(Text("groups in FP32 of each plan, the fastest first", style="bold"))
    every = sorted(group.group for group in explanation.groups)  # Ids are in the order of the model.
    for row in front_rows(front):
        evaluation = row.evaluation
        reasons = reasons_of(explanation.of(evaluation.plan.fingerprint), every)
        fp32_groups = "; ".join(f"{word} {ids}" for word, ids in reasons) or "none"
        if evaluation.plan == front.fp32.plan:
            fp32_groups = "all: the baseline"
        mark = ">" if row.is_chosen else " "
        head = f"{mark} {evaluation.plan.fingerprint}  {latency_text(evaluation):>8} ms  "
        print_fact(console, head, fp32_groups, len(head), "")


def _facts(console: Console, front: Front) -> None:
    """What was searched, and the plans beside the chosen one."""
    failed = f", {front.failures} of them failed" if front.failures else ""
    samples = "held-out samples" if is_held_out(front) else "the search samples"
    plans = f"{front.evaluations} plan{'s' * (front.evaluations != 1)}"
    print_facts(
        console,
        [
            model_fact(front),
            ("target", front.target),
            ("engine", describe_engine(front)),
            ("latency", latency_source(front)),
            ("error", f"{error_source(front)}; on {samples}"),
            ("searched", f"{plans}{failed}; {len(front.points)} on the front"),
            *neighbour_lines(front),
        ],
    )
    console.print()


def _print_breaks(console: Console, front: Front) -> None:
    """Print the findings about values that FP16 cannot hold: node, value, sample, and what plain FP16 gives."""
    breaks = breaks_in_fp16(front)
    print_text(console, heading(front), "bold")
    for place in breaks:
        where = cut_front(place.where, 2 * console.width) if console.is_terminal else place.where
        print_text(console, Text.assemble((place.code, "" if place.kept else "yellow"), f": {where}"), indent=2)
        more = "" if not place.others else f"; so for {place.others} more value{'s' if place.others > 1 else ''} there"
        print_text(console, f"{place.seen}{more}", indent=4)
        print_text(console, place.outcome, "dim" if place.kept else "yellow", 4)
        if place.code in CODES:
            print_text(console, f"see {finding_page(place.code)}", "dim", 4)
    if not breaks:
        error = ""
        if front.fp16 is not None and front.fp16.is_finite:
            error = f"; the error of {front.fp16_name} is {error_text(front.fp16)}"
        print_text(console, f"nothing that breaks was found on the samples{error}", indent=2)
    console.print()


def _why(console: Console, front: Front) -> None:
    """The groups that the chosen plan keeps in FP32, each with its reason; of all-FP16 where all-FP32 is chosen."""
    plan = front.chosen if front.chosen is not None and front.chosen.plan != front.fp32.plan else front.fp16
    kept = () if plan is None else front.explanation.of(plan.plan.fingerprint)
    if plan is None or not kept:
        return
    console.print(Text(f"{plan.plan.fingerprint}: {KEPT_BECAUSE}", style="bold"))
    for group in kept:
        print_fact(console, f"{group.group}  ", explain_kept(group).partition(" ")[2], len(group.group) + 2, "")
    console.print()


def _groups(worths: tuple[GroupWorth, ...], width: int, words: Mapping[str, str]) -> Table:
    with_casts = width >= WIDE
    heads = (
        "group",
        "kind",
        "error",
        "gain ms",
        *(["Casts ms"] if with_casts else []),
        "error/ms",
        "reduced in",
        "plan",
    )
    rows = [
        (
            worth.group,
            worth.kind,
            format_error(worth.one_group_error),
            _format_gain(worth.gain_ms),
            *([_format_gain(worth.casts_ms)] if with_casts else []),
            _format_gain(worth.error_per_ms),
            f"{worth.fp16_points}/{worth.points}",
            _short_verdict(worth, words),
        )
        for worth in worths
    ]
    left = max(room_beside(width, heads, rows), _SHORTEST_NAME)
    table = plain_table((heads[0], "name", *heads[1:]), heads[2:-1], "dim")
    for worth, (group, *others) in zip(worths, rows, strict=True):
        style = "" if worth.verdict in ("FP16", "BF16") else "yellow"
        name = cut_front(worth.name, left)
        table.add_row(*(Text(cell) for cell in (group, name, *others)), style=style)
    return table


def _format_gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _short_verdict(worth: GroupWorth, words: Mapping[str, str]) -> str:
    """What the chosen plan does with a group, and why, in two words."""
    precision, _, reason = worth.verdict.partition(": ")
    if worth.group in words:
        return f"FP32: {words[worth.group]}"
    if worth.is_pinned:
        return f"{precision.rpartition(' ')[2]}: {worth.finding or 'pinned'}"
    return f"{precision}: {worth.finding or REASON_WORDS[Reason(reason)]}" if reason else precision
