"""Posterior of cliffs: groups that make every plan that holds them in FP16 slower by a large part of the model.

As where an operator has no FP16 kernel and its nodes fall to the CPU (GridSample in ONNX Runtime's CUDA provider: RAFT
takes 45 ms instead of 4). The toolchain does not announce that, so that it is met in builds: a plan far slower than the
additive law allows holds such a group, a plan that the law explains holds none. What a cliff costs need not be known:
FP16 that costs more than FP32 is wanted in no plan. The suspects are the groups, and the operators: where one is to
blame, all of its groups are.
"""

from __future__ import annotations

import numpy as np

from mptune.tuning.sampler.common_terms import shared_operators
from mptune.tuning.sampler.group_tests.group_test import GroupTest
from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import Prior

_GROUP, _OPERATOR = 0.04, 0.1
"""Prior probability that a group, and an operator of several groups, is a cliff, once a plan was far too slow: then an
operator without an FP16 kernel is the likely reason, and most operators are soon cleared."""

_ODD = 0.02
"""Odds that a plan was slow by chance, and none of its groups is to blame: something else disturbed the machine."""


class CliffModel(GroupTest):
    """The posterior of which groups, and which operators, are cliffs; without a slow plan there are none.

    Attributes:
        group_probabilities: that each group is a cliff, by itself or by one of its operators, shape (n_groups,).
    """

    _drawn_sets = 128

    def __init__(self, prior: Prior, plans: Bools, slow: Bools) -> None:
        """Condition on timed plans, and which of them are far slower than the additive law allows."""
        self._has_operator = shared_operators(prior)  # (n_groups, n_operators)
        fast, failed = plans[~slow], plans[slow]
        # A plan whose groups were all in FP16 in fast plans, such as the same one timed again, was slow by chance.
        failed = failed[(failed & ~fast.any(axis=0)).any(axis=1)]
        self._is_active = bool(len(failed))
        if not self._is_active:
            fast = fast[:0]
        probabilities = np.zeros(len(prior.groups) + self._has_operator.shape[1])
        if self._is_active:
            probabilities[: len(prior.groups)] = _GROUP
            probabilities[len(prior.groups) :] = _OPERATOR
        super().__init__(probabilities, self._suspects(fast), self._suspects(failed), _ODD, by_chance=True)
        own, by_operator = np.split(self.probabilities, [len(prior.groups)])
        self.group_probabilities: Floats = 1.0 - (1.0 - own) * np.prod(1.0 - self._has_operator * by_operator, axis=1)

    def _suspects(self, plans: Bools) -> Bools:
        """Which groups, and which operators, are in FP16 in each plan, shape (n_plans, n_groups + n_operators)."""
        return np.hstack([plans, plans.astype(np.float32) @ self._has_operator.astype(np.float32) > 0])

    def p_fast(self, plans: Bools) -> Floats:
        """Probability that each plan holds no cliff, shape (n_plans,)."""
        if not self._is_active:
            return np.ones(len(plans))
        return self.p_sound(self._suspects(plans))
