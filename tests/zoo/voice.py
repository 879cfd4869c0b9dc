"""A detector of voice whose network lies in an If, by the sampling rate, with a state that is fed back."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.graph.models import constant, model, node, value, weight

WIDTH, HIDDEN, SAMPLES = 256, 64, 12


def voice(operator: str = "If") -> onnx.ModelProto:
    """``input`` [?, ?], ``state`` [2, ?, 64] and ``sr`` -> ``output`` [?, 1] and ``stateN``; no axis has a name.

    ``operator`` is what the network lies in: ``If``, or nothing ("").
    """
    if not operator:
        parts = _branch("")
        return model(parts.node, _INPUTS[:2], _OUTPUTS, parts.initializer, 16)
    nodes = [
        node("Equal", ["sr", "rate"], "is_wide", "wide"),
        node("If", ["is_wide"], ["output", "stateN"], "by_rate", then_branch=_branch("w_"), else_branch=_branch("n_")),
    ]
    return model(nodes, _INPUTS, _OUTPUTS, [constant("rate", 16000, np.int64)], 16)


def frames() -> dict[str, np.ndarray]:
    """Frames of a smooth signal, each with the state that a stream begins with."""
    sound = np.cumsum(np.random.default_rng(2).normal(0, 0.05, (SAMPLES, WIDTH)), axis=1).astype(np.float32)
    state = np.zeros((2 * SAMPLES, 1, HIDDEN), np.float32)
    return {"input": sound, "state": state, "sr": np.array(16000)}


_INPUTS = [value("input", [None, None]), value("state", [2, None, HIDDEN]), value("sr", [], TensorProto.INT64)]
_OUTPUTS = [value("output", [None, 1]), value("stateN", [None, None, None])]


def _branch(tag: str) -> onnx.GraphProto:
    """A convolution over the frame, an LSTM over its mean, a product."""
    size = HIDDEN
    names = ("x", "c", "a", "m", "s", "h0", "c0", "h", "cn", "hh", "lo")
    x, c, a, m, s, h0, c0, h, cn, hh, lo = (tag + name for name in names)
    w = [weight(tag + name, *shape) for name, shape in (("k", (size, 1, 5)), ("o", (size, 1)))]
    w += [weight(f"{tag}W", 1, 4 * size, size), weight(f"{tag}R", 1, 4 * size, size), weight(f"{tag}B", 1, 8 * size)]
    ends = [constant(f"{tag}{k}", [k], np.int64) for k in range(3)]
    zero, one, two = (end.name for end in ends)
    done, state = (f"{tag}{name}" if tag else name for name in ("output", "stateN"))
    nodes = [
        node("Unsqueeze", ["input", one], x, f"{tag}channel"),
        node("Conv", [x, f"{tag}k"], c, f"{tag}conv", strides=[8]),
        node("Relu", [c], a, f"{tag}relu"),
        node("ReduceMean", [a], m, f"{tag}mean", axes=[2], keepdims=0),
        node("Unsqueeze", [m, zero], s, f"{tag}step"),
        node("Slice", ["state", zero, one, zero], h0, f"{tag}hidden"),
        node("Slice", ["state", one, two, zero], c0, f"{tag}cell"),
        node("LSTM", [s, f"{tag}W", f"{tag}R", f"{tag}B", "", h0, c0], ["", h, cn], f"{tag}lstm", hidden_size=size),
        node("Concat", [h, cn], state, f"{tag}state", axis=0),
        node("Squeeze", [h, zero], hh, f"{tag}last"),
        node("MatMul", [hh, f"{tag}o"], lo, f"{tag}head"),
        node("Sigmoid", [lo], done, f"{tag}sigmoid"),
    ]
    return helper.make_graph(nodes, "branch", [], [value(done, None), value(state, None)], [*w, *ends])
