"""What was recorded is read where its layout is clear, and refused with what its shape looks like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.diagnosis.rows import Layout, read_recording
from mptune.errors import DataError

LAYOUT = Layout(((1, 6, 4),) * 3, stacked=False)
VALUES = np.arange(72, dtype=np.float32).reshape(3, 6, 4)


def read(folder: Path, array: np.ndarray) -> np.ndarray:
    np.savez(folder / "out.npz", y=array)
    return np.concatenate([sample["y"] for sample in read_recording(folder / "out.npz", {"y": LAYOUT})])


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 1, 6, 4), (3, 24)])
def test_axes_of_one_and_flat_rows_are_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.testing.assert_array_equal(read(tmp_path, VALUES.reshape(shape)), VALUES)


@pytest.mark.parametrize(
    ("arrays", "message", "hint"),
    [
        ({"scores": (4, 3)}, "has no output 'y': it holds 'scores'", "by its name: np.savez"),
        ({"x": (4, 3)}, "has no output 'y': it holds 'x'", "these are inputs of the model"),
        ({"x": (4, 3), "scores": (4, 3)}, "has no output 'y': it holds 'x', 'scores'", "by its name: np.savez"),
        ({"y": (12,)}, "has shape [12], the data give [4, 3]", "record the output itself"),
        ({"y": (3, 4)}, "has shape [3, 4], the data give [4, 3]", "record the output itself"),
        ({"y": (3, 5)}, "has shape [3, 5], the data give [4, 3]", "record the output itself"),
        ({"y": (4, 2, 3)}, "has shape [4, 2, 3], the data give [4, 3]", "record the output itself"),
        ({"y": ()}, "has shape [], the data give [4, 3]", "record the output itself"),
        ({"y": (5, 3)}, "holds 5 rows of output 'y', the data give 4", "without any added"),
    ],
)
def test_what_does_not_fit_is_refused_in_words_that_fit(
    arrays: dict[str, tuple[int, ...]], message: str, hint: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "out.npz", **{name: np.ones(shape) for name, shape in arrays.items()})  # type: ignore[arg-type]
    layout = Layout(((1, 3),) * 4, stacked=False)
    with pytest.raises(DataError) as caught:
        read_recording(tmp_path / "out.npz", {"y": layout}, ["x"])
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_an_array_without_a_name_is_the_only_output(tmp_path: Path) -> None:
    np.savez(tmp_path / "out.npz", np.ones((4, 3)))
    layout = Layout(((1, 3),) * 4, stacked=False)
    assert len(read_recording(tmp_path / "out.npz", {"y": layout})) == 4
