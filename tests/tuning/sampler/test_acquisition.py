"""Candidate plans and what they are worth: hypervolume improvement against the area counted cell by cell, the pool."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.tuning.dominance import hypervolume_improvement, pareto_staircase
from mptune.tuning.sampler.acquisition import CandidatePool, EhviEstimator, exact_optima, find_candidates
from mptune.tuning.sampler.plans import Boundary, CutSolver, plan_keys
from mptune.tuning.sampler.trials import BuiltPlans, Prior

PRIOR = Prior(("a", "b", "c"), (-14.0, -10.0, -9.0), (0.2, 0.3, 0.1))
PLANS = np.array([[False] * 3, [True] * 3, [True, False, False]])
LATENCY, ERROR = np.array([1.0, 0.4, 0.8]), np.array([1e-7, 1.3e-2, 1e-3])
cells = st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), max_size=6)


def covered(points: list[tuple[int, int]]) -> int:
    return sum(any(x < g and y < h for g, h in points) for x in range(8) for y in range(8))


@given(cells, st.lists(st.tuples(st.integers(-2, 8), st.integers(-2, 8)), min_size=1, max_size=3))
def test_the_area_that_points_add(front: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
    front_gain, front_exact = pareto_staircase(*np.array(front, dtype=float).reshape(-1, 2).T)
    assert (np.diff(front_gain) >= 0).all()
    assert (np.diff(front_exact) < 0).all()
    areas = hypervolume_improvement(*np.array(new, dtype=float).T, front_gain, front_exact)
    assert areas.tolist() == [covered([*front, point]) - covered(front) for point in new]
    alone = hypervolume_improvement(*np.array(new, dtype=float).T, *np.zeros((2, 0)))
    assert alone.tolist() == [covered([point]) for point in new], "no steps are no steps"


def seen(finite: list[float], emulated: tuple[np.ndarray, np.ndarray] | None = None) -> BuiltPlans:
    done = np.array(finite) == 1.0
    latency, error = np.where(done, LATENCY, math.nan), np.where(done, ERROR, math.nan)
    return BuiltPlans(PLANS, latency, np.full(3, 1e-3), error, np.array(finite), 1.0, 1e-3, emulated)


def estimator(observed: BuiltPlans) -> EhviEstimator:
    return EhviEstimator(PRIOR, observed, np.random.default_rng(0))


def test_what_is_built_or_being_built_improves_nothing_more() -> None:
    for finite in ([1.0, 1.0, 1.0], [1.0, 1.0, math.nan]):
        judged = estimator(seen(finite))
        assert judged.is_new(PLANS).tolist() == [False] * 3
        assert judged.ehvi(PLANS) == pytest.approx([0.0] * 3, abs=1e-3)
        other = np.array([[False, False, True]])
        assert judged.is_new(other).all()
    assert estimator(seen([1.0, 1.0, 0.0])).ehvi(PLANS)[2] == pytest.approx(0.0, abs=2e-2), "its one group failed"


def test_an_emulated_error_goes_before_the_predicted_one() -> None:
    plan = np.array([[True, True, False]])
    judged = estimator(seen([1.0, 1.0, 1.0]))
    ehvi = [float(judged.ehvi(plan, np.array([error]))[0]) for error in (1e-4, math.nan, 2e-2, math.inf)]
    assert ehvi == sorted(ehvi, reverse=True)
    assert ehvi[0] > ehvi[1] > ehvi[3] == 0.0
    told = estimator(seen([1.0, 1.0, 1.0], (plan, np.array([2e-2]))))
    assert told.emulated_errors(np.vstack([plan, PLANS[:1]])) == pytest.approx([2e-2, math.nan], nan_ok=True)


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
