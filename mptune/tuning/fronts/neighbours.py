"""What the points beside a chosen one would give: how much faster, and how much more or less exact, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mptune.data.metrics.paired import Difference, compare_errors
from mptune.tuning.evaluation import Evaluation


@dataclass(frozen=True)
class Neighbour:
    """A point of the front beside the chosen one.

    Attributes:
        evaluation: the point.
        latency_ms_delta: its latency less the chosen one's; negative is faster.
        error: its error against the chosen one's, sample by sample on all samples that both have met; None where that
            cannot be known, such as with a single sample.
    """

    evaluation: Evaluation
    latency_ms_delta: float
    error: Difference | None


def compare_samples(one: Evaluation, other: Evaluation) -> Difference | None:
    """How two plans' errors differ, on all samples that both have met; None where that cannot be known."""
    first, second = one.error, other.error
    if one.held_out is not None and other.held_out is not None:
        first, second = first.with_samples_of(one.held_out), second.with_samples_of(other.held_out)
    return compare_errors(first, second, one.metric)


def neighbours(points: Sequence[Evaluation], chosen: Evaluation) -> tuple[Neighbour, ...]:
    """The next faster and the next slower point; fewer at the ends of the front.

    Args:
        points: the front, sorted by latency.
        chosen: one of them, or any other evaluation.
    """
    others = [point for point in points if point.plan != chosen.plan]
    faster = [point for point in others if point.latency.median_ms < chosen.latency.median_ms]
    slower = [point for point in others if point.latency.median_ms >= chosen.latency.median_ms]
    return tuple(
        Neighbour(point, point.latency.median_ms - chosen.latency.median_ms, compare_samples(point, chosen))
        for point in (*faster[-1:], *slower[:1])
    )
