"""Further situations of the codes about numbers: each described by its own words in the list of codes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.graph.models import constant, text
from tests.zoo.numbers import Show, cancelling, classifier, images, rows, times_mask, weights

F32_MIN = float(np.finfo(np.float32).min)


def _constant_overflow(scale: float) -> Show:
    """A score is turned into a cost by a constant that FP16 does not have."""
    graph = "(float[1,16] x) => (float[1,8] y) { h = MatMul(x, w) [to_cost] s = Mul(h, scale) y = Div(s, scale) }"
    return Show(text(graph, weights("w", 16, 8), constant("scale", scale)), {"x": rows(16)}, ("to_cost",))


def _reciprocal(eps: float, floor: float) -> Show:
    """One over a length that is zero for an empty row: x/0, and not 0/0."""
    graph = """(float[1,16] x) => (float[1,4] y) <int64[1] axes = {-1}> {
        h = MatMul(x, w) r = Relu(h) s = ReduceSum<keepdims = 1>(r, axes) [guard] d = Add(s, eps)
        i = Reciprocal(d) t = Tanh(i) y = MatMul(t, v)
    }"""
    x = rows(16)
    if not floor:
        x[[2, 5]] = 0.0
    return Show(text(graph, weights("w", 16, 16), weights("v", 1, 4), constant("eps", eps)), {"x": x}, ("guard",))


def _instance_norm(flat: bool) -> Show:
    """InstanceNorm in pieces; planes without any contrast, as a ReLU or a dark image makes them, reach its eps."""
    graph = """(float[1,3,16,16] x) => (float[1,4,16,16] y) {
        m = ReduceMean<axes = [2, 3]>(x) c = Sub(x, m) q = Mul(c, c) v = ReduceMean<axes = [2, 3]>(q)
        [guard] e = Add(v, eps) r = Sqrt(e) n = Div(c, r) y = Conv(n, w)
    }"""
    x = images(size=16)
    if flat:
        x[[1, 4], 2] = 0.25
    proto = text(graph, weights("w", 4, 3, 1, 1), constant("eps", 1e-9), opset=13)
    return Show(proto, {"x": x}, ("guard",) if flat else ())


def _compared(offset: float) -> Show:
    """A time stamp is compared with a threshold that lies far from zero."""
    graph = """(float[1,64,16] x) => (float[1,64,4] y) <float one = {1}> {
        h = MatMul(x, w) o = Add(h, offset) [is_late] late = Greater(o, offset)
        z = Where(late, one, h) y = MatMul(z, v)
    }"""
    proto = text(graph, weights("w", 16, 16), weights("v", 16, 4), constant("offset", offset))
    return Show(proto, {"x": rows(64, 16)}, ("is_late",))


def _flow(size: float) -> Show:
    """Coordinates of pixels plus the flow of one step, recorded at each step: far from the origin a step is lost."""
    graph = """(float[1,16,8,8] features, float[1,2,8,8] coords) => (float[1,2,8,8] coords_next, float[1,2,8,8] y) {
        d = Conv(features, w) s = Mul(d, small) [accumulate] coords_next = Add(coords, s) y = Sub(coords_next, centre)
    }"""
    at = np.linspace(0.9 * size, size, 8, dtype=np.float32)
    coords = np.broadcast_to(at, (8, 2, 8, 8)) + np.random.default_rng(3).uniform(0, 0.1, (8, 2, 8, 8))
    constants = [weights("w", 2, 16, 1, 1), constant("small", 2e-5 * 2048), constant("centre", float(size))]
    data = {"features": rows(16, 8, 8), "coords": coords.astype(np.float32)}
    return Show(text(graph, *constants), data, ("accumulate",))


def _running(total: float) -> Show:
    """A running sum with one small term a step."""
    graph = """(float[1,16] x, float[1,8] sum) => (float[1,8] sum_next, float[1,8] y) <float rate = {1e-3}> {
        h = MatMul(x, w) t = Mul(h, rate) [running_sum] sum_next = Add(sum, t) y = Tanh(sum_next)
    }"""
    sums = (total * np.random.default_rng(5).uniform(0.8, 1.2, (8, 8))).astype(np.float32)
    return Show(text(graph, weights("w", 16, 8)), {"x": rows(16), "sum": sums}, ("running_sum",))


def _added(offset: float) -> Show:
    """The difference as the sum with a negated operand."""
    return cancelling("b = Add(a, offset) d = Sub(c, offset) [together] e = Add(b, d)", offset, "together")


def _phase(rate: float) -> Show:
    """The sine of a phase that is summed up over time, in periods."""
    graph = """(float[1,512,1] pitch) => (float[1,512,4] y) <int64 time = {1}, float period = {6.2831855}> {
        c = Mul(pitch, rates) p = CumSum(c, time) a = Mul(p, period) [tone] s = Sin(a) y = MatMul(s, w)
    }"""
    pitch = np.random.default_rng(5).uniform(0.5, 1, (8, 512, 1)).astype(np.float32)
    return Show(text(graph, constant("rates", [rate, rate / 2]), weights("w", 2, 4)), {"pitch": pitch}, ("tone",))


def _wave(nodes: str) -> Show:
    graph = f"(float[1,64,8] x) => (float[1,64,8] y) {{ h = MatMul(x, w) a = Mul(h, rate) [wave] s = Sin(a) {nodes} }}"
    return Show(text(graph, weights("w", 8, 8), constant("rate", np.full(8, 400.0))), {"x": rows(64, 8)}, ("wave",))


def _total(is_one_signed: bool) -> Show:
    """A sum over 4096 positions, of magnitudes or of values of both signs."""
    graph = f"""(float[1,4096,4] x) => (float[1,4] y) <int64[1] axes = {{1}}> {{
        h = MatMul(x, w) r = {"Abs" if is_one_signed else "Identity"}(h)
        [total] s = ReduceSum<keepdims = 0>(r, axes) m = Mul(s, share) y = MatMul(m, v)
    }}"""
    proto = text(graph, weights("w", 4, 8), weights("v", 8, 4), constant("share", 1 / 4096))
    return Show(proto, {"x": rows(4096, 4)}, ("total",))


def _added_mask(low: float) -> Show:
    """A mask of this value, chosen by a Where and added to the scores."""
    graph = """(float[1,16] x, bool[1,16] keep) => (float[1,4] y) <float zero = {0}> {
        s = MatMul(x, w) m = Where(keep, zero, low) a = Add(s, m) p = Softmax<axis = -1>(a) y = MatMul(p, v)
    }"""
    keep = np.random.default_rng(7).uniform(size=(8, 16)) > 0.3
    proto = text(graph, weights("w", 16, 16), weights("v", 16, 4), constant("low", low))
    return Show(proto, {"x": rows(16), "keep": keep})


def _bytes(*, scaled: bool) -> Show:
    """The classifier behind an input of bytes, which are to be divided by 255 and may not be."""
    read = "Mul(wide, unit)" if scaled else "Identity(wide)"
    graph = f"(uint8[1,3,64,64] bytes) => (float[1,4] y) {{ wide = Cast<to = 1>(bytes) x = {read} }}"
    behind = classifier().graph
    proto = text(graph, *behind.initializer, *([constant("unit", 1 / 255)] if scaled else []))
    proto.graph.node.extend(behind.node)
    return Show(proto, {"bytes": images(255.0).round().astype(np.uint8)})


def _logarithm(nodes: str, scale: float) -> Show:
    w = constant("w", scale * np.random.default_rng(3).normal(0, 0.25, (16, 16)))
    graph = f"(float[1,16] x) => (float[1,16] y) <float one = {{1}}> {{ h = MatMul(x, w) {nodes} }}"
    return Show(text(graph, w), {"x": rows(16)}, ("logarithm",))


def _surprise(scale: float) -> Show:
    """Minus the logarithm of probabilities that a Softmax gives."""
    return _logarithm("p = Softmax<axis = -1>(h) [logarithm] l = Log(p) y = Neg(l)", scale)


def _survival(scale: float) -> Show:
    """The logarithm of what a Sigmoid leaves of one."""
    return _logarithm("s = Sigmoid(h) d = Sub(one, s) [logarithm] y = Log(d)", scale)


FURTHER: dict[str, tuple[Callable[[], Show], Callable[[], Show]]] = {
    "overflow of a constant": (lambda: _constant_overflow(1e6), lambda: _constant_overflow(1e3)),
    "vanishing-epsilon, one over zero": (lambda: _reciprocal(1e-9, 0.0), lambda: _reciprocal(1e-9, 1.0)),
    "vanishing-epsilon below the normal numbers": (lambda: _reciprocal(1e-6, 0.0), lambda: _reciprocal(1e-6, 1.0)),
    "vanishing-epsilon of a written-out InstanceNorm": (lambda: _instance_norm(True), lambda: _instance_norm(False)),
    "vanishing-values": (lambda: _surprise(12.0), lambda: _surprise(1.0)),
    "angle-spacing of a running phase": (lambda: _phase(0.9), lambda: _phase(0.02)),
    "angle-spacing, not where the angle's own value is added (Snake)": (
        lambda: _wave("y = Mul(s, s)"),
        lambda: _wave("q = Mul(s, s) r = Div(q, rate) y = Add(h, r)"),
    ),
    "cancellation before a Log": (lambda: _survival(5.0), lambda: _survival(1.0)),
    "spacing before a comparison": (lambda: _compared(3000.0), lambda: _compared(0.0)),
    "stagnation of accumulated flow": (lambda: _flow(1900.0), lambda: _flow(4.0)),
    "stagnation of a running sum": (lambda: _running(600.0), lambda: _running(0.01)),
    "cancellation in an Add": (lambda: _added(500.0), lambda: _added(0.0)),
    "long-sum in a ReduceSum": (lambda: _total(True), lambda: _total(False)),
    "mask of the lowest FP32 number, multiplied": (lambda: times_mask(F32_MIN), lambda: _added_mask(F32_MIN)),
    "data-do-not-fit: bytes that nothing divides": (lambda: _bytes(scaled=False), lambda: _bytes(scaled=True)),
}
"""As ``SHOWN``."""

HELD = ("mask", "mask of the lowest FP32 number, multiplied")
"""Masks that are held as FP16's lowest number, and mask as well: they are ``info``."""
