"""Small engines for tests of what runs them: written, not built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper

from tests.device.blueprint import Blueprint, Layer
from tests.graph import models
from tests.graph.models import node, value


def double() -> Blueprint:
    """Twice a matrix of 1 to 4 rows, and its sum."""
    nodes = [node("Mul", ["x", "two"], "y"), node("ReduceSum", ["x"], "all", keepdims=0)]
    nodes.append(node("Reshape", ["all", "one"], "total"))
    outputs = [value("y", ["rows", 3]), value("total", [1])]
    constants = [models.constant("two", [2]), models.constant("one", [1], np.int64)]
    model = models.model(nodes, [value("x", ["rows", 3])], outputs, constants)
    return Blueprint.of_model(model, shapes={"x": ((1, 3), (2, 3), (4, 3))}, given_layers=(Layer("all", 1.0),))


def nonzero() -> Blueprint:
    """Where four values are not zero: a shape that depends on values. It has no layers to report."""
    where = value("where", [1, "found"], TensorProto.INT64)
    return Blueprint.of_model(
        models.model([node("NonZero", ["x"], "where")], [value("x", [4])], [where]), given_layers=()
    )


def reshape() -> Blueprint:
    """A matrix in a shape that is an input, which lies on the host."""
    inputs = [value("x", ["rows", "columns"]), value("shape", [2], TensorProto.INT64)]
    model = models.model([node("Reshape", ["x", "shape"], "y")], inputs, [value("y", ["a", "b"])])
    values = {"shape": ((1, 1), (3, 4), (12, 12))}
    return Blueprint.of_model(model, ("shape",), shapes={"x": ((1, 1), (2, 6), (12, 12))}, values=values)


def branching() -> Blueprint:
    """A condition on the device, which no CUDA graph takes."""
    then, otherwise = (
        helper.make_graph([node(operator, ["x"], name)], name, [], [value(name, [2, 3])])
        for name, operator in (("then", "Neg"), ("else", "Abs"))
    )
    nodes = [
        node("ReduceSum", ["x"], "all", keepdims=0),
        node("Greater", ["all", "zero"], "is_positive"),
        node("If", ["is_positive"], "y", then_branch=then, else_branch=otherwise),
    ]
    model = models.model(nodes, [value("x", [2, 3])], [value("y", [2, 3])], [models.constant("zero", 0)])
    return Blueprint.of_model(model, given_layers=(Layer("all", 1.0),))


def fused() -> Blueprint:
    """``double`` as three layers: one of two nodes, one of none, one of one."""
    layers = (
        Layer("/a/MatMul_myl0_0", 0.5, "[ONNX Layer: /a/MatMul]\x1e[ONNX Layer: /a/Relu]"),
        Layer("Reformatting CopyNode for Input Tensor 0 to /b/Conv", 0.25),
        Layer("/b/Conv_myl0_1", 2.0, "[ONNX Layer: /b/Conv]"),
    )
    return replace(double(), given_layers=layers)


PROGRAMS: dict[str, Callable[[], Blueprint]] = {
    program.__name__: program for program in (double, nonzero, reshape, branching, fused)
}
