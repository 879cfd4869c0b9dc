"""Posteriors of which groups overflow in FP16, and of which do not build or run, given what came of the plans."""

from __future__ import annotations

import numpy as np

from mptune.graph.precision import Precision
from mptune.tuning.sampler.group_test import GroupTest
from mptune.tuning.sampler.posterior import BuiltPlans, Prior

_OVERFLOW, _EMULATED_OVERFLOW = 0.01, 0.97
"""Prior probability that a group overflows: by default, where its one-group emulation does."""

_WIDE_OVERFLOW = 1e-4
"""The same of a precision with FP32's range, such as BF16."""

_FAILS = 0.01
"""Prior probability that no plan with a group in FP16 builds and runs."""

_TOGETHER = 1e-4
"""Odds that an overflow takes all FP16 groups of its plan: values add up."""

_PLAN_FAILS = 0.1
"""Odds that a plan fails to build or run, and none of its groups is to blame: the fault is the engine's. As likely as
that one of ten groups is to blame; several plans that failed and share few groups tell."""


class OverflowModel(GroupTest):
    """The posterior of which groups overflow; learns from outputs that are not finite, and from emulation.

    Attributes:
        probabilities: that FP16 overflows in each group, shape (n_groups,).
    """

    def __init__(self, prior: Prior, built: BuiltPlans) -> None:
        """Condition on one-group emulation, on what was built, and on whole plans that overflowed in emulation."""
        probabilities = np.full(len(prior.groups), _OVERFLOW)
        is_wide = [Precision.named(name).exponents == Precision.FP32.exponents for name in prior.columns.precisions]
        probabilities[is_wide] = _WIDE_OVERFLOW
        if prior.log_square_errors is not None:
            probabilities[np.isposinf(prior.log_square_errors)] = _EMULATED_OVERFLOW
        failed = built.plans[(built.finite == 0.0) & ~built.gave_nothing]
        emulated, errors = built.emulations
        failed = np.vstack([failed, emulated[np.isinf(errors)]])
        super().__init__(probabilities, built.plans[built.finite == 1.0], failed, _TOGETHER)


class FailureModel(GroupTest):
    """The posterior of which groups keep a plan from building or running; learns from plans that gave no outputs.

    A failure says much of its own plan, and of others only as far as several failures share groups.

    Attributes:
        probabilities: that no plan with the group in FP16 runs, shape (n_groups,).
    """

    def __init__(self, prior: Prior, built: BuiltPlans) -> None:
        """Condition on what was built."""
        ran = ~np.isnan(built.finite) & ~built.gave_nothing
        probabilities = np.full(len(prior.groups), _FAILS)
        super().__init__(probabilities, built.plans[ran], built.plans[built.gave_nothing], _PLAN_FAILS)
