"""The posteriors of latency and error recover a law that they were given evaluations of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mptune.tuning.sampler.error_model import ErrorModel
from mptune.tuning.sampler.latency_model import LatencyModel, LinearGaussian
from mptune.tuning.sampler.trials import BuiltPlans
from tests.tuning.additive import BASE, COSTS, GAINS, GROUPS, NEW, PLANS, SQUARES, law, measured, prior


def latencies(model: LatencyModel, plans: np.ndarray = NEW) -> np.ndarray:
    return model.predict(plans, model.mean()[None])[0]


def errors(model: ErrorModel, plans: np.ndarray = NEW) -> np.ndarray:
    return model.predict(plans, model.mode[None])[0]


@pytest.mark.parametrize("factor", [1.0, 0.7, 0.93, 1.1])
def test_latency_is_learnt_from_a_prior_in_other_units(factor: float) -> None:
    """A few engines that are not what their plans say (another kernel, TF32) must not change what the others teach."""
    latency_ms, _ = law(PLANS)
    latency_ms[[5, 11, 12, 30, 41]] *= factor
    model = LatencyModel(prior(), measured(PLANS, latency_ms=latency_ms))
    assert np.abs(latencies(model) - law(NEW)[0]).max() < 0.03
    draws = model.sample(np.random.default_rng(0), 50)
    assert (draws[:, GROUPS:-1] >= 0).all()
    assert np.abs(model.predict(NEW, draws) - law(NEW)[0]).mean() < 0.05


def test_two_builds_fix_the_scale() -> None:
    model = LatencyModel(prior(), measured(PLANS[:2]))
    assert latencies(model, PLANS[1:2]) == pytest.approx(law(PLANS[1:2])[0], rel=0.02)


TERMS = {"gains_ms": tuple(GAINS), "boundary_costs_ms": tuple(COSTS)}


def test_exact_terms_are_the_law() -> None:
    model = LatencyModel(prior(**TERMS, exact=True), measured(PLANS[:1]))
    assert latencies(model) == pytest.approx(law(NEW)[0], rel=1e-6)


def test_the_miss_of_the_baselines_timing_is_learnt() -> None:
    off, exact = (
        LatencyModel(prior(**TERMS), measured(PLANS, **figures))
        for figures in ({"base_ms": 0.98 * BASE, "base_sd_ms": 0.02 * BASE}, {})
    )
    assert off.base(off.mean()[None])[0] == pytest.approx(BASE, rel=5e-3)
    assert exact.base(off.mean()[None])[0] == BASE


TIMES = np.stack([3.0 * GAINS, 2.0 * GAINS])  # of each group in FP32 and FP16


def profiled(plans: np.ndarray, worth: np.ndarray | float = 1.0) -> BuiltPlans:
    """Evaluations with the times of the groups, of which each is worth so much."""
    return measured(plans, group_ms=np.where(plans, TIMES[1], TIMES[0]) / worth)


def misses(plans: BuiltPlans, **options: Any) -> np.ndarray:
    return np.abs(LatencyModel(prior(**options), plans).mean()[:GROUPS] - GAINS)


@pytest.mark.parametrize("worth", [1.0, 0.3, 40.0])
def test_two_profiles_tell_the_gains_whatever_their_unit(worth: float) -> None:
    assert misses(measured(PLANS[:2])).max() > 0.2
    assert misses(profiled(PLANS[:2], worth)).max() < 0.1
    assert misses(profiled(PLANS[:2], worth), gains_ms=None).max() < 0.1


def test_profiles_that_contradict_what_was_timed_are_not_believed() -> None:
    worth = np.random.default_rng(4).lognormal(0.0, 2.0, GROUPS)
    wrong, right = misses(profiled(PLANS[:40], worth)), misses(measured(PLANS[:40]))
    assert wrong.max() < right.max() + 0.05


def test_errors_are_learnt_from_a_prior_that_is_wrong_and_a_true_one_stays() -> None:
    before, after = (np.abs(np.log(errors(ErrorModel(prior(), measured(PLANS[:n]))) / law(NEW)[1])) for n in (1, 62))
    assert before.max() > 0.5
    assert np.quantile(after, 0.9) < 0.1
    true = ErrorModel(prior(log_square_errors=tuple(SQUARES)), measured(PLANS))
    assert np.abs(true.mode - SQUARES).max() < 0.3
    assert np.std(true.sample(np.random.default_rng(0), 200), axis=0).max() < 0.3


def test_what_is_not_known_well_gives_way_and_what_is_known_stays() -> None:
    """One group's error was estimated from others, and is wrong by a factor of 20; all plans with it say so."""
    unknown = int(np.argmax(SQUARES))
    rest = np.arange(GROUPS) != unknown
    wrong, sds = np.where(rest, SQUARES, SQUARES - 2 * math.log(20.0)), np.where(rest, 0.0, 3.0)
    doubtful = prior(log_square_errors=tuple(wrong), log_square_sds=tuple(sds))
    held = measured(PLANS[PLANS[:, unknown]][:3])
    told, untold = ErrorModel(doubtful, held), ErrorModel(prior(log_square_errors=tuple(wrong)), held)
    assert abs(told.mode[unknown] - SQUARES[unknown]) < 0.5
    assert np.abs(told.mode - wrong)[rest].max() < min(0.2, np.abs(untold.mode - wrong)[rest].max())
    spread = np.std(ErrorModel(doubtful, measured(PLANS[:0])).sample(np.random.default_rng(0), 400), axis=0)
    assert spread[unknown] > 2.0 > spread[rest].max()


@pytest.mark.parametrize("parameters", [3, 12])
def test_misses_are_those_of_a_model_without_the_observation(parameters: int) -> None:
    rng = np.random.default_rng(6)
    rows, values, noise = rng.normal(size=(7, parameters)), rng.normal(size=7), rng.uniform(0.1, 1.0, 7)
    mean, sd = np.zeros(parameters), rng.uniform(0.5, 2.0, parameters)
    model = LinearGaussian(mean, sd)
    model.update(rows, values, noise)
    misses, sds = model.leave_one_out(values)
    for left_out in range(7):
        rest, other = np.arange(7) != left_out, LinearGaussian(mean, sd)
        other.update(rows[rest], values[rest], noise[rest])
        assert misses[left_out] == pytest.approx(values[left_out] - rows[left_out] @ other.posterior_mean)
        draws = other.sample(np.random.default_rng(0), 40000) @ rows[left_out]
        assert sds[left_out] == pytest.approx(draws.std(), rel=0.03)


@pytest.mark.parametrize(("ratio", "apart"), [(1.0, 0.0), (1.3, 0.0), (1.0, 0.3)])
def test_emulation_is_believed_as_far_as_it_has_agreed(ratio: float, apart: float) -> None:
    ratios = ratio * np.exp(np.random.default_rng(0).normal(0.0, apart, 60))
    ratios[0] = 50.0  # an engine that did not do what its plan says
    model = ErrorModel(prior(), measured(PLANS[:1], emulation_ratios=ratios))
    weighed, unknown, floor = model.combine(np.full((1, 3), 1e-3), np.array([2e-3 * ratio, math.nan, 0.0]))[0]
    assert unknown == 1e-3
    assert floor < 1e-3
    # Where it was far apart the law is believed more; else its bias is taken off.
    assert weighed == pytest.approx(1e-3 if apart else 2e-3, rel=0.1)


def test_errors_below_the_floor_are_drawn_below_it() -> None:
    """The prior is bounded ten e-folds below the floor, so that groups without an error add none to any plan's."""
    exact = ErrorModel(prior(log_square_errors=(-200.0,) * GROUPS), measured(PLANS[:1]))
    draws = exact.sample(np.random.default_rng(0), 50)
    assert exact.mode == pytest.approx(math.log(1e-14) - 10.0)
    assert draws.max() < -35.0
    assert exact.predict(PLANS, draws).max() < 1.01e-7


def test_the_largest_part_decides_after_the_sum() -> None:
    """Two parts: groups that err in different ones do not add up, those that err in one do."""
    squares = (math.log(1e-6),) * GROUPS
    shares = tuple((1.0, 0.0) if group % 2 else (0.0, 1.0) for group in range(GROUPS))
    for part_shares, groups in ((shares, GROUPS // 2), (None, GROUPS)):
        model = ErrorModel(prior(log_square_errors=squares, part_shares=part_shares), measured(PLANS[:0]))
        assert errors(model, PLANS[1:2]) == pytest.approx([1e-3 * math.sqrt(groups)], rel=1e-4)
