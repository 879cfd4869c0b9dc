"""Further situations of the codes about numbers: each described by its own words in the list of codes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from tests.graph.models import constant, model, node, value
from tests.zoo.numbers import INT64_MAX, Show, classifier, flat_index, images, rows, times_mask, weights
from tests.zoo.voice import frames, voice

F32_MIN = float(np.finfo(np.float32).min)


def _constant_overflow(scale: float) -> Show:
    """A score is turned into a cost by a constant that FP16 does not have."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Mul", ["h", "scale"], "s", "to cost"),
        node("Div", ["s", "scale"], "y", "back"),
    ]
    proto = model(nodes, [value("x", [1, 16])], [value("y", [1, 8])], [weights("w", 16, 8), constant("scale", scale)])
    return Show(proto, {"x": rows(16)}, ("to cost",))


def _reciprocal(eps: float, floor: float) -> Show:
    """One over a length that is zero for an empty row: x/0, and not 0/0."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Relu", ["h"], "r", "relu"),
        node("ReduceSum", ["r", "axes"], "s", "total", keepdims=1),
        node("Add", ["s", "eps"], "d", "guard"),
        node("Reciprocal", ["d"], "i", "inverse"),
        node("Tanh", ["i"], "t", "squash"),
        node("MatMul", ["t", "v"], "y", "head"),
    ]
    constants = [weights("w", 16, 16), weights("v", 1, 4), constant("eps", eps), constant("axes", [-1], np.int64)]
    x = rows(16)
    if not floor:
        x[[2, 5]] = 0.0
    return Show(model(nodes, [value("x", [1, 16])], [value("y", [1, 4])], constants), {"x": x}, ("guard",))


def _instance_norm(eps: float, *, flat: bool) -> Show:
    """InstanceNorm in pieces; planes without any contrast, as a ReLU or a dark image makes them, reach its eps."""
    axes = {"axes": [2, 3], "keepdims": 1}
    nodes = [
        node("ReduceMean", ["x"], "m", "mean", **axes),
        node("Sub", ["x", "m"], "c", "centre"),
        node("Mul", ["c", "c"], "q", "squares"),
        node("ReduceMean", ["q"], "v", "variance", **axes),
        node("Add", ["v", "eps"], "e", "guard"),
        node("Sqrt", ["e"], "r", "root"),
        node("Div", ["c", "r"], "n", "normalise"),
        node("Conv", ["n", "w"], "y", "head"),
    ]
    x = images(size=16)
    if flat:
        x[[1, 4], 2] = 0.25
    shape = [1, 3, 16, 16]
    proto = model(
        nodes, [value("x", shape)], [value("y", [1, 4, 16, 16])], [weights("w", 4, 3, 1, 1), constant("eps", eps)], 13
    )
    return Show(proto, {"x": x}, ("guard",) if flat else ())


def _compared(offset: float) -> Show:
    """A time stamp is compared with a threshold that lies far from zero."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Add", ["h", "offset"], "o", "since the start"),
        node("Greater", ["o", "offset"], "late", "is late"),
        node("Where", ["late", "one", "h"], "z", "select"),
        node("MatMul", ["z", "v"], "y", "head"),
    ]
    constants = [weights("w", 16, 16), weights("v", 16, 4), constant("offset", offset), constant("one", 1.0)]
    proto = model(nodes, [value("x", [1, 64, 16])], [value("y", [1, 64, 4])], constants)
    return Show(proto, {"x": rows(64, 16)}, ("is late",))


def _flow(size: float) -> Show:
    """Coordinates of pixels plus the flow of one step, recorded at each step: far from the origin a step is lost."""
    nodes = [
        node("Conv", ["features", "w"], "d", "step"),
        node("Mul", ["d", "small"], "s", "in pixels"),
        node("Add", ["coords", "s"], "coords_next", "accumulate"),
        node("Sub", ["coords_next", "centre"], "y", "relative"),
    ]
    at = np.linspace(0.9 * size, size, 8, dtype=np.float32)
    coords = np.broadcast_to(at, (8, 2, 8, 8)) + np.random.default_rng(3).uniform(0, 0.1, (8, 2, 8, 8))
    inputs = [value("features", [1, 16, 8, 8]), value("coords", [1, 2, 8, 8])]
    outputs = [value("coords_next", [1, 2, 8, 8]), value("y", [1, 2, 8, 8])]
    constants = [weights("w", 2, 16, 1, 1), constant("small", 2e-5 * 2048), constant("centre", float(size))]
    data = {"features": rows(16, 8, 8), "coords": coords.astype(np.float32)}
    return Show(model(nodes, inputs, outputs, constants), data, ("accumulate",))


def _running(total: float) -> Show:
    """A running sum with one small term a step."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Mul", ["h", "rate"], "t", "term"),
        node("Add", ["sum", "t"], "sum_next", "running sum"),
        node("Tanh", ["sum_next"], "y", "read"),
    ]
    inputs = [value("x", [1, 16]), value("sum", [1, 8])]
    outputs = [value("sum_next", [1, 8]), value("y", [1, 8])]
    constants = [weights("w", 16, 8), constant("rate", 1e-3)]
    sums = (total * np.random.default_rng(5).uniform(0.8, 1.2, (8, 8))).astype(np.float32)
    return Show(model(nodes, inputs, outputs, constants), {"x": rows(16), "sum": sums}, ("running sum",))


def _added(offset: float) -> Show:
    """The difference as the sum with a negated operand."""
    nodes = [
        node("MatMul", ["x", "w"], "a", "left"),
        node("Add", ["a", "offset"], "b", "raise"),
        node("MatMul", ["x", "v"], "c", "right"),
        node("Sub", ["c", "offset"], "d", "lower"),
        node("Add", ["b", "d"], "e", "together"),
        node("MatMul", ["e", "u"], "y", "head"),
    ]
    constants = [weights("w", 16, 16), weights("v", 16, 16, seed=8), weights("u", 16, 4), constant("offset", offset)]
    proto = model(nodes, [value("x", [1, 8, 16])], [value("y", [1, 8, 4])], constants)
    return Show(proto, {"x": rows(8, 16)}, ("together",))


def _total(is_one_signed: bool) -> Show:
    """A sum over 4096 positions, of magnitudes or of values of both signs."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Abs" if is_one_signed else "Identity", ["h"], "r", "magnitude"),
        node("ReduceSum", ["r", "axes"], "s", "total", keepdims=0),
        node("Mul", ["s", "share"], "m", "share"),
        node("MatMul", ["m", "v"], "y", "head"),
    ]
    constants = [weights("w", 4, 8), weights("v", 8, 4), constant("axes", [1], np.int64), constant("share", 1 / 4096)]
    proto = model(nodes, [value("x", [1, 4096, 4])], [value("y", [1, 4])], constants)
    return Show(proto, {"x": rows(4096, 4)}, ("total",))


def _size(length: int) -> Show:
    """How many rows are kept is computed in floating point from the number of those that are there."""
    nodes = [
        node("ReduceSum", ["valid", "axes"], "n", "count", keepdims=0),
        node("Mul", ["n", "ratio"], "k", "keep"),
        node("Cast", ["k"], "i", "to size", to=TensorProto.INT64),
        node("Slice", ["x", "zero", "i", "axis"], "s", "first rows"),
        node("ReduceMean", ["s"], "m", "mean", axes=[1], keepdims=0),
        node("MatMul", ["m", "w"], "y", "head"),
    ]
    constants = [constant("ratio", 0.75), constant("axes", [1], np.int64), constant("zero", [0], np.int64)]
    constants += [constant("axis", [1], np.int64), weights("w", 4, 4)]
    valid = np.ones((8, length), np.float32)
    valid[:, -7:] = np.random.default_rng(4).integers(0, 2, (8, 7))
    inputs = [value("x", [1, length, 4]), value("valid", [1, length])]
    proto = model(nodes, inputs, [value("y", [1, 4])], constants, 17)
    return Show(proto, {"x": rows(length, 4), "valid": valid}, ("keep",))


def _added_mask(low: float, *, whole_row: bool = False) -> Show:
    """A mask of this value, chosen by a Where and added to the scores."""
    nodes = [
        node("MatMul", ["x", "w"], "s", "scores"),
        node("Where", ["keep", "zero", "low"], "m", "mask value"),
        node("Add", ["s", "m"], "a", "add mask"),
        node("Softmax", ["a"], "p", "softmax", axis=-1),
        node("MatMul", ["p", "v"], "y", "head"),
    ]
    keep = np.random.default_rng(7).uniform(size=(8, 16)) > 0.3
    if whole_row:
        keep[3] = False
    constants = [weights("w", 16, 16), weights("v", 16, 4), constant("zero", 0.0), constant("low", low)]
    inputs = [value("x", [1, 16]), value("keep", [1, 16], TensorProto.BOOL)]
    return Show(model(nodes, inputs, [value("y", [1, 4])], constants), {"x": rows(16), "keep": keep})


def _rms_norm(opset: int) -> Show:
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Pow", ["h", "two"], "q", "squares"),
        node("ReduceMean", ["q"], "v", "mean square", axes=[-1], keepdims=1),
        node("Add", ["v", "eps"], "e", "guard"),
        node("Sqrt", ["e"], "r", "root"),
        node("Div", ["h", "r"], "n", "normalise"),
        node("Mul", ["n", "g"], "y", "scale"),
    ]
    constants = [weights("w", 16, 16), constant("two", 2.0), constant("eps", 1e-3), constant("g", np.ones(16))]
    return Show(
        model(nodes, [value("x", [1, 16])], [value("y", [1, 16])], constants, opset), {"x": rows(16)}, ("squares",)
    )


def _length() -> Show:
    """Vectors by their length: the same operators, and no norm that an opset has."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Mul", ["h", "h"], "q", "squares"),
        node("ReduceSum", ["q", "axes"], "v", "sum", keepdims=1),
        node("Sqrt", ["v"], "r", "root"),
        node("Div", ["h", "r"], "y", "to unit length"),
    ]
    constants = [weights("w", 16, 16), constant("axes", [-1], np.int64)]
    return Show(model(nodes, [value("x", [1, 16])], [value("y", [1, 16])], constants), {"x": rows(16)})


def _ends() -> Show:
    """The end of a Slice as a Concat of an INT64_MAX and another end."""
    nodes = [
        node("Concat", ["end", "width"], "ends", "ends", axis=0),
        node("Slice", ["ids", "starts", "ends", "axes"], "k", "rest"),
        node("Gather", ["table", "k"], "y", "read"),
    ]
    constants = [constant("end", [INT64_MAX], np.int64), constant("width", [8], np.int64), weights("table", 64, 8)]
    constants += [constant("starts", [0, 2], np.int64), constant("axes", [1, 2], np.int64)]
    ids = np.random.default_rng(7).integers(0, 64, (8, 4, 16))
    proto = model(nodes, [value("ids", [1, 4, 16], TensorProto.INT64)], [value("y", None)], constants)
    return Show(proto, {"ids": ids})


def _constant_id() -> Show:
    """A session's number beyond INT32 that is compared with."""
    nodes = [
        node("Equal", ["ids", "marker"], "e", "is marker"),
        node("Cast", ["e"], "f", "to float", to=TensorProto.FLOAT),
        node("MatMul", ["f", "w"], "y", "head"),
    ]
    constants = [constant("marker", 7_000_000_123, np.int64), weights("w", 16, 4)]
    ids = np.random.default_rng(7).integers(0, 64, (8, 16))
    ids[:, 3] = 7_000_000_123
    proto = model(nodes, [value("ids", [1, 16], TensorProto.INT64)], [value("y", [1, 4])], constants)
    return Show(proto, {"ids": ids}, ("is marker",))


def _bytes(*, scaled: bool) -> Show:
    """The classifier behind an input of bytes, which are to be divided by 255 and may not be."""
    proto = classifier()
    shape = [1, 3, 64, 64]
    nodes = [node("Cast", ["bytes"], "wide", "widen", to=TensorProto.FLOAT)]
    nodes.append(
        node("Mul", ["wide", "unit"], "x", "to 0..1") if scaled else node("Identity", ["wide"], "x", "as it is")
    )
    nodes += list(proto.graph.node)
    constants = [*proto.graph.initializer, *([constant("unit", 1 / 255)] if scaled else [])]
    made = model(nodes, [value("bytes", shape, TensorProto.UINT8)], [value("y", [1, 4])], constants)
    return Show(made, {"bytes": images(255.0).round().astype(np.uint8)})


def _surprise(scale: float) -> Show:
    """Minus the logarithm of probabilities that a Softmax gives."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Softmax", ["h"], "p", "probability", axis=-1),
        node("Log", ["p"], "l", "logarithm"),
        node("Neg", ["l"], "y", "surprise"),
    ]
    w = constant("w", scale * np.random.default_rng(3).normal(0, 0.25, (16, 16)))
    return Show(model(nodes, [value("x", [1, 16])], [value("y", [1, 16])], [w]), {"x": rows(16)}, ("logarithm",))


def _survival(scale: float) -> Show:
    """The logarithm of what a Sigmoid leaves of one."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Sigmoid", ["h"], "s", "sigmoid"),
        node("Sub", ["one", "s"], "d", "complement"),
        node("Log", ["d"], "y", "logarithm"),
    ]
    w = constant("w", scale * np.random.default_rng(3).normal(0, 0.25, (16, 16)))
    constants = [w, constant("one", 1.0)]
    return Show(model(nodes, [value("x", [1, 16])], [value("y", [1, 16])], constants), {"x": rows(16)}, ("logarithm",))


def _recurrent(*, is_fed_back: bool) -> Show:
    """An LSTM that begins with an input, with or without an output that gives the state back."""
    proto = voice("")
    if not is_fed_back:
        del proto.graph.output[1]
    return Show(proto, {name: array for name, array in frames().items() if name != "sr"})


FURTHER: dict[str, tuple[Callable[[], Show], Callable[[], Show]]] = {
    "overflow of a constant": (lambda: _constant_overflow(1e6), lambda: _constant_overflow(1e3)),
    "vanishing-epsilon, one over zero": (lambda: _reciprocal(1e-9, 0.0), lambda: _reciprocal(1e-9, 1.0)),
    "vanishing-epsilon below the normal numbers": (lambda: _reciprocal(1e-6, 0.0), lambda: _reciprocal(1e-6, 1.0)),
    "vanishing-epsilon of a written-out InstanceNorm": (
        lambda: _instance_norm(1e-9, flat=True),
        lambda: _instance_norm(1e-9, flat=False),
    ),
    "vanishing-values": (lambda: _surprise(12.0), lambda: _surprise(1.0)),
    "cancellation before a Log": (lambda: _survival(5.0), lambda: _survival(1.0)),
    "spacing before a comparison": (lambda: _compared(3000.0), lambda: _compared(0.0)),
    "stagnation of accumulated flow": (lambda: _flow(1900.0), lambda: _flow(4.0)),
    "stagnation of a running sum": (lambda: _running(600.0), lambda: _running(0.01)),
    "cancellation in an Add": (lambda: _added(500.0), lambda: _added(0.0)),
    "long-sum in a ReduceSum": (lambda: _total(True), lambda: _total(False)),
    "index-in-float: what becomes a size is never FP16": (lambda: flat_index(64), lambda: _size(6000)),
    "mask of the lowest FP32 number, multiplied": (lambda: times_mask(F32_MIN), lambda: _added_mask(F32_MIN)),
    "mask of -1e9 over a whole row": (lambda: _added_mask(-1e9, whole_row=True), lambda: _added_mask(-1e9)),
    "mask of the lowest FP32 number over a whole row": (
        lambda: _added_mask(F32_MIN, whole_row=True),
        lambda: _added_mask(-np.inf),
    ),
    "norm-written-out: RMSNorm": (lambda: _rms_norm(17), _length),
    "norm-written-out: RMSNorm and no InstanceNorm": (
        lambda: _rms_norm(13),
        lambda: _instance_norm(1e-3, flat=False),
    ),
    "int64-range in a comparison": (_constant_id, _ends),
    "constant-data: a state that is fed back is none": (
        lambda: Show(classifier(), {"x": np.ones_like(images())}),
        lambda: _recurrent(is_fed_back=True),
    ),
    "constant-data: a recurrent state is none": (
        lambda: Show(classifier(), {"x": np.ones_like(images())}),
        lambda: _recurrent(is_fed_back=False),
    ),
    "data-do-not-fit: bytes that nothing divides": (lambda: _bytes(scaled=False), lambda: _bytes(scaled=True)),
}
"""As ``SHOWN``."""

HELD = ("mask", "mask of the lowest FP32 number, multiplied")
"""Masks that are held as FP16's lowest number, and mask as well: they are ``info``."""
