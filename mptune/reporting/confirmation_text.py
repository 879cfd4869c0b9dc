"""A confirmation as rows of text, for the terminal and the page: both figures of every plan, verdicts, failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mptune.reporting.text import error_cell, format_interval, latency_text, metric_cell, speedup_of
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation

if TYPE_CHECKING:
    from mptune.tuning.runs.confirmation import Agreement, Confirmation, ConfirmedPlan

INTERVAL = "95 %"
"""Heading of the confidence interval of the measured latency."""


def headings(confirmation: Confirmation) -> tuple[str, ...]:
    """Of the figures in ``_cells``."""
    searched = confirmation.searched
    latency = "pred." if searched.latency_source == "predicted" else "earlier"
    error = "emul." if searched.error_source == "emulated" else "earlier"
    figures = f"{latency} ms", "meas. ms", INTERVAL, f"{latency} x", "meas. x", f"{error} err", "meas. err"
    return (*figures, *confirmation.front.metrics)


def cells_of(confirmation: Confirmation, plan: ConfirmedPlan) -> tuple[str, list[str], str]:
    """Id of the plan; its figures, as in ``headings``; and its origin."""
    seen, now, baseline = plan.searched, plan.measured, searched_baseline(confirmation)
    figures = [
        latency_text(seen),
        "-" if now is None else latency_text(now),
        "" if now is None else format_interval(now),
        speedup_of(seen, baseline).removesuffix("x"),
        "-" if now is None else speedup_of(now, confirmation.front.fp32).removesuffix("x"),
        error_cell(seen),
        "-" if now is None or now.held_out is None else error_cell(now),
        *("-" if now is None else metric_cell(now, metric) for metric in confirmation.front.metrics.values()),
    ]
    return seen.plan.fingerprint, figures, seen.origin.label


def has_two_errors(confirmation: Confirmation, plan: ConfirmedPlan) -> bool:
    """Whether figures of a plan stand beside those of the search samples, in brackets."""
    return any("(" in figure for figure in cells_of(confirmation, plan)[1])


def searched_baseline(confirmation: Confirmation) -> Evaluation | None:
    """All-FP32 as the search saw it; None where it is not among the plans."""
    return next((p.searched for p in confirmation.plans if p.searched.origin == ORIGIN_FP32), None)


def place_of(confirmation: Confirmation, plan: ConfirmedPlan) -> str:
    """What became of a plan on the device, in a word."""
    front = confirmation.front
    if plan.measured is None:
        return "failed"
    if front.chosen is not None and front.chosen.plan == plan.searched.plan:
        return "chosen"
    return "front" if any(point.plan == plan.searched.plan for point in front.points) else ""


def failures(confirmation: Confirmation) -> list[str]:
    """A line for every plan that failed on the device."""
    return [
        f"failed: {plan.searched.plan.fingerprint} ({plan.searched.origin.label}): {plan.failure}"
        for plan in confirmation.plans
        if plan.measured is None
    ]


def verdicts(confirmation: Confirmation) -> tuple[str, str]:
    """Whether the search's rankings held: a line for the latencies and one for the errors."""
    searched = confirmation.searched
    latency = "predicted" if searched.latency_source == "predicted" else "earlier"
    error = "emulated" if searched.error_source == "emulated" else "earlier"
    return (
        _verdict("latency", confirmation.latency, f"the {latency} ranking"),
        _verdict("error", confirmation.error, f"the {error} ranking"),
    )


def _verdict(what: str, agreement: Agreement, ranking: str) -> str:
    tau = "not defined" if agreement.kendall_tau is None else f"{agreement.kendall_tau:.2f}"
    return (
        f"{what}: Kendall's tau {tau} over {agreement.plans} plans; {agreement.agreeing} of {agreement.pairs} pairs "
        f"that differ beyond noise are in the same order: {ranking} {agreement.verdict}"
    )
