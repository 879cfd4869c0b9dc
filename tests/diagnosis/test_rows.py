"""What was recorded is read where its layout is clear, and refused with what its shape looks like."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from mptune.diagnosis.rows import Layout, read_recording
from mptune.errors import DataError

LAYOUT = Layout(((1, 6, 4),) * 3, stacked=False)
VALUES = np.arange(72, dtype=np.float32).reshape(3, 6, 4)


def read(folder: Path, array: np.ndarray) -> np.ndarray:
    np.savez(folder / "out.npz", y=array)
    return np.concatenate([sample["y"] for sample in read_recording(folder / "out.npz", {"y": LAYOUT}, "-o").outputs])


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 1, 6, 4), (3, 24)])
def test_axes_of_one_and_flat_rows_are_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    np.testing.assert_array_equal(read(tmp_path, VALUES.reshape(shape)), VALUES)


@pytest.mark.parametrize(
    ("array", "hint"),
    [
        (VALUES.argmax(-1), "it lacks the axis 2 of 4, as where an application keeps an index among them"),
        (VALUES.max(1), "it lacks the axis 1 of 6, as where an application keeps one value of them"),
        (VALUES[:, ::2], "other sizes along axis 1"),
        (VALUES[:2], "record all rows"),
    ],
)
def test_another_shape_is_refused_with_what_it_looks_like(array: np.ndarray, hint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, array)
    assert (caught.value.hint or "").startswith(hint)


def test_signalling_nans_warn_nobody(tmp_path: Path) -> None:
    bits = VALUES.view(np.uint32).copy()
    bits[0, 0, 0] = 0x7F800001
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(tmp_path, bits.view(np.float32))
        assert np.isnan(found.astype(np.float64)).sum() == 1
