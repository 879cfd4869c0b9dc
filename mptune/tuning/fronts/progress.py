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
    """How a search went.

    Attributes:
        hypervolume: after each evaluation (``hypervolumes``), with errors past ``reference_error`` worth nothing.
        trials: evaluations and failed plans; ``trials_s`` is what they took together, ``builds_s`` the builds of it.
        span_s: from the start of the first to the end of the last, pauses counted in.
    """

    hypervolume: tuple[float, ...] = ()
    reference_error: float = 0.0
    trials: int = 0
    trials_s: float = 0.0
    builds_s: float = 0.0
    span_s: float = 0.0
    failures: tuple[tuple[PrecisionPlan, Origin, Failure], ...] = ()


def progress_of(record: StudyRecord, fp32: Evaluation, reference_error: float) -> Progress:
    """Read how a search went from its record; the reference error is that of the hypervolume."""
    evaluations = record.evaluations()
    times = [(t.datetime_start, t.datetime_complete) for t in record.settled()]
    spans = np.array([(begin.timestamp(), end.timestamp()) for begin, end in times if begin and end]).reshape(-1, 2)
    return Progress(
        hypervolumes(evaluations, fp32, reference_error),
        reference_error,
        trials=len(spans),
        trials_s=float(np.maximum(np.diff(spans), 0.0).sum()),
        builds_s=sum(evaluation.build_s for evaluation in evaluations),
        span_s=float(np.ptp(spans)) if len(spans) else 0.0,
        failures=record.failures(),
    )


def hypervolumes(evaluations: Sequence[Evaluation], fp32: Evaluation, reference_error: float) -> tuple[float, ...]:
    """``dominance.hypervolume`` of the first one, two, ... evaluations, by the errors of the search samples."""
    floor = max(fp32.error_value, ERROR_FLOOR)
    if not floor < reference_error:
        return (0.0,) * len(evaluations)
    errors = np.array([e.error_value if e.is_finite else math.inf for e in evaluations], dtype=float)
    gain = gains(np.array([e.latency.median_ms for e in evaluations], dtype=float), fp32.latency.median_ms)
    exact = exactness(errors, reference_error, floor)
    return tuple(dominated_area(gain[:count], exact[:count]) for count in range(1, len(evaluations) + 1))
