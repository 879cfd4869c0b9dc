"""Which plans to emulate to learn the groups' errors, a group test that measures: a sequential A-optimal design.

One-group errors may be off: taken on few samples, or other in the company of other groups. A whole plan's emulated
error is nearly exact, and tells of the groups whose squares make most of it. The plans are chosen one by one from
random ones, each for the largest fall of the weighted sum of the posterior variances, linearised at the mode
(Pukelsheim, Optimal Design of Experiments, 2006, Chapter 6; Chaloner and Verdinelli, Bayesian experimental design: a
review, Statistical Science 10(3), 1995).
"""

from __future__ import annotations

import math

import numpy as np

from mptune.tuning.sampler.error_model import ErrorModel
from mptune.tuning.sampler.plan_rows import Bools, Floats, plan_keys, unique_plans

_CANDIDATES = 300
"""Random plans that the designed ones are chosen from."""

_FEWEST_GROUPS = 4
"""FP16 groups of a designed plan, at least: it is to tell of groups in company, not of one alone once more."""

_LEAST_FALL = 0.005
"""Fall of the sum of the weighted variances (weights of mean 1) that is worth an emulation: as where one group's error,
known to 10 %, becomes known to 9.3 %. Where one-group errors are as good as that nothing is emulated for them."""


def design_plans(
    model: ErrorModel, weights: Floats, allowed: Bools, emulated: Bools, most: int, generator: np.random.Generator
) -> Bools:
    """At most so many plans whose emulated errors tell most of the groups' errors; none where none is worth it.

    Args:
        model: posterior of the errors.
        weights: what it matters to know each group's, shape (n_groups,), >= 0.
        allowed: groups that may be FP16, shape (n_groups,): one that overflows tells nothing.
        emulated: plans whose errors are known.
        most: so many plans at most.
        generator: of the random plans that they are chosen from.
    """
    candidates = _random_plans(model.mode, allowed, generator)
    candidates = candidates[~np.isin(plan_keys(candidates), plan_keys(emulated))]
    shares = model.shares(candidates)  # (n_candidates, n_groups)
    covariance, noise = model.covariance(), model.emulation_sd**2
    weights = weights / max(float(weights.mean()), 1e-300)
    chosen: list[int] = []
    while len(chosen) < min(most, len(candidates)):
        projected = shares @ covariance  # (n_candidates, n_groups)
        variance = (projected * shares).sum(axis=1) + noise
        falls = (projected**2 @ weights) / variance
        falls[chosen] = -math.inf
        best = int(np.argmax(falls))
        if falls[best] < _LEAST_FALL:
            break
        covariance = covariance - np.outer(projected[best], projected[best]) / variance[best]
        chosen.append(best)
    designed: Bools = candidates[chosen]
    return designed


def _random_plans(mode: Floats, allowed: Bools, generator: np.random.Generator) -> Bools:
    """Random parts of groups of similar errors: those of much smaller errors do not show beside large ones."""
    order = np.flatnonzero(allowed)[np.argsort(mode[allowed], kind="stable")]
    plans = np.zeros((_CANDIDATES, len(mode)), dtype=bool)
    if len(order) < _FEWEST_GROUPS:
        return plans[:0]
    few, all_ = math.log(_FEWEST_GROUPS), math.log(len(order))
    sizes = np.rint(np.exp(generator.uniform(few, all_, _CANDIDATES))).astype(np.int64)
    starts = generator.integers(len(order) - sizes + 1)
    ranks = np.arange(len(order)) - starts[:, None]
    is_similar = (ranks >= 0) & (ranks < sizes[:, None])
    chosen = is_similar & (generator.random(ranks.shape) < generator.uniform(0.3, 1.0, (_CANDIDATES, 1)))
    is_small = chosen.sum(axis=1) < _FEWEST_GROUPS
    chosen[is_small] = is_similar[is_small]
    plans[:, order] = chosen
    return unique_plans([plans], len(mode))
