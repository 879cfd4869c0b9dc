"""StudyRecord: what a search knows, kept by Optuna: evaluations, failures, and what is noted beside them.

The outcome of a plan is one attribute of its trial, written before the trial is finished. So whenever the process dies,
a trial either still runs, and is taken up again, or its outcome is known; nothing is built twice.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import optuna
import psutil  # type: ignore[import-untyped]
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.paired import LEAST_ERROR
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.base import Failure, FailureKind
from mptune.errors import PlanError
from mptune.files import READ_ERRORS
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation, Origin
from mptune.tuning.fronts.searched_error import SearchedError
from mptune.tuning.record.storage import close_storage, damaged_trial, storing
from mptune.tuning.sampler.plan_rows import Columns
from mptune.tuning.sampler.posterior import BuiltPlans, Prior
from mptune.tuning.sampler.precision import Emulate, PrecisionSampler
from mptune.tuning.sampler.stock import derive_seed
from mptune.tuning.sampler.trials import OUTCOME_ATTR, PLAN_ATTR, TrialReader, outcome_of, set_outcome
from mptune.tuning.space import SearchSpace

_OWNER = "owner"
"""Trial attribute: the process that works on it."""

_NAMELESS = timedelta(seconds=60)
"""A trial that has run for this time and names no owner is orphaned: it does so within milliseconds."""

_DAMAGE = (*READ_ERRORS, AssertionError, RecursionError, PlanError)
"""What making something of a damaged attribute can raise."""

_SETTLED = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Proposal:
    """A plan that is to be evaluated, and the trial that will hold the outcome."""

    plan: PrecisionPlan
    number: int
    origin: Origin
    trial: optuna.Trial
    attempt: int = 0
    """How many attempts a fault of the machine has cost already."""
    failures: int = 0
    """How often the plan failed before, where it is tried again."""


class StudyRecord:
    """One search's evaluations and failures, kept by Optuna. Made by ``open_study``.

    Every method that writes raises ``RunError`` where the disk is full or the database does not answer. ``is_alone``
    says that no other process writes the study.
    """

    def __init__(
        self, study: optuna.Study, storage: BaseStorage, space: SearchSpace, metric: str, where: str, *, is_alone: bool
    ) -> None:
        self._study = study
        self._storage = storage
        self._where = where  # the storage, for messages
        self._heartbeat = None if isinstance(storage, JournalStorage) else _Heartbeat(storage)
        # What has been read of trials, by their ids: what a plan costs must not grow with the plans before it.
        self._plans: dict[int, PrecisionPlan] = {}
        self._evaluations: dict[int, Evaluation | None] = {}
        self.name: str = study.study_name
        self.is_alone = is_alone
        self._has_again = any(trial.user_attrs.get("failures") for trial in self.trials())
        self.space = space
        self.metric = metric

    # -- reading ------------------------------------------------------------------------------------------------

    def trials(self) -> list[FrozenTrial]:
        """All trials, in their order, not to be changed."""
        with storing(self._where):
            return self._study.get_trials(deepcopy=False)

    def settled(self) -> list[FrozenTrial]:
        """The trials of plans that were evaluated, or failed through their own fault."""
        settled = [trial for trial in self.trials() if trial.state in _SETTLED]
        # Of a plan that failed and was, or is, tried again the last trial counts.
        if not self._has_again:
            return settled
        again = {self._plan(t): t.number for t in self.trials() if t.user_attrs.get("failures") and self._plan(t)}
        return [t for t in settled if again.get(self._plan(t), -1) <= t.number] if again else settled

    def running(self) -> list[FrozenTrial]:
        """The trials of plans that are in work."""
        return [trial for trial in self.trials() if trial.state is TrialState.RUNNING]

    def evaluations(self) -> tuple[Evaluation, ...]:
        """All evaluations, in the order of their trials, those with non-finite outputs included."""
        settled = self.settled()
        for trial in settled:
            if trial._trial_id not in self._evaluations:
                self._evaluations[trial._trial_id] = self._evaluation(trial)
        return tuple([e for trial in settled if (e := self._evaluations[trial._trial_id]) is not None])

    def failures(self) -> tuple[tuple[PrecisionPlan, Origin, Failure], ...]:
        """The plans that failed through their own fault, with their origin."""
        failed = []
        for trial in self.settled():
            outcome = outcome_of(trial)
            if "failure" in outcome:
                try:
                    failure = Failure.from_json(outcome["failure"])
                    failed.append((self._outside(outcome["plan"]), Origin.parse(outcome["origin"]), failure))
                except _DAMAGE as error:
                    raise damaged_trial(trial, OUTCOME_ATTR, self._where) from error
        return tuple(failed)

    def baseline(self) -> Evaluation | None:
        """The evaluation of all-FP32; None before it is done."""
        return next((evaluation for evaluation in self.evaluations() if evaluation.origin == ORIGIN_FP32), None)

    @property
    def spent(self) -> int:
        """How much of the budget is spent: evaluations and failed plans, but no machine faults and no duplicates."""
        return len(self.settled())

    @property
    def plan_count(self) -> int | None:
        """How many plans the search may try; None before the first outcome."""
        return next((2 ** len(trial.params) for trial in self.settled()), None)

    def waiting(self) -> set[str]:
        """Fingerprints of the plans that are enqueued."""
        return self._fingerprints([trial for trial in self.trials() if trial.state is TrialState.WAITING])

    def started(self, before: int | None = None) -> set[str]:
        """Fingerprints of the plans that need no build any more, or that a process works on.

        ``before`` is the number of a running trial: of those that run, only earlier ones count. So of two workers that
        propose one plan at the same time, exactly one builds it.
        """
        every = [
            trial
            for trial in self.trials()
            if trial.state in _SETTLED
            or (trial.state is TrialState.RUNNING and (before is None or trial.number < before))
        ]
        return self._fingerprints(every)

    def failed(self) -> list[FrozenTrial]:
        """The settled trials of plans that failed through their own fault, or came out not finite."""
        return [trial for trial in self.settled() if trial.state is TrialState.PRUNED]

    def has_faults(self) -> bool:
        """Whether a job failed, and not again in a fresh process; a full disk does not count, which meets every job."""
        if any(outcome_of(trial).get("faults") for trial in self.settled()):
            return True
        lost = (t.user_attrs["fault"] for t in self.trials() if "fault" in t.user_attrs)
        return any(Failure.from_json(fault).kind is not FailureKind.DISK_FULL for fault in lost)

    def plan_of(self, trial: FrozenTrial) -> PrecisionPlan:
        """The plan of a trial that was proposed to its end."""
        plan = self._plan(trial)
        assert plan is not None
        return plan

    def built_plans(self, groups: Sequence[str]) -> BuiltPlans:
        """The plans that were evaluated, over these free groups; without those of a group that is not as it prefers."""
        columns = Columns(tuple(groups), tuple(str(self.space.reduced_of(group)) for group in groups))
        return TrialReader(columns).built_plans(self.trials(), -1)

    # -- asking and telling -------------------------------------------------------------------------------------

    def guide(
        self,
        prior: Prior,
        seed: int,
        emulate: Emulate | None = None,
        searched: SearchedError | None = None,
        to_learn: Callable[[], int] = lambda: 0,
    ) -> None:
        """Let ``PrecisionSampler`` propose from now on, with what is known or can be asked, errors as ``searched``."""
        scale = None if self.metric in ADD_IN_SQUARES else math.inf  # of others the largest one seen bounds the front

        def error_of(trial: FrozenTrial) -> OutputError:
            evaluation = self._evaluations.get(trial._trial_id) or self._evaluation(trial)
            assert evaluation is not None, "a trial with values"
            return evaluation.error

        judge = None if searched is None else searched.judge(error_of)
        self._study.sampler = PrecisionSampler(prior, derive_seed(seed, 0), scale, emulate, judge, to_learn)

    def enqueue(self, plan: PrecisionPlan, origin: Origin, attempt: int = 0, failures: int = 0) -> None:
        """Let a plan be asked next, unless it is enqueued already; its new trial replaces ``failures`` before it."""
        if plan.fingerprint in self.waiting():
            return
        self._has_again = self._has_again or failures > 0
        attrs: dict[str, Any] = {"origin": str(origin), "attempt": attempt, "failures": failures}
        if not self.space.holds(plan):
            attrs[PLAN_ATTR] = {group: str(precision) for group, precision in plan.precision.items()}
        with storing(self._where):
            self._study.enqueue_trial(self.space.choices(plan), user_attrs=attrs)

    def ask(self, sampler: BaseSampler | None = None) -> Proposal:
        """Take the next enqueued plan, else let the sampler propose one: from now on this one, where one is given."""
        self._study.sampler = sampler or self._study.sampler
        with storing(self._where):
            trial = self._study.ask()
            trial.set_user_attr(_OWNER, this_process())  # at once: proposing may take long
            if self._heartbeat is not None:
                self._heartbeat.begin(trial._trial_id)
            options = self.space.options.items()
            choices = {group: trial.suggest_categorical(group, precisions) for group, precisions in options}
            attrs = trial.user_attrs
        plan = self._outside(attrs[PLAN_ATTR]) if PLAN_ATTR in attrs else self.space.plan(choices)
        attempt, failures = attrs.get("attempt", 0), attrs.get("failures", 0)
        return Proposal(plan, trial.number, origin_of(attrs), trial, attempt, failures)

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
        engine's own profiler.
        """
        values = [evaluation.latency.median_ms, max(evaluation.error_value, LEAST_ERROR)]
        outcome: dict[str, Any] = {
            "values": values if evaluation.is_finite else None,
            "evaluation": evaluation.to_json(),
        }
        if group_times_ms is not None:
            outcome["group_ms"] = {g: round(ms, 6) for g, ms in group_times_ms.items() if g in self.space.free}
        if faults:
            outcome["faults"] = faults
        if evaluation.has_own_value and evaluation.is_finite:
            outcome["relative_l2"] = evaluation.error.value("relative_l2")
        self._tell(proposal, outcome, is_final=is_final)

    def tell_failure(self, proposal: Proposal, failure: Failure, attempts: int = 1) -> None:
        """Record a plan that failed through its own fault: PRUNED, its constraint violated."""
        plan = {group: str(precision) for group, precision in proposal.plan.precision.items()}
        failed: dict[str, Any] = {"failure": failure.to_json(), "plan": plan, "origin": str(proposal.origin)}
        failed["attempts"] = attempts
        self._tell(proposal, {"values": None, **failed})

    def tell_duplicate(self, proposal: Proposal) -> None:
        """Drop a plan that is known already: the evaluation stays with the first trial.

        This one ends as FAIL, which samplers ignore: with its values twice, TPE would propose it ever more often.
        """
        with _finishing(self._where):
            self._study.tell(proposal.number, state=TrialState.FAIL)

    def release(self, proposal: Proposal, fault: Failure | None = None, attempt: int | None = None) -> None:
        """Give a plan back that was not evaluated to its end: it is enqueued again, and its trial ends as FAIL."""
        with _finishing(self._where):
            if fault is not None:
                proposal.trial.set_user_attr("fault", fault.to_json())
            attempt = proposal.attempt if attempt is None else attempt
            self.enqueue(proposal.plan, proposal.origin, attempt, proposal.failures)
            self._study.tell(proposal.number, state=TrialState.FAIL, skip_if_finished=True)

    def heal(self, *, is_first: bool = False) -> int:
        """Take up what dead processes left running; how many trials that were.

        A trial whose outcome is written is finished with it; of the others the plan is enqueued again, and the trial
        ends as FAIL. At first all running trials of a journal that nobody shares are of dead processes.
        """
        running = self.running()
        orphans = running if is_first and self.is_alone else self._orphans(running)
        with storing(self._where):
            for trial in orphans:
                with suppress(UpdateFinishedTrialError):  # Another worker was faster.
                    if OUTCOME_ATTR in trial.user_attrs:
                        self._finish(trial.number, outcome_of(trial))
                        continue
                    if (plan := self._plan(trial)) is not None:
                        attrs = trial.user_attrs
                        self.enqueue(plan, origin_of(attrs), attrs.get("attempt", 0), attrs.get("failures", 0))
                    self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        return len(orphans)

    # -- what is noted of the whole study -----------------------------------------------------------------------

    def note(self, key: str) -> Any:
        """A JSON value kept with the study, not to be changed; None where there is none."""
        return self.notes().get(key)

    def notes(self, prefix: str = "") -> dict[str, Any]:
        """All JSON values whose key starts with ``prefix``, not to be changed."""
        with storing(self._where):  # ``Study.user_attrs`` would copy all of them, each time.
            notes = self._storage.get_study_user_attrs(self._study._study_id)
        return {key: value for key, value in notes.items() if key.startswith(prefix)}

    def set_note(self, key: str, value: Any) -> None:
        """Keep a JSON value with the study."""
        with storing(self._where):
            self._study.set_user_attr(key, value)

    def copy_to(self, storage: BaseStorage) -> None:
        """Copy the whole study into another storage."""
        with storing(self._where):
            optuna.copy_study(from_study_name=self.name, from_storage=self._storage, to_storage=storage)

    def close(self) -> None:
        """Let go of the storage. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.end()
        close_storage(self._storage)

    # -- trials -------------------------------------------------------------------------------------------------

    def _evaluation(self, trial: FrozenTrial) -> Evaluation | None:
        """What was recorded of a trial's plan; None where it gave no outputs."""
        try:
            outcome = outcome_of(trial)
            if "evaluation" not in outcome:
                return None
            evaluation = Evaluation.from_json(outcome["evaluation"])
            evaluation.to_point()  # with the figures that every reader asks for
            sum(outcome.get("group_ms", {}).values())
        except _DAMAGE as error:
            raise damaged_trial(trial, OUTCOME_ATTR, self._where) from error
        return evaluation

    def _fingerprints(self, trials: Sequence[FrozenTrial]) -> set[str]:
        for trial in trials:
            if trial._trial_id not in self._plans and (plan := self._plan(trial)) is not None:
                self._plans[trial._trial_id] = plan
        return {self._plans[t._trial_id].fingerprint for t in trials if t._trial_id in self._plans}

    def _plan(self, trial: FrozenTrial) -> PrecisionPlan | None:
        """The plan of a trial; None where it has not been proposed to its end."""
        if PLAN_ATTR in trial.user_attrs:
            return self._outside(trial.user_attrs[PLAN_ATTR])
        choices = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        return self.space.plan(choices) if all(group in choices for group in self.space.free) else None

    def _outside(self, precisions: Mapping[str, str]) -> PrecisionPlan:
        """A plan that is written out whole."""
        named = {group: Precision.named(precision) for group, precision in precisions.items()}
        return PrecisionPlan(self.space.model_sha256, named)

    def _tell(self, proposal: Proposal, outcome: Mapping[str, Any], *, is_final: bool = True) -> None:
        with _finishing(self._where):
            set_outcome(proposal.trial, outcome)
            if is_final:
                self._finish(proposal.number, outcome)

    def _finish(self, number: int, outcome: Mapping[str, Any]) -> None:
        values = outcome["values"]
        self._study.tell(number, values, TrialState.PRUNED if values is None else None, skip_if_finished=True)

    def _orphans(self, running: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """The running trials that no process works on any more.

        A worker of a database has a heartbeat. A journal has none: its workers are on one host, where a process can be
        looked up.
        """
        stale: set[int] = set()
        if running and self._heartbeat is not None:
            with storing(self._where):
                stale = set(self._heartbeat.storage._get_stale_trial_ids(self._study._study_id))
        orphans = []
        for trial in running:
            owner, started = trial.user_attrs.get(_OWNER), trial.datetime_start
            if owner is None:
                is_orphan = started is not None and datetime.now(started.tzinfo) - started > _NAMELESS
            else:
                is_orphan = not is_alive(owner) if self._heartbeat is None else trial._trial_id in stale
            if is_orphan:
                orphans.append(trial)
        return orphans


class _Heartbeat:
    """Tells a database, again and again, that this process works on its trial."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self._trial_id = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def begin(self, trial_id: int) -> None:
        """Work on this trial from now on."""
        self._trial_id = trial_id
        self.storage.record_heartbeat(trial_id)
        if not self._thread.is_alive():
            self._thread.start()

    def end(self) -> None:
        """Wait, not for ever, until the thread has given its connection back. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _beat(self) -> None:
        while not self._ended.wait(self.storage.get_heartbeat_interval()):
            # A database that is away for a moment misses a beat or two; whoever writes a result raises the error.
            with suppress(Exception):
                self.storage.record_heartbeat(self._trial_id)
        with suppress(Exception):
            self.storage.remove_session()  # of this thread


def this_process() -> dict[str, Any]:
    """Host, process id and start of this process, as JSON types."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Whether a process that ``this_process`` described lives on this host."""
    try:
        is_same = abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) <= 1.0
    except psutil.NoSuchProcess:
        return False
    return bool(is_same and owner["host"] == socket.gethostname())


@contextmanager
def _finishing(where: str) -> Iterator[None]:
    """As ``storing``. A trial that others took up in the meantime, taking this process for dead, is theirs now."""
    with storing(where), suppress(UpdateFinishedTrialError):
        yield


def origin_of(attrs: Mapping[str, Any]) -> Origin:
    """Who proposed a trial's plan."""
    return Origin.parse(attrs["origin"]) if "origin" in attrs else ORIGIN_SAMPLER


def failed_attempts(trial: FrozenTrial) -> int:
    """In how many processes a plan failed, in ways that do not show whose fault it was; 0 where it did not."""
    outcome = outcome_of(trial)
    if "failure" not in outcome or not Failure.from_json(outcome["failure"]).is_inconclusive:
        return 0
    return int(outcome["attempts"])
