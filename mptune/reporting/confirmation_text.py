"""A confirmation in words, for the terminal and the page: what became of every plan, and the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mptune.tuning.confirmation import Agreement, Confirmation, ConfirmedPlan


def sources_before(confirmation: Confirmation) -> tuple[str, str]:
    """What the search's latencies and errors were: predicted and emulated, or measured earlier."""
    searched = confirmation.searched
    return (
        "predicted" if searched.latency_source == "predicted" else "earlier",
        "emulated" if searched.error_source == "emulated" else "earlier",
    )


def place_of(confirmation: Confirmation, plan: ConfirmedPlan) -> str:
    """What became of a plan on the device, in a word."""
    front = confirmation.front
    if plan.measured is None:
        return "failed"
    if front.chosen is not None and front.chosen.plan == plan.searched.plan:
        return "chosen"
    return "front" if any(point.plan == plan.searched.plan for point in front.points) else ""


def verdicts(confirmation: Confirmation) -> tuple[str, str]:
    """Whether the search's rankings held: a line for the latencies and one for the errors."""
    latency, error = sources_before(confirmation)
    return _verdict("latency", confirmation.latency, latency), _verdict("error", confirmation.error, error)


def _verdict(what: str, agreement: Agreement, source: str) -> str:
    tau = "not defined" if agreement.kendall_tau is None else f"{agreement.kendall_tau:.2f}"
    return (
        f"{what}: Kendall's tau {tau} over {agreement.plans} plans; {agreement.agreeing} of {agreement.pairs} pairs "
        f"that differ beyond noise are in the same order: the {source} ranking {agreement.verdict}"
    )
