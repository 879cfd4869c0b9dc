"""The loop: propose a plan, evaluate it, tell the record. Stops by budget, time, disk, convergence or exhaustion."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from mptune.engines.base import Failure, Measurement
from mptune.engines.failures import describe, did_not_run, machine_error
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.fronts.dominance import pareto
from mptune.tuning.fronts.limits import check_columns
from mptune.tuning.listener import Listener, tell_outcome
from mptune.tuning.record.record import Proposal, StudyRecord, origin_of
from mptune.tuning.record.sessions import Sessions, anchored, keep_reopened
from mptune.tuning.sampler.trials import ehvi_of
from mptune.tuning.space import SearchSpace, Seed
from mptune.tuning.steps import attempts, remeasure
from mptune.tuning.steps.baseline import check_first_evaluation
from mptune.tuning.steps.limits import HOPELESS, Limits, Stop
from mptune.tuning.steps.prior import Knowledge

DUPLICATES_IN_A_ROW = 3
"""After this many proposals in a row that were evaluated before, a new neighbour of the front is taken instead."""

_TRIES_PER_FLIP = 32

REOPENED = 3
"""Sessions of all-FP32, and of all-FP16, that are opened anew to learn how far sessions of one plan differ. With their
evaluations they give 6 degrees of freedom (intervals 1.25 times as wide as for many); confirmation adds to them."""

PATIENCE = 8
"""Proposals in a row below ``LEAST_IMPROVEMENT`` that end the search."""

LEAST_IMPROVEMENT = 2e-5
"""Expected hypervolume improvement: a tenth of a percent of the latency on a fiftieth of the error's axis."""

_WAIT_S = 0.3


class Tuner:
    """Evaluates plans until the budget is spent. What it learns of plans is in the record; it keeps nothing itself."""

    def __init__(
        self,
        record: StudyRecord,
        space: SearchSpace,
        toolchain: Toolchain,
        settings: SearchSettings,
        listener: Listener,
        limits: Limits | None = None,
        knowledge: Knowledge | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Without ``knowledge`` only seeds are evaluated, or what the study's own sampler proposes."""
        self._record, self._space, self._toolchain = record, space, toolchain
        self._settings, self._listener, self._sleep = settings, listener, sleep
        self._limits, self._knowledge = limits or Limits(settings), knowledge
        self._faults = 0  # failed processes in a row
        self._doubts = True  # until a second measurement has confirmed a doubtful one

    def run(self) -> Stop:
        """Search until the budget, the time or the space is exhausted.

        Budget counts every plan that was evaluated or failed by itself, seeds counted in, over all sessions; faults
        of the machine and duplicates cost nothing.
        """
        record = self._record
        if (baseline := record.baseline()) is not None:
            check_columns(self._settings.tolerance, baseline.error)
        record.heal(is_first=True)
        earlier_failures = len(record.failures())
        while True:
            stop = self._reason_to_stop(earlier_failures)
            if stop is not None:
                return stop
            proposal = self._propose()
            if proposal is None:
                if is_exhausted(record, self._space) and not record.running():
                    return Stop.EXHAUSTED
                # A plan comes back if the worker that has it in work dies. The wait is jittered, so that two workers
                # that gave way to each other do not do so again.
                self._sleep(_WAIT_S * np.random.default_rng().uniform(0.5, 1.5))
            elif (limit := self._limits.reached()) is not None:  # emulations took their time
                record.release(proposal)
                return limit
            else:
                outcome = self._evaluate(proposal)
                if isinstance(outcome, Failure):
                    self._tell_failure(proposal, outcome)
                else:
                    self._tell(proposal, outcome)
                remeasure.announce(self._listener, record, self._settings)
            record.heal()

    def _reason_to_stop(self, earlier_failures: int) -> Stop | None:
        record = self._record
        if record.spent >= self._settings.budget:
            return Stop.BUDGET
        if (limit := self._limits.reached()) is not None:
            return limit
        if has_converged(record, self._settings):
            return Stop.CONVERGED
        # Failures of earlier sessions do not count: their cause may have been removed.
        if len(record.failures()) - earlier_failures >= HOPELESS and not any(
            evaluation.plan.reduced_groups for evaluation in record.evaluations()
        ):
            return Stop.HOPELESS
        return None

    # -- propose ------------------------------------------------------------------------------------------------

    def _propose(self) -> Proposal | None:
        """The next plan that nobody has evaluated; None where none is left, or others have the rest in work."""
        record, knowledge = self._record, self._knowledge
        for repeats in itertools.count(1):
            if self._is_shared_out() or is_exhausted(record, self._space):
                return None
            self._enqueue_seeds()
            sampler = None
            # Also before the seeds that come behind the sampler's first plan: one-group errors go on meanwhile.
            if knowledge is not None and (not record.waiting() or has_proposed(record)):
                sampler = knowledge.sampler()
            proposal = record.ask(sampler)
            if proposal.plan.fingerprint not in record.started(but=proposal.number):
                if not self._is_shared_out(proposal):
                    return proposal
                record.release(proposal)  # another worker asked at the same time
                return None
            record.tell_duplicate(proposal)
            if repeats % DUPLICATES_IN_A_ROW == 0:
                self._enqueue_new_plan()
        raise AssertionError("unreachable")

    def _is_shared_out(self, proposal: Proposal | None = None) -> bool:
        """Whether what others have in work, ``proposal`` not counted, would spend the rest of the budget."""
        own = None if proposal is None else proposal.number
        others = sum(trial.number != own for trial in self._record.running())
        return self._record.spent + others >= self._settings.budget

    def _enqueue_seeds(self) -> None:
        first = None if self._knowledge is None else self._knowledge.seeds_first
        for seed in due_seeds(self._record, self._space, first):
            self._record.enqueue(seed.plan, seed.origin)

    def _enqueue_new_plan(self) -> None:
        """Enqueue a plan that nobody has evaluated: it differs from one on the front, in as few groups as need be."""
        space, started = self._space, self._record.started()
        generator = np.random.default_rng([self._settings.seed, len(self._record.trials())])
        bases = [e.plan for e in pareto(self._record.evaluations()) if space.holds(e.plan)] or [space.all_fp16]
        for attempt in itertools.count():  # There is one, as the space is not exhausted.
            choices = space.choices(bases[int(generator.integers(len(bases)))])
            most = min(1 + attempt // _TRIES_PER_FLIP, len(space.free))
            for index in generator.choice(len(space.free), size=int(generator.integers(most)) + 1, replace=False):
                group = space.free[index]
                choices[group] = next(name for name in space.options[group] if name != choices[group])
            if (plan := space.plan(choices)).fingerprint not in started:
                self._record.enqueue(plan, ORIGIN_SAMPLER)
                break

    # -- evaluate -----------------------------------------------------------------------------------------------

    def _evaluate(self, proposal: Proposal) -> Measurement | Failure:
        """Build, run and time a plan. Whatever interrupts it, most of all Ctrl-C, the plan goes back into the queue."""
        record, toolchain, listener, plan = self._record, self._toolchain, self._listener, proposal.plan
        job = partial(toolchain.evaluate, plan, profile=toolchain.profiling == "along")
        try:
            result = attempts.try_twice(job, toolchain, listener, f"plan {plan.fingerprint} ({proposal.origin})")
            if isinstance(result, Failure):
                self._faults = self._faults + 2 if attempts.may_be_the_machines(result) else 0
                if self._faults >= attempts.FAULTS_IN_A_ROW and (baseline := record.baseline()) is not None:
                    all_fp32 = partial(toolchain.evaluate, baseline.plan)
                    attempts.check_machine(all_fp32, toolchain, listener, self._faults)
                    self._faults = 0
                return result
            self._faults = 0
            if self._doubts and self._doubt(proposal, result):
                result = attempts.once_more(job, result, partial(self._doubt, proposal), toolchain, listener)
                self._doubts = not self._doubt(proposal, result)
            return result
        except BaseException:
            with suppress(RunError):  # If even that fails, healing does it next time.
                record.release(proposal)
            raise

    def _doubt(self, proposal: Proposal, measurement: Measurement) -> str:
        return attempts.doubt(self._judged(proposal, measurement), tf32=self._settings.tf32)

    def _judged(self, proposal: Proposal, measurement: Measurement) -> Evaluation:
        """A measurement against the baseline, and against what emulation says of the plan."""
        baseline, plan = self._record.baseline(), proposal.plan
        evaluation = Evaluation.from_measurement(
            plan,
            measurement,
            number=proposal.number,
            origin=proposal.origin,
            metric=self._settings.metric,
            baseline_ms=None if baseline is None else baseline.latency.median_ms,
            ignored=self._settings.ignore,
        )
        emulator = None if self._knowledge is None else self._knowledge.emulator
        emulated = None if emulator is None else emulator.recall(plan)
        if emulated is None or baseline is None:
            return evaluation
        return evaluation.with_emulated(emulated, baseline.error_value, self._space.operators(plan))

    # -- tell ---------------------------------------------------------------------------------------------------

    def _tell(self, proposal: Proposal, measurement: Measurement) -> None:
        """Record a measurement, with an interval that holds what differs between sessions of one plan."""
        record, listener = self._record, self._listener
        try:
            measurement = anchored(record, measurement)
            if proposal.origin == ORIGIN_FP32:
                for finding in check_first_evaluation(measurement.error, self._settings):
                    listener.warning(finding.message)
        except BaseException:
            record.release(proposal)  # Not recorded: it is measured again when the cause is removed.
            raise
        times_ms = measurement.group_times_ms
        try:
            if proposal.origin in (ORIGIN_FP32, ORIGIN_FP16) and measurement.latency.session is not None:
                # It takes longer than what was measured, which is recorded if this process is killed meanwhile.
                record.tell_evaluation(proposal, self._judged(proposal, measurement), times_ms, is_final=False)
                reopen = partial(self._toolchain.reopen, proposal.plan, REOPENED)
                timings = attempts.try_twice(reopen, self._toolchain, listener, "opening sessions anew")
                if isinstance(timings, Failure):
                    listener.warning(f"how far sessions differ was not measured: {describe(timings)}")
                else:
                    keep_reopened(record, proposal.plan, timings)
        finally:  # also after Ctrl-C
            measurement = replace(measurement, latency=Sessions(record).corrected(measurement.latency))
            evaluation = self._judged(proposal, measurement)
            record.tell_evaluation(proposal, evaluation, times_ms)
        tell_outcome(listener, proposal.plan, proposal.origin, evaluation, record.spent, self._settings.budget)

    def _tell_failure(self, proposal: Proposal, failure: Failure) -> None:
        """Record a plan that failed; give it back where that may be the machine's fault."""
        record = self._record
        if proposal.origin == ORIGIN_FP32:
            record.release(proposal)
            if failure.is_machine_fault:
                raise machine_error(failure, 2)
            raise did_not_run("the all-FP32 engine failed", failure)
        if failure.is_machine_fault and self._faults:  # none where all-FP32 has just run: then it is the plan's
            record.release(proposal, failure)
            return
        record.tell_failure(proposal, failure)
        tell_outcome(self._listener, proposal.plan, proposal.origin, failure, record.spent, self._settings.budget)


def due_seeds(record: StudyRecord, space: SearchSpace, first: int | None = None) -> list[Seed]:
    """The seeds that come next: of those that nobody has evaluated or in work.

    The baseline comes alone: nothing is worth a build before it is known to be sound. Where another worker has it in
    work, this one takes the other seeds meanwhile. ``first`` of them come before the sampler's first plan.
    """
    started = record.started()
    seeds = [seed for seed in space.seeds if seed.plan.fingerprint not in started]
    if seeds[:1] == list(space.seeds[:1]):
        return seeds[:1]
    if first is None or has_proposed(record):
        return seeds
    return [seed for seed in seeds if seed in space.seeds[:first]]


def has_proposed(record: StudyRecord) -> bool:
    """Whether a plan of the sampler has been evaluated, or failed."""
    return any(origin_of(trial.user_attrs) == ORIGIN_SAMPLER for trial in record.settled())


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
    """Whether every plan of the space has been evaluated, or is being evaluated."""
    if record.baseline() is None or len(record.trials()) < space.size:
        return False
    started = record.started()
    # All-FP32 is always evaluated, also where the pins leave it out of the space.
    outside = sum(1 for seed in space.seeds if seed.plan.fingerprint in started and not space.holds(seed.plan))
    return len(started) - outside >= space.size
