"""Which plans might be proposed: exact optima of the law, what is known of the front, and neighbours of both."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.acquisition import Box
from mptune.tuning.sampler.error_model import Prior, keys
from mptune.tuning.sampler.min_cut import Bools, CutSolver, Floats

_ENUMERABLE = 12
_SWEPT, _SWEEP, _ROUNDS = 9, 24, 5
_KEPT = 24
_CELLS = 4_000_000


def gather(prior: Prior, box: Box, solver: CutSolver, known: Bools, generator: np.random.Generator) -> Pool:
    """All plans of a small space; of a larger one those that may be worth a build.

    Args:
        prior: names the groups and the boundaries.
        box: judges plans.
        solver: of the prior's boundaries.
        known: the evaluated plans: their neighbours count too.
        generator: of what is left to chance.
    """
    groups = len(prior.groups)
    pool = Pool(box, groups)
    if groups <= _ENUMERABLE:
        pool.add((np.arange(2**groups)[:, None] >> np.arange(groups) & 1).astype(bool))
        return pool
    alone = np.eye(groups, dtype=bool)
    pool.add(np.vstack([known, exact_optima(solver, box, generator), alone, np.ones((1, groups), dtype=bool)]))
    pool.widen(prior, generator)
    return pool


def exact_optima(solver: CutSolver, box: Box, generator: np.random.Generator) -> Bools:
    """The optima of a sweep of weights between latency and error, for the mean and a few draws, by minimum cuts."""
    groups, terms = box.u.shape[1], box.terms[:_SWEPT]
    squares = np.exp(box.u[:_SWEPT])
    value = np.maximum(terms[:, :groups], 1e-9 * box.base_ms)
    # From where the cheapest group is refused to where the dearest is let in.
    ratio = value / squares
    low, high = np.log(np.quantile(ratio, 0.02, axis=1)), np.log(np.quantile(ratio, 0.98, axis=1))
    # Other weights each time, so that no plan stays hidden between two of them.
    steps = (np.arange(_SWEEP) + generator.random((len(ratio), _SWEEP))) / _SWEEP
    sweeps = np.exp(low[:, None] + (high - low)[:, None] * (1.2 * steps - 0.1))
    # A group that may fail costs as much as what it could spoil.
    risk = np.log1p(-np.minimum(box.overflow.chances, 1 - 1e-6)) * -0.5 * box.base_ms
    unary = -terms[:, None, :groups] + sweeps[:, :, None] * squares[:, None, :] + risk
    costs = np.repeat(terms[:, groups:-1], _SWEEP, axis=0)
    return solver.solve(unary.reshape(-1, groups), costs)


class Pool:
    """Plans that might be proposed, each judged once, roughly."""

    def __init__(self, box: Box, groups: int) -> None:
        self._box = box
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.plans: Bools = np.zeros((0, groups), dtype=bool)
        self._figures: Floats = np.zeros((3, 0))  # gain, height, promise; the promise of evaluated plans is -1
        self._widened: Bools = np.zeros(0, dtype=bool)
        self._front: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def add(self, plans: Bools) -> None:
        """Take in those that are not in it."""
        new, first = np.unique(keys(plans), return_index=True)
        fresh = ~np.isin(new, self._keys, assume_unique=True)
        new, plans = new[fresh], plans[first[fresh]]
        gains, heights, promises = self._box.judge(plans)
        promises[~self._box.is_new(plans)] = -1.0
        self._keys = np.append(self._keys, new)
        self._figures = np.hstack([self._figures, [gains, heights, promises]])
        self._front = self._front_of(np.append(self._front, np.arange(len(plans)) + len(self.plans)))
        self.plans = np.vstack([self.plans, plans])
        self._widened = np.append(self._widened, np.zeros(len(plans), dtype=bool))

    def best(self, count: int) -> Bools:
        """Those that promise most."""
        order = _largest(self._figures[2], count)
        kept: Bools = self.plans[order[self._figures[2, order] >= 0.0]]
        return kept

    def _front_of(self, some: NDArray[np.int64]) -> NDArray[np.int64]:
        gains, heights, _ = self._figures[:, some]
        inside = np.flatnonzero((gains > 0) & (heights > 0))
        order = inside[np.argsort(-gains[inside], kind="stable")]
        highest = np.maximum.accumulate(np.append(-math.inf, heights[order]))
        front: NDArray[np.int64] = some[order[heights[order] > highest[:-1]]]
        return front

    def widen(self, prior: Prior, generator: np.random.Generator) -> None:
        """Take in neighbours of the most promising plans: one group, both sides of a boundary, any two or three."""
        groups = len(prior.groups)
        flips = [np.eye(groups, dtype=bool)]
        pairs = [tie.members[:2] for tie in prior.ties if len(tie.members) >= 2]
        if pairs:
            flips.append(_masks(np.array(pairs), groups))
        for _ in range(_ROUNDS):
            best = _largest(np.where(self._widened, -math.inf, self._figures[2]), _KEPT)
            best, front = (some[~self._widened[some]] for some in (best, self._front))
            spread = front[np.unique(np.linspace(0, len(front) - 1, min(len(front), _KEPT // 2)).astype(int))]
            chosen = np.union1d(best[: _KEPT - len(spread)], spread)
            self._widened[chosen] = True
            near = self.plans[chosen]
            some = generator.random((groups, groups)).argpartition(2, axis=1)[:, :3]
            masks = np.vstack([*flips, _masks(some[:, :2], groups), _masks(some, groups)])
            few = max(_CELLS // (len(near) + 1) // (groups + len(prior.ties)), 1)
            if len(masks) > few:  # Hundreds of groups: some of the neighbours, so that thinking stays short.
                masks = masks[generator.choice(len(masks), size=few, replace=False)]
            self.add((near[:, None, :] ^ masks[None, :, :]).reshape(-1, groups))


def _masks(positions: NDArray[np.int64], groups: int) -> Bools:
    masks = np.zeros((len(positions), groups), dtype=bool)
    np.put_along_axis(masks, positions, True, axis=1)
    return masks


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Positions of so many of the largest values, the largest first."""
    some = np.argpartition(-values, count - 1)[:count] if count < len(values) else np.arange(len(values))
    largest: NDArray[np.int64] = some[np.argsort(-values[some], kind="stable")]
    return largest
