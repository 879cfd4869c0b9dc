"""Attempts in fresh processes: whether a crash, a timeout or lack of memory is the job's own fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from mptune.engines.base import Failure, FailureKind, Measurement
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import ORIGIN_FP32, Evaluation, Origin
from mptune.tuning.failures import describe, machine_error
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import Proposal, StudyRecord, failed_attempts, origin_of
from mptune.tuning.steps.baseline import check_baseline

T = TypeVar("T")

ATTEMPTS = 2
"""Failures of a job, each in a process of its own, that are taken for its own fault on a machine without faults."""

MOST_ATTEMPTS = 6
"""The same where other failures did not come again, and of the first plans that fail, as the machine is not known yet:
where one job in six fails for no reason of its own, one plan in 50,000 fails in each."""

_CHECKED = 3
"""So many plans that failed in ``MOST_ATTEMPTS`` processes show a machine without faults."""

FAULTS_IN_A_ROW = 5
"""So many failures in a row that may be the machine's are a reason to see whether all-FP32 still runs."""

_FP32_ATTEMPTS = 4
"""Attempts of a job on whose result the whole search rests, and of an emulation, which is quick: a machine on which one
job in five fails for no reason of its own spoils one in 600. A timeout is waited for twice only."""

_VAIN = 2
"""After this many second measurements that changed nothing, errors are taken as they are."""


def in_fresh_processes(
    job: Callable[[], T | Failure],
    toolchain: Toolchain,
    listener: Listener,
    what: str,
    *,
    crashes: bool = True,
    attempts: int = _FP32_ATTEMPTS,
) -> T | Failure:
    """Run a job of a toolchain, and again in a fresh process where its failure may not be its own fault.

    Its own fault may be a crash: that is tried again if ``crashes``, and not after so many ``attempts``.
    """
    timeouts = failures = 0
    for attempt in range(1, _FP32_ATTEMPTS + 1):
        result = job()
        if not isinstance(result, Failure) or not (result.is_machine_fault or (crashes and result.is_inconclusive)):
            return result
        timeouts += result.kind is FailureKind.TIMEOUT
        failures += result.is_inconclusive
        if attempt == _FP32_ATTEMPTS or timeouts == ATTEMPTS or failures == attempts:
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


def once_more(
    job: Callable[[], Measurement | Failure],
    result: Measurement,
    doubt_of: Callable[[Measurement], str],
    toolchain: Toolchain,
    listener: Listener,
) -> Measurement:
    """The measurement, or one in a fresh process where that is sound and the first is not: a process may go wrong."""
    if not (doubt := doubt_of(result)):
        return result
    toolchain.restart()
    again = job()
    if isinstance(again, Failure) or doubt_of(again):
        return result
    listener.warning(f"{doubt} in a fresh process: only the second measurement counts")
    return again


class Attempts:
    """Evaluates plans, in fresh processes again, until it is shown whose fault a failure is."""

    def __init__(self, record: StudyRecord, toolchain: Toolchain, listener: Listener) -> None:
        self._record = record
        self._toolchain = toolchain
        self._listener = listener
        self._vain = 0
        self._in_a_row = 0
        self._failed_in_a_row: list[tuple[PrecisionPlan, Origin]] = []

    def evaluate(
        self, proposal: Proposal, doubt_of: Callable[[Measurement], str], *, profile: bool
    ) -> tuple[Measurement | Failure, int]:
        """The outcome of an evaluation, and how often the plan failed, former trials counted in.

        Whatever interrupts it, most of all Ctrl-C, the plan goes back into the queue.
        """
        failures, job = proposal.failures, partial(self._toolchain.evaluate, proposal.plan, profile=profile)
        try:
            while isinstance(result := job(), Failure) and result.is_inconclusive:
                failures += 1
                self._in_a_row += 1
                if failures >= self._needed(proposal, result):
                    return result, failures
                plan = f"plan {proposal.plan.fingerprint} ({proposal.origin})"
                self._listener.warning(f"{plan} failed ({describe(result)}): trying again in a fresh process")
                self._toolchain.restart()
            if not isinstance(result, Failure) and self._vain < _VAIN:
                result = once_more(job, result, doubt_of, self._toolchain, self._listener)
                self._vain += bool(doubt_of(result))
            self._in_a_row, self._failed_in_a_row = 0, []
            return result, failures
        except BaseException:
            with suppress(RunError):  # If even that fails, healing does it next time.
                self._record.release(proposal)
            raise

    def _needed(self, proposal: Proposal, failure: Failure) -> int:
        needed = MOST_ATTEMPTS if self._record.has_faults() else ATTEMPTS
        if failure.kind is FailureKind.TIMEOUT:  # The deadline may be an hour away.
            return needed
        if proposal.origin == ORIGIN_FP32:
            return max(needed, _FP32_ATTEMPTS)
        checked = sum(failed_attempts(trial) >= MOST_ATTEMPTS for trial in self._record.failed())
        return needed if checked >= _CHECKED else MOST_ATTEMPTS

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
        """Enqueue plans whose failures are too few to be their own fault, now that the machine has shown faults."""
        if not self._record.has_faults():
            return
        for trial in self._record.failed():
            if 0 < (failures := failed_attempts(trial)) < MOST_ATTEMPTS:
                plan, origin = self._record.plan_of(trial), origin_of(trial.user_attrs)
                self._record.enqueue(plan, origin, failures=failures)
