"""What the points beside a chosen one would give: how much faster, and how much more or less exact, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mptune.data.metrics.paired import LEAST_ERROR, Difference, compare_errors
from mptune.data.numbers import encode_float
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.dominance import faster_beyond_noise


@dataclass(frozen=True)
class Neighbour:
    """A point of the front beside the chosen one.

    Attributes:
        evaluation: the point.
        latency_ms_delta: its latency less the chosen one's; negative is faster.
        is_apart: one of both is faster beyond noise.
        error: its error against the chosen one's, sample by sample on all samples that both have met; None where that
            cannot be known, such as with a single sample.
        error_ratio: its error over the chosen one's, as ``error_ratio`` gives it.
    """

    evaluation: Evaluation
    latency_ms_delta: float
    is_apart: bool
    error: Difference | None
    error_ratio: float

    @property
    def text(self) -> str:
        """What it gives for its latency, such as ``+0.008 ms: 7 times less error``."""
        return f"+{self.latency_ms_delta:.3g} ms: {1 / max(self.error_ratio, 1e-3):.2g} times less error"

    def to_json(self) -> dict[str, Any]:
        """As in front.json."""
        return {
            "plan": self.evaluation.plan.fingerprint,
            "latency_ms_delta": encode_float(self.latency_ms_delta),
            "error_ratio": encode_float(self.error_ratio),
        }


LITTLE_LATENCY, MUCH_EXACTNESS = 1.05, 1 / 3
"""A slower point is named beside the chosen one where its latency is at most this much of the chosen one's, and its
error at most this much, beyond the doubt of the samples."""


def compare_samples(one: Evaluation, other: Evaluation) -> Difference | None:
    """How two plans' errors differ, on all samples that both have met; None where that cannot be known."""
    first, second = one.counted, other.counted
    if one.counted_held_out is not None and other.counted_held_out is not None:
        first, second = first.with_samples_of(one.counted_held_out), second.with_samples_of(other.counted_held_out)
    return compare_errors(first, second, one.metric)


def error_ratio(one: Evaluation, other: Evaluation) -> float:
    """One plan's error over the other's: on the held-out samples if both have met them, else on the search samples."""
    if one.held_out_value is None or other.held_out_value is None:
        return max(one.error_value, LEAST_ERROR) / max(other.error_value, LEAST_ERROR)
    return max(one.held_out_value, LEAST_ERROR) / max(other.held_out_value, LEAST_ERROR)


def neighbours(points: Sequence[Evaluation], chosen: Evaluation) -> tuple[Neighbour, ...]:
    """The next faster and the next slower point; fewer at the ends of the front.

    Args:
        points: the front, sorted by latency.
        chosen: one of them, or any other evaluation.
    """
    others = [point for point in points if point.plan != chosen.plan]
    faster = [point for point in others if point.latency.median_ms < chosen.latency.median_ms]
    slower = [point for point in others if point.latency.median_ms >= chosen.latency.median_ms]
    return tuple(_beside(point, chosen) for point in (*faster[-1:], *slower[:1]))


def cheap_exactness(points: Sequence[Evaluation], chosen: Evaluation) -> Neighbour | None:
    """The next slower point of the front that is much more exact for little latency; None where none is.

    All-FP32 is none: it is known to be exact.
    """
    most_ms = chosen.latency.median_ms * LITTLE_LATENCY
    for point in points:
        if point.plan == chosen.plan or not chosen.latency.median_ms <= point.latency.median_ms <= most_ms:
            continue
        found = _beside(point, chosen)
        doubtful = found.error is not None and not found.error.is_significant
        if point.plan.reduced_groups and found.error_ratio <= MUCH_EXACTNESS and not doubtful:
            return found
    return None


def _beside(point: Evaluation, chosen: Evaluation) -> Neighbour:
    delta_ms = point.latency.median_ms - chosen.latency.median_ms
    is_apart = faster_beyond_noise(point, chosen) or faster_beyond_noise(chosen, point)
    return Neighbour(point, delta_ms, is_apart, compare_samples(point, chosen), error_ratio(point, chosen))
