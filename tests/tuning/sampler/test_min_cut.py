"""Minimum cuts against every plan there is, of two precisions and of three."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mptune.tuning.sampler.cuts.boundaries import Boundary, Crossings, End
from mptune.tuning.sampler.cuts.min_cut import CutSolver
from mptune.tuning.sampler.plan_rows import Columns


def columns(groups: int) -> Columns:
    return Columns.fp16(map(str, range(groups)))


def crossed(boundary: Boundary, plans: np.ndarray) -> np.ndarray:
    """Unless all of its ends have one precision."""
    part = plans[:, list(boundary.members)]
    some, every = part.any(axis=1) | ("fp16" in boundary.fixed), part.all(axis=1) & ("fp32" not in boundary.fixed)
    different: np.ndarray = some & ~every
    return different


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[Boundary], np.ndarray, np.ndarray]:
    groups = draw(st.integers(1, 6))
    members = st.lists(st.integers(0, groups - 1), min_size=1, max_size=4, unique=True).map(tuple)
    fixed = st.sampled_from(((), ("fp32",), ("fp16",), ("fp32", "fp16")))
    drawn = draw(st.lists(st.tuples(members, fixed), max_size=7))
    boundaries = [Boundary.among(own, *others) for own, others in drawn]
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
    counts = np.array([crossed(boundary, every) for boundary in boundaries]).reshape(len(boundaries), len(every))
    values = unary @ every.T + costs @ counts
    for row, plan in enumerate(CutSolver(columns(groups), boundaries).solve(unary, costs)):
        (index,) = np.flatnonzero((every == plan).all(axis=1))
        assert values[row, index] <= values[row].min() + 1e-4


@settings(max_examples=50, deadline=None)
@given(problems())
def test_many_ties_are_told_together_as_one_by_one(problem: tuple[int, list[Boundary], np.ndarray, np.ndarray]) -> None:
    groups, boundaries, _, _ = problem
    every = np.array(list(product([False, True], repeat=groups)))
    one_by_one = np.array([crossed(boundary, every) for boundary in boundaries], dtype=bool).reshape(
        len(boundaries), len(every)
    )
    assert (Crossings(columns(groups), boundaries).of(np.ascontiguousarray(every.T)) == one_by_one).all()


def test_a_huge_term_does_not_round_the_small_ones_away() -> None:
    (plan,) = CutSolver(columns(3), []).solve(np.array([[1e12, -1e-3, 1e-3]]), np.zeros((1, 0)))
    assert plan.tolist() == [False, True, False]


def test_nothing_to_cut() -> None:
    assert CutSolver(columns(0), []).solve(np.zeros((2, 0)), np.zeros((2, 0))).shape == (2, 0)
    assert not CutSolver(columns(2), []).solve(np.zeros((1, 2)), np.zeros((1, 0))).any()


THREE = ("fp32", "fp16", "bf16")


def drawn(rng: np.random.Generator, n_groups: int) -> tuple[Columns, list[Boundary]]:
    """A chain with branches: groups of two precisions and of three, and readers of one precision under every plan."""
    options = [[("fp16",), ("bf16",), ("fp16", "bf16"), ("fp16", "bf16")][rng.integers(4)] for _ in range(n_groups)]
    pairs = [(str(group), name) for group, own in enumerate(options) for name in own]
    ends: list[End] = [tuple(c for c, (g, _) in enumerate(pairs) if g == str(group)) for group in range(n_groups)]
    boundaries = [Boundary("fp32", (ends[0],))]
    for i in range(n_groups - 1):
        readers = [ends[i + 1]]
        if i + 3 < n_groups and rng.random() < 0.4:
            readers.append(ends[i + 3])
        if rng.random() < 0.3:
            readers.append(THREE[rng.integers(3)])
        boundaries.append(Boundary(ends[i], tuple(readers)))
    return Columns(*map(tuple, zip(*pairs, strict=True))), boundaries


def test_of_three_precisions_hardly_any_plan_is_better() -> None:
    rng = np.random.default_rng(0)
    missed = []
    for _ in range(40):
        of_three, boundaries = drawn(rng, 5)
        plans = [dict(zip(of_three.options, names, strict=True)) for names in product(*of_three.options.values())]
        every = np.array([of_three.row(plan) for plan in plans])
        unary, costs = rng.normal(-0.2, 1.0, every.shape[1]), rng.uniform(0.0, 0.8, len(boundaries))
        values = every @ unary + costs @ Crossings(of_three, boundaries).of(np.ascontiguousarray(every.T))
        (plan,) = CutSolver(of_three, boundaries).solve(unary[None], costs[None])
        (index,) = np.flatnonzero((every == plan).all(axis=1))
        missed.append(values[index] - values.min())
    assert min(missed) > -1e-9
    assert np.mean(np.array(missed) > 1e-6) <= 0.05
    assert max(missed) < 0.2


def test_casts_are_counted_once_for_each_precision_that_is_read() -> None:
    both, fp16 = (0, 1), (2,)
    boundaries = [Boundary(both, (fp16, "fp32")), Boundary("fp32", (both, fp16)), Boundary(both, ("bf16",))]
    plans = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 1], [0, 1, 0], [1, 0, 0]], dtype=bool)
    counts = Crossings(Columns(("a", "a", "b"), ("fp16", "bf16", "fp16")), boundaries).of(np.ascontiguousarray(plans.T))
    assert counts.T.tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 0], [1, 1, 0], [1, 1, 1]]
