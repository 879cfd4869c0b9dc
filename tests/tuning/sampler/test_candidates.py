"""The pool of plans that might be proposed: what is in it, and that widening it finds better ones."""

from __future__ import annotations

import numpy as np

from mptune.tuning.sampler.acquisition import EhviEstimator
from mptune.tuning.sampler.boundaries import Boundary
from mptune.tuning.sampler.candidates import CandidatePool, find_candidates
from mptune.tuning.sampler.min_cut import CutSolver
from mptune.tuning.sampler.plan_rows import plan_keys
from mptune.tuning.sampler.posterior import BuiltPlans, Prior


def make(groups: int) -> tuple[Prior, BuiltPlans, EhviEstimator]:
    rng = np.random.default_rng(groups)
    ids = tuple(f"g{i}" for i in range(groups))
    boundaries = tuple(Boundary((i, i + 1)) for i in range(groups - 1))
    prior = Prior(
        ids, tuple(rng.uniform(-18, -9, groups)), tuple(rng.uniform(0, 1, groups)), boundaries, (0.1,) * len(boundaries)
    )
    plans = np.array([[False] * groups, [True] * groups])
    base = float(groups)
    latency, error = np.array([base, 0.6 * base]), np.array([1e-7, 1e-2])
    seen = BuiltPlans(plans, latency, np.full(2, 1e-3), error, np.ones(2), base, 1e-3)
    return prior, seen, EhviEstimator(prior, seen, np.random.default_rng(0))


def test_a_small_space_is_looked_through() -> None:
    prior, seen, estimator = make(6)
    pool = find_candidates(prior, estimator, CutSolver(6, prior.boundaries), seen.plans, np.random.default_rng(0))
    assert len(set(plan_keys(pool.plans))) == len(pool.plans) == 2**6
    best = pool.best(100)
    assert len(best) == 2**6 - 2, "what is evaluated is not among them"
    ehvi = estimator.screen(best)[2]
    assert (np.diff(ehvi) <= 1e-12).all()


def test_neighbours_have_at_least_the_ehvi_of_the_exact_optima() -> None:
    prior, seen, estimator = make(30)
    pool = CandidatePool(estimator, 30)
    pool.add(np.eye(30, dtype=bool))
    before = float(estimator.screen(pool.best(1))[2][0])
    pool.add_neighbours(prior, np.random.default_rng(0))
    assert float(estimator.screen(pool.best(1))[2][0]) > 1.5 * before
    assert len(set(plan_keys(pool.plans))) == len(pool.plans)
    whole = find_candidates(prior, estimator, CutSolver(30, prior.boundaries), seen.plans, np.random.default_rng(0))
    assert float(estimator.screen(whole.best(1))[2][0]) >= 0.9 * float(estimator.screen(pool.best(1))[2][0])
    assert not {*plan_keys(seen.plans)} & {*plan_keys(whole.best(10**6))}
