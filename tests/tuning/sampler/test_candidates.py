"""The pool of plans that might be proposed: what is in it, and that widening it finds better ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mptune.tuning.sampler.acquisition import CandidatePool, EhviEstimator, exact_optima, find_candidates
from mptune.tuning.sampler.plans import Boundary, CutSolver, plan_keys
from mptune.tuning.sampler.trials import BuiltPlans, Prior


def make(groups: int) -> tuple[Prior, BuiltPlans, EhviEstimator]:
    rng = np.random.default_rng(groups)
    ids = tuple(f"g{i}" for i in range(groups))
    boundaries = tuple(Boundary(i, (i + 1,)) for i in range(groups - 1))
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
    pool = find_candidates(prior, estimator, seen.plans, np.random.default_rng(0))
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
    whole = find_candidates(prior, estimator, seen.plans, np.random.default_rng(0))
    assert float(estimator.screen(whole.best(1))[2][0]) >= 0.9 * float(estimator.screen(pool.best(1))[2][0])
    assert not {*plan_keys(seen.plans)} & {*plan_keys(whole.best(10**6))}


def test_a_group_that_may_overflow_stays_fp32_in_the_exact_optima_unless_it_gains_more() -> None:
    """Its risk is ``-0.5 * base * log(1 - p)``, 0.35 of the base at p = 0.5: more than group 1 gains, less than 2."""
    prior, _, estimator = make(20)
    gains = np.full(20, 0.3)
    gains[2] = 9.0
    estimator.latency_terms[:] = np.concatenate([gains, np.zeros(20)])
    estimator.log_squares[:] = -15.0
    probabilities = np.full(20, 1e-9)
    probabilities[1:3] = 0.5
    estimator.overflow.probabilities = probabilities
    optima = exact_optima(CutSolver(prior.columns, prior.boundaries), estimator, np.random.default_rng(0))
    assert len(np.unique(optima, axis=0)) > 1
    assert not optima[:, 1].any()
    assert optima[optima.any(axis=1), 2].all()


def test_neighbours_of_the_best_plans_are_all_of_one_flip_and_of_both_sides_of_a_boundary() -> None:
    prior, _, estimator = make(15)
    pool = CandidatePool(estimator, 15)
    start = np.zeros((1, 15), dtype=bool)
    start[0, [3, 4, 9]] = True
    pool.add(start)
    boundaries = (*prior.boundaries, Boundary(0, (7, 9, "fp32")), Boundary(14, ("fp32",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mptune.tuning.sampler.acquisition._NEIGHBOUR_ROUNDS", 1)
        pool.add_neighbours(replace(prior, boundaries=boundaries), np.random.default_rng(0))
    found = set(plan_keys(pool.plans))
    one = np.eye(15, dtype=bool)
    for masks in (one, one[:-1] | one[1:], one[:1] | one[7:8]):
        assert set(plan_keys(start ^ masks)) <= found
    together = np.vstack([one, one[:-1] | one[1:], one[:1] | one[7:8]])
    best = together[np.argsort(-estimator.screen(start ^ together)[2], kind="stable")[:4]]
    best_together = np.vstack([best[:1] ^ best[1:2], best[1:2] ^ best[2:3]])
    assert set(plan_keys(start ^ best_together)) <= found, "and what the best of them differ in together"
