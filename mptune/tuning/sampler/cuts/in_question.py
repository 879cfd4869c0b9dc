"""Searches of several reduced precisions: which columns may be proposed next.

BF16 costs what FP16 does and is less exact (``Precision.backs_up``), so that it is in question where FP16 overflows, or
may, and around such groups, where it saves Casts. Wherever it is not, the search is one of the preferred precisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.group_tests.overflow_model import OverflowModel
from mptune.tuning.sampler.plan_rows import Bools, from_bits, to_bits
from mptune.tuning.sampler.posterior import BuiltPlans, Prior

_SUSPECT = 0.05
"""Probability that a group overflows in FP16 from which on it may be BF16: after a failure of a plan that says little
every one of its groups has about 1 / n."""

_NEEDED = 0.5
"""From which on the groups around it may be BF16, too: in a gap of up to two groups between two such ones, BF16 saves
two Casts."""


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
        if not errors:
            return {}
        rows = np.zeros((len(errors), self.n_columns), dtype=bool)
        rows[:, self.columns] = from_bits(list(errors))
        return {to_bits(row): error for row, error in zip(rows, errors.values(), strict=True)}


def narrowed(prior: Prior, built: BuiltPlans) -> Narrowed:
    """Take only the further columns that are in question, or in plans that were built."""
    if not prior.further:
        return Narrowed(prior, built, np.arange(len(prior.groups)), len(prior.groups))
    columns = np.flatnonzero(_in_question(prior, built))
    return Narrowed(prior.of_columns(columns), built.of_columns(columns), columns, len(prior.groups))


def _in_question(prior: Prior, built: BuiltPlans) -> Bools:
    """Which columns may be proposed now, shape (n_columns,)."""
    first, further = np.array(prior.further).T
    p_overflow = OverflowModel(prior, built).probabilities
    near = prior.unpreferred | (p_overflow > _NEEDED)
    near[further] = False
    home = np.arange(len(prior.groups))  # the preferred column of each column's group
    home[further] = first
    around = [np.unique(home[list(boundary.members)]) for boundary in prior.boundaries if boundary.members]
    touched = near.copy()
    for groups in around:
        if near[groups].any():
            touched[groups] = True
    backs_up = np.array([prior.rows[b].backs_up(prior.rows[a]) for a, b in prior.further])
    in_question = np.ones(len(prior.groups), dtype=bool)
    used = built.plans[:, further].any(axis=0)
    in_question[further] = ~backs_up | touched[first] | (p_overflow[first] > _SUSPECT) | used
    return in_question
