"""StudyRecord: what a search knows, kept by Optuna: evaluations, failures, what is noted beside them, and sessions.

The outcome of a plan is one attribute of its trial, written before the trial is finished. So whenever the process dies,
a trial either still runs, and is taken up again, or its outcome is known; nothing is built twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeAlias, TypeVar, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from mptune.data.metrics.accuracy import LEAST_ERROR
from mptune.engines.base import Failure, Measurement
from mptune.engines.latency import Latency
from mptune.engines.spread import SessionSpread, SessionTiming
from mptune.errors import PlanError, RunError
from mptune.files import READ_ERRORS, is_left, scratch_name
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import decode_float
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation, Origin
from mptune.tuning.record.storage import close_storage
from mptune.tuning.sampler.plans import Columns
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import OUTCOME_ATTR, PLAN_ATTR, BuiltPlans, outcome_of, read_plans, set_outcome
from mptune.tuning.space import SearchSpace

T = TypeVar("T")

FailedPlan: TypeAlias = tuple[PrecisionPlan, Origin, Failure]

CONFIRM_NOTE = "confirm:"
"""Begins the names of the notes about plans that were measured again."""

DRIFTED = 1.1
"""A baseline that changes by more than this factor during a search is worth a warning."""

_OWNER = "owner"
"""Trial attribute: the process that works on it."""

_NAMELESS = timedelta(seconds=60)
"""A running trial names its owner within milliseconds; after this time without one, its process died before."""

_TF32, _FIRST = "tf32", "first baseline"
"""Study attributes: the evaluation of all-FP32 with TF32; the baseline's first latency and session, to which all
others refer."""
UNPINNED_NOTE = "unpinned FP16"
"""Study attribute: id and emulated held-out error of all-FP16 without the pins of findings."""

SETTLED = (TrialState.COMPLETE, TrialState.PRUNED)
"""The states of plans that were evaluated, or failed through their own fault."""


@dataclass(frozen=True)
class Proposal:
    """A plan that is to be evaluated, and the trial that will hold the outcome."""

    plan: PrecisionPlan
    number: int
    origin: Origin
    trial: optuna.Trial


class StudyRecord:
    """One search's evaluations and failures, kept by Optuna. Made by ``open_study``.

    Every method raises ``RunError`` where the disk is full or the database does not answer. A trial that others took up
    in the meantime, taking this process for dead, is theirs: an outcome of this process is dropped then.

    Attributes:
        is_alone: no other process writes the study.
    """

    def __init__(
        self, study: optuna.Study, storage: BaseStorage, space: SearchSpace, metric: str, where: str, *, is_alone: bool
    ) -> None:
        self._study, self.storage, self._where = study, storage, where
        self.name, self.space, self.metric, self.is_alone = study.study_name, space, metric, is_alone
        # What has been read of trials, by their ids: what a plan costs must not grow with the plans before it.
        self._plans: dict[int, PrecisionPlan] = {}
        self._evaluations: dict[int, Evaluation] = {}

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """All trials, or those in these states, in their order, not to be changed."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.state in states] if states else trials

    def settled(self) -> list[FrozenTrial]:
        """The trials of plans that were evaluated, or failed through their own fault."""
        return self.trials(*SETTLED)

    def failed(self) -> list[FrozenTrial]:
        """Those of plans that failed, or came out not finite."""
        return self.trials(TrialState.PRUNED)

    def running(self) -> list[FrozenTrial]:
        """The trials of plans that are in work."""
        return self.trials(TrialState.RUNNING)

    def waiting(self) -> set[str]:
        """Fingerprints of the plans that are enqueued."""
        return {plan.fingerprint for trial in self.trials(TrialState.WAITING) if (plan := self._plan(trial))}

    def started(self, but: int | None = None) -> set[str]:
        """Fingerprints of the plans that need no build any more, or that a process works on.

        The running trial number ``but`` does not count. Of two workers that come to one plan at the same time, and ask
        when it is written down, at least one sees the other's, and drops it.
        """
        trials = [trial for trial in self.trials(*SETTLED, TrialState.RUNNING) if trial.number != but]
        return {plan.fingerprint for trial in trials if (plan := self._plan(trial))}

    def evaluations(self) -> tuple[Evaluation, ...]:
        """All evaluations, in the order of their trials, those with non-finite outputs included."""
        settled = [trial for trial in self.settled() if "evaluation" in outcome_of(trial)]
        for trial in settled:
            if trial._trial_id not in self._evaluations:
                evaluation = self._read(trial, lambda outcome: Evaluation.from_json(outcome["evaluation"]))
                self._evaluations[trial._trial_id] = evaluation
        return tuple([self._evaluations[trial._trial_id] for trial in settled])

    def failures(self) -> tuple[FailedPlan, ...]:
        """The plans that failed through their own fault, with their origin."""

        def read(outcome: Mapping[str, Any]) -> FailedPlan:
            failure = Failure.from_json(outcome["failure"])
            return self._whole_plan(outcome["plan"]), Origin.parse(outcome["origin"]), failure

        return tuple(self._read(trial, read) for trial in self.failed() if "failure" in outcome_of(trial))

    def baseline(self) -> Evaluation | None:
        """The evaluation of all-FP32; None before it is done."""
        return next((evaluation for evaluation in self.evaluations() if evaluation.origin == ORIGIN_FP32), None)

    def tf32(self) -> Evaluation | None:
        """All-FP32 with TF32; None where it was not evaluated."""
        note = self.note(_TF32)
        return None if note is None else Evaluation.from_json(note)

    def keep_tf32(self, evaluation: Evaluation) -> None:
        """Keep the evaluation of all-FP32 with TF32."""
        self.set_note(_TF32, evaluation.to_json())

    @property
    def spent(self) -> int:
        """How much of the budget is spent: evaluations and failed plans, but no machine faults and no duplicates."""
        return len(self.settled())

    def built_plans(self, groups: Sequence[str]) -> BuiltPlans:
        """The plans that were evaluated, over these free groups; without those of a group that is not as it prefers."""
        return read_plans(self.trials(), Columns(tuple(groups), tuple(str(self.space.reduced_of(g)) for g in groups)))

    def enqueue(self, plan: PrecisionPlan, origin: Origin) -> None:
        """Let a plan be asked next, unless it is enqueued already."""
        if plan.fingerprint in self.waiting():
            return
        attrs: dict[str, Any] = {"origin": str(origin)}
        if not self.space.holds(plan):
            attrs[PLAN_ATTR] = plan.to_json()["precision"]
        self._study.enqueue_trial(self.space.choices(plan), user_attrs=attrs)

    def ask(self, sampler: PrecisionSampler | None = None) -> Proposal:
        """Take the next enqueued plan, else let a sampler propose one: the given one, or the one before."""
        study, options, choices, attrs = self._study, self.space.options, dict[str, Any](), dict[str, Any]()
        study.sampler = sampler or study.sampler
        if sampler is not None and not self.waiting():
            choices, attrs = sampler.draw(study, len(self.trials()), tuple(options))
        attrs[_OWNER] = scratch_name("trial", ".owner")
        if choices:  # as one record: of a trial that Optuna asks for there is one for each group
            types: dict[str, BaseDistribution] = {g: CategoricalDistribution(options[g]) for g in choices}
            drawn = create_trial(state=TrialState.RUNNING, params=choices, distributions=types, user_attrs=attrs)
            trial = optuna.Trial(study, self.storage.create_new_trial(study._study_id, drawn))
        else:
            trial = study.ask()
            trial.set_user_attr(_OWNER, attrs[_OWNER])  # at once: proposing may take long
        if not isinstance(self.storage, JournalStorage):
            cast("Any", self.storage).keep_alive(trial._trial_id)  # a ``RetryingStorage``
        choices = choices or {group: trial.suggest_categorical(group, options[group]) for group in options}
        attrs = trial.user_attrs
        plan = self._whole_plan(attrs[PLAN_ATTR]) if PLAN_ATTR in attrs else self.space.plan(choices)
        return Proposal(plan, trial.number, _origin_of(attrs), trial)

    def tell_evaluation(
        self, proposal: Proposal, evaluation: Evaluation, group_times_ms: Mapping[str, float] | None = None
    ) -> None:
        """Record an evaluation: COMPLETE where it is finite, else PRUNED with its constraint violated.

        ``group_times_ms`` are of the engine's own profiler.
        """
        values = [evaluation.latency.median_ms, max(evaluation.error_value, LEAST_ERROR)]
        outcome = {"values": values if evaluation.is_finite else None, "evaluation": evaluation.to_json()}
        if group_times_ms is not None:
            outcome["group_ms"] = {g: round(ms, 6) for g, ms in group_times_ms.items() if g in self.space.free}
        self._tell(proposal, outcome)

    def tell_failure(self, proposal: Proposal, failure: Failure) -> None:
        """Record a plan that failed through its own fault: PRUNED, its constraint violated."""
        plan, origin = proposal.plan.to_json()["precision"], str(proposal.origin)
        self._tell(proposal, {"values": None, "failure": failure.to_json(), "plan": plan, "origin": origin})

    def tell_duplicate(self, proposal: Proposal) -> None:
        """Drop a plan that was started before: its outcome stays with the first trial.

        This one ends as FAIL, which samplers ignore: with its values twice, TPE would propose it ever more often.
        """
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._study.tell(proposal.number, state=TrialState.FAIL)

    def release(self, proposal: Proposal, fault: Failure | None = None) -> None:
        """Give a plan back that was not evaluated to its end: it is enqueued again, and its trial ends as FAIL."""
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            if fault is not None:
                proposal.trial.set_user_attr("fault", fault.to_json())
            self.enqueue(proposal.plan, proposal.origin)
            self._study.tell(proposal.number, state=TrialState.FAIL, skip_if_finished=True)

    def heal(self, *, is_first: bool = False) -> int:
        """Take up what dead processes left running; how many trials that were.

        A trial whose outcome is written is finished with it; of the others the plan is enqueued again, and the trial
        ends as FAIL. At first all running trials of a journal that nobody shares are of dead processes. A worker of a
        database has a heartbeat. A journal has none: its workers are on one host, where a process can be looked up.
        """
        orphans = running = self.running()
        if not (is_first and self.is_alone):
            is_journal, stale = isinstance(self.storage, JournalStorage), set[int]()
            if running and not is_journal:
                stale = set(cast("Any", self.storage)._get_stale_trial_ids(self._study._study_id))
            orphans = []
            for trial in running:
                owner, start = trial.user_attrs.get(_OWNER), trial.datetime_start
                is_nameless = owner is None and start and datetime.now(start.tzinfo) - start > _NAMELESS
                if is_nameless or trial._trial_id in stale or (is_journal and is_left(owner or "")):
                    orphans.append(trial)
        for trial in orphans:
            with suppress(optuna.exceptions.UpdateFinishedTrialError):  # Another worker may be faster.
                if OUTCOME_ATTR in trial.user_attrs:
                    self._finish(trial.number, outcome_of(trial))
                    continue
                if (plan := self._plan(trial)) is not None:
                    self.enqueue(plan, _origin_of(trial.user_attrs))
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        return len(orphans)

    def note(self, key: str) -> Any:
        """A JSON value kept with the study, not to be changed; None where there is none."""
        return self.notes().get(key)

    def notes(self, prefix: str = "") -> dict[str, Any]:
        """All JSON values whose key starts with ``prefix``, not to be changed."""
        # ``Study.user_attrs`` would copy all of them, each time.
        notes = self.storage.get_study_user_attrs(self._study._study_id)
        return {key: value for key, value in notes.items() if key.startswith(prefix)}

    def set_note(self, key: str, value: Any) -> None:
        """Keep a JSON value with the study."""
        self._study.set_user_attr(key, value)

    def close(self) -> None:
        """Let go of the storage. Idempotent."""
        close_storage(self.storage)

    def _plan(self, trial: FrozenTrial) -> PrecisionPlan | None:
        """The plan of a trial; None where it has not been proposed to its end."""
        if trial._trial_id not in self._plans:
            choices = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            if PLAN_ATTR in trial.user_attrs:
                self._plans[trial._trial_id] = self._whole_plan(trial.user_attrs[PLAN_ATTR])
            elif all(group in choices for group in self.space.free):
                self._plans[trial._trial_id] = self.space.plan(choices)
        return self._plans.get(trial._trial_id)

    def _whole_plan(self, precisions: Mapping[str, str]) -> PrecisionPlan:
        named = {group: Precision.named(precision) for group, precision in precisions.items()}
        return PrecisionPlan(self.space.model_sha256, named)

    def _tell(self, proposal: Proposal, outcome: Mapping[str, Any]) -> None:
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            set_outcome(proposal.trial, outcome)
            self._finish(proposal.number, outcome)

    def _finish(self, number: int, outcome: Mapping[str, Any]) -> None:
        state = TrialState.PRUNED if outcome["values"] is None else None
        self._study.tell(number, outcome["values"], state, skip_if_finished=True)

    def _read(self, trial: FrozenTrial, read: Callable[[Mapping[str, Any]], T]) -> T:
        """What a trial's outcome holds; one that is not what mptune writes is a ``RunError``."""
        try:
            return read(outcome_of(trial))
        except (*READ_ERRORS, AssertionError, RecursionError, PlanError) as error:
            text = f"{self._where} is damaged: the outcome of trial {trial.number} cannot be read"
            raise RunError(text, "restore it from a copy, or start over with --fresh (nothing is deleted)") from error


def _origin_of(attrs: Mapping[str, Any]) -> Origin:
    return Origin.parse(attrs["origin"]) if "origin" in attrs else ORIGIN_SAMPLER


class Sessions:
    """The timings of single sessions that a study holds, and the intervals of latencies that follow from all of them.

    They stand in the evaluations, and in what re-measuring noted. They are read once: made anew, it sees what has been
    added.
    """

    def __init__(self, record: StudyRecord) -> None:
        first = record.note(_FIRST) or {}
        self._anchor_ms: float | None = first.get("ms")
        timings: dict[str, list[SessionTiming]] = {}
        for evaluation in record.evaluations():
            if evaluation.latency.session is not None:
                timings.setdefault(evaluation.plan.fingerprint, []).append(evaluation.latency.session)
        for key, note in record.notes(CONFIRM_NOTE).items():
            if (session := note.get("latency", {}).get("session")) is not None:
                timings.setdefault(key.split(":")[1], []).append(SessionTiming.from_json(session))
        self.spread = SessionSpread(timings, first.get("session"))

    def corrected(self, latency: Latency, sessions: Iterable[SessionTiming | None] | None = None) -> Latency:
        """The latency with the interval that holds what differs between sessions, too.

        It is scaled by what the baseline's session differs from the first one, as far as that is known.
        """
        given = [latency.session] if sessions is None else list(sessions)
        timed = [session for session in given if session is not None]
        if self._anchor_ms is None or not timed or len(timed) < len(given):
            return latency
        estimate = self.spread.estimate(timed)
        low, high = (self._anchor_ms * bound for bound in estimate.interval())
        scaled = latency.scaled(self._anchor_ms * math.exp(estimate.log_ratio) / latency.median_ms)
        return replace(scaled, ci95_ms=(low, high), degrees=estimate.degrees)


def drift_warning(record: StudyRecord) -> tuple[str, ...]:
    """A line that says how far the latency of the baseline changed, confirmation counted in; else nothing."""
    factors = [evaluation.drift for evaluation in record.evaluations()]
    factors += [decode_float(note["drift"]) for note in record.notes(CONFIRM_NOTE).values() if "drift" in note]
    ratios = [1.0 / factor for factor in factors if math.isfinite(factor) and factor > 0]
    if not ratios or max(ratios) <= DRIFTED * min(ratios):
        return ()
    return (
        f"the FP32 baseline took {min(ratios):.2f} to {max(ratios):.2f} times its first latency while plans were timed:"
        " every latency is stated as if it had stayed the first, so speedups are more reliable than milliseconds; lock"
        " the clocks and close other programs",
    )


def anchored(record: StudyRecord, measurement: Measurement) -> Measurement:
    """A measurement whose drift correction refers to the first baseline of the whole study.

    A toolchain knows the first baseline of its own session only. The study remembers the very first, so that figures of
    a search that was resumed days later stay comparable.
    """
    baseline, session = measurement.baseline, measurement.latency.session
    if baseline is None:
        return measurement
    first = record.note(_FIRST)
    if first is None:
        first = {"ms": baseline.median_ms * measurement.drift, "session": None if session is None else session.baseline}
        record.set_note(_FIRST, first)
    return measurement.with_drift(first["ms"] / baseline.median_ms)
