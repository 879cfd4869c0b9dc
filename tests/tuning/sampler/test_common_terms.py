"""What the law's terms share is learnt from a few of them, and said of all others."""

from __future__ import annotations

import numpy as np
import pytest

from mptune.tuning.sampler.common_terms import mix
from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.plan_rows import Bools, Floats
from mptune.tuning.sampler.posterior import BuiltPlans, LinearGaussian, Prior, log_evidences

GROUPS, BASE = 24, 60.0
IDS = tuple(f"g{i}" for i in range(GROUPS))
BOUNDARIES = tuple(Boundary.among((i, i + 1)) for i in range(GROUPS - 1))
GAINS = np.random.default_rng(0).uniform(0.5, 1.5, GROUPS)
COST = 0.1
EVEN = np.arange(GROUPS) % 2 == 0


def latency(plans: Bools, gains: Floats, cost_ms: float) -> Floats:
    crossings = (plans[:, 1:] ^ plans[:, :-1]).sum(axis=1)
    taken: Floats = BASE - plans @ gains + cost_ms * crossings
    return taken


def learnt(
    plans: Bools, latency_ms: Floats, operators: tuple[frozenset[str], ...] = (), precisions: tuple[str, ...] = ()
) -> LatencyModel:
    """The posterior of a prior that takes ``GAINS`` and ``COST`` for true."""
    gains, costs = tuple(map(float, GAINS)), (COST,) * len(BOUNDARIES)
    prior = Prior(
        IDS, gains_ms=gains, boundaries=BOUNDARIES, boundary_costs_ms=costs, operators=operators, precisions=precisions
    )
    count = len(plans)
    known = BuiltPlans(plans, latency_ms, np.full(count, 0.05), np.full(count, 1e-3), np.ones(count), BASE)
    return LatencyModel(prior, known)


def plans_of(*groups: np.ndarray) -> Bools:
    plans = np.zeros((len(groups) + 2, GROUPS), dtype=bool)
    plans[1] = True
    for row, chosen in zip(plans[2:], groups, strict=True):
        row[chosen] = True
    return plans


def test_costs_that_are_too_small_everywhere_are_learnt_from_some_boundaries() -> None:
    plans = plans_of(np.arange(1, 12, 2), np.array([2, 5, 8]), np.array([1, 4, 6, 10]))
    model = learnt(plans, latency(plans, GAINS, 4 * COST))
    elsewhere = model.mean()[GROUPS + 14 : -1]  # of boundaries that no plan but all-FP16 comes near
    assert elsewhere.mean() == pytest.approx(4 * COST, rel=0.35)


def test_an_operators_gain_is_learnt_from_some_of_its_groups() -> None:
    """FP16 saves half of what is expected in the groups of one operator, and more in all others."""
    gains = np.where(EVEN, 0.5, 1.5) * GAINS
    operators = tuple(frozenset({"norm"} if even else {"matmul"}) for even in EVEN)
    timed = [np.arange(0, 12, 2), np.arange(1, 12, 2), np.array([0, 1, 4, 8]), np.array([3, 7, 10, 11])]
    plans = plans_of(*timed)
    unseen = np.arange(GROUPS) >= 14
    misses = {}
    for known in ((), operators):
        expected = learnt(plans, latency(plans, gains, COST), known).mean()[:GROUPS]
        misses[known] = np.abs(expected - gains)[unseen].mean()
    assert misses[operators] < 0.6 * misses[()]


def test_terms_that_are_exact_or_profiled_share_no_doubts_of_gains() -> None:
    mean = np.ones(4)
    prior = Prior(
        ("a", "b"), boundaries=(Boundary.among((0, 1)),), operators=(frozenset({"norm"}), frozenset({"norm"}))
    )
    assert mix(prior, mean, profiled=False)[0].shape == (4, 4 + 4)
    assert mix(prior, mean, profiled=True)[0][:2, 4:].any(axis=None) == np.False_
    exact = Prior(("a", "b"), exact=True)
    assert np.array_equal(mix(exact, np.ones(3), profiled=False)[0], np.eye(3))


def test_columns_of_one_group_share_what_the_group_shares() -> None:
    operators = (frozenset({"norm"}), frozenset({"b norm"}), frozenset({"norm"}))
    both = Prior(("a", "a", "b"), operators=operators, precisions=("fp16", "bf16", "fp16"))
    mixing, sd = mix(both, np.array([2.0, 2.2, 1.0, 0.0]), profiled=False)
    assert len(sd) == mixing.shape[1] - 4
    assert np.array_equal(mixing[1, 4:], mixing[0, 4:])
    assert mixing[1, 0] == 1.0
    assert 0.0 < mixing[1, 1] < 1.0


def test_what_bf16_does_not_save_beyond_fp16s_range_is_learnt_from_some_groups() -> None:
    """As of norms that a runtime fuses in FP32 alone: nothing is saved where FP16 overflows."""
    beyond = EVEN
    seen, unseen = beyond & (np.arange(GROUPS) < 16), beyond & (np.arange(GROUPS) >= 16)
    plans = np.array([np.zeros(GROUPS, dtype=bool), ~beyond, ~beyond | seen])
    latency_ms = latency(plans, np.where(beyond, 0.0, 1.0) * GAINS, COST)
    gains = [
        learnt(plans, latency_ms, precisions=precisions).mean()[:GROUPS]
        for precisions in ((), tuple("bf16" if overflows else "fp16" for overflows in beyond))
    ]
    assert gains[1][unseen].sum() < 0.2 * gains[0][unseen].sum()
    assert np.abs(gains[1] - GAINS)[~beyond].mean() < 0.1, "which says nothing of what FP16 saves"
    assert np.abs(gains[0] - GAINS)[~beyond].mean() > 0.3


def test_evidences_of_many_priors_are_those_of_their_updates() -> None:
    rng = np.random.default_rng(0)
    jacobian, values = rng.normal(size=(6, 9)), rng.normal(size=6)
    variances = rng.uniform(0.5, 2.0, (2, 9))
    scales, noises = rng.uniform(0.1, 2.0, (5, 2)), rng.uniform(0.1, 1.0, (5, 6))
    models = [LinearGaussian(np.ones(9), np.sqrt(scale @ variances)) for scale in scales]
    expected = [model.update(jacobian, values, noise) for model, noise in zip(models, noises, strict=True)]
    kernels = (jacobian * variances[:, None]) @ jacobian.T
    assert log_evidences(scales, kernels, noises, values - jacobian.sum(axis=1)) == pytest.approx(expected)


def test_fusions_that_boundaries_break_are_doubted_as_far_as_timings_say() -> None:
    """Of few timings that the law explains with small costs, and with ones that differ greatly between boundaries."""
    rng = np.random.default_rng(2)
    plans = np.vstack([plans_of(), rng.random((60, GROUPS)) < 0.5])
    broken = np.where(rng.random(len(BOUNDARIES)) < 0.25, 0.5, 0.0)
    doubts = []
    for more in (np.zeros(len(BOUNDARIES)), broken):
        crossed = plans[:, 1:] ^ plans[:, :-1]
        model = learnt(plans[:40], latency(plans[:40], GAINS, COST) + crossed[:40] @ more)
        draws = model.sample(np.random.default_rng(0), 200)[:, GROUPS:-1]
        doubts.append(float(draws.std(axis=0).mean()))
        assert np.abs(model.mean()[GROUPS:-1] - COST - more).mean() < 0.1
    assert doubts[0] < 0.7 * doubts[1]
