"""What few samples say of an error, and of the difference of two."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.paired import compare_errors, error_interval, pseudo_values, significantly_smaller

OWN = "metric.py:loss"


def error_of(*outputs: list[float] | np.ndarray, metric: str = "relative_l2") -> OutputError:
    return OutputError({f"y{k}": {metric: tuple(map(float, values))} for k, values in enumerate(outputs)})


def test_the_interval_of_a_mean_is_students() -> None:
    values = [0.3, -0.1, 0.25, 0.2]
    assert pseudo_values(error_of(values, metric=OWN), OWN) == pytest.approx(values)
    low, high = error_interval(error_of([1.0, 2.0, 3.0, 4.0], metric=OWN), OWN) or (0.0, 0.0)
    half = 3.182446 * math.sqrt(5.0 / 3.0 / 4.0)
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half), rel=1e-6)


def test_intervals_of_errors_hold_the_true_mean() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        values = np.exp(generator.normal(math.log(1e-3), 0.3, 12))
        low, high = error_interval(error_of(values), "relative_l2") or (math.inf, 0.0)
        held += low <= 1e-3 * math.exp(0.3**2 / 2) <= high
    assert 0.93 <= held / 1000 <= 0.97


def test_one_sample_or_one_that_is_not_finite_has_no_interval() -> None:
    assert error_interval(error_of([1e-3]), "relative_l2") is None
    assert error_interval(error_of([1e-3, math.inf]), "relative_l2") is None
    assert compare_errors(error_of([1e-3, 1e-3]), error_of([1e-3] * 3), "relative_l2") is None


def test_samples_that_are_difficult_for_both_plans_do_not_hide_their_difference() -> None:
    difficulty = np.exp(np.random.default_rng(1).normal(0.0, 1.0, 8))
    one, other = error_of(1e-3 * difficulty), error_of(1.1e-3 * difficulty)
    difference = compare_errors(one, other, "relative_l2")
    assert difference is not None
    assert difference.value == pytest.approx(1 / 1.1)
    assert difference.is_significant
    low, high = error_interval(one, "relative_l2") or (0.0, 0.0)
    assert low < 1.1 * one.value("relative_l2") < high, "their intervals overlap"


def test_differences_of_nothing_are_seldom_significant() -> None:
    generator = np.random.default_rng(2)
    found = 0
    for _ in range(1000):
        one, other = (error_of(np.exp(generator.normal(0.0, 0.3, 6))) for _ in range(2))
        difference = compare_errors(one, other, "relative_l2")
        assert difference is not None
        found += difference.is_significant
    assert 0.03 <= found / 1000 <= 0.07


def test_the_worst_output_counts_in_each_resample() -> None:
    error = error_of([1.0, 1.0, 4.0], [2.0, 2.0, 1.0])
    assert error.values_without_one("relative_l2") == pytest.approx((2.5, 2.5, 2.0))


def test_many_are_compared_as_two_are() -> None:
    generator = np.random.default_rng(3)
    errors = [error_of(scale * np.exp(generator.normal(0.0, 0.2, 5))) for scale in np.geomspace(1e-4, 2e-4, 12)]
    values = np.array([error.value("relative_l2") for error in errors])
    assert (significantly_smaller(values, [None] * 12) == (values[:, None] < values)).all(), "doubt is unknown"
    smaller = significantly_smaller(values, [pseudo_values(error, "relative_l2") for error in errors])
    assert smaller.any()
    assert not smaller.all()
    for i, one in enumerate(errors):
        for j, other in enumerate(errors):
            difference = compare_errors(one, other, "relative_l2")
            assert difference is not None
            assert smaller[i, j] == (difference.is_significant and difference.value < 1.0)
