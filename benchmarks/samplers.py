"""Samplers to compare with, no part of mptune: TPE in turn with neighbours of the front, NSGA-II, random, GP."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mptune.tuning.sampler.precision import make_sampler, make_tpe
from mptune.tuning.sampler.trials import HAS_TRIAL_CONSTRAINTS, constraints_of


def make_compared(name: str, seed: int, groups: int) -> BaseSampler:
    """Make one of ``local``, ``tpe``, ``nsga2``, ``gp`` and ``random``."""
    if name == "local":
        return LocalSampler(make_tpe(seed), seed)
    if name == "gp":
        return GPSampler(seed=seed, deterministic_objective=False)
    if name != "nsga2":
        return make_sampler(None if name == "random" else name, seed)
    options: dict[str, Any] = {} if HAS_TRIAL_CONSTRAINTS else {"constraints_func": constraints_of}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constraints_func is marked experimental in some releases
        # Optuna's default population of 50 would be the whole default budget: one generation, which is random.
        return NSGAIISampler(population_size=max(8, min(50, groups)), seed=seed, **options)


class LocalSampler(BaseSampler):
    """TPE in turn with neighbours of the front: one run of adjacent groups changes its precision.

    A group that changes alone adds two boundaries, each with a Cast, so good plans hold long runs of one precision.
    TPE flips groups one by one and seldom finds them.
    """

    def __init__(self, tpe: BaseSampler, seed: int) -> None:
        self._tpe = tpe
        self._rng = np.random.default_rng(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """What TPE models: every free group."""
        return self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A neighbour of a plan of the front, or TPE's proposal; each half of the time."""
        front = [t for t in study.best_trials if search_space.keys() == t.params.keys()]
        if not front or not search_space or self._rng.random() < 0.5:
            return self._tpe.sample_relative(study, trial, search_space)
        params = dict(front[int(self._rng.integers(len(front)))].params)
        groups = sorted(params)  # ids are in topological order
        start = int(self._rng.integers(len(groups)))
        length = min(int(self._rng.geometric(3 / max(4, len(groups)))), len(groups) - start)
        precision = "fp16" if params[groups[start]] == "fp32" else "fp32"
        return params | dict.fromkeys(groups[start : start + length], precision)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """TPE's, before there is anything to learn from."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Passed on to TPE."""
        self._tpe.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Passed on to TPE, which keeps the constraints."""
        self._tpe.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        """Passed on to TPE; draws anew itself."""
        self._tpe.reseed_rng()
        self._rng = np.random.default_rng()
