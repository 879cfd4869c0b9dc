"""Searches of three precisions: which groups may be BF16 beside FP16 in the next proposal.

FP16 costs what BF16 does and is more exact, so that BF16 is in question where FP16 overflows, or may, and around such
groups, where it saves Casts. Wherever it is not, the search is one of two precisions, to the last number.

A plan has a column for each group, True where the group has the reduced precision that it prefers, and behind them one
more for each group that may have both, True where it is BF16. The models of errors, of overflows and of latency take
columns for groups; of two columns of a group (twins) at most one is True.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mptune.graph.plan import Precision
from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.cuts.casts import NEVER, Casts, End
from mptune.tuning.sampler.cuts.expansion import ExpansionSolver
from mptune.tuning.sampler.cuts.min_cut import CutSolver
from mptune.tuning.sampler.group_tests.overflow_model import OverflowModel
from mptune.tuning.sampler.plan_rows import Bools, Floats, from_bits, plan_keys, to_bits
from mptune.tuning.sampler.posterior import BuiltPlans, Prior

_BF16 = str(Precision.BF16)

_SUSPECT = 0.05
"""Probability that a group overflows in FP16 from which on it may be BF16: after a failure of a plan that says little
every one of its groups has about 1 / n."""

_NEEDED = 0.5
"""From which on the groups around it may be BF16, too."""

_AROUND = 1
"""Tensors between a group that is BF16 or FP32 for its range and those that may be BF16 for its sake: in a gap of up to
two groups between two such ones, BF16 saves two Casts."""

_LESS_EXACT = 8.0
"""BF16 has 8 bits where FP16 has 11: so many times is the error of a group that is finite in both."""

_ASSUMED_SD = 0.5
"""Standard deviation of the log of a squared error that is taken from the group's error in FP16."""

_UNKNOWN_SD = 3.0
"""The same where FP16 overflows: a factor of 4.5 in the error."""

T = TypeVar("T")


def all_columns(prior: Prior) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The group and the precision of every column, those of the alternatives included."""
    if prior.alternatives is None:
        return prior.groups, prior.reduced
    more = tuple(prior.groups[position] for position in prior.alternatives.groups)
    return (*prior.groups, *more), (*_preferred(prior), *(_BF16,) * len(more))


def choices_by_group(prior: Prior) -> dict[str, tuple[str, ...]]:
    """Every precision that each group may have, FP32 first."""
    choices: dict[str, tuple[str, ...]] = {}
    for group, precision in zip(*_named(prior), strict=True):
        choices[group] = (*choices.get(group, (str(Precision.FP32),)), precision)
    return choices


def _named(prior: Prior) -> tuple[tuple[str, ...], tuple[str, ...]]:
    groups, reduced = all_columns(prior)
    return groups, reduced or (str(Precision.FP16),) * len(groups)


def _preferred(prior: Prior) -> tuple[str, ...]:
    return prior.reduced or (str(Precision.FP16),) * len(prior.groups)


@dataclass(frozen=True)
class Narrowed:
    """A search without the columns that are in no question now.

    Attributes:
        prior: of the other columns.
        built: plans of these columns.
        columns: which of all columns they are.
        n_columns: how many columns there are in all.
    """

    prior: Prior
    built: BuiltPlans
    columns: NDArray[np.int64]
    n_columns: int

    def widened(self, errors: Mapping[str, float | str]) -> dict[str, float | str]:
        """Errors of plans by their bits, with the bits of all columns."""
        if self.n_columns == len(self.columns) or not errors:
            return dict(errors)
        rows = np.zeros((len(errors), self.n_columns), dtype=bool)
        rows[:, self.columns] = from_bits(list(errors))
        return {to_bits(row): error for row, error in zip(rows, errors.values(), strict=True)}


def narrowed(prior: Prior, built: BuiltPlans) -> Narrowed:
    """Take only the alternatives that are in question, or in plans that were built.

    Args:
        prior: of all groups.
        built: plans of ``all_columns``.
    """
    n_groups = len(prior.groups)
    if prior.alternatives is None:
        return Narrowed(prior, built, np.arange(n_groups), n_groups)
    wide = _wide(prior)
    active = np.flatnonzero(_in_question(prior, wide, built))
    columns = np.append(np.arange(n_groups), n_groups + active)
    chosen = _picked(wide, columns, active) if len(active) else replace(prior, alternatives=None)
    return Narrowed(chosen, built.of_columns(columns), columns, len(wide.groups))


def _wide(prior: Prior) -> Prior:
    """With a column for every alternative, and with what is cast in place of the boundaries of two precisions."""
    more = prior.alternatives
    assert more is not None
    groups, reduced = all_columns(prior)
    # What FP16 cannot do is no fault of BF16, nor the reverse: the operators of a twin are others.
    operators = [frozenset(f"{_BF16} {op}" for op in prior.operators[g]) for g in more.groups if prior.operators]
    twins = tuple((position, len(prior.groups) + index) for index, position in enumerate(more.groups))
    squares, sds = prior.log_square_errors, prior.log_square_sds
    if squares is not None:
        own_sds = sds or (0.0,) * len(prior.groups)
        known = zip(more.groups, more.log_square_errors, more.log_square_sds, strict=True)
        found = [
            (square, sd) if not math.isnan(square) else _assumed(squares[g], own_sds[g]) for g, square, sd in known
        ]
        squares = (*squares, *(square for square, _ in found))
        sds = (*own_sds, *(sd for _, sd in found))
    return replace(
        prior,
        groups=groups,
        reduced=reduced,
        log_square_errors=squares,
        log_square_sds=sds,
        gains_ms=_with_twins(more.gains_ms, more.groups),
        boundaries=more.tensors,
        boundary_costs_ms=more.costs_ms,
        fixed_gain_ms=more.fixed_gain_ms,
        operators=(*prior.operators, *operators),
        part_shares=_with_twins(prior.part_shares, more.groups),
        alternatives=None,
        twins=twins,
    )


def _assumed(square: float, sd: float) -> tuple[float, float]:
    """Log of a group's squared error in BF16, and its standard deviation, from those in FP16."""
    if not math.isfinite(square):
        return math.nan, _UNKNOWN_SD
    return square + 2.0 * math.log(_LESS_EXACT), math.hypot(sd, _ASSUMED_SD)


def _with_twins(values: tuple[T, ...] | None, groups: tuple[int, ...]) -> tuple[T, ...] | None:
    """Values of all columns: those of the twins are their groups'."""
    return None if values is None else (*values, *(values[group] for group in groups))


def _in_question(prior: Prior, wide: Prior, built: BuiltPlans) -> Bools:
    """Which alternatives may be proposed now, shape (n_alternatives,)."""
    more, n_groups = prior.alternatives, len(prior.groups)
    assert more is not None
    positions = np.array(more.groups, dtype=np.int64)
    p_overflow = OverflowModel(wide, built).probabilities[:n_groups]
    is_bf16 = np.array([name == _BF16 for name in _preferred(prior)])
    near = is_bf16 | (p_overflow > _NEEDED)
    home = np.append(np.arange(n_groups), positions)  # the group of each column
    around = [np.unique(home[list(one.members)]) for one in more.tensors if one.members]
    for _ in range(_AROUND):
        touched = near.copy()
        for groups in around:
            if near[groups].any():
                touched[groups] = True
        near = touched
    used = built.plans[:, n_groups:].any(axis=0)
    in_question: Bools = near[positions] | (p_overflow[positions] > _SUSPECT) | used
    return in_question


def _picked(wide: Prior, columns: NDArray[np.int64], active: NDArray[np.int64]) -> Prior:
    """The wide prior with some of its columns."""
    places = np.full(len(wide.groups), NEVER)
    places[columns] = np.arange(len(columns))

    def of(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(values[c] for c in columns)

    tensors = [one.moved(places.tolist()) for one in wide.boundaries if isinstance(one, Casts)]
    return replace(
        wide,
        groups=tuple(wide.groups[c] for c in columns),
        reduced=tuple(wide.reduced[c] for c in columns),
        log_square_errors=of(wide.log_square_errors),
        log_square_sds=of(wide.log_square_sds),
        gains_ms=of(wide.gains_ms),
        boundaries=tuple(tensors),
        operators=tuple(wide.operators[c] for c in columns) if wide.operators else (),
        part_shares=None if wide.part_shares is None else tuple(wide.part_shares[c] for c in columns),
        twins=tuple((wide.twins[a][0], len(columns) - len(active) + i) for i, a in enumerate(active)),
    )


def ends_of(prior: Prior) -> list[End]:
    """The columns of each group for FP16 and BF16."""
    twin_of = dict(prior.twins)
    n_groups = len(prior.groups) - len(prior.twins)
    names = _preferred(prior)
    return [
        (c, twin_of[c]) if c in twin_of else (NEVER, c) if names[c] == _BF16 else (c, NEVER) for c in range(n_groups)
    ]


def unknown_alone(prior: Prior, p_overflow: Floats, known: Bools) -> Bools:
    """Plans of one group in BF16 whose error is not known, those first that are the most likely to overflow in FP16.

    Where the error in FP16 is known, that in BF16 is known by it.

    Args:
        prior: of the columns that are in question.
        p_overflow: of each column, shape (n_columns,).
        known: plans whose errors are known, shape (n_plans, n_columns).
    """
    squares = prior.log_square_errors
    guessed = [twins for twins in prior.twins if squares is None or not math.isfinite(squares[twins[1]])]
    ranked = sorted(guessed, key=lambda twins: -p_overflow[twins[0]])
    alone = np.eye(len(prior.groups), dtype=bool)[[second for _, second in ranked]]
    unknown: Bools = alone[~np.isin(plan_keys(alone), plan_keys(known))]
    return unknown


Solver = CutSolver | ExpansionSolver
"""Finds the plans that minimise unary terms and what their boundaries cost."""


def make_solver(prior: Prior) -> Solver:
    """The solver of a search: an exact one where each group has two precisions."""
    tensors = [one for one in prior.boundaries if isinstance(one, Casts)]
    if prior.twins:
        return ExpansionSolver(ends_of(prior), tensors)
    return CutSolver(len(prior.groups), [one for one in prior.boundaries if isinstance(one, Boundary)])


def exclusive(plans: Bools, before: Bools, twins: tuple[tuple[int, int], ...]) -> Bools:
    """Plans with at most one of two twins: the one that is new where both are True.

    Args:
        plans: shape (n_plans, n_columns); changed in place.
        before: what each was made from, the same shape, or one that becomes it.
        twins: positions of the columns of one group, that of BF16 second.
    """
    for first, second in twins:
        both = plans[:, first] & plans[:, second]
        if both.any():
            plans[:, first] &= ~(both & ~before[:, second])
            plans[:, second] &= ~(both & before[:, second])
    return plans
