"""Models of which the graph alone shows a finding, each with a sound twin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from tests.graph.models import constant, model, node, value
from tests.zoo.numbers import weights
from tests.zoo.tracker import tracker


def _plane(batch: int | str) -> onnx.ModelProto:
    """An image times a mask of one channel that is computed from it."""
    nodes = [
        node("Conv", ["image", "w"], "m", "mask"),
        node("Sigmoid", ["m"], "s", "sigmoid"),
        node("Mul", ["image", "s"], "y", "cut out"),
    ]
    image = [batch, 3, 8, 8]
    return model(nodes, [value("image", image)], [value("y", image)], [weights("w", 1, 3, 1, 1)])


def _selected(is_fixed: bool) -> onnx.ModelProto:
    """Scores above zero, as many as there are; or the best four."""
    nodes = [node("MatMul", ["x", "w"], "h", "fc")]
    if is_fixed:
        nodes.append(node("TopK", ["h", "k"], ["y", "at"], "choose", axis=-1))
    else:
        nodes += [node("Greater", ["h", "zero"], "g", "above"), node("Compress", ["h", "g1"], "y", "choose")]
        nodes.insert(2, node("Reshape", ["g", "flat"], "g1", "flat"))
    constants = [weights("w", 16, 16), constant("zero", 0.0), constant("flat", [-1], np.int64)]
    constants.append(constant("k", [4], np.int64))
    return model(nodes, [value("x", [1, 16])], [value("y", [1, 4] if is_fixed else ["n"])], constants)


def _filter(state: str) -> onnx.ModelProto:
    """A second output beside an input; they pair where it is the state of the next step."""
    nodes = [node("MatMul", ["x", "w"], "h", "fc"), node("Add", ["h", state], "y", "blend")]
    nodes.append(node("Tanh", ["y"], "features", "tanh"))
    inputs = [value("x", [1, 16]), value(state, [1, 16])]
    outputs = [value("y", [1, 16]), value("features", [1, 16])]
    return model(nodes, inputs, outputs, [weights("w", 16, 16)])


def _half(computes: bool) -> onnx.ModelProto:
    """A layer in FP16, or FP16 weights that are widened before they are used."""
    to16, to32 = {"to": TensorProto.FLOAT16}, {"to": TensorProto.FLOAT}
    nodes = [node("MatMul", ["x", "w"], "h", "first"), node("Relu", ["h"], "r", "relu")]
    if computes:
        nodes += [
            node("Cast", ["r"], "r16", "narrow", **to16),
            node("MatMul", ["r16", "v16"], "y16", "second"),
            node("Cast", ["y16"], "y", "widen", **to32),
        ]
    else:
        nodes += [node("Cast", ["v16"], "v", "widen", **to32), node("MatMul", ["r", "v"], "y", "second")]
    half = constant("v16", np.random.default_rng(2).normal(0, 0.25, (16, 4)), np.float16)
    return model(nodes, [value("x", [1, 16])], [value("y", [1, 4])], [weights("w", 16, 16), half])


GRAPHS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[], onnx.ModelProto], tuple[str, ...]]] = {
    "broadcast": (lambda: _plane(1), lambda: _plane("batch"), ("cut out",)),
    "value-dependent-shape": (lambda: _selected(False), lambda: _selected(True), ("choose",)),
    "state-fed-back": (tracker, lambda: _filter("reference"), ()),
    "already-mixed": (lambda: _half(True), lambda: _half(False), ("second",)),
}
"""Code -> what shows it, its sound twin, and the nodes that the finding names."""
