"""Who proposes plans: Optuna's samplers over one categorical per free group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from mptune.errors import SettingsError

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


def _nsga2(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    # Optuna's default population of 50 would be the whole default budget: one generation, which is random.
    return NSGAIISampler(population_size=max(8, min(50, groups)), seed=seed, **options)


def _random(seed: int, groups: int, options: Mapping[str, Any]) -> BaseSampler:
    return RandomSampler(seed=seed)


_SAMPLERS: dict[str, Callable[[int, int, Mapping[str, Any]], BaseSampler]] = {
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
