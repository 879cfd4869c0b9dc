"""StudyRecord: what a search knows, kept by Optuna: evaluations, failures, confirmations.

Every fact about a plan is written into the attributes of its trial before the trial is finished. So whenever the
process dies, a trial either still runs (and is taken up again) or its outcome is known; nothing is built twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from mptune.engines.base import Failure
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Evaluation, Origin
from mptune.tuning.failures import describe
from mptune.tuning.record.attributes import (
    ATTEMPTS,
    EVALUATION,
    FAILED_BEFORE,
    FAILURE,
    FAULT,
    OWNER,
    ParameterNames,
    by_group,
    evaluation_attrs,
    note_key,
    objectives,
    origin_of,
    read_notes,
)
from mptune.tuning.record.owner import Heartbeats, is_dead
from mptune.tuning.record.storage import batch, close_storage, storing
from mptune.tuning.record.study_trials import Proposal, StudyTrials
from mptune.tuning.sampler.plan_rows import Columns
from mptune.tuning.sampler.posterior import BuiltPlans
from mptune.tuning.sampler.trials import FAILURE_ATTR, PLAN_ATTR, read_plans, set_feasible
from mptune.tuning.space import SearchSpace

IDENTITY = "mptune"
"""Note under which a study says what it was made with."""

_LONGEST_TURN_S, _TURN_POLL_S = 10.0, 0.1


class StudyRecord:
    """One search's evaluations, failures and confirmations, kept by Optuna. Made by ``open_study``.

    Every method that writes raises ``RunError`` where the disk is full or the database does not answer. ``is_alone``
    says that no other process writes the study.
    """

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        space: SearchSpace,
        metric: str,
        where: str,
        *,
        exclusive: bool,
    ) -> None:
        self._study = study
        self._storage = storage
        self._where = where
        self.is_alone = exclusive
        self._heartbeats = Heartbeats(storage, study._study_id)
        self.space = space
        self.trials = StudyTrials(study, where, space, metric)
        self._names = ParameterNames(space.groups, self.trials.every())
        self._evaluations: tuple[Sequence[FrozenTrial], tuple[Evaluation, ...]] = ((), ())  # of these settled trials
        self.metric = metric

    # -- reading ------------------------------------------------------------------------------------------------

    def evaluations(self) -> tuple[Evaluation, ...]:
        """All evaluations of finished trials, in the order of the trials, those with non-finite outputs included."""
        settled = self.trials.settled()
        if settled is not self._evaluations[0]:
            every = tuple(self.trials.evaluation_of(t) for t in settled if EVALUATION in t.user_attrs)
            self._evaluations = (settled, every)
        return self._evaluations[1]

    def failures(self) -> tuple[tuple[PrecisionPlan, Origin, Failure], ...]:
        """The plans that failed through their own fault, with their origin."""
        return tuple(
            (self.trials.plan_of(t), origin_of(t.user_attrs), self.trials.failure_of(t))
            for t in self.trials.failed()
            if FAILURE in t.user_attrs
        )

    def baseline(self) -> Evaluation | None:
        """The evaluation of all-FP32; None before it is done."""
        return self.trials.baseline()

    @property
    def spent(self) -> int:
        """How much of the budget is spent: evaluations and failed plans, but no machine faults and no duplicates."""
        return len(self.trials.settled())

    def states(self, but: int | None = None) -> dict[str, str]:
        """Fingerprints that need no build any more, or that a living process works on -> state, lower case.

        ``but``, the number of a running trial, does not count. Two workers that propose at the same time may come to
        one plan: asked when the proposal is written down, at least one of them sees the other's.
        """
        running = {t.user_attrs.get("fingerprint", ""): t for t in self.trials.running() if t.number != but}
        trials = {**self.trials.plans(), **running}
        return {fingerprint: t.state.name.lower() for fingerprint, t in trials.items() if fingerprint}

    def built_plans(self, groups: Sequence[str]) -> BuiltPlans:
        """The plans that were evaluated, over these free groups; without those of a group that is not as it prefers."""
        columns = Columns(self.parameters(groups), tuple(str(self.space.reduced_of(g)) for g in groups))
        return read_plans(self.trials.every(), columns)

    # -- asking and telling -------------------------------------------------------------------------------------

    def enqueue(self, plan: PrecisionPlan, origin: Origin, attempt: int = 0, failures: int = 0) -> None:
        """Let a plan be asked next, unless it is enqueued already; its new trial replaces ``failures`` before it."""
        if plan.fingerprint in self.trials.waiting():
            return
        attrs: dict[str, Any] = {"fingerprint": plan.fingerprint, "origin": str(origin), "attempt": attempt}
        if failures:
            attrs[FAILED_BEFORE] = failures
        if not self.space.holds(plan):
            attrs[PLAN_ATTR] = {group: str(p) for group, p in plan.precision.items()}
        with storing(self._where):
            choices = {self._names.of(group): precision for group, precision in self.space.choices(plan).items()}
            self._study.enqueue_trial(choices, user_attrs=attrs)

    def parameters(self, groups: Sequence[str]) -> tuple[str, ...]:
        """The names of the groups' parameters."""
        return tuple(map(self._names.of, groups))

    def ask(self, sampler: BaseSampler | None = None) -> Proposal:
        """Take the next enqueued plan, else let a sampler propose one: the given one, or the one before."""
        with storing(self._where):
            self._study.sampler = sampler or self._study.sampler
            trial = self._study.ask()
            trial.set_user_attr(OWNER, self._heartbeats.owner(trial._trial_id))  # at once: proposing may take long
            if "fingerprint" not in trial.user_attrs:
                self._wait_for_turn(trial.number)
            with batch(self._storage):
                options = self.space.options.items()
                choices = {group: trial.suggest_categorical(self._names.of(group), every) for group, every in options}
                attrs = trial.user_attrs
                plan = self.trials.read_plan(attrs, choices)
                if "fingerprint" not in attrs:
                    trial.set_user_attr("fingerprint", plan.fingerprint)
        return Proposal(
            plan, trial.number, origin_of(attrs), attrs.get("attempt", 0), trial, attrs.get(FAILED_BEFORE, 0)
        )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let no other worker enqueue or propose a plan meanwhile: a trial without a plan takes the place of a lock."""
        if self.is_alone:
            yield
            return
        with storing(self._where):
            trial_id = self._storage.create_new_trial(self._study._study_id)
            self._storage.set_trial_user_attr(trial_id, OWNER, self._heartbeats.owner(trial_id))
            try:
                self._wait_for_turn(self._storage.get_trial(trial_id).number)
                yield
            finally:
                self._heartbeats.stop()
                with suppress(UpdateFinishedTrialError):
                    self._storage.set_trial_state_values(trial_id, TrialState.FAIL)

    def _wait_for_turn(self, number: int) -> None:
        """Wait, not for ever, until each running trial before this one has its plan, which the sampler then avoids."""
        until_s = time.monotonic() + _LONGEST_TURN_S
        while not self.is_alone and time.monotonic() < until_s:
            if all("fingerprint" in t.user_attrs for t in self.trials.running() if t.number < number):
                return
            time.sleep(_TURN_POLL_S)

    def tell_evaluation(
        self,
        proposal: Proposal,
        evaluation: Evaluation,
        group_times_ms: Mapping[str, float] | None = None,
        faults: int = 0,
        *,
        is_final: bool = True,
    ) -> None:
        """Record an evaluation: COMPLETE where it is finite, else PRUNED with its constraint violated.

        One that is not final is what the trial is finished with if the process dies. ``group_times_ms`` are of the
        engine's own profiler; ``faults`` counts failures before, which were not the plan's fault.
        """
        times = group_times_ms or {}
        named = {self._names.of(group): times[group] for group in self.space.free if group in times}
        attrs = evaluation_attrs(evaluation, None if group_times_ms is None else named, faults)
        with _finishing(self._where), batch(self._storage):
            set_feasible(proposal.trial, evaluation.is_finite)
            for name, value in attrs.items():
                proposal.trial.set_user_attr(name, value)
        if is_final:
            with _finishing(self._where):
                self._finish(proposal.number, evaluation)

    def tell_failure(self, proposal: Proposal, failure: Failure, attempts: int = 1) -> None:
        """Record a plan that failed through its own fault, in so many attempts: PRUNED, its constraint violated."""
        with _finishing(self._where), batch(self._storage):
            set_feasible(proposal.trial, False)
            proposal.trial.set_user_attr(FAILURE_ATTR, describe(failure))
            proposal.trial.set_user_attr(ATTEMPTS, attempts)
            proposal.trial.set_user_attr(FAILURE, failure.to_json())
        with _finishing(self._where):
            self._study.tell(proposal.number, state=TrialState.PRUNED, skip_if_finished=True)

    def tell_duplicate(self, proposal: Proposal) -> None:
        """Drop a plan that is known already: the evaluation stays with the first trial.

        This one ends as FAIL, which samplers ignore: with its values twice, TPE would propose it ever more often.
        """
        with _finishing(self._where):
            proposal.trial.set_user_attr("duplicate", True)
            self._study.tell(proposal.number, state=TrialState.FAIL)

    def release(self, proposal: Proposal, fault: Failure | None = None, attempt: int | None = None) -> None:
        """Give a plan back that was not evaluated to its end: it is enqueued again, and its trial ends as FAIL.

        ``attempt`` counts those that faults of the machine have cost by now; None takes the proposal's.
        """
        with _finishing(self._where):
            if fault is not None:
                proposal.trial.set_user_attr("fault", describe(fault))
                proposal.trial.set_user_attr(FAULT, fault.to_json())
            attempt = proposal.attempt if attempt is None else attempt
            self.enqueue(proposal.plan, proposal.origin, attempt, proposal.failures)
            self._study.tell(proposal.number, state=TrialState.FAIL, skip_if_finished=True)

    def heal(self, stale_after_s: float, *, is_first: bool = True) -> int:
        """Take up what dead processes left running.

        A trial whose outcome is written is finished with it; of the others the plan is enqueued again, and the trial
        ends as FAIL. At first all running trials of a journal that nobody shares are dead; else see ``is_dead``.
        """
        is_alone = self.is_alone and is_first
        with storing(self._where):
            running = self.trials.running()
            stale = self._heartbeats.stale() if running else set()
            dead = [t for t in running if is_alone or is_dead(t, stale, stale_after_s)]
            for trial in dead:
                with suppress(UpdateFinishedTrialError):  # Another worker was faster.
                    attrs = trial.user_attrs
                    if EVALUATION in attrs:
                        self._finish(trial.number, self.trials.evaluation_of(trial))
                        continue
                    if FAILURE in attrs:
                        self._study.tell(trial.number, state=TrialState.PRUNED)
                        continue
                    choices = by_group(trial.system_attrs.get("fixed_params", trial.params))
                    if "duplicate" not in attrs and all(group in choices for group in self.space.free):
                        plan = self.trials.read_plan(attrs, choices)
                        self.enqueue(plan, origin_of(attrs), attrs.get("attempt", 0), attrs.get(FAILED_BEFORE, 0))
                    self._study.tell(trial.number, state=TrialState.FAIL)
        return len(dead)

    # -- confirmations and notes --------------------------------------------------------------------------------

    def note(self, key: str) -> Any:
        """A JSON value kept with the study, not to be changed; None where there is none."""
        return self.notes("").get(key)

    def notes(self, prefix: str) -> dict[str, Any]:
        """All JSON values whose key starts with ``prefix``, not to be changed."""
        with storing(self._where):  # ``Study.user_attrs`` would copy all of them, each time.
            notes = read_notes(self._storage.get_study_user_attrs(self._study._study_id))
        return {key: value for key, value in notes.items() if key.startswith(prefix)}

    def set_note(self, key: str, value: Any) -> None:
        """Keep a JSON value with the study."""
        with storing(self._where):
            self._study.set_user_attr(note_key(key, value), value)

    def close(self) -> None:
        """Let go of the storage. Idempotent."""
        self._heartbeats.close()
        close_storage(self._storage)

    def _finish(self, number: int, evaluation: Evaluation) -> None:
        values, state = (objectives(evaluation), None) if evaluation.is_finite else (None, TrialState.PRUNED)
        self._study.tell(number, values, state, skip_if_finished=True)


@contextmanager
def _finishing(where: str) -> Iterator[None]:
    """As ``storing``. A trial that others took up in the meantime, taking this process for dead, is theirs now."""
    with storing(where), suppress(UpdateFinishedTrialError):
        yield
