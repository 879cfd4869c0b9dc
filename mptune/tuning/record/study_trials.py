"""The trials of a study, sorted by what became of them, and whose fault failures were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure, FailureKind
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Origin
from mptune.tuning.record.attributes import ATTEMPTS, FAILED_BEFORE, FAILURE, FAULT, FAULTS
from mptune.tuning.record.storage import storing

_SETTLED = (TrialState.COMPLETE, TrialState.PRUNED)


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


def fault_counts(trials: Sequence[FrozenTrial], lost: Sequence[FrozenTrial] = ()) -> tuple[int, int]:
    """Failures that did not come again in a fresh process, those of the machine counted in, and all attempts."""
    faults = sum(int(trial.user_attrs.get(FAULTS, 0)) for trial in trials)
    # A full disk meets every job, and not one now and then.
    kinds = [Failure.from_json(trial.user_attrs[FAULT]).kind for trial in lost]
    faults += sum(kind is not FailureKind.DISK_FULL for kind in kinds)
    return faults, len(trials) + faults


_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class StudyTrials:
    """Reads the trials of a study; every method raises ``RunError`` where the storage cannot be read.

    A finished trial never changes, so they are sorted anew only when another trial has finished, or waits.
    """

    def __init__(self, study: optuna.Study, where: str) -> None:
        self._study = study
        self._where = where  # the storage, for messages
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
        if counts != self._sorted_at:
            self._sorted_at = counts
            self._settled = settled([trial for trial in trials if trial.state is not TrialState.FAIL])
            self._plans = {trial.user_attrs.get("fingerprint", ""): trial for trial in self._settled}
        return self._settled

    def failed(self) -> list[FrozenTrial]:
        """The settled trials of plans that failed through their own fault, or came out not finite."""
        return [trial for trial in self.settled() if trial.state is TrialState.PRUNED]

    def lost(self) -> list[FrozenTrial]:
        """The trials that a fault of the machine ended; their plans were enqueued again."""
        return [t for t in self.every() if t.state is TrialState.FAIL and FAULT in t.user_attrs]

    def plans(self) -> dict[str, FrozenTrial]:
        """Fingerprint of each settled plan -> its last settled trial."""
        self.settled()
        return self._plans

    def running(self) -> list[FrozenTrial]:
        """Those that run."""
        return [trial for trial in self.every() if trial.state is TrialState.RUNNING]

    def waiting(self) -> list[FrozenTrial]:
        """Those that are enqueued."""
        return [trial for trial in self.every() if trial.state is TrialState.WAITING]


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
