"""Candidate plans and what they are worth: hypervolume improvement against the area counted cell by cell, the pool."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mptune.tuning.dominance import hypervolume_improvement, pareto_staircase
from mptune.tuning.sampler.acquisition import CandidatePool, EhviEstimator, exact_optima, find_candidates
from mptune.tuning.sampler.plans import Boundary, CutSolver, plan_keys
from mptune.tuning.sampler.trials import BuiltPlans, Prior
from tests.tuning.additive import built

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


PLANS = np.array([[False] * 3, [True] * 3, [True, False, False]])


def judge(finite: list[float], emulated: tuple[np.ndarray, np.ndarray] | None = None) -> EhviEstimator:
    """What is expected where these of the plans are finite; 0 is a failure, NaN is running."""
    latency, error = (np.where(np.array(finite) == 1.0, f, math.nan) for f in ([1.0, 0.4, 0.8], [1e-7, 1.3e-2, 1e-3]))
    figures = {"base_ms": 1.0, "base_sd_ms": 1e-3, "emulated": emulated}
    done = built(PLANS, latency_ms=latency, error=error, finite=np.array(finite), **figures)
    prior = Prior(("a", "b", "c"), (-14.0, -10.0, -9.0), (0.2, 0.3, 0.1))
    return EhviEstimator(prior, done, np.random.default_rng(0))


@pytest.mark.parametrize("last", [1.0, math.nan, 0.0], ids=["built", "being built", "its one group failed"])
def test_what_is_built_or_being_built_improves_nothing_more(last: float) -> None:
    judged = judge([1.0, 1.0, last])
    assert judged.is_new(PLANS).tolist() == [False] * 3
    assert judged.ehvi(PLANS) == pytest.approx([0.0] * 3, abs=2e-2 if last == 0.0 else 1e-3)
    assert judged.is_new(np.array([[False, False, True]])).all()


def test_an_emulated_error_goes_before_the_predicted_one() -> None:
    plan = np.array([[True, True, False]])
    judged = judge([1.0, 1.0, 1.0])
    ehvi = [float(judged.ehvi(plan, np.array([error]))[0]) for error in (1e-4, math.nan, 2e-2, math.inf)]
    assert ehvi == sorted(ehvi, reverse=True)
    assert ehvi[0] > ehvi[1] > ehvi[3] == 0.0
    told = judge([1.0, 1.0, 1.0], (plan, np.array([2e-2])))
    assert told.emulated_errors(np.vstack([plan, PLANS[:1]])) == pytest.approx([2e-2, math.nan], nan_ok=True)


def make(groups: int) -> tuple[Prior, BuiltPlans, EhviEstimator]:
    """With all-FP32 and all-FP16 built."""
    rng, boundaries = np.random.default_rng(groups), tuple(Boundary(i, (i + 1,)) for i in range(groups - 1))
    squares, gains = tuple(rng.uniform(-18, -9, groups)), tuple(rng.uniform(0, 1, groups))
    prior = Prior(tuple(map(str, range(groups))), squares, gains, boundaries, (0.1,) * len(boundaries))
    figures = {"latency_ms": np.array([1.0, 0.6]) * groups, "error": np.array([1e-7, 1e-2]), "base_ms": float(groups)}
    seeds = built(np.array([[False] * groups, [True] * groups]), base_sd_ms=1e-3, **figures)
    return prior, seeds, EhviEstimator(prior, seeds, np.random.default_rng(0))


def test_a_small_space_is_looked_through() -> None:
    prior, seeds, estimator = make(6)
    pool = find_candidates(prior, estimator, seeds.plans, np.random.default_rng(0))
    assert len(set(plan_keys(pool.plans))) == len(pool.plans) == 2**6
    best = pool.best(100)
    assert len(best) == 2**6 - 2, "what is evaluated is not among them"
    assert (np.diff(estimator.screen(best)[2]) <= 1e-12).all()


def test_neighbours_have_at_least_the_ehvi_of_the_exact_optima() -> None:
    prior, seeds, estimator = make(30)
    pool = CandidatePool(estimator, 30)
    pool.add(np.eye(30, dtype=bool))
    before = estimator.screen(pool.best(1))[2][0]
    pool.add_neighbours(prior, np.random.default_rng(0))
    after = estimator.screen(pool.best(1))[2][0]
    assert after > 1.5 * before
    assert len(set(plan_keys(pool.plans))) == len(pool.plans)
    whole = find_candidates(prior, estimator, seeds.plans, np.random.default_rng(0))
    assert estimator.screen(whole.best(1))[2][0] >= 0.9 * after
    assert not {*plan_keys(seeds.plans)} & {*plan_keys(whole.best(10**6))}


def test_a_group_that_may_overflow_stays_fp32_in_the_exact_optima_unless_it_gains_more() -> None:
    """Its risk is ``-0.5 * base * log(1 - p)``, 0.35 of the base at p = 0.5: more than group 1 gains, less than 2."""
    prior, _, estimator = make(20)
    estimator.latency_terms[:] = [9.0 if group == 2 else 0.3 for group in range(20)] + [0.0] * 20
    estimator.log_squares[:] = -15.0
    estimator.overflow.probabilities = np.array([0.5 if group in (1, 2) else 1e-9 for group in range(20)])
    optima = exact_optima(CutSolver(prior.columns, prior.boundaries), estimator, np.random.default_rng(0))
    assert len(np.unique(optima, axis=0)) > 1
    assert not optima[:, 1].any()
    assert optima[optima.any(axis=1), 2].all()
