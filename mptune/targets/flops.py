"""FLOPs of one node, by its operator's definition, on concrete shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import onnx

from mptune.graph.loading.model import Model, Node
from mptune.targets.recurrence import steps_and_rows

Shape = tuple[int, ...]


class ShapeTable:
    """Concrete shapes: observed ones first, then the model's own with symbolic sizes filled in from what was observed.

    An unknown dimension counts as 1.
    """

    def __init__(self, model: Model, observed: Mapping[str, Shape]) -> None:
        self._model = model
        self._observed = observed
        self._sizes: dict[str, int] = {}
        for name, shape in observed.items():
            for dim, size in zip(model.info(name).shape or (), shape, strict=False):
                if isinstance(dim, str):
                    self._sizes.setdefault(dim, size)

    def __getitem__(self, tensor: str) -> Shape:
        if tensor in self._observed:
            return self._observed[tensor]
        if tensor in self._model.initializers:
            return self._model.initializers[tensor].shape
        dims = self._model.info(tensor).shape or ()
        return tuple(dim if isinstance(dim, int) else self._sizes.get(dim or "", 1) for dim in dims)

    @property
    def constants(self) -> Collection[str]:
        """Names of the model's constants."""
        return self._model.initializers.keys()

    def elements(self, tensor: str) -> int:
        """Number of elements of a tensor."""
        return math.prod(self[tensor])


_INPUT_COSTS: Mapping[str, float] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), 5.0),
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"), 7.0),
    **dict.fromkeys(("SimplifiedLayerNormalization", "GroupNorm"), 7.0),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipGroupNorm"), 8.0),
    "BiasSoftmax": 6.0,
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ArgMax", "ArgMin", "TopK", "CumSum"), 1.0),
}
"""FLOPs per input element of operators whose output says little: passes over the row times operations per pass."""


def node_flops(node: Node, shapes: ShapeTable) -> tuple[float, bool]:
    """FLOPs of one node, and whether tensor cores can compute them.

    Convolutions and matrix products by their definitions in the ONNX operator reference, those of ONNX Runtime's
    domains by its own; other operators one FLOP per output element, reductions and norms by their inputs.
    """
    by_operator = _MATRIX_FLOPS if node.is_standard else _RUNTIME_FLOPS if is_of_runtime(node) else {}
    matrix = by_operator.get(node.op_type)
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


def share_of(nodes: Iterable[Node], flops: Mapping[int, float]) -> float:
    """The share of all FLOPs that these nodes have; 0 where there are none.

    Args:
        nodes: some of the model's.
        flops: of each node, by its index; a node that is not in it counts as nothing.
    """
    total = sum(flops.values())
    return sum(flops.get(node.index, 0.0) for node in nodes) / total if total else 0.0


def is_of_runtime(node: Node) -> bool:
    """Whether a node's operator is of one of ONNX Runtime's own domains."""
    return node.domain.startswith("com.microsoft")


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


def _quantised_conv(node: Node, shapes: ShapeTable) -> float:
    weight = shapes[node.inputs[3]]  # behind the input, its scale and its zero point; as of Conv
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
    **dict.fromkeys(("Conv", "DeformConv", "ConvInteger"), _conv),
    "QLinearConv": _quantised_conv,
    **dict.fromkeys(("QLinearMatMul", "MatMulInteger"), _matmul),
    "ConvTranspose": _conv_transpose,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Attention": _attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}


def _fused_matmul(node: Node, shapes: ShapeTable) -> float:
    inner = _last(shapes[node.inputs[0]], 2 if _attribute(node, "transA") else 1)
    return 2.0 * shapes.elements(node.outputs[0]) * inner


def _packed_matmul(node: Node, shapes: ShapeTable) -> float:
    """Weights may be packed: the rows of the first operand say how long a sum is."""
    return 2.0 * shapes.elements(node.outputs[0]) * _last(shapes[node.inputs[0]])


def _projecting_attention(node: Node, shapes: ShapeTable) -> float:
    """Projects its input (batch, length, channels) by one weight (channels, 3 x heads) first; ``past`` adds keys."""
    tokens = shapes[node.inputs[0]]
    projection = 2.0 * math.prod(tokens) * _last(shapes[node.inputs[1]])
    past = _input(node, 8 if node.op_type == "QAttention" else 4)  # (2, batch, heads, keys, size)
    keys = _last(tokens, 2) + (_last(shapes[past], 2) if past and node.op_type != "PackedAttention" else 0)
    return projection + 4.0 * shapes.elements(node.outputs[0]) * keys


def _attention_of_projections(node: Node, shapes: ShapeTable) -> float:
    """Two products for every query element and key position; a cache (batch, heads, keys, size) adds keys."""
    present = node.outputs[1] if len(node.outputs) > 1 else ""
    held = _last(shapes[present], 2) if present else 1
    if held > 1:  # else its length may be unknown: a dynamic axis that no input has
        return 4.0 * shapes.elements(node.outputs[0]) * held
    key = _input(node, 1)
    shape = shapes[key] if key else shapes[node.inputs[0]]
    keys = shape[2] if key and len(shape) == 4 else shape[1] if len(shape) > 2 else _last(shape, 2)
    past = _input(node, 3) if node.op_type in ("GroupQueryAttention", "SparseAttention") else _input(node, 6)
    keys += _last(shapes[past], 2) if past else 0
    return 4.0 * shapes.elements(node.outputs[0]) * keys


def _input(node: Node, position: int) -> str:
    return node.inputs[position] if len(node.inputs) > position else ""


def _mixture(node: Node, shapes: ShapeTable) -> float:
    """Every token goes through ``k`` of the experts, whose weights lie along their first axis."""
    weights = [_input(node, i) for i in (2, 4, 6)]
    experts = max(1, shapes[weights[0]][0]) if weights[0] and shapes[weights[0]] else 1
    chosen = _attribute(node, "k")
    tokens = shapes.elements(node.inputs[0]) / max(1, _last(shapes[node.inputs[0]]))
    used = (chosen if isinstance(chosen, int) else 1) / experts
    return 2.0 * tokens * used * sum(shapes.elements(weight) for weight in weights if weight)


_RUNTIME_FLOPS: Mapping[str, Callable[[Node, ShapeTable], float]] = {
    **dict.fromkeys(("FusedConv", "NhwcConv", "NhwcFusedConv", "Conv"), _conv),
    "QLinearConv": _quantised_conv,
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation"), _fused_matmul),
    **dict.fromkeys(("FusedGemm", "GemmFastGelu", "GemmFloat8", "QGemm"), _gemm),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "MatMulIntegerToFloat"), _packed_matmul),
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulInteger16"), _packed_matmul),
    **dict.fromkeys(
        ("Attention", "QAttention", "PackedAttention", "DecoderMaskedSelfAttention"), _projecting_attention
    ),
    **dict.fromkeys(("MultiHeadAttention", "DecoderMaskedMultiHeadAttention"), _attention_of_projections),
    **dict.fromkeys(("GroupQueryAttention", "SparseAttention", "PackedMultiHeadAttention"), _attention_of_projections),
    **dict.fromkeys(("AttnLSTM", "DynamicQuantizeLSTM"), _recurrent),
    **dict.fromkeys(("MoE", "QMoE"), _mixture),
}
"""Of ONNX Runtime's own domains, by docs/ContribOperators.md of microsoft/onnxruntime."""
