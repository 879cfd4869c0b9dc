"""Polygraphy's saved inputs and loader scripts as calibration data."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from mptune.data.calibration import load_calibration
from mptune.data.samples import CalibrationSet
from mptune.errors import DataError
from mptune.graph.loading.tensors import TensorInfo
from mptune.settings import DataSettings

INPUTS = (TensorInfo("image", "float", (1, 3, 4, 4)), TensorInfo("ids", "int64", (1, 5)))


def feeds(count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"image": rng.random((1, 3, 4, 4)).astype(np.float32), "ids": rng.integers(0, 9, (1, 5))} for _ in range(count)
    ]


def encoded(array: np.ndarray) -> dict[str, str]:
    """As Polygraphy's ``Encoder`` writes an array."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}


def load(path: Path) -> CalibrationSet:
    return load_calibration(path, INPUTS, DataSettings(), 0)


def test_saved_inputs(tmp_path: Path) -> None:
    saved = feeds()
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps([{name: encoded(array) for name, array in feed.items()} for feed in saved]))
    data = load(path)
    assert data.source == "inputs.json"
    assert len(data.samples) == 3
    for got, wanted in zip(data.samples, saved, strict=True):
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no inputs of Polygraphy"),
        ('[{"image": 3}]', "sample 0: input 'image' is no array"),
        ('[{"image": {"array": "?"}}]', "no array of Polygraphy"),
        (json.dumps([{"image": encoded(np.zeros((1, 3, 4, 4), np.float32))}]), "no array for input 'ids'"),
        (json.dumps([{n: encoded(a.astype(np.float64)) for n, a in feeds(1)[0].items()}]), "expected float32"),
    ],
)
def test_what_is_no_saved_input(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text(text)
    with pytest.raises(DataError, match=says) as caught:
        load(tmp_path / "inputs.json")
    assert caught.value.hint


SCRIPT = """
import numpy as np
from neighbour import COUNT

def load_data():
    rng = np.random.default_rng(0)
    for _ in range(COUNT):
        yield {"image": rng.random((1, 3, 4, 4)).astype(np.float32), "ids": rng.integers(0, 9, (1, 5))}

def one():
    return next(load_data())

def fails():
    raise KeyError("no data here")

def nothing():
    return []

def filled_again():
    feed = {"image": np.empty((1, 3, 4, 4), np.float32), "ids": np.empty((1, 5), np.int64)}
    for sample in load_data():
        for name, buffer in feed.items():
            buffer[:] = sample[name]
        yield feed

def masked():
    for feed in load_data():
        yield {**feed, "image": np.ma.masked_array(feed["image"])}

def numbers():
    return [1, 2]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("COUNT = 4\n")
    (tmp_path / "loader.py").write_text(SCRIPT)
    return tmp_path / "loader.py"


@pytest.mark.parametrize(("function", "count"), [("", 4), (":load_data", 4), (":one", 1), (":filled_again", 4)])
def test_a_loader_script(function: str, count: int, script: Path) -> None:
    data = load(Path(f"{script}{function}"))
    assert len(data.samples) == count
    assert np.array_equal(data.samples[0]["image"], np.random.default_rng(0).random((1, 3, 4, 4)).astype(np.float32))
    assert data.findings == (), "a buffer that is filled again gives every sample"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (":fails", "fails failed: KeyError: 'no data here'"),
        (":nothing", "gives no dictionaries of arrays"),
        (":numbers", "gives no dictionaries of arrays"),
        (":masked", "sample 0: input 'image' is a masked array"),
        (":missing", "has no function 'missing'"),
    ],
)
def test_a_loader_script_that_fails(function: str, says: str, script: Path) -> None:
    with pytest.raises(DataError, match=says) as caught:
        load(Path(f"{script}{function}"))
    assert ("array.filled" if function == ":masked" else "dictionary of arrays") in caught.value.hint
    with pytest.raises(DataError, match="no such file"):
        load(script.with_name("nowhere.py"))
