"""Why a search ends before something from outside ends it: its budget, its space, or nothing better is expected."""

from __future__ import annotations

from mptune.engines.latency import MARGIN
from mptune.settings import SearchSettings
from mptune.tuning.bench import Stop
from mptune.tuning.choosing import is_as_fast
from mptune.tuning.evaluation import ORIGIN_FP16
from mptune.tuning.plan_limits import PlanLimits
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler.trials import EHVI_ATTR, GAIN_ATTR

PATIENCE = 8
"""Proposals in a row below ``LEAST_IMPROVEMENT`` that end the search."""

LEAST_IMPROVEMENT = 2e-5
"""Expected hypervolume improvement: a tenth of a percent of the latency on a fiftieth of the error's axis."""

ENOUGH, LEAST_GAIN = 10, 0.1
"""Proposals in a row that end the search where all-FP16 meets the limits, and the gain that they were expected to add,
as a share of the margin within which plans count as equally fast."""


def finished(record: StudyRecord, settings: SearchSettings) -> Stop | None:
    """Why there is nothing left to search, if so: budget spent, space exhausted, or no improvement expected.

    The last two only where mptune's own sampler proposes: no improvement of the front, where plans are timed (a
    prediction has no noise and costs nothing), and nothing faster than an all-FP16 that meets the limits.
    """
    if record.spent >= settings.budget:
        return Stop.BUDGET
    if is_exhausted(record) and not record.running():
        return Stop.EXHAUSTED
    baseline = record.baseline()
    if settings.sampler != "precision" or baseline is None:
        return None
    source, attrs = baseline.latency.source, [t.user_attrs for t in record.settled() if EHVI_ATTR in t.user_attrs]
    improvements = [each[EHVI_ATTR] for each in attrs][-PATIENCE:]
    if source == "measured" and len(improvements) == PATIENCE and max(improvements) < LEAST_IMPROVEMENT:
        return Stop.CONVERGED
    gains = [each[GAIN_ATTR] for each in attrs][-ENOUGH:]
    if len(gains) == ENOUGH and max(gains) < LEAST_GAIN * MARGIN[source] and is_fp16_enough(record, settings):
        return Stop.FP16_IS_ENOUGH
    return None


def is_fp16_enough(record: StudyRecord, settings: SearchSettings) -> bool:
    """Whether all-FP16 meets the limits, of which one is on the error, and no plan is faster beyond the margin."""
    evaluations = [e.ignoring(settings.ignore) for e in record.evaluations() if e.is_finite]
    fp16 = next((e for e in evaluations if e.origin == ORIGIN_FP16), None)
    limits = PlanLimits.from_settings(settings)
    if fp16 is None or not limits.is_error_limited or limits.excess(fp16) > 1.0:
        return False
    return all(is_as_fast(fp16, other) for other in evaluations)


def is_exhausted(record: StudyRecord) -> bool:
    """Whether every plan of the space has been evaluated, or is being evaluated."""
    space = record.space
    if record.baseline() is None or len(record.trials()) < space.size:
        return False
    started = record.started()
    # All-FP32 is always evaluated, also where the pins leave it out of the space.
    outside = sum(1 for seed in space.seeds if seed.plan.fingerprint in started and not space.holds(seed.plan))
    return len(started) - outside >= space.size
