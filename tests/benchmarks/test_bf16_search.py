"""How two searches are compared: by plans timed in turn, with an interval over rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.bf16_search import Built, compare, near_front
from mptune.graph.plan import PrecisionPlan

ERRORS = {"00": 1e-7, "11": 1e-3, "1b": 2e-3, "bb": 1e-2}
TWO, THREE = ["00", "11"], ["00", "11", "1b", "bb"]
FASTER = {"00": 0.0, "11": math.log(0.6), "1b": math.log(0.55), "bb": math.log(0.5)}


def rounds(count: int, sd: float, seed: int = 0) -> dict[str, dict[str, float]]:
    """Timings of every plan in every round."""
    rng = np.random.default_rng(seed)
    return {key: {f"{n}": log + sd * rng.normal() for n in range(count)} for key, log in FASTER.items()}


def test_equal_searches_are_equal_whatever_the_timings() -> None:
    found = compare([(TWO, TWO)], ERRORS, rounds(4, 0.05))
    assert found.overall == pytest.approx((1.0, 1.0, 1.0))
    assert found.rounds == 4


def test_the_interval_holds_what_exact_timings_say() -> None:
    (exact, *_), *_ = compare([(TWO, THREE)], ERRORS, rounds(2, 0.0)).by_seed
    assert exact > 1.1
    held = [
        low <= exact <= high
        for seed in range(60)
        for _, low, high in compare([(TWO, THREE)], ERRORS, rounds(4, 0.01, seed)).by_seed
    ]
    assert np.mean(held) > 0.85


def test_seeds_are_averaged() -> None:
    timings = rounds(3, 0.01)
    found = compare([(TWO, THREE), (TWO, TWO)], ERRORS, timings)
    assert found.overall[0] == pytest.approx(math.sqrt(found.by_seed[0][0]))


def test_a_round_that_lacks_a_plan_is_not_counted() -> None:
    timings = rounds(3, 0.01)
    whole = compare([(TWO, THREE)], ERRORS, {key: dict(list(of.items())[:2]) for key, of in timings.items()})
    del timings["bb"]["2"]
    assert compare([(TWO, THREE)], ERRORS, timings) == whole
    assert whole.rounds == 2


def test_without_two_rounds_there_is_no_interval() -> None:
    ratio, low, high = compare([(TWO, THREE)], ERRORS, rounds(1, 0.0)).overall
    assert ratio > 1.0
    assert math.isnan(low)
    assert math.isnan(high)
    assert math.isnan(compare([(TWO, THREE)], ERRORS, {}).overall[0])


def test_plans_that_noise_may_have_kept_off_the_front_are_timed_again() -> None:
    def built(latency_ms: float, error: float) -> Built:
        return Built(PrecisionPlan.uniform("0" * 64, ["a"], "fp16"), latency_ms, error)  # type: ignore[arg-type]

    best, near, far = built(1.0, 1e-3), built(1.005, 1e-3), built(1.02, 1e-3)
    assert near_front([best, near, far, built(0.9, math.inf)]) == [best, near]
