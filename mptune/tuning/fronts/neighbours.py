"""The plans beside a chosen one: the nearest that is clearly faster, and the nearest that is clearly more exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mptune.data.metrics.paired import LEAST_ERROR, Difference, compare_errors
from mptune.json_form import encode_float
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.dominance import FAR_SMALLER, faster_beyond_noise
from mptune.tuning.fronts.limits import is_larger_in_search

LEAST_FASTER, LEAST_EXACTER = 0.01, 1.1
"""A faster neighbour takes so much less of the latency at least; a more exact one has so many times less error."""

LITTLE_LATENCY, MUCH_EXACTER = 1.05, 3.0
"""A plan with so many times less error, for so many times the latency at most, comes before one that is nearer."""


@dataclass(frozen=True)
class Neighbour:
    """A point of the front that a person would compare with the chosen plan; its role is what it is better in."""

    role: Literal["faster", "more exact"]
    evaluation: Evaluation
    chosen: Evaluation

    @property
    def latency_ms_delta(self) -> float:
        """Its latency less the chosen plan's; negative is faster."""
        return self.evaluation.latency.median_ms - self.chosen.latency.median_ms

    @property
    def error_ratio(self) -> float:
        """Its error over the chosen plan's, on samples that both have met."""
        before, after = shared_errors(self.chosen, self.evaluation)
        return max(after, LEAST_ERROR) / max(before, LEAST_ERROR)

    @property
    def is_cheap(self) -> bool:
        """Whether it is much more exact for little latency. All-FP32 is not: it is known to be exact."""
        is_near = self.evaluation.latency.median_ms <= LITTLE_LATENCY * self.chosen.latency.median_ms
        return is_near and self.error_ratio * MUCH_EXACTER <= 1.0 and bool(self.evaluation.plan.reduced_groups)

    def to_json(self) -> dict[str, Any]:
        """As in front.json."""
        plan, delta_ms, ratio = self.evaluation.plan.fingerprint, self.latency_ms_delta, self.error_ratio
        return {"plan": plan, "latency_ms_delta": encode_float(delta_ms), "error_ratio": encode_float(ratio)}


def compare_samples(left: Evaluation, right: Evaluation) -> Difference | None:
    """How two plans' errors differ, on all samples that both have met; None where that cannot be known."""
    first, second = left.counted, right.counted
    if left.counted_held_out is not None and right.counted_held_out is not None:
        first, second = first.with_samples_of(left.counted_held_out), second.with_samples_of(right.counted_held_out)
    return compare_errors(first, second, left.metric)


def shared_errors(left: Evaluation, right: Evaluation) -> tuple[float, float]:
    """The errors of two plans: on the held-out samples if both have met them, else on the search samples.

    On these, too, where the error of one is larger there: what the held-out samples lack is no gain.
    """
    is_lucky = is_larger_in_search(left) or is_larger_in_search(right)
    if left.held_out_value is None or right.held_out_value is None or is_lucky:
        return left.error_value, right.error_value
    return left.held_out_value, right.held_out_value


def neighbours(points: Sequence[Evaluation], chosen: Evaluation) -> tuple[Neighbour, ...]:
    """The nearest clearly faster point, then the nearest clearly more exact one; fewer where there is none.

    Latencies differ beyond noise. Every view names these, and no others. Points are sorted by latency; the chosen plan
    may be none of them.
    """
    most_ms = (1.0 - LEAST_FASTER) * chosen.latency.median_ms
    faster = [
        Neighbour("faster", point, chosen)
        for point in points
        if point.latency.median_ms <= most_ms and faster_beyond_noise(point, chosen)
    ]
    slower = (point for point in points if faster_beyond_noise(chosen, point))
    exacter = [Neighbour("more exact", point, chosen) for point in slower if _is_more_exact(point, chosen)]
    exacter.sort(key=lambda beside: not beside.is_cheap)
    return (*faster[-1:], *exacter[:1])


def _is_more_exact(point: Evaluation, chosen: Evaluation) -> bool:
    before, after = shared_errors(chosen, point)
    if not (after < before and LEAST_EXACTER * after <= before):
        return False
    difference = compare_samples(point, chosen)
    return difference is None or difference.is_significant or FAR_SMALLER * after <= before
