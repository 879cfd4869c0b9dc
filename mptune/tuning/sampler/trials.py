"""What is known before any build (``Prior``), and what Optuna's trials say of the plans that were built.

A trial has one categorical parameter per free group. What the parameters and the two objectives do not say stands in
user attributes, which mptune writes for the sampler.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from mptune.json_form import decode_float
from mptune.tuning.dominance import ERROR_FLOOR
from mptune.tuning.sampler.plans import Bools, Boundary, Columns, CutSolver, Floats, from_bits, to_bits

JSON_MARK = "~"
"""Begins the names of attributes that hold JSON for mptune alone: Optuna's tools sort by name, so they come last."""

OUTCOME_ATTR = "outcome"
"""Trial attribute: what became of the plan, in one JSON object, written before the trial is finished.

``"values"``: the trial's, null where it did not build or its outputs are not finite. ``"evaluation"``, where it gave
outputs: of it the sampler reads ``"latency"`` with ``"median_ms"`` and ``"ci95_ms"``; beside it ``"group_ms"``, what
groups took by the engine's own profiler, where it has one. ``"failure"``: why it gave none."""

EHVI_ATTR = "expected hypervolume improvement"
"""Trial attribute: by how much the hypervolume (0 to 1) was expected to grow when the plan was proposed."""

GAIN_ATTR = "expected gain within the limit"
"""Trial attribute: by how much the largest share of the latency saved within the limit was expected to grow then, with
whatever plan."""

EMULATED_ATTR = f"{JSON_MARK}emulated plans"
"""Trial attribute: the plans that were emulated when it was asked for, in the order of the groups as in ``"0110"`` with
1 for FP16, and their errors; with the name of what these are (``error_name`` of ``PrecisionSampler``) behind it."""

PLAN_ATTR = f"{JSON_MARK}plan"
"""Trial attribute: group -> precision of a whole plan that the search space does not hold, such as all-FP32."""

HAS_TRIAL_CONSTRAINTS = hasattr(Trial, "set_constraint")
"""Optuna 5 keeps constraints on the trial; before, the sampler asks ``constraints_of`` for them."""

_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Prior:
    """What is known of a search space before any build, as plain data; all sequences are parallel to ``groups``.

    What is said of FP16 holds for the reduced precision of each group; None is for what is not known of any.

    Attributes:
        groups: ids of the free groups: the names of the parameters.
        log_square_errors: log of each group's squared error when it alone is FP16; ``inf`` where that overflows, NaN
            where it is not known.
        gains_ms: what FP16 saves in each group, up to a factor that the builds of all-FP32 and all-FP16 fix.
        boundaries: between the groups, by their positions.
        boundary_costs_ms: what crossing each costs, in the same unit as the gains.
        fixed_gain_ms: what groups that are FP16 under every plan save against all-FP32, and TF32 in FP32 groups.
        exact: latencies are predicted by these very terms, so that there is nothing to learn of them.
        log_square_sds: standard deviation of each of ``log_square_errors`` on top of how far emulation can be trusted:
            where it was taken on few samples, or from other groups. None is 0 everywhere.
        part_shares: squared error of each group in each part of the outputs, over that in its worst part: the law of
            squares holds for a part, and the error of a plan is the largest over them. None where one part decides.
        precisions: of each, where it is not FP32; empty where all are FP16.
    """

    groups: tuple[str, ...]
    log_square_errors: tuple[float, ...] | None = None
    gains_ms: tuple[float, ...] | None = None
    boundaries: tuple[Boundary, ...] = ()
    boundary_costs_ms: tuple[float, ...] = ()
    fixed_gain_ms: float = 0.0
    exact: bool = False
    log_square_sds: tuple[float, ...] | None = None
    part_shares: tuple[tuple[float, ...], ...] | None = None
    precisions: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> Columns:
        """What the columns of a plan stand for."""
        return Columns(self.groups, self.precisions) if self.precisions else Columns.fp16(self.groups)

    @cached_property
    def solver(self) -> CutSolver:
        """Finds the optima of the additive law."""
        return CutSolver(self.columns, self.boundaries)


@dataclass(frozen=True)
class BuiltPlans:
    """Plans that were built or are being built, and what came of them."""

    plans: Bools  # (n_plans, n_groups), True is FP16
    latency_ms: Floats  # (n_plans,) medians; NaN where none was taken
    latency_sd_ms: Floats  # (n_plans,) their standard errors as measured; 0 where unknown or predicted
    error: Floats  # (n_plans,) what the search minimises; NaN where there is none
    finite: Floats  # (n_plans,) 1.0 where it built and its outputs are finite, 0.0 where not, NaN while it runs
    base_ms: float  # latency of all-FP32; NaN before it is known
    base_sd_ms: float = 0.0
    # Plans that were emulated, not measured, (n_emulated, n_groups); their errors, (n_emulated,), inf where not finite.
    emulated: tuple[Bools, Floats] | None = None
    # Emulated error over measured error, of each plan that has both.
    emulation_ratios: Floats = field(default_factory=lambda: np.ones(0))
    group_ms: Floats | None = None  # (n_plans, n_groups) by the engine's own profiler; NaN where that is not known
    failed: Bools | None = None  # (n_plans,) it gave no outputs at all

    @property
    def gave_nothing(self) -> Bools:
        """Which plans gave no outputs, shape (n_plans,)."""
        return np.zeros(len(self.plans), dtype=bool) if self.failed is None else self.failed

    @property
    def emulations(self) -> tuple[Bools, Floats]:
        """``emulated``, of no rows where there are none."""
        return (self.plans[:0], np.zeros(0)) if self.emulated is None else self.emulated

    def with_emulated(self, plans: Bools, errors: Floats) -> BuiltPlans:
        """With more plans that were emulated; NaN where that failed."""
        is_valid, before = ~np.isnan(errors), self.emulations
        return replace(self, emulated=(np.vstack([before[0], plans[is_valid]]), np.append(before[1], errors[is_valid])))

    def thinned(self, most: int) -> BuiltPlans:
        """At most ``most`` of the plans, and of the emulated ones, evenly spread over the search."""
        counts = len(self.plans), len(self.emulations[1])
        rows, emulated = (np.linspace(0, count - 1, min(count, most)).astype(int) for count in counts)
        names = ("plans", "latency_ms", "latency_sd_ms", "error", "finite", "group_ms", "failed")
        chosen = {name: value[rows] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **chosen, emulated=(self.emulations[0][emulated], self.emulations[1][emulated]))


def set_outcome(trial: Trial, outcome: Mapping[str, Any]) -> None:
    """Write what became of a plan, as the samplers read it; before ``tell``."""
    if HAS_TRIAL_CONSTRAINTS and OUTCOME_ATTR not in trial.user_attrs:  # Optuna takes one only once.
        trial.set_constraint("feasible", 1.0 if outcome["values"] is None else 0.0)
    trial.set_user_attr(OUTCOME_ATTR, dict(outcome))


def outcome_of(trial: FrozenTrial) -> Mapping[str, Any]:
    """What ``OUTCOME_ATTR`` holds; empty before the plan has an outcome."""
    outcome: Mapping[str, Any] = trial.user_attrs.get(OUTCOME_ATTR, {})
    return outcome


def constraints_of(trial: FrozenTrial) -> Sequence[float]:
    """The ``constraints_func`` of Optuna's samplers: positive where the plan is not feasible."""
    return (1.0 if outcome_of(trial).get("values", ()) is None else 0.0,)


CONSTRAINT_OPTIONS: Mapping[str, Any] = {} if HAS_TRIAL_CONSTRAINTS else {"constraints_func": constraints_of}
"""Further arguments of Optuna's own samplers, so that they know which plans are not feasible."""


def make_tpe(seed: int) -> BaseSampler:
    """Optuna's TPE over all groups at once, aware of running trials and of constraints."""
    with warnings.catch_warnings():
        # multivariate, constant_liar and constraints_func are marked experimental in some releases.
        warnings.simplefilter("ignore")
        return TPESampler(multivariate=True, constant_liar=True, seed=seed, **CONSTRAINT_OPTIONS)


def timing_of(trial: FrozenTrial) -> tuple[float, float]:
    """Latency, also of a plan whose outputs are not finite, and its standard error; NaN and 0 where none was timed."""
    latency = outcome_of(trial).get("evaluation", {}).get("latency")
    if latency is None:
        return math.nan, 0.0
    low, high = map(decode_float, latency["ci95_ms"])
    sd_ms = (high - low) / (2 * _NORMAL_95)
    return decode_float(latency["median_ms"]), sd_ms if math.isfinite(sd_ms) else 0.0


def emulated_attr(error_name: str) -> str:
    """The trial attribute of the plans that were emulated, of what their errors are."""
    return f"{EMULATED_ATTR}: {error_name}" if error_name else EMULATED_ATTR


def read_plans(
    trials: Sequence[FrozenTrial],
    columns: Columns,
    asking: int | None = None,
    errors: Mapping[int, float] = MappingProxyType({}),
    error_name: str = "",
) -> BuiltPlans:
    """What the trials of a study, of any state, say about the groups; the trial number ``asking`` is left out.

    Faults of the machine (FAIL) say nothing of a plan, nor do plans with a precision that is none of the columns.
    ``errors``, by the number of a trial, take the place of its second objective.
    """
    emulated: dict[str, float] = {}
    entries: list[tuple[str, FrozenTrial, tuple[float, float, float, float]]] = []
    base_ms, base_sd_ms = math.nan, 0.0
    for trial in trials:
        stored: Mapping[str, Any] = trial.user_attrs.get(emulated_attr(error_name), {})
        emulated |= {bits: decode_float(e) for bits, e in stored.items() if len(bits) == len(columns.groups)}
        if trial.number == asking or trial.state is TrialState.FAIL:
            continue
        choices: Mapping[str, Any] = trial.params
        if not trial.state.is_finished():  # what was enqueued for it
            choices = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        row = columns.row(choices)
        if row is None:
            continue
        figures = _figures(trial, errors)
        # All-FP32 has a plan of its own where the search space pins groups to FP16: then it is no row.
        if math.isnan(base_ms) and figures[3] == 1.0 and (PLAN_ATTR in trial.user_attrs or not any(row)):
            base_ms, base_sd_ms = figures[:2]
        if PLAN_ATTR not in trial.user_attrs:
            entries.append((to_bits(np.array(row, dtype=bool)), trial, figures))
    # A plan that failed, and is or was tried again, counts as its last trial says.
    last = {bits: trial for bits, trial, _ in entries}
    counted = [entry for entry in entries if "failure" not in outcome_of(entry[1]) or last[entry[0]] is entry[1]]
    latency_ms, sd_ms, error, finite = np.array([figures for *_, figures in counted], dtype=float).reshape(-1, 4).T
    measured = {bits: figures[2] for bits, _, figures in counted if math.isfinite(figures[2])}
    ratios = [
        max(emulated[bits], ERROR_FLOOR) / value
        for bits, value in measured.items()
        if math.isfinite(emulated.get(bits, math.nan)) and value > ERROR_FLOOR
    ]
    only_emulated = {bits: value for bits, value in emulated.items() if bits not in measured}
    emulated_plans = from_bits(list(only_emulated), len(columns.groups))
    profiles = [outcome_of(trial).get("group_ms") or {} for _, trial, _ in counted]
    group_ms = np.array([[profile.get(group, math.nan) for group in columns.groups] for profile in profiles])
    return BuiltPlans(
        from_bits([bits for bits, *_ in counted], len(columns.groups)),
        latency_ms,
        sd_ms,
        error,
        finite,
        base_ms,
        base_sd_ms,
        emulated=(emulated_plans, np.array(list(only_emulated.values()), dtype=float)),
        emulation_ratios=np.array(ratios, dtype=float),
        group_ms=group_ms if any(profiles) else None,
        failed=np.array(["failure" in outcome_of(trial) for _, trial, _ in counted], dtype=bool),
    )


def _figures(trial: FrozenTrial, errors: Mapping[int, float]) -> tuple[float, float, float, float]:
    """Latency, its standard error, error, and whether the plan is finite, as ``BuiltPlans`` has them."""
    latency_ms, sd_ms = timing_of(trial)
    if trial.state is TrialState.COMPLETE:
        latency_ms, error = trial.values
        return float(latency_ms), sd_ms, float(errors.get(trial.number, error)), 1.0
    if trial.state is TrialState.PRUNED:
        return latency_ms, sd_ms, math.nan, 0.0
    return math.nan, sd_ms, math.nan, math.nan
