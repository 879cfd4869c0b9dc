"""What is said of two constants that differ, and that a rounded one is the same."""

from __future__ import annotations

import numpy as np
import pytest

from mptune.diagnosis.structure import constant_difference

WEIGHT = np.random.default_rng(2).standard_normal((16, 16))


def replaced(array: np.ndarray, place: object, value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("left", "right", "dtype", "text"),
    [
        ([3.0], [2.0], np.float32, "1 of 1 values differ"),
        ([0.1, 22000.0, -18000.0, 1e-9], [0.1, 1e4, -1e4, 0.0], np.float16, "2 of 4 values differ"),
        ([0.1, -1e9], [0.1, -np.inf], np.float16, "1 are NaN or Inf in the candidate"),
        (WEIGHT, replaced(WEIGHT, (3, slice(4)), np.nan), np.float32, "4 are NaN or Inf in the candidate"),
    ],
)
def test_how_a_constant_differs(left: object, right: object, dtype: type, text: str) -> None:
    difference = constant_difference(np.array(left, np.float32), np.array(right, np.float32).astype(dtype))
    assert difference is not None
    said, values, _ = difference
    assert text in said
    assert values is not None
    if dtype is np.float32:
        np.testing.assert_array_equal(values, np.array(right, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_rounded_constant_is_the_same(dtype: type) -> None:
    rounded = np.array([0.1, 65504], np.float16).astype(dtype)
    assert constant_difference(np.array([0.1, 7e4], np.float32), rounded) is None
