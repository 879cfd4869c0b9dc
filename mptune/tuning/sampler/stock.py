"""Who proposes plans: Optuna's samplers over one categorical per free group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mptune.errors import SettingsError
from mptune.tuning.sampler.precision import PrecisionSampler

CONSTRAINT_ATTR = "constraint"
"""Trial attribute: 0.0 for a feasible plan, 1.0 for one that cannot build or is not finite."""

HAS_TRIAL_CONSTRAINTS = hasattr(optuna.trial.Trial, "set_constraint")
"""Optuna 5 keeps constraints on the trial; before, the sampler asks a function for them."""


def derive_seed(seed: int, trials: int) -> int:
    """A seed that differs for every number of trials, so that a resumed sampler does not repeat itself.

    Args:
        seed: the user's.
        trials: how many trials the study holds already.
    """
    return int(np.random.SeedSequence([seed, trials]).generate_state(1)[0])


def _constraints(trial: FrozenTrial) -> Sequence[float]:
    return (float(trial.user_attrs.get(CONSTRAINT_ATTR, 0.0)),)


def _tpe(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    return TPESampler(multivariate=True, constant_liar=True, seed=seed, **options)


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


def _local(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    return LocalSampler(_tpe(seed, groups, options), seed)


def _nsga2(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    # Optuna's default population of 50 would be the whole default budget: one generation, which is random.
    return NSGAIISampler(population_size=max(8, min(50, groups)), seed=seed, **options)


def _random(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    return RandomSampler(seed=seed)


def _precision(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    return PrecisionSampler(seed=seed)


_SAMPLERS: dict[str, Callable[[int, int, Mapping[str, Any]], BaseSampler]] = {
    "precision": _precision,
    "local": _local,
    "tpe": _tpe,
    "nsga2": _nsga2,
    "random": _random,
}

SAMPLERS = tuple(_SAMPLERS)
"""The names that ``make_sampler`` knows."""


def check_sampler(name: str) -> None:
    """Refuse the name of a sampler that there is not.

    Raises:
        SettingsError: no such sampler.
    """
    if name not in _SAMPLERS:
        raise SettingsError(f"there is no sampler {name!r}", f"choose one of {', '.join(SAMPLERS)}")


def make_sampler(name: str, seed: int, groups: int) -> BaseSampler:
    """Make a sampler by name.

    Args:
        name: one of ``SAMPLERS``.
        seed: already derived from the user's seed and the number of trials (``derive_seed``).
        groups: how many free groups there are.

    Raises:
        SettingsError: no such sampler.
    """
    check_sampler(name)
    options = {} if HAS_TRIAL_CONSTRAINTS else {"constraints_func": _constraints}
    with warnings.catch_warnings():
        # multivariate, constant_liar and constraints_func are marked experimental in some releases.
        warnings.simplefilter("ignore")
        return _SAMPLERS[name](seed, groups, options)
