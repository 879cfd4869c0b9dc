"""What each layer group computes and moves: FLOPs and bytes, counted on concrete shapes.

Once as one kernel per group, as where epilogues are fused (``group_costs``), and once kernel by kernel, as ONNX
Runtime's CUDA provider launches them (``kernel_costs``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mptune.graph.facts import Facts, attribute, facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.norms import find_activation
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.loading.model import Model, Node
from mptune.graph.ops import ALIASES, CONVOLUTIONS, RECURRENT, RESHAPES, SHAPE_OF
from mptune.graph.plan import Precision


@dataclass(frozen=True)
class Recurrence:
    """The steps of one recurrent layer, one after another."""

    steps: int
    matrix_flops: float
    """Of one step; a multiply-add counts 2."""
    matrix_elements: int
    """Of the product of one step: every gate of every row and direction."""
    weights: int
    """Elements of the recurrent weights. Every step reads them, from a cache that holds them if there is one."""

    @property
    def flops(self) -> float:
        """Of all steps together."""
        return self.steps * self.matrix_flops


def steps_and_rows(node: Node, shape: tuple[int, ...]) -> tuple[int, int]:
    """Time steps and rows of a recurrent layer, from the shape of its input."""
    first, second = (*shape, 1, 1)[:2]
    return (second, first) if attribute(node, "layout") == 1 else (first, second)


def recurrence_of(node: Node, shape: tuple[int, ...], weights: tuple[int, ...]) -> Recurrence:
    """The steps of an LSTM, GRU or RNN node.

    ``shape`` is of its input, ``weights`` of its recurrent weights: directions, gates times hidden size, hidden size.
    """
    steps, rows = steps_and_rows(node, shape)
    directions, gates, hidden = (*weights, 1, 1, 1)[:3]
    elements = rows * directions * gates
    return Recurrence(steps, 2.0 * elements * hidden, elements, directions * gates * hidden)


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
        window = attribute(node, "kernel_shape")
        return float(out * math.prod(window if isinstance(window, Sequence) else ())), False
    return float(out), False


def share_of(nodes: Iterable[Node], flops: Mapping[int, float]) -> float:
    """The share of all FLOPs that these nodes have; 0 where there are none."""
    total = sum(flops.values())
    return sum(flops.get(node.index, 0.0) for node in nodes) / total if total else 0.0


def is_of_runtime(node: Node) -> bool:
    """Whether a node's operator is of one of ONNX Runtime's own domains."""
    return node.domain.startswith("com.microsoft")


def _last(shape: Shape, back: int = 1) -> int:
    return shape[-back] if len(shape) >= back else 1


def _conv(node: Node, shapes: ShapeTable) -> float:
    slot = 3 if node.op_type == "QLinearConv" else 1  # behind the input, its scale and its zero point
    weight = shapes[node.inputs[slot]]  # (out channels, in channels / group, *kernel)
    return 2.0 * shapes.elements(node.outputs[0]) * math.prod(weight[1:])


def _conv_transpose(node: Node, shapes: ShapeTable) -> float:
    weight = shapes[node.inputs[1]]  # (in channels, out channels / group, *kernel)
    return 2.0 * shapes.elements(node.inputs[0]) * math.prod(weight[1:])


def _matmul(node: Node, shapes: ShapeTable) -> float:
    """By the rows of the first operand: weights may be packed."""
    return 2.0 * shapes.elements(node.outputs[0]) * _last(shapes[node.inputs[0]])


def _gemm(node: Node, shapes: ShapeTable) -> float:
    inner = _last(shapes[node.inputs[0]], 2 if attribute(node, "transA") else 1)
    return 2.0 * shapes.elements(node.outputs[0]) * inner


def _einsum(node: Node, shapes: ShapeTable) -> float:
    equation = attribute(node, "equation")
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
    **dict.fromkeys(("Conv", "DeformConv", "ConvInteger", "QLinearConv"), _conv),
    **dict.fromkeys(("MatMul", "QLinearMatMul", "MatMulInteger"), _matmul),
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Attention": _attention,
    **dict.fromkeys(RECURRENT, _recurrent),
}


_PROJECTING = ("Attention", "QAttention", "PackedAttention", "DecoderMaskedSelfAttention")
"""Operators that project their input (batch, length, channels) by one weight (channels, 3 x heads) first."""

_PROJECTED = (
    *("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention"),
    *("SparseAttention", "PackedMultiHeadAttention"),
)
"""Operators whose inputs are projected already."""


def _runtime_attention(node: Node, shapes: ShapeTable) -> float:
    """Two products for every query element and key position; a cache (..., keys, size) in the outputs counts whole."""
    tokens = shapes[node.inputs[0]]
    projects = node.op_type in _PROJECTING
    present = node.outputs[1] if len(node.outputs) > 1 else ""
    keys = _last(shapes[present], 2) if present else 1
    if keys == 1:  # no cache, or one of unknown length
        key = node.inputs[1] if len(node.inputs) > 1 and not projects else ""
        keys = _last(shapes[key] if key else tokens, 2)
    projection = 2.0 * math.prod(tokens) * _last(shapes[node.inputs[1]]) if projects else 0.0
    return projection + 4.0 * shapes.elements(node.outputs[0]) * keys


_RUNTIME_FLOPS: Mapping[str, Callable[[Node, ShapeTable], float]] = {
    **dict.fromkeys(("FusedConv", "NhwcConv", "NhwcFusedConv", "Conv", "QLinearConv"), _conv),
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation"), _gemm),
    **dict.fromkeys(("FusedGemm", "GemmFastGelu", "GemmFloat8", "QGemm"), _gemm),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", "MatMulIntegerToFloat"), _matmul),
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulInteger16"), _matmul),
    **dict.fromkeys((*_PROJECTING, *_PROJECTED), _runtime_attention),
    **dict.fromkeys(("AttnLSTM", "DynamicQuantizeLSTM"), _recurrent),
}
"""Of ONNX Runtime's own domains, by docs/ContribOperators.md of microsoft/onnxruntime."""

VIEWS = RESHAPES | ALIASES
"""Operators that only give their first input another shape: no traffic, no kernel."""

_METADATA = SHAPE_OF | {"Constant"}
"""Operators that read and write no element at run time."""

_PARTIAL_READS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
"""Operators that read only those elements of their first input that they return."""

_CONVOLUTIONAL_SHARE = 0.1
"""A model in which convolutions have more than this share of the FLOPs counts as convolutional."""


@dataclass(frozen=True)
class GroupCost:
    """What a group, or one kernel of it, computes and moves in one inference.

    Only what enters and leaves it counts as traffic, with the weights: inside, element-wise nodes are fused into what
    produces their input.

    Attributes:
        matrix_flops: in convolutions and matrix products, which tensor cores take; a multiply-add counts 2.
        fp32_bytes: read and written with the group in FP32.
        fp16_bytes: the same with the group in FP16.
        matrix_elements: elements of the largest output of a convolution or matrix product.
        kernels: 0 for groups of views, metadata and what is folded before the run, else 1.
        recurrences: the steps of recurrent layers, whose FLOPs are not in ``matrix_flops``.
    """

    matrix_flops: float
    vector_flops: float
    fp32_bytes: float
    fp16_bytes: float
    matrix_elements: int
    kernels: int
    recurrences: tuple[Recurrence, ...] = ()

    @property
    def flops(self) -> float:
        """All of them."""
        return self.matrix_flops + self.vector_flops + sum(r.flops for r in self.recurrences)


def group_costs(grouped: GroupedModel, shapes: Mapping[str, Shape]) -> dict[str, GroupCost]:
    """Count FLOPs and bytes of every group.

    ``shapes`` are concrete ones by tensor name, such as those observed on the first sample; what is missing is taken
    from the model, symbolic dimensions by their names. Nodes in no group are left out (``ungrouped_cost``). What is
    computed from constants and shapes alone is folded before the run and costs nothing; what reads the result reads a
    weight.
    """
    model, groups = grouped.model, grouped.groups
    counter = _Counter(model, [group.nodes for group in groups], ShapeTable(model, shapes))
    nodes = {node.name: node for node in model.nodes}
    return {group.id: counter.cost([nodes[name] for name in group.nodes], k) for k, group in enumerate(groups)}


def kernel_costs(
    grouped: GroupedModel, shapes: Mapping[str, Shape], precision: Precision
) -> dict[str, tuple[GroupCost, ...]]:
    """Count FLOPs and bytes of every kernel that ONNX Runtime's CUDA provider launches for a group.

    One per node, but for norms and activations that an exporter wrote out, which it puts together again ("Graph
    Optimizations in ONNX Runtime": Layer Normalization Fusion, GELU Fusion). The bias of a convolution is a kernel of
    its own, as its rounding shows too (``mptune.graph.writing.rounding_steps``). Tensor cores want channels last, ONNX
    has them first: in FP16 a convolution's operands are converted before it and its result after it (the kernels are
    listed in microsoft/onnxruntime pull request 17200). Kernels are in topological order.
    """
    model = grouped.model
    facts = facts_of(model)
    folded = facts_of(model).folded
    nodes = {node.name: node for node in model.nodes}
    joined = _joined(model, facts)
    units: dict[tuple[str, int], list[str]] = {}
    for group in grouped.groups:
        for name in group.nodes:
            node = nodes[name]
            if not is_folded(node, folded):
                units.setdefault((group.id, joined.get(node.index, node.index)), []).append(name)
    counter = _Counter(model, list(units.values()), ShapeTable(model, shapes))
    kernels: dict[str, list[GroupCost]] = {group.id: [] for group in grouped.groups}
    for k, ((group_id, _), names) in enumerate(units.items()):
        first = nodes[names[0]]
        cost = counter.cost([nodes[name] for name in names], k)
        beside = counter.beside_convolution(first, precision) if is_convolution(first) else ()
        kernels[group_id] += [kernel for kernel in (cost, *beside) if kernel.kernels]
    return {group: tuple(each) for group, each in kernels.items()}


def _joined(model: Model, facts: Facts) -> dict[int, int]:
    """Node of a norm or activation that was written out -> the node that stands for all of them."""
    joined = {i: p.nodes[0] for p in find_patterns(model) if p.kind == "norm" for i in p.nodes}
    for node in model.nodes:
        activation = find_activation(facts, node)
        if activation is not None and joined.keys().isdisjoint(activation.nodes):
            joined.update(dict.fromkeys(activation.nodes, activation.anchor))
    return joined


def ungrouped_cost(grouped: GroupedModel, shapes: Mapping[str, Shape]) -> GroupCost:
    """What nodes without a precision compute and move together: custom operators, integer and boolean arithmetic."""
    model, owners = grouped.model, grouped.owners
    rest = [node for node in model.nodes if node.name not in owners]
    return _Counter(model, [group.nodes for group in grouped.groups], ShapeTable(model, shapes)).cost(rest, -1)


def is_folded(node: Node, folded: Collection[str]) -> bool:
    """Whether all that a node computes is folded before the run (``mptune.graph.facts``)."""
    return bool(node.outputs) and all(not out or out in folded for out in node.outputs)


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution, transposed ones included."""
    return (node.is_standard or is_of_runtime(node)) and node.op_type in CONVOLUTIONS


def is_convolutional(model: Model, shapes: Mapping[str, Shape]) -> bool:
    """Whether convolutions have a large share of a model's work, of the FLOPs that tensor cores can compute."""
    table = ShapeTable(model, shapes)
    whole = of_convolutions = 0.0
    for node in model.nodes:
        flops, is_matrix = node_flops(node, table)
        whole += flops if is_matrix else 0.0
        of_convolutions += flops if is_convolution(node) else 0.0
    return of_convolutions > _CONVOLUTIONAL_SHARE * whole


class _Counter:
    """Which units read and write which values; views count as the value behind them. A unit is a group or a kernel."""

    def __init__(self, model: Model, units: Sequence[Sequence[str]], shapes: ShapeTable) -> None:
        self._model = model
        self._shapes = shapes
        self._unit_of = {name: k for k, unit in enumerate(units) for name in unit}
        self._folded = facts_of(model).folded
        self._root: dict[str, str] = {}
        self._readers: dict[str, set[int]] = {}
        for node in model.nodes:
            if is_folded(node, self._folded):
                continue
            if node.op_type in VIEWS and node.is_standard and node.inputs:
                root = self._root_of(node.inputs[0])
                self._root.update((out, root) for out in node.outputs[:1])
            elif node.op_type not in _METADATA:
                for name in (*node.inputs, *node.captures):
                    self._readers.setdefault(self._root_of(name), set()).add(self._unit_of.get(node.name, -1))
        for output in model.outputs:
            self._readers.setdefault(self._root_of(output.name), set()).add(-2)  # the caller

    def _root_of(self, tensor: str) -> str:
        return self._root.get(tensor, tensor)

    def cost(self, nodes: Sequence[Node], owner: int) -> GroupCost:
        """The cost of the nodes of one unit; ``owner`` is its position, -1 for the nodes in none."""
        views = VIEWS | _METADATA
        working = [n for n in nodes if not ((n.is_standard and n.op_type in views) or is_folded(n, self._folded))]
        made = {out for node in working for out in node.outputs if out}
        traffic: dict[str, int] = {}
        matrix = vector = 0.0
        largest = 0
        recurrences = []
        for node in working:
            flops, is_matrix = node_flops(node, self._shapes)
            matrix += flops if is_matrix else 0.0
            vector += 0.0 if is_matrix else flops
            written = sum(self._shapes.elements(out) for out in node.outputs if out)
            if node.is_standard and node.op_type in RECURRENT:
                recurrence = recurrence_of(node, self._shapes[node.inputs[0]], self._shapes[node.inputs[2]])
                recurrences.append(recurrence)
                matrix -= recurrence.flops
                largest = max(largest, recurrence.steps * recurrence.matrix_elements)
            else:
                largest = max(largest, written if is_matrix else 0)
            for slot, name in enumerate((*node.inputs, *node.captures)):
                root = self._root_of(name)
                if name and root not in made:
                    partial = node.op_type in _PARTIAL_READS and slot == 0
                    elements = min(written, self._shapes.elements(name)) if partial else self._shapes.elements(name)
                    traffic[root] = max(traffic.get(root, 0), elements)
        for out in made:
            if self._readers.get(out, set()) - {owner}:
                traffic[out] = self._shapes.elements(out)
        return GroupCost(
            matrix_flops=matrix,
            vector_flops=vector,
            fp32_bytes=float(sum(count * item_bytes(self._model, name, 4) for name, count in traffic.items())),
            fp16_bytes=float(sum(count * item_bytes(self._model, name, 2) for name, count in traffic.items())),
            matrix_elements=largest,
            kernels=1 if working else 0,
            recurrences=tuple(recurrences),
        )

    def beside_convolution(self, node: Node, precision: Precision) -> tuple[GroupCost, ...]:
        """The kernels beside a convolution: its bias, and below FP32 the conversions of its operands and its result."""
        operands = sum(self._shapes.elements(name) for name in node.inputs[:2])
        result = self._shapes.elements(node.outputs[0])
        converted = () if precision.stored is Precision.FP32 else (operands, result)
        bias = [_elementwise(float(result), result)] if len(node.inputs) > 2 and node.inputs[2] else []
        return (*bias, *(_elementwise(0.0, elements) for elements in converted))


def _elementwise(flops: float, elements: int) -> GroupCost:
    """A kernel that reads and writes every element once."""
    return GroupCost(0.0, flops, 8.0 * elements, 4.0 * elements, 0, 1)


def item_bytes(model: Model, tensor: str, float_bytes: int) -> int:
    """Bytes of one element of a value; ``float_bytes`` where it is FP32, no tensor, or its type is not known."""
    info = model.info(tensor)
    if info.is_float32 or info.dtype in ("undefined", "sequence", "optional", "map", "sparse_tensor", "string"):
        return float_bytes
    return info.numpy_dtype.itemsize
