"""The trials of a study, sorted by what became of them, and whose fault failures were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind
from mptune.errors import PlanError
from mptune.files import READ_ERRORS
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation, Origin
from mptune.tuning.record.attributes import (
    ATTEMPTS,
    EVALUATION,
    FAILED_BEFORE,
    FAILURE,
    FAULT,
    FAULTS,
    by_group,
    origin_of,
)
from mptune.tuning.record.storage import damaged_trial, storing
from mptune.tuning.sampler.trials import PLAN_ATTR, TIMING_ATTR
from mptune.tuning.space import SearchSpace

_DAMAGE = (*READ_ERRORS, AssertionError, RecursionError, PlanError)
"""What making something of a damaged attribute can raise."""

_SETTLED = (TrialState.COMPLETE, TrialState.PRUNED)
_FINISHED = (*_SETTLED, TrialState.FAIL)


def settled(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The finished trials, without failures of plans that are, or were, tried again: their last trial counts."""
    finished = [trial for trial in trials if trial.state in _SETTLED]
    again = {t.user_attrs["fingerprint"]: t.number for t in trials if FAILED_BEFORE in t.user_attrs}
    if not again:
        return finished
    return [t for t in finished if again.get(t.user_attrs.get("fingerprint", ""), -1) <= t.number]


def failed_attempts(trial: FrozenTrial) -> int:
    """In how many processes a plan failed, in ways that do not show whose fault it was; 0 where it did not."""
    document = trial.user_attrs.get(FAILURE) if trial.state is TrialState.PRUNED else None
    if document is None or not Failure.from_json(document).is_inconclusive:
        return 0
    return int(trial.user_attrs.get(ATTEMPTS, 1))


class StudyTrials:
    """Reads the trials of a study; every method raises ``RunError`` where the storage cannot be read."""

    def __init__(self, study: optuna.Study, where: str, space: SearchSpace, metric: str) -> None:
        self._study = study
        self._where = where  # the storage, for messages
        self._space = space
        self._metric = metric
        self._decoded: dict[int, Evaluation] = {}
        self._sorted_at = (0, 0)  # number of trials, and of those that were finished
        self._settled: list[FrozenTrial] = []
        self._plans: dict[str, FrozenTrial] = {}

    def every(self) -> list[FrozenTrial]:
        """All trials, in their order."""
        with storing(self._where):
            return self._study.get_trials(deepcopy=False)

    def settled(self) -> list[FrozenTrial]:
        """The finished trials whose outcome stands (``mptune.tuning.record.study_trials.settled``)."""
        trials = self.every()
        counts = len(trials), len([trial for trial in trials if trial.state in _FINISHED])
        if counts != self._sorted_at:  # a finished trial never changes
            self._sorted_at = counts
            self._settled = settled([trial for trial in trials if trial.state is not TrialState.FAIL])
            self._plans = {trial.user_attrs.get("fingerprint", ""): trial for trial in self._settled}
        return self._settled

    def failed(self) -> list[FrozenTrial]:
        """The settled trials of plans that failed through their own fault, or came out not finite."""
        return [trial for trial in self.settled() if trial.state is TrialState.PRUNED]

    def has_faults(self) -> bool:
        """Whether a job failed, and not again in a fresh process; a full disk does not count, which meets every job."""
        if any(trial.user_attrs.get(FAULTS) for trial in self.settled()):
            return True
        lost = (t.user_attrs[FAULT] for t in self.every() if t.state is TrialState.FAIL and FAULT in t.user_attrs)
        return any(Failure.from_json(fault).kind is not FailureKind.DISK_FULL for fault in lost)

    def plans(self) -> dict[str, FrozenTrial]:
        """Fingerprint of each settled plan -> its last settled trial."""
        self.settled()
        return self._plans

    def running(self) -> list[FrozenTrial]:
        """Those that run."""
        return [trial for trial in self.every() if trial.state is TrialState.RUNNING]

    def waiting(self) -> set[str]:
        """Fingerprints of the plans that are enqueued."""
        return {t.user_attrs.get("fingerprint", "") for t in self.every() if t.state is TrialState.WAITING}

    def evaluation_of(self, trial: FrozenTrial) -> Evaluation:
        """What was recorded of a trial's plan, by the study's metric."""
        if trial.number not in self._decoded:
            try:
                evaluation = Evaluation.from_json(trial.user_attrs[EVALUATION]).with_metric(self._metric)
                evaluation.to_point()  # with the figures that every reader asks for
            except _DAMAGE as error:
                raise damaged_trial(trial, EVALUATION, self._where) from error
            if not _holds_numbers(trial.user_attrs.get(TIMING_ATTR, 0.0)):  # what the sampler reads beside it
                raise damaged_trial(trial, TIMING_ATTR, self._where)
            self._decoded[trial.number] = evaluation
        return self._decoded[trial.number]

    def failure_of(self, trial: FrozenTrial) -> Failure:
        """What was recorded of a trial whose plan failed."""
        try:
            return Failure.from_json(trial.user_attrs[FAILURE])
        except _DAMAGE as error:
            raise damaged_trial(trial, FAILURE, self._where) from error

    def baseline(self) -> Evaluation | None:
        """The evaluation of all-FP32; None before it is done."""
        trials = (t for t in self.settled() if origin_of(t.user_attrs) == ORIGIN_FP32)
        return next((self.evaluation_of(t) for t in trials if EVALUATION in t.user_attrs), None)

    def plan_of(self, trial: FrozenTrial) -> PrecisionPlan:
        """The plan of a trial."""
        return self.read_plan(trial.user_attrs, trial.params)

    def read_plan(self, attrs: Mapping[str, Any], parameters: Mapping[str, str]) -> PrecisionPlan:
        """The plan of a trial, by its attributes and its parameters, or the ids of their groups."""
        whole = attrs.get(PLAN_ATTR)
        if whole is None and self._space.groups:
            return self._space.plan(by_group(parameters))
        if whole is None:  # The study is read without its space: what no parameter names is as in all-FP32.
            baseline = self.baseline()
            whole = {**({} if baseline is None else baseline.plan.precision), **by_group(parameters)}
        return PrecisionPlan(self._space.model_sha256, {group: Precision.named(p) for group, p in whole.items()})


def _holds_numbers(value: object) -> bool:
    """Whether a value is a number, or a dictionary whose values all are."""
    return all(map(_holds_numbers, value.values())) if isinstance(value, dict) else isinstance(value, int | float)


@dataclass(frozen=True)
class Proposal:
    """A plan that is to be evaluated, and the trial that will hold the outcome."""

    plan: PrecisionPlan
    number: int
    origin: Origin
    attempt: int
    """How many attempts a fault of the machine has cost already."""
    trial: optuna.Trial
    failures: int = 0
    """How often the plan failed before, where it is tried again."""
