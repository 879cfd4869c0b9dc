"""Folders of arrays: shards that hold several samples, read one at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet, LazySamples
from mptune.errors import DataError
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import DataSettings


def load(folder: Path, shape: tuple[Any, ...] = (1, 4), batch: int = 1) -> CalibrationSet:
    return load_calibration(folder, (TensorInfo("x", "float", shape),), DataSettings(batch=batch), 0)


def numbered(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)[:, None].repeat(4, axis=1)


def first_values(found: CalibrationSet) -> list[float]:
    return [float(sample["x"].flat[0]) for sample in found.samples]


def test_files_with_more_rows_than_the_batch_are_shards(tmp_path: Path) -> None:
    np.savez(tmp_path / "part10.npz", x=numbered(4, 3))
    np.savez(tmp_path / "part2.npz", x=numbered(3))
    assert first_values(load(tmp_path)) == [0, 1, 2, 3, 4, 5, 6]


def test_with_a_dynamic_batch_a_file_is_a_feed_unless_it_is_called_a_shard(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=numbered(4))
    assert [sample["x"].shape for sample in load(tmp_path, ("batch", 4)).samples] == [(4, 4)]
    (tmp_path / "a.npz").rename(tmp_path / "shard-0.npz")
    np.savez(tmp_path / "shard-1.npz", x=numbered(2, 4))
    assert [sample["x"].shape for sample in load(tmp_path, ("batch", 4), 2).samples] == [(2, 4)] * 3


def test_rows_that_fit_no_sample_are_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=numbered(3))
    with pytest.raises(DataError):
        load(tmp_path, (2, 4))


def test_shards_need_the_memory_of_one(tmp_path: Path) -> None:
    wide = np.ones((16, 1 << 16), np.float32)  # 4 MiB
    for k in range(12):
        wide[:] = k
        wide[:, 0] = np.arange(16)
        np.save(tmp_path / f"{k}.npy", wide)
    tracemalloc.start()
    found = load(tmp_path, (1, 1 << 16))
    search, held_out = found.split(0, 0.25, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found.samples, LazySamples)
    assert (len(found.samples), len(search.samples), len(held_out.samples)) == (192, 8, 8)
    assert peak < 40 << 20, "48 MiB of data; 64 samples of .25 MiB are looked at"


def test_a_sample_can_be_asked_for_in_any_order(tmp_path: Path) -> None:
    for k in range(3):
        np.savez(tmp_path / f"{k}.npz", x=numbered(2, 2 * k))
    samples = load(tmp_path).samples
    assert [float(samples[k]["x"][0, 0]) for k in (5, 0, 3, -1)] == [5, 0, 3, 5]
    assert len(samples[1:4]) == 3
    with pytest.raises(IndexError):
        samples[6]
