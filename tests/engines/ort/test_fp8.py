"""Layers of FP8 activations, which ONNX Runtime's CPU provider fuses as if they were INT8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from mptune.engines.ort.session import OrtSession, Preset, SessionOptions
from tests.graph import models
from tests.reporting.infer_support import infer_module


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm", "Conv"])
def test_the_session_and_the_script_open_it_and_keep_its_relu(op_type: str, tmp_path: Path) -> None:
    shapes = {"Conv": ([1, 16, 4, 4], [8, 16, 1, 1], [1, 8, 4, 4])}
    given, weights, out = shapes.get(op_type, ([4, 16], [16, 8], [4, 8]))
    zero = helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0.0])
    constants = [models.weight("w", *weights), models.constant("scale", 0.05), zero]
    nodes = []
    for before, after in (("x", "a"), ("w", "b"), ("relu", "y")):
        if after == "y":
            nodes += [models.node(op_type, ["a", "b"], "product"), models.node("Relu", ["product"], "relu")]
        nodes.append(models.node("QuantizeLinear", [before, "scale", "zero"], f"{after}_q"))
        nodes.append(models.node("DequantizeLinear", [f"{after}_q", "scale", "zero"], after))
    graph = models.model(nodes, [models.value("x", given)], [models.value("y", out)], constants, opset=21)
    path = models.save(graph, tmp_path)
    with pytest.raises(Exception, match=r"float8|QLinearMatMul"):  # where this no longer fails, nothing is to be done
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds, found = {"x": np.random.default_rng(0).standard_normal(given).astype(np.float32)}, []
    presets: tuple[Preset, ...] = ("reference", "values")
    for preset in presets:
        session = OrtSession(path, SessionOptions(preset=preset))
        found.append(session.run(feeds)["y"])
        assert any("FP8" in warning for warning in session.warnings) is (preset == "reference")
        session.close()
    script = infer_module(path, tmp_path)
    by_script = script["opened"](path, onnxruntime.SessionOptions(), ["CPUExecutionProvider"], [])
    found.append(by_script.run(None, feeds)[0])
    assert found[1].min() == 0, "a Relu before FP8 is dropped as one before UINT8 is"
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[2], found[1])
