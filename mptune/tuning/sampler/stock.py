"""The samplers that a search may be asked for by name: ``precision``, and Optuna's TPE."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from mptune.errors import SettingsError
from mptune.tuning.sampler.precision import PrecisionSampler
from mptune.tuning.sampler.trials import HAS_TRIAL_CONSTRAINTS, constraints_of

SAMPLERS = ("precision", "tpe")
"""The names that ``make_sampler`` knows."""


def derive_seed(seed: int, trials: int) -> int:
    """A seed that differs for every number of trials, so that a resumed sampler does not repeat itself."""
    return int(np.random.SeedSequence([seed, trials]).generate_state(1)[0])


def check_sampler(name: str) -> None:
    """Refuse a name that is no sampler's."""
    if name not in SAMPLERS:
        hint = f"choose one of {', '.join(SAMPLERS)}; a run that used another one goes on with any"
        raise SettingsError(f"there is no sampler {name!r}", hint)


def make_sampler(name: str | None, seed: int) -> BaseSampler:
    """Make a sampler by name; None, where all plans are enqueued, is uniformly random."""
    if name is None:
        return RandomSampler(seed=seed)
    check_sampler(name)
    return PrecisionSampler(seed=seed) if name == "precision" else make_tpe(seed)


def make_tpe(seed: int) -> BaseSampler:
    """Optuna's TPE over all groups at once, aware of running trials and of constraints."""
    options: dict[str, Any] = {} if HAS_TRIAL_CONSTRAINTS else {"constraints_func": constraints_of}
    with warnings.catch_warnings():
        # multivariate, constant_liar and constraints_func are marked experimental in some releases.
        warnings.simplefilter("ignore")
        return TPESampler(multivariate=True, constant_liar=True, seed=seed, **options)
