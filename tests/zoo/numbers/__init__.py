"""For each code about the numbers of a model or about its data: a model and data that show it, and a sound twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from tests.graph.models import constant, model, node, value
from tests.zoo.tracker import recorded, tracker

SEED = 7
INT64_MAX = 2**63 - 1
Data = dict[str, np.ndarray]


@dataclass(frozen=True)
class Show:
    """A model with its data.

    Attributes:
        proto: the model.
        data: input -> samples along the first axis.
        nodes: those that the finding names; empty where it names none, or for a sound twin.
    """

    proto: onnx.ModelProto
    data: Data
    nodes: tuple[str, ...] = ()


def weights(name: str, *shape: int, seed: int = SEED) -> onnx.TensorProto:
    return constant(name, np.random.default_rng(seed).normal(0, shape[0] ** -0.5, shape))


def rows(*shape: int, scale: float = 1.0, mean: float = 0.0, seed: int = SEED, samples: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, scale, (samples, *shape)).astype(np.float32)


def images(top: float = 1.0, samples: int = 8, size: int = 64, seed: int = SEED) -> np.ndarray:
    """Smooth pictures of three channels between 0 and ``top``."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    found = []
    for _ in range(samples):
        waves = [np.sin(rng.uniform(2, 9) * x + rng.uniform(2, 9) * y + rng.uniform(0, 6)) for _ in range(3)]
        found.append(np.stack(waves) * 0.45 + 0.5)
    return (np.stack(found) * top).astype(np.float32)


def _overflow(scale: float) -> Show:
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Pow", ["h", "two"], "p", "power"),
        node("MatMul", ["p", "v"], "y", "head"),
    ]
    proto = model(
        nodes,
        [value("x", [1, 32])],
        [value("y", [1, 8])],
        [weights("w", 32, 32), weights("v", 32, 8), constant("two", 2.0)],
    )
    return Show(proto, {"x": rows(32, scale=scale)}, ("power",))


def _epsilon(eps: float, floor: float) -> Show:
    """Rows divided by the sum of their magnitudes; ``floor`` 0 has rows that are zero, as after a ReLU."""
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Relu", ["h"], "r", "relu"),
        node("Mul", ["r", "r"], "q", "squares"),
        node("ReduceSum", ["q", "axes"], "s", "sum", keepdims=1),
        node("Add", ["s", "eps"], "d", "guard"),
        node("Div", ["r", "d"], "n", "divide"),
        node("MatMul", ["n", "v"], "y", "head"),
    ]
    constants = [weights("w", 16, 16), weights("v", 16, 4), constant("eps", eps)]
    constants.append(constant("axes", [-1], np.int64))
    x = rows(16)
    if not floor:
        x[2] = 0.0
    return Show(model(nodes, [value("x", [1, 16])], [value("y", [1, 4])], constants), {"x": x}, ("guard",))


def _spacing(scale: float) -> Show:
    """A softmax of correlations: in the thousands, with some rows that two candidates share."""
    nodes = [
        node("MatMul", ["a", "b"], "c", "correlate"),
        node("Softmax", ["c"], "p", "softmax", axis=-1),
        node("MatMul", ["p", "v"], "y", "gather"),
    ]
    a = rows(64, 32, scale=9.0 * scale)
    b = np.concatenate([rows(32, 32, scale=9.0, seed=3)] * 2, axis=-1)
    b[..., 32:] += rows(32, 32, scale=0.02, seed=4)
    inputs = [value("a", [1, 64, 32]), value("b", [1, 32, 64])]
    return Show(model(nodes, inputs, [value("y", [1, 64, 2])], [weights("v", 64, 2)]), {"a": a, "b": b}, ("softmax",))


def _argmax(offset: float) -> Show:
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("Add", ["h", "offset"], "o", "level"),
        node("ArgMax", ["o"], "k", "choose", axis=-1, keepdims=0),
        node("Gather", ["table", "k"], "y", "read"),
    ]
    constants = [weights("w", 16, 16), constant("offset", offset), weights("table", 16, 4)]
    proto = model(nodes, [value("x", [1, 64, 16])], [value("y", [1, 64, 4])], constants)
    return Show(proto, {"x": rows(64, 16)}, ("choose",))


def _cancellation(offset: float) -> Show:
    nodes = [
        node("MatMul", ["x", "w"], "a", "left"),
        node("Add", ["a", "offset"], "b", "raise"),
        node("MatMul", ["x", "v"], "c", "right"),
        node("Add", ["c", "offset"], "d", "raise too"),
        node("Sub", ["b", "d"], "e", "difference"),
        node("MatMul", ["e", "u"], "y", "head"),
    ]
    constants = [weights("w", 16, 16), weights("v", 16, 16, seed=8), weights("u", 16, 4), constant("offset", offset)]
    proto = model(nodes, [value("x", [1, 8, 16])], [value("y", [1, 8, 4])], constants)
    return Show(proto, {"x": rows(8, 16)}, ("difference",))


def _long_sum(is_one_signed: bool) -> Show:
    nodes = [
        node("Conv", ["x", "w"], "c", "conv", pads=[1, 1, 1, 1]),
        node("Relu" if is_one_signed else "Identity", ["c"], "r", "relu"),
        node("GlobalAveragePool", ["r"], "g", "pool"),
        node("Flatten", ["g"], "f", "flat"),
        node("MatMul", ["f", "v"], "y", "head"),
    ]
    kernel = np.random.default_rng(SEED).normal(0, 0.2, (8, 3, 3, 3))
    proto = model(
        nodes, [value("x", [1, 3, 64, 64])], [value("y", [1, 4])], [constant("w", kernel), weights("v", 8, 4)]
    )
    return Show(proto, {"x": images()}, ("pool",))


def flat_index(size: int) -> Show:
    """Rows of a table by a flat index that is computed in floating point from a row and a column."""
    nodes = [
        node("Mul", ["row", "width"], "r", "times width"),
        node("Add", ["r", "column"], "f", "flat index"),
        node("Cast", ["f"], "i", "to index", to=TensorProto.INT64),
        node("Gather", ["table", "i"], "g", "read"),
        node("MatMul", ["g", "w"], "y", "head"),
    ]
    rng = np.random.default_rng(SEED)
    data = {name: rng.integers(0, size, (8, 16)).astype(np.float32) for name in ("row", "column")}
    constants = [constant("width", float(size)), weights("table", size * size, 8), weights("w", 8, 4)]
    proto = model(nodes, [value("row", [1, 16]), value("column", [1, 16])], [value("y", [1, 16, 4])], constants)
    return Show(proto, data, ("flat index",))


def times_mask(low: float) -> Show:
    nodes = [
        node("MatMul", ["x", "w"], "s", "scores"),
        node("Sub", ["one", "mask"], "not", "invert"),
        node("Mul", ["not", "low"], "m", "times low"),
        node("Add", ["s", "m"], "a", "add mask"),
        node("Softmax", ["a"], "p", "softmax", axis=-1),
        node("MatMul", ["p", "v"], "y", "head"),
    ]
    mask = (np.random.default_rng(SEED).uniform(size=(8, 16)) > 0.3).astype(np.float32)
    constants = [weights("w", 16, 16), weights("v", 16, 4), constant("one", 1.0), constant("low", low)]
    proto = model(nodes, [value("x", [1, 16]), value("mask", [1, 16])], [value("y", [1, 4])], constants)
    return Show(proto, {"x": rows(16), "mask": mask}, ("times low",))


def _norm(opset: int = 13) -> Show:
    axes = {"axes": [-1]}
    nodes = [
        node("MatMul", ["x", "w"], "h", "fc"),
        node("ReduceMean", ["h"], "m", "mean", keepdims=1, **axes),
        node("Sub", ["h", "m"], "c", "centre"),
        node("Pow", ["c", "two"], "q", "squares"),
        node("ReduceMean", ["q"], "v", "variance", keepdims=1, **axes),
        node("Add", ["v", "eps"], "e", "guard"),
        node("Sqrt", ["e"], "r", "root"),
        node("Div", ["c", "r"], "n", "normalise"),
        node("Mul", ["n", "g"], "y", "scale"),
    ]
    constants = [weights("w", 16, 16), constant("two", 2.0), constant("eps", 1e-5), constant("g", np.ones(16))]
    return Show(
        model(nodes, [value("x", [1, 16])], [value("y", [1, 16])], constants, opset), {"x": rows(16)}, ("squares",)
    )


def _energy() -> Show:
    """The energy of an image and an L2 norm: squares, sums and roots that are no normalisation with an operator."""
    nodes = [
        node("Conv", ["x", "w"], "c", "conv", pads=[1, 1, 1, 1]),
        node("Mul", ["c", "c"], "q", "squares"),
        node("ReduceMean", ["q"], "s", "energy", axes=[1, 2, 3], keepdims=1),
        node("Sqrt", ["s"], "r", "root"),
        node("Div", ["c", "r"], "n", "to unit energy"),
        node("GlobalAveragePool", ["n"], "g", "pool"),
        node("Flatten", ["g"], "f", "flat"),
        node("ReduceL2", ["f"], "l", "length", axes=[-1], keepdims=1),
        node("Div", ["f", "l"], "y", "to unit length"),
    ]
    kernel = np.random.default_rng(SEED).normal(0, 0.2, (8, 3, 3, 3))
    proto = model(nodes, [value("x", [1, 3, 32, 32])], [value("y", [1, 8])], [constant("w", kernel)], 13)
    return Show(proto, {"x": images(size=32)})


def _int64(means_something: bool) -> Show:
    """A hash of token ids modulo a prime beyond INT32, or the end of a Slice behind an Unsqueeze."""
    if means_something:
        nodes = [
            node("Mul", ["ids", "factor"], "h", "hash"),
            node("Mod", ["h", "rows"], "k", "row"),
            node("Gather", ["table", "k"], "y", "read"),
        ]
        constants = [constant("factor", 2654435761, np.int64), constant("rows", 64, np.int64), weights("table", 64, 8)]
    else:
        nodes = [
            node("Unsqueeze", ["end", "zero"], "ends", "unsqueeze"),
            node("Slice", ["ids", "start", "ends", "axis"], "k", "rest"),
            node("Gather", ["table", "k"], "y", "read"),
        ]
        constants = [constant("end", INT64_MAX, np.int64), constant("zero", [0], np.int64)]
        constants += [constant("start", [1], np.int64), constant("axis", [1], np.int64), weights("table", 64, 8)]
    ids = np.random.default_rng(SEED).integers(0, 64, (8, 16))
    proto = model(nodes, [value("ids", [1, 16], TensorProto.INT64)], [value("y", None)], constants)
    return Show(proto, {"ids": ids}, ("hash",) if means_something else ())


def classifier() -> onnx.ModelProto:
    """Two convolutions with BatchNorms whose statistics are those of images between 0 and 1."""
    import onnxruntime

    rng = np.random.default_rng(SEED)
    constants, nodes, at, channels = [], [], "x", 3
    for k in (1, 2):
        constants.append(constant(f"w{k}", rng.normal(0, 0.3, (8, channels, 3, 3))))
        constants += [constant(f"s{k}", rng.uniform(0.8, 1.2, 8)), constant(f"b{k}", rng.normal(0, 0.1, 8))]
        nodes.append(node("Conv", [at, f"w{k}"], f"c{k}", f"conv{k}", pads=[1, 1, 1, 1]))
        trained = model(nodes, [value("x", ["n", 3, 64, 64])], [value(f"c{k}", None)], constants)
        session = onnxruntime.InferenceSession(trained.SerializeToString(), providers=["CPUExecutionProvider"])
        (before,) = session.run(None, {"x": images(samples=32, seed=99)})
        constants += [constant(f"m{k}", before.mean((0, 2, 3))), constant(f"v{k}", before.var((0, 2, 3)))]
        nodes.append(node("BatchNormalization", [f"c{k}", *(f"{p}{k}" for p in "sbmv")], f"n{k}", f"bn{k}"))
        nodes.append(node("Relu", [f"n{k}"], f"r{k}", f"relu{k}"))
        at, channels = f"r{k}", 8
    nodes += [node("GlobalAveragePool", [at], "g", "pool"), node("Flatten", ["g"], "f", "flat")]
    nodes.append(node("MatMul", ["f", "head"], "y", "head"))
    constants.append(weights("head", 8, 4))
    return model(nodes, [value("x", [1, 3, 64, 64])], [value("y", [1, 4])], constants)


def _images(change: Callable[[np.ndarray], np.ndarray]) -> Show:
    return Show(classifier(), {"x": change(images())})


def _tracker(scale: float, at: float) -> Show:
    return Show(tracker(scale), recorded(64, at, scale), ("advance",))


SHOWN: dict[str, tuple[Callable[[], Show], Callable[[], Show]]] = {
    "stagnation": (lambda: _tracker(1.0, 900.0), lambda: _tracker(40.0, 900.0)),
    "overflow": (lambda: _overflow(200.0), lambda: _overflow(1.0)),
    "vanishing-epsilon": (lambda: _epsilon(1e-12, 0.0), lambda: _epsilon(1e-12, 1.0)),
    "spacing": (lambda: _spacing(1.0), lambda: _spacing(1e-3)),
    "spacing before ArgMax": (lambda: _argmax(2000.0), lambda: _argmax(0.0)),
    "cancellation": (lambda: _cancellation(500.0), lambda: _cancellation(0.0)),
    "long-sum": (lambda: _long_sum(True), lambda: _long_sum(False)),
    "index-in-float": (lambda: flat_index(64), lambda: flat_index(32)),
    "mask": (lambda: times_mask(-1e9), lambda: times_mask(-1e4)),
    "norm-written-out": (_norm, _energy),
    "int64-range": (lambda: _int64(True), lambda: _int64(False)),
    "data-do-not-fit": (lambda: _images(lambda x: x * 255), lambda: _images(lambda x: x)),
    "constant-data": (lambda: _images(np.ones_like), lambda: _images(lambda x: x)),
    "duplicate-samples": (lambda: _images(lambda x: x[[0, 1, 2, 3, 0, 1, 2, 3]]), lambda: _images(lambda x: x)),
}
"""Code, with what distinguishes two of one code after a blank -> what shows it, and its sound twin."""
