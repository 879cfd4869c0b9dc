"""What few samples say of an error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mptune.data.metrics.accuracy import OutputError, error_interval

OWN = "metric.py:loss"


def error_of(*outputs: list[float] | np.ndarray, metric: str = "relative_l2") -> OutputError:
    return OutputError({f"y{k}": {metric: tuple(map(float, values))} for k, values in enumerate(outputs)})


def test_the_interval_of_a_mean_is_students() -> None:
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


def test_the_worst_output_counts_in_each_resample() -> None:
    error = error_of([1.0, 1.0, 4.0], [2.0, 2.0, 1.0])
    assert error.values_without_one("relative_l2") == pytest.approx((2.5, 2.5, 2.0))
