"""Calibration data: cut as documented, refused with the cure."""

from __future__ import annotations

import base64
import io
import json
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet, Feed
from mptune.errors import DataError
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import DataSettings

IMAGE = TensorInfo("image", "float", ("batch", 3, 4, 5))
STATIC = TensorInfo("image", "float", (2, 3))
ROWS = TensorInfo("x", "float", (1, 4))
K, T = TensorInfo("k", "float", (3, 3)), TensorInfo("t", "float", ())
PAST = TensorInfo("past", "float", ("batch", 2, 5, 4))
A, B = (TensorInfo(name, "float", ("n", "seq")) for name in "ab")


def images(count: int) -> np.ndarray:
    return np.arange(count * 60, dtype=np.float32).reshape(count, 3, 4, 5)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def numbered(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)[:, None].repeat(4, axis=1)


def load(path: Path | None, *inputs: TensorInfo, batch: int = 1, **settings) -> CalibrationSet:
    return load_calibration(path, inputs, DataSettings(batch=batch, **settings), seed=0)


def refused(path: Path | None, *inputs: TensorInfo, match: str, hint: str, batch: int = 1) -> None:
    with pytest.raises(DataError, match=match) as caught:
        load(path, *inputs, batch=batch)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.fixture
def npz(tmp_path: Path):
    def write(**arrays: np.ndarray) -> Path:
        np.savez(tmp_path / "calib.npz", **arrays)
        return tmp_path / "calib.npz"

    return write


@pytest.mark.parametrize(
    ("info", "array", "batch", "wanted"),
    [
        (IMAGE, images(6), 1, [(1, 3, 4, 5)] * 6),
        (IMAGE, images(6), 3, [(3, 3, 4, 5)] * 2),
        (STATIC, zeros(6, 3), 5, [(2, 3)] * 3),
        (replace(STATIC, shape=None), zeros(4, 2), 2, [(2, 2)] * 2),
        (replace(IMAGE, shape=("batch", 2, "length", 4)), zeros(3, 2, 0, 4), 1, [(1, 2, 0, 4)] * 3),  # an empty cache
    ],
)
def test_a_batch_is_cut_as_the_model_or_the_caller_has_it(npz, info: TensorInfo, array, batch: int, wanted) -> None:
    data = load(npz(image=array), info, batch=batch)
    assert [sample["image"].shape for sample in data.samples] == wanted
    np.testing.assert_array_equal(np.concatenate([sample["image"] for sample in data.samples]), array)
    assert (data.source, data.is_random, data.warnings) == ("calib.npz", False, ())


def test_several_inputs_go_together_in_native_order(npz) -> None:
    data = load(npz(image=images(4), a=numbered(4)), IMAGE, A, batch=2)
    assert [s["a"][:, 0].tolist() for s in data.samples] == [[0, 1], [2, 3]]
    swapped = load(npz(image=np.asfortranarray(images(2).astype(">f4"))), IMAGE).samples[1]["image"]
    assert (swapped.dtype, swapped.flags.c_contiguous) == (np.float32, True)
    np.testing.assert_array_equal(swapped, images(2)[1:])


def test_inputs_without_a_batch_repeat_or_differ_from_sample_to_sample(npz) -> None:
    empty, second = TensorInfo("roi", "float", (0,)), replace(IMAGE, name="second")
    arrays = {"image": images(3), "k": np.eye(3, dtype=np.float32), "t": np.float32(0.5), "roi": zeros(0)}
    data = load(npz(**arrays), IMAGE, K, T, empty)
    assert [(sample["k"].trace(), sample["t"], sample["roi"].size) for sample in data.samples] == [(3, 0.5, 0)] * 3
    assert data.warnings == ()
    looks_batched = load(npz(image=images(3), second=images(1)), IMAGE, second)
    assert looks_batched.warnings == ("calib.npz: input 'second' has one sample, which is repeated for all 3",)
    ks = np.arange(18, dtype=np.float32).reshape(6, 3)
    data = load(npz(image=images(2), k=ks, t=np.array([0.5, 0.75], np.float32)), IMAGE, K, T)
    np.testing.assert_array_equal(data.samples[1]["k"], ks[3:])
    assert [(s["t"].shape, float(s["t"])) for s in data.samples] == [((), 0.5), ((), 0.75)]


NOT_FINITE = images(2)
NOT_FINITE[1, 0, 2, 3] = -np.inf
CASTS = {("float", "float64"): "float32", ("float", "uint8"): "float32", ("int64", "int32"): "int64"}


@pytest.mark.parametrize(
    ("inputs", "arrays", "match", "hint"),
    [
        ([STATIC], {"image": zeros(5, 3)}, "'image' has 5 rows, and a sample takes 2", "multiple of 2"),
        ([IMAGE, K], {"image": images(4), "k": zeros(9, 3)}, "'image' has 4, 'k' has 3", "same number"),
        ([IMAGE, PAST], {"image": images(3), "past": zeros(3, 2, 0, 4)}, "'past' is empty", "at least one"),
        ([IMAGE, K], {"images": images(1), "k": zeros(1)}, "has no array for input 'image'", "'images', 'k'"),
        ([IMAGE], {"image": images(1), "label": zeros(1)}, "'label' that is no input", "'image'"),
        ([IMAGE], {"image": images(1)[0]}, r"expected shape \(N x 1, 3, 4, 5\), got \(3, 4, 5\)", "array[None]"),
        ([IMAGE], {"image": images(2).transpose(0, 2, 3, 1)}, r"got \(2, 4, 5, 3\)", "check the layout"),
        ([IMAGE], {"image": images(0)}, r"'image' is empty, its shape is \(0, 3, 4, 5\)", "at least one"),
        ([IMAGE], {"image": NOT_FINITE}, r"'image' holds 1 NaN or infinite.*first at \(1, 0, 2, 3\)", "clean"),
        ([TensorInfo("text", "string", (1,))], {}, "'text' is of type string", "numeric"),
        *(
            ([TensorInfo("x", name, ("n", 2))], {"x": np.ones((2, 2), given)}, f"'x': .*got {given}", f"(np.{wanted})")
            for (name, given), wanted in CASTS.items()
        ),
    ],
)
def test_what_does_not_fit(npz, inputs: list[TensorInfo], arrays, match: str, hint: str) -> None:
    refused(npz(**arrays), *inputs, match=match, hint=hint)


def test_files_that_are_no_data_and_arrays_without_a_name(npz, tmp_path: Path) -> None:
    refused(tmp_path / "none", IMAGE, match="no such file", hint=".npz")
    (tmp_path / "x.csv").write_text("1,2")
    refused(tmp_path / "x.csv", IMAGE, match=r"x\.csv is no calibration data", hint=".npz, .npy, folders")
    refused(npz(image=images(6)), IMAGE, batch=4, match="6 rows, and a sample takes 4", hint="--batch 1, 2, 3, 6")
    data = load(npz(arr_0=images(2)), IMAGE)
    assert data.warnings == ("calib.npz: array 'arr_0' is used as the model's only input 'image'",)
    np.save(tmp_path / "x.npy", images(4))
    assert [s["image"].shape[0] for s in load(tmp_path / "x.npy", IMAGE, batch=2).samples] == [2, 2]
    refused(tmp_path / "x.npy", IMAGE, K, match="the model has 2 inputs", hint="image=..., k=...")


def firsts(samples: Iterable[Feed]) -> list[float]:
    return [float(next(iter(sample.values())).flat[0]) for sample in samples]


def test_a_folder_of_npy_files_is_in_natural_order(tmp_path: Path) -> None:
    for k in (10, 9, 1, 2):
        np.save(tmp_path / f"s{k}.npy", np.full((1, 3, 4, 5), k, np.float32))
    (tmp_path / "readme.txt").write_text("hello")
    (tmp_path / "._s1.npy").write_bytes(b"")
    data = load(tmp_path, IMAGE)
    assert (firsts(data.samples), data.source) == ([1, 2, 9, 10], tmp_path.name)


def test_each_file_of_a_folder_is_one_sample_and_is_named_where_it_does_not_fit(tmp_path: Path) -> None:
    for k in (3, 8):
        np.savez(tmp_path / f"{k}.npz", a=zeros(1, k), b=zeros(1, k))
    assert [s["a"].shape for s in load(tmp_path, A, B).samples] == [(1, 3), (1, 8)]
    refused(tmp_path, IMAGE, match=r"3\.npz has no array for input 'image'", hint="'a', 'b'")
    for k in (3, 8):
        np.savez(tmp_path / f"{k}.npz", x=images(2))
    data = load(tmp_path, IMAGE, batch=2)
    assert data.warnings == ("3.npz: array 'x' is used as the model's only input 'image'",), "once"
    assert data.samples[0]["image"].shape == (2, 3, 4, 5)
    refused(tmp_path, IMAGE, batch=8, match="'image' has 2 rows, --batch is 8", hint="leave --batch out")


def test_folders_without_samples(tmp_path: Path) -> None:
    refused(tmp_path, IMAGE, match="holds neither .npz or .npy", hint="mptune reads")
    (tmp_path / "cat.jpg").write_bytes(b"")
    refused(tmp_path, IMAGE, match=r"nor a preprocess\.toml", hint="mptune reads")
    np.save(tmp_path / "a.npy", images(1))
    np.savez(tmp_path / "b.npz", image=images(1))
    refused(tmp_path, IMAGE, match="both .npz and .npy", hint="one kind")


def test_files_with_more_rows_than_the_batch_or_called_shard_hold_several_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "part10.npz", x=numbered(4, 3))
    np.savez(tmp_path / "part2.npz", x=numbered(3))
    samples = load(tmp_path, ROWS).samples
    assert firsts(samples) == [0, 1, 2, 3, 4, 5, 6]
    assert firsts([samples[k] for k in (5, 0, 3, -1)]) == [5, 0, 3, 6]
    assert firsts(samples[1:4]) == [1, 2, 3]
    with pytest.raises(IndexError):
        samples[7]
    refused(tmp_path, TensorInfo("x", "float", (2, 4)), match="has 3 rows", hint="multiple of 2")
    dynamic = TensorInfo("x", "float", ("batch", 4))
    assert [sample["x"].shape for sample in load(tmp_path, dynamic).samples] == [(3, 4), (4, 4)]
    (tmp_path / "part10.npz").rename(tmp_path / "shard-0.npz")
    (tmp_path / "part2.npz").unlink()
    assert [sample["x"].shape for sample in load(tmp_path, dynamic, batch=2).samples] == [(2, 4)] * 2


def test_shards_need_the_memory_of_few(tmp_path: Path) -> None:
    wide = np.ones((16, 1 << 16), np.float32)  # 4 MiB
    for k in range(12):
        wide[:] = k
        wide[:, 0] = np.arange(16)
        np.save(tmp_path / f"{k}.npy", wide)
    tracemalloc.start()
    data = load(tmp_path, TensorInfo("x", "float", (1, 1 << 16)))
    search, held_out = data.split(0, 0.25, 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(data.samples), len(search.samples), len(held_out.samples)) == (192, 8, 8)
    assert peak < 40 << 20, "48 MiB of data; 64 samples of .25 MiB are looked at"


DRAWN = (
    TensorInfo("x", "float", ("n", 3)),
    TensorInfo("h", "float16", (2,)),
    TensorInfo("ids", "int32", ("n", 4)),
    TensorInfo("on", "bool", (64,)),
    TensorInfo("pair", "float", (1, "n")),
)


def test_types_shapes_and_a_warning_that_stays() -> None:
    data = load(None, *DRAWN, batch=5, random_samples=3)
    first, _, _ = data.samples
    assert [array.shape for array in first.values()] == [(5, 3), (2,), (5, 4), (64,), (1, 5)]
    assert [str(array.dtype) for array in first.values()] == ["float32", "float16", "int32", "bool", "float32"]
    assert {int(value) for sample in data.samples for value in sample["ids"].flat} == {0, 1}
    assert 0 < first["on"].sum() < 64
    assert (data.is_random, data.source) == (True, "random inputs")
    (finding,) = data.findings
    assert (finding.code, finding.where.inputs) == ("random-data", ("x", "h", "ids", "on", "pair"))
    assert all(finding in part.findings for part in data.split(0, 0.25, None))
    again, other = (load_calibration(None, DRAWN, DataSettings(batch=5), seed) for seed in (0, 1))
    assert (again.samples[1]["x"] == data.samples[1]["x"]).all()
    assert (other.samples[1]["x"] != data.samples[1]["x"]).any()


def test_what_cannot_be_drawn() -> None:
    for info, match in (
        (TensorInfo("ids", "int64", ("n", "seq", None)), r"'ids' of shape \(n, seq, \?\)"),
        (TensorInfo("x", "float", None), "'x' of unknown rank"),
        (TensorInfo("z", "complex64", (2,)), "'z' of type complex64"),
        (TensorInfo("q", "int4", (2,)), "'q' of type int4"),
    ):
        refused(None, info, match=match, hint="--data")


FED = (TensorInfo("image", "float", (1, 3, 4, 4)), TensorInfo("ids", "int64", (1, 5)))


def feeds(count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"image": rng.random((1, 3, 4, 4), np.float32), "ids": rng.integers(0, 9, (1, 5))} for _ in range(count)]


def saved(feeds: list[dict[str, np.ndarray]]) -> str:
    """As Polygraphy's ``Encoder`` writes arrays."""

    def encoded(array: np.ndarray) -> dict[str, str]:
        np.save(stream := io.BytesIO(), array, allow_pickle=False)
        return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}

    return json.dumps([{name: encoded(array) for name, array in feed.items()} for feed in feeds])


def test_inputs_that_polygraphy_saved(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(saved(feeds()))
    data = load(tmp_path / "inputs.json", *FED)
    assert saved(data.samples) == saved(feeds())
    assert data.source == "inputs.json"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no inputs of Polygraphy"),
        ('[{"image": 3}]', "sample 0: input 'image' is no array"),
        ('[{"image": {"array": "?"}}]', "no array of Polygraphy"),
        (saved([{"image": zeros(1, 3, 4, 4)}]), "no array for input 'ids'"),
        (saved([{"image": np.zeros((1, 3, 4, 4)), "ids": np.zeros((1, 5), np.int64)}]), "expected float32"),
    ],
)
def test_what_polygraphy_has_not_saved(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(text)
    refused(tmp_path / "inputs.json", *FED, match=says, hint="")


SCRIPT = """
import numpy as np
from neighbour import COUNT

def load_data():
    rng = np.random.default_rng(0)
    for _ in range(COUNT):
        yield {"image": rng.random((1, 3, 4, 4), np.float32), "ids": rng.integers(0, 9, (1, 5))}

def one(): return next(load_data())
def fails(): raise KeyError("no data here")
def nothing(): return []
def numbers(): return [1, 2]
def masked(): return [{**feed, "image": np.ma.masked_array(feed["image"])} for feed in load_data()]

def filled_again():
    feed = {"image": np.empty((1, 3, 4, 4), np.float32), "ids": np.empty((1, 5), np.int64)}
    for sample in load_data():
        for name, buffer in feed.items():
            buffer[:] = sample[name]
        yield feed
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("COUNT = 4\n")
    (path := tmp_path / "loader.py").write_text(SCRIPT)
    return path


@pytest.mark.parametrize(("function", "count"), [("", 4), (":load_data", 4), (":one", 1), (":filled_again", 4)])
def test_a_loader_script(function: str, count: int, script: Path) -> None:
    data = load(Path(f"{script}{function}"), *FED)
    assert saved(data.samples) == saved(feeds(count)), "also from a buffer that is filled again"


@pytest.mark.parametrize(
    ("function", "says", "hint"),
    [
        ("fails", "fails failed: KeyError: 'no data here'", "dictionary of arrays"),
        ("nothing", "gives no dictionaries of arrays", "dictionary of arrays"),
        ("numbers", "gives no dictionaries of arrays", "dictionary of arrays"),
        ("masked", "sample 0: input 'image' is a masked array", "array.filled"),
        ("missing", "has no function 'missing'", "dictionary of arrays"),
    ],
)
def test_a_loader_script_that_fails(function: str, says: str, hint: str, script: Path) -> None:
    refused(Path(f"{script}:{function}"), *FED, match=says, hint=hint)
    refused(script.with_name("nowhere.py"), *FED, match="no such file", hint="")
