"""The choice among all evaluations: the fastest plan within the limits, and exactness where it is free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mptune.choice import Choice, ChoiceLimits
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.latency import MARGIN
from mptune.errors import PlanError
from mptune.tuning.dominance import ERROR_FLOOR, REFERENCE_ERROR, faster_beyond_noise, shared_errors
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.plan_limits import PlanLimits, rest_error

MUCH_EXACTER = 1.5
"""Of plans that are equally fast one with this many times less error than the fastest is chosen."""

_MOST_RIVALS = 4


def choose(
    evaluations: Sequence[Evaluation], asked: Choice, metrics: Sequence[str], tf32: Evaluation | None = None
) -> Choice:
    """Choose a plan among evaluations, one for each plan; plans that are not finite take no part.

    Let F be the fastest plan that meets all limits. Of the plans that are as fast (not significantly slower, and slower
    by no more than the margin) the one with the smallest error is chosen, if that is ``MUCH_EXACTER`` times smaller
    than F's. A limit on latency without one on the error asks for the smallest error. All-FP32 wins ties: a plan that
    is not faster than it beyond noise and margin is not chosen, nor one that is slower and less exact than TF32.

    Args:
        metrics: the objective, then the others that are taken.
        tf32: all-FP32 with TF32; None where there is none.

    Returns:
        The request with what it came to. Where no plan meets the limits it is the plan whose largest ratio to a limit
        is smallest, and ``unmet`` holds the limits.

    Raises:
        PlanError: a plan is asked for by an id that is unknown or ambiguous, or that is not finite.
    """

    def decided(chosen: Evaluation | None, **outcome: object) -> Choice:
        outcome["chosen"] = None if chosen is None else chosen.plan.fingerprint
        return asked.again().model_copy(update={"replaced": asked.replaced, **outcome})

    if asked.plan is not None:
        picked = find_plan(evaluations, asked.plan)
        return decided(picked, kind="plan", plan=picked.plan.fingerprint)
    limits = PlanLimits(asked, metrics)
    kind = "knee" if limits.wants_knee else "default" if asked.given_limits == ChoiceLimits() else "limits"
    how = {"kind": kind, "default_error": limits.default_error}
    sound = [e for e in evaluations if e.is_finite]
    meeting = [e for e in sound if limits.excess(e) <= 1.0]
    if not meeting:
        nearest = min(sound, key=lambda e: (limits.excess(e), e.latency.median_ms), default=None)
        asked_for = asked.given_limits.model_copy(update={"max_error": limits.max_error})
        unmet = None if asked_for == ChoiceLimits() else asked_for
        return decided(nearest, **how, unmet=unmet, nearest=nearest and nearest.plan.fingerprint)

    # What beats all-FP32, where that meets the limits, and TF32 in one of latency and error. Where nothing that meets
    # them beats TF32, and all-FP32 does not meet them, TF32 is no reason to choose nothing.
    fp32 = next((e for e in meeting if not e.plan.reduced_groups), None)
    faster = meeting
    if fp32 is not None:
        most_ms = fp32.latency.median_ms / (1.0 + MARGIN[fp32.latency.source])
        faster = [e for e in meeting if e.latency.median_ms < most_ms and faster_beyond_noise(e, fp32)]
    worth = []  # what TF32 does not beat in both
    for e in faster:
        before, after = (0.0, 0.0) if tf32 is None else shared_errors(tf32, e)
        if tf32 is None or not after > before or not faster_beyond_noise(tf32, e):
            worth.append(e)
    candidates = [*worth, fp32] if fp32 is not None else worth or faster
    if limits.wants_knee:
        return decided(knee(candidates), **how)
    if not limits.is_error_limited:
        # A plan that has met no held-out samples is compared on the search samples: its error is no smaller for that.
        met = [e for e in candidates if e.held_out is not None] or candidates
        exactest = min(met, key=lambda e: (rest_error(e), e.latency.median_ms))
        new = [e for e in candidates if e.held_out is None and e.error_value < exactest.error_value]
        return decided(min([exactest, *new], key=lambda e: e.error_value), **how, is_most_exact=True)
    fastest = min(candidates, key=lambda e: (e.latency.median_ms, rest_error(e)))
    chosen, least = fastest, 1.0 / MUCH_EXACTER
    for evaluation in candidates:
        before, after = shared_errors(fastest, evaluation)
        if before > 0 and after / before <= least and is_as_fast(evaluation, fastest):
            chosen, least = evaluation, after / before
    passed_over = None if chosen is fastest else fastest.plan.fingerprint
    is_tf32_better = chosen is fp32 and len(worth) < len(faster)
    return decided(chosen, **how, passed_over=passed_over, is_tf32_better=is_tf32_better)


def is_as_fast(evaluation: Evaluation, other: Evaluation) -> bool:
    """Whether a plan is slower than another by no more than the margin, and not significantly slower.

    Predicted latencies have no noise, so there the margin decides alone.
    """
    source = other.latency.source
    if evaluation.latency.median_ms > (1.0 + MARGIN[source]) * other.latency.median_ms:
        return False
    return source == "predicted" or not faster_beyond_noise(other, evaluation)


def knee(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The plan that comes nearest to the lowest latency and the smallest error at once.

    Both axes are scaled to 0..1 over the plans that no other plan beats in both, the error as its logarithm (errors
    under 1e-7 count as 1e-7). All-FP32 takes no part where there are others, nor, where errors add in squares, do
    plans past 3e-2, which nobody wants unasked.
    """
    mixed = [e for e in evaluations if e.plan.reduced_groups] or list(evaluations)
    usable = [e for e in mixed if e.metric not in ADD_IN_SQUARES or rest_error(e) <= REFERENCE_ERROR] or mixed
    stairs: list[Evaluation] = []
    for evaluation in sorted(usable, key=lambda e: (e.latency.median_ms, rest_error(e))):
        if not stairs or rest_error(evaluation) < rest_error(stairs[-1]):
            stairs.append(evaluation)
    axes = np.array([(e.latency.median_ms, math.log(max(rest_error(e), ERROR_FLOOR))) for e in stairs])
    spans = np.ptp(axes, axis=0)
    away = np.hypot(*((axes - axes.min(axis=0)) / np.where(spans > 0, spans, 1.0)).T)
    return stairs[int(away.argmin())]


def could_be_chosen(
    evaluations: Sequence[Evaluation], asked: Choice, metrics: Sequence[str], tf32: Evaluation | None = None
) -> tuple[Evaluation, ...]:
    """The plans that more exact figures could make the choice: what is re-measured, the fastest first.

    They are the plan that is chosen as things stand, the one that it was preferred to, and a few of those that would be
    chosen in its place if their latency, or its, lay elsewhere in its interval. Their new figures may change the
    choice: the choice stands once all that this names have been re-measured.
    """
    choice = choose(evaluations, asked, metrics, tf32)
    named = [e for e in evaluations if e.plan.fingerprint in (choice.chosen, choice.passed_over)]
    limits, rivals = PlanLimits(asked, metrics), []
    if choice.kind in ("default", "limits") and choice.unmet is None and named:
        chosen = next(e for e in named if e.plan.fingerprint == choice.chosen)
        for e in evaluations:
            if e in named or not e.is_finite or limits.excess(e, e.latency.ci95_ms[0]) > 1.0:
                continue
            is_near = not (faster_beyond_noise(e, chosen) or faster_beyond_noise(chosen, e))
            if is_near if limits.is_error_limited else rest_error(e) < rest_error(chosen):
                rivals.append(e)
        rivals.sort(key=lambda e: abs(e.latency.median_ms - chosen.latency.median_ms))
    return tuple(sorted([*named, *rivals[:_MOST_RIVALS]], key=lambda e: e.latency.median_ms))


def find_plan(evaluations: Sequence[Evaluation], fingerprint: str) -> Evaluation:
    """The evaluation of the one plan whose fingerprint begins with ``fingerprint``."""
    matching = {e.plan.fingerprint: e for e in evaluations if e.plan.fingerprint.startswith(fingerprint or "?")}
    hint = "`mptune report RUN` lists the plans"
    if len(matching) > 1:
        names = ", ".join(sorted(matching))
        raise PlanError(f"{fingerprint!r} means several plans: {names}", "give more of its digits")
    for name, evaluation in matching.items():
        if evaluation.is_finite:
            return evaluation
        raise PlanError(f"plan {name} is not feasible: its outputs are not finite", hint)
    raise PlanError(f"no plan {fingerprint!r} was evaluated in this run", hint)
