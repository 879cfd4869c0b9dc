"""Small engines for tests of what runs them: written, not built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.device.blueprint import Blueprint

Named = tuple[str, int, list[int | str]]


def _model(nodes: list[NodeProto], inputs: list[Named], outputs: list[Named], **constants: np.ndarray) -> ModelProto:
    infos = [[helper.make_tensor_value_info(*one) for one in named] for named in (inputs, outputs)]
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", *infos, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def double() -> Blueprint:
    """Twice a matrix of 1 to 4 rows, and its sum."""
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["y"]),
        helper.make_node("ReduceSum", ["x"], ["all"], keepdims=0),
        helper.make_node("Reshape", ["all", "one"], ["total"]),
    ]
    inputs, outputs = [("x", TensorProto.FLOAT, ["rows", 3])], [("y", TensorProto.FLOAT, ["rows", 3])]
    model = _model(nodes, inputs, [*outputs, ("total", TensorProto.FLOAT, [1])], two=np.float32([2]), one=np.array([1]))
    return Blueprint.of_model(model, shapes={"x": ((1, 3), (2, 3), (4, 3))}, layers=(("all", 1.0, ""),))


def nonzero() -> Blueprint:
    """Where four values are not zero: a shape that depends on values. It has no layers to report."""
    model = _model(
        [helper.make_node("NonZero", ["x"], ["where"])],
        [("x", TensorProto.FLOAT, [4])],
        [("where", TensorProto.INT64, [1, "found"])],
    )
    return Blueprint.of_model(model, layers=())


def reshape() -> Blueprint:
    """A matrix in a shape that is an input, which lies on the host."""
    model = _model(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [("x", TensorProto.FLOAT, ["rows", "columns"]), ("shape", TensorProto.INT64, [2])],
        [("y", TensorProto.FLOAT, ["a", "b"])],
    )
    values = {"shape": ((1, 1), (3, 4), (12, 12))}
    return Blueprint.of_model(model, ("shape",), shapes={"x": ((1, 1), (2, 6), (12, 12))}, values=values)


def odd() -> Blueprint:
    """An input of a type that NumPy lacks."""
    model = _model(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        [("x", TensorProto.BFLOAT16, ["rows", 3])],
        [("y", TensorProto.FLOAT, ["rows", 3])],
    )
    return Blueprint.of_model(model)


def branching() -> Blueprint:
    """A condition on the device, which no CUDA graph takes."""

    def branch(name: str, operator: str) -> object:
        node = helper.make_node(operator, ["x"], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3])])

    chosen = {"then_branch": branch("then", "Neg"), "else_branch": branch("else", "Abs")}
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["all"], keepdims=0),
        helper.make_node("Greater", ["all", "zero"], ["is_positive"]),
        helper.make_node("If", ["is_positive"], ["y"], **chosen),
    ]
    infos = [("x", TensorProto.FLOAT, [2, 3])], [("y", TensorProto.FLOAT, [2, 3])]
    model = _model(nodes, *infos, zero=np.float32(0))
    return Blueprint.of_model(model, layers=(("all", 1.0, ""),))


def fused() -> Blueprint:
    """``double`` as three layers: one of two nodes, one of none, one of one."""
    layers = (
        ("/a/MatMul_myl0_0", 0.5, "[ONNX Layer: /a/MatMul]\x1e[ONNX Layer: /a/Relu]"),
        ("Reformatting CopyNode for Input Tensor 0 to /b/Conv", 0.25, ""),
        ("/b/Conv_myl0_1", 2.0, "[ONNX Layer: /b/Conv]"),
    )
    return replace(double(), layers=layers)


PROGRAMS: dict[str, Callable[[], Blueprint]] = {
    made.__name__: made for made in (double, nonzero, reshape, odd, branching, fused)
}
