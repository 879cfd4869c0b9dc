"""Emulated errors of plans, computed before anything is built."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure
from mptune.engines.failures import describe
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import RunError
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import EmulatedError, Evaluation
from mptune.tuning.fronts.searched_error import searched_error
from mptune.tuning.listener import Listener
from mptune.tuning.sampler.precision import EMULATIONS_TO_LEARN
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import FAULTS_IN_A_ROW, check_machine, in_fresh_processes
from mptune.tuning.steps.limits import Limits

_UNTIMED = 2
"""Plans to learn from, before it is known how long an emulation takes."""


class PlanEmulator:
    """Emulates the errors of plans before one of them is proposed, each once.

    For a toolchain that measures errors: with any other, an evaluation is itself an emulation, and as quick. What
    earlier sessions emulated the sampler reads from the study.
    """

    def __init__(
        self,
        space: SearchSpace,
        toolchain: Toolchain,
        law: str,
        listener: Listener,
        settings: SearchSettings | None = None,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``law`` is the statistic that adds in squares."""
        self._space, self._toolchain, self._listener = space, toolchain, listener
        self._law, self._settings, self._limits = law, settings or SearchSettings(), limits
        self._errors: dict[str, OutputError | None] = {}  # of plans by their fingerprint; None where emulation fails
        self._alone: dict[str, float] = {}  # of groups that are not emulated, as measured
        self._works = True
        self._clock = clock
        self._emulating_s, self._emulated = 0.0, 0

    def __call__(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """The errors of plans, as the search weighs them, by the precision of every free group.

        Those of groups that are not emulated are added in squares, as measured; NaN where an error is not known.
        """
        fp32 = dict.fromkeys(self._space.not_emulated, str(Precision.FP32))
        plans = [self._space.plan({**each, **fp32}) for each in choices]
        new = {plan.fingerprint: plan for plan in plans if plan.fingerprint not in self._errors}
        if new and self._works and (self._limits is None or self._limits.reached() is None):
            self._emulate(new)
        errors = []
        for plan, each in zip(plans, choices, strict=True):
            error = self._errors.get(plan.fingerprint)
            emulated = math.nan if error is None else searched_error(error, self._law, self._settings)
            measured = (self._alone.get(group, math.nan) for group in fp32 if each[group] != Precision.FP32)
            errors.append(math.hypot(emulated, *measured))
        return errors

    def learn_measured(self, evaluations: Sequence[Evaluation]) -> None:
        """Take over measured errors of groups alone that are not emulated."""
        of_plan = {self._space.alone(group).fingerprint: group for group in self._space.not_emulated}
        for evaluation in evaluations:
            if (group := of_plan.get(evaluation.plan.fingerprint)) is not None:
                self._alone[group] = searched_error(evaluation.error, self._law, self._settings)

    def learn(self, alone: Mapping[str, OutputError]) -> None:
        """Take over errors of groups alone that have been emulated on all samples meanwhile."""
        self._errors.update({self._space.alone(group).fingerprint: error for group, error in alone.items()})

    def affordable(self, seconds: float) -> int:
        """How many plans can be emulated in this time, by the time that emulation has taken; a few before any."""
        if not self._works or seconds <= 0.0:
            return 0
        if not self._emulated:
            return _UNTIMED
        return min(EMULATIONS_TO_LEARN, int(seconds * self._emulated / max(self._emulating_s, 1e-9)))

    def recall(self, plan: PrecisionPlan) -> EmulatedError | None:
        """The emulated objective statistic of a plan; None if it was not emulated, or failed."""
        error = self._errors.get(plan.fingerprint)
        if error is None:
            return None
        plain = SearchSettings(ignore=self._settings.ignore)
        return EmulatedError(searched_error(error, self._law, plain), error.sample_count)

    def _emulate(self, plans: Mapping[str, PrecisionPlan]) -> None:
        started_s = self._clock()
        try:
            outputs = emulate_outputs(self._toolchain, list(plans.values()), self._listener)
        except RunError as error:
            self._works = False
            self._listener.warning(f"the search goes on without emulating plans before they are built: {error.message}")
            return
        self._emulating_s += self._clock() - started_s
        self._emulated += len(plans)
        self._errors.update(zip(plans, outputs, strict=True))


def emulate_outputs(
    toolchain: Toolchain, plans: Sequence[PrecisionPlan], listener: Listener, part: range | None = None
) -> list[OutputError | None]:
    """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

    After five failures in a row all-FP32 is emulated, as a control.
    """
    of_part = () if part is None else (part,)
    unshared = toolchain.unshared
    errors: list[OutputError | None] = []
    faults = 0
    for few in (plans, *([plan] for plan in plans if len(plans) > 1)):
        what = f"emulating {'plans' if len(few) > 1 else f'plan {few[0].fingerprint}'}"
        result = in_fresh_processes(partial(toolchain.emulate, few, *of_part), toolchain, listener, what)
        if unshared is None and (unshared := toolchain.unshared) is not None:
            log = "" if unshared.log_path is None else f"; log: {unshared.log_path}"
            listener.warning(
                "plans are emulated in a session each from here on, which takes longer: the session that they shared "
                f"failed ({describe(unshared)}{log})"
            )
        if not isinstance(result, Failure):
            errors += result
            faults = 0
        elif len(few) == 1:
            errors.append(None)
            faults += 1
            if faults == FAULTS_IN_A_ROW:
                fp32 = few[0].replace(dict.fromkeys(few[0].reduced_groups, Precision.FP32))
                check_machine(partial(toolchain.emulate, [fp32], *of_part), toolchain, listener, faults)
                faults = 0
        if len(errors) == len(plans):
            break
    return errors
