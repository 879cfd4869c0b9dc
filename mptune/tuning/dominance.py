"""The front: which plans nothing dominates where figures are known to intervals only, and the hypervolume of a front.

The axes of the hypervolume, both 0 to 1: the gain is the share of the base latency that a plan saves; the exactness
falls with the logarithm of the error, from 1 at the floor to 0 at the reference error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.latency import are_lower, is_lower
from mptune.tuning.evaluation import Evaluation

Floats = NDArray[np.float64]

REFERENCE_ERROR = 3e-2
"""Relative L2 error past which a plan is worth nothing: the reference point of the hypervolume."""

ERROR_FLOOR = 1e-7
"""About the relative rounding error of FP32: smaller errors count as equal."""

LEAST_FASTER, LEAST_EXACTER = 0.01, 1.1
"""A faster neighbour takes this share of the latency less, a more exact one has this many times less error."""

_JUDGED, _SEARCHED = attrgetter("judged_error"), attrgetter("error_value")
_ZERO = np.zeros(1)


def faster_beyond_noise(first: Evaluation, other: Evaluation) -> bool:
    """Whether the latency of ``first`` is lower beyond noise (``mptune.engines.latency``)."""
    return is_lower(first.latency, other.latency)


def pareto(evaluations: Iterable[Evaluation], error: Callable[[Evaluation], float] = _JUDGED) -> tuple[Evaluation, ...]:
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
    searched = pareto(points, _SEARCHED)
    remeasured = [e for e in searched if e.held_out is not None]
    beaten = {e.plan for e in remeasured} - {e.plan for e in pareto(remeasured)}
    return tuple(e for e in searched if e.plan not in beaten)


def shared_errors(left: Evaluation, right: Evaluation) -> tuple[float, float]:
    """The errors of two plans: on the held-out samples if both have met them, else on the search samples.

    On these, too, where the error of one is larger there: what the held-out samples lack is no gain.
    """
    is_lucky = left.is_larger_in_search or right.is_larger_in_search
    if left.held_out_value is None or right.held_out_value is None or is_lucky:
        return left.error_value, right.error_value
    return left.held_out_value, right.held_out_value


class Neighbour(NamedTuple):
    """A point of the front that a person would compare with the chosen plan; its role is what it is better in."""

    role: Literal["faster", "more exact"]
    evaluation: Evaluation


def neighbours(points: Sequence[Evaluation], chosen: Evaluation) -> tuple[Neighbour, ...]:
    """The nearest clearly faster point, then the nearest clearly more exact one; fewer where there is none.

    Latencies differ beyond noise. Points are sorted by latency; the chosen plan may be none of them.
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
    ``max(error of all-FP32, 1e-7)``, to ``reference_error``. All-FP32 itself adds nothing, and neither does a plan that
    is slower, or whose error is past the reference. Errors are ``judged_error``.
    """
    return dominated_area(*_in_box(list(points), fp32, reference_error, _JUDGED))


def hypervolumes(evaluations: Sequence[Evaluation], fp32: Evaluation, reference_error: float) -> tuple[float, ...]:
    """``hypervolume`` of the first plan, the first two, and so on, by the errors of the search samples."""
    gain, exact = _in_box(evaluations, fp32, reference_error, _SEARCHED)
    return tuple(dominated_area(gain[:count], exact[:count]) for count in range(1, len(evaluations) + 1))


def _in_box(
    evaluations: Sequence[Evaluation], fp32: Evaluation, reference_error: float, error: Callable[[Evaluation], float]
) -> tuple[Floats, Floats]:
    """The gain and the exactness of plans, shape (n_plans,) each."""
    errors = np.array([error(e) if e.is_finite else math.inf for e in evaluations], dtype=float)
    gain = gains(np.array([e.latency.median_ms for e in evaluations], dtype=float), fp32.latency.median_ms)
    floor = max(error(fp32), ERROR_FLOOR)
    return gain, exactness(errors, reference_error, floor) if floor < reference_error else np.zeros_like(errors)


def reference_error_of(metric: str, evaluations: Iterable[Evaluation]) -> float:
    """The reference error of the hypervolume: 3e-2 where errors add in squares, else the largest finite error."""
    if metric in ADD_IN_SQUARES:
        return REFERENCE_ERROR
    return max((e.judged_error for e in evaluations if e.is_finite), default=REFERENCE_ERROR)


def gains(latency_ms: Floats, base_ms: Floats | float) -> Floats:
    """Shares of the base latency that are saved; none of a base of 0, of a graph that does nothing."""
    is_none = np.ndim(base_ms) == 0 and base_ms == 0
    return np.zeros_like(latency_ms) if is_none else 1.0 - latency_ms / base_ms


def exactness(error: Floats, reference_error: float = REFERENCE_ERROR, floor: float = ERROR_FLOOR) -> Floats:
    """Positions of errors on the log axis: 1 at the floor and below, 0 at the reference error, negative past it."""
    log_ratio = math.log(reference_error) - np.log(np.maximum(error, floor))
    exact: Floats = log_ratio / math.log(reference_error / floor)
    return exact


def pareto_staircase(gain: Floats, exact: Floats) -> tuple[Floats, Floats]:
    """The front's ascending gains and falling exactness, shape (n_front,) each, of points inside the reference box."""
    inside = (gain > 0) & (exact > 0)
    order = np.argsort(gain[inside])
    front_gain, front_exact = gain[inside][order], exact[inside][order]
    front_exact = np.maximum.accumulate(front_exact[::-1])[::-1]
    is_step = np.append(front_exact[:-1] > front_exact[1:], True)[: len(front_exact)]
    return front_gain[is_step], front_exact[is_step]


def dominated_area(gain: Floats, exact: Floats) -> float:
    """The hypervolume: area that points dominate, 0 to 1. Both arguments have shape (n_points,)."""
    front_gain, front_exact = pareto_staircase(gain, exact)
    return float((np.diff(np.append(0.0, front_gain)) * front_exact).sum())


def hypervolume_improvement(gain: Floats, exact: Floats, front_gain: Floats, front_exact: Floats) -> Floats:
    """Area that each point alone adds to a Pareto staircase, shape (n_points,)."""
    ends = np.concatenate((_ZERO, front_gain))  # np.append and np.diff take as long as all the rest
    dominated = np.concatenate((_ZERO, np.cumsum((ends[1:] - ends[:-1]) * front_exact)))
    # A point only adds what lies to the right of the last front point that is at least as exact.
    first = np.searchsorted(-front_exact, -exact, side="right")
    begins = ends[first]
    added = np.zeros(len(gain))
    adds = np.flatnonzero((gain > begins) & (exact > 0.0))
    gain, begins = gain[adds], begins[adds]
    added[adds] = exact[adds] * (gain - begins) - (np.interp(gain, ends, dominated) - dominated[first[adds]])
    return added
