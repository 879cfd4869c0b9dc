"""Hypervolume improvement, against the area counted cell by cell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mptune.tuning.dominance import hypervolume_improvement, pareto_staircase
from mptune.tuning.sampler.acquisition import EhviEstimator
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
