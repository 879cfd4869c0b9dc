"""The loop: propose a plan, evaluate it, tell the record. Stops by budget, time, disk, convergence or exhaustion."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.scripts import law_metric
from mptune.engines.base import Failure, Measurement
from mptune.engines.failures import did_not_run, machine_error
from mptune.errors import BaselineError, RunError
from mptune.tuning.baseline import engine_findings, stop_at_errors
from mptune.tuning.bench import HOPELESS, NEEDED_TRIES, Bench, Stop, announce, tell_outcome
from mptune.tuning.evaluation import ORIGIN_FP32, ORIGIN_LARGE_ERRORS, ORIGIN_SAMPLER, Evaluation
from mptune.tuning.explanation import keep_grounds
from mptune.tuning.knowledge import Knowledge
from mptune.tuning.plan_limits import check_columns
from mptune.tuning.record.record import Proposal, Sessions, anchored
from mptune.tuning.remeasure import emulate_unpinned, evaluate_tf32
from mptune.tuning.sampler.trials import EHVI_ATTR
from mptune.tuning.stopping import finished, is_exhausted

DUPLICATES_IN_A_ROW = 3
"""After this many proposals in a row that were evaluated before, any new plan is taken instead."""

SEVERAL = 6
"""Plans that the sampler proposes at once, at most, where engines are opened side by side; one more than it has learnt
from before that."""


def make_tuner(bench: Bench, data_dir: Path, *, has_labels: bool) -> Tuner:
    """What proposes plans and evaluates them; it asks first for what the sampler has to know, if that proposes any."""
    settings, space = bench.settings, bench.record.space
    if settings.sampler != "precision" or not space.free or settings.budget <= len(space.seeds):
        return Tuner(bench)
    law = law_metric(settings.metric, settings.metric_function, has_labels=has_labels)
    knowledge = Knowledge(bench, law, data_dir)
    keep_grounds(space, knowledge.prior, data_dir)
    return Tuner(bench, knowledge)


class Tuner:
    """Evaluates plans until the budget is spent. What it learns of plans is in the record; it keeps nothing itself."""

    def __init__(
        self, bench: Bench, knowledge: Knowledge | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Without ``knowledge`` only seeds are evaluated, or what the study's own sampler proposes."""
        self._bench, self._knowledge, self._sleep = bench, knowledge, sleep
        self._record, self._settings, self._listener = bench.record, bench.settings, bench.listener

    def run(self) -> Stop:
        """Search until the budget, the time or the space is exhausted.

        Budget counts every plan that was evaluated or failed by itself, seeds counted in, over all sessions; faults
        of the machine and duplicates cost nothing.
        """
        record, limits, tools = self._record, self._bench.limits, self._bench.toolchain
        waiting, opened = list[Proposal](), 0  # proposals for their evaluation, and how many of them are opened
        if (baseline := record.baseline()) is not None:
            check_columns(self._settings.tolerance, baseline.error)
        record.heal(is_first=True)
        if record.tf32() is None:
            tools.open_tf32()
        # Failures of earlier sessions do not count: their cause may have been removed.
        earlier_failures = len(record.failures())
        try:
            while (stop := finished(record, self._settings) or limits.reached()) is None:
                has_failed = len(record.failures()) - earlier_failures >= HOPELESS
                if has_failed and not any(e.plan.reduced_groups for e in record.evaluations()):
                    return Stop.HOPELESS
                if not opened:
                    opened = self._propose_several(waiting)
                proposal = waiting[0] if opened else None
                if proposal is None:
                    # A plan comes back if the worker that has it in work dies. The wait is jittered, so that two
                    # workers that gave way to each other do not do so again.
                    self._sleep(np.random.default_rng().uniform(0.15, 0.45))
                elif (limit := limits.reached()) is not None:  # emulations took their time
                    return limit
                else:
                    outcome = self._bench.evaluate(proposal.plan, "search", partial(self._doubt, proposal))
                    del waiting[0]
                    opened -= 1
                    if isinstance(outcome, Failure):
                        self._tell_failure(proposal, outcome)
                    else:
                        self._tell(proposal, outcome)
                    announce(self._listener, record, self._settings)
                record.heal()
        finally:  # Plans that were not evaluated to their end, as after Ctrl-C, go back into the queue.
            for proposal in waiting:
                with suppress(RunError):  # If even that fails, healing does it next time.
                    record.release(proposal)
        if stop not in (Stop.TIMEOUT, Stop.DISK):
            tools.start_ahead()  # What follows runs in other processes.
            evaluate_tf32(self._bench)
            emulate_unpinned(self._bench)
        return stop

    def _propose_several(self, waiting: list[Proposal]) -> int:
        """Open plans at once, those that wait and others; none where none is left, or others have the rest in work.

        Those behind the first are proposed as if the ones before came out as predicted. Returns how many are opened;
        some after them are proposed until these are open: few, as they learn from less.
        """
        tools = self._bench.toolchain
        learnt_from = sum(evaluation.origin == ORIGIN_SAMPLER for evaluation in self._record.evaluations())
        most = min(tools.most_ahead, SEVERAL) if waiting else tools.most_ahead
        tools.open_ahead([proposal.plan for proposal in waiting])
        while len(waiting) < most and (proposal := self._propose()) is not None:
            waiting.append(proposal)
            tools.open_ahead([proposal.plan])
            if proposal.origin == ORIGIN_SAMPLER:
                most = min(most, SEVERAL, 1 + learnt_from)
            # All-FP32 comes alone. While the other seeds open one-group errors are taken, and a plan is made of them.
            elif proposal.origin in (ORIGIN_FP32, ORIGIN_LARGE_ERRORS):
                break
        opened = len(waiting)
        if self._record.spent + len(self._record.running()) >= self._settings.budget:
            tools.start_ahead()  # What follows the last plans runs in other processes.
        while tools.is_opening and learnt_from >= most > 2 * (len(waiting) - opened):
            if (proposal := self._propose()) is None:
                break
            waiting.append(proposal)
        return opened

    def _propose(self) -> Proposal | None:
        """The next plan that nobody has evaluated; None where none is left, or others have the rest in work."""
        record, space, budget = self._record, self._record.space, self._settings.budget
        for repeats in itertools.count(1):
            if record.spent + len(record.running()) >= budget or is_exhausted(record):
                return None
            # The baseline comes alone: nothing is worth a build before it is known to be sound. Where another worker
            # has it in work, this one takes the other seeds meanwhile.
            started = record.started()
            seeds = [seed for seed in space.seeds if seed.plan.fingerprint not in started]
            for seed in seeds[:1] if seeds[:1] == list(space.seeds[:1]) else seeds:
                record.enqueue(seed.plan, seed.origin)
            knowledge = None if record.waiting() else self._knowledge
            sampler = None if knowledge is None else knowledge.sampler()
            if knowledge is not None and not any(EHVI_ATTR in trial.user_attrs for trial in record.trials()):
                first = knowledge.least_fp32()
                if first is not None and first.fingerprint not in started:
                    record.enqueue(first, ORIGIN_LARGE_ERRORS)
            proposal = record.ask(sampler)
            if proposal.plan.fingerprint not in record.started(but=proposal.number):
                others = sum(trial.number != proposal.number for trial in record.running())
                if record.spent + others < budget:
                    return proposal
                record.release(proposal)  # another worker asked at the same time
                return None
            record.tell_duplicate(proposal)
            if repeats % DUPLICATES_IN_A_ROW == 0:
                generator = np.random.default_rng([self._settings.seed, len(record.trials())])
                started, plan = record.started(), space.all_fp32
                while plan.fingerprint in started:  # There is one, as the space is not exhausted.
                    draws = generator.integers(2, size=len(space.free)).tolist()
                    plan = space.plan({g: space.options[g][draw] for g, draw in zip(space.free, draws, strict=True)})
                record.enqueue(plan, ORIGIN_SAMPLER)
        raise AssertionError("unreachable")

    def _judged(self, proposal: Proposal, measurement: Measurement) -> Evaluation:
        """A measurement against the baseline, and against what emulation says of the plan."""
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
        emulated = None if self._knowledge is None else self._knowledge.recall(proposal.plan)
        if emulated is None or baseline is None:
            return evaluation
        return evaluation.with_emulated(*emulated, baseline.error_value)

    def _doubt(self, proposal: Proposal, measurement: Measurement) -> str:
        """What speaks against a measurement, in words that a sound one in another process completes; else empty."""
        evaluation, name = self._judged(proposal, measurement), f"plan {proposal.plan.fingerprint}"
        if evaluation.origin == ORIGIN_FP32:
            findings = engine_findings(evaluation.error, "search", tf32=self._settings.tf32)
            is_wrong = any(finding.severity == "error" for finding in findings)
            return "the all-FP32 engine was off against the reference, and agrees with it" if is_wrong else ""
        if evaluation.disagrees:
            return f"the measured and emulated errors of {name} disagreed, and agree"
        if evaluation.is_finite or evaluation.emulated == math.inf:
            return ""
        return f"{name} gave NaN or Inf, and gives none"

    def _tell(self, proposal: Proposal, measurement: Measurement) -> None:
        """Record a measurement, with an interval that holds what differs between sessions of one plan."""
        record, listener, settings = self._record, self._listener, self._settings
        try:
            measurement = anchored(record, measurement)
            if proposal.origin == ORIGIN_FP32:
                error = measurement.error
                findings = engine_findings(error, "search", tf32=settings.tf32)
                if not settings.skip_checks:
                    stop_at_errors(findings)
                for finding in findings:
                    listener.warning(finding.message)
                value = error.value(settings.metric)
                if error.non_finite == 0 and not math.isfinite(value):
                    raise BaselineError(
                        f"the metric {settings.metric} is {value} for all-FP32, whose outputs are finite",
                        "check that the metric returns a finite number for the model's outputs on every sample",
                    )
                check_columns(settings.tolerance, error)
        except BaseException:
            record.release(proposal)  # Not recorded: it is measured again when the cause is removed.
            raise
        evaluation = self._judged(
            proposal, replace(measurement, latency=Sessions(record).corrected(measurement.latency))
        )
        record.tell_evaluation(proposal, evaluation, measurement.group_times_ms)
        tell_outcome(listener, proposal.plan, proposal.origin, evaluation, record.spent, settings.budget)

    def _tell_failure(self, proposal: Proposal, failure: Failure) -> None:
        """Record a plan that failed; give it back where that may be the machine's fault."""
        record = self._record
        if proposal.origin == ORIGIN_FP32:
            record.release(proposal)
            if failure.is_machine_fault:
                raise machine_error(failure, NEEDED_TRIES)
            raise did_not_run("the all-FP32 engine failed", failure)
        if failure.is_machine_fault and self._bench.faults:  # where all-FP32 has just run it is the plan's
            record.release(proposal, failure)
            return
        record.tell_failure(proposal, failure)
        tell_outcome(self._listener, proposal.plan, proposal.origin, failure, record.spent, self._settings.budget)
