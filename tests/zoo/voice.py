"""A detector of voice whose network lies in an If, by the sampling rate, with a state that is fed back."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto

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
    """A convolution over the frame, an LSTM over its mean, a product; ``tag`` begins every name."""
    graph = """branch () => (float $output, float $stateN) {
        [$channel] $x = Unsqueeze(input, $1st) [$conv] $c = Conv<strides = [8]>($x, $K) [$relu] $a = Relu($c)
        [$mean] $m = ReduceMean<axes = [2], keepdims = 0>($a) [$step] $s = Unsqueeze($m, $0th)
        [$hidden] $h0 = Slice(state, $0th, $1st, $0th) [$cell] $c0 = Slice(state, $1st, $2nd, $0th)
        [$lstm] $all, $h, $cn = LSTM<hidden_size = 64>($s, $W, $R, $B, , $h0, $c0)
        [$state] $stateN = Concat<axis = 0>($h, $cn) [$last] $hh = Squeeze($h, $0th) [$head] $lo = MatMul($hh, $O)
        [$sigmoid] $output = Sigmoid($lo)
    }"""
    for k, name in enumerate(("$0th", "$1st", "$2nd")):
        graph = graph.replace(name, f"{tag}at{k}")
    branch = onnx.parser.parse_graph(graph.replace("$", tag))
    for result in branch.output:
        result.type.tensor_type.ClearField("shape")
    size = HIDDEN
    shapes = {"K": (size, 1, 5), "O": (size, 1), "W": (1, 4 * size, size), "R": (1, 4 * size, size), "B": (1, 8 * size)}
    branch.initializer.extend(weight(tag + name, *shape) for name, shape in shapes.items())
    branch.initializer.extend(constant(f"{tag}at{k}", [k], np.int64) for k in range(3))
    return branch
