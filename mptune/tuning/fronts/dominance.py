"""The front: which evaluations nothing dominates where figures are known to an interval only, and how good it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, REFERENCE_ERROR, dominated_area, exactness, gains
from mptune.tuning.fronts.limits import is_larger_in_search

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.latency import are_lower, is_lower
from mptune.tuning.evaluation import Evaluation

LEAST_FASTER, LEAST_EXACTER = 0.01, 1.1
"""A faster neighbour takes this share of the latency less, a more exact one has this many times less error."""


def faster_beyond_noise(first: Evaluation, other: Evaluation) -> bool:
    """Whether the latency of ``first`` is lower beyond noise (``mptune.engines.latency``)."""
    return is_lower(first.latency, other.latency)


def pareto(
    evaluations: Iterable[Evaluation], error: Callable[[Evaluation], float] = attrgetter("judged_error")
) -> tuple[Evaluation, ...]:
    """The non-dominated evaluations, sorted by latency. Plans that are not finite are never among them.

    A point is faster beyond noise than every point that is as exact or more exact: so of plans whose latencies differ
    within the noise the more exact one stays, and of those with one error the faster one.
    """
    plans = sorted((e for e in evaluations if e.is_finite), key=lambda e: (error(e), e.latency.median_ms, e.number))
    faster = are_lower([e.latency for e in plans])  # (plans, plans): the row's latency is lower than the column's
    on_front: list[int] = []
    for index in range(len(plans)):
        if faster[index, on_front].all():
            on_front.append(index)
    return tuple(plans[index] for index in reversed(on_front))


def confirmed_front(points: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """The front by the error of the search samples, less what is dominated by held-out error.

    Where the two errors rank two plans differently, neither ranking is beyond the noise of the samples; the plan that
    stays is better in latency and not worse in either error by much, and the front reads the same both ways. Points
    that have no held-out error are not judged by it: theirs would look the better for it.
    """
    searched = pareto(points, error=lambda e: e.error_value)
    remeasured = [e for e in searched if e.held_out is not None]
    beaten = {e.plan for e in remeasured} - {e.plan for e in pareto(remeasured)}
    return tuple(e for e in searched if e.plan not in beaten)


def shared_errors(left: Evaluation, right: Evaluation) -> tuple[float, float]:
    """The errors of two plans: on the held-out samples if both have met them, else on the search samples.

    On these, too, where the error of one is larger there: what the held-out samples lack is no gain.
    """
    is_lucky = is_larger_in_search(left) or is_larger_in_search(right)
    if left.held_out_value is None or right.held_out_value is None or is_lucky:
        return left.error_value, right.error_value
    return left.held_out_value, right.held_out_value


class Neighbour(NamedTuple):
    """A point of the front that a person would compare with the chosen plan; its role is what it is better in."""

    role: Literal["faster", "more exact"]
    evaluation: Evaluation


def neighbours(points: Sequence[Evaluation], chosen: Evaluation) -> tuple[Neighbour, ...]:
    """The nearest clearly faster point, then the nearest clearly more exact one; fewer where there is none.

    Latencies differ beyond noise. Every view names these, and no others. Points are sorted by latency; the chosen plan
    may be none of them.
    """
    most_ms = (1.0 - LEAST_FASTER) * chosen.latency.median_ms
    faster = [p for p in points if p.latency.median_ms <= most_ms and faster_beyond_noise(p, chosen)]
    exacter = []
    for point in points:
        before, after = shared_errors(chosen, point)
        if after < before and LEAST_EXACTER * after <= before and faster_beyond_noise(chosen, point):
            exacter.append(point)
    return (*(Neighbour("faster", p) for p in faster[-1:]), *(Neighbour("more exact", p) for p in exacter[:1]))


def hypervolume(points: Iterable[Evaluation], fp32: Evaluation, reference_error: float = REFERENCE_ERROR) -> float:
    """Share of the box between nothing and the reference point that the points dominate, 0 to 1.

    The latency axis is linear from 0 ms to the median of all-FP32. The error axis is logarithmic from the floor,
    ``max(error of all-FP32, 1e-7)``, to ``reference_error``. All-FP32 itself adds nothing, and neither
    does a plan that is slower, or whose error is past the reference. Errors are ``judged_error``.
    """
    floor = max(fp32.judged_error, ERROR_FLOOR)
    if not floor < reference_error:
        return 0.0
    finite = [(e.latency.median_ms, e.judged_error) for e in points if e.is_finite]
    latency_ms, errors = np.array(finite, dtype=float).reshape(-1, 2).T
    return dominated_area(gains(latency_ms, fp32.latency.median_ms), exactness(errors, reference_error, floor))


def reference_error_of(metric: str, evaluations: Iterable[Evaluation]) -> float:
    """The reference error of the hypervolume: 3e-2 where errors add in squares, else the largest finite error seen."""
    if metric in ADD_IN_SQUARES:
        return REFERENCE_ERROR
    return max((e.judged_error for e in evaluations if e.is_finite), default=REFERENCE_ERROR)
