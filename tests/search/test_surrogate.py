"""The posterior recovers a law that it was given evaluations of."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mptune.search.cut import Tie
from mptune.search.surrogate import (
    ErrorModel,
    LatencyModel,
    Linear,
    Observations,
    Prior,
    keys,
    overflow_probabilities,
    stack,
)

GROUPS = 10
IDS = tuple(f"g{i}" for i in range(GROUPS))
TIES = tuple(Tie((i, i + 1)) for i in range(GROUPS - 1))
RNG = np.random.default_rng(0)
GAINS = RNG.uniform(0.1, 1.0, GROUPS)
COSTS = RNG.uniform(0.0, 0.1, len(TIES))
SQUARES = RNG.uniform(-18.0, -9.0, GROUPS)
BASE = 12.0


def law(plans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    crossed = np.array([tie.crossed(plans) for tie in TIES])
    return BASE - plans @ GAINS + COSTS @ crossed, np.sqrt(plans @ np.exp(SQUARES) + 1e-14)


def seen(plans: np.ndarray, finite: np.ndarray | None = None) -> Observations:
    latency, error = law(plans)
    count = len(plans)
    return Observations(plans, latency, np.full(count, 1e-3), error, np.ones(count) if finite is None else finite, BASE)


def prior(**options: object) -> Prior:
    rng = np.random.default_rng(1)
    known = {
        "log_square_errors": tuple(SQUARES + rng.normal(0, 2.0, GROUPS)),
        "gains_ms": tuple(7.0 * GAINS * rng.lognormal(0, 0.5, GROUPS)),
        "ties": TIES,
        "tie_costs_ms": tuple(7.0 * COSTS * rng.lognormal(0, 0.5, len(TIES))),
        **options,
    }
    return Prior(IDS, **known)  # type: ignore[arg-type]


PLANS = np.vstack([np.zeros(GROUPS, dtype=bool), np.ones(GROUPS, dtype=bool), RNG.random((60, GROUPS)) < 0.5])
NEW = RNG.random((30, GROUPS)) < 0.5


def test_latency_is_learnt_from_a_prior_in_other_units() -> None:
    model = LatencyModel(prior(), seen(PLANS))
    predicted = model.predict(NEW, model.mean()[None])[0]
    assert np.abs(predicted - law(NEW)[0]).max() < 0.03
    draws = model.samples(np.random.default_rng(0), 50)
    assert (draws[:, GROUPS:-1] >= 0).all()
    assert np.abs(model.predict(NEW, draws) - law(NEW)[0]).mean() < 0.05


def test_two_builds_fix_the_scale() -> None:
    model = LatencyModel(prior(), seen(PLANS[:2]))
    assert model.predict(PLANS[1:2], model.mean()[None])[0, 0] == pytest.approx(law(PLANS[1:2])[0][0], rel=0.02)


def test_groups_of_one_kind_miss_the_prior_alike() -> None:
    """Builds of some groups tell what others of their kind gain; without kinds they say nothing of them."""
    rng = np.random.default_rng(3)
    groups = 40
    fast = np.arange(groups) % 2 == 0
    gains = np.where(fast, 0.30, 0.05)  # the prior holds all for equal
    plans = rng.random((10, groups)) < 0.5
    plans[:, groups // 2 :] = False
    plans[0] = True
    builds = np.ones(len(plans))
    told = Observations(plans, BASE - plans @ gains, 1e-3 * builds, 1e-3 * builds, builds, BASE)
    ids = tuple(f"g{i}" for i in range(groups))
    kinds = tuple(("matmul" if even else "norm", "repeated") for even in fast)

    def misses(known: Prior) -> np.ndarray:
        learnt = LatencyModel(known, told).mean()[:groups]
        return np.abs(learnt - gains)[groups // 2 :]

    flat = Prior(ids, gains_ms=(0.1,) * groups)
    assert misses(replace(flat, kinds=kinds)).max() < 0.03
    assert misses(flat).max() > 0.1


def test_kinds_without_a_second_member_change_nothing() -> None:
    alone = replace(prior(), kinds=tuple((f"kind {i}",) for i in range(GROUPS)))
    without_ties = {"ties": (), "tie_costs_ms": ()}
    with_kinds = LatencyModel(replace(alone, **without_ties), seen(PLANS)).mean()  # type: ignore[arg-type]
    np.testing.assert_array_equal(with_kinds, LatencyModel(prior(**without_ties), seen(PLANS)).mean())


def test_exact_terms_are_the_law() -> None:
    exact = prior(gains_ms=tuple(GAINS), tie_costs_ms=tuple(COSTS), exact=True)
    model = LatencyModel(exact, seen(PLANS[:1]))
    assert model.predict(NEW, model.mean()[None])[0] == pytest.approx(law(NEW)[0], rel=1e-6)


def test_errors_are_learnt_from_a_prior_that_is_wrong() -> None:
    model = ErrorModel(prior(), seen(PLANS))
    ratio = model.predict(NEW, model.typical[None])[0] / law(NEW)[1]
    assert np.quantile(np.abs(np.log(ratio)), 0.9) < 0.1
    before = ErrorModel(prior(), seen(PLANS[:1]))
    assert np.abs(np.log(before.predict(NEW, before.typical[None])[0] / law(NEW)[1])).max() > 0.5


def test_a_true_prior_stays(tmp_path: object) -> None:
    model = ErrorModel(prior(log_square_errors=tuple(SQUARES)), seen(PLANS))
    assert np.abs(model.typical - SQUARES).max() < 0.3
    assert np.std(model.samples(np.random.default_rng(0), 200), axis=0).max() < 0.3


def test_flat_priors_predict_something() -> None:
    flat = Prior(IDS)
    observed = seen(PLANS)
    latency, error = LatencyModel(flat, observed), ErrorModel(flat, observed)
    assert np.abs(latency.predict(NEW, latency.mean()[None])[0] - law(NEW)[0]).max() < 0.6
    assert np.isfinite(error.predict(NEW, error.typical[None])).all()


def test_finite_plans_clear_and_failed_ones_raise_jointly() -> None:
    plans = np.zeros((3, GROUPS), dtype=bool)
    plans[0, :4] = True
    plans[1, 3:6] = True
    chances = overflow_probabilities(prior(), seen(plans, np.array([1.0, 0.0, np.nan])))
    assert chances[:4].max() < 0.01
    assert chances[4] == pytest.approx(chances[5])
    assert 0.4 < chances[4] < 0.7
    assert chances[6] == pytest.approx(0.01)
    plans[2, [3, 4, 6]] = True
    chances = overflow_probabilities(prior(), seen(plans, np.array([1.0, 0.0, 1.0])))
    assert chances[5] > 0.9
    assert chances[4] < 0.05


def test_an_overflow_seen_by_emulation_is_believed() -> None:
    squares = (math.inf, *SQUARES[1:])
    assert overflow_probabilities(prior(log_square_errors=squares), seen(PLANS[:1]))[0] > 0.9
    model = ErrorModel(prior(log_square_errors=squares), seen(PLANS[:1]))
    assert np.isfinite(model.typical).all()


def test_a_gaussian_update_by_hand() -> None:
    model = Linear(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    model.update(np.array([[1.0, 0.0]]), np.array([3.0]), np.array([1.0]))
    assert model.posterior_mean == pytest.approx([2.0, 2.0])
    draws = model.sample(np.random.default_rng(0), 20000)
    assert draws.mean(axis=0) == pytest.approx([2.0, 2.0], abs=0.03)
    assert draws.var(axis=0) == pytest.approx([0.5, 1.0], abs=0.03)


def test_few_and_many_observations_are_solved_alike() -> None:
    rng = np.random.default_rng(2)
    rows, values, noise = rng.normal(size=(7, 4)), rng.normal(size=7), rng.uniform(0.1, 1.0, 7)
    many, few = (Linear(rng_mean, np.array([1.0, 2.0, 0.5, 1.0])) for rng_mean in (np.zeros(4), np.zeros(4)))
    evidence = many.update(rows, values, noise)
    # Parameters that nothing is said of make the other way the smaller.
    wide = Linear(np.zeros(9), np.append(few.sd, np.ones(5)))
    assert wide.update(np.hstack([rows, np.zeros((7, 5))]), values, noise) == pytest.approx(evidence)
    assert wide.posterior_mean[:4] == pytest.approx(many.posterior_mean)
    draws = (model.sample(np.random.default_rng(0), 20000)[:, :4] for model in (many, wide))
    assert np.cov(next(draws).T) == pytest.approx(np.cov(next(draws).T), abs=0.02)


def test_emulated_errors_teach_as_measured_ones_do() -> None:
    told = replace(seen(PLANS[:1]), emulated=(PLANS[1:], law(PLANS[1:])[1]))
    model = ErrorModel(prior(), told)
    ratio = model.predict(NEW, model.typical[None])[0] / law(NEW)[1]
    assert np.quantile(np.abs(np.log(ratio)), 0.9) < 0.1


def test_an_emulated_overflow_raises_its_groups_and_teaches_no_error() -> None:
    plans = np.zeros((2, GROUPS), dtype=bool)
    plans[0, :2], plans[1, 4:] = True, True
    told = replace(seen(PLANS[:1]), emulated=(plans, np.array([math.inf, 1e-3])))
    chances = overflow_probabilities(prior(), told)
    assert chances[:2].min() > 0.4
    assert chances[2:].max() == pytest.approx(0.01), "what emulation finds finite may still fail"
    assert np.isfinite(ErrorModel(prior(), told).typical).all()


def test_the_miss_of_the_baselines_timing_is_learnt() -> None:
    known = prior(gains_ms=tuple(GAINS), tie_costs_ms=tuple(COSTS))
    observed = replace(seen(PLANS), base_ms=0.98 * BASE, base_sd_ms=0.02 * BASE)
    model = LatencyModel(known, observed)
    assert model.base(model.mean()[None])[0] == pytest.approx(BASE, rel=5e-3)
    assert LatencyModel(known, seen(PLANS)).base(model.mean()[None])[0] == BASE


def test_stacked_plans_come_once() -> None:
    one = np.array([[True, False], [False, False]])
    assert stack([one, one[::-1]], 2).tolist() == one.tolist()
    assert len(set(keys(np.array([[True] * 9, [True] * 8 + [False], [True] * 9])))) == 2
