"""``mptune compare --outputs``: each planted fault is named, and sound recordings are not."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from tests.diagnosis import fragile, recordings
from tests.graph import models

ROOT = Path(__file__).resolve().parents[2]
ROWS = 16

CASES = [
    ("mlp", "equal", "agrees"),
    ("cnn", "equal", "agrees"),
    ("exported", "equal", "agrees"),
    ("mlp", "fp16", "agrees"),
    ("exported", "fp16", "agrees"),
    ("vit", "fp16", "agrees"),
    ("cnn", "tf32", "tf32-candidate"),
    ("exported", "tf32", "tf32-candidate"),
    ("mlp", "cut", "tf32-candidate"),
    ("vit", "tf32 reference", "tf32-reference"),
    ("attention", "tf32 reference", "tf32-reference"),
    ("mlp", "stale", "stale-rows"),
    ("exported", "stale", "stale-rows"),
    ("vit", "stale fp16", "stale-rows"),
    ("cnn", "torn", "torn-rows"),
    ("exported", "torn", "torn-rows"),
    ("mlp", "zero", "not-computed"),
    ("cnn", "one buffer", "not-computed"),
    ("vit", "columns", "outputs-permuted"),
    ("exported", "rows", "outputs-permuted"),
    ("pair", "outputs", "outputs-permuted"),
]


def _pair() -> onnx.ModelProto:
    """Two outputs of one shape, as the logits of the start and the end of a span."""
    graph = (
        "(float[batch,16] x) => (float[batch,8] start, float[batch,8] end) { start = MatMul(x, w) end = MatMul(x, v) }"
    )
    return models.text(graph, models.weight("w", 16, 8), models.weight("v", 16, 8))


@cache
def _model(name: str, folder: Path) -> Path:
    made = {"mlp": models.mlp, "cnn": models.cnn, "attention": models.attention, "pair": _pair}
    if name in made:
        return models.save(made[name](), folder, f"{name}.onnx")
    return {
        "exported": ROOT / "tests/graph/exported/cnn_torchscript_17.onnx",
        "vit": ROOT / "benchmarks/models/digits_vit.onnx",
    }[name]


def _data(model: Path, name: str, rng: np.random.Generator) -> recordings.Arrays:
    if name == "vit":
        return {n: a[:ROWS] for n, a in np.load(ROOT / "benchmarks/models/digits_calib.npz").items()}
    inputs = recordings.session(model.read_bytes()).get_inputs()
    return {
        i.name: rng.standard_normal([ROWS, *(d if isinstance(d, int) else 6 for d in i.shape[1:])]).astype(np.float32)
        for i in inputs
    }


@pytest.mark.parametrize(
    ("name", "fault", "code"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[0] == "vit" else case for case in CASES],
    ids=lambda value: value.replace(" ", "-"),
)
def test_each_fault_of_a_recording_is_named(
    name: str, fault: str, code: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng([CASES.index((name, fault, code)), 15])
    model = _model(name, tmp_path_factory.getbasetemp())
    data = _data(model, name, rng)
    batch = recordings.session(model.read_bytes()).get_inputs()[0].shape[0]
    batch, at_once = (batch, batch) if isinstance(batch, int) else (1, ROWS)
    right = recordings.run(model, data, batch)
    nodes = recordings.NodeByNode(model)
    tf32 = {"tf32": recordings.to_tf32, "tf32 reference": recordings.to_tf32, "cut": recordings.cut_to_tf32}
    recorded = right
    if fault in tf32:
        recorded = nodes.run(data, at_once, operand=tf32[fault])
    elif fault.endswith("fp16"):
        recorded = nodes.run(data, at_once, result=recordings.to_half)
    if fault.startswith("stale"):
        recorded = recordings.stale(recorded, rng, batch)
    elif fault == "torn":
        recorded = recordings.torn(recorded, rng, batch)
    elif code == "not-computed":
        recorded = recordings.not_computed(recorded, fault)
    elif code == "outputs-permuted":
        recorded = recordings.permuted(recorded, rng, fault)
    np.savez(tmp_path / "right.npz", **right)
    np.savez(tmp_path / "recorded.npz", **recorded)
    files = {"outputs": tmp_path / "recorded.npz"}
    if fault == "tf32 reference":
        files = {"outputs": tmp_path / "right.npz", "reference_outputs": tmp_path / "recorded.npz"}

    found = mptune.compare(model, data=data, **files)

    assert code in {finding.code for finding in found.findings}, found.findings
    others = {finding.code for finding in found.findings} - {code, "agrees"}
    assert not others, found.findings
    if fault in ("equal", "fp16", "stale", "torn") or code in ("not-computed", "outputs-permuted"):
        assert found.agrees == (fault in ("equal", "fp16"))
    assert all(finding.origin == "compare" for finding in found.findings)


def test_fp16_beyond_tolerance_is_precision_with_a_plan_that_keeps_it(tmp_path: Path) -> None:
    model = _model("mlp", tmp_path)
    data = _data(model, "mlp", np.random.default_rng(3))
    half = recordings.NodeByNode(model).run(data, ROWS, result=recordings.to_half)
    np.savez(tmp_path / "half.npz", **half)
    wide = mptune.compare(model, data=data, outputs=tmp_path / "half.npz")
    limit = wide.outputs["y"]["error"] / 1.5

    found = mptune.compare(model, data=data, outputs=tmp_path / "half.npz", tolerance={"y": limit})

    assert (wide.verdict, found.verdict) == ("agrees", "differs")
    (finding,) = found.findings
    assert finding.code == "precision"
    assert 0 < float(finding.evidence["error_with_kept"]) <= limit
    assert finding.where.groups
    assert f"--keep-fp32 {finding.where.groups[0]}" in finding.cure


def test_the_command_line_says_verdict_and_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _model("mlp", tmp_path)
    data = _data(model, "mlp", np.random.default_rng(7))
    right = recordings.run(model, data, 1)
    np.savez(tmp_path / "data.npz", **data)
    np.savez(tmp_path / "right.npz", **right)
    np.savez(tmp_path / "stale.npz", y=np.concatenate([right["y"][:1], right["y"][:-1]]))
    start = ["compare", str(model), "--data", str(tmp_path / "data.npz")]
    assert main([*start, "--outputs", str(tmp_path / "right.npz")]) == 0
    assert "agrees" in capsys.readouterr().out
    assert main([*start, "--outputs", str(tmp_path / "stale.npz")]) == 3
    assert "stale-rows" in capsys.readouterr().out
    assert main([*start, "--outputs", str(tmp_path / "right.npz"), "--repeat", "2", "--stress"]) == 0
    assert main(start) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_fewer_rows_than_the_data_are_one_clear_line(tmp_path: Path) -> None:
    model = _model("mlp", tmp_path)
    data = _data(model, "mlp", np.random.default_rng(8))
    np.savez(tmp_path / "o.npz", y=recordings.run(model, data, 1)["y"][:-3])
    with pytest.raises(mptune.DataError, match=rf"output 'y' has shape \[{ROWS - 3}, 8\], the data give \[{ROWS}, 8\]"):
        mptune.compare(model, data=data, outputs=tmp_path / "o.npz")


@pytest.mark.parametrize("name", fragile.SOUND)
def test_sound_engines_of_a_model_that_fp16_makes_coarse_are_not_warned_of(name: str, tmp_path: Path) -> None:
    path = models.save(fragile.fragile(), tmp_path)
    np.savez(tmp_path / "recorded.npz", **fragile.SOUND[name](path, tmp_path))
    found = mptune.compare(path, data=fragile.data(), outputs=tmp_path / "recorded.npz")
    assert found.verdict == "agrees"
    assert [(each.code, each.severity) for each in found.findings] == [("agrees", "info")]
