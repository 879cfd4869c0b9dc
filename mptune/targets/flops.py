"""FLOPs of one node, by its operator's definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx

from mptune.graph.loading.model import Node
from mptune.targets.recurrence import steps_and_rows
from mptune.targets.shape_table import Shape, ShapeTable

_INPUT_COSTS: Mapping[str, float] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), 5.0),
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"), 7.0),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ArgMax", "ArgMin", "TopK", "CumSum"), 1.0),
}
"""FLOPs per input element of operators whose output says little: passes over the row times operations per pass."""


def node_flops(node: Node, shapes: ShapeTable) -> tuple[float, bool]:
    """FLOPs of one node, and whether tensor cores can compute them.

    Convolutions and matrix products by their definitions in the ONNX operator reference; other operators one FLOP per
    output element, reductions and norms by their inputs.
    """
    matrix = _MATRIX_FLOPS.get(node.op_type) if node.is_standard else None
    if matrix is not None:
        return matrix(node, shapes), True
    out = sum(shapes.elements(name) for name in node.outputs if name)
    read = max((shapes.elements(name) for name in node.inputs if name), default=0)
    if node.op_type in _INPUT_COSTS:
        return _INPUT_COSTS[node.op_type] * read, False
    if node.op_type.startswith("Reduce"):
        return float(read), False
    if node.op_type in ("MaxPool", "AveragePool", "LpPool"):
        return float(out * math.prod(_ints(node, "kernel_shape"))), False
    return float(out), False


def _attribute(node: Node, name: str) -> object:
    return next((onnx.helper.get_attribute_value(a) for a in node.proto.attribute if a.name == name), None)


def _ints(node: Node, name: str) -> tuple[int, ...]:
    value = _attribute(node, name)
    return tuple(int(v) for v in value) if isinstance(value, Sequence) else ()


def _last(shape: Shape, back: int = 1) -> int:
    return shape[-back] if len(shape) >= back else 1


def _conv(node: Node, shapes: ShapeTable) -> float:
    weight = shapes[node.inputs[1]]  # (out channels, in channels / group, *kernel)
    return 2.0 * shapes.elements(node.outputs[0]) * math.prod(weight[1:])


def _conv_transpose(node: Node, shapes: ShapeTable) -> float:
    weight = shapes[node.inputs[1]]  # (in channels, out channels / group, *kernel)
    return 2.0 * shapes.elements(node.inputs[0]) * math.prod(weight[1:])


def _matmul(node: Node, shapes: ShapeTable) -> float:
    return 2.0 * shapes.elements(node.outputs[0]) * _last(shapes[node.inputs[0]])


def _gemm(node: Node, shapes: ShapeTable) -> float:
    inner = _last(shapes[node.inputs[0]], 2 if _attribute(node, "transA") else 1)
    return 2.0 * shapes.elements(node.outputs[0]) * inner


def _einsum(node: Node, shapes: ShapeTable) -> float:
    equation = _attribute(node, "equation")
    text = equation.decode() if isinstance(equation, bytes) else ""
    sizes: dict[str, int] = {}
    for term, name in zip(text.split("->")[0].replace(" ", "").split(","), node.inputs, strict=False):
        if "..." in term:  # named dimensions only: the batch is in the output, which bounds the count from below
            return 2.0 * shapes.elements(node.outputs[0]) * _last(shapes[node.inputs[0]])
        sizes.update(zip(term, shapes[name], strict=False))
    return 2.0 * math.prod(sizes.values())


def _attention(node: Node, shapes: ShapeTable) -> float:
    """Scores and weighted values: 2 products of 2 FLOPs for every query element and key position."""
    return 4.0 * shapes.elements(node.inputs[0]) * _last(shapes[node.inputs[1]], 2)


def _recurrent(node: Node, shapes: ShapeTable) -> float:
    """Every step multiplies by the input and the recurrent weights (directions lie in their first axis)."""
    steps, batch = steps_and_rows(node, shapes[node.inputs[0]])
    return 2.0 * steps * batch * (shapes.elements(node.inputs[1]) + shapes.elements(node.inputs[2]))


_MATRIX_FLOPS: Mapping[str, Callable[[Node, ShapeTable], float]] = {
    **dict.fromkeys(("Conv", "DeformConv"), _conv),
    "ConvTranspose": _conv_transpose,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Attention": _attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
