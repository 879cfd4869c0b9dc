"""The trials of a study, sorted by what became of them."""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial, TrialState

from mptune.tuning.record.attributes import FAULT
from mptune.tuning.record.faults import settled
from mptune.tuning.record.storage import storing

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
        """The finished trials whose outcome stands (``mptune.tuning.record.faults.settled``)."""
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
