"""Emulated errors of plans, computed before anything is built."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.evaluation import EmulatedError, Evaluation
from mptune.tuning.failures import describe
from mptune.tuning.fronts.searched_error import SearchedError
from mptune.tuning.listener import Listener
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import FAULTS_IN_A_ROW, in_fresh_processes, run_control
from mptune.tuning.steps.limits import Limits

_UNTIMED = 2
"""Plans to learn from, before it is known how long an emulation takes."""

_UNKNOWN = EmulatedError(math.nan, 0)
"""Of a plan whose emulation failed, alone and again: a crash says nothing about overflow."""


class PlanEmulator:
    """Emulates the errors of plans before ``PrecisionSampler`` proposes one of them.

    For a toolchain that measures errors: with any other, an evaluation is itself an emulation, and as quick. Each plan
    is emulated once; what earlier sessions emulated the sampler reads from the study.
    """

    def __init__(
        self,
        space: SearchSpace,
        toolchain: Toolchain,
        metric: str,
        listener: Listener,
        alone: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        searched: SearchedError | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._searched = searched or SearchedError(metric)
        self._plain = replace(self._searched, tolerances=(), max_error=None)
        self._limits = limits
        self._space = space
        self._toolchain = toolchain
        self._listener = listener
        self._fp32 = PrecisionPlan.uniform(space.model_sha256, [g.id for g in space.groups], Precision.FP32)
        self._errors: dict[str, dict[str, EmulatedError]] = {self._plain.key: {}, self._searched.key: {}}
        self.learn(alone or {})
        self._alone: dict[str, float] = {}
        self._works = True
        self._clock = clock
        self._emulating_s, self._emulated = 0.0, 0

    def __call__(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """The errors of plans, by the precision ``"fp16"`` or ``"fp32"`` of every free group.

        Those of groups that are not emulated are added in squares, as measured; NaN where they were not.
        """
        fp32 = dict.fromkeys(self._space.not_emulated, str(Precision.FP32))
        measured = [
            [self._alone.get(group, math.nan) for group in fp32 if each[group] != Precision.FP32] for each in choices
        ]
        plans = [self._space.plan({**each, **fp32}) for each in choices]
        judged = self._searched.key
        new = {plan.fingerprint: plan for plan in plans if self._known(plan, judged) is None}
        if new and self._works and (self._limits is None or self._limits.reached() is None):
            self._emulate(new)
        errors = (self._known(plan, judged) for plan in plans)
        emulated = [math.nan if error is None else error.value for error in errors]
        return [math.hypot(error, *alone) for error, alone in zip(emulated, measured, strict=True)]

    def learn_measured(self, evaluations: Sequence[Evaluation]) -> None:
        """Take over measured errors of groups alone that are not emulated."""
        of_plan = {self._space.alone(group).fingerprint: group for group in self._space.not_emulated}
        alone = {of_plan[e.plan.fingerprint]: e for e in evaluations if e.plan.fingerprint in of_plan}
        self._alone = {group: self._searched.value(e.error) for group, e in alone.items()}

    def learn(self, alone: Mapping[str, float], judged: Mapping[str, float] | None = None) -> None:
        """Take over errors of groups alone that have been emulated on all samples meanwhile."""
        for key, errors in ((self._searched.key, judged or alone), (self._plain.key, alone)):
            for group, error in errors.items():
                plan = self._space.alone(group)
                self._errors[key][plan.fingerprint] = EmulatedError(error, None)

    def affordable(self, seconds: float) -> int:
        """How many plans can be emulated in so many seconds, by the time that emulation has taken; a few before any."""
        if not self._works or seconds <= 0.0:
            return 0
        if not self._emulated:
            return _UNTIMED
        return min(EMULATIONS_TO_LEARN, int(seconds * self._emulated / max(self._emulating_s, 1e-9)))

    def recall(self, plan: PrecisionPlan) -> EmulatedError | None:
        """The emulated objective statistic of a plan; None if it was not emulated, or failed."""
        error = self._known(plan, self._plain.key)
        return None if error is None or error.samples == 0 else error

    def _known(self, plan: PrecisionPlan, key: str) -> EmulatedError | None:
        return self._errors[key].get(plan.fingerprint)

    def _emulate(self, plans: Mapping[str, PrecisionPlan]) -> None:
        started = self._clock()
        try:
            outputs = emulate_outputs(self._toolchain, list(plans.values()), self._listener)
        except RunError as error:
            self._works = False
            self._listener.warning(f"the search goes on without emulating plans before they are built: {error.message}")
            return
        self._emulating_s += self._clock() - started
        self._emulated += len(plans)
        for judge in {self._plain.key: self._plain, self._searched.key: self._searched}.values():
            self._errors[judge.key].update(
                {plan: _emulated(error, judge) for plan, error in zip(plans, outputs, strict=True)}
            )


def emulate_outputs(
    toolchain: Toolchain, plans: Sequence[PrecisionPlan], listener: Listener, part: range | None = None
) -> list[OutputError | None]:
    """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

    One that crashes alone is emulated again in fresh processes first. After several such plans in a row all-FP32 is
    emulated, as a control.
    """
    # Of several, one may crash: they are emulated one by one then.
    alone = len(plans) == 1
    what = f"emulating {f'plan {plans[0].fingerprint}' if alone else 'plans'}"
    before = toolchain.unshared
    of_part = () if part is None else (part,)
    result = in_fresh_processes(lambda: toolchain.emulate(plans, *of_part), toolchain, listener, what, crashes=alone)
    if before is None and (fault := toolchain.unshared) is not None:
        log = "" if fault.log_path is None else f"; log: {fault.log_path}"
        listener.warning(
            "plans are emulated in a session each from here on, which takes longer: the session that they shared "
            f"failed ({describe(fault)}{log})"
        )
    if not isinstance(result, Failure):
        return list(result)
    if alone:
        return [None]
    errors: list[OutputError | None] = []
    failures = 0
    for plan in plans:
        errors += emulate_outputs(toolchain, [plan], listener, part)
        failures = failures + 1 if errors[-1] is None else 0
        if failures == FAULTS_IN_A_ROW:
            fp32 = plan.replace(dict.fromkeys(plan.reduced_groups, Precision.FP32))
            run_control(partial(toolchain.emulate, [fp32], *of_part), toolchain, listener, failures)
            failures = 0
    return errors


def _emulated(error: OutputError | None, judge: SearchedError) -> EmulatedError:
    return _UNKNOWN if error is None else EmulatedError(judge.value(error), error.sample_count)
