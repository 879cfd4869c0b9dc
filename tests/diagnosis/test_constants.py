"""How a constant of another model differs: values that are NaN, and channels that are zero."""

from __future__ import annotations

import numpy as np

from mptune.diagnosis.pairs.structure import constant_difference

RNG = np.random.default_rng(2)
WEIGHT = RNG.standard_normal((16, 16)).astype(np.float32)
KERNEL = RNG.standard_normal((8, 4, 3, 3)).astype(np.float32)


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
