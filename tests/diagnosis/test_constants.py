"""What a constant of another model is of the reference's: said where it is plain, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mptune.diagnosis.pairs.constants import constant_difference, what_it_is

RNG = np.random.default_rng(2)
WEIGHT = RNG.standard_normal((16, 16)).astype(np.float32)
KERNEL = RNG.standard_normal((8, 4, 3, 3)).astype(np.float32)


def to_steps(x: np.ndarray) -> np.ndarray:
    step = np.abs(x).max() / 127
    found: np.ndarray = np.round(x / step) * step
    return found


def to_bits(x: np.ndarray, bits: int) -> np.ndarray:
    fraction, exponent = np.frexp(x)
    found: np.ndarray = np.ldexp(np.round(fraction * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)
    return found


@pytest.mark.parametrize(
    ("wanted", "change", "words"),
    [
        (WEIGHT, np.zeros_like, "it is zero throughout in the candidate"),
        (WEIGHT, lambda x: 0.5 * x, "it is 0.5 times the reference's"),
        (WEIGHT, lambda x: x.T, "it is the reference's with its axes in the order (1, 0)"),
        (KERNEL, lambda x: x[:, :, ::-1], "it has the entries of axis 2 in reverse order"),
        (
            KERNEL,
            lambda x: x.transpose(1, 0, 2, 3).reshape(x.shape),
            "it is the reference's with its axes in the order",
        ),
        (WEIGHT, to_steps, "it is the reference's rounded to steps, as to INT8"),
        (
            WEIGHT,
            lambda x: np.stack([to_steps(row) for row in x]),
            "it is the reference's, each entry of axis 0 rounded",
        ),
        (WEIGHT, lambda x: to_bits(x, 3), "it is the reference's rounded to FP8 (E4M3)"),
        (WEIGHT, lambda x: x + 0.01 * RNG.standard_normal(x.shape), ""),
        (WEIGHT, lambda x: RNG.permutation(x.ravel()).reshape(x.shape), ""),
    ],
)
def test_what_a_constant_is(wanted: np.ndarray, change: Callable[[np.ndarray], np.ndarray], words: str) -> None:
    got = np.asarray(change(wanted), np.float32)
    said = what_it_is(got.astype(np.float64), wanted.astype(np.float64))
    assert said.startswith(words)
    assert bool(said) == bool(words)
    found = constant_difference(wanted, got)
    assert found is not None
    assert words in found.text


def test_values_that_are_nan_are_counted() -> None:
    broken = WEIGHT.copy()
    broken[3, :4] = np.nan
    found = constant_difference(WEIGHT, broken)
    assert found is not None
    assert found.text == "4 of 256 values are NaN or Inf in the candidate, all in entry 3 of axis 0"


def test_a_channel_that_is_zero() -> None:
    wide = np.concatenate([KERNEL] * 4)
    broken = wide.copy()
    broken[5] = 0
    found = constant_difference(wide, broken)
    assert found is not None
    assert found.text.endswith(": these are zero in the candidate, all in entry 5 of axis 0")
