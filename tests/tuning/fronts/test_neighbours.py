"""The points beside the chosen one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mptune.tuning.fronts.neighbours import compare_samples, error_ratio, neighbours
from tests.tuning.factory import make_error, make_evaluation
from tests.tuning.fronts.test_dominance import with_errors

FAST, CHOSEN, SLOW, SLOWEST = (
    with_errors(make_evaluation(ms, 1.0, number=number), [error, 1.1 * error, 0.9 * error])
    for number, (ms, error) in enumerate(((2.0, 4e-3), (3.0, 2e-3), (5.0, 1e-3), (9.0, 1e-6)))
)
FRONT = (FAST, CHOSEN, SLOW, SLOWEST)


def test_one_on_either_side() -> None:
    faster, slower = neighbours(FRONT, CHOSEN)
    assert (faster.evaluation, slower.evaluation) == (FAST, SLOW)
    assert (faster.latency_ms_delta, slower.latency_ms_delta) == (-1.0, 2.0)
    assert faster.error is not None
    assert faster.error.value == pytest.approx(2.0)
    assert faster.error.is_significant


def test_ends_have_one_neighbour_and_a_front_of_one_has_none() -> None:
    assert [one.evaluation for one in neighbours(FRONT, FAST)] == [CHOSEN]
    assert [one.evaluation for one in neighbours(FRONT, SLOWEST)] == [SLOW]
    assert neighbours((CHOSEN,), CHOSEN) == ()


def test_held_out_samples_count_where_both_have_met_them() -> None:
    confirmed = [replace(point, held_out=make_error(error)) for point, error in ((FAST, 8e-3), (CHOSEN, 2e-3))]
    difference = compare_samples(*confirmed)
    assert difference is not None
    assert difference.value == pytest.approx((3 * 4e-3 + 2 * 8e-3) / (5 * 2e-3))
    assert error_ratio(*confirmed) == pytest.approx(4.0)
    alone = compare_samples(confirmed[0], CHOSEN)
    assert alone is not None
    assert alone.value == pytest.approx(2.0)


def test_errors_of_different_samples_are_never_divided() -> None:
    """The chosen plan has met held-out samples, its neighbours have not, as where a long front is confirmed in part."""
    chosen = replace(CHOSEN, held_out=make_error(1e-4))
    faster, slower = neighbours((FAST, chosen, SLOW), chosen)
    assert faster.error_ratio == pytest.approx(2.0)
    assert slower.error_ratio == pytest.approx(0.5)
