"""What a device says to the front of a search: every plan as seen and as measured, and whether the rankings agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from mptune.json_form import JsonForm
from mptune.run_json import TargetSection
from mptune.settings import LatencySettings
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.failures import describe
from mptune.tuning.front import Front
from mptune.tuning.fronts.dominance import faster_beyond_noise
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.steps.remeasure import confirmed_evaluations

HELD, HELD_MOSTLY = 0.9, 0.75
"""From these shares of the pairs on a ranking held, and held in the main."""

FEWEST_PAIRS = 3
"""Of fewer pairs nothing can be said."""

ERRORS_APART = 1.1
"""Errors with a smaller ratio count as equal: emulated and measured errors of one plan differ this much."""

Pair = tuple[Evaluation, Evaluation]
"""The same plan as the search saw it, and as it was measured now."""


@dataclass(frozen=True)
class Agreement(JsonForm):
    """How a ranking of plans held: of the pairs that differ beyond noise as measured, so many agree."""

    kendall_tau: float | None
    """Kendall's tau-b, -1 to 1; None where one side does not rank at all."""
    plans: int
    pairs: int
    agreeing: int

    @property
    def verdict(self) -> str:
        """In plain words, to follow "the ranking"."""
        if self.pairs < FEWEST_PAIRS:
            return "cannot be judged: too few plans differ beyond noise"
        share = self.agreeing / self.pairs
        if share >= HELD:
            return "held"
        if share >= HELD_MOSTLY:
            return "held in the main: between neighbours go by what was measured"
        return "did not hold: go by what was measured"

    def to_json(self) -> dict[str, Any]:
        """All fields and the verdict."""
        return {**super().to_json(), "verdict": self.verdict}


def latency_agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of the medians. Only pairs of plans whose measured latencies differ beyond noise are judged."""
    return _agreement(
        pairs, lambda e: e.latency.median_ms, lambda a, b: faster_beyond_noise(a, b) or faster_beyond_noise(b, a)
    )


def error_agreement(pairs: Sequence[Pair]) -> Agreement:
    """Of the errors that choices go by. Only pairs whose measured errors differ by a tenth or more are judged."""

    def error(evaluation: Evaluation) -> float:
        return max(evaluation.judged_error, ERROR_FLOOR)

    def apart(first: Evaluation, other: Evaluation) -> bool:
        low, high = sorted((error(first), error(other)))
        return high >= ERRORS_APART * low

    return _agreement(pairs, error, apart)


def _agreement(
    pairs: Sequence[Pair], value: Callable[[Evaluation], float], apart: Callable[[Evaluation, Evaluation], bool]
) -> Agreement:
    judged = [
        (value(a[0]) - value(b[0])) * (value(a[1]) - value(b[1])) > 0
        for a, b in combinations(pairs, 2)
        if apart(a[1], b[1])
    ]
    tau = kendall_tau([value(searched) for searched, _ in pairs], [value(measured) for _, measured in pairs])
    return Agreement(tau, len(pairs), len(judged), sum(judged))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b, -1 to 1; None where all values of one side are equal."""
    from scipy.stats import kendalltau  # slow to import

    tau = float(kendalltau(first, second).statistic) if len(first) > 1 else math.nan
    return None if math.isnan(tau) else tau


@dataclass(frozen=True)
class ConfirmedPlan:
    """A plan as the search saw it and as it is on the device.

    Attributes:
        searched: predicted or measured by the search.
        measured: by the confirmation; None where it failed there or was dropped.
        failure: why, one line; empty where it was measured.
    """

    searched: Evaluation
    measured: Evaluation | None
    failure: str = ""


@dataclass(frozen=True)
class Confirmation:
    """What ``confirm`` found: the front of a device beside the front of the search.

    Attributes:
        front: the confirmed front, of this device alone.
        searched: the target that the search saw.
        plans: every plan that was confirmed, the fastest first, those that failed last.
        latency: whether the search had ranked the latencies alike.
        error: the same of the errors: held-out where the search knew them.
    """

    front: Front
    searched: TargetSection
    plans: tuple[ConfirmedPlan, ...]
    latency: Agreement
    error: Agreement

    def to_json(self) -> dict[str, Any]:
        """The content of the confirmed front.json: that of a front, and how the search's ranking held."""
        searched = self.searched
        return {
            **self.front.to_json(),
            "search": {
                "target": {"name": searched.name, "engine": searched.engine, "device": searched.device},
                "latency_source": searched.latency_source,
                "error_source": searched.error_source,
            },
            "agreement": {"latency": self.latency.to_json(), "error": self.error.to_json()},
            "plans": [
                {
                    "plan": plan.searched.plan.fingerprint,
                    "searched": plan.searched.to_point(),
                    "measured": None if plan.measured is None else plan.measured.to_point(),
                    "failure": plan.failure or None,
                }
                for plan in self.plans
            ],
        }


def searched_plans(front: Front, evaluations: Sequence[Evaluation]) -> tuple[Evaluation, ...]:
    """What is confirmed of a search: all-FP32 first, all-FP16, the front, the chosen plan and every sound seed."""
    seeds = [e for e in evaluations if e.origin.kind == "seed" and e.is_finite]
    wanted = (front.fp32, front.fp16, *front.points, front.chosen, *seeds)
    unique: dict[str, Evaluation] = {}
    for evaluation in wanted:
        if evaluation is not None and evaluation.is_finite:
            unique.setdefault(evaluation.plan.fingerprint, evaluation)
    return tuple(unique.values())


def compare(
    searched: Sequence[Evaluation],
    target: TargetSection,
    front: Front,
    record: StudyRecord,
    rounds: int,
    latency: LatencySettings,
) -> Confirmation:
    """Compare what was measured with what the search measured or predicted."""
    evaluations = record.evaluations()
    sound = [replace(e, confirmed=True) for e in evaluations if e.is_finite]
    kept, unconfirmed = confirmed_evaluations(record, rounds, latency, sound)
    measured = {e.plan.fingerprint: e for e in kept}
    reasons = {plan.fingerprint: describe(failure) for plan, _, failure in record.failures()}
    reasons |= {e.plan.fingerprint: "its outputs are not finite" for e in evaluations if not e.is_finite}
    not_finite = "its outputs are not finite on the held-out samples"
    reasons |= {e.plan.fingerprint: describe(failure) if failure else not_finite for e, failure in unconfirmed}
    plans = [
        ConfirmedPlan(e, measured[e.plan.fingerprint])
        if e.plan.fingerprint in measured
        else ConfirmedPlan(e, None, reasons.get(e.plan.fingerprint, "not measured yet"))
        for e in searched
    ]
    plans.sort(key=lambda p: (p.measured is None, (p.measured or p.searched).latency.median_ms))
    pairs = [(p.searched, p.measured) for p in plans if p.measured is not None]
    return Confirmation(front, target, tuple(plans), latency_agreement(pairs), error_agreement(pairs))
