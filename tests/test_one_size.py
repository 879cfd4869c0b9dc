"""A search on samples of one size says so, and ``mptune check`` shows what the chosen model does at another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.cli import main
from tests.graph.models import constant, save, text
from tests.zoo.numbers import weights


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_pooled(pool: str) -> None:
    """Features of an image, pooled: their sum leaves FP16's range where the image is large, their mean does not."""
    graph = f"""(float[n,3,h,w_] image) => (float[n,1024] y) <float one = {{1}}> {{
        c = Conv(image, w) r = Relu(c) s = Add(r, one) p = {pool}(s) y = MatMul(p, v) }}"""
    constants = weights("w", 256, 3, 1, 1), weights("v", 256, 1024), constant("axes", [2, 3], np.int64)
    save(text(graph.replace("(s)", "(s, axes)" if "Sum" in pool else "(s)"), *constants), Path())


def images(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    return (rng.uniform(0.2, 1, (3, 3, 1, 1)) * rng.uniform(0.9, 1, (3, 3, size, size))).astype(np.float32)


SUM, MEAN = "ReduceSum<keepdims = 0>", "ReduceMean<axes = [2, 3], keepdims = 0>"


@pytest.mark.parametrize(("pool", "exit_code"), [(SUM, 3), (MEAN, 0)])
def test_check_shows_another_size(pool: str, exit_code: int) -> None:
    save_pooled(pool)
    assert main(["apply", "model.onnx", "--fp16-all", "-o", "mixed.onnx"]) == 0
    for size, wanted in ((16, 0), (256, exit_code)):
        np.savez("data.npz", image=images(size))
        words = ["check", "mixed.onnx", "--against", "model.onnx", "--data", "data.npz", "--max-error", "1e-2"]
        assert main(words) == wanted


def test_a_search_says_that_one_size_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    save_pooled(MEAN)
    given = {"budget": 1, "target": "jetson-orin-nano-8gb"}
    front = mptune.search("model.onnx", data=images(16), **given)
    (finding,) = [f for f in front.findings if f.code == "one-size-tried"]
    assert (finding.severity, finding.where.inputs) == ("info", ("image",))
    assert "image 1x3x16x16" in finding.text
    assert "--data other.npz --max-error 1e-2" in finding.cure
    assert "one-size-tried" not in capsys.readouterr().err, "it is no warning"
    several = [{"image": images(size)[:1]} for size in (16, 32)] * 2
    front = mptune.search("model.onnx", data=several, out="several.mptune", **given)
    assert "one-size-tried" not in {f.code for f in front.findings}
