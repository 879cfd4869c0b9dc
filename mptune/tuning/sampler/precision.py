"""PrecisionSampler: proposes the plan that the additive law expects to add most to the front.

Usable with Optuna alone: one categorical ``"fp32"``/``"fp16"`` per group, two objectives to minimise, latency in
milliseconds and error, the latency of all-FP32 among the trials. It keeps no state: each proposal rebuilds the
posterior from the study's trials, what was emulated for them too, so that studies can be shared and resumed. An
example, without a prior::

    import mptune
    import optuna

    gains_ms = {"conv": 0.4, "norm": 0.01, "attention": 0.3, "head": 0.1}
    errors = {"conv": 1e-4, "norm": 8e-3, "attention": 2e-3, "head": 3e-4}

    def objective(trial):  # in earnest: build the plan, time it, compare its outputs
        fp16 = [group for group in gains_ms if trial.suggest_categorical(group, ("fp32", "fp16")) == "fp16"]
        return 2.0 - sum(gains_ms[group] for group in fp16), sum(errors[group] ** 2 for group in fp16) ** 0.5 + 1e-7

    study = optuna.create_study(directions=["minimize", "minimize"], sampler=mptune.PrecisionSampler(seed=0))
    study.enqueue_trial(dict.fromkeys(gains_ms, "fp32"))  # the baseline, before anything is proposed
    study.optimize(objective, n_trials=10)
    for trial in study.best_trials:
        print(trial.values, trial.params)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from mptune.data.numbers import decode_float, encode_float
from mptune.tuning.sampler.acquisition import Box
from mptune.tuning.sampler.candidates import gather
from mptune.tuning.sampler.error_model import ERROR_FLOOR, Observations, Prior
from mptune.tuning.sampler.min_cut import Bools, CutSolver

MEASURED_ATTR = "measured"
"""Trial attribute: ``{"latency_ms", "sd_ms"}``: the latency, also of a plan whose outputs are not finite, and its
standard error; ``"group_ms"`` beside them: what groups took by the engine's own profiler, where it has one."""

PROMISE_ATTR = "promise"
"""Trial attribute: by how much the hypervolume (0 to 1) was expected to grow when the plan was proposed."""

EMULATED_ATTR = "emulated plans"
"""Trial attribute: the plans that were emulated when it was asked for, in the order of the groups as in ``"0110"`` with
1 for FP16, and their errors."""

REFERENCE_ERROR = 3e-2
_CHOICES = ("fp32", "fp16")
_DIRECTIONS = [StudyDirection.MINIMIZE, StudyDirection.MINIMIZE]
_FINALISTS = 300
_EMULATED_AT_A_TIME, _EMULATIONS = 4, 3


Emulate = Callable[[Sequence[Mapping[str, str]]], Sequence[float]]
"""Plans, each as free group -> ``"fp16"`` or ``"fp32"`` -> their errors, ``inf`` where not finite."""


class PrecisionSampler(BaseSampler):
    """See the module. Thread-safe as far as Optuna's studies are."""

    def __init__(
        self,
        prior: Prior | None = None,
        seed: int | None = None,
        error_scale: float | None = None,
        emulate: Emulate | None = None,
    ) -> None:
        """Make the sampler.

        Args:
            prior: what is known before any build; None learns from evaluations alone.
            seed: the same study, prior and seed give the same proposal.
            error_scale: error past which a plan is worth nothing; None takes 3e-2, SEARCH.md's; ``inf`` the largest one
                seen.
            emulate: gives the errors of plans before they are built; NaN where it cannot.
        """
        self._prior = prior
        self._emulate = emulate
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self._random = RandomSampler(seed=self._seed)
        self._reference = error_scale or REFERENCE_ERROR
        self._cut: tuple[Prior, CutSolver] | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every group that the prior names; without one, every precision that earlier trials had."""
        if self._prior is not None:
            return {group: CategoricalDistribution(_CHOICES) for group in self._prior.groups}
        for other in study.get_trials(deepcopy=False):
            found = {k: d for k, d in other.distributions.items() if _is_precision(d)}
            if found and other.number != trial.number:
                return dict(found)
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The most promising plan; nothing before a plan without FP16 has been timed."""
        if not search_space:
            return {}
        prior = self._prior or Prior(tuple(search_space))
        trials = study.get_trials(deepcopy=False)
        if study.directions != _DIRECTIONS and any(prior.groups[0] in t.params for t in trials):
            raise ValueError("PrecisionSampler needs a study with directions=['minimize', 'minimize']: latency, error")
        seen = observe_trials(trials, prior.groups, trial.number)
        if not math.isfinite(seen.base_ms):
            return {}
        generator = np.random.default_rng([self._seed, trial.number])
        plan, promise, told = self.propose(prior, seen, generator)
        if plan is None:
            return {}
        attrs = {PROMISE_ATTR: promise, **({EMULATED_ATTR: told} if told else {})}
        for name, value in attrs.items():
            study._storage.set_trial_user_attr(trial._trial_id, name, value)
        return _choices(prior, plan)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random, where nothing is known."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Draws a new seed."""
        self._seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._random.reseed_rng()

    def propose(
        self, prior: Prior, seen: Observations, generator: np.random.Generator
    ) -> tuple[Bools | None, float, dict[str, float | str]]:
        """The plan with the largest expected gain of hypervolume times its chance to be finite.

        The finalists are emulated, a few at a time, until the best of them is one whose error is known.

        Args:
            prior: what is known beforehand.
            seen: what has been or is being evaluated, or emulated; its ``base_ms`` must be known.
            generator: of the draws.

        Returns:
            One row, True is FP16 (None where every plan is known), what it promises, and the errors that were emulated
            for it, as ``EMULATED_ATTR`` has them.
        """
        reference = self._reference
        if math.isinf(reference):
            reference = max(float(np.nanmax(seen.error, initial=0.0)), 10 * ERROR_FLOOR)
        if self._cut is None or self._cut[0] is not prior:
            self._cut = prior, CutSolver(len(prior.groups), prior.ties)
        box = Box(prior, seen, reference, generator)
        finalists = gather(prior, box, self._cut[1], seen.plans, generator).best(_FINALISTS)
        if not len(finalists):
            return None, 0.0, {}
        errors = box.emulated(finalists)
        asked, told = ~np.isnan(errors), dict[str, float | str]()
        for round_ in range(_EMULATIONS + 1):
            promises = np.where(np.isposinf(errors), -1.0, box.expected(finalists, errors))
            order = np.argsort(-promises, kind="stable")
            if self._emulate is None or asked[order[0]] or round_ == _EMULATIONS:
                break
            few = order[~asked[order]][:_EMULATED_AT_A_TIME]
            errors[few] = self._emulate([_choices(prior, plan) for plan in finalists[few]])
            asked[few] = True
            told.update({_bits(finalists[i]): encode_float(errors[i]) for i in few if not math.isnan(errors[i])})
        return finalists[order[0]], max(float(promises[order[0]]), 0.0), told


def _choices(prior: Prior, plan: Bools) -> dict[str, str]:
    return {group: _CHOICES[int(half)] for group, half in zip(prior.groups, plan, strict=True)}


def _bits(plan: Bools) -> str:
    return "".join("01"[int(half)] for half in plan)


def _rows(texts: Sequence[str]) -> Bools:
    """The plans that ``_bits`` wrote."""
    return np.array([[bit == "1" for bit in text] for text in texts], dtype=bool)


def _is_precision(distribution: BaseDistribution) -> bool:
    return isinstance(distribution, CategoricalDistribution) and set(distribution.choices) == set(_CHOICES)


def observe_trials(trials: Sequence[FrozenTrial], groups: Sequence[str], asking: int) -> Observations:
    """What the trials of a study say about the groups.

    Args:
        trials: of any state; those that failed through the machine say nothing.
        groups: ids of the free groups.
        asking: number of the trial that a plan is wanted for.
    """
    rows: list[tuple[list[bool], float, float, float, float]] = []
    profiles: list[Mapping[str, float]] = []
    base, base_sd = math.nan, 0.0
    emulated: dict[str, float | str] = {}
    for trial in trials:
        emulated.update(trial.user_attrs.get(EMULATED_ATTR, {}))
        choices: Mapping[str, Any] = trial.params
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            choices = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        if trial.number == asking or trial.state is TrialState.FAIL or any(g not in choices for g in groups):
            continue
        measured: Mapping[str, Any] = trial.user_attrs.get(MEASURED_ATTR, {})
        latency, error, finite = measured.get("latency_ms", math.nan), math.nan, 0.0
        if trial.state is TrialState.COMPLETE:
            latency, error = trial.values
            finite = 1.0
        elif trial.state is not TrialState.PRUNED:
            latency, finite = math.nan, math.nan
        row = [choices[g] == "fp16" for g in groups]
        outside = "plan" in trial.user_attrs  # all-FP32 where the space pins groups to FP16
        if finite == 1.0 and math.isnan(base) and (outside or not any(row)):
            base, base_sd = float(latency), float(measured.get("sd_ms", 0.0))
        if not outside:
            profiles.append(measured.get("group_ms", {}))
            rows.append((row, float(latency), float(measured.get("sd_ms", 0.0)), float(error), finite))
    plans = np.array([r[0] for r in rows], dtype=bool).reshape(len(rows), len(groups))
    figures = np.array([r[1:] for r in rows], dtype=float).reshape(len(rows), 4)
    known = {_bits(row): error for row, error in zip(plans, figures[:, 2], strict=True) if math.isfinite(error)}
    told = {p: decode_float(e) for p, e in emulated.items() if len(p) == len(groups)}
    only = {p: e for p, e in told.items() if p not in known}
    both = [(told[p], e) for p, e in known.items() if math.isfinite(told.get(p, math.inf)) and e > ERROR_FLOOR]
    group_ms = None
    if any(profiles):
        group_ms = np.array([[profile.get(g, math.nan) for g in groups] for profile in profiles], dtype=float)
    return Observations(
        plans,
        figures[:, 0],
        figures[:, 1],
        figures[:, 2],
        figures[:, 3],
        base,
        base_sd,
        emulated=(_rows(list(only)), np.array(list(only.values()))) if only else None,
        emulation_ratios=np.array([max(e, ERROR_FLOOR) / measured for e, measured in both]),
        group_ms=group_ms,
    )
