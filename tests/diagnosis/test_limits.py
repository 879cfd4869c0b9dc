"""Limits: without a tolerance what FP16 breaks does not agree; parts of outputs are judged each on its own scale."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from mptune.data.archive import read_samples
from mptune.data.metrics.parts import OutputParts
from mptune.diagnosis.sides import FALLBACK_LIMIT, MOST_LIMIT, Limit, default_limit, limits_of
from mptune.errors import SettingsError
from mptune.reporting.terminal.listings import print_comparison
from mptune.settings import Tolerance
from tests.diagnosis import recordings
from tests.graph import models
from tests.graph.models import text, weight


def test_what_fp16_breaks_does_not_agree(tmp_path: Path) -> None:
    """A norm whose squares overflow (x / inf is 0, which is finite), a choice among near ties, and a sound output."""
    graph = """(float[batch,16] x) => (float[batch,4] y, int64[batch] label, float[batch,4] sound)
        <float[1] eps = {1e-3}, float[1] twenty = {20}> {
        ["/body/MatMul"] h = MatMul(x, big) ["/norm/Mul"] squares = Mul(h, h)
        ["/norm/ReduceMean"] mean = ReduceMean<axes = [-1], keepdims = 1>(squares)
        ["/norm/Add"] safe = Add(mean, eps) ["/norm/Sqrt"] root = Sqrt(safe) ["/norm/Div"] normal = Div(h, root)
        ["/head/MatMul"] y = MatMul(normal, v)
        ["/choice/MatMul"] near = MatMul(x, small) ["/choice/Add"] logits = Add(near, twenty)
        ["/choice/ArgMax"] label = ArgMax<axis = -1, keepdims = 0>(logits) ["/sound/MatMul"] sound = MatMul(x, w)
    }"""
    constants = [weight("big", 16, 16, scale=300.0), weight("v", 16, 4), weight("small", 16, 32, scale=2e-3)]
    path = models.save(text(graph, *constants, weight("w", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((48, 16)).astype(np.float32)}
    with np.errstate(over="ignore"):
        got = recordings.NodeByNode(path).run(data, 24, result=recordings.to_half)
    np.savez(tmp_path / "got.npz", **got)
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz", batch=24)
    assert found.verdict == "differs"
    cause = next(one for one in found.findings if one.code == "precision")
    assert [output.name for output in cause.where.outputs] == ["y", "label"]
    assert "overflow at /norm/" in cause.text
    assert "exceeds" in cause.text or "FP16 ends at 65504" in cause.text
    assert [one.where.outputs[0].name for one in found.findings if one.code == "agrees"] == ["sound"]
    figures = found.outputs["y"]
    assert figures["limit"] == 2 * figures["emulated_fp16"] < 0.01, "all-FP16 has the norm in FP32"
    assert found.outputs["label"]["limit"] == MOST_LIMIT
    labels = got["label"] - recordings.run(path, data, 24)["label"]
    assert found.outputs["label"]["largest_difference"] == np.abs(labels).max(), "of all samples, and not their mean"


@pytest.mark.slow
def test_all_fp16_is_that_of_a_search(tmp_path: Path) -> None:
    """A value beyond FP16 on the data pins its group; a constant beyond it is held as 65504, and the error shows it."""
    graph = """(float[batch,16] x) => (float[batch,16] y, float[batch,4] z) <float large = {1e5}> {
        ["/fc/MatMul"] h = MatMul(x, w) ["/square/Mul"] squares = Mul(h, h)
        ["/mean/ReduceMean"] mean = ReduceMean<axes = [-1], keepdims = 1>(squares)
        ["/scale/Div"] scaled = Div(h, large) ["/out/MatMul"] z = MatMul(scaled, v)
        ["/rms/Sqrt"] root = Sqrt(mean) ["/norm/Div"] y = Div(h, root)
    }"""
    path = models.save(text(graph, weight("w", 16, 16, scale=300.0), weight("v", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((48, 16)).astype(np.float32)}
    run = tmp_path / "run"
    mptune.search(path, data=data, budget=2, out=run, target="jetson-orin-nano-8gb", progress=False)
    searched = next(e for e in mptune.open_run(run).evaluations if e.origin.name == "all-fp16")
    samples = read_samples(run / "data" / "search.npz")
    found = mptune.compare(path, path, data={"x": np.concatenate([sample["x"] for sample in samples])})
    of_each = {name: figures["emulated_fp16"] for name, figures in found.outputs.items()}
    assert max(of_each.values()) == pytest.approx(searched.error_value, rel=1e-6)
    assert of_each["z"] > 0.1
    assert of_each["y"] < 1e-2, "without the pin of a search it would be infinite"


def test_random_numbers_are_no_rounding(tmp_path: Path) -> None:
    graph = """(float[batch,16] x) => (float[batch,4] y) {
        h = MatMul(x, w) ["/noise"] n = RandomNormalLike<scale = 0.1>(h) y = Add(h, n) }"""
    path = models.save(text(graph, weight("w", 16, 4)), tmp_path)
    data = {"x": np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)}
    np.savez(tmp_path / "got.npz", **recordings.run(path, data, 1))
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz")
    assert [one.code for one in found.findings] == ["not-deterministic"]
    assert found.findings[0].where.nodes == ("/noise",)
    twice = mptune.compare(path, data=data, repeat=2)
    assert "not-deterministic" in {one.code for one in twice.findings}
    assert twice.verdict == "differs"


@pytest.mark.parametrize(
    ("change", "code"),
    [(lambda x: x[:, ::-1], "data-do-not-fit"), (lambda x: np.roll(x, 2, 2), None)],
    ids=["BGR", "something else"],
)
def test_a_model_that_fp16_breaks_is_not_the_cause_of_every_difference(
    change: Callable[[np.ndarray], np.ndarray], code: str | None, tmp_path: Path
) -> None:
    graph = """(float[batch,3,4,4] image) => (int64[batch] label) <float twenty = {20}> {
        x = Flatten(image) ["/choice/MatMul"] near = MatMul(x, small) ["/choice/Add"] logits = Add(near, twenty)
        ["/choice/ArgMax"] label = ArgMax<axis = -1, keepdims = 0>(logits)
    }"""
    path = models.save(text(graph, weight("small", 48, 32, scale=2e-3)), tmp_path)
    data = {"image": np.random.default_rng(3).standard_normal((48, 3, 4, 4)).astype(np.float32)}
    prepared = {"image": np.ascontiguousarray(change(data["image"]))}
    np.savez(tmp_path / "got.npz", **recordings.run(path, prepared, 24))
    found = mptune.compare(path, data=data, outputs=tmp_path / "got.npz", batch=24)
    assert found.outputs["label"]["judged_fp16"] > 0.1, "FP16 changes labels, too"
    assert found.verdict == "differs"
    assert [one.code for one in found.findings] == ([code] if code else [])


def test_limits_of_fp16() -> None:
    assert default_limit(1e-3) == 2e-3
    assert default_limit(0.7) == MOST_LIMIT
    assert default_limit(math.inf) == FALLBACK_LIMIT


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives four numbers in the hundreds beside a score, its data and what it gives on them."""
    folder = tmp_path_factory.mktemp("parts")
    graph = "(float[batch,32] x) => (float[batch,5] y) <float[5] scales = {200, 200, 200, 200, 1}>"
    path = models.save(text(f"{graph} {{ h = MatMul(x, w) y = Mul(h, scales) }}", weight("w", 32, 5)), folder)
    np.savez(folder / "data.npz", x=np.random.default_rng(1).standard_normal((24, 32)).astype(np.float32))
    np.savez(folder / "right.npz", **recordings.run(path, dict(np.load(folder / "data.npz")), 1))
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
    assert compared(place, SCORE).verdict == "differs", "of the whole output the error is 1e-4"
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
