"""A confirmation as people read it: what the search saw, what the device measured, whether the rankings agree."""

from __future__ import annotations

import sys
from html import escape as escape_html
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mptune.reporting.terminal.console import make_console
from mptune.reporting.text import (
    describe_engine,
    error_source,
    format_error,
    format_interval,
    format_ms,
    latency_source,
    short_path,
    unique,
)

if TYPE_CHECKING:
    from mptune.tuning.reasons.ranking import Agreement
    from mptune.tuning.runs.confirmation import Confirmation, ConfirmedPlan


WIDE = 112
"""From this many columns on there is room for the intervals."""

_INTERVAL = "95 %"
_LEAST_ORIGIN = 8
_STYLES = {"chosen": "bold green", "front": "", "failed": "red", "": "dim"}


def print_confirmation(confirmation: Confirmation, stream: TextIO | None = None) -> None:
    """Print a confirmation: the table of both, Kendall's tau, the verdict in words, the choice, warnings and files.

    Args:
        confirmation: what ``mptune.api.confirm`` returned.
        stream: where to print; stdout by default.
    """
    console = make_console(sys.stdout if stream is None else stream)
    front, searched = confirmation.front, confirmation.searched
    facts = [
        ("model", f"{front.model_path} (sha256 {front.model_sha256[:12]})"),
        ("searched", f"{searched.name}, latency {searched.latency_source}, error {searched.error_source}"),
        ("device", describe_engine(front)),
        ("latency", latency_source(front)),
        ("error", error_source(front)),
    ]
    for name, value in facts:
        console.print(Text.assemble((f"{name:<9}", "dim"), value), soft_wrap=True)
    console.print()
    console.print(_table(confirmation, console.width))
    console.print()
    for line in (*_failures(confirmation), *verdicts(confirmation)):
        console.print(line, soft_wrap=True)
    console.print()
    for name, value in _outcome(confirmation):
        console.print(Text.assemble((f"{name:<9}", "dim"), value), soft_wrap=True)
    for text in unique(front.warnings):
        console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=not console.is_terminal)
    if not front.limits_met:
        console.print(Text(f"limits not met: {front.chosen_reason}", style="bold yellow"))


def verdicts(confirmation: Confirmation) -> tuple[str, str]:
    """Whether the search's rankings held, a line for the latencies and one for the errors."""
    searched = confirmation.searched
    latency = "predicted" if searched.latency_source == "predicted" else "earlier"
    error = "emulated" if searched.error_source == "emulated" else "earlier"
    return (
        _verdict("latency", confirmation.latency, f"the {latency} ranking"),
        _verdict("error", confirmation.error, f"the {error} ranking"),
    )


def _verdict(what: str, agreement: Agreement, ranking: str) -> str:
    tau = "not defined" if agreement.tau is None else f"{agreement.tau:.2f}"
    return (
        f"{what}: Kendall's tau {tau} over {agreement.plans} plans; {agreement.agreeing} of {agreement.pairs} pairs "
        f"that differ beyond noise are in the same order: {ranking} {agreement.verdict}"
    )


def _outcome(confirmation: Confirmation) -> list[tuple[str, str]]:
    front = confirmation.front
    if front.chosen is None:
        chosen = f"none: {front.chosen_reason}"
    else:
        point = front.chosen
        chosen = (
            f"{point.plan.fingerprint}: {format_ms(point.latency.median_ms)} ms, "
            f"error {format_error(point.judged_error)}; {front.chosen_reason}"
        )
    found = [("chosen", chosen)]
    for name, path in (("model", "chosen/model.onnx"), ("engine", "chosen/model.engine"), ("page", "report.html")):
        if (front.run_dir / path).exists():
            found.append((name, short_path(front.run_dir / path)))
    return [*found, ("another", f"mptune pick {short_path(Path(front.run_dir))} with a limit, --knee or --plan ID")]


def _headings(confirmation: Confirmation) -> tuple[str, ...]:
    """Of the figures in ``_cells``."""
    searched = confirmation.searched
    latency = "pred." if searched.latency_source == "predicted" else "earlier"
    error = "emul." if searched.error_source == "emulated" else "earlier"
    return f"{latency} ms", "meas. ms", _INTERVAL, f"{latency} x", "meas. x", f"{error} err", "meas. err"


def _cells(confirmation: Confirmation, plan: ConfirmedPlan) -> tuple[str, list[str], str]:
    """The plan; both latencies with the interval, both speed-ups, both errors; and who proposed it."""
    seen, now = plan.searched, plan.measured
    figures = [
        format_ms(seen.latency.median_ms),
        "-" if now is None else format_ms(now.latency.median_ms),
        "" if now is None else format_interval(now),
        f"{seen.speedup:.2f}",
        "-" if now is None else f"{now.speedup:.2f}",
        format_error(seen.judged_error),
        "-" if now is None else format_error(now.held_out_value),
    ]
    return seen.plan.fingerprint, figures, seen.origin.removeprefix("seed: ")


def _place(confirmation: Confirmation, plan: ConfirmedPlan) -> str:
    """What became of a plan on the device, in a word."""
    front = confirmation.front
    if plan.measured is None:
        return "failed"
    if front.chosen is not None and front.chosen.plan == plan.searched.plan:
        return "chosen"
    return "front" if any(point.plan == plan.searched.plan for point in front.points) else ""


def _failures(confirmation: Confirmation) -> list[str]:
    """A line for every plan that failed on the device."""
    return [
        f"failed: {plan.searched.plan.fingerprint} ({plan.searched.origin.removeprefix('seed: ')}): {plan.failure}"
        for plan in confirmation.plans
        if plan.measured is None
    ]


def _table(confirmation: Confirmation, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    shown = [name for name in _headings(confirmation) if name != _INTERVAL or width >= WIDE]
    lines = []
    for plan in confirmation.plans:
        name, figures, origin = _cells(confirmation, plan)
        numbers = dict(zip(_headings(confirmation), figures, strict=True))
        lines.append(([name, *(numbers[one] for one in shown), _place(confirmation, plan)], origin))
    heads = ["plan", *shown, ""]
    widths = [max(len(head), *(len(cells[k]) for cells, _ in lines)) for k, head in enumerate(heads)]
    left = max(_LEAST_ORIGIN, width - sum(widths) - 2 * len(widths) - 1)
    for head, wide in zip(heads, widths, strict=True):
        table.add_column(head, justify="right" if head in shown else "left", no_wrap=True, min_width=wide)
    table.add_column("origin", no_wrap=True)
    for cells, origin in lines:
        told = Text(origin)
        told.truncate(left, overflow="ellipsis")
        table.add_row(*map(escape, cells), told, style=_STYLES[cells[-1]])
    return table


def confirmation_section(confirmation: Confirmation) -> str:
    """The section of the page: the table of both, and the verdicts."""
    heads = "".join(f'<th class="number">{escape_html(name)}</th>' for name in _headings(confirmation))
    rows = []
    for plan in confirmation.plans:
        name, figures, origin = _cells(confirmation, plan)
        place = _place(confirmation, plan)
        numbers = "".join(f'<td class="number">{escape_html(text)}</td>' for text in figures)
        style = ' class="is-chosen"' if place == "chosen" else ""
        rows.append(
            f"<tr{style}><td><code>{name}</code></td>{numbers}<td>{place}</td><td>{escape_html(origin)}</td></tr>"
        )
    lines = (*verdicts(confirmation), *_failures(confirmation))
    told = "".join(f"<p>{escape_html(line)}.</p>" for line in lines)
    body = "\n".join(rows)
    return (
        f"<section>\n<h2>What the search saw, and what {escape_html(confirmation.front.device)} measured</h2>\n{told}\n"
        f'<div class="scroll"><table>\n<thead><tr><th>plan</th>{heads}<th></th><th>origin</th></tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n</section>"
    )
