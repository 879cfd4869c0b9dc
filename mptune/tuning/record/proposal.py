"""Proposal: a plan that is to be evaluated."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Origin


@dataclass(frozen=True)
class Proposal:
    """A plan that is to be evaluated, and the trial that will hold the outcome.

    Attributes:
        plan: the plan.
        number: the trial's number.
        origin: who proposed it.
        attempt: how many attempts a fault of the machine has cost already.
        trial: Optuna's.
        failures: how often the plan failed before, where it is tried again.
    """

    plan: PrecisionPlan
    number: int
    origin: Origin
    attempt: int
    trial: optuna.Trial
    failures: int = 0
