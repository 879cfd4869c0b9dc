"""Plans of three precisions by expansions: against all plans of small problems, and against the cut of two labels."""

from __future__ import annotations

import itertools

import numpy as np

from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.cuts.casts import FIXED, NEVER, CastCounts, Casts, End
from mptune.tuning.sampler.cuts.expansion import ExpansionSolver
from mptune.tuning.sampler.cuts.min_cut import CutSolver


def drawn(rng: np.random.Generator, n_groups: int) -> tuple[list[End], list[Casts], int]:
    """A chain with branches: groups of two precisions and of three, and readers of one precision under every plan."""
    ends: list[End] = []
    column = 0
    for _ in range(n_groups):
        kind = rng.integers(4)
        ends.append([(column, NEVER), (NEVER, column), *[(column, column + 1)] * 2][kind])
        column += 1 if kind < 2 else 2
    tensors = [Casts(FIXED[0], (ends[0],))]
    for i in range(n_groups - 1):
        readers = [ends[i + 1]]
        if i + 3 < n_groups and rng.random() < 0.4:
            readers.append(ends[i + 3])
        if rng.random() < 0.3:
            readers.append(FIXED[rng.integers(3)])
        tensors.append(Casts(ends[i], tuple(readers)))
    return ends, tensors, column


def value(plans: np.ndarray, unary: np.ndarray, costs: np.ndarray, tensors: list[Casts]) -> np.ndarray:
    found: np.ndarray = plans @ unary + costs @ CastCounts(tensors).of(np.ascontiguousarray(plans.T))
    return found


def test_hardly_any_plan_is_better() -> None:
    rng = np.random.default_rng(0)
    missed = []
    for _ in range(40):
        ends, tensors, n_columns = drawn(rng, 5)
        choices = [[NEVER, *(c for c in end if c != NEVER)] for end in ends]
        every = np.zeros((len(list(itertools.product(*choices))), n_columns + 1), dtype=bool)
        for row, chosen in zip(every, itertools.product(*choices), strict=True):
            row[list(chosen)] = True
        every = every[:, :-1]
        unary, costs = rng.normal(-0.2, 1.0, n_columns), rng.uniform(0.0, 0.8, len(tensors))
        best = value(every, unary, costs, tensors).min()
        found = ExpansionSolver(ends, tensors).solve(unary[None], costs[None])
        assert (found[:, :, None] == every.T[None]).all(axis=1).any(), "it is one of the plans"
        missed.append(value(found, unary, costs, tensors)[0] - best)
    assert min(missed) > -1e-9
    assert np.mean(np.array(missed) > 1e-6) <= 0.05
    assert max(missed) < 0.2


def test_of_two_labels_it_is_the_exact_cut() -> None:
    rng = np.random.default_rng(1)
    n = 12
    ends = [(i, NEVER) for i in range(n)]
    tensors = [Casts(ends[i], (ends[i + 1],)) for i in range(n - 1)] + [Casts(FIXED[0], (ends[0],))]
    boundaries = [*(Boundary((i, i + 1)) for i in range(n - 1)), Boundary((0,), fp32=True)]
    unary, costs = rng.normal(-0.1, 1.0, (30, n)), rng.uniform(0.0, 1.0, (30, n))
    assert (ExpansionSolver(ends, tensors).solve(unary, costs) == CutSolver(n, boundaries).solve(unary, costs)).all()


def test_casts_are_counted_once_for_each_precision_that_is_read() -> None:
    both, fp16 = (0, 1), (2, NEVER)
    tensors = [Casts(both, (fp16, FIXED[0])), Casts(FIXED[0], (both, fp16)), Casts(both, (FIXED[2],))]
    plans = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 1], [0, 1, 0], [1, 0, 0]], dtype=bool)
    counts = CastCounts(tensors).of(np.ascontiguousarray(plans.T))
    assert counts.T.tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 0], [1, 1, 0], [1, 1, 1]]
