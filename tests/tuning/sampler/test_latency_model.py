"""The posterior of latency recovers a law that it was given evaluations of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mptune.tuning.sampler.latency_model import LatencyModel
from mptune.tuning.sampler.trials import BuiltPlans
from tests.tuning.additive import BASE, COSTS, GAINS, GROUPS, NEW, PLANS, law, prior, seen


def test_latency_is_learnt_from_a_prior_in_other_units() -> None:
    model = LatencyModel(prior(), seen(PLANS))
    predicted = model.predict(NEW, model.mean()[None])[0]
    assert np.abs(predicted - law(NEW)[0]).max() < 0.03
    draws = model.sample(np.random.default_rng(0), 50)
    assert (draws[:, GROUPS:-1] >= 0).all()
    assert np.abs(model.predict(NEW, draws) - law(NEW)[0]).mean() < 0.05


def test_two_builds_fix_the_scale() -> None:
    model = LatencyModel(prior(), seen(PLANS[:2]))
    assert model.predict(PLANS[1:2], model.mean()[None])[0, 0] == pytest.approx(law(PLANS[1:2])[0][0], rel=0.02)


def test_exact_terms_are_the_law() -> None:
    exact = prior(gains_ms=tuple(GAINS), boundary_costs_ms=tuple(COSTS), exact=True)
    model = LatencyModel(exact, seen(PLANS[:1]))
    assert model.predict(NEW, model.mean()[None])[0] == pytest.approx(law(NEW)[0], rel=1e-6)


def test_the_miss_of_the_baselines_timing_is_learnt() -> None:
    known = prior(gains_ms=tuple(GAINS), boundary_costs_ms=tuple(COSTS))
    observed = replace(seen(PLANS), base_ms=0.98 * BASE, base_sd_ms=0.02 * BASE)
    model = LatencyModel(known, observed)
    assert model.base(model.mean()[None])[0] == pytest.approx(BASE, rel=5e-3)
    assert LatencyModel(known, seen(PLANS)).base(model.mean()[None])[0] == BASE


@pytest.mark.parametrize("factor", [0.7, 0.93, 1.1])
def test_odd_engines_teach_little(factor: float) -> None:
    """A few that are not what their plans say (another kernel, TF32) must not change what all others teach."""
    odd = seen(PLANS)
    odd.latency_ms[[5, 11, 12, 30, 41]] *= factor
    model = LatencyModel(prior(), odd)
    assert np.abs(model.predict(NEW, model.mean()[None])[0] - law(NEW)[0]).max() < 0.03


TIMES = np.stack([3.0 * GAINS, 2.0 * GAINS])  # of each group in FP32 and FP16


def profiled(plans: np.ndarray, worth: np.ndarray | float = 1.0) -> BuiltPlans:
    """Evaluations with the times of the groups, of which each is worth so much."""
    return replace(seen(plans), group_ms=np.where(plans, TIMES[1], TIMES[0]) / worth)


def misses(observed: BuiltPlans, **options: object) -> np.ndarray:
    return np.abs(LatencyModel(prior(**options), observed).mean()[:GROUPS] - GAINS)


@pytest.mark.parametrize("worth", [1.0, 0.3, 40.0])
def test_two_profiles_tell_the_gains_whatever_their_unit(worth: float) -> None:
    assert misses(seen(PLANS[:2])).max() > 0.2
    assert misses(profiled(PLANS[:2], worth)).max() < 0.1
    assert misses(profiled(PLANS[:2], worth), gains_ms=None).max() < 0.1


def test_profiles_that_contradict_what_was_timed_are_not_believed() -> None:
    worth = np.random.default_rng(4).lognormal(0.0, 2.0, GROUPS)
    wrong, right = misses(profiled(PLANS[:40], worth)), misses(seen(PLANS[:40]))
    assert wrong.max() < right.max() + 0.05
