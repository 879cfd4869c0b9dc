"""A classifier with classes that no sample is near: near-zero probabilities do not dominate the error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import mptune
from mptune.settings import LatencySettings
from tests.engines.engine_support import save_graph

pytestmark = pytest.mark.usefixtures("opened_here")

CLASSES = 20
OPTIONS = {"target": "jetson-orin-nano-8gb", "budget": 3}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="head"),
        helper.make_node("Add", ["a", "b"], ["logits"], name="bias"),
        helper.make_node("Softmax", ["logits"], ["p"], name="classes", axis=-1),
        helper.make_node("Reshape", ["p", "shape"], ["y"], name="out"),
    ]
    constants = {
        "w": rng.standard_normal((32, CLASSES)).astype(np.float32),
        "b": np.linspace(0, -16, CLASSES, dtype=np.float32),  # the last are far below FP16's smallest normal number
        "shape": np.array([-1, CLASSES], np.int64),
    }
    save_graph(tmp_path / "model.onnx", nodes, [1, 32], constants, [1, CLASSES])
    np.savez(tmp_path / "data.npz", x=0.4 * rng.standard_normal((24, 32)).astype(np.float32))
    return tmp_path


def search(files: Path, **more: object) -> mptune.Front:
    given = {**OPTIONS, "data": files / "data.npz", **more}
    return mptune.search(files / "model.onnx", out=files / "run", **given)


def test_a_search_and_a_check_judge_probabilities_on_their_own_scale(files: Path) -> None:
    fp16 = search(files).fp16
    assert fp16 is not None
    assert fp16.held_out_value is not None
    assert max(fp16.error_value, fp16.held_out_value) < 5e-3
    mptune.apply(files / "model.onnx", fp16.plan, files / "mixed.onnx")
    options = {"against": files / "model.onnx", "data": files / "data.npz"}
    assert mptune.check(files / "mixed.onnx", max_error=5e-3, **options).agrees


def test_a_confirmation_takes_the_scales_of_the_search(files: Path) -> None:
    search(files, latency=LatencySettings(warmup_ms=1.0, duration_ms=2.0))
    (fp16,) = (plan for plan in mptune.confirm(files / "run", target="cpu").plans if not plan.searched.plan.fp32_groups)
    assert fp16.measured is not None
    assert fp16.measured.held_out_value is not None
    assert max(fp16.measured.error_value, fp16.measured.held_out_value) < 5e-3
