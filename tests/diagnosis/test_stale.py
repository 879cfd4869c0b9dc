"""Rows are called stale or torn where they equal rows of the reference, and not where random numbers are alike."""

from __future__ import annotations

import numpy as np

from mptune.diagnosis.patterns.scaled import Compared
from mptune.diagnosis.patterns.stale import find_stale


def test_random_rows_of_two_runs_are_no_torn_ones() -> None:
    """The emulation in FP16 of a model that draws random numbers differs by these: FP16 explains nothing there."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        computed = 2 * rng.normal(size=(4, 8))
        isolated, again, emulated = (computed + rng.normal(size=(4, 8)) for _ in range(3))
        assert find_stale(Compared.of(again, isolated, emulated).of_one_precision(), 1) is None


def test_rows_of_an_earlier_run_are_stale() -> None:
    rng = np.random.default_rng(0)
    isolated, emulated = (rng.normal(size=(4, 8)) for _ in range(2))
    late = np.vstack([isolated[:1], isolated[:-1]])
    stale = find_stale(Compared.of(late, isolated, emulated).of_one_precision(), 1)
    assert stale is not None
    assert stale.whole == (1, 2, 3)
    assert not stale.torn
