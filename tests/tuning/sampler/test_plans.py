"""Minimum cuts against every plan there is."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings, strategies as st

from mptune.tuning.sampler.plans import Boundary, Columns, Crossings, CutSolver, End


def columns(groups: int) -> Columns:
    return Columns.fp16(map(str, range(groups)))


def test_a_huge_term_does_not_round_the_small_ones_away() -> None:
    (plan,) = CutSolver(columns(3), []).solve(np.array([[1e12, -1e-3, 1e-3]]), np.zeros((1, 0)))
    assert plan.tolist() == [False, True, False]


def test_nothing_to_cut() -> None:
    assert CutSolver(columns(0), []).solve(np.zeros((2, 0)), np.zeros((2, 0))).shape == (2, 0)
    assert not CutSolver(columns(2), []).solve(np.zeros((1, 2)), np.zeros((1, 0))).any()


def casts(boundary: Boundary, reduced: tuple[str, ...], plan: np.ndarray) -> int:
    """One for each precision that is read and is not the producer's."""

    def precision(end: End) -> str:
        return end if isinstance(end, str) else reduced[end] if plan[end] else "fp32"

    return len({*map(precision, boundary.readers)} - {precision(boundary.producer)})


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
    counts = Crossings(of_groups, boundaries).count(np.ascontiguousarray(every.T))
    by_hand = [[casts(boundary, of_groups.precisions, plan) for plan in every] for boundary in boundaries]
    assert counts.tolist() == by_hand
    values = unary @ every.T + costs @ counts
    for row, plan in enumerate(CutSolver(of_groups, boundaries).solve(unary, costs)):
        (index,) = np.flatnonzero((every == plan).all(axis=1))
        assert values[row, index] <= values[row].min() + 1e-4
