"""Files in and out: nothing pickled, whole or not at all, any name, any shape."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mptune.data.archive import read_numpy, read_sample_shapes, read_samples, save_samples
from mptune.errors import DataError


def described(sample: Mapping[str, np.ndarray]) -> list[Any]:
    return [(name, array.dtype, array.shape, array.tobytes()) for name, array in sample.items()]


def test_names_types_and_shapes_survive(tmp_path: Path) -> None:
    samples = [
        {"a/b:0": np.ones((2, 3), np.float32), "höhe\0.npy": np.array(7, np.int64), "": np.zeros(0, np.float16)},
        {"a/b:0": np.ones((5, 1), np.float32), "höhe\0.npy": np.array(8, np.int64), "": np.array([True])},
        {"a/b:0": np.array([np.nan, np.inf], np.float64)},
        {},
    ]
    path = tmp_path / "data" / "search.npz"
    save_samples(path, samples)
    for count in (2, 4):
        assert [described(sample) for sample in read_samples(path, count)] == list(map(described, samples[:count]))
    assert read_sample_shapes(path) == tuple({n: array.shape for n, array in sample.items()} for sample in samples)
    save_samples(path, [])
    assert read_samples(path) == ()


@pytest.mark.parametrize("array", [np.array(["a", None], dtype=object), np.zeros(2, "V2")])
def test_what_npz_cannot_hold_is_refused_by_name_and_the_old_file_stays(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "s.npz"
    save_samples(path, [{"x": np.array(1.0)}])
    with pytest.raises(DataError, match="'label' has type"):
        save_samples(path, [{"label": array}])
    assert read_samples(path)[0]["x"] == 1.0


@pytest.mark.parametrize("read", [read_samples, read_sample_shapes])
@pytest.mark.parametrize(
    "header", [None, b"[1]", b'{"format": 1, "samples": []}', b'{"format": 2, "samples": 1000000000000}']
)
def test_an_archive_of_someone_else(tmp_path: Path, read, header: bytes | None) -> None:
    arrays = {"x": np.zeros(3)} if header is None else {"header": np.frombuffer(header, np.uint8)}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=r"x\.npz was not written by this mptune") as caught:
        read(tmp_path / "x.npz")
    assert "--fresh" in caught.value.hint


def refused(read, path: Path, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read(path)
    assert path.name in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_more_samples_are_declared_than_there_are(tmp_path: Path) -> None:
    header = np.frombuffer(b'{"format": 2, "samples": [{"x": [3]}, {"x": [3]}]}', np.uint8)
    np.savez(tmp_path / "s.npz", header=header, **{"0_0": np.zeros(3)})
    refused(read_samples, tmp_path / "s.npz", "cannot be read as a NumPy file")
    assert len(read_samples(tmp_path / "s.npz", 1)) == 1


def test_damaged_files_and_pickled_objects(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", x=np.arange(1000.0))
    np.save(tmp_path / "whole.npy", np.arange(1000.0))
    archive, array = ((tmp_path / name).read_bytes() for name in ("whole.npz", "whole.npy"))
    damaged = (archive[:500], archive[:200] + bytes(20) + archive[220:], array[:4000])
    for content in (b"", b"\x93NUMPY", b"PK\x03\x04", b"hello, world", b"\0" * 100, *damaged):
        (tmp_path / "x.npz").write_bytes(content)
        refused(read_numpy, tmp_path / "x.npz", "cannot be read as a NumPy file")
    refused(read_numpy, tmp_path / "none.npz", "No such file")
    objects = np.array([None, "a"], dtype=object)
    np.savez(tmp_path / "objects.npz", objects)
    np.save(tmp_path / "objects.npy", objects)
    objects.dump(tmp_path / "dumped.npy")
    for name, words in (("objects.npz", "Object arrays"), ("objects.npy", "Object arrays"), ("dumped.npy", "pickled")):
        refused(read_numpy, tmp_path / name, words)
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as file:
        file.writestr("readme.txt", "hello")
    refused(read_numpy, tmp_path / "z.npz", "'readme.txt' is not an array")
