"""Harder simulated models: what is different from the default, and that the default is what it was."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.simulator import HARDER, Hard, Truth


def test_the_default_models_are_what_they_were() -> None:
    truth = Truth(40, 3)
    plans = np.random.default_rng(0).random((3, 40)) < 0.5
    assert truth.latency(plans).sum() / truth.base == pytest.approx(2.78870062, rel=1e-6)
    assert truth.error(plans).sum() == pytest.approx(0.0182539443, rel=1e-6)


def test_errors_of_neighbours_are_correlated_and_others_add_in_squares() -> None:
    truth = Truth(12, 0, hard=Hard(correlation=(0.4, 0.4)))
    plans = np.zeros((2, 12), dtype=bool)
    plans[0, [4, 5]] = plans[1, [4, 7]] = True
    first, second, third = truth.errors[[4, 5, 7]]
    together, apart = truth.error(plans) ** 2 - 1e-14
    assert together == pytest.approx(first**2 + second**2 + 0.8 * first * second, rel=1e-6)
    assert apart == pytest.approx(first**2 + third**2, rel=1e-6)


def test_one_group_errors_are_off_by_a_third_of_a_decade_and_stay_so() -> None:
    truth = Truth(400, 0, hard=Hard())
    misses = np.log10(truth.emulated / truth.errors)
    assert misses.std() == pytest.approx(0.35, abs=0.04)
    group = int(np.flatnonzero(~truth.overflows)[0])
    alone = {g: "fp16" if g == truth.ids[group] else "fp32" for g in truth.ids}
    assert truth.emulate([alone]) == [pytest.approx(truth.emulated[group])]
    plan = np.zeros(400, dtype=bool)
    plan[np.flatnonzero(~truth.overflows)[:5]] = True
    several = dict(zip(truth.ids, np.where(plan, "fp16", "fp32").tolist(), strict=True))
    assert truth.emulate([several])[0] == pytest.approx(float(truth.error(plan[None])[0]), rel=0.15)


def test_one_overflow_in_four_is_seen_by_builds_alone() -> None:
    truths = [Truth(400, seed, hard=Hard()) for seed in range(20)]
    missed, overflows = sum(t.missed.sum() for t in truths), sum(t.overflows.sum() for t in truths)
    assert missed / overflows == pytest.approx(0.25, abs=0.07)
    truth = truths[0]
    plan = np.zeros(400, dtype=bool)
    plan[[np.flatnonzero(truth.missed)[0], np.flatnonzero(~truth.overflows)[0]]] = True
    assert not truth.finite(plan[None])[0]
    assert math.isfinite(truth.emulate([dict(zip(truth.ids, np.where(plan, "fp16", "fp32").tolist(), strict=True))])[0])
    assert (
        np.isinf(np.array(truth.prior("precision").log_square_errors)).sum() == (truth.overflows & ~truth.missed).sum()
    )


def test_a_quarter_of_the_boundaries_costs_more_than_the_prior_says() -> None:
    plain, hard = Truth(400, 0), Truth(400, 0, hard=Hard())
    dearer = hard.costs > plain.costs
    assert dearer.mean() == pytest.approx(0.25, abs=0.06)
    assert np.array_equal(Truth(400, 0, hard=HARDER).roofline_costs, plain.roofline_costs)
    assert np.array_equal(hard.times, plain.times)


def test_harder_models_differ_in_timings_and_rooflines_alone() -> None:
    hard, harder, plain = Truth(400, 0, hard=Hard()), Truth(400, 0, hard=HARDER), Truth(400, 0)
    plans = np.random.default_rng(0).random((3, 400)) < 0.5
    assert np.array_equal(hard.latency(plans), harder.latency(plans))
    assert np.array_equal(hard.emulated, harder.emulated)
    assert (hard.timing, harder.timing, plain.timing) == (0.0033, 0.015, 0.015)
    saved = hard.times[:, 0] - hard.times[:, 1]
    assert np.log(hard.roofline_gains / saved).std() == pytest.approx(0.3, abs=0.03)
    assert np.array_equal(harder.roofline_gains, plain.roofline_gains)
    assert np.log(harder.roofline_gains / saved).std() == pytest.approx(0.5, abs=0.05)
