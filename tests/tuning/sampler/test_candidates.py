"""The pool of plans that might be proposed: what is in it, and that widening it finds better ones."""

from __future__ import annotations

import numpy as np

from mptune.tuning.sampler.acquisition import Box
from mptune.tuning.sampler.candidates import Pool, gather
from mptune.tuning.sampler.error_model import Observations, Prior, keys
from mptune.tuning.sampler.min_cut import CutSolver, Tie


def make(groups: int) -> tuple[Prior, Observations, Box]:
    rng = np.random.default_rng(groups)
    ids = tuple(f"g{i}" for i in range(groups))
    ties = tuple(Tie((i, i + 1)) for i in range(groups - 1))
    prior = Prior(ids, tuple(rng.uniform(-18, -9, groups)), tuple(rng.uniform(0, 1, groups)), ties, (0.1,) * len(ties))
    plans = np.array([[False] * groups, [True] * groups])
    base = float(groups)
    latency, error = np.array([base, 0.6 * base]), np.array([1e-7, 1e-2])
    seen = Observations(plans, latency, np.full(2, 1e-3), error, np.ones(2), base, 1e-3)
    return prior, seen, Box(prior, seen, 3e-2, np.random.default_rng(0))


def test_a_small_space_is_looked_through() -> None:
    prior, seen, box = make(6)
    pool = gather(prior, box, CutSolver(6, prior.ties), seen.plans, np.random.default_rng(0))
    assert len(set(keys(pool.plans))) == len(pool.plans) == 2**6
    best = pool.best(100)
    assert len(best) == 2**6 - 2, "what is evaluated is not among them"
    promises = box.judge(best)[2]
    assert (np.diff(promises) <= 1e-12).all()


def test_neighbours_promise_at_least_as_much_as_the_exact_optima() -> None:
    prior, seen, box = make(30)
    pool = Pool(box, 30)
    pool.add(np.eye(30, dtype=bool))
    before = float(box.judge(pool.best(1))[2][0])
    pool.widen(prior, np.random.default_rng(0))
    assert float(box.judge(pool.best(1))[2][0]) > 1.5 * before
    assert len(set(keys(pool.plans))) == len(pool.plans)
    whole = gather(prior, box, CutSolver(30, prior.ties), seen.plans, np.random.default_rng(0))
    assert float(box.judge(whole.best(1))[2][0]) >= 0.9 * float(box.judge(pool.best(1))[2][0])
    assert not {*keys(seen.plans)} & {*keys(whole.best(10**6))}
