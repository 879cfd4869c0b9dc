"""The minimum cut against every plan there is."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mptune.tuning.sampler.cuts.boundaries import Boundary, Crossings
from mptune.tuning.sampler.cuts.min_cut import CutSolver


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[Boundary], np.ndarray, np.ndarray]:
    groups = draw(st.integers(1, 6))
    members = st.lists(st.integers(0, groups - 1), min_size=1, max_size=4, unique=True).map(tuple)
    boundaries = draw(st.lists(st.builds(Boundary, members, st.booleans(), st.booleans()), max_size=7))
    value = st.floats(-10, 10, allow_subnormal=False)
    count = draw(st.integers(1, 3))
    unary = [[draw(value) for _ in range(groups)] for _ in range(count)]
    costs = [[abs(draw(value)) for _ in boundaries] for _ in range(count)]
    return groups, boundaries, np.array(unary), np.array(costs).reshape(count, len(boundaries))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_plan_is_better(problem: tuple[int, list[Boundary], np.ndarray, np.ndarray]) -> None:
    groups, boundaries, unary, costs = problem
    every = np.array(list(product([False, True], repeat=groups)))
    crossed = np.array([boundary.crossed(every) for boundary in boundaries]).reshape(len(boundaries), len(every))
    values = unary @ every.T + costs @ crossed
    for row, plan in enumerate(CutSolver(groups, boundaries).solve(unary, costs)):
        (index,) = np.flatnonzero((every == plan).all(axis=1))
        assert values[row, index] <= values[row].min() + 1e-4


def test_ties_are_crossed_unless_all_agree() -> None:
    plans = np.array([[False, False], [True, False], [True, True]])
    assert Boundary((0, 1)).crossed(plans).tolist() == [False, True, False]
    assert Boundary((0, 1), fp32=True).crossed(plans).tolist() == [False, True, True]
    assert Boundary((0, 1), fp16=True).crossed(plans).tolist() == [True, True, False]
    assert Boundary((0,), fp32=True, fp16=True).crossed(plans).all()


@settings(max_examples=50, deadline=None)
@given(problems())
def test_many_ties_are_told_together_as_one_by_one(problem: tuple[int, list[Boundary], np.ndarray, np.ndarray]) -> None:
    groups, boundaries, _, _ = problem
    every = np.array(list(product([False, True], repeat=groups)))
    one_by_one = np.array([boundary.crossed(every) for boundary in boundaries], dtype=bool).reshape(
        len(boundaries), len(every)
    )
    assert (Crossings(boundaries).of(np.ascontiguousarray(every.T)) == one_by_one).all()


def test_a_huge_term_does_not_round_the_small_ones_away() -> None:
    (plan,) = CutSolver(3, []).solve(np.array([[1e12, -1e-3, 1e-3]]), np.zeros((1, 0)))
    assert plan.tolist() == [False, True, False]


def test_nothing_to_cut() -> None:
    assert CutSolver(0, []).solve(np.zeros((2, 0)), np.zeros((2, 0))).shape == (2, 0)
    assert not CutSolver(2, []).solve(np.zeros((1, 2)), np.zeros((1, 0))).any()
