"""Rows are called stale or torn where they equal rows of the reference, and not where random numbers are alike."""

from __future__ import annotations

import numpy as np
import pytest

from mptune.diagnosis.patterns.orders import find_stale
from mptune.diagnosis.patterns.roundings import Compared

RNG = np.random.default_rng(5)
SCORES = RNG.standard_normal((12, 6))
BOXES = np.concatenate([RNG.uniform(10, 50, (6, 20, 4)), RNG.uniform(0, 1, (6, 20, 3))], axis=2)


def test_random_rows_of_two_runs_are_no_torn_ones() -> None:
    """The emulation in FP16 of a model that draws random numbers differs by these: FP16 explains nothing there."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        computed = 2 * rng.normal(size=(4, 8))
        isolated, again, emulated = (computed + rng.normal(size=(4, 8)) for _ in range(3))
        assert find_stale(Compared.of_rows(again, isolated, emulated).of_one_precision(), 1) is None


@pytest.mark.parametrize("size", [2, 8, 32])
def test_noise_is_not_torn_by_the_few_values_that_another_row_has_too(size: int) -> None:
    """Noise of twice FP16's size: rounding explains some values of a row, another row the rest by chance."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        wanted = rng.normal(size=(6, size))
        emulated, got = (wanted + scale * rng.normal(size=wanted.shape) for scale in (0.05, 0.1))
        assert find_stale(Compared.of_rows(got, wanted, emulated), 1) is None


@pytest.mark.smoke
def test_rows_of_later_samples_are_not_stale() -> None:
    found = find_stale(Compared.of_rows(np.concatenate([BOXES[:2], BOXES[3:], BOXES[-1:]]), BOXES, BOXES), 1)
    assert found is not None
    assert (found.is_ahead, found.rows) == (True, (2, 3, 4))
    before = find_stale(Compared.of_rows(np.concatenate([BOXES[:3], BOXES[2:-1]]), BOXES, BOXES), 1)
    assert before is not None
    assert not before.is_ahead
    stuck = find_stale(Compared.of_rows(np.concatenate([BOXES[:3], BOXES[[2, 2, 2]]]), BOXES, BOXES), 1)
    assert stuck is not None
    assert not stuck.is_ahead


def test_a_batch_that_holds_its_first_row_alone() -> None:
    found = find_stale(Compared.of_rows(np.repeat(SCORES[:1], 12, 0), SCORES, SCORES), 1)
    assert found is not None
    assert found.is_one_row
    before = find_stale(Compared.of_rows(np.roll(BOXES, 1, 0), BOXES, BOXES), 1)
    assert before is not None
    assert not before.is_one_row
    labels = np.array([0, 3, 2, 0, 3, 2, 1, 0, 2, 3, 0, 1])[:, None]
    assert find_stale(Compared.of_rows(np.where(labels == 2, 1, labels), labels, labels), 1) is None
