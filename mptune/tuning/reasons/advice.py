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
from mptune.tuning.fronts.limits import error_text
from mptune.tuning.fronts.table import format_speedup

NOISY = 0.05
"""Half the width of the baseline's 95 % interval, as a share of its median, past which fronts lose points to noise; a
gain of more than this share that the intervals leave open is not ruled out."""

LITTLE_SPEEDUP = 1.02
"""Below it, a gain that is beyond noise is said to be little."""


@dataclass(frozen=True)
class Outcome:
    """What is judged: a front, and what the search saw beside it.

    Attributes:
        evaluations: all plans that gave outputs, the baseline and those that are not finite counted in; confirmed
            where they were.
        failures: of the plans that gave none; ``sampled_failures`` of them are of plans that the sampler proposed.
        explanation: of the points and the baseline.
        is_given: the plans were given, as a confirmation's are: there is no budget that could be larger.
        unreached: the finding that operators are out of reach.
        limits: the tolerances that the front keeps to, as a text.
        reduced: the precisions that plans may have beside FP32, as a text.
        is_cut_short: the search ended before its budget was spent.
        plan_count: how many plans the search may try; None counts two precisions for each free group.
        is_untunable: the model has nothing to tune, which is said before.
    """

    points: Sequence[Evaluation]
    fp32: Evaluation
    evaluations: Sequence[Evaluation]
    failures: Sequence[Failure]
    explanation: Explanation
    is_given: bool = False
    unreached: Finding | None = None
    limits: str = ""
    reduced: str = "FP16"
    is_cut_short: bool = False
    sampled_failures: int = 0
    plan_count: int | None = None
    is_untunable: bool = False

    @property
    def free(self) -> int | None:
        """How many groups were free; None where that is not known."""
        groups = self.explanation.groups
        return sum(not group.is_pinned for group in groups) if groups else None

    @property
    def is_exhausted(self) -> bool:
        """Whether all plans there are have been tried."""
        tried = len({e.plan for e in self.evaluations}) + len(self.failures)
        return self.free is not None and tried >= (self.plan_count or 2**self.free)

    @property
    def was_searched(self) -> bool:
        """Whether the sampler, and not only the seeds, had its turn."""
        return self.sampled_failures > 0 or _sampled(self.evaluations)

    @property
    def has_seeds_alone(self) -> bool:
        """Whether the search ended before the sampler had its turn, and there are more plans."""
        return not (self.was_searched or self.is_exhausted or self.is_given)

    @property
    def mixed(self) -> list[Evaluation]:
        """All finite evaluations except the all-FP32 baseline."""
        return [e for e in self.evaluations if e.origin != ORIGIN_FP32 and e.is_finite]

    @property
    def broken(self) -> list[Evaluation]:
        """All evaluations but the baseline whose outputs are not finite, on the search or the held-out samples."""
        return [e for e in self.evaluations if e.origin != ORIGIN_FP32 and not e.is_finite]

    @property
    def more(self) -> str:
        """What lets the search evaluate more plans."""
        return f"the same command{'' if self.is_cut_short else ' with a larger --budget'}"


def findings(outcome: Outcome) -> tuple[str, ...]:
    """What to know before trusting the front."""
    faster = [p for p in outcome.points if faster_beyond_noise(p, outcome.fp32)]
    warnings = [_failures(outcome)] if faster and outcome.failures else []
    warnings += [] if faster or outcome.is_untunable else [_why_nothing_is_faster(outcome)]
    if faster and _has_errors_of_fp32(outcome):
        warnings.append(
            "no plan has a larger error than all-FP32, so the fastest is the best: if that is a surprise, check that "
            "the calibration data reach the whole model"
        )
    elif (
        faster
        and outcome.was_searched
        and all(p.origin != ORIGIN_SAMPLER for p in faster)
        and _sampled(outcome.evaluations)
        and not (outcome.is_exhausted or outcome.is_given)
    ):
        warnings.append(f"no searched plan is on the front, only seeds: {outcome.more} may find better ones")
    if outcome.has_seeds_alone and outcome.mixed and outcome.free:
        ended = "the search ended before its budget, with" if outcome.is_cut_short else "the budget went to"
        warnings.append(f"{ended} the baseline and the seeds, and nothing was searched: {outcome.more} goes on")
    warnings += _little_gain(outcome, faster)
    spread = _half_width(outcome.fp32)
    if spread > NOISY:
        warnings.append(
            f"the baseline's latency is known to +-{spread:.0%} only, and plans that are closer cannot be "
            "distinguished: the front shows those that can"
        )
    return tuple(warnings)


def _little_gain(outcome: Outcome, faster: Sequence[Evaluation]) -> list[str]:
    """That what is gained is little, though it is beyond noise."""
    base_ms = outcome.fp32.latency.median_ms
    fastest_ms = min((point.latency.median_ms for point in faster), default=0.0)
    if not faster or outcome.fp32.latency.source != "measured" or fastest_ms * LITTLE_SPEEDUP <= base_ms:
        return []
    return [
        f"the fastest plan saves {100 * (1 - fastest_ms / base_ms):.2g} % of all-FP32's latency: {outcome.reduced} "
        "gains little here; look at the layer times of the engine, or try a larger batch"
    ]


def _why_nothing_is_faster(outcome: Outcome) -> str:
    if outcome.free == 0 and outcome.unreached is None:
        return (
            "every layer group is pinned, so there was nothing to search: `mptune report RUN --explain` says why each "
            "is, and --space takes a file that pins less"
        )
    if not outcome.mixed and (outcome.unreached is None or outcome.failures):
        return _why_no_mixed_plan_is_there(outcome)
    verb = "is" if outcome.fp32.latency.source == "measured" else "is predicted to be"
    noise = " beyond noise" if outcome.fp32.latency.source == "measured" else ""
    nothing = f"no plan {verb} faster than all-FP32{noise}"
    unknown = _why_that_is_open(outcome)
    if unknown:
        return f"{nothing}; whether {outcome.reduced} pays on this target is not shown: {unknown}"
    return (
        f"{nothing}: {outcome.reduced} does not pay on this target (in {len(outcome.mixed)} plans that were timed noise"
        f" hides no gain above {max(_hidden_gain(outcome), 1e-3):.1%}); look at the layer times of the engine, or try a"
        " larger batch"
    )


def _why_that_is_open(outcome: Outcome) -> str:
    """Why slow plans do not show that a reduced precision does not pay; empty where they do."""
    name, groups = outcome.reduced, outcome.explanation.groups
    if outcome.unreached is not None and not outcome.failures:
        return f"{outcome.unreached.evidence['nodes']} nodes are out of reach of the search; {outcome.unreached.cure}"
    beyond_limits = [e for e in outcome.mixed if faster_beyond_noise(e, outcome.fp32)]
    if outcome.limits and beyond_limits:
        best = min(beyond_limits, key=lambda e: e.latency.median_ms)
        speedup = format_speedup(outcome.fp32.latency.median_ms / best.latency.median_ms)
        return (
            f"{len(beyond_limits)} of {len(outcome.mixed)} plans are faster and not within {outcome.limits}, "
            f"{best.plan.fingerprint} the most ({speedup}, error {error_text(best)})"
        )
    if outcome.failures:
        return _failures(outcome)
    if outcome.broken:
        return _not_finite(outcome)
    hidden = _hidden_gain(outcome)
    if hidden > NOISY:
        return (
            f"noise may hide a gain of up to {hidden:.0%}; close other programs and lock the clocks, then run"
            " `mptune confirm RUN`"
        )
    if outcome.free is not None and 2 * outcome.free < len(groups):
        return (
            f"only {outcome.free} of {len(groups)} layer groups may be {name}; `mptune report RUN --explain` says why"
            " the others are pinned"
        )
    if outcome.has_seeds_alone:
        return "only seeds were tried"
    if outcome.fp32.latency.source == "predicted":
        return "nothing was timed; run `mptune confirm RUN` on the device, or try a larger batch"
    promising = [k for k in outcome.explanation.of(outcome.fp32.plan.fingerprint) if _may_save(k, outcome.fp32)]
    if promising and not (outcome.is_exhausted or outcome.is_given):
        most_ms = max(kept.saves_ms or 0.0 for kept in promising)
        return (
            f"{len(promising)} of the layer groups would, as estimated, save time alone, at most {most_ms:.2g} ms; "
            f"{outcome.more} tries more plans"
        )
    return ""


def _why_no_mixed_plan_is_there(outcome: Outcome) -> str:
    """Why there is no plan but all-FP32 that gave finite outputs."""
    if len(outcome.evaluations) + len(outcome.failures) <= 1:
        return f"only all-FP32 was evaluated: {outcome.more} goes on"
    kept = outcome.explanation.of(outcome.fp32.plan.fingerprint)
    free = [group for group in kept if group.reason is not Reason.PINNED]
    if free and all(_breaks(group) for group in free) and not outcome.failures:
        return (
            f"every layer group that was tried gives NaN or Inf in {outcome.reduced}, so the model stays FP32: `mptune"
            " inspect MODEL --data PATH` shows where; inputs that are not normalised are a frequent cause"
        )
    seen = _failures(outcome) if outcome.failures else _not_finite(outcome)
    return f"no plan with {outcome.reduced} in it gave finite outputs, so the model stays FP32: {seen}"


def _may_save(kept: Kept, fp32: Evaluation) -> bool:
    """Whether a group was left in FP32 although it is estimated to save more time than is called noise."""
    is_open = kept.reason in (Reason.FAILED, Reason.ERROR, Reason.UNTRIED, Reason.UNKNOWN)
    return is_open and kept.saves_ms is not None and kept.saves_ms > NOISY * fp32.latency.median_ms


def _hidden_gain(outcome: Outcome) -> float:
    """The largest share of the baseline's latency that a plan may save for all that the intervals say."""
    lowest_ms, highest_ms = min(e.latency.ci95_ms[0] for e in outcome.mixed), outcome.fp32.latency.ci95_ms[1]
    hidden = 1.0 - lowest_ms / highest_ms if highest_ms > 0 else 0.0
    return hidden if math.isfinite(hidden) else 1.0


def _not_finite(outcome: Outcome) -> str:
    """How many plans gave NaN or Inf, and on which samples."""
    mixed = sum(e.plan != outcome.fp32.plan for e in outcome.evaluations)
    on_held_out = all(e.counted.non_finite == 0 and e.counted_held_out is not None for e in outcome.broken)
    where = " on the held-out samples" if outcome.broken and on_held_out else ""
    return f"{len(outcome.broken)} of {mixed} plans with {outcome.reduced} in them gave NaN or Inf{where}"


def _breaks(kept: Kept) -> bool:
    """Whether a group alone in FP16 gives outputs that are not finite."""
    return kept.one_group_error is not None and math.isinf(kept.one_group_error)


def _failures(outcome: Outcome) -> str:
    """How many plans failed, and the first cause. A failure says nothing about what FP16 saves or costs."""
    count = len(outcome.failures)
    mixed = sum(e.plan != outcome.fp32.plan for e in outcome.evaluations) + count
    return (
        f"{count} of {mixed} plans with {outcome.reduced} in them gave no outputs and are not judged; the first failed "
        f"with: {describe(outcome.failures[0])}"
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
