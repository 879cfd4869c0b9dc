"""Attempts in fresh processes: whether a crash, a timeout or lack of memory is the job's own fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from optuna.trial import FrozenTrial

from mptune.engines.base import Failure, FailureKind, Measurement, Toolchain
from mptune.errors import RunError
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation, Origin
from mptune.tuning.failures import describe, machine_error
from mptune.tuning.listener import Listener
from mptune.tuning.record.attributes import origin_of
from mptune.tuning.record.owner import this_process
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study_trials import Proposal, failed_attempts, fault_counts
from mptune.tuning.steps.baseline import check_baseline

T = TypeVar("T")

_FAULTS = "faults:"
"""Begins the names of the notes that ``keep_faults`` writes; a process has one."""

ATTEMPTS = 2
"""Failures of a job, each in a process of its own, that are taken for its own fault on a machine without faults."""

FAULTS_IN_A_ROW = 5
"""So many failures in a row that may be the machine's are a reason to see whether all-FP32 still runs."""

_FP32_ATTEMPTS = 4
"""Attempts of a job on whose result the whole search rests, and of an emulation, which is quick: a machine on which one
job in five fails for no reason of its own spoils one in 600. A timeout is waited for twice only."""

_CHANCE = 1e-4
"""Probability below which several failures of one job in a row are no coincidence of faults from outside."""

_MOST_ATTEMPTS = 8
"""On the worst machine."""

_VAIN = 2
"""After this many second measurements that changed nothing, errors are taken as they are."""

_CHECKED = 3
"""So many plans that fail are tried more often than the rate of faults asks for: early in a search it is not known."""

_CHECKED_ATTEMPTS = 5
"""Attempts of those: where one job in six fails for no reason of its own, one plan in 8,000 fails in each."""

_PRIOR_FAULTS, _PRIOR_JOBS = 0.1, 10.0
"""Faults and jobs that the estimated rate of faults starts from: 1 %, which two failures in a row make 1e-4."""


def attempts_needed(faults: int, jobs: int) -> int:
    """How many failures in a row show that a job is at fault itself, and not what comes from outside.

    The smallest number k of at least ``ATTEMPTS`` with rate^k below 1e-4: independent faults of the machine would
    hardly come so often to the same job.
    """
    rate = (_PRIOR_FAULTS + faults) / (_PRIOR_JOBS + jobs)
    needed = ATTEMPTS
    while needed < _MOST_ATTEMPTS and rate**needed > _CHANCE * (1 + 1e-9):
        needed += 1
    return needed


def in_fresh_processes(
    job: Callable[[], T | Failure],
    toolchain: Toolchain,
    listener: Listener,
    what: str,
    *,
    crashes: bool = True,
) -> T | Failure:
    """Run a job of a toolchain, and again in a fresh process where its failure may not be its own fault."""
    timeouts = 0
    for attempt in range(1, _FP32_ATTEMPTS + 1):
        result = job()
        if not isinstance(result, Failure) or not (result.is_machine_fault or (crashes and result.is_inconclusive)):
            return result
        timeouts += result.kind is FailureKind.TIMEOUT
        if attempt == _FP32_ATTEMPTS or timeouts == ATTEMPTS:
            if result.is_machine_fault:
                raise machine_error(result, attempt)
            return result
        listener.warning(f"{what} failed ({describe(result)}): trying again in a fresh process")
        toolchain.restart()
    raise AssertionError("unreachable")


def run_control(job: Callable[[], object | Failure], toolchain: Toolchain, listener: Listener, failures: int) -> None:
    """After many failures in a row, run all-FP32 as a control: where that fails too, no plan is at fault."""
    toolchain.restart()
    control = in_fresh_processes(job, toolchain, listener, "all-FP32, as a control,")
    if isinstance(control, Failure) and (control.is_inconclusive or control.is_machine_fault):
        raise machine_error(control, failures + 1, "all-FP32, which ran before, fails now too")


def doubt(evaluation: Evaluation, *, tf32: bool) -> str:
    """What speaks against a measurement, in words that a sound one in another process completes; else empty."""
    if evaluation.origin == ORIGIN_FP32:
        wrong = any(finding.severity == "error" for finding in check_baseline(evaluation.error, tf32=tf32, skip=True))
        return "the all-FP32 engine was off against the reference, and agrees with it" if wrong else ""
    plan = f"plan {evaluation.plan.fingerprint}"
    if evaluation.disagrees:
        return f"the measured and emulated errors of {plan} disagreed, and agree"
    if evaluation.is_finite or evaluation.emulated == math.inf:
        return ""
    return f"{plan} gave NaN or Inf, and gives none"


def keep_faults(record: StudyRecord, faults: int, jobs: int) -> None:
    """Write down how often the machine failed in jobs that are no evaluations: they confirm, or open sessions anew."""
    if faults:
        me = this_process()
        key = f"{_FAULTS}{me['host']}:{me['pid']}:{me['started']}"
        before = record.note(key) or [0, 0]
        record.set_note(key, [before[0] + faults, before[1] + jobs])


class Attempts:
    """Evaluates plans, in fresh processes again, until it is shown whose fault a failure is."""

    def __init__(self, record: StudyRecord, toolchain: Toolchain, listener: Listener) -> None:
        self._record = record
        self._toolchain = toolchain
        self._listener = listener
        self._elsewhere = [sum(counts) for counts in zip(*record.notes(_FAULTS).values(), strict=True)] or [0, 0]
        self._vain = 0
        self._in_a_row = 0
        self._failed_in_a_row: list[tuple[PrecisionPlan, Origin]] = []

    def evaluate(
        self, proposal: Proposal, doubt_of: Callable[[Measurement], str], *, profile: bool
    ) -> tuple[Measurement | Failure, int]:
        """The outcome of an evaluation, and how often the plan failed, former trials counted in.

        Whatever interrupts it, most of all Ctrl-C, the plan goes back into the queue.
        """
        failures = proposal.failures
        try:
            while True:
                result = self._toolchain.evaluate(proposal.plan, profile=profile)
                if not isinstance(result, Failure):
                    result = self._measured_again(proposal, result, doubt_of, profile=profile)
                elif result.is_inconclusive:
                    failures += 1
                    self._in_a_row += 1
                    if failures < self._needed(proposal, result):
                        plan = f"plan {proposal.plan.fingerprint} ({proposal.origin})"
                        self._listener.warning(f"{plan} failed ({describe(result)}): trying again in a fresh process")
                        self._toolchain.restart()
                        continue
                    return result, failures
                self._in_a_row, self._failed_in_a_row = 0, []
                return result, failures
        except BaseException:
            with suppress(RunError):  # If even that fails, healing does it next time.
                self._record.release(proposal)
            raise

    def _measured_again(
        self, proposal: Proposal, result: Measurement, doubt_of: Callable[[Measurement], str], *, profile: bool
    ) -> Measurement:
        """Once more in a fresh process where the error is not what is expected: a process may have gone wrong."""
        if self._vain >= _VAIN or not (doubt := doubt_of(result)):
            return result
        self._toolchain.restart()
        again = self._toolchain.evaluate(proposal.plan, profile=profile)
        if isinstance(again, Failure) or doubt_of(again):
            self._vain += 1
            return result
        self._listener.warning(f"{doubt} in a fresh process: only the second measurement counts")
        return again

    def reopened(self, result: object) -> None:
        """Count a job that opened sessions of a baseline anew, which ran before: its crash is no plan's fault."""
        failed = isinstance(result, Failure) and (result.is_inconclusive or result.is_machine_fault)
        self._elsewhere = [self._elsewhere[0] + failed, self._elsewhere[1] + 1]
        keep_faults(self._record, int(failed), 1)

    def _faults(self, trials: Sequence[FrozenTrial]) -> tuple[int, int]:
        faults, jobs = fault_counts(trials, self._record.trials.lost())
        return faults + self._elsewhere[0], jobs + self._elsewhere[1]

    def _needed(self, proposal: Proposal, failure: Failure) -> int:
        trials = self._record.trials.settled()
        needed = attempts_needed(*self._faults(trials))
        if failure.kind is FailureKind.TIMEOUT:  # The deadline may be an hour away.
            return needed
        if proposal.origin == ORIGIN_FP32:
            return max(needed, _FP32_ATTEMPTS)
        checked = sum(failed_attempts(trial) >= _CHECKED_ATTEMPTS for trial in trials)
        return needed if checked >= _CHECKED else max(needed, _CHECKED_ATTEMPTS)

    def check_machine(self, proposal: Proposal, failure: Failure) -> None:
        """After many failures in a row, run all-FP32 as a control: where that fails too, no plan is at fault."""
        self._failed_in_a_row.append((proposal.plan, proposal.origin))
        baseline = self._record.baseline()
        if self._in_a_row < FAULTS_IN_A_ROW or baseline is None:
            return
        try:
            run_control(
                partial(self._toolchain.evaluate, baseline.plan), self._toolchain, self._listener, self._in_a_row
            )
        except RunError:
            for plan, origin in self._failed_in_a_row:
                self._record.enqueue(plan, origin, failures=1)
            raise
        self._in_a_row, self._failed_in_a_row = 0, []

    def reconsider(self) -> None:
        """Enqueue plans whose failures are too few, for what is known of this machine by now, to be their own fault."""
        trials = self._record.trials.settled()
        needed = attempts_needed(*self._faults(trials))
        for trial in self._record.trials.failed():
            if 0 < (failures := failed_attempts(trial)) < needed:
                plan, origin = self._record.trials.plan_of(trial), origin_of(trial.user_attrs)
                self._record.enqueue(plan, origin, failures=failures)
