"""What a device says to the front of a search: every plan as the search saw it and as it was measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mptune.run_json import TargetSection
from mptune.settings import LatencySettings
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.failures import describe
from mptune.tuning.front import Front
from mptune.tuning.reasons.ranking import Agreement, error_agreement, latency_agreement
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.steps.remeasure import confirmed_evaluations


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
    reasons |= {plan.evaluation.plan.fingerprint: plan.reason for plan in unconfirmed}
    plans = [
        ConfirmedPlan(e, measured[e.plan.fingerprint])
        if e.plan.fingerprint in measured
        else ConfirmedPlan(e, None, reasons.get(e.plan.fingerprint, "not measured yet"))
        for e in searched
    ]
    plans.sort(key=lambda p: (p.measured is None, (p.measured or p.searched).latency.median_ms))
    pairs = [(p.searched, p.measured) for p in plans if p.measured is not None]
    return Confirmation(front, target, tuple(plans), latency_agreement(pairs), error_agreement(pairs))
