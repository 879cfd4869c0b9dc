"""What a search found where it is less than a trade-off: one warning each, in plain words, that says what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mptune.engines.base import Failure
from mptune.finding import Finding
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.explanation import Explanation, Reason
from mptune.tuning.failures import describe
from mptune.tuning.fronts.dominance import faster_beyond_noise
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.fronts.texts import error_text, format_speedup

NOISY = 0.05
"""Half the width of the baseline's 95 % interval, as a share of its median, past which fronts lose points to noise; a
gain of more than this share that the intervals leave open is not ruled out."""

COSTLY_PIN = 0.05
"""Share of what all groups could save, from which on a group that is kept in FP32 for a hazard is named."""

LITTLE_SPEEDUP = 1.02
"""Below it, a gain that is beyond noise is said to be little."""


@dataclass(frozen=True)
class Outcome:
    """What is judged: a front, and what the search saw beside it."""

    points: Sequence[Evaluation]
    fp32: Evaluation
    evaluations: Sequence[Evaluation]
    """Of all plans that gave outputs, finite or not; confirmed where they were."""
    failures: Sequence[Failure]
    """Of the plans that gave none; ``sampled_failures`` of them are of plans that the sampler proposed."""
    explanation: Explanation
    is_given: bool = False
    """The plans were given, as a confirmation's are: there is no budget that could be larger."""
    unreached: Finding | None = None
    """The finding that operators are out of reach."""
    limits: str = ""
    """The tolerances that the front keeps to."""
    reduced: str = "FP16"
    """The precisions that plans may have beside FP32."""
    is_cut_short: bool = False
    sampled_failures: int = 0
    plan_count: int | None = None
    """How many plans the search may try; None counts two precisions for each free group."""
    is_untunable: bool = False
    frees: str = ""
    """The options that may free groups which are pinned because of their values; empty where none is left."""

    @property
    def free(self) -> int | None:
        """How many groups were free; None where that is not known."""
        groups = self.explanation.groups
        return sum(not group.is_pinned for group in groups) if groups else None

    @property
    def has_seeds_alone(self) -> bool:
        """Whether the search ended before the sampler had its turn, and there are more plans."""
        was_searched = self.sampled_failures > 0 or any(e.origin == ORIGIN_SAMPLER for e in self.evaluations)
        tried = len({e.plan for e in self.evaluations}) + len(self.failures)
        is_exhausted = self.free is not None and tried >= (self.plan_count or 2**self.free)
        return not (was_searched or is_exhausted or self.is_given)

    @property
    def mixed(self) -> list[Evaluation]:
        """All finite evaluations except the all-FP32 baseline."""
        return [e for e in self.evaluations if e.origin != ORIGIN_FP32 and e.is_finite]

    @property
    def more(self) -> str:
        """What lets the search evaluate more plans."""
        return f"the same command{'' if self.is_cut_short else ' with a larger --budget'}"


def findings(outcome: Outcome) -> tuple[str, ...]:
    """What to know before trusting the front."""
    fp32, base_ms = outcome.fp32, outcome.fp32.latency.median_ms
    faster = [point for point in outcome.points if faster_beyond_noise(point, fp32)]
    warnings = []
    if faster and outcome.failures:
        warnings.append(_failures(outcome))
    if not faster and not outcome.is_untunable:
        warnings.append(_why_nothing_is_faster(outcome))
    floor = max(fp32.error_value, ERROR_FLOOR)
    if faster and all(e.error_value <= floor for e in outcome.mixed):
        warnings.append(
            "no plan has a larger error than all-FP32, so the fastest is the best: if that is a surprise, check that "
            "the calibration data reach the whole model"
        )
    if outcome.has_seeds_alone and outcome.mixed and outcome.free:
        ended = "the search ended before its budget, with" if outcome.is_cut_short else "the budget went to"
        warnings.append(f"{ended} the baseline and the seeds, and nothing was searched: {outcome.more} goes on")
    fastest_ms = min((point.latency.median_ms for point in faster), default=0.0)
    if fp32.latency.source == "measured" and fastest_ms * LITTLE_SPEEDUP > base_ms:
        warnings.append(
            f"the fastest plan saves {100 * (1 - fastest_ms / base_ms):.2g} % of all-FP32's latency: {outcome.reduced} "
            "gains little here; look at the layer times of the engine, or try a larger batch"
        )
    warnings += _costly_pins(outcome)
    low, high = fp32.latency.ci95_ms
    spread = (high - low) / 2 / base_ms if base_ms > 0 else 0.0
    if NOISY < spread < math.inf:
        warnings.append(
            f"the baseline's latency is known to +-{spread:.0%} only, and plans that are closer cannot be "
            "distinguished: the front shows those that can"
        )
    return tuple(warnings)


def _costly_pins(outcome: Outcome) -> list[str]:
    groups = outcome.explanation.groups
    every_ms = sum(max(group.gain_ms or 0.0, 0.0) for group in groups)
    lost = {g.group: g.gain_ms for g in groups if g.is_pinned and g.finding is not None and g.gain_ms is not None}
    costly = [group for group, gain_ms in lost.items() if gain_ms > COSTLY_PIN * every_ms]
    if not costly:
        return []
    lost_ms = sum(lost[group] for group in costly)
    frees = f"; a search of its own with {outcome.frees} may free more" if outcome.frees else ""
    return [
        f"{', '.join(costly)} {'is' if len(costly) == 1 else 'are'} kept in FP32 for the values there, which costs"
        f" {lost_ms:.2g} ms of the {every_ms:.2g} ms that {outcome.reduced} is predicted to save in all groups{frees}"
    ]


def _why_nothing_is_faster(outcome: Outcome) -> str:
    if outcome.free == 0 and outcome.unreached is None:
        return (
            "every layer group is pinned, so there was nothing to search: `mptune report RUN --explain` says why each "
            "is, and --space takes a file that pins less"
        )
    if not outcome.mixed and (outcome.unreached is None or outcome.failures):
        return _why_no_mixed_plan_is_there(outcome)
    nothing = "no plan is predicted to be faster than all-FP32"
    if outcome.fp32.latency.source == "measured":
        nothing = "no plan is faster than all-FP32 beyond noise"
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
    mixed, groups = outcome.mixed, outcome.explanation.groups
    if outcome.unreached is not None and not outcome.failures:
        return f"{outcome.unreached.evidence['nodes']} nodes are out of reach of the search; {outcome.unreached.cure}"
    beyond_limits = [e for e in mixed if faster_beyond_noise(e, outcome.fp32)]
    if outcome.limits and beyond_limits:
        best = min(beyond_limits, key=lambda e: e.latency.median_ms)
        speedup = format_speedup(outcome.fp32.latency.median_ms / best.latency.median_ms)
        return (
            f"{len(beyond_limits)} of {len(mixed)} plans are faster and not within {outcome.limits}, "
            f"{best.plan.fingerprint} the most ({speedup}, error {error_text(best)})"
        )
    if outcome.failures:
        return _failures(outcome)
    if any(not e.is_finite for e in outcome.evaluations if e.origin != ORIGIN_FP32):
        return _not_finite(outcome)
    hidden = _hidden_gain(outcome)
    if hidden > NOISY:
        return (
            f"noise may hide a gain of up to {hidden:.0%}; close other programs and lock the clocks, then run"
            " `mptune confirm RUN`"
        )
    if outcome.free is not None and 2 * outcome.free < len(groups):
        return (
            f"only {outcome.free} of {len(groups)} layer groups may be {outcome.reduced}; `mptune report RUN --explain`"
            " says why the others are pinned"
        )
    if outcome.has_seeds_alone:
        return "only seeds were tried"
    if outcome.fp32.latency.source == "predicted":
        return "nothing was timed; run `mptune confirm RUN` on the device, or try a larger batch"
    return ""


def _why_no_mixed_plan_is_there(outcome: Outcome) -> str:
    """Why there is no plan but all-FP32 that gave finite outputs."""
    if len(outcome.evaluations) + len(outcome.failures) <= 1:
        return f"only all-FP32 was evaluated: {outcome.more} goes on"
    kept = outcome.explanation.of(outcome.fp32.plan.fingerprint)
    alone = [group.one_group_error for group in kept if group.reason is not Reason.PINNED]
    if alone and all(error == math.inf for error in alone) and not outcome.failures:
        return (
            f"every layer group that was tried gives NaN or Inf in {outcome.reduced}, so the model stays FP32: `mptune"
            " inspect MODEL --data PATH` shows where; inputs that are not normalised are a frequent cause"
        )
    seen = _failures(outcome) if outcome.failures else _not_finite(outcome)
    return f"no plan with {outcome.reduced} in it gave finite outputs, so the model stays FP32: {seen}"


def _hidden_gain(outcome: Outcome) -> float:
    """The largest share of the baseline's latency that a plan may save for all that the intervals say."""
    lowest_ms, highest_ms = min(e.latency.ci95_ms[0] for e in outcome.mixed), outcome.fp32.latency.ci95_ms[1]
    hidden = 1.0 - lowest_ms / highest_ms if highest_ms > 0 else 0.0
    return hidden if math.isfinite(hidden) else 1.0


def _not_finite(outcome: Outcome) -> str:
    """How many plans gave NaN or Inf, and on which samples."""
    plans = [e for e in outcome.evaluations if e.plan != outcome.fp32.plan]
    broken = [e for e in plans if not e.is_finite]
    on_held_out = all(e.counted.non_finite == 0 and e.counted_held_out is not None for e in broken)
    where = " on the held-out samples" if broken and on_held_out else ""
    return f"{len(broken)} of {len(plans)} plans with {outcome.reduced} in them gave NaN or Inf{where}"


def _failures(outcome: Outcome) -> str:
    """How many plans failed, and the first cause. A failure says nothing about what FP16 saves or costs."""
    count = len(outcome.failures)
    mixed = sum(e.plan != outcome.fp32.plan for e in outcome.evaluations) + count
    return (
        f"{count} of {mixed} plans with {outcome.reduced} in them gave no outputs and are not judged; the first failed "
        f"with: {describe(outcome.failures[0])}"
    )
