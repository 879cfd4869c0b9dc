"""A small additive law, evaluations of it, and a prior that knows it in part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mptune.tuning.sampler.plans import Boundary
from mptune.tuning.sampler.trials import BuiltPlans, Prior

GROUPS = 10
IDS = tuple(f"g{i}" for i in range(GROUPS))
BOUNDARIES = tuple(Boundary(i, (i + 1,)) for i in range(GROUPS - 1))
RNG = np.random.default_rng(0)
GAINS = RNG.uniform(0.1, 1.0, GROUPS)
COSTS = RNG.uniform(0.0, 0.1, len(BOUNDARIES))
SQUARES = RNG.uniform(-18.0, -9.0, GROUPS)
BASE = 12.0
PLANS = np.vstack([np.zeros(GROUPS, dtype=bool), np.ones(GROUPS, dtype=bool), RNG.random((60, GROUPS)) < 0.5])
NEW = RNG.random((30, GROUPS)) < 0.5


def law(plans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    crossed = (plans[:, 1:] ^ plans[:, :-1]).T
    return BASE - plans @ GAINS + COSTS @ crossed, np.sqrt(plans @ np.exp(SQUARES) + 1e-14)


def built(plans: np.ndarray, **figures: Any) -> BuiltPlans:
    """Finite plans of unknown latency and error, unless figures say other."""
    unknown, count = np.full(len(plans), math.nan), len(plans)
    known = {"latency_ms": unknown, "latency_sd_ms": np.full(count, 1e-3), "error": unknown, "finite": np.ones(count)}
    return BuiltPlans(plans, **{**known, "base_ms": BASE, **figures})


def measured(plans: np.ndarray, **figures: Any) -> BuiltPlans:
    """Plans with what the law says of them."""
    latency, error = law(plans)
    return built(plans, **{"latency_ms": latency, "error": error, **figures})


def prior(**options: Any) -> Prior:
    rng = np.random.default_rng(1)
    known = {
        "log_square_errors": tuple(SQUARES + rng.normal(0, 2.0, GROUPS)),
        "gains_ms": tuple(7.0 * GAINS * rng.lognormal(0, 0.5, GROUPS)),
        "boundaries": BOUNDARIES,
        "boundary_costs_ms": tuple(7.0 * COSTS * rng.lognormal(0, 0.5, len(BOUNDARIES))),
    }
    return Prior(IDS, **{**known, **options})
