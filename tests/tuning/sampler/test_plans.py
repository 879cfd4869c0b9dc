"""Minimum cuts against every plan there is."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mptune.tuning.sampler.plans import Boundary, Columns, Crossings, CutSolver, End


def columns(groups: int) -> Columns:
    return Columns.fp16(map(str, range(groups)))


def crossed(boundary: Boundary, plans: np.ndarray) -> np.ndarray:
    """Unless all of its ends have one precision."""
    part, ends = plans[:, list(boundary.members)], (boundary.producer, *boundary.readers)
    some, every = part.any(axis=1) | ("fp16" in ends), part.all(axis=1) & ("fp32" not in ends)
    different: np.ndarray = some & ~every
    return different


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[Boundary], np.ndarray, np.ndarray]:
    groups = draw(st.integers(1, 6))
    members = st.lists(st.integers(0, groups - 1), min_size=1, max_size=4, unique=True).map(tuple)
    fixed = st.sampled_from(((), ("fp32",), ("fp16",), ("fp32", "fp16")))
    drawn = draw(st.lists(st.tuples(members, fixed), max_size=7))
    boundaries = [Boundary((*own, *others)[0], (*own, *others)[1:]) for own, others in drawn]
    value = st.floats(-10, 10, allow_subnormal=False)
    count = draw(st.integers(1, 3))
    unary = [[draw(value) for _ in range(groups)] for _ in range(count)]
    costs = [[abs(draw(value)) for _ in boundaries] for _ in range(count)]
    return groups, boundaries, np.array(unary), np.array(costs).reshape(count, len(boundaries))


@settings(max_examples=50, deadline=None)
@given(problems())
def test_many_ties_are_told_together_as_one_by_one(problem: tuple[int, list[Boundary], np.ndarray, np.ndarray]) -> None:
    groups, boundaries, _, _ = problem
    every = np.array(list(product([False, True], repeat=groups)))
    one_by_one = np.array([crossed(boundary, every) for boundary in boundaries], dtype=bool).reshape(
        len(boundaries), len(every)
    )
    assert (Crossings(columns(groups), boundaries).count(np.ascontiguousarray(every.T)) == one_by_one).all()


def test_a_huge_term_does_not_round_the_small_ones_away() -> None:
    (plan,) = CutSolver(columns(3), []).solve(np.array([[1e12, -1e-3, 1e-3]]), np.zeros((1, 0)))
    assert plan.tolist() == [False, True, False]


def test_nothing_to_cut() -> None:
    assert CutSolver(columns(0), []).solve(np.zeros((2, 0)), np.zeros((2, 0))).shape == (2, 0)
    assert not CutSolver(columns(2), []).solve(np.zeros((1, 2)), np.zeros((1, 0))).any()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_no_plan_is_better_where_groups_differ_in_their_reduced_precision(seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    of_groups = Columns(tuple(map(str, range(groups))), tuple(map(str, rng.choice(["fp16", "bf16"], groups))))
    ends: list[End] = [*range(groups), "fp32", "fp16", "bf16"]
    drawn = [[ends[at] for at in rng.permutation(len(ends))[: rng.integers(2, 5)]] for _ in range(rng.integers(7))]
    boundaries = [Boundary(producer, tuple(readers)) for producer, *readers in drawn]
    every = np.array(list(product([False, True], repeat=groups)))
    unary, costs = rng.normal(-0.2, 1.0, (2, groups)), rng.uniform(0.0, 0.8, (2, len(boundaries)))
    values = unary @ every.T + costs @ Crossings(of_groups, boundaries).count(np.ascontiguousarray(every.T))
    for row, plan in enumerate(CutSolver(of_groups, boundaries).solve(unary, costs)):
        (index,) = np.flatnonzero((every == plan).all(axis=1))
        assert values[row, index] <= values[row].min() + 1e-4


def test_casts_are_counted_once_for_each_precision_that_is_read() -> None:
    boundaries = [Boundary(0, (1, "fp32")), Boundary("fp32", (0, 1)), Boundary(0, ("bf16",))]
    plans = np.array([[0, 0], [1, 1], [0, 1], [1, 0]], dtype=bool)
    counts = Crossings(Columns(("a", "b"), ("bf16", "fp16")), boundaries).count(np.ascontiguousarray(plans.T))
    assert counts.T.tolist() == [[0, 0, 1], [2, 2, 0], [1, 1, 1], [1, 1, 0]]
