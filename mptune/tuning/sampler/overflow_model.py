"""Which groups overflow in FP16: the posterior given what was finite and what was not.

Every plan that is not finite has at least one culprit in it, and a finite plan has none: what explains the failures is
a set of groups that meets each of them. The most probable of such sets are enumerated (group testing; minimal hitting
sets, Reiter, Artificial Intelligence 32(1), 1987), and a group is as suspect as the sets that it is in. Where no group
can be blamed, all of a plan's groups together are.
"""

from __future__ import annotations

import math

import numpy as np

from mptune.tuning.sampler.error_model import Observations, Prior, keys
from mptune.tuning.sampler.min_cut import Bools, Floats

_OVERFLOW, _SEEN_OVERFLOW, _CLEARED = 0.01, 0.97, 1e-9
_TOGETHER = 1e-4
"""Odds that it takes all FP16 groups of a failed plan for it to fail: its builder has a fault, or values add up."""

_SIZE, _BEAM = 32, 100
"""Culprits of an explanation, and unfinished explanations of one size that are kept."""

_SETS = 400
"""Explanations that a plan is held against: of more, so many are drawn."""

_MET = 0.7
"""What an unfinished explanation is worth more for each failure that it explains, as a logarithm."""

_NEGLIGIBLE = 0.03
"""Share of the probability that explanations of one more culprit may hold without being looked for."""


class Overflow:
    """The posterior.

    Attributes:
        chances: per group, how probable it is that FP16 fails there: cleared by a finite plan, raised jointly by a
            failed one.
    """

    def __init__(self, prior: Prior, seen: Observations) -> None:
        """Take what emulation foresees, and what was finite, or was not, as built and as emulated."""
        chances = np.full(len(prior.groups), _OVERFLOW)
        if prior.log_square_errors is not None:
            chances[np.isposinf(prior.log_square_errors)] = _SEEN_OVERFLOW
        good, bad = seen.plans[seen.finite == 1.0], seen.plans[seen.finite == 0.0]
        if seen.emulated is not None:
            bad = np.vstack([bad, seen.emulated[0][np.isinf(seen.emulated[1])]])
        chances[good.any(axis=0)] = _CLEARED
        self._alone = np.log1p(-chances)
        # What holds a group that is known to overflow is explained.
        bad = bad[bad.any(axis=1) & ~bad[:, chances > 0.5].any(axis=1)]
        self._sets: Bools = np.zeros((0, len(chances)), dtype=bool)
        self.chances = chances
        if len(bad):
            self._explain(_smallest(bad), np.log(chances / (1.0 - chances)))

    def _explain(self, failures: Bools, log_odds: Floats) -> None:
        """Find who is to blame, and raise the chances."""
        together = np.eye(len(failures), dtype=bool)
        sets, log_odds = explanations(
            np.hstack([failures, together]), np.append(log_odds, np.full(len(failures), math.log(_TOGETHER)))
        )
        weights = np.exp(log_odds - log_odds.max())
        weights /= weights.sum()
        groups = len(self.chances)
        self.chances = np.clip(1.0 - (1.0 - self.chances) * (1.0 - weights @ sets[:, :groups]), 0.0, 1.0 - 1e-9)
        if len(sets) > _SETS:
            drawn = np.random.default_rng(len(sets)).choice(len(sets), _SETS, p=weights)
            sets, weights = sets[drawn], np.full(_SETS, 1.0 / _SETS)
        self._failures, self._sets, self._weights = failures, sets, weights

    def finite(self, plans: Bools) -> Floats:
        """How probable it is that each plan is finite: 0 where it holds all of a plan that failed."""
        chance: Floats = np.exp(plans @ self._alone)
        if len(self._sets):
            single = plans.astype(np.float32)
            whole = single @ self._failures.T.astype(np.float32) == self._failures.sum(axis=1)
            blamed = np.hstack([single, whole]) @ self._sets.T.astype(np.float32)
            chance *= (blamed == 0.0) @ self._weights
        return chance


def explanations(failures: Bools, log_odds: Floats) -> tuple[Bools, Floats]:
    """Sets of culprits of which each failure has one: small ones, the most probable first to be found.

    Args:
        failures: failures x who may be to blame, at least one each; small ones first.
        log_odds: of each, that it is a culprit.

    Returns:
        Sets x who may be to blame, at least one set, and the log odds of each.
    """
    sets, odds = np.zeros((1, failures.shape[1]), dtype=bool), np.zeros(1)
    met = np.zeros((1, len(failures)), dtype=bool)
    found: list[tuple[Bools, Floats]] = []
    total, likely = 0.0, np.exp(log_odds)
    for size in range(1, _SIZE + 1):
        # All ways to explain the smallest failure that is not explained yet.
        ways = failures[np.argmin(met, axis=1)]
        if float(np.exp(odds) @ (ways @ likely)) < _NEGLIGIBLE * total:
            break
        parents, culprits = np.nonzero(ways)
        larger = sets[parents]
        larger[np.arange(len(larger)), culprits] = True
        first = np.unique(keys(larger), return_index=True)[1]
        parents, culprits, sets = parents[first], culprits[first], larger[first]
        odds, met = odds[parents] + log_odds[culprits], met[parents] | failures.T[culprits]
        # Of the last size, what there is.
        whole = met.all(axis=1) if size < _SIZE or total > 0 else np.ones(len(met), dtype=bool)
        found.append((sets[whole], odds[whole]))
        total += float(np.exp(odds[whole]).sum())
        best = np.argsort(-(odds + _MET * met.sum(axis=1))[~whole], kind="stable")[:_BEAM]
        sets, odds, met = (each[~whole][best] for each in (sets, odds, met))
        if not len(sets):
            break
    return np.concatenate([s for s, _ in found]), np.concatenate([o for _, o in found])


def _smallest(failures: Bools) -> Bools:
    """Those that hold no other one, which says the same more exactly; small ones first."""
    failures = np.unique(failures, axis=0)
    sizes = failures.sum(axis=1)
    common = failures.astype(np.float32) @ failures.T.astype(np.float32)
    within = (common == sizes[None, :]) & (sizes[None, :] < sizes[:, None])
    kept = ~within.any(axis=1)
    order = np.argsort(sizes[kept], kind="stable")
    smallest: Bools = failures[kept][order]
    return smallest
