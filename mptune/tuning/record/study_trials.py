"""The trials of a study, sorted by what became of them; and how long that takes does not grow with every look."""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.timing.session_timing import SessionTiming
from mptune.tuning.record.attributes import EVALUATION, FAILED_BEFORE, FAULT, read_json
from mptune.tuning.record.damage import decode_session
from mptune.tuning.record.faults import settled
from mptune.tuning.record.storage import storing


class StudyTrials:
    """Looks at trials that are not finished, and at new ones: a finished trial never changes."""

    def __init__(self, study: optuna.Study, where: str) -> None:
        """Nothing is read yet.

        Args:
            study: opened.
            where: the storage, for messages.
        """
        self._study = study
        self._where = where
        self._every: list[FrozenTrial] = []
        self._open: list[int] = []  # positions of those that are not finished
        self._settled: list[FrozenTrial] = []
        self._plans: dict[str, FrozenTrial] = {}  # fingerprint -> its last settled trial
        self._again: set[str] = set()  # fingerprints of plans that were tried again
        self._timings: dict[str, tuple[SessionTiming, ...]] = {}
        self._build_times_s: list[float] = []
        self._read = 0  # so many of the settled trials are in both

    def every(self) -> list[FrozenTrial]:
        """All trials, in their order.

        Raises:
            RunError: the storage cannot be read.
        """
        known = len(self._every)
        with storing(self._where):
            self._every = self._study.get_trials(deepcopy=False)
        new = [*self._open, *range(known, len(self._every))]
        self._open = [position for position in new if not self._every[position].state.is_finished()]
        again = {
            trial.user_attrs["fingerprint"] for trial in self._every[known:] if trial.user_attrs.get(FAILED_BEFORE)
        }
        ended = [self._every[position] for position in new if self._every[position].state.is_finished()]
        done = [trial for trial in ended if trial.state is not TrialState.FAIL]
        is_later = not (done and self._settled) or done[0].number > self._settled[-1].number
        if again or not is_later or any(t.user_attrs.get("fingerprint") in self._again for t in ended):
            self._again |= again
            done = settled([trial for trial in self._every if trial.state is not TrialState.FAIL])
            self._settled, self._plans, self._timings, self._build_times_s, self._read = [], {}, {}, [], 0
        if done:  # A new list: who asked before may go through the other one still.
            self._settled = [*self._settled, *done]
        self._plans.update((t.user_attrs["fingerprint"], t) for t in done if "fingerprint" in t.user_attrs)
        return self._every

    def settled(self) -> list[FrozenTrial]:
        """The finished trials whose outcome stands (``mptune.tuning.record.faults.settled``)."""
        self.every()
        return self._settled

    def lost(self) -> list[FrozenTrial]:
        """The trials that a fault of the machine ended; their plans were enqueued again."""
        return [t for t in self.every() if t.state is TrialState.FAIL and FAULT in t.user_attrs]

    def plans(self) -> dict[str, FrozenTrial]:
        """Fingerprint of each settled plan -> its last settled trial."""
        self.every()
        return self._plans

    def running(self) -> list[FrozenTrial]:
        """Those that run."""
        return self._unfinished(TrialState.RUNNING)

    def waiting(self) -> list[FrozenTrial]:
        """Those that are enqueued."""
        return self._unfinished(TrialState.WAITING)

    def session_timings(self) -> dict[str, tuple[SessionTiming, ...]]:
        """Fingerprint of each settled plan -> timings of its evaluations whose session is known.

        Raises:
            RunError: an evaluation cannot be read.
        """
        self._read_new()
        return self._timings.copy()

    def build_times_s(self) -> list[float]:
        """Seconds to build the engine of each settled plan that was evaluated, whose evaluations are not kept decoded.

        Raises:
            RunError: an evaluation cannot be read.
        """
        self._read_new()
        return self._build_times_s.copy()

    def _read_new(self) -> None:
        for trial in self.settled()[self._read :]:
            document = read_json(trial.user_attrs, EVALUATION)
            if document is not None:
                session, build_s = decode_session(document, trial.number, self._where)
                self._build_times_s.append(build_s)
                if session is not None:
                    fingerprint = trial.user_attrs["fingerprint"]
                    self._timings[fingerprint] = (*self._timings.get(fingerprint, ()), session)
            self._read += 1

    def _unfinished(self, state: TrialState) -> list[FrozenTrial]:
        every = self.every()
        return [every[position] for position in self._open if every[position].state is state]
