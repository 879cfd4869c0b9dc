"""``compare`` judges outputs part by part: columns whose scale differs, and those that a tolerance names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from mptune.errors import SettingsError
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import constant, node, value, weight

ROWS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives four numbers in the hundreds beside a score, its data and what it gives on them."""
    folder = tmp_path_factory.mktemp("parts")
    nodes = [node("MatMul", ["x", "w"], "h", "fc"), node("Mul", ["h", "scales"], "y", "scale")]
    constants = [weight("w", 32, 5), constant("scales", [200.0, 200.0, 200.0, 200.0, 1.0])]
    models.save(models.model(nodes, [value("x", ["batch", 32])], [value("y", ["batch", 5])], constants), folder)
    data = {"x": np.random.default_rng(1).standard_normal((ROWS, 32)).astype(np.float32)}
    np.savez(folder / "data.npz", **data)
    np.savez(folder / "right.npz", **recordings.run(folder / "model.onnx", data, 1))
    return folder


def compared(place: Path, changed: np.ndarray, **given: object) -> mptune.Comparison:
    """With a recording that differs by noise of this size in each column."""
    y = np.load(place / "right.npz")["y"]
    noise = np.random.default_rng(2).standard_normal(y.shape) * changed
    np.savez(place / "got.npz", y=(y + noise).astype(np.float32))
    return mptune.compare(place / "model.onnx", data=place / "data.npz", outputs=place / "got.npz", **given)  # type: ignore[arg-type]


SCORE = np.array([0, 0, 0, 0, 0.05])
BOXES = np.array([5.0, 5.0, 5.0, 5.0, 0])


def test_boxes_do_not_hide_a_score(place: Path) -> None:
    found = compared(place, SCORE)
    assert found.verdict == "differs", "of the whole output the error is 1e-4"
    assert compared(place, SCORE * 1e-3).verdict == "agrees"


@pytest.mark.parametrize(
    ("changed", "tolerance", "verdict"),
    [
        (SCORE, ["y[4]=0.5"], "agrees"),
        (SCORE, ["y[4]=abs:0.01"], "differs"),
        (SCORE, ["y[4]=abs:1"], "agrees"),
        (SCORE, ["y[0:4]=0.5"], "differs"),  # the score keeps the limit of FP16
        (BOXES, ["y[0:4]=0.5"], "agrees"),
        (BOXES, ["y[0,1,2]=0.5"], "differs"),
        (BOXES, ["y=0.5"], "agrees"),
        (BOXES, ["y[0:4]=abs:1", "y[4]=1"], "differs"),
    ],
)
def test_tolerances_of_columns(changed: np.ndarray, tolerance: list[str], verdict: str, place: Path) -> None:
    assert compared(place, changed, tolerance=tolerance).verdict == verdict


def test_max_error_limits_the_rest(place: Path) -> None:
    assert compared(place, SCORE, tolerance=["y[0:4]=0.5"], max_error=0.5).verdict == "agrees"
    assert compared(place, SCORE, tolerance={"y[0:4]": 0.5}, max_error=1e-4).verdict == "differs"


def test_what_names_no_column(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="output 'y' has no such column") as caught:
        compared(place, SCORE, tolerance=["y[5]=1"])
    assert "from 0 to 4" in caught.value.hint
    command = ["compare", str(place / "model.onnx"), "--data", str(place / "data.npz")]
    for text in ("z[0]=1", "y[a]=1", "y[0]=-1", "y"):
        assert main([*command, "--outputs", str(place / "right.npz"), "--tolerance", text]) in (1, 2)
        assert "hint: " in capsys.readouterr().err
