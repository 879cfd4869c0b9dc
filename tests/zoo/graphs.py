"""Models of which the graph alone shows a finding, each with a sound twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx

from tests.graph.models import constant, text
from tests.zoo.numbers import weights
from tests.zoo.tracker import tracker


def _plane(batch: int | str) -> onnx.ModelProto:
    """An image times a mask of one channel that is computed from it."""
    image = f"float[{batch},3,8,8]"
    nodes = "m = Conv(image, w) s = Sigmoid(m) [cut_out] y = Mul(image, s)"
    return text(f"({image} image) => ({image} y) {{ {nodes} }}", weights("w", 1, 3, 1, 1))


def _selected(is_fixed: bool) -> onnx.ModelProto:
    """Scores above zero, as many as there are; or the best four."""
    nodes, size = "g = Greater(h, zero) g1 = Reshape(g, flat) [choose] y = Compress(h, g1)", "n"
    if is_fixed:
        nodes, size = "y, at = TopK<axis = -1>(h, four)", "1,4"
    given = "float zero = {0}, int64[1] flat = {-1}, int64[1] four = {4}"
    graph = f"(float[1,16] x) => (float[{size}] y) <{given}> {{ h = MatMul(x, w) {nodes} }}"
    return text(graph, weights("w", 16, 16))


def _filter(state: str) -> onnx.ModelProto:
    """A second output beside an input; they pair where it is the state of the next step."""
    nodes = f"h = MatMul(x, w) y = Add(h, {state}) features = Tanh(y)"
    graph = f"(float[1,16] x, float[1,16] {state}) => (float[1,16] y, float[1,16] features) {{ {nodes} }}"
    return text(graph, weights("w", 16, 16))


def _half(computes: bool) -> onnx.ModelProto:
    """A layer in FP16, or FP16 weights that are widened before they are used."""
    nodes = "v = Cast<to = 1>(v16) y = MatMul(r, v)"
    if computes:
        nodes = "r16 = Cast<to = 10>(r) [second] y16 = MatMul(r16, v16) y = Cast<to = 1>(y16)"
    graph = f"(float[1,16] x) => (float[1,4] y) {{ h = MatMul(x, w) r = Relu(h) {nodes} }}"
    half = constant("v16", np.random.default_rng(2).normal(0, 0.25, (16, 4)), np.float16)
    return text(graph, weights("w", 16, 16), half)


def _stretched(batch: int | str) -> onnx.ModelProto:
    """What each pixel is over time and channels is stretched over both."""
    video = f"float[{batch},3,4,8,8]"
    nodes = "r = ReduceMean<axes = [1, 2]>(video) [foreground] y = Sub(video, r)"
    return text(f"({video} video) => ({video} y) {{ {nodes} }}", opset=13)


def _outer(batch: int | str) -> onnx.ModelProto:
    """Rows and columns stretch each other to a plane."""
    image = f"float[{batch},3,8,8]"
    nodes = "r = ReduceMean<axes = [3]>(image) c = ReduceMean<axes = [2]>(image) [plane] y = Add(r, c)"
    return text(f"({image} image) => ({image} y) {{ {nodes} }}", opset=13)


GATES = {"gate": "g = GlobalAveragePool(c) k1 = Sigmoid(g) y = Mul(c, k1)", "bias": "y = Add(c, k)"}
GATES["scale"] = "y = Mul(c, k)"


def _gated(kind: str) -> onnx.ModelProto:
    """A squeeze-and-excite gate, a bias or a scale of channels: [1, C, 1, 1] over an image, in a batch of 1."""
    graph = f"(float[1,3,8,8] image) => (float[1,8,8,8] y) {{ c = Conv(image, w) {GATES[kind]} }}"
    return text(graph, weights("w", 8, 3, 1, 1), weights("k", 1, 8, 1, 1))


def _suppressed(is_fixed: bool) -> onnx.ModelProto:
    """Boxes after NMS; or the eight best."""
    nodes, size = "y, at = TopK<axis = 1>(s, eight)", "1,8,1"
    if not is_fixed:
        size = "n,4"
        nodes = """st = Transpose<perm = [0, 2, 1]>(s) [choose] kept = NonMaxSuppression(b, st, eight, iou)
            rows = Gather<axis = 1>(kept, last) bf = Reshape(b, flat) y = Gather<axis = 0>(bf, rows)"""
    given = "int64[1] eight = {8}, float[1] iou = {0.5}, int64 last = {2}, int64[2] flat = {-1, 4}"
    boxes = "b = MatMul(x, w) s = MatMul(x, v)"
    graph = f"(float[1,32,8] x) => (float[{size}] y) <{given}> {{ {boxes} {nodes} }}"
    return text(graph, weights("w", 8, 4), weights("v", 8, 1))


def _positive(is_fixed: bool) -> onnx.ModelProto:
    """The places of values above zero; or which they are."""
    out, op = ("float[1,16]", "Sign") if is_fixed else ("int64[2,n]", "NonZero")
    graph = f"(float[1,16] x) => ({out} y) {{ h = MatMul(x, w) r = Relu(h) [choose] y = {op}(r) }}"
    return text(graph, weights("w", 16, 16))


def _constant(is_input: bool) -> onnx.ModelProto:
    """A weight that a caller may replace, or not."""
    given = "float[1,16] x, float[16,16] w" if is_input else "float[1,16] x"
    return text(f"({given}) => (float[1,16] y) {{ h = MatMul(x, w) y = Tanh(h) }}", weights("w", 16, 16))


def _old(opset: int) -> onnx.ModelProto:
    """As the files of the model zoo are."""
    proto = text(
        "(float[1,16] x) => (float[1,16] y) { h = MatMul(x, w) y = Tanh(h) }", weights("w", 16, 16), opset=opset
    )
    proto.ir_version = 3
    return proto


def _declared(shape: str) -> onnx.ModelProto:
    return text(f"(float[1,16] x) => (float{shape} y) {{ h = MatMul(x, w) y = Tanh(h) }}", weights("w", 16, 16))


Made = Callable[[], onnx.ModelProto]
GRAPHS: dict[str, tuple[Made, Made, tuple[str, ...]]] = {
    "broadcast": (lambda: _plane(1), lambda: _plane("batch"), ("cut_out",)),
    "value-dependent-shape": (lambda: _selected(False), lambda: _selected(True), ("choose",)),
    "state-fed-back": (tracker, lambda: _filter("reference"), ()),
    "overridable-constants": (lambda: _constant(True), lambda: _constant(False), ()),
    "opset-raised": (lambda: _old(7), lambda: _old(9), ()),
    "wrong-output-shape": (lambda: _declared("[5]"), lambda: _declared("[1,16]"), ()),
    "already-mixed": (lambda: _half(True), lambda: _half(False), ("second",)),
}
"""Code -> what shows it, its sound twin, and the nodes that the finding names."""

FURTHER_GRAPHS: dict[str, tuple[Made, Made, tuple[str, ...]]] = {
    "broadcast over more than one axis": (lambda: _stretched(1), lambda: _stretched("batch"), ("foreground",)),
    "broadcast of both operands": (lambda: _outer(1), lambda: _outer("batch"), ("plane",)),
    **{f"broadcast: a {k} is none": (lambda: _plane(1), partial(_gated, k), ("cut_out",)) for k in GATES},
    "value-dependent-shape of NMS": (lambda: _suppressed(False), lambda: _suppressed(True), ("choose",)),
    "value-dependent-shape of NonZero": (lambda: _positive(False), lambda: _positive(True), ("choose",)),
}
"""The same for further situations: the code up to the first blank or colon."""
