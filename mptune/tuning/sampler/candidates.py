"""Candidate plans: exact optima of the additive law for draws from its posterior, and neighbours of the best plans."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.acquisition import EhviEstimator
from mptune.tuning.sampler.min_cut import CutSolver
from mptune.tuning.sampler.plans import Bools, Floats, plan_keys
from mptune.tuning.sampler.posterior import Prior

_SWEPT_DRAWS, _SWEEP_WEIGHTS = 9, 24
"""Draws (the mean among them) whose optima are taken, and trade-off weights for each: 216 minimum cuts."""

_RISK = 0.5
"""Share of the base latency that an overflow costs in a cut: a plan that fails loses about what FP16 could save."""

_NEIGHBOUR_ROUNDS, _EXPANDED_PLANS = 8, 12
"""Rounds of local search at most, and plans whose neighbours are added in each."""

_FEWEST_ROUNDS, _RISE = 3, 1e-3
"""After this many rounds the search ends where one has raised the largest EHVI by less than this share of it."""

_COMBINED = 10
"""Best neighbours of a plan that are taken together: in pairs, and the best of them all at once. With 120 groups the
largest EHVI is 1.16 times what five rounds of 24 plans without them find, among half as many plans."""

_RANDOM_SHARE = 0.1
"""Random pairs, and random triples, that are tried around a plan, as a share of the groups."""

_CELLS = 4_000_000
"""Neighbours of a round times groups and boundaries, at most: bounds time and memory with hundreds of groups."""


def find_candidates(
    prior: Prior, estimator: EhviEstimator, built: Bools, generator: np.random.Generator
) -> CandidatePool:
    """Plans that may be worth a build: optima of the law, and neighbours of these and of the built plans."""
    n_groups = len(prior.groups)
    pool = CandidatePool(estimator, n_groups)
    optima = exact_optima(CutSolver(prior.columns, prior.boundaries), estimator, generator)
    pool.add(np.vstack([built, optima, np.eye(n_groups, dtype=bool), np.ones((1, n_groups), dtype=bool)]))
    pool.add_neighbours(prior, generator)
    return pool


def exact_optima(solver: CutSolver, estimator: EhviEstimator, generator: np.random.Generator) -> Bools:
    """Optima of ``-gain + weight * squared error + boundary costs + risk`` for a sweep of weights, by minimum cuts."""
    terms = estimator.latency_terms[:_SWEPT_DRAWS]  # (n_draws, n_groups + n_boundaries + 1)
    squares = np.exp(estimator.log_squares[:_SWEPT_DRAWS])  # (n_draws, n_groups)
    shares = estimator.part_shares
    if shares is not None:
        # The largest over parts is bounded by weighted sums of them (Lagrange multipliers): other weights in each draw.
        mixed = generator.dirichlet(np.full(shares.shape[1], 0.5), len(squares)) @ shares.T
        squares = squares * np.maximum(mixed, 1e-6)
    n_groups = squares.shape[1]
    gains = np.maximum(terms[:, :n_groups], 1e-9 * estimator.base_ms)
    # From a weight that keeps all but the cheapest groups out to one that lets all but the dearest in.
    ratio = gains / squares
    low, high = np.log(np.quantile(ratio, 0.02, axis=1)), np.log(np.quantile(ratio, 0.98, axis=1))
    # Random weights, stratified, so that over several proposals no optimum stays hidden between two of them.
    steps = (np.arange(_SWEEP_WEIGHTS) + generator.random((len(ratio), _SWEEP_WEIGHTS))) / _SWEEP_WEIGHTS
    weights = np.exp(low[:, None] + (high - low)[:, None] * (1.2 * steps - 0.1))  # (n_draws, n_weights)
    sound = np.log1p(-np.minimum(estimator.overflow.probabilities, 1 - 1e-6))
    risk = -_RISK * estimator.base_ms * sound
    unary = -terms[:, None, :n_groups] + weights[:, :, None] * squares[:, None, :] + risk
    costs = np.repeat(terms[:, n_groups:-1], _SWEEP_WEIGHTS, axis=0)
    return solver.solve(unary.reshape(-1, n_groups), costs)


class CandidatePool:
    """Candidates, each once, with their screened coordinates and EHVI."""

    def __init__(self, estimator: EhviEstimator, n_groups: int) -> None:
        self._estimator = estimator
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.plans: Bools = np.zeros((0, n_groups), dtype=bool)  # (n_plans, n_groups)
        self._screened: Floats = np.zeros((3, 0))  # gain, exactness, EHVI (-1 for built plans), each (n_plans,)
        self._is_expanded: Bools = np.zeros(0, dtype=bool)

    def add(self, plans: Bools) -> Floats:
        """Screen plans, shape (n_plans, n_groups), unless they are in the pool; the EHVI of each, shape (n_plans,)."""
        keys = plan_keys(plans)
        unique, first = np.unique(keys, return_index=True)
        is_new = ~np.isin(unique, self._keys, assume_unique=True)
        new = plans[first[is_new]]
        gain, exact, ehvi = self._estimator.screen(new)
        ehvi[~self._estimator.is_new(new)] = -1.0
        self._keys = np.append(self._keys, unique[is_new])
        self._screened = np.hstack([self._screened, [gain, exact, ehvi]])
        self.plans = np.vstack([self.plans, new])
        self._is_expanded = np.append(self._is_expanded, np.zeros(len(new), dtype=bool))
        order = np.argsort(self._keys)
        of_each: Floats = self._screened[2, order[np.searchsorted(self._keys, keys, sorter=order)]]
        return of_each

    def best(self, count: int) -> Bools:
        """At most ``count`` plans that are not built, those of the largest EHVI first."""
        order = _largest(self._screened[2], count)
        chosen: Bools = self.plans[order[self._screened[2, order] >= 0.0]]
        return chosen

    def add_neighbours(self, prior: Prior, generator: np.random.Generator) -> None:
        """Local search: add neighbours of the plans of the largest EHVI and of the predicted front.

        A neighbour differs in one group, in two groups that share a boundary, or in two or three random groups; and in
        what several of the best neighbours of the same plan differ in.
        """
        n_groups = len(prior.groups)
        flips = [np.eye(n_groups, dtype=bool)]
        # The first two groups that share a tensor, so that both take a precision, or leave it.
        pairs = [boundary.members[:2] for boundary in prior.boundaries if len(boundary.members) > 1]
        if pairs:
            flips.append(_masks(np.array(pairs), n_groups))
        n_random = math.ceil(_RANDOM_SHARE * n_groups)
        for round_ in range(_NEIGHBOUR_ROUNDS):
            before = self._screened[2].max()
            best = _largest(np.where(self._is_expanded, -math.inf, self._screened[2]), _EXPANDED_PLANS)
            best, front = (positions[~self._is_expanded[positions]] for positions in (best, self._front()))
            spread = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), _EXPANDED_PLANS // 2)).astype(int))]
            chosen = np.union1d(best[: _EXPANDED_PLANS - len(spread)], spread)
            self._is_expanded[chosen] = True
            centres = self.plans[chosen][:, None, :]  # (n_centres, 1, n_groups)
            positions = generator.random((n_random, n_groups)).argpartition(min(2, n_groups - 1), axis=1)[:, :3]
            masks = np.vstack([*flips, _masks(positions[:, :2], n_groups), _masks(positions, n_groups)])
            most = max(_CELLS // (len(centres) + 1) // (n_groups + len(prior.boundaries)), 1)
            if len(masks) > most:
                masks = masks[generator.choice(len(masks), size=most, replace=False)]
            ehvi = self.add((centres ^ masks).reshape(-1, n_groups)).reshape(len(centres), len(masks))
            if len(masks) > 2:
                # Every pair of each plan's best masks, and the best three, four and so on of them all at once.
                best_masks = masks[np.argsort(-ehvi, axis=1, kind="stable")[:, :_COMBINED]]
                first, second = np.triu_indices(best_masks.shape[1], 1)
                joined = np.logical_xor.accumulate(best_masks, axis=1)[:, 2:]
                combined = np.concatenate([best_masks[:, first] ^ best_masks[:, second], joined], axis=1)
                self.add((centres ^ combined).reshape(-1, n_groups))
            if round_ + 1 >= _FEWEST_ROUNDS and self._screened[2].max() <= before * (1.0 + _RISE):
                break

    def _front(self) -> NDArray[np.int64]:
        """Positions of the plans that no other one dominates under the posterior's mean, those of most gain first."""
        gain, exact, _ = self._screened
        inside = np.flatnonzero((gain > 0) & (exact > 0))
        order = inside[np.argsort(-gain[inside], kind="stable")]
        most_exact = np.maximum.accumulate(np.append(-math.inf, exact[order]))
        front: NDArray[np.int64] = order[exact[order] > most_exact[:-1]]
        return front


def _masks(positions: NDArray[np.int64], n_groups: int) -> Bools:
    """Rows that are True at their positions, shape (n_rows, n_groups), of positions of shape (n_rows, n_positions)."""
    masks = np.zeros((len(positions), n_groups), dtype=bool)
    np.put_along_axis(masks, positions, True, axis=1)
    return masks


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Positions of the ``count`` largest values, the largest first."""
    positions = np.argpartition(-values, count - 1)[:count] if count < len(values) else np.arange(len(values))
    largest: NDArray[np.int64] = positions[np.argsort(-values[positions], kind="stable")]
    return largest
