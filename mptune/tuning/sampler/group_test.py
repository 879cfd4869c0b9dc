"""Group tests: which groups of the plans that failed are to blame, whatever it is that failed.

A failed plan holds at least one group that is to blame, a sound plan none. A set of groups that meets every failure (a
hitting set) explains them; the most probable minimal ones are enumerated (Reiter, A theory of diagnosis from first
principles, Artificial Intelligence 32(1), 1987), and a group's probability is that of the sets that it is in. Where no
single group can explain a failure, all of the plan's groups together do, or it came by chance.
"""

from __future__ import annotations

import math

import numpy as np

from mptune.tuning.sampler.plan_rows import Bools, Floats, plan_keys

_CLEARED = 1e-9
"""Probability that a group of a sound plan is to blame."""

_LARGEST_SET, _BEAM = 32, 100
"""Groups of a hitting set at most, and unfinished sets that are kept at each size."""

_EXPLAINED_BONUS = 0.7
"""Beam search ranks unfinished sets by log odds plus this for each failure that they explain."""

_DRAWN_SETS = 400
"""Hitting sets that plans are held against; where there are more, this many are drawn."""

_NEGLIGIBLE = 0.03
"""The search ends where larger sets hold less than this share of the probability."""


class GroupTest:
    """The posterior of which groups are to blame.

    Attributes:
        probabilities: that each group is to blame, shape (n_groups,): cleared by sound plans, raised jointly by
            failures.
    """

    def __init__(self, probabilities: Floats, sound: Bools, failed: Bools, together: float) -> None:
        """Condition the prior on plans.

        Args:
            probabilities: prior probability that each group is to blame, shape (n_groups,).
            sound: plans that hold no such group, shape (n_sound, n_groups).
            failed: plans that failed, shape (n_failed, n_groups).
            together: odds that a failure takes all groups of its plan, and no group alone is to blame: then plans that
                hold all of its groups fail, too.
        """
        probabilities[sound.any(axis=0)] = _CLEARED
        self._log_sound = np.log1p(-probabilities)
        self._together = math.log(together)
        # A failure with a group that is known to be to blame is explained by that.
        failed = failed[failed.any(axis=1) & ~failed[:, probabilities > 0.5].any(axis=1)]
        self._sets: Bools = np.zeros((0, len(probabilities)), dtype=bool)
        self.probabilities = probabilities
        if len(failed):
            self._explain(_smallest(failed), np.log(probabilities / (1.0 - probabilities)))

    def _explain(self, failures: Bools, log_odds: Floats) -> None:
        """Enumerate hitting sets of the failures, and raise the probabilities of the groups in them."""
        together = np.eye(len(failures), dtype=bool)  # one more suspect per failure: all its groups at once
        sets, set_log_odds = hitting_sets(
            np.hstack([failures, together]), np.append(log_odds, np.full(len(failures), self._together))
        )
        weights = np.exp(set_log_odds - set_log_odds.max())
        weights /= weights.sum()
        explained = weights @ sets[:, : len(log_odds)]
        self.probabilities = np.clip(1.0 - (1.0 - self.probabilities) * (1.0 - explained), 0.0, 1.0 - 1e-9)
        if len(sets) > _DRAWN_SETS:
            drawn = np.random.default_rng(len(sets)).choice(len(sets), _DRAWN_SETS, p=weights)
            sets, weights = sets[drawn], np.full(_DRAWN_SETS, 1.0 / _DRAWN_SETS)
        self._failures, self._sets, self._weights = failures, sets, weights

    def p_sound(self, plans: Bools) -> Floats:
        """Probability that each plan is sound, shape (n_plans,)."""
        probability: Floats = np.exp(plans @ self._log_sound)
        if len(self._sets):
            groups = plans.astype(np.float32)
            whole = groups @ self._failures.T.astype(np.float32) == self._failures.sum(axis=1)
            suspects, named = np.hstack([groups, whole]), self._sets.any(axis=0)
            overlap = suspects[:, named] @ self._sets[:, named].T.astype(np.float32)  # (n_plans, n_sets)
            probability *= (overlap == 0.0) @ self._weights
        return probability


def hitting_sets(failures: Bools, log_odds: Floats) -> tuple[Bools, Floats]:
    """Sets of suspects that meet every failure, by beam search from small sets to large ones, and their log odds.

    Each failure, shape (n_failures, n_suspects), has one suspect at least; small failures come first.
    """
    sets, odds = np.zeros((1, failures.shape[1]), dtype=bool), np.zeros(1)
    met = np.zeros((1, len(failures)), dtype=bool)  # failures that each unfinished set explains
    complete: list[tuple[Bools, Floats]] = []
    total, likelihood = 0.0, np.exp(log_odds)
    for size in range(1, _LARGEST_SET + 1):
        # Every suspect of the smallest failure that is not explained yet makes a larger set.
        suspects = failures[np.argmin(met, axis=1)]
        if float(np.exp(odds) @ (suspects @ likelihood)) < _NEGLIGIBLE * total:
            break
        parents, added = np.nonzero(suspects)
        larger = sets[parents]
        larger[np.arange(len(larger)), added] = True
        first = np.unique(plan_keys(larger), return_index=True)[1]
        parents, added, sets = parents[first], added[first], larger[first]
        odds, met = odds[parents] + log_odds[added], met[parents] | failures.T[added]
        # At the largest size, where nothing is complete, unfinished sets have to do.
        is_complete = met.all(axis=1) if size < _LARGEST_SET or total > 0 else np.ones(len(met), dtype=bool)
        complete.append((sets[is_complete], odds[is_complete]))
        total += float(np.exp(odds[is_complete]).sum())
        best = np.argsort(-(odds + _EXPLAINED_BONUS * met.sum(axis=1))[~is_complete], kind="stable")[:_BEAM]
        sets, odds, met = (each[~is_complete][best] for each in (sets, odds, met))
        if not len(sets):
            break
    return np.concatenate([s for s, _ in complete]), np.concatenate([o for _, o in complete])


def _smallest(failures: Bools) -> Bools:
    """Failures that contain no other failure, which says the same more exactly; small ones first."""
    failures = np.unique(failures, axis=0)
    sizes = failures.sum(axis=1)
    common = failures.astype(np.float32) @ failures.T.astype(np.float32)
    within = (common == sizes[None, :]) & (sizes[None, :] < sizes[:, None])
    is_minimal = ~within.any(axis=1)
    order = np.argsort(sizes[is_minimal], kind="stable")
    smallest: Bools = failures[is_minimal][order]
    return smallest
