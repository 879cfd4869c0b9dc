"""``mptune compare`` of models whose inputs are FP16: a converter's, or those that a deployment is fed with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mptune
from tests.diagnosis.recordings import session

TYPES = {"FP32": TensorProto.FLOAT, "FP16": TensorProto.FLOAT16}


def write(path: Path, inputs: str, inside: str) -> Path:
    """Two layers, with inputs and outputs of one type and all else in the other."""
    rng = np.random.default_rng(0)
    outer, inner = TYPES[inputs], TYPES[inside]
    dtype = helper.tensor_dtype_to_np_dtype(inner)
    weights = [rng.normal(size=shape).astype(dtype) / dtype.type(4) for shape in ((16, 16), (16, 8))]
    nodes = [
        helper.make_node("Cast", ["x"], ["x_inside"], to=inner),
        helper.make_node("MatMul", ["x_inside", "w0"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["c"], "second"),
        helper.make_node("Cast", ["c"], ["y"], to=outer),
    ]
    graph = helper.make_graph(
        nodes,
        "fp16 inputs",
        [helper.make_tensor_value_info("x", outer, [4, 16])],
        [helper.make_tensor_value_info("y", outer, [4, 8])],
        [numpy_helper.from_array(weight, f"w{k}") for k, weight in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def samples(inputs: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    dtype = helper.tensor_dtype_to_np_dtype(TYPES[inputs])
    return [{"x": rng.normal(size=(4, 16)).astype(dtype)} for _ in range(4)]


@pytest.mark.parametrize(("of_model", "of_candidate"), [("FP32", "FP16"), ("FP16", "FP32"), ("FP16", "FP16")])
def test_models_with_fp16_inputs_are_fed_what_the_samples_say(of_model: str, of_candidate: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model.onnx", of_model, "FP32")
    candidate = write(tmp_path / "candidate.onnx", of_candidate, "FP16")
    found = mptune.compare(model, candidate, data=samples(of_model), trace=True)
    assert found.verdict == "agrees"
    assert found.findings[0].evidence


def test_recorded_outputs_of_a_model_with_fp16_inputs(tmp_path: Path) -> None:
    model, fed = write(tmp_path / "model.onnx", "FP16", "FP32"), samples("FP16")
    recorded = np.concatenate([session(model.read_bytes()).run(None, dict(one))[0] for one in fed])
    for name, values, agrees in (("sound", recorded, True), ("wrong", recorded * np.float16(1.5), False)):
        np.savez(tmp_path / f"{name}.npz", y=values)
        found = mptune.compare(model, data=fed, outputs=tmp_path / f"{name}.npz")
        assert (found.verdict == "agrees") == agrees, name
