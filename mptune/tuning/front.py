"""Front: the non-dominated evaluations, the choice among them, and how good the whole is (hypervolume)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.errors import PlanError
from mptune.settings import Tolerance, check_limits
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.content import FrontContent
from mptune.tuning.fronts.dominance import non_dominated
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, REFERENCE_ERROR, dominated_area, exactness, gains
from mptune.tuning.fronts.limits import MetricLimit, error_text, is_wanted, rest_error
from mptune.tuning.fronts.limits import excess as excess_of
from mptune.tuning.fronts.table import format_bytes, front_text, latency_text


@dataclass(frozen=True, repr=False)
class Front(FrontContent):
    """What a search found: the trade-off of latency against error, and the plan taken from it.

    Attributes:
        run_dir: the run directory that it was read from.
        model_path: the user's model.
        model_sha256: its hash.
        target: name of the target.
        engine: name of the toolchain.
        device: what ran or is predicted.
        metric: the objective statistic.
        fp32: the all-FP32 baseline.
        fp16: all-FP16 after pins; None where it failed or was not evaluated.
        points: sorted by latency, non-dominated beyond noise; judged by held-out error where it is known.
        chosen: the plan in ``chosen/``; None where nothing is feasible, or nothing was chosen yet.
        choice: how it was chosen, why, and which limits no plan meets.
        evaluations: plans evaluated, seeds and failures counted in.
        failures: those of them that did not build or run, or whose outputs were not finite.
        hypervolume: ``hypervolume()`` of the points, 0 to 1.
        warnings: that have no code, one line each.
        findings: the most severe first; a warning about groups that the chosen plan keeps in FP32 is ``info``.
        explanation: why groups stay FP32, plan by plan, and what each group costs and gains.
        reported_metrics: that were taken beside the objective.
        hint: what ``chosen_reason`` ends with: a point that is much more exact for little latency.
    """

    def best(
        self,
        *,
        max_error: float | None = None,
        max_latency_ms: float | None = None,
        max_memory_bytes: int | None = None,
    ) -> Evaluation:
        """Take one point of the front; nothing is written. ``mptune.pick`` also writes its model.

        Args:
            max_error: the fastest point whose error is at most this, on the search samples and on the held-out ones.
            max_latency_ms: the most exact point whose median latency is at most this. With both, the fastest that
                meets both. With none, the knee of the front.
            max_memory_bytes: only points whose engine takes at most so much (``EngineMemory.total_bytes``).

        Raises:
            PlanError: no point meets the limits.
            SettingsError: a limit is not above 0.
        """
        check_limits(max_error, max_latency_ms, max_memory_bytes)
        point, reason, limits_met = choose(self.points, max_error, max_latency_ms, max_memory_bytes)
        if point is None:
            raise PlanError(reason, "`mptune report` on the run directory shows what failed")
        if not limits_met:
            nearest = f"{latency_text(point)} ms with error {error_text(point)}"
            raise PlanError(reason.partition(";")[0], f"the nearest is {point.plan.fingerprint}: {nearest}")
        return point

    def __repr__(self) -> str:
        return front_text(self)


def pareto(
    evaluations: Iterable[Evaluation], error: Callable[[Evaluation], float] = attrgetter("judged_error")
) -> tuple[Evaluation, ...]:
    """The non-dominated evaluations, sorted by latency. Plans that are not finite are never kept.

    Each point is significantly faster than the next one, whose error is significantly smaller
    (``tuning.fronts.dominance``). Of plans without a significant difference the one with the smaller error stays, of
    those with the same error the faster one.
    """
    feasible = [e for e in evaluations if e.is_finite]
    feasible.sort(key=lambda e: (error(e), e.latency.median_ms, e.number))
    kept = [feasible[index] for index in non_dominated(feasible, [error(e) for e in feasible])]
    return tuple(sorted(kept, key=lambda e: (e.latency.median_ms, -error(e))))


def confirmed_front(points: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """The front by the error of the search samples, less what is dominated by held-out error.

    Where the two errors rank two plans differently, neither ranking is beyond the noise of the samples; the plan that
    is kept is better in latency and not worse in either error by much, and the front reads the same both ways. Points
    that have no held-out error are not judged by it: theirs would look the better for it.
    """
    searched = pareto(points, error=lambda e: e.error_value)
    beaten = {e.plan.fingerprint for e in searched if e.held_out is not None}
    beaten -= {e.plan.fingerprint for e in pareto(e for e in searched if e.held_out is not None)}
    return tuple(e for e in searched if e.plan.fingerprint not in beaten)


def hypervolume(points: Iterable[Evaluation], fp32: Evaluation, reference_error: float = REFERENCE_ERROR) -> float:
    """Share of the box between nothing and the reference point that the points dominate, 0 to 1.

    The latency axis is linear from 0 ms to the median of all-FP32. The error axis is logarithmic from the floor,
    ``max(error of all-FP32, 1e-7)``, to ``reference_error``. All-FP32 itself adds nothing, and neither
    does a plan that is slower, or whose error is past the reference. Errors are ``judged_error``.
    """
    floor = max(fp32.judged_error, ERROR_FLOOR)
    if not floor < reference_error:
        return 0.0
    finite = [point for point in points if point.is_finite]
    latency_ms = np.array([point.latency.median_ms for point in finite], dtype=float)
    errors = np.array([point.judged_error for point in finite], dtype=float)
    return dominated_area(gains(latency_ms, fp32.latency.median_ms), exactness(errors, reference_error, floor))


def reference_error_of(metric: str, evaluations: Iterable[Evaluation]) -> float:
    """The reference error of the hypervolume: 3e-2 where errors add in squares, else the largest finite error seen."""
    if metric in ADD_IN_SQUARES:
        return REFERENCE_ERROR
    return max((e.judged_error for e in evaluations if e.is_finite), default=REFERENCE_ERROR)


def knee(points: Sequence[Evaluation]) -> Evaluation | None:
    """The point of the front where more speed begins to cost more exactness than it did before.

    Both axes are normalised to 0..1 over the front, latency linearly and the error on a log axis (errors under 1e-7
    count as 1e-7). The knee is the point that lies farthest below the chord from the most exact to the fastest point
    (the "kneedle" idea: Satopaa et al., ICDCSW 2011). Where errors add in squares, points past 3e-2 are left out as
    long as others are there: nobody wants those unasked. All-FP32, whose error says how FP32 engines differ, takes no
    part. Where no point lies below the chord, the fastest is taken.
    """
    mixed = _mixed(points)
    usable = [p for p in mixed if p.metric not in ADD_IN_SQUARES or p.judged_error <= REFERENCE_ERROR] or mixed
    if len(usable) < 3:
        return usable[0] if usable else None
    # With the fastest point at (0, 1) and the most exact at (1, 0), the chord is u + v = 1.
    depth = [1.0 - u - v for u, v in zip(*_normalised(usable), strict=True)]
    best = max(range(len(usable)), key=lambda i: depth[i])
    return usable[best] if depth[best] > 1e-9 else usable[0]


def _mixed(points: Sequence[Evaluation]) -> list[Evaluation]:
    """The points but for all-FP32 where there are others, the fastest first."""
    mixed = [p for p in points if p.plan.reduced_groups] or list(points)
    return sorted(mixed, key=lambda p: (p.latency.median_ms, p.judged_error))


def _normalised(points: Sequence[Evaluation]) -> tuple[list[float], list[float]]:
    """Latency and the logarithm of the error of points, the fastest first, each scaled to 0..1; (n_points,) both."""
    x = [p.latency.median_ms for p in points]
    y = [math.log(max(p.judged_error, ERROR_FLOOR)) for p in points]
    width, height = x[-1] - x[0], max(y) - min(y)
    if width <= 0 or height <= 0:  # all equal in one: the fastest is as good as any, and lies on the chord
        return [0.0] * len(points), [1.0] * len(points)
    return [(a - x[0]) / width for a in x], [(b - min(y)) / height for b in y]


def choose(
    points: Sequence[Evaluation],
    max_error: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    tolerances: Sequence[Tolerance] = (),
    metric_limits: Sequence[MetricLimit] = (),
    *,
    wants_knee: bool = False,
    is_random: bool = False,
) -> tuple[Evaluation | None, str, bool]:
    """Take one point of the front; why, and whether the limits are met.

    With a limit on error, a tolerance or a metric's limit the fastest that meets all, with one on latency beside none
    or tolerances the most exact, with one on memory alone or none the knee. A limit holds on the search samples and on
    the held-out ones; ``max_error`` limits what no tolerance is about. A point whose memory is not known meets no limit
    on memory. Where the limits cannot be met the point is the nearest: the one whose worst excess over a limit, as a
    ratio, is the smallest. Where the front has no knee the fastest is taken, but not if its errors are those of random
    inputs (``is_random``): then the point that is nearest to both ends.
    """
    limits = []
    if max_error is not None:
        limits.append(f"error <= {max_error:g}")
    if max_latency_ms is not None:
        limits.append(f"latency <= {max_latency_ms:g} ms")
    if max_memory_bytes is not None:
        limits.append(f"memory <= {format_bytes(max_memory_bytes)}")
    by_value = " and ".join(limit.text for limit in metric_limits)
    wanted = ", and ".join(filter(None, (" and ".join([*map(str, tolerances), *limits]), by_value)))
    if not points:
        return None, "no plan is feasible", not wanted
    if not wanted:
        at_knee = knee(points)
        if at_knee is not min(points, key=lambda p: (p.latency.median_ms, p.judged_error)):
            return at_knee, "the knee of the front", True
        no_knee = "the front has no knee: no plan lies below the line between its ends"
        if is_random and len(mixed := _mixed(points)) > 2:
            u, v = _normalised(mixed)
            nearest = min(range(len(mixed)), key=lambda i: math.hypot(u[i], v[i]))
            return mixed[nearest], f"the plan nearest to both ends, for random inputs; {no_knee}", True
        return at_knee, f"the fastest plan; {no_knee}", True

    def excess(point: Evaluation) -> float:
        ratios = [1.0, *(limit.excess(point) for limit in metric_limits)]
        if max_error is not None:
            ratios.append(rest_error(point, tolerances) / max_error)
        ratios += [excess_of(point, tolerance) for tolerance in tolerances]
        if max_latency_ms is not None:
            ratios.append(point.latency.median_ms / max_latency_ms)
        if max_memory_bytes is not None:
            ratios.append(math.inf if point.memory is None else point.memory.total_bytes / max_memory_bytes)
        return max(ratios)

    if max_memory_bytes is not None and all(point.memory is None for point in points):
        return min(points, key=excess), f"what memory plans take is not known, so none is shown to have {wanted}", False
    meeting = [p for p in points if excess(p) <= 1.0]
    if not meeting:
        return min(points, key=excess), f"no plan has {wanted}; this is the nearest", False
    if wants_knee or (max_error is None and max_latency_ms is None and not tolerances and not metric_limits):
        return knee(meeting), f"the knee of the points with {wanted}", True
    if tolerances and max_error is None:
        meeting = [p for p in meeting if is_wanted(p, tolerances)] or meeting
    if max_error is None and max_latency_ms is not None:
        return min(meeting, key=lambda p: (p.judged_error, p.latency.median_ms)), f"the most exact with {wanted}", True
    return min(meeting, key=lambda p: (p.latency.median_ms, p.judged_error)), f"the fastest with {wanted}", True
