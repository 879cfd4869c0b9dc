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


def _stretched(batch: int | str) -> onnx.ModelProto:
    """What each pixel is over time and channels is stretched over both."""
    nodes = [
        node("ReduceMean", ["video"], "r", "background", axes=[1, 2], keepdims=1),
        node("Sub", ["video", "r"], "y", "foreground"),
    ]
    video = [batch, 3, 4, 8, 8]
    return model(nodes, [value("video", video)], [value("y", video)], [], 13)


def _outer(batch: int | str) -> onnx.ModelProto:
    """Rows and columns stretch each other to a plane."""
    nodes = [
        node("ReduceMean", ["image"], "r", "rows", axes=[3], keepdims=1),
        node("ReduceMean", ["image"], "c", "columns", axes=[2], keepdims=1),
        node("Add", ["r", "c"], "y", "plane"),
    ]
    image = [batch, 3, 8, 8]
    return model(nodes, [value("image", image)], [value("y", image)], [], 13)


def _gated(kind: str) -> onnx.ModelProto:
    """A squeeze-and-excite gate, a bias or a scale of channels: [1, C, 1, 1] over an image, in a batch of 1."""
    nodes = [node("Conv", ["image", "w"], "c", "conv")]
    constants = [weights("w", 8, 3, 1, 1), weights("k", 1, 8, 1, 1)]
    if kind == "gate":
        nodes += [node("GlobalAveragePool", ["c"], "g", "squeeze"), node("Sigmoid", ["g"], "k1", "excite")]
        nodes.append(node("Mul", ["c", "k1"], "y", "gate"))
    else:
        nodes.append(node("Add" if kind == "bias" else "Mul", ["c", "k"], "y", kind))
    return model(nodes, [value("image", [1, 3, 8, 8])], [value("y", [1, 8, 8, 8])], constants)


def _suppressed(is_fixed: bool) -> onnx.ModelProto:
    """Boxes after NMS; or the eight best."""
    nodes = [node("MatMul", ["x", "w"], "b", "boxes"), node("MatMul", ["x", "v"], "s", "scores")]
    constants = [weights("w", 8, 4), weights("v", 8, 1), constant("k", [8], np.int64)]
    if is_fixed:
        nodes.append(node("TopK", ["s", "k"], ["y", "at"], "choose", axis=1))
        return model(nodes, [value("x", [1, 32, 8])], [value("y", [1, 8, 1])], constants)
    nodes.append(node("Transpose", ["s"], "st", "by class", perm=[0, 2, 1]))
    nodes.append(node("NonMaxSuppression", ["b", "st", "most", "iou"], "kept", "choose"))
    nodes.append(node("Gather", ["kept", "last"], "rows", "row numbers", axis=1))
    nodes.append(node("Reshape", ["b", "flat"], "bf", "all boxes"))
    nodes.append(node("Gather", ["bf", "rows"], "y", "read", axis=0))
    constants += [constant("most", [8], np.int64), constant("iou", [0.5]), constant("last", 2, np.int64)]
    constants.append(constant("flat", [-1, 4], np.int64))
    return model(nodes, [value("x", [1, 32, 8])], [value("y", ["n", 4])], constants)


def _found(is_fixed: bool) -> onnx.ModelProto:
    """The places of values above zero; or which they are."""
    nodes = [node("MatMul", ["x", "w"], "h", "fc"), node("Relu", ["h"], "r", "relu")]
    if is_fixed:
        nodes.append(node("Sign", ["r"], "y", "choose"))
    else:
        nodes.append(node("NonZero", ["r"], "y", "choose"))
    out = value("y", [1, 16]) if is_fixed else value("y", [2, "n"], TensorProto.INT64)
    return model(nodes, [value("x", [1, 16])], [out], [weights("w", 16, 16)])


GRAPHS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[], onnx.ModelProto], tuple[str, ...]]] = {
    "broadcast": (lambda: _plane(1), lambda: _plane("batch"), ("cut out",)),
    "value-dependent-shape": (lambda: _selected(False), lambda: _selected(True), ("choose",)),
    "state-fed-back": (tracker, lambda: _filter("reference"), ()),
    "already-mixed": (lambda: _half(True), lambda: _half(False), ("second",)),
}
"""Code -> what shows it, its sound twin, and the nodes that the finding names."""

FURTHER_GRAPHS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[], onnx.ModelProto], tuple[str, ...]]] = {
    "broadcast over more than one axis": (lambda: _stretched(1), lambda: _stretched("batch"), ("foreground",)),
    "broadcast of both operands": (lambda: _outer(1), lambda: _outer("batch"), ("plane",)),
    "broadcast: a gate is none": (lambda: _plane(1), lambda: _gated("gate"), ("cut out",)),
    "broadcast: a bias is none": (lambda: _plane(1), lambda: _gated("bias"), ("cut out",)),
    "broadcast: a scale is none": (lambda: _plane(1), lambda: _gated("scale"), ("cut out",)),
    "value-dependent-shape of NMS": (lambda: _suppressed(False), lambda: _suppressed(True), ("choose",)),
    "value-dependent-shape of NonZero": (lambda: _found(False), lambda: _found(True), ("choose",)),
}
"""The same for further situations: the code up to the first blank or colon."""
