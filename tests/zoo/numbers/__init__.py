"""For each code about the numbers of a model or about its data: a model and data that show it, and a sound twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime

from tests.graph.models import constant, text
from tests.zoo.tracker import recorded, tracker

SEED = 7
INT64_MAX = 2**63 - 1
Data = dict[str, np.ndarray]


@dataclass(frozen=True)
class Show:
    """A model with its data."""

    proto: onnx.ModelProto
    data: Data  # input -> samples along the first axis
    nodes: tuple[str, ...] = ()  # those that the finding names; empty where it names none, or for a sound twin


def weights(name: str, *shape: int, seed: int = SEED) -> onnx.TensorProto:
    return constant(name, np.random.default_rng(seed).normal(0, shape[0] ** -0.5, shape))


def rows(*shape: int, scale: float = 1.0, mean: float = 0.0, seed: int = SEED, samples: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, scale, (samples, *shape)).astype(np.float32)


def images(top: float = 1.0, samples: int = 8, size: int = 64, seed: int = SEED) -> np.ndarray:
    """Smooth pictures of three channels between 0 and ``top``."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:size, 0:size] / size
    waves = [np.sin(rng.uniform(2, 9) * x + rng.uniform(2, 9) * y + rng.uniform(0, 6)) for _ in range(3 * samples)]
    return (top * (0.5 + 0.45 * np.reshape(waves, (samples, 3, size, size)))).astype(np.float32)


def _overflow(scale: float) -> Show:
    graph = """(float[1,32] x) => (float[1,8] y) <float two = {2}> {
        h = MatMul(x, w) [power] p = Pow(h, two) y = MatMul(p, v)
    }"""
    proto = text(graph, weights("w", 32, 32), weights("v", 32, 8))
    return Show(proto, {"x": rows(32, scale=scale)}, ("power",))


def _epsilon(eps: float, floor: float) -> Show:
    """Rows divided by the sum of their magnitudes; ``floor`` 0 has rows that are zero, as after a ReLU."""
    graph = """(float[1,16] x) => (float[1,4] y) <int64[1] axes = {-1}> {
        h = MatMul(x, w) r = Relu(h) q = Mul(r, r) s = ReduceSum<keepdims = 1>(q, axes)
        [guard] d = Add(s, eps) n = Div(r, d) y = MatMul(n, v)
    }"""
    x = rows(16)
    if not floor:
        x[2] = 0.0
    return Show(text(graph, weights("w", 16, 16), weights("v", 16, 4), constant("eps", eps)), {"x": x}, ("guard",))


def _spacing(scale: float) -> Show:
    """A softmax of correlations: in the thousands, with some rows that two candidates share."""
    graph = """(float[1,64,32] a, float[1,32,64] b) => (float[1,64,2] y) {
        c = MatMul(a, b) [softmax] p = Softmax<axis = -1>(c) y = MatMul(p, v)
    }"""
    a = rows(64, 32, scale=9.0 * scale)
    b = np.concatenate([rows(32, 32, scale=9.0, seed=3)] * 2, axis=-1)
    b[..., 32:] += rows(32, 32, scale=0.02, seed=4)
    return Show(text(graph, weights("v", 64, 2)), {"a": a, "b": b}, ("softmax",))


def _argmax(offset: float) -> Show:
    graph = """(float[1,64,16] x) => (float[1,64,4] y) {
        h = MatMul(x, w) o = Add(h, offset)
        [choose] k = ArgMax<axis = -1, keepdims = 0>(o) y = Gather(table, k)
    }"""
    proto = text(graph, weights("w", 16, 16), constant("offset", offset), weights("table", 16, 4))
    return Show(proto, {"x": rows(64, 16)}, ("choose",))


def _rotary(last: float) -> Show:
    """Features turned by their position times four frequencies."""
    graph = """(float[1,32,8] x, float[1,32,1] position) => (float[1,32,4] y) {
        h = MatMul(x, w) [angle] a = Mul(position, frequencies) c = Concat<axis = -1>(a, a)
        [cosine] e = Cos(c) [sine] s = Sin(c) p = Mul(h, e) q = Mul(h, s) r = Add(p, q) y = MatMul(r, v)
    }"""
    position = np.random.default_rng(SEED).integers(last // 2, last, (8, 32, 1)).astype(np.float32)
    proto = text(graph, weights("w", 8, 8), weights("v", 8, 4), constant("frequencies", [0.9, 0.3, 0.1, 0.03]))
    return Show(proto, {"x": rows(32, 8), "position": position}, ("cosine", "sine"))


def cancelling(nodes: str, offset: float, named: str) -> Show:
    """Two products that ``nodes`` raise by an offset and take from each other, as ``e``."""
    graph = f"(float[1,8,16] x) => (float[1,8,4] y) {{ a = MatMul(x, w) c = MatMul(x, v) {nodes} y = MatMul(e, u) }}"
    constants = [weights("w", 16, 16), weights("v", 16, 16, seed=8), weights("u", 16, 4), constant("offset", offset)]
    return Show(text(graph, *constants), {"x": rows(8, 16)}, (named,))


def _cancellation(offset: float) -> Show:
    return cancelling("b = Add(a, offset) d = Add(c, offset) [difference] e = Sub(b, d)", offset, "difference")


def _long_sum(is_one_signed: bool) -> Show:
    graph = f"""(float[1,3,64,64] x) => (float[1,4] y) {{
        c = Conv<pads = [1, 1, 1, 1]>(x, w) r = {"Relu" if is_one_signed else "Identity"}(c)
        [pool] g = GlobalAveragePool(r) f = Flatten(g) y = MatMul(f, v)
    }}"""
    kernel = np.random.default_rng(SEED).normal(0, 0.2, (8, 3, 3, 3))
    return Show(text(graph, constant("w", kernel), weights("v", 8, 4)), {"x": images()}, ("pool",))


def flat_index(size: int) -> Show:
    """Rows of a table by a flat index that is computed in floating point from a row and a column."""
    graph = """(float[1,16] row, float[1,16] column) => (float[1,16,4] y) {
        r = Mul(row, width) [flat_index] f = Add(r, column) i = Cast<to = 7>(f) g = Gather(table, i) y = MatMul(g, w)
    }"""
    rng = np.random.default_rng(SEED)
    data = {name: rng.integers(0, size, (8, 16)).astype(np.float32) for name in ("row", "column")}
    constants = [constant("width", float(size)), weights("table", size * size, 8), weights("w", 8, 4)]
    return Show(text(graph, *constants), data, ("flat_index",))


def times_mask(low: float) -> Show:
    graph = """(float[1,16] x, float[1,16] mask) => (float[1,4] y) <float one = {1}> {
        s = MatMul(x, w) not = Sub(one, mask) [times_low] m = Mul(not, low)
        a = Add(s, m) p = Softmax<axis = -1>(a) y = MatMul(p, v)
    }"""
    mask = (np.random.default_rng(SEED).uniform(size=(8, 16)) > 0.3).astype(np.float32)
    proto = text(graph, weights("w", 16, 16), weights("v", 16, 4), constant("low", low))
    return Show(proto, {"x": rows(16), "mask": mask}, ("times_low",))


def _norm() -> Show:
    graph = """(float[1,16] x) => (float[1,16] y) <float two = {2}, float eps = {1e-5}> {
        h = MatMul(x, w) m = ReduceMean<axes = [-1]>(h) c = Sub(h, m) [squares] q = Pow(c, two)
        v = ReduceMean<axes = [-1]>(q) e = Add(v, eps) r = Sqrt(e) n = Div(c, r) y = Mul(n, g)
    }"""
    return Show(text(graph, weights("w", 16, 16), constant("g", np.ones(16)), opset=13), {"x": rows(16)}, ("squares",))


def _energy() -> Show:
    """The energy of an image and an L2 norm: squares, sums and roots that are no normalisation with an operator."""
    graph = """(float[1,3,32,32] x) => (float[1,8] y) {
        c = Conv<pads = [1, 1, 1, 1]>(x, w) q = Mul(c, c) s = ReduceMean<axes = [1, 2, 3]>(q) r = Sqrt(s) n = Div(c, r)
        g = GlobalAveragePool(n) f = Flatten(g) l = ReduceL2<axes = [-1]>(f) y = Div(f, l)
    }"""
    kernel = np.random.default_rng(SEED).normal(0, 0.2, (8, 3, 3, 3))
    return Show(text(graph, constant("w", kernel), opset=13), {"x": images(size=32)})


def _hash() -> Show:
    """A hash of token ids modulo a prime beyond INT32."""
    graph = """(int64[1,16] ids) => (float[1,16,8] y) <int64 factor = {2654435761}, int64 rows = {64}> {
        [hash] h = Mul(ids, factor) k = Mod(h, rows) y = Gather(table, k)
    }"""
    return Show(text(graph, weights("table", 64, 8)), token_ids(16), ("hash",))


def _end() -> Show:
    """The end of a Slice behind an Unsqueeze."""
    graph = """(int64[1,16] ids) => (float[1,15,8] y) <int64[1] zero = {0}, int64[1] one = {1}> {
        ends = Unsqueeze(end, zero) k = Slice(ids, one, ends, one) y = Gather(table, k)
    }"""
    return Show(text(graph, weights("table", 64, 8), constant("end", INT64_MAX, np.int64)), token_ids(16))


def token_ids(*shape: int) -> Data:
    return {"ids": np.random.default_rng(SEED).integers(0, 64, (8, *shape))}


def classifier() -> onnx.ModelProto:
    """Two convolutions with BatchNorms whose statistics are those of images between 0 and 1."""
    rng = np.random.default_rng(SEED)
    constants, nodes, at, channels = [], "", "x", 3
    for k in (1, 2):
        constants.append(constant(f"w{k}", rng.normal(0, 0.3, (8, channels, 3, 3))))
        constants += [constant(f"s{k}", rng.uniform(0.8, 1.2, 8)), constant(f"b{k}", rng.normal(0, 0.1, 8))]
        nodes += f"c{k} = Conv<pads = [1, 1, 1, 1]>({at}, w{k}) "
        trained = text(f"(float[n,3,64,64] x) => (float[n,8,64,64] c{k}) {{ {nodes} }}", *constants)
        session = onnxruntime.InferenceSession(trained.SerializeToString(), providers=["CPUExecutionProvider"])
        (before,) = session.run(None, {"x": images(samples=32, seed=99)})
        constants += [constant(f"m{k}", before.mean((0, 2, 3))), constant(f"v{k}", before.var((0, 2, 3)))]
        nodes += f"n{k} = BatchNormalization(c{k}, s{k}, b{k}, m{k}, v{k}) r{k} = Relu(n{k}) "
        at, channels = f"r{k}", 8
    nodes += "g = GlobalAveragePool(r2) f = Flatten(g) y = MatMul(f, head)"
    graph = f"(float[1,3,64,64] x) => (float[1,4] y) {{ {nodes} }}"
    return text(graph, *constants, weights("head", 8, 4))


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
    "angle-spacing": (lambda: _rotary(8192), lambda: _rotary(128)),
    "cancellation": (lambda: _cancellation(500.0), lambda: _cancellation(0.0)),
    "long-sum": (lambda: _long_sum(True), lambda: _long_sum(False)),
    "index-in-float": (lambda: flat_index(64), lambda: flat_index(32)),
    "mask": (lambda: times_mask(-1e9), lambda: times_mask(-1e4)),
    "norm-written-out": (_norm, _energy),
    "int64-range": (_hash, _end),
    "data-do-not-fit": (lambda: _images(lambda x: x * 255), lambda: _images(lambda x: x)),
    "constant-data": (lambda: _images(np.ones_like), lambda: _images(lambda x: x)),
    "duplicate-samples": (lambda: _images(lambda x: x[[0, 1, 2, 3, 0, 1, 2, 3]]), lambda: _images(lambda x: x)),
}
"""Code, with what distinguishes two of one code after a blank -> what shows it, and its sound twin."""
