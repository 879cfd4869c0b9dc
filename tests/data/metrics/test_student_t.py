"""Quantiles of Student's t against SciPy's."""

from __future__ import annotations

import math

import pytest
from scipy.special import ndtri, stdtrit

from mptune.data.metrics.student_t import t_quantile

DEGREES = (0.3, 1, 1.5, 2, 3, 4.7, 10, 29.3, 100, 1234.5, 99_999, 5e5, 1e6, 1e7, 1e12)
LEVELS = (0.025, 0.3, 0.5, 0.500001, 0.75, 0.95, 0.975, 0.995, 0.9999)


@pytest.mark.parametrize("degrees", DEGREES)
def test_the_quantiles_are_scipys(degrees: float) -> None:
    for level in LEVELS:
        assert t_quantile(level, degrees) == pytest.approx(float(stdtrit(degrees, level)), rel=1e-9, abs=1e-12)


def test_of_infinite_degrees_it_is_the_normal_distribution() -> None:
    assert t_quantile(0.975, math.inf) == pytest.approx(float(ndtri(0.975)), rel=1e-12)


@pytest.mark.parametrize(("level", "degrees"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, math.nan)])
def test_what_has_no_quantile_is_refused(level: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(level, degrees)
