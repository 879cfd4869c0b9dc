"""Rows of a softmax that are masked whole, seen on data: a finding of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mptune
from mptune.finding import Finding

pytestmark = pytest.mark.usefixtures("opened_here")

LENGTH, CHANNELS = 4, 16


def _attention(path: Path, softmax: str = "Softmax", opset: int = 17) -> Path:
    """Scores of ``x`` with itself, plus the input ``mask``, through a softmax to the values."""
    rng = np.random.default_rng(0)
    weights = {f"w{n}": (rng.standard_normal((CHANNELS, CHANNELS)) / 4).astype(np.float32) for n in "qkv"}
    nodes = [helper.make_node("MatMul", ["x", f"w{n}"], [n]) for n in "qkv"]
    if softmax == "MultiHeadAttention":
        inputs = ["q", "k", "v", "", "", "bias"]
        nodes.append(helper.make_node("Unsqueeze", ["mask", "one"], ["bias"]))
        nodes.append(helper.make_node(softmax, inputs, ["y"], "core", domain="com.microsoft", num_heads=2))
    else:
        nodes.append(helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]))
        nodes.append(helper.make_node("MatMul", ["q", "kt"], ["s"]))
        if softmax == "filled":
            nodes.append(helper.make_node("Less", ["mask", "zero"], ["hidden"]))
            nodes.append(helper.make_node("Where", ["hidden", "infinite", "s"], ["masked"]))
        else:
            nodes.append(helper.make_node("Add", ["s", "mask"], ["masked"]))
        if softmax in ("Softmax", "filled"):
            nodes.append(helper.make_node("Softmax", ["masked"], ["p"], "softmax", axis=2))
        else:
            axes = {"axes": [-1]}
            nodes += [
                helper.make_node("ReduceMax", ["masked"], ["largest"], **axes),
                helper.make_node("Sub", ["masked", "largest"], ["shifted"]),
                helper.make_node("Exp", ["shifted"], ["e"]),
                helper.make_node("ReduceSum", ["e", "last"], ["total"]),
                helper.make_node("Div", ["e", "total"], ["p"]),
            ]
        nodes.append(helper.make_node("MatMul", ["p", "v"], ["y"]))
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    constants += [numpy_helper.from_array(np.array([k], np.int64), name) for name, k in (("one", 1), ("last", -1))]
    constants += [
        numpy_helper.from_array(np.array(value, np.float32), name)
        for name, value in (("zero", 0), ("infinite", -np.inf))
    ]
    shapes = {"x": ["batch", LENGTH, CHANNELS], "mask": ["batch", LENGTH, LENGTH]}
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def _data(value: float) -> dict[str, np.ndarray]:
    """Four samples, the first row of each masked but for one element; in the third the last row is masked whole."""
    mask = np.zeros((4, LENGTH, LENGTH), np.float32)
    mask[2, -1, :] = value
    mask[:, 0, 1:] = value
    x = np.random.default_rng(1).standard_normal((4, LENGTH, CHANNELS)).astype(np.float32)
    return {"x": x, "mask": mask}


def _found(path: Path, data: dict[str, np.ndarray]) -> list[Finding]:
    findings = mptune.inspect(path, data=data).findings
    return [finding for finding in findings if finding.code == "mask" and "masked_rows" in finding.evidence]


@pytest.mark.parametrize(("softmax", "value"), [("Softmax", -3.4e38), ("Softmax", -1e9), ("filled", -1.0)])
def test_a_row_that_is_masked_whole_is_a_finding(softmax: str, value: float, tmp_path: Path) -> None:
    path = _attention(tmp_path / "model.onnx", softmax)
    (finding,) = _found(path, _data(value))
    assert finding.severity == "warning"
    assert finding.evidence["masked_rows"] == 1
    assert finding.where.samples == (2,)
    assert finding.where.nodes == ("softmax",)
    assert len(finding.where.groups) == 1


def test_a_mask_that_fp16_holds_is_no_finding(tmp_path: Path) -> None:
    assert _found(_attention(tmp_path / "model.onnx"), _data(-1e4)) == []


@pytest.mark.parametrize(("softmax", "opset"), [("Softmax", 12), ("written out", 17), ("MultiHeadAttention", 17)])
def test_other_forms_of_a_softmax(softmax: str, opset: int, tmp_path: Path) -> None:
    path = _attention(tmp_path / "model.onnx", softmax, opset)
    (finding,) = _found(path, _data(-3.4e38))
    assert finding.evidence["masked_rows"] == 1
    assert finding.where.samples == (2,)
