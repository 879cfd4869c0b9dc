"""A search on samples of one size says so, and ``mptune check`` shows what the chosen model does at another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from tests.graph.models import constant, model, node, value
from tests.zoo.numbers import weights

SIZE, LARGER = 16, 256


def pooled(by: str) -> onnx.ModelProto:
    """Features of an image, pooled: their sum leaves FP16's range where the image is large, their mean does not."""
    nodes = [
        node("Conv", ["image", "w"], "c", "features"),
        node("Relu", ["c"], "r", "relu"),
        node("Add", ["r", "one"], "s", "above zero"),
        node(by, ["s"], "p", "pool", axes=[2, 3], keepdims=0)
        if by == "ReduceMean"
        else node(by, ["s", "axes"], "p", "pool", keepdims=0),
        node("MatMul", ["p", "v"], "y", "head"),
    ]
    constants = [weights("w", 256, 3, 1, 1), weights("v", 256, 1024), constant("one", 1.0)]
    constants.append(constant("axes", [2, 3], np.int64))
    return model(nodes, [value("image", ["n", 3, "h", "w_"])], [value("y", ["n", 1024])], constants)


def images(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    return (rng.uniform(0.2, 1, (3, 3, 1, 1)) * rng.uniform(0.9, 1, (3, 3, size, size))).astype(np.float32)


@pytest.mark.parametrize(("by", "exit_code"), [("ReduceSum", 3), ("ReduceMean", 0)])
def test_check_shows_another_size(by: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(pooled(by), "model.onnx")
    for name, size in (("samples", SIZE), ("other", LARGER)):
        np.savez(f"{name}.npz", image=images(size))
    assert main(["apply", "model.onnx", "--fp16-all", "-o", "mixed.onnx"]) == 0
    for name, wanted in (("samples", 0), ("other", exit_code)):
        words = ["check", "mixed.onnx", "--against", "model.onnx", "--data", f"{name}.npz", "--max-error", "1e-2"]
        assert main(words) == wanted


def test_a_search_says_that_one_size_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(pooled("ReduceMean"), "model.onnx")
    given = {"budget": 1, "target": "jetson-orin-nano-8gb"}
    front = mptune.search("model.onnx", data=images(SIZE), **given)
    (finding,) = [f for f in front.findings if f.code == "one-size-tried"]
    assert (finding.severity, finding.where.inputs) == ("info", ("image",))
    assert f"image 1x3x{SIZE}x{SIZE}" in finding.text
    assert "--data other.npz --max-error 1e-2" in finding.cure
    assert "one-size-tried" not in capsys.readouterr().err, "it is no warning"
    several = [{"image": images(size)[:1]} for size in (SIZE, 2 * SIZE)] * 2
    front = mptune.search("model.onnx", data=several, out="several.mptune", **given)
    assert "one-size-tried" not in {f.code for f in front.findings}
