"""How a search went: the hypervolume after each evaluation, and where its time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mptune.engines.base import Failure
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR, dominated_area, exactness, gains
from mptune.tuning.record.record import StudyRecord


@dataclass(frozen=True)
class Progress:
    """How a search went."""

    hypervolume: tuple[float, ...] = ()
    """After each evaluation, by the errors of the search samples, which every evaluation has; 0 to 1."""
    reference_error: float = 0.0
    """Errors past it count nothing in the hypervolume."""
    trials: int = 0
    """Evaluations and failed plans whose times are known."""
    trials_s: float = 0.0
    """What these took, one after the other, whichever process ran them."""
    builds_s: float = 0.0
    span_s: float = 0.0
    """From the start of the first to the end of the last, pauses counted in."""
    failures: tuple[tuple[PrecisionPlan, Origin, Failure], ...] = ()


def progress_of(record: StudyRecord, fp32: Evaluation, reference_error: float) -> Progress:
    """Read how a search went from its record; the reference error is that of the hypervolume."""
    evaluations = record.evaluations()
    spans = [
        (trial.datetime_start.timestamp(), trial.datetime_complete.timestamp())
        for trial in record.settled()
        if trial.datetime_start is not None and trial.datetime_complete is not None
    ]
    return Progress(
        hypervolume=hypervolumes(evaluations, fp32, reference_error),
        reference_error=reference_error,
        trials=len(spans),
        trials_s=sum(max(0.0, end - start) for start, end in spans),
        builds_s=sum(evaluation.build_s for evaluation in evaluations),
        span_s=max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0),
        failures=record.failures(),
    )


def hypervolumes(evaluations: Sequence[Evaluation], fp32: Evaluation, reference_error: float) -> tuple[float, ...]:
    """The hypervolume of the first one, two, ... evaluations, by the errors of the search samples.

    Its axes are those of ``mptune.tuning.fronts.dominance.hypervolume``.
    """
    floor = max(fp32.error_value, ERROR_FLOOR)
    if not floor < reference_error:
        return (0.0,) * len(evaluations)
    latency_ms = np.array([e.latency.median_ms for e in evaluations], dtype=float)
    errors = np.array([e.error_value if e.is_finite else math.inf for e in evaluations], dtype=float)
    gain = gains(latency_ms, fp32.latency.median_ms)
    exact = exactness(errors, reference_error, floor)
    return tuple(dominated_area(gain[:count], exact[:count]) for count in range(1, len(evaluations) + 1))
