"""Files in and out: nothing pickled, whole or not at all, any name, any shape."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from mptune.data.archive import read_archive, read_array, read_sample_shapes, read_samples, save_samples
from mptune.errors import DataError, RunError


def assert_same(left, right) -> None:
    assert [list(s) for s in left] == [list(s) for s in right]
    for a, b in zip(left, right, strict=True):
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert a[name].shape == b[name].shape
            np.testing.assert_array_equal(a[name], b[name])


def test_names_types_and_shapes_survive(tmp_path: Path) -> None:
    samples = [
        {"a/b:0": np.ones((2, 3), np.float32), "höhe\0.npy": np.array(7, np.int64), "": np.zeros(0, np.float16)},
        {"a/b:0": np.ones((5, 1), np.float32), "höhe\0.npy": np.array(8, np.int64), "": np.array([True])},
        {"a/b:0": np.array([np.nan, np.inf], np.float64)},
    ]
    path = tmp_path / "data" / "search.npz"
    save_samples(path, samples)
    assert_same(samples, read_samples(path))


def test_no_samples_and_empty_samples(tmp_path: Path) -> None:
    save_samples(tmp_path / "a.npz", [])
    save_samples(tmp_path / "b.npz", [{}, {}])
    assert read_samples(tmp_path / "a.npz") == ()
    assert read_samples(tmp_path / "b.npz") == ({}, {})


@pytest.mark.parametrize("array", [np.array(["a", None], dtype=object), np.zeros(2, "V2")])
def test_what_npz_cannot_hold_is_refused_by_name_and_the_old_file_stays(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "s.npz"
    save_samples(path, [{"x": np.array(1.0)}])
    with pytest.raises(DataError, match="'label' has type") as caught:
        save_samples(path, [{"label": array}])
    assert caught.value.hint
    assert read_samples(path)[0]["x"] == 1.0


def test_a_directory_in_the_place_of_an_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.npz").mkdir()
    with pytest.raises(RunError, match=r"a\.npz") as raised:
        save_samples(tmp_path / "a.npz", [{"x": np.zeros(1)}])
    assert raised.value.hint


def test_an_archive_of_someone_else(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    with pytest.raises(DataError, match=r"x\.npz was not written by this mptune") as caught:
        read_samples(tmp_path / "x.npz")
    assert "--fresh" in caught.value.hint


@pytest.mark.parametrize("read", [read_samples, read_sample_shapes])
def test_more_samples_are_declared_than_there_are(tmp_path: Path, read) -> None:
    header = np.frombuffer(b'{"format": 1, "samples": 1000000000000, "names": ["x"]}', np.uint8)
    np.savez(tmp_path / "s.npz", header=header, **{"0_0": np.zeros(3)})
    with pytest.raises(DataError, match=r"s\.npz"):
        read(tmp_path / "s.npz")


class TestUnreadable:
    def refused(self, read, path: Path, match: str) -> None:
        with pytest.raises(DataError, match=match) as caught:
            read(path)
        assert path.name in caught.value.message
        assert caught.value.hint
        assert "\n" not in caught.value.message

    @pytest.mark.parametrize("read", [read_array, read_archive])
    def test_missing(self, tmp_path: Path, read) -> None:
        self.refused(read, tmp_path / "none.npz", "no such file")

    @pytest.mark.parametrize("read", [read_array, read_archive])
    @pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04", b"hello, world", b"\0" * 100])
    def test_something_else(self, tmp_path: Path, read, content: bytes) -> None:
        path = tmp_path / "x.npz"
        path.write_bytes(content)
        self.refused(read, path, "is not a NumPy")

    @pytest.mark.parametrize(("save", "read"), [(np.savez, read_archive), (np.save, read_array)])
    def test_truncated(self, tmp_path: Path, save, read) -> None:
        path = tmp_path / ("x.npz" if save is np.savez else "x.npy")
        save(path, np.arange(1000.0))
        path.write_bytes(path.read_bytes()[:4000])
        self.refused(read, path, "truncated")

    def test_damaged_member(self, tmp_path: Path) -> None:
        path = tmp_path / "x.npz"
        np.savez_compressed(path, x=np.arange(1000.0))
        content = bytearray(path.read_bytes())
        content[200:220] = bytes(20)
        path.write_bytes(content)
        self.refused(read_archive, path, "is not a NumPy")

    @pytest.mark.parametrize("read", [read_array, read_archive])
    def test_pickled(self, tmp_path: Path, read) -> None:
        path = tmp_path / ("x.npz" if read is read_archive else "x.npy")
        (np.savez if read is read_archive else np.save)(path, np.array([None, "a"], dtype=object))
        self.refused(read, path, "pickled objects")

    def test_plain_pickle(self, tmp_path: Path) -> None:
        np.array([1.0]).dump(tmp_path / "x.npy")
        self.refused(read_array, tmp_path / "x.npy", "pickled objects")

    def test_member_that_is_no_array(self, tmp_path: Path) -> None:
        path = tmp_path / "x.npz"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
        self.refused(read_archive, path, "'readme.txt' is not an array")

    def test_suffix_and_content_disagree(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", x=np.zeros(1))
        np.save(tmp_path / "y.npy", np.zeros(1))
        self.refused(read_array, (tmp_path / "x.npz").rename(tmp_path / "x.npy"), "several arrays")
        self.refused(read_archive, (tmp_path / "y.npy").rename(tmp_path / "y.npz"), "one array without a name")
