"""Optuna's samplers, to compare with: TPE, NSGA-II, GP, random."""

from __future__ import annotations

import warnings

from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler

from mptune.tuning.sampler.precision import make_sampler
from mptune.tuning.sampler.trials import CONSTRAINT_OPTIONS


def make_compared(name: str, seed: int, groups: int) -> BaseSampler:
    """Make one of ``tpe``, ``nsga2``, ``gp`` and ``random``."""
    if name == "gp":
        return GPSampler(seed=seed, deterministic_objective=False)
    if name != "nsga2":
        return make_sampler(None if name == "random" else name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constraints_func is marked experimental in some releases
        # Optuna's default population of 50 would be the whole default budget: one generation, which is random.
        return NSGAIISampler(population_size=max(8, min(50, groups)), seed=seed, **CONSTRAINT_OPTIONS)
