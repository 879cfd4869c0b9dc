"""What mptune writes on Optuna's trials for the sampler, and reads back: studies of version 0.1.0, too.

A trial has one categorical parameter per free group. What the parameters and the two objectives do not say stands in
user attributes; those that were renamed since version 0.1.0 are read under both names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from mptune.data.numbers import decode_float
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.sampler.plan_rows import PRECISIONS, from_bits, to_bits, to_row
from mptune.tuning.sampler.posterior import BuiltPlans

JSON_MARK = "~"
"""Begins the names of attributes that hold JSON for mptune alone: Optuna's tools sort by name, so they come last."""

TIMING_ATTR = f"{JSON_MARK}timing"
"""Trial attribute: ``{"latency_ms", "sd_ms"}``: the latency, also of a plan whose outputs are not finite, and its
standard error; ``"group_ms"`` beside them: what groups took by the engine's own profiler, where it has one."""

EHVI_ATTR = "expected hypervolume improvement"
"""Trial attribute: by how much the hypervolume (0 to 1) was expected to grow when the plan was proposed."""

EMULATED_ATTR = f"{JSON_MARK}emulated plans"
"""Trial attribute: the plans that were emulated when it was asked for, in the order of the groups as in ``"0110"`` with
1 for FP16, and their errors."""

PLAN_ATTR = f"{JSON_MARK}plan"
"""Trial attribute: group -> precision of a whole plan that the search space does not hold, such as all-FP32."""

CONSTRAINT_ATTR = "constraint"
"""Trial attribute: 0.0 for a feasible plan, 1.0 for one that cannot build or is not finite."""

HAS_TRIAL_CONSTRAINTS = hasattr(Trial, "set_constraint")
"""Optuna 5 keeps constraints on the trial; before, the sampler asks ``constraints_of`` for them."""

FAILURE_ATTR = "failure"
"""Trial attribute: why a plan gave no outputs; absent where it gave outputs, if not finite ones."""

_OLD_NAMES = {TIMING_ATTR: "measured", EHVI_ATTR: "promise", EMULATED_ATTR: "emulated plans", PLAN_ATTR: "plan"}
"""Under which version 0.1.0 wrote them."""


def set_feasible(trial: Trial, is_feasible: bool) -> None:
    """Write once whether the plan built and its outputs are finite, as the samplers read it; before ``tell``."""
    if CONSTRAINT_ATTR in trial.user_attrs:
        return
    violation = 0.0 if is_feasible else 1.0
    trial.set_user_attr(CONSTRAINT_ATTR, violation)
    if HAS_TRIAL_CONSTRAINTS:
        trial.set_constraint("feasible", violation)


def constraints_of(trial: FrozenTrial) -> Sequence[float]:
    """The ``constraints_func`` of Optuna's samplers: positive where the plan is not feasible."""
    return (float(trial.user_attrs.get(CONSTRAINT_ATTR, 0.0)),)


def timing_of(trial: FrozenTrial) -> Mapping[str, Any]:
    """What ``TIMING_ATTR`` holds; empty where the plan was not timed."""
    timing: Mapping[str, Any] = _read(trial, TIMING_ATTR) or {}
    return timing


def ehvi_of(trial: FrozenTrial) -> float | None:
    """The expected hypervolume improvement of the plan when it was proposed; None where another sampler proposed it."""
    ehvi = _read(trial, EHVI_ATTR)
    return None if ehvi is None else float(ehvi)


def _read(trial: FrozenTrial, name: str) -> Any:
    attrs = trial.user_attrs
    return attrs[name] if name in attrs else attrs.get(_OLD_NAMES[name])


def is_precision(distribution: BaseDistribution) -> bool:
    """Whether a parameter's choices are those of a free group."""
    return isinstance(distribution, CategoricalDistribution) and set(distribution.choices) == set(PRECISIONS)


def read_built_plans(trials: Sequence[FrozenTrial], groups: Sequence[str], asking: int) -> BuiltPlans:
    """What the trials of a study say about the groups.

    Args:
        trials: of any state. Faults of the machine (FAIL) say nothing of a plan, nor do plans with a precision that the
            sampler does not model.
        groups: ids of the free groups.
        asking: number of the trial that a plan is wanted for: it is left out.
    """
    rows: list[list[bool]] = []
    figures: list[tuple[float, float, float, float]] = []
    profiles: list[Mapping[str, float]] = []
    failed: list[bool] = []
    emulated_errors: dict[str, float] = {}
    base_ms, base_sd_ms = math.nan, 0.0
    for trial in trials:
        for bits, error in (_read(trial, EMULATED_ATTR) or {}).items():
            if len(bits) == len(groups):
                emulated_errors[bits] = decode_float(error)
        choices = _choices(trial)
        if trial.number == asking or trial.state is TrialState.FAIL:
            continue
        row = to_row(choices, groups)
        if row is None:
            continue
        latency_ms, sd_ms, error, finite = figure = _figures(trial)
        # All-FP32 has a plan of its own where the search space pins groups to FP16: then it is no row.
        is_outside = _read(trial, PLAN_ATTR) is not None
        if finite == 1.0 and math.isnan(base_ms) and (is_outside or not any(row)):
            base_ms, base_sd_ms = latency_ms, sd_ms
        if not is_outside:
            rows.append(row)
            figures.append(figure)
            profiles.append(timing_of(trial).get("group_ms", {}))
            failed.append(trial.state is TrialState.PRUNED and FAILURE_ATTR in trial.user_attrs)
    # A plan that failed, and is or was tried again, counts as its last trial says.
    last = {tuple(row): index for index, row in enumerate(rows)}
    kept = [index for index, row in enumerate(rows) if not failed[index] or last[tuple(row)] == index]
    rows, figures = [rows[i] for i in kept], [figures[i] for i in kept]
    profiles, failed = [profiles[i] for i in kept], [failed[i] for i in kept]
    plans = np.array(rows, dtype=bool).reshape(len(rows), len(groups))
    latency, sd, errors, finites = np.array(figures, dtype=float).reshape(len(rows), 4).T
    measured_errors = {to_bits(row): error for row, error in zip(plans, errors, strict=True) if math.isfinite(error)}
    only_emulated = {bits: error for bits, error in emulated_errors.items() if bits not in measured_errors}
    ratios = [
        max(emulated_errors[bits], ERROR_FLOOR) / measured
        for bits, measured in measured_errors.items()
        if math.isfinite(emulated_errors.get(bits, math.inf)) and measured > ERROR_FLOOR
    ]
    group_ms = None
    if any(profiles):
        group_ms = np.array([[profile.get(g, math.nan) for g in groups] for profile in profiles], dtype=float)
    return BuiltPlans(
        plans,
        latency,
        sd,
        errors,
        finites,
        base_ms,
        base_sd_ms,
        emulated=(from_bits(list(only_emulated)), np.array(list(only_emulated.values()))) if only_emulated else None,
        emulation_ratios=np.array(ratios, dtype=float),
        group_ms=group_ms,
        failed=np.array(failed, dtype=bool),
    )


def _choices(trial: FrozenTrial) -> Mapping[str, Any]:
    """Group -> precision; of a trial that runs or waits, what was enqueued for it."""
    if trial.state in (TrialState.RUNNING, TrialState.WAITING):
        return {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    return trial.params


def _figures(trial: FrozenTrial) -> tuple[float, float, float, float]:
    """Latency, its standard error, error, and whether the plan is finite, as ``BuiltPlans`` has them."""
    timing = timing_of(trial)
    sd_ms = float(timing.get("sd_ms", 0.0))
    if trial.state is TrialState.COMPLETE:
        latency_ms, error = trial.values
        return float(latency_ms), sd_ms, float(error), 1.0
    if trial.state is TrialState.PRUNED:
        return float(timing.get("latency_ms", math.nan)), sd_ms, math.nan, 0.0
    return math.nan, sd_ms, math.nan, math.nan
