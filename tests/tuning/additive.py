"""A small additive law, evaluations of it, and a prior that knows it in part."""

from __future__ import annotations

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


def law(plans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    crossed = (plans[:, 1:] ^ plans[:, :-1]).T
    return BASE - plans @ GAINS + COSTS @ crossed, np.sqrt(plans @ np.exp(SQUARES) + 1e-14)


def seen(plans: np.ndarray, finite: np.ndarray | None = None) -> BuiltPlans:
    latency, error = law(plans)
    count = len(plans)
    return BuiltPlans(plans, latency, np.full(count, 1e-3), error, np.ones(count) if finite is None else finite, BASE)


def prior(**options: object) -> Prior:
    rng = np.random.default_rng(1)
    known = {
        "log_square_errors": tuple(SQUARES + rng.normal(0, 2.0, GROUPS)),
        "gains_ms": tuple(7.0 * GAINS * rng.lognormal(0, 0.5, GROUPS)),
        "boundaries": BOUNDARIES,
        "boundary_costs_ms": tuple(7.0 * COSTS * rng.lognormal(0, 0.5, len(BOUNDARIES))),
        **options,
    }
    return Prior(IDS, **known)  # type: ignore[arg-type]


PLANS = np.vstack([np.zeros(GROUPS, dtype=bool), np.ones(GROUPS, dtype=bool), RNG.random((60, GROUPS)) < 0.5])
NEW = RNG.random((30, GROUPS)) < 0.5
