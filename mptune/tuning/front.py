"""Front: the non-dominated evaluations, the choice, and what the search says about them; how good the whole is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from mptune.choice import Choice
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.errors import PlanError
from mptune.finding import Finding
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import encode
from mptune.settings import check_limits
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.explanation import Explanation
from mptune.tuning.fronts.choosing import choose
from mptune.tuning.fronts.dominance import Neighbour, neighbours, non_dominated
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, REFERENCE_ERROR, dominated_area, exactness, gains
from mptune.tuning.fronts.limits import metric_values, shown_metrics
from mptune.tuning.fronts.texts import choice_limits, choice_text, error_text, latency_text, unmet_text

FRONT_FORMAT = 1


@dataclass(frozen=True, repr=False)
class Front:
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
        choice: how it was chosen, and which limits no plan meets.
        evaluations: plans evaluated, seeds and failures counted in.
        failures: those of them that did not build or run, or whose outputs were not finite.
        hypervolume: ``hypervolume()`` of the points, 0 to 1.
        warnings: that have no code, one line each.
        findings: the most severe first; a warning about groups that the chosen plan keeps in FP32 is ``info``.
        explanation: why groups stay FP32, plan by plan, and what each group costs and gains.
        reported_metrics: that were taken beside the objective.
        nearest: the plan nearest to limits that no plan meets; None where they are met.
        proposed: the choice that would be made: of a search that is not over, or under limits that were asked about.
        tf32: all-FP32 with TF32; None where the device has none, or it was not evaluated.
    """

    run_dir: Path
    model_path: Path
    model_sha256: str
    target: str
    engine: str
    device: str
    metric: str
    fp32: Evaluation
    fp16: Evaluation | None
    points: tuple[Evaluation, ...]
    chosen: Evaluation | None
    choice: Choice
    evaluations: int
    failures: int
    hypervolume: float
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    explanation: Explanation = field(default_factory=Explanation)
    reported_metrics: tuple[str, ...] = ()
    nearest: Evaluation | None = None
    proposed: Choice | None = None
    tf32: Evaluation | None = None

    def best(
        self,
        *,
        max_error: float | None = None,
        max_latency_ms: float | None = None,
        max_memory_bytes: int | None = None,
    ) -> Evaluation:
        """Take one point of the front, as ``mptune.pick`` chooses; nothing is written. ``pick`` also writes its model.

        Args:
            max_error: the fastest point whose error is at most this, on the search samples and on the held-out ones;
                None stands for the metric's default limit.
            max_latency_ms: the most exact point whose median latency is at most this. With both, the fastest that
                meets both.
            max_memory_bytes: only points whose engine takes at most so much (``EngineMemory.total_bytes``).

        Raises:
            PlanError: no point meets the limits.
            SettingsError: a limit is not above 0.
        """
        check_limits(max_error, max_latency_ms, max_memory_bytes)
        asked = Choice(max_error=max_error, max_latency_ms=max_latency_ms, max_memory_bytes=max_memory_bytes)
        choice = choose(self.points, asked, (self.metric,), self.tf32)
        if choice.chosen is None:
            raise PlanError("no plan is feasible", "`mptune report` on the run directory shows what failed")
        point = next(each for each in self.points if each.plan.fingerprint == choice.chosen)
        if choice.unmet is not None:
            figures = f"{latency_text(point)} ms with error {error_text(point)}"
            hint = f"the nearest is {choice.chosen}: {figures}"
            raise PlanError(f"no plan has {choice_limits(choice.unmet, self.metric)}", hint)
        return point

    def __repr__(self) -> str:
        from mptune.tuning.fronts.table import front_text  # it imports Rich

        return front_text(self)

    def to_json(self) -> dict[str, Any]:
        """The content of front.json: every key always there, null where unknown."""
        choice = self.choice
        baseline = {"fp32": self.fp32, "fp16": self.fp16, "tf32": self.tf32}
        content: dict[str, Any] = encode(
            {
                "format": FRONT_FORMAT,
                "model": {"path": self.model_path, "sha256": self.model_sha256},
                "target": {"name": self.target, "engine": self.engine, "device": self.device},
                "metric": self.metric,
                "baseline": {name: point and self._point(point) for name, point in baseline.items()},
                "points": [self._point(point) for point in self.points],
                "chosen": self.chosen and self.chosen.plan.fingerprint,
                "choice": {
                    "reason": choice.kind,
                    "limits": choice.limit_values,
                    "limits_met": self.limits_met,
                    "nearest": choice.nearest,
                    "replaced": choice.replaced,
                    "neighbours": self.neighbours,
                },
                "evaluations": self.evaluations,
                "failures": self.failures,
                "hypervolume": self.hypervolume,
                "findings": self.findings,
                "warnings": self.warnings,
            }
        )
        return content

    def _point(self, evaluation: Evaluation) -> dict[str, Any]:
        """The POINT of an evaluation, its metrics' own values, and why its FP32 groups are FP32."""
        kept = () if evaluation is self.tf32 else self.explanation.of(evaluation.plan.fingerprint)
        metrics = {
            name: dict(zip(("search", "held_out"), metric_values(evaluation, metric), strict=True))
            for name, metric in self.metrics.items()
        }
        return {**evaluation.to_point(), "metrics": encode(metrics), "fp32": encode(kept)}

    @property
    def chosen_reason(self) -> str:
        """Why the chosen plan was chosen, which it replaced, and what would be chosen now, one line."""
        return choice_text(self)

    @property
    def unmet(self) -> str:
        """Which limits no plan meets, and the nearest plan, one line; empty where they are met."""
        return unmet_text(self)

    @property
    def limits_met(self) -> bool:
        """False where limits were asked for, and no plan meets them."""
        return self.choice.unmet is None

    @property
    def fp16_name(self) -> str:
        """What the all-FP16 baseline is called: groups that are pinned stay FP32 in it."""
        return "all-FP16" if self.fp16 is None else fp16_name(self.fp16.plan)

    @cached_property
    def metrics(self) -> Mapping[str, str]:
        """Short name -> metric of those whose own values are shown beside the error."""
        every = (*self.points, self.fp32, self.fp16, self.chosen)
        return shown_metrics(filter(None, every), self.reported_metrics)

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """The plans that every view names beside the chosen one."""
        return () if self.chosen is None else neighbours(self.points, self.chosen)


def fp16_name(plan: PrecisionPlan) -> str:
    """What a plan is called that has every group in FP16 but for those that are BF16, or pinned to FP32."""
    first, *others = plan.reduced_counts or (Precision.FP16,)
    pinned = len(plan.fp32_groups)
    but = [f"{plan.reduced_counts[precision]} in {precision.name}" for precision in others]
    but += [f"{pinned} pinned"] * bool(pinned)
    return f"all-{first.name} but {' and '.join(but)}" if but else f"all-{first.name}"


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
