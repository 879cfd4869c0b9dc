"""What a search found where it is less than a trade-off: one warning each, in plain words, that says what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mptune.engines.base import Failure
from mptune.finding import Finding
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.explanation import Explanation, Kept, Reason
from mptune.tuning.failures import describe
from mptune.tuning.fronts.dominance import faster_beyond_noise
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR

NOISY = 0.05
"""Half the width of the baseline's 95 % interval, as a share of its median, past which fronts lose points to noise."""


@dataclass(frozen=True)
class Outcome:
    """What is judged.

    Attributes:
        points: the front.
        fp32: the baseline.
        evaluations: all plans that gave outputs, the baseline and those that are not finite counted in.
        failures: of the plans that gave none.
        explanation: of the points and the baseline.
        is_given: the plans were given, as a confirmation's are: there is no budget that could be larger.
        unreached: the finding that operators are out of reach; None where there is none.
    """

    points: Sequence[Evaluation]
    fp32: Evaluation
    evaluations: Sequence[Evaluation]
    failures: Sequence[Failure]
    explanation: Explanation
    is_given: bool = False
    unreached: Finding | None = None

    @property
    def free(self) -> int | None:
        """How many groups were free; None where that is not known."""
        groups = self.explanation.groups
        return sum(not group.is_pinned for group in groups) if groups else None

    @property
    def is_exhausted(self) -> bool:
        """Whether all plans there are have been tried."""
        tried = len({e.plan for e in self.evaluations}) + len(self.failures)
        return self.free is not None and tried >= 2**self.free

    @property
    def was_searched(self) -> bool:
        """Whether the sampler, and not only the seeds, had its turn."""
        return _sampled(self.evaluations)

    @property
    def has_seeds_alone(self) -> bool:
        """Whether the search ended before the sampler had its turn, and there are more plans."""
        return not (self.was_searched or self.is_exhausted or self.is_given)

    @property
    def mixed(self) -> list[Evaluation]:
        """All finite evaluations except the all-FP32 baseline."""
        return [e for e in self.evaluations if e.origin != ORIGIN_FP32 and e.is_finite]


def findings(outcome: Outcome) -> tuple[str, ...]:
    """What to know before trusting the front."""
    faster = [p for p in outcome.points if faster_beyond_noise(p, outcome.fp32)]
    found = [_failures(outcome)] if faster and outcome.failures else []
    found += [] if faster else [_why_nothing_is_faster(outcome)]
    if faster and _has_errors_of_fp32(outcome):
        found.append(
            "no plan has a larger error than all-FP32, so the fastest is the best: if that is a surprise, check that "
            "the calibration data reach the whole model"
        )
    elif (
        faster
        and outcome.was_searched
        and all(p.origin != ORIGIN_SAMPLER for p in faster)
        and not (outcome.is_exhausted or outcome.is_given)
    ):
        found.append("no searched plan is on the front, only seeds: a larger --budget may find better ones")
    if outcome.has_seeds_alone and outcome.mixed and outcome.free:
        found.append(
            "the budget went to the baseline and the seeds, and nothing was searched: the same command with a larger "
            "--budget goes on"
        )
    spread = _half_width(outcome.fp32)
    if spread > NOISY:
        found.append(
            f"the baseline's latency is known to +-{spread:.0%} only, and plans that are closer cannot be "
            "distinguished: the front shows those that can"
        )
    return tuple(found)


def _why_nothing_is_faster(outcome: Outcome) -> str:
    if outcome.unreached is not None and not outcome.failures:
        what = "no plan is faster than all-FP32 beyond noise" if outcome.mixed else "no plan with FP16 in it ran"
        return (
            f"{what}, and {outcome.unreached.evidence['nodes']} nodes are out of reach of the search, so whether FP16 "
            f"pays here is not shown: {outcome.unreached.cure}"
        )
    if not outcome.fp32.plan.precision:
        return "the model has no layer group that could be FP16, so there was nothing to search"
    if outcome.free == 0:
        return (
            "every layer group is pinned, so there was nothing to search: `mptune report RUN --explain` says why each "
            "is, and --space takes a file that pins less"
        )
    if outcome.mixed and outcome.failures:
        return (
            "no plan that ran is faster than all-FP32 beyond noise, and whether FP16 pays here is not shown: "
            f"{_failures(outcome)}"
        )
    spread = _half_width(outcome.fp32)
    if outcome.mixed and spread > NOISY:
        return (
            f"no plan is faster than all-FP32 beyond noise, which is +-{spread:.0%} of the baseline here: whether FP16 "
            "pays is not shown; close other programs and lock the clocks, then run `mptune confirm RUN`"
        )
    groups = outcome.explanation.groups
    if outcome.mixed and outcome.free is not None and 2 * outcome.free < len(groups):
        return (
            f"no plan is faster than all-FP32 beyond noise, but only {outcome.free} of {len(groups)} layer groups may "
            "be FP16, so whether FP16 pays on this target is not shown; `mptune report RUN --explain` says why the "
            "others are pinned"
        )
    if outcome.mixed and outcome.has_seeds_alone:
        return "no seed is faster than all-FP32 beyond noise, so whether FP16 pays on this target is not shown"
    if outcome.mixed and outcome.fp32.latency.source == "predicted":
        return (
            f"none of the {len(outcome.mixed)} plans with FP16 in them is predicted to be faster than all-FP32; nothing"
            " was timed, so whether FP16 pays on this target is not shown: run `mptune confirm RUN` on the device, or"
            " try a larger batch"
        )
    if outcome.mixed:
        return (
            "no plan is faster than all-FP32 beyond noise: FP16 does not pay on this target; look at the layer times "
            "of the engine, or try a larger batch"
        )
    if len(outcome.evaluations) + len(outcome.failures) <= 1:
        return "only all-FP32 was evaluated: the same command with a larger --budget goes on"
    kept = outcome.explanation.of(outcome.fp32.plan.fingerprint)
    free = [group for group in kept if group.reason is not Reason.PINNED]
    if free and all(_breaks(group) for group in free) and not outcome.failures:
        return (
            "every layer group that was tried gives NaN or Inf in FP16, so the model stays FP32: `mptune inspect MODEL "
            "--data PATH` shows where; inputs that are not normalised are a frequent cause"
        )
    if outcome.failures:
        return f"no plan with FP16 in it gave finite outputs, so the model stays FP32: {_failures(outcome)}"
    return "no plan with FP16 in it gave finite outputs, so the model stays FP32: a larger --budget may find one"


def _breaks(kept: Kept) -> bool:
    """Whether a group alone in FP16 gives outputs that are not finite."""
    return kept.one_group_error is not None and math.isinf(kept.one_group_error)


def _failures(outcome: Outcome) -> str:
    """How many plans failed, and the first cause. A failure says nothing about what FP16 saves or costs."""
    with_fp16 = sum(e.plan != outcome.fp32.plan for e in outcome.evaluations) + len(outcome.failures)
    return (
        f"{len(outcome.failures)} of {with_fp16} plans with FP16 in them gave no outputs and are not judged; the first "
        f"failed with: {describe(outcome.failures[0])}"
    )


def _sampled(points: Sequence[Evaluation]) -> bool:
    return any(point.origin == ORIGIN_SAMPLER for point in points)


def _has_errors_of_fp32(outcome: Outcome) -> bool:
    floor = max(outcome.fp32.error_value, ERROR_FLOOR)
    return bool(outcome.mixed) and all(e.error_value <= floor for e in outcome.mixed)


def _half_width(fp32: Evaluation) -> float:
    low, high = fp32.latency.ci95_ms
    share = (high - low) / 2 / fp32.latency.median_ms if fp32.latency.median_ms > 0 else 0.0
    return share if math.isfinite(share) else 0.0
