"""``compare`` judges outputs part by part: columns whose scale differs, and those that a tolerance names."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from mptune.data.metrics.parts import OutputParts
from mptune.diagnosis.sides import Limit, limits_of
from mptune.errors import SettingsError
from mptune.reporting.terminal.listings import print_comparison
from mptune.settings import Tolerance
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import text, weight

ROWS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives four numbers in the hundreds beside a score, its data and what it gives on them."""
    folder = tmp_path_factory.mktemp("parts")
    graph = "(float[batch,32] x) => (float[batch,5] y) <float[5] scales = {200, 200, 200, 200, 1}>"
    models.save(text(f"{graph} {{ h = MatMul(x, w) y = Mul(h, scales) }}", weight("w", 32, 5)), folder)
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


def test_tolerances_of_columns(place: Path) -> None:
    assert compared(place, BOXES + SCORE, tolerance=["y[0:4]=0.5", "y[4]=abs:1"]).verdict == "agrees"
    found = compared(place, BOXES, tolerance=["y[0:4]=abs:1", "y[4]=1"])
    assert found.verdict == "differs"
    largest = float(np.abs(np.load(place / "got.npz")["y"] - np.load(place / "right.npz")["y"]).max())
    figures = found.outputs["y"]
    assert figures["judged"] == pytest.approx(largest, rel=1e-3), "what the limit is about, and not the relative error"
    assert figures["judged_fp16"] > 10 * figures["emulated_fp16"], "in the same unit"
    assert found.to_json()["limits"] == {"y": {"value": 1.0, "unit": "absolute", "columns": [0, 1, 2, 3]}}
    stream = io.StringIO()
    print_comparison(found, stream)
    row = next(line for line in stream.getvalue().splitlines() if line.startswith("y[0:4] "))
    assert row.split()[1:3] == [f"abs:{largest:.3g}", "abs:1"]


SPLIT = OutputParts(1, 100.0, (200.0, 200.0, 200.0, 200.0, 1.0), is_split=True)
WHOLE = OutputParts(1, 1.0, (1.0, 1.0, 1.0), is_split=False)


def twice(*columns: int) -> Limit:
    """The limit of columns that nothing is said of."""
    return Limit(2.0, columns=columns)


@pytest.mark.parametrize(
    ("parts", "texts", "rest", "wanted"),
    [
        (SPLIT, [], None, [twice(0), twice(1), twice(2), twice(3), twice(4)]),
        (SPLIT, ["y[4]=abs:0.5"], None, [Limit(0.5, True, (4,)), twice(0), twice(1), twice(2), twice(3)]),
        (SPLIT, ["y[0:4]=0.5"], 0.1, [Limit(0.5, columns=(0, 1, 2, 3)), Limit(0.1, columns=(4,))]),
        (SPLIT, ["y=0.5"], 0.1, [Limit(0.5)]),
        (SPLIT, ["y=0.5", "y[4]=0.1"], None, [Limit(0.5), Limit(0.1, columns=(4,))]),
        (WHOLE, [], None, [Limit(2.0)]),
        (WHOLE, [], 0.1, [Limit(0.1)]),
        (WHOLE, ["y[1]=0.5"], None, [Limit(0.5, columns=(1,)), twice(0, 2)]),
        (WHOLE, ["y[0:3]=0.5"], 0.1, [Limit(0.5, columns=(0, 1, 2))]),
        (None, [], None, [Limit(2.0)]),
    ],
)
def test_which_limit_each_part_has(
    parts: OutputParts | None, texts: list[str], rest: float | None, wanted: list[Limit]
) -> None:
    assert limits_of("y", [Tolerance.parse(text) for text in texts], parts, rest, lambda columns: 2.0) == wanted


def test_what_names_no_column(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="output 'y' has no such column") as caught:
        limits_of("y", [Tolerance.parse("y[5]=1")], SPLIT, None, len)
    assert "from 0 to 4" in caught.value.hint
    with pytest.raises(SettingsError, match="no such column"):
        limits_of("y", [Tolerance.parse("y[0]=1")], None, None, len)
    command = ["compare", str(place / "model.onnx"), "--data", str(place / "data.npz")]
    for wrong in ("z[0]=1", "y[a]=1", "y[0]=-1", "y"):
        assert main([*command, "--outputs", str(place / "right.npz"), "--tolerance", wrong]) in (1, 2)
        assert "hint: " in capsys.readouterr().err


def test_a_difference_without_a_finding_has_a_warning(mlp_path: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(2).standard_normal((6, 32)).astype(np.float32)
    noise = tmp_path / "noise.npz"
    np.savez(noise, y=np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32))
    found = mptune.compare(mlp_path, data={"x": rows}, reference_outputs=noise)
    assert not found.agrees
    assert not found.findings
    assert any(text.startswith("output 'y'") for text in found.warnings)
