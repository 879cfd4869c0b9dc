"""The loop: ask for a plan, leave out what is known, build and measure, tell. Stops by budget, time or exhaustion."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from mptune.engines.base import Failure, Measurement
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import BaselineError, SettingsError
from mptune.graph.ops import MOVEMENT
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_SAMPLER, EmulatedError, Evaluation
from mptune.tuning.failures import describe, did_not_run, machine_error
from mptune.tuning.front import pareto
from mptune.tuning.fronts.limits import check_columns
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import Proposal, StudyRecord
from mptune.tuning.record.sessions import Sessions, anchored, keep_reopened, reopened_baselines
from mptune.tuning.sampler.trials import ehvi_of
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import ATTEMPTS, Attempts, doubt
from mptune.tuning.steps.baseline import check_first_evaluation
from mptune.tuning.steps.guide import due_seeds, has_proposed
from mptune.tuning.steps.limits import HOPELESS, Limits, Stop
from mptune.tuning.steps.remeasure import announce

DUPLICATES_IN_A_ROW = 3
"""After so many known proposals in a row, an unseen neighbour of the front is taken instead."""

_ENUMERABLE = 12
"""Up to so many free groups all plans are listed when an unseen one is wanted."""

_TRIES_PER_FLIP = 32

REOPENED = 3
"""Sessions of all-FP32, and of all-FP16, that are opened anew to learn how far sessions of one plan differ. With their
evaluations they give 6 degrees of freedom (intervals 1.25 times as wide as for many); confirmation adds to them."""

REOPENED_LATER = 2
"""Sessions of all-FP32 that are opened anew in each later worker, whose session of the baseline is another one."""

PATIENCE = 8
"""So many proposals in a row below ``LEAST_IMPROVEMENT`` end the search."""

LEAST_IMPROVEMENT = 2e-5
"""Expected hypervolume improvement: a tenth of a percent of the latency on a fiftieth of the error's axis."""

_WAIT_S = 0.3


class Tuner:
    """Evaluates plans until the budget is spent. Everything it learns is in the record; it keeps nothing itself."""

    def __init__(
        self,
        record: StudyRecord,
        space: SearchSpace,
        toolchain: Toolchain,
        settings: SearchSettings,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
        emulated: Callable[[PrecisionPlan], EmulatedError | None] | None = None,
        limits: Limits | None = None,
        sleep: Callable[[float], None] = time.sleep,
        before_proposal: Callable[[], None] | None = None,
        seeds_first: int | None = None,
    ) -> None:
        self._sleep = sleep
        self._record = record
        self._space = space
        self._toolchain = toolchain
        self._settings = settings
        self._listener = listener
        self._clock = clock
        self._emulated = emulated
        self._limits = limits
        self._before_proposal = before_proposal
        self._seeds_first = seeds_first
        self._failed_to_reopen = 0
        self._attempts = Attempts(record, toolchain, listener)

    def run(self) -> Stop:
        """Search until the budget, the time or the space is exhausted.

        Budget counts every plan that was evaluated or failed by itself, seeds counted in, over all sessions; faults
        of the machine and duplicates cost nothing.
        """
        if (baseline := self._record.baseline()) is not None:
            check_columns(self._settings.tolerance, baseline.error)
        limits, failures = self._limits or Limits(self._settings, clock=self._clock), len(self._record.failures())
        self._record.heal(is_first=True)
        while True:
            self._attempts.reconsider()
            if self._record.spent >= self._settings.budget:
                return Stop.BUDGET
            limit = limits.reached()
            if limit is not None:
                return limit
            if has_converged(self._record, self._settings):
                return Stop.CONVERGED
            # Failures of earlier sessions do not count: their cause may have been removed.
            is_hopeless = len(self._record.failures()) - failures >= HOPELESS
            if is_hopeless and not any(e.plan.reduced_groups for e in self._record.evaluations()):
                return Stop.HOPELESS
            if self._is_shared_out():
                self._wait()
                continue
            proposal = self._next()
            if proposal and self._before_proposal and (limit := limits.reached()):  # emulations took their time
                self._record.release(proposal)
                return limit
            if proposal is None:
                if not self._record.running():
                    return Stop.EXHAUSTED
                self._wait()  # A plan comes back if the worker that has it in work dies.
            elif self._is_shared_out(proposal):
                self._record.release(proposal)  # Another worker asked at the same time.
                self._wait()
            else:
                doubt_of = partial(self._doubt, proposal)
                self._tell(proposal, *self._attempts.evaluate(proposal, doubt_of, profile=self._is_profiled()))
                announce(self._listener, self._record, self._settings)
                self._heal()

    def _is_shared_out(self, proposal: Proposal | None = None) -> bool:
        """Whether what others have in work, ``proposal`` not counted, would spend the rest of the budget."""
        own = None if proposal is None else proposal.number
        others = sum(trial.number != own for trial in self._record.running())
        return self._record.spent + others >= self._settings.budget

    def _wait(self) -> None:
        """Give the other workers a moment, and take up what the dead among them left."""
        # Of different length for each worker, so that two that gave way to each other do not do so again.
        self._sleep(_WAIT_S * random.uniform(0.5, 1.5))
        self._heal()

    def _heal(self) -> None:
        self._record.heal()

    # -- proposals ----------------------------------------------------------------------------------------------

    def _next(self) -> Proposal | None:
        """The next plan that nobody has evaluated; None where there is none left."""
        for repeats in itertools.count(1):
            if is_exhausted(self._record, self._space):
                return None
            self._enqueue_seeds()
            if self._before_proposal is not None and (not self._record.waiting() or has_proposed(self._record)):
                self._before_proposal()
            proposal = self._record.ask()
            if proposal.plan.fingerprint not in self._record.started(before=proposal.number):
                return proposal
            self._record.tell_duplicate(proposal)
            if repeats % DUPLICATES_IN_A_ROW == 0:
                unseen = self._unseen(self._record.started())
                if unseen is None:
                    return None
                self._record.enqueue(unseen, ORIGIN_SAMPLER)
        raise AssertionError("unreachable")

    def _enqueue_seeds(self) -> None:
        due = due_seeds(self._record, self._space, self._seeds_first)
        if {seed.plan.fingerprint for seed in due} <= self._record.waiting():
            return
        for seed in due:
            self._record.enqueue(seed.plan, seed.origin)

    def _unseen(self, started: set[str]) -> PrecisionPlan | None:
        """A plan that is not known: any of few, else one that differs in as few groups as need be from the front."""
        space = self._space
        generator = np.random.default_rng([self._settings.seed, len(self._record.trials())])
        if len(space.free) <= _ENUMERABLE:
            rows = itertools.product(*space.options.values())
            every = (space.plan(dict(zip(space.free, row, strict=True))) for row in rows)
            unseen = [plan for plan in every if plan.fingerprint not in started]
            return unseen[int(generator.integers(len(unseen)))] if unseen else None
        bases = [e.plan for e in pareto(self._record.evaluations()) if space.holds(e.plan)] or [space.all_fp16]
        for attempt in itertools.count():  # At least 2 ** 13 plans, of which a budget knows few.
            choices = space.choices(bases[int(generator.integers(len(bases)))])
            most = min(1 + attempt // _TRIES_PER_FLIP, len(space.free))
            for index in generator.choice(len(space.free), size=int(generator.integers(most)) + 1, replace=False):
                group = space.free[index]
                choices[group] = next(name for name in space.options[group] if name != choices[group])
            plan = space.plan(choices)
            if plan.fingerprint not in started:
                return plan
        raise AssertionError("unreachable")

    # -- outcomes -----------------------------------------------------------------------------------------------
    def _tell(self, proposal: Proposal, result: Measurement | Failure, failures: int) -> None:
        if not isinstance(result, Failure):
            self._measured(proposal, result, failures)
        elif result.is_machine_fault:
            self._machine_fault(proposal, result)
        else:
            self._plan_failed(proposal, result, failures)

    def _doubt(self, proposal: Proposal, measurement: Measurement) -> str:
        return doubt(self._judged(proposal, measurement), tf32=self._settings.tf32)

    def _is_profiled(self) -> bool:
        return self._toolchain.profiling == "along"

    def _measured(self, proposal: Proposal, measurement: Measurement, faults: int) -> None:
        measurement = anchored(self._record, measurement)
        if proposal.origin == ORIGIN_FP32:
            try:
                findings = check_first_evaluation(measurement.error, self._settings)
            except (BaselineError, SettingsError):
                self._record.release(proposal)  # Not recorded: it is measured again when the cause is removed.
                raise
            for finding in findings:
                self._listener.warning(finding.message)
        reopened = self._to_reopen(proposal, measurement)
        try:
            if reopened is not None:
                # Reopening takes longer than what was measured, which is recorded if this process is killed meanwhile.
                evaluation = self._judged(proposal, measurement)
                self._record.tell_evaluation(proposal, evaluation, measurement.group_times_ms, faults, is_final=False)
                self._reopen(*reopened)
        finally:  # What was measured goes to the study, also after Ctrl-C.
            measurement = replace(measurement, latency=Sessions(self._record).corrected(measurement.latency))
            evaluation = self._judged(proposal, measurement)
            self._record.tell_evaluation(proposal, evaluation, measurement.group_times_ms, faults)
        done, budget = self._record.spent, self._settings.budget
        if evaluation.is_finite:
            self._listener.evaluated(evaluation, done, budget)
        else:
            self._listener.failed(proposal.plan, proposal.origin, _why_not_finite(evaluation), done, budget)

    def _to_reopen(self, proposal: Proposal, measurement: Measurement) -> tuple[PrecisionPlan, int] | None:
        """Which plan to open anew, and how often: the baselines, and all-FP32 in each later worker."""
        session = measurement.latency.session
        if session is None or self._failed_to_reopen >= ATTEMPTS:  # Each try may cost the worker.
            return None
        if proposal.origin in (ORIGIN_FP32, ORIGIN_FP16):
            return proposal.plan, REOPENED
        baselines = reopened_baselines(self._record)
        if session.baseline in baselines:
            return None
        return self._space.seeds[0].plan, REOPENED_LATER if baselines else REOPENED

    def _reopen(self, plan: PrecisionPlan, count: int) -> None:
        """Learn how far sessions of one plan differ."""
        timings = self._toolchain.reopen(plan, count)
        if isinstance(timings, Failure):
            self._failed_to_reopen += 1
            if self._failed_to_reopen == ATTEMPTS:
                self._listener.warning(f"how far sessions differ was not measured: {describe(timings)}")
        else:
            keep_reopened(self._record, plan, timings)

    def _judged(self, proposal: Proposal, measurement: Measurement) -> Evaluation:
        """A measurement against the baseline, and against what is known of the plan by emulation."""
        baseline = self._record.baseline()
        evaluation = Evaluation.from_measurement(
            proposal.plan,
            measurement,
            number=proposal.number,
            origin=proposal.origin,
            metric=self._settings.metric,
            baseline_ms=None if baseline is None else baseline.latency.median_ms,
            ignored=self._settings.ignore,
        )
        emulated = None if self._emulated is None else self._emulated(proposal.plan)
        if emulated is None or baseline is None or evaluation.has_own_value:  # of those the relative L2 is emulated
            return evaluation
        reduced = set(proposal.plan.reduced_groups)
        ops = Counter(op for group in self._space.groups if group.id in reduced for op in {*group.ops} - MOVEMENT)
        return evaluation.with_emulated(emulated, baseline.error_value, (op for op, _ in ops.most_common()))

    def _plan_failed(self, proposal: Proposal, failure: Failure, attempts: int) -> None:
        if proposal.origin == ORIGIN_FP32:
            self._record.release(proposal)
            raise did_not_run("the all-FP32 engine failed", failure)
        if failure.is_inconclusive:
            try:
                self._attempts.check_machine(proposal, failure)
            except BaseException:
                self._record.release(proposal)
                raise
        self._record.tell_failure(proposal, failure, max(1, attempts))
        if not proposal.failures:  # else the listener knows it
            self._listener.failed(proposal.plan, proposal.origin, failure, self._record.spent, self._settings.budget)

    def _machine_fault(self, proposal: Proposal, failure: Failure) -> None:
        attempt, retries = proposal.attempt + 1, self._settings.worker.retries
        what = f"{failure.kind.value} ({failure.stage.value}): {failure.message}"
        if attempt > retries:
            self._record.release(proposal, failure, attempt=0)
            raise machine_error(failure, attempt)
        self._record.release(proposal, failure, attempt=attempt)
        self._listener.warning(f"the machine failed, not the plan: {what}; trying again ({attempt} of {retries})")


def has_converged(record: StudyRecord, settings: SearchSettings) -> bool:
    """Whether the last proposals were expected to improve the front by less than the noise; other samplers go on.

    Only where plans are built and timed: a prediction has no noise and costs next to nothing.
    """
    baseline = record.baseline()
    if baseline is None or baseline.latency.source != "measured":
        return False
    expected = [ehvi for t in record.settled() if (ehvi := ehvi_of(t)) is not None][-PATIENCE:]
    return settings.sampler == "precision" and len(expected) == PATIENCE and max(expected) < LEAST_IMPROVEMENT


def is_exhausted(record: StudyRecord, space: SearchSpace) -> bool:
    """Whether every plan of the space is known already, or being evaluated."""
    if record.baseline() is None or len(record.trials()) < space.size:
        return False
    started = record.started()
    # All-FP32 is always evaluated, also where the pins leave it out of the space.
    outside = sum(1 for seed in space.seeds if seed.plan.fingerprint in started and not space.holds(seed.plan))
    return len(started) - outside >= space.size


def _why_not_finite(evaluation: Evaluation) -> str:
    if count := evaluation.counted.non_finite:
        return f"{count} values are NaN or Inf where the reference has none"
    return f"its {evaluation.metric} is {evaluation.error_value}"
