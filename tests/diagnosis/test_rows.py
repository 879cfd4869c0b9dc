"""Recordings are read where their layout is clear; rows are stale or torn where they equal others, not by chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.diagnosis.order import find_stale
from mptune.diagnosis.rows import Compared, Layout, read_recording
from mptune.errors import DataError

LAYOUT = Layout(((1, 6, 4),) * 3, stacked=False)
WRONG: list[tuple[int, ...]] = [(12,), (3, 4), (3, 5), (4, 2, 3), (5, 3), ()]
VALUES = np.arange(72, dtype=np.float32).reshape(3, 6, 4)


def read(folder: Path, array: np.ndarray) -> np.ndarray:
    np.savez(folder / "out.npz", y=array)
    return np.concatenate([sample["y"] for sample in read_recording(folder / "out.npz", {"y": LAYOUT})])


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 1, 6, 4), (3, 24)])
def test_axes_of_one_and_flat_rows_are_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.testing.assert_array_equal(read(tmp_path, VALUES.reshape(shape)), VALUES)


@pytest.mark.parametrize(
    ("name", "shape", "message", "hint"),
    [
        ("scores", (4, 3), "has no output 'y': it holds 'scores'", "by its name: np.savez"),
        *(("y", shape, f"has shape {list(shape)}, the data give [4, 3]", "all rows") for shape in WRONG),
    ],
)
def test_what_does_not_fit_is_refused_in_words_that_fit(
    name: str, shape: tuple[int, ...], message: str, hint: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "out.npz", **{name: np.ones(shape)})  # type: ignore[arg-type]
    with pytest.raises(DataError) as caught:
        read_recording(tmp_path / "out.npz", {"y": Layout(((1, 3),) * 4, stacked=False)})
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_an_array_without_a_name_is_the_only_output(tmp_path: Path) -> None:
    np.savez(tmp_path / "out.npz", np.ones((4, 3)))
    layout = Layout(((1, 3),) * 4, stacked=False)
    assert len(read_recording(tmp_path / "out.npz", {"y": layout})) == 4


RNG = np.random.default_rng(5)
SCORES = RNG.standard_normal((12, 6))
BOXES = np.concatenate([RNG.uniform(10, 50, (6, 20, 4)), RNG.uniform(0, 1, (6, 20, 3))], axis=2)


def test_random_rows_of_two_runs_are_no_torn_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        computed = 2 * rng.normal(size=(4, 8))
        isolated, again = (computed + rng.normal(size=(4, 8)) for _ in range(2))
        assert find_stale(Compared.of_rows(again, isolated, isolated), 1) is None


@pytest.mark.parametrize("size", [2, 8, 32])
def test_noise_is_not_torn_by_the_few_values_that_another_row_has_too(size: int) -> None:
    """Noise of twice FP16's size: rounding explains some values of a row, another row the rest by chance."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        wanted = rng.normal(size=(6, size))
        emulated, got = (wanted + scale * rng.normal(size=wanted.shape) for scale in (0.05, 0.1))
        assert find_stale(Compared.of_rows(got, wanted, emulated), 1) is None


@pytest.mark.smoke
def test_a_batch_that_holds_its_first_row_alone_and_labels_that_are_equal_by_chance() -> None:
    found = find_stale(Compared.of_rows(np.repeat(SCORES[:1], 12, 0), SCORES, SCORES), 1)
    assert found is not None
    assert set(found.source.values()) == {0}
    before = find_stale(Compared.of_rows(np.roll(BOXES, 1, 0), BOXES, BOXES), 1)
    assert before is not None
    assert before.lag == 1
    labels = np.array([0, 3, 2, 0, 3, 2, 1, 0, 2, 3, 0, 1])[:, None]
    assert find_stale(Compared.of_rows(np.where(labels == 2, 1, labels), labels, labels), 1) is None
