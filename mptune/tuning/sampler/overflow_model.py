"""Posterior of which groups are to blame for plans that are not finite, or do not build or run.

A group test. A failed plan holds at least one group that is to blame, a sound plan none. A set of groups that meets
every failure (a hitting set) explains them; the most probable minimal ones are enumerated (Reiter, A theory of
diagnosis from first principles, Artificial Intelligence 32(1), 1987), and a group's probability is that of the sets
that it is in. Where no single group can explain a failure, all of the plan's groups together do, or it came by chance.
"""

from __future__ import annotations

import numpy as np

from mptune.graph.plan import Precision
from mptune.tuning.sampler.plans import Bools, Floats, plan_keys
from mptune.tuning.sampler.trials import BuiltPlans, Prior

_TO_BLAME, _EMULATED_OVERFLOW = 0.01, 0.97
"""Prior probability that a group is to blame: by default, where its one-group emulation overflows."""

_WIDE = 1e-4
"""The same of a precision with FP32's range, such as BF16."""

_TOGETHER, _PLAN_FAILS = 1e-4, 0.1
"""Odds that no group alone is to blame: of outputs that are not finite, since values add up; of a plan that does not
build or run, since the fault may be the engine's: several plans that failed and share few groups tell."""

_CLEARED = 1e-9
"""Probability that a group of a sound plan is to blame."""

_LARGEST_SET, _BEAM = 32, 100
"""Groups of a hitting set at most, and unfinished sets that are kept at each size."""

_EXPLAINED_BONUS = 0.7
"""Beam search ranks unfinished sets by log odds plus this for each failure that they explain."""

_DRAWN_SETS = 400
"""Hitting sets that plans are compared with; where there are more, this many are drawn."""

_NEGLIGIBLE = 0.03
"""The search ends where larger sets hold less than this share of the probability."""


class OverflowModel:
    """The posterior of which groups are to blame, by one-group emulation, builds, and emulated plans.

    ``probabilities``, shape (n_groups,), are cleared by sound plans and raised jointly by failures.
    """

    def __init__(self, prior: Prior, built: BuiltPlans) -> None:
        """Condition the prior on what came of the plans."""
        probabilities = np.full(len(prior.groups), _TO_BLAME)
        is_wide = [Precision.named(name).exponents == Precision.FP32.exponents for name in prior.columns.precisions]
        probabilities[is_wide] = _WIDE
        if prior.log_square_errors is not None:
            probabilities[np.isposinf(prior.log_square_errors)] = _EMULATED_OVERFLOW
        probabilities[built.plans[built.finite == 1.0].any(axis=0)] = _CLEARED
        emulated, errors = built.emulations
        overflowed = np.vstack([built.plans[(built.finite == 0.0) & ~built.gave_nothing], emulated[np.isinf(errors)]])
        failed = np.vstack([overflowed, built.plans[built.gave_nothing]])
        chance = np.repeat(np.log([_TOGETHER, _PLAN_FAILS]), [len(overflowed), len(failed) - len(overflowed)])
        # A failure with a group that is known to be to blame is explained by that.
        is_open = failed.any(axis=1) & ~failed[:, probabilities > 0.5].any(axis=1)
        failures, chance = _smallest(failed[is_open], chance[is_open])
        self.probabilities, self._log_sound = probabilities, np.log1p(-probabilities)
        self._failures, self._weights = failures, np.zeros(0)
        self._sets: Bools = np.zeros((0, len(probabilities) + len(failures)), dtype=bool)
        if not len(failures):
            return
        # Suspects are the groups, and for each failure one more: all its groups at once, or chance.
        suspects = np.hstack([failures, np.eye(len(failures), dtype=bool)])
        sets, log_odds = hitting_sets(suspects, np.append(np.log(probabilities / (1.0 - probabilities)), chance))
        weights = np.exp(log_odds - log_odds.max())
        weights /= weights.sum()
        explained = weights @ sets[:, : len(probabilities)]
        self.probabilities = np.clip(1.0 - (1.0 - probabilities) * (1.0 - explained), 0.0, 1.0 - 1e-9)
        if len(sets) > _DRAWN_SETS:
            drawn = np.random.default_rng(len(sets)).choice(len(sets), _DRAWN_SETS, p=weights)
            sets, weights = sets[drawn], np.full(_DRAWN_SETS, 1.0 / _DRAWN_SETS)
        self._sets, self._weights = sets, weights

    def p_sound(self, plans: Bools) -> Floats:
        """Probability that each plan is sound, shape (n_plans,)."""
        probability: Floats = np.exp(plans @ self._log_sound)
        if len(self._sets):
            groups = plans.astype(np.float32)
            # A plan that holds all groups of a failure holds what they do together.
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


def _smallest(failures: Bools, chance: Floats) -> tuple[Bools, Floats]:
    """Failures that contain no other one, which says the same more exactly; small ones first. And their log odds."""
    failures, which = np.unique(failures, axis=0, return_inverse=True)
    largest = np.full(len(failures), -np.inf)
    np.maximum.at(largest, which.ravel(), chance)
    sizes = failures.sum(axis=1)
    common = failures.astype(np.float32) @ failures.T.astype(np.float32)
    within = (common == sizes[None, :]) & (sizes[None, :] < sizes[:, None])
    minimal = np.flatnonzero(~within.any(axis=1))
    order = minimal[np.argsort(sizes[minimal], kind="stable")]
    return failures[order], largest[order]
