"""Doubts that several terms of the additive law share: a roofline that is wrong is wrong for all groups of a kind.

The law's terms are mixtures of deviations of their own and of common ones (a hierarchical linear model: Gelman et al.,
Bayesian Data Analysis, 3rd edition, 2013, Section 15.1): a few timings tell of what many terms share. On plans of ten
networks timed on an H200, taken in random order with 0.33 % noise, predictions are off by 14 % less after 5 plans with
them, 13 % less after 15 and 16 % less after 50 (``benchmarks.latency_prediction`` of commit 672f8217).
"""

from __future__ import annotations

import numpy as np

from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import Prior

_COSTS_FACTOR, _COSTS_MORE = 0.5, 0.15
"""Doubt of the costs of all boundaries: as a share of each, and an equal amount, as a share of a group's mean gain."""

_GAINS_FACTOR, _OPERATOR_FACTOR = 0.2, 0.3
"""Doubt of the gains of all groups, and of those that have an operator, as a share of each gain."""

_BEYOND_FACTOR = 0.5
"""The same of the gains of groups that may not have the preferred precision. What overflows is of one kind in most
networks: in one whose nine norms do, they all are slower in BF16 on an H200, where the roofline has them gain."""

_SHRUNK = 0.8
"""Power of the prior's gains that is more likely than the gains themselves: what is estimated with an error regresses
towards the mean. Without it predictions on measured networks are off by 3 to 7 % more
(``benchmarks.latency_prediction`` of commit 672f8217)."""

_ALIKE_DIFFER = 0.05
"""Doubt of what BF16 saves beyond FP16 in the same group, as a share of the doubt of what FP16 saves."""


def expected_gains(prior: Prior) -> Floats:
    """What each group is expected to save, up to a common factor, shape (n_groups,)."""
    gains = np.ones(len(prior.groups)) if prior.gains_ms is None else np.array(prior.gains_ms, dtype=float)
    if prior.exact or not gains.any():
        return gains
    shrunk = np.sign(gains) * np.abs(gains) ** _SHRUNK
    expected: Floats = shrunk * (np.abs(gains).sum() / np.abs(shrunk).sum())
    return expected


def mix(prior: Prior, mean: Floats, *, profiled: bool) -> tuple[Floats, Floats]:
    """How the law's terms deviate from the prior's mean, in ms, shape (n_terms,).

    With ``mixing``, shape (n_terms, n_terms + n_common), the terms are ``mean + mixing @ deviations``: one of their own
    for each, and those that they share, whose standard deviations follow. An engine's profiler's gains share no doubts.
    """
    mixing = np.eye(len(mean))
    for first, second in prior.alike:
        mixing[second, first], mixing[second, second] = 1.0, _ALIKE_DIFFER
    if prior.exact:
        return mixing, np.zeros(0)
    n_groups = len(prior.groups)
    operators = shared_operators(prior)
    beyond = prior.unpreferred[:, None]
    beyond = beyond[:, beyond.any(axis=0)]
    doubts = [_GAINS_FACTOR] + [_OPERATOR_FACTOR] * operators.shape[1] + [_BEYOND_FACTOR] * beyond.shape[1]
    kinds = np.hstack([np.ones((n_groups, 1)), operators, beyond])
    if profiled:
        kinds, doubts = kinds[:, :0], []
    gains = mean[:n_groups, None]
    common = np.zeros((len(mean), 2 + kinds.shape[1]))
    common[n_groups:-1, 0] = mean[n_groups:-1]
    common[n_groups:-1, 1] = np.abs(gains).mean()
    common[:n_groups, 2:] = gains * kinds
    for first, second in prior.alike:
        common[second] = common[first]
    return np.hstack([mixing, common]), np.array([_COSTS_FACTOR, _COSTS_MORE, *doubts])


def shared_operators(prior: Prior) -> Bools:
    """Which groups have each operator that several groups have, shape (n_groups, n_operators).

    Operators of the same groups are one.
    """
    if not prior.operators:
        return np.zeros((len(prior.groups), 0), dtype=bool)
    names = sorted({name for own in prior.operators for name in own})
    rows = [[name in own for own in prior.operators] for name in names]
    has = np.array(rows, dtype=bool).reshape(-1, len(prior.groups))
    has = np.unique(has[has.sum(axis=1) > 1], axis=0)
    return np.ascontiguousarray(has.T)
