"""The posterior of errors recovers a law that it was given evaluations of; overflows are blamed on the right groups."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mptune.tuning.sampler.error_model import ErrorModel
from mptune.tuning.sampler.latency_model import LinearGaussian
from tests.tuning.additive import GROUPS, NEW, PLANS, SQUARES, law, prior, seen


def test_errors_are_learnt_from_a_prior_that_is_wrong() -> None:
    model = ErrorModel(prior(), seen(PLANS))
    ratio = model.predict(NEW, model.mode[None])[0] / law(NEW)[1]
    assert np.quantile(np.abs(np.log(ratio)), 0.9) < 0.1
    before = ErrorModel(prior(), seen(PLANS[:1]))
    assert np.abs(np.log(before.predict(NEW, before.mode[None])[0] / law(NEW)[1])).max() > 0.5


def test_a_true_prior_stays(tmp_path: object) -> None:
    model = ErrorModel(prior(log_square_errors=tuple(SQUARES)), seen(PLANS))
    assert np.abs(model.mode - SQUARES).max() < 0.3
    assert np.std(model.sample(np.random.default_rng(0), 200), axis=0).max() < 0.3


def test_what_is_not_known_well_gives_way_and_what_is_known_stays() -> None:
    """One group's error was estimated from others, and is wrong by a factor of 20; all plans with it say so."""
    wrong = np.array(SQUARES)
    unknown = int(np.argmax(wrong))
    wrong[unknown] -= 2 * math.log(20.0)
    sds = np.zeros(len(wrong))
    sds[unknown] = 3.0
    held = PLANS[PLANS[:, unknown]][:3]
    told, untold = (
        ErrorModel(prior(log_square_errors=tuple(wrong), log_square_sds=doubts), seen(held))
        for doubts in (tuple(sds), None)
    )
    rest = np.arange(len(wrong)) != unknown
    assert abs(told.mode[unknown] - SQUARES[unknown]) < 0.5
    assert np.abs(told.mode[rest] - wrong[rest]).max() < 0.2
    assert np.abs(untold.mode[rest] - wrong[rest]).max() > np.abs(told.mode[rest] - wrong[rest]).max()
    spread = np.std(
        ErrorModel(prior(log_square_errors=tuple(wrong), log_square_sds=tuple(sds)), seen(PLANS[:0])).sample(
            np.random.default_rng(0), 400
        ),
        axis=0,
    )
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
        rest = np.arange(7) != left_out
        other = LinearGaussian(mean, sd)
        other.update(rows[rest], values[rest], noise[rest])
        assert misses[left_out] == pytest.approx(values[left_out] - rows[left_out] @ other.posterior_mean)
        draws = other.sample(np.random.default_rng(0), 40000) @ rows[left_out]
        assert sds[left_out] == pytest.approx(draws.std(), rel=0.03)


@pytest.mark.parametrize(("ratio", "apart"), [(1.0, 0.0), (1.3, 0.0), (1.0, 0.3)])
def test_emulation_is_believed_as_far_as_it_has_agreed(ratio: float, apart: float) -> None:
    rng = np.random.default_rng(0)
    ratios = ratio * np.exp(rng.normal(0.0, apart, 60))
    ratios[0] = 50.0  # an engine that did not do what its plan says
    model = ErrorModel(prior(), replace(seen(PLANS[:1]), emulation_ratios=ratios))
    predicted, told = np.full((1, 3), 1e-3), np.array([2e-3 * ratio, math.nan, 0.0])
    weighed, unknown, floor = model.combine(predicted, told)[0]
    assert unknown == 1e-3
    assert floor < 1e-3
    if apart:
        assert weighed == pytest.approx(1e-3, rel=0.1), "the law is believed more"
    else:
        assert weighed == pytest.approx(2e-3, rel=0.1), "its bias is taken off"


def test_errors_below_the_floor_are_drawn_below_it() -> None:
    """The prior is bounded ten e-folds below the floor, so that groups without an error add none to any plan's."""
    exact = ErrorModel(prior(log_square_errors=(-200.0,) * GROUPS), seen(PLANS[:1]))
    draws = exact.sample(np.random.default_rng(0), 50)
    assert exact.mode == pytest.approx(math.log(1e-14) - 10.0)
    assert draws.max() < -35.0
    assert exact.predict(PLANS, draws).max() < 1.01e-7


def test_the_largest_part_decides_after_the_sum() -> None:
    """Two parts: groups that err in different ones do not add up, those that err in one do."""
    shares = tuple((1.0, 0.0) if group % 2 else (0.0, 1.0) for group in range(GROUPS))
    squares = tuple(math.log(1e-6) for _ in range(GROUPS))
    known = prior(log_square_errors=squares)
    split = ErrorModel(replace(known, part_shares=shares), seen(PLANS[:0]))
    every = np.ones((1, GROUPS), dtype=bool)
    largest = max(GROUPS // 2, GROUPS - GROUPS // 2)
    assert split.predict(every, split.mode[None])[0, 0] == pytest.approx(1e-3 * math.sqrt(largest), rel=1e-4)
    whole = ErrorModel(known, seen(PLANS[:0]))
    assert whole.predict(every, whole.mode[None])[0, 0] == pytest.approx(1e-3 * math.sqrt(GROUPS), rel=1e-4)
