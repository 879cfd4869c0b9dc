"""``mptune report --explain`` on the terminal: error and gain of each group, then the FP32 groups of each plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mptune.reporting.terminal.console import make_console, plain_table, print_fact, print_text, room_beside
from mptune.reporting.terminal.front import print_breaks
from mptune.reporting.text import KEPT_BECAUSE, cut_front, explain_kept, reasons_of, reduced_names
from mptune.tuning.explanation import REASON_WORDS, Reason
from mptune.tuning.fronts.limits import format_error
from mptune.tuning.fronts.table import front_rows, latency_text

if TYPE_CHECKING:
    from mptune.tuning.explanation import GroupWorth
    from mptune.tuning.front import Front

WIDE = 116
"""Minimum columns for what the Casts cost."""

_SHORTEST_NAME = 12


def print_explanation(front: Front, stream: TextIO | None = None) -> None:
    """Print what each group costs and gains, and why groups stay FP32 in each plan of the front."""
    console = make_console(stream)
    explanation = front.explanation
    if not explanation.groups:
        console.print("this run holds nothing to explain: run the same `mptune search` again to add the reasons")
        return
    print_breaks(console, front, every=True)
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
