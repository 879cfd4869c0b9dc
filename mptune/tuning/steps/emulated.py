"""Emulated errors of plans, computed before anything is built; each plan is emulated once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Toolchain
from mptune.errors import RunError
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.evaluation import EmulatedError
from mptune.tuning.listener import Listener
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.attempts import FAULTS_IN_A_ROW, in_fresh_processes, run_control
from mptune.tuning.steps.emulated_errors import EmulatedErrors
from mptune.tuning.steps.limits import Limits

EMULATED_JSON = "emulated.jsonl"
"""Name of the file in the run's data directory."""

_UNKNOWN = EmulatedError(math.nan, 0)
"""Of a plan whose emulation failed, alone and again: a crash says nothing about overflow."""


class PlanEmulator:
    """Emulates the errors of plans before ``PrecisionSampler`` proposes one of them.

    For a toolchain that measures errors: with any other, an evaluation is itself an emulation, and as quick.
    """

    def __init__(
        self,
        space: SearchSpace,
        toolchain: Toolchain,
        metric: str,
        path: Path,
        listener: Listener,
        alone: Mapping[str, float] | None = None,
        limits: Limits | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        """Read the errors that an earlier run left in the file.

        Args:
            space: turns choices into plans.
            toolchain: emulates; its reference is taken already.
            metric: the objective statistic.
            path: file that keeps the errors; every call that asked for new ones appends to it.
            listener: receives a warning when the machine fails.
            alone: free group -> error of the plan with that group alone in FP16, if already emulated.
            limits: that end the search: past them nothing is emulated.
            ignored: outputs of the model whose errors do not count.
        """
        self._ignored = tuple(sorted(ignored))
        self._limits = limits
        self._space = space
        self._toolchain = toolchain
        self._metric = metric
        self._listener = listener
        self._fp32 = PrecisionPlan.uniform(space.model_sha256, [g.id for g in space.groups], Precision.FP32)
        self._kept = EmulatedErrors(path, f"{metric} without {self._ignored}" if ignored else metric)
        self._alone: dict[str, EmulatedError] = {}
        self.learn(alone or {})
        self._works = True

    def __call__(self, choices: Sequence[Mapping[str, str]]) -> list[float]:
        """The errors of plans, by the precision ``"fp16"`` or ``"fp32"`` of every free group.

        Returns:
            The objective statistic of each; ``inf`` where it is not finite, NaN where the emulation failed.

        Raises:
            RunError: the file cannot be written, or the disk is full.
        """
        plans = [self._space.plan(one) for one in choices]
        new = {plan.fingerprint: plan for plan in plans if self._known(plan) is None}
        if new and self._works and (self._limits is None or self._limits.reached() is None):
            self._emulate(new)
        errors = (self._known(plan) for plan in plans)
        return [math.nan if error is None else error.value for error in errors]

    def learn(self, alone: Mapping[str, float]) -> None:
        """Take over errors of groups alone that have been emulated on all samples meanwhile."""
        for group, error in alone.items():
            self._alone[self._fp32.replace({group: Precision.FP16}).fingerprint] = EmulatedError(error, None)

    def recall(self, plan: PrecisionPlan) -> EmulatedError | None:
        """The emulated error of a plan; None if it was not emulated, or failed."""
        error = self._known(plan)
        return None if error is None or error.samples == 0 else error

    def _known(self, plan: PrecisionPlan) -> EmulatedError | None:
        return self._kept.errors.get(plan.fingerprint) or self._alone.get(plan.fingerprint)

    def _emulate(self, plans: Mapping[str, PrecisionPlan]) -> None:
        try:
            errors = emulate_plans(self._toolchain, list(plans.values()), self._metric, self._listener, self._ignored)
        except RunError as error:
            self._works = False
            self._listener.warning(f"the search goes on without emulating plans before they are built: {error.message}")
            return
        self._kept.refresh()  # Another search in the same run directory may have added some meanwhile.
        self._kept.add(dict(zip(plans, errors, strict=True)))


def emulate_plans(
    toolchain: Toolchain,
    plans: Sequence[PrecisionPlan],
    metric: str,
    listener: Listener,
    ignored: Collection[str] = (),
) -> list[EmulatedError]:
    """The emulated errors of plans, without outputs that are ignored; one that fails alone has NaN, of no sample.

    See ``emulate_outputs``.
    """
    found = emulate_outputs(toolchain, plans, listener)
    return [_UNKNOWN if error is None else _emulated(error.without(ignored), metric) for error in found]


def emulate_outputs(
    toolchain: Toolchain, plans: Sequence[PrecisionPlan], listener: Listener, part: range | None = None
) -> list[OutputError | None]:
    """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

    One that crashes alone is emulated again in fresh processes first. After several such plans in a row all-FP32 is
    emulated, as a control.

    Args:
        toolchain: emulates.
        plans: what to emulate.
        listener: receives a warning before each further attempt.
        part: one of the parts of the toolchain's ``emulated_samples``; None takes all.

    Raises:
        RunError: the machine failed again and again, or all-FP32 failed, too.
    """
    # Of several, one may crash: they are emulated one by one then.
    alone = len(plans) == 1
    what = f"emulating {f'plan {plans[0].fingerprint}' if alone else 'plans'}"
    of_part = () if part is None else (part,)
    result = in_fresh_processes(lambda: toolchain.emulate(plans, *of_part), toolchain, listener, what, crashes=alone)
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
            fp32 = plan.replace(dict.fromkeys(plan.fp16_groups, Precision.FP32))
            run_control(partial(toolchain.emulate, [fp32], *of_part), toolchain, listener, failures)
            failures = 0
    return errors


def _emulated(error: OutputError, metric: str) -> EmulatedError:
    value = error.value(metric)
    finite = error.non_finite == 0 and math.isfinite(value)
    return EmulatedError(value if finite else math.inf, error.sample_count)
