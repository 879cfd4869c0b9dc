"""What mptune writes on Optuna's trials for the sampler, and reads back.

A trial has one categorical parameter per free group. What the parameters and the two objectives do not say stands in
user attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from mptune.json_form import decode_float
from mptune.tuning.fronts.hypervolume import ERROR_FLOOR
from mptune.tuning.sampler.plan_rows import PRECISIONS, Bools, Columns, Floats, from_bits, to_bits
from mptune.tuning.sampler.posterior import BuiltPlans

JSON_MARK = "~"
"""Begins the names of attributes that hold JSON for mptune alone: Optuna's tools sort by name, so they come last."""

OUTCOME_ATTR = "outcome"
"""Trial attribute: what became of the plan, in one JSON object, written before the trial is finished.

``"values"``: the trial's, null where it did not build or its outputs are not finite. ``"evaluation"``, where it gave
outputs: the evaluation, of which the sampler reads ``"latency"`` with ``"median_ms"`` and ``"ci95_ms"``; beside it
``"group_ms"``, what groups took by the engine's own profiler, where it has one, and ``"relative_l2"`` where the
objective is a metric over the whole set: what the sampler models in its place, as plans that are non-dominated stay so
under a monotone function of the error. ``"failure"``: why it gave none."""

EHVI_ATTR = "expected hypervolume improvement"
"""Trial attribute: by how much the hypervolume (0 to 1) was expected to grow when the plan was proposed."""

EMULATED_ATTR = f"{JSON_MARK}emulated plans"
"""Trial attribute: the plans that were emulated when it was asked for, in the order of the groups as in ``"0110"`` with
1 for FP16, and their errors."""

PLAN_ATTR = f"{JSON_MARK}plan"
"""Trial attribute: group -> precision of a whole plan that the search space does not hold, such as all-FP32."""

HAS_TRIAL_CONSTRAINTS = hasattr(Trial, "set_constraint")
"""Optuna 5 keeps constraints on the trial; before, the sampler asks ``constraints_of`` for them."""

_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Judge:
    """Errors of trials that are not their objectives: those under tolerances, which another search may not have.

    Attributes:
        key: tells its errors from those of another judge.
        error_of: of a finished trial whose outputs are finite; ``inf`` where it is not.
    """

    key: str
    error_of: Callable[[FrozenTrial], float]


def emulated_attr(judge: Judge | None) -> str:
    """The trial attribute of the plans that were emulated, and judged so."""
    return EMULATED_ATTR if judge is None else f"{EMULATED_ATTR}: {judge.key}"


def set_outcome(trial: Trial, outcome: Mapping[str, Any]) -> None:
    """Write what became of a plan, as the samplers read it; before ``tell``."""
    if HAS_TRIAL_CONSTRAINTS and OUTCOME_ATTR not in trial.user_attrs:  # Optuna takes one only once.
        trial.set_constraint("feasible", 0.0 if outcome["values"] is not None else 1.0)
    trial.set_user_attr(OUTCOME_ATTR, dict(outcome))


def outcome_of(trial: FrozenTrial) -> Mapping[str, Any]:
    """What ``OUTCOME_ATTR`` holds; empty before the plan has an outcome."""
    outcome: Mapping[str, Any] = trial.user_attrs.get(OUTCOME_ATTR, {})
    return outcome


def constraints_of(trial: FrozenTrial) -> Sequence[float]:
    """The ``constraints_func`` of Optuna's samplers: positive where the plan is not feasible."""
    return (1.0 if outcome_of(trial).get("values", ()) is None else 0.0,)


def timing_of(trial: FrozenTrial) -> tuple[float, float]:
    """Latency, also of a plan whose outputs are not finite, and its standard error; NaN and 0 where none was timed."""
    latency = outcome_of(trial).get("evaluation", {}).get("latency")
    if latency is None:
        return math.nan, 0.0
    low, high = map(decode_float, latency["ci95_ms"])
    sd_ms = (high - low) / (2 * _NORMAL_95)
    return decode_float(latency["median_ms"]), sd_ms if math.isfinite(sd_ms) else 0.0


def ehvi_of(trial: FrozenTrial) -> float | None:
    """The expected hypervolume improvement of the plan when it was proposed; None where another sampler proposed it."""
    ehvi = trial.user_attrs.get(EHVI_ATTR)
    return None if ehvi is None else float(ehvi)


def is_precision(distribution: BaseDistribution) -> bool:
    """Whether a parameter's choices are those of a free group."""
    return isinstance(distribution, CategoricalDistribution) and set(distribution.choices) == set(PRECISIONS)


_UNKNOWN = (math.nan, 0.0, math.nan, math.nan)
"""Latency, its standard error, error and whether the plan is finite, before it is measured."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one trial says.

    Attributes:
        bits: its plan; None where it says nothing of a plan.
        row: the same, shape (n_groups,).
        figure: latency, its standard error, error and whether the plan is finite, as ``BuiltPlans`` has them.
        group_ms: what each group took, shape (n_groups,); None where that is not known.
        failed: it gave no outputs.
        is_outside: the search space does not hold its plan.
        emulated: plans that were emulated when it was asked for, and their errors.
    """

    bits: str | None = None
    row: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))
    figure: tuple[float, float, float, float] = _UNKNOWN
    group_ms: Floats | None = None
    failed: bool = False
    is_outside: bool = False
    emulated: Mapping[str, float] = field(default_factory=dict)


class TrialReader:
    """Reads the trials of one study again and again; each finished trial is decoded once."""

    def __init__(self, columns: Columns, judge: Judge | None = None) -> None:
        """Nothing is read yet; errors are as ``judge`` says, None takes the objectives as they are."""
        self._columns = columns
        self._judge = judge
        self._finished: dict[int, _Reading] = {}

    def built_plans(self, trials: Sequence[FrozenTrial], asking: int) -> BuiltPlans:
        """What the trials of a study, of any state, say about the groups; the one that asks is left out.

        Faults of the machine (FAIL) say nothing of a plan, nor do plans with a precision that is none of the columns.
        """
        readings = [self._reading(position, trial) for position, trial in enumerate(trials)]
        emulated_errors = {bits: error for reading in readings for bits, error in reading.emulated.items()}
        read_plans = [
            reading
            for reading, trial in zip(readings, trials, strict=True)
            if reading.bits is not None and trial.number != asking
        ]
        # All-FP32 has a plan of its own where the search space pins groups to FP16: then it is no row.
        finite = (reading for reading in read_plans if reading.figure[3] == 1.0)
        base = next(
            (reading.figure for reading in finite if reading.is_outside or not reading.row.any()), (math.nan, 0.0)
        )
        inside = [reading for reading in read_plans if not reading.is_outside]
        # A plan that failed, and is or was tried again, counts as its last trial says.
        last = {reading.bits: position for position, reading in enumerate(inside)}
        kept = [
            reading for position, reading in enumerate(inside) if not reading.failed or last[reading.bits] == position
        ]
        plans = np.array([reading.row for reading in kept], dtype=bool).reshape(len(kept), len(self._columns.groups))
        latency, sd, errors, finites = (
            np.array([reading.figure for reading in kept], dtype=float).reshape(len(kept), 4).T
        )
        measured_errors = {reading.bits: reading.figure[2] for reading in kept if math.isfinite(reading.figure[2])}
        only_emulated = {bits: error for bits, error in emulated_errors.items() if bits not in measured_errors}
        ratios = [
            max(emulated_errors[bits], ERROR_FLOOR) / measured
            for bits, measured in measured_errors.items()
            if bits in emulated_errors and math.isfinite(emulated_errors[bits]) and measured > ERROR_FLOOR
        ]
        emulated = None
        if only_emulated:
            emulated = from_bits(list(only_emulated)), np.array(list(only_emulated.values()), dtype=float)
        group_ms = None
        if any(reading.group_ms is not None for reading in kept):
            unknown = np.full(len(self._columns.groups), math.nan)
            group_ms = np.array([unknown if reading.group_ms is None else reading.group_ms for reading in kept])
        return BuiltPlans(
            plans,
            latency,
            sd,
            errors,
            finites,
            base[0],
            base[1],
            emulated=emulated,
            emulation_ratios=np.array(ratios, dtype=float),
            group_ms=group_ms,
            failed=np.array([reading.failed for reading in kept], dtype=bool),
        )

    def _reading(self, position: int, trial: FrozenTrial) -> _Reading:
        reading = self._finished.get(position)
        if reading is None:
            reading = self._read(trial)
            if trial.state.is_finished():
                self._finished[position] = reading
        return reading

    def _read(self, trial: FrozenTrial) -> _Reading:
        stored: Mapping[str, Any] = trial.user_attrs.get(emulated_attr(self._judge), {})
        emulated = {
            bits: decode_float(error) for bits, error in stored.items() if len(bits) == len(self._columns.groups)
        }
        row = None if trial.state is TrialState.FAIL else self._columns.row(_choices(trial))
        if row is None:
            return _Reading(emulated=emulated)
        profile: Mapping[str, float] = outcome_of(trial).get("group_ms", {})
        return _Reading(
            to_bits(np.array(row, dtype=bool)),
            np.array(row, dtype=bool),
            _figures(trial, self._judge),
            np.array([profile.get(group, math.nan) for group in self._columns.groups]) if profile else None,
            trial.state is TrialState.PRUNED and "failure" in outcome_of(trial),
            PLAN_ATTR in trial.user_attrs,
            emulated,
        )


def _choices(trial: FrozenTrial) -> Mapping[str, Any]:
    """Group -> precision; of a trial that runs or waits, what was enqueued for it."""
    if trial.state in (TrialState.RUNNING, TrialState.WAITING):
        return {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    return trial.params


def _figures(trial: FrozenTrial, judge: Judge | None) -> tuple[float, float, float, float]:
    """Latency, its standard error, error, and whether the plan is finite, as ``BuiltPlans`` has them."""
    latency_ms, sd_ms = timing_of(trial)
    if trial.state is TrialState.COMPLETE:
        latency_ms, error = trial.values
        error = outcome_of(trial).get("relative_l2", error) if judge is None else judge.error_of(trial)
        return float(latency_ms), sd_ms, float(error), 1.0
    if trial.state is TrialState.PRUNED:
        return latency_ms, sd_ms, math.nan, 0.0
    return math.nan, sd_ms, math.nan, math.nan
