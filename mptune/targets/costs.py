"""What a model costs on concrete shapes: FLOPs and bytes that each layer group computes and moves, and its memory.

A group counts as one kernel, every epilogue fused into what produces its input, as TensorRT builds it.

Memory is the weights, and the most that is alive at once of what is computed: a walk over the nodes in topological
order, where a value is alive from the node that computes it to the last that reads it. Runtimes fuse, which spares
values, and keep workspaces, which costs some: the figure is for deciding whether a model fits on a device at all. What
the subgraphs of If, Loop and Scan hold inside is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mptune.graph.facts import attribute, facts_of
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.ops import ALIASES, RECURRENT, RESHAPES, SHAPE_OF
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes
from mptune.targets.target import EngineMemory, Target, TargetKind

Shape = tuple[int, ...]
K = TypeVar("K")

VIEWS = RESHAPES | ALIASES  # operators that only give their first input another shape: no traffic, no kernel
_METADATA = SHAPE_OF | {"Constant"}  # operators that read and write no element at run time
# Operators that read only those elements of their first input that they return.
_PARTIAL_READS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})

# Operators with matrix products, of ONNX and (docs/ContribOperators.md of microsoft/onnxruntime) of ONNX Runtime.
_CONVOLUTIONS = {"Conv", "DeformConv", "ConvInteger", "QLinearConv", "FusedConv", "NhwcConv", "NhwcFusedConv"}
_PRODUCTS = {
    *("MatMul", "QLinearMatMul", "MatMulInteger", "MatMulInteger16", "MatMulIntegerToFloat", "MatMulNBits"),
    *("MatMulBnb4", "MatMulFpQ4", "DynamicQuantizeMatMul", "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation"),
    *("Gemm", "QGemm", "FusedGemm", "GemmFastGelu", "GemmFloat8"),
}
_RECURRENT = RECURRENT | {"AttnLSTM", "DynamicQuantizeLSTM"}
_PROJECTING = {"Attention", "QAttention", "PackedAttention", "DecoderMaskedSelfAttention"}
"""ONNX Runtime's attention that projects its input (batch, length, channels) by one weight (channels, 3 x heads)."""
_ATTENTION = _PROJECTING | {
    *("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", "GroupQueryAttention"),
    *("SparseAttention", "PackedMultiHeadAttention"),
}

_INPUT_FLOPS: Mapping[str, float] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), 5.0),
    "BiasSoftmax": 6.0,
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization"), 7.0),
    **dict.fromkeys(("SimplifiedLayerNormalization", "GroupNorm"), 7.0),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipGroupNorm"), 8.0),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "ArgMax", "ArgMin", "TopK", "CumSum"), 1.0),
}
"""FLOPs per input element of operators whose output says little: passes over the row times operations per pass."""

_CONVOLUTIONAL_SHARE = 0.1  # a model in which convolutions have more of the FLOPs than this counts as convolutional
# Of the memory that CPU and GPU share, what a TensorRT kernel may take as scratch memory. Without a limit it is all of
# it, and which kernels are tried depends on what happens to be free during the build.
_WORKSPACE_SHARE = 0.25
# Share of the memory that a model can count on. On a Jetson the CPU, the system and the desktop live in it too.
_USABLE: Mapping[TargetKind, float] = {"jetson": 0.75, "gpu": 0.95, "cpu": 0.75}


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


def is_of_runtime(node: Node) -> bool:
    """Whether a node's operator is of one of ONNX Runtime's own domains."""
    return node.domain.startswith("com.microsoft")


def is_folded(node: Node, folded: Collection[str]) -> bool:
    """Whether all that a node computes is folded before the run (``mptune.graph.facts``)."""
    return bool(node.outputs) and all(not out or out in folded for out in node.outputs)


def item_bytes(model: Model, tensor: str, float_bytes: int) -> int:
    """Bytes of one element of a value; ``float_bytes`` where it is FP32, no tensor, or its type is not known."""
    info = model.info(tensor)
    if info.is_float32 or info.dtype in ("undefined", "sequence", "optional", "map", "sparse_tensor", "string"):
        return float_bytes
    return info.numpy_dtype.itemsize


def node_flops(node: Node, shapes: ShapeTable) -> tuple[float, bool]:
    """FLOPs of one node, and whether tensor cores can compute them.

    Convolutions and matrix products by their definitions in the operator references; other operators one FLOP per
    output element, reductions and norms by their inputs.
    """
    products = _multiply_adds(node, shapes) if node.is_standard or is_of_runtime(node) else None
    if products is not None:
        return 2.0 * products, True
    written = sum(shapes.elements(name) for name in node.outputs if name)
    read = max((shapes.elements(name) for name in node.inputs if name), default=0)
    if node.op_type in _INPUT_FLOPS:
        return _INPUT_FLOPS[node.op_type] * read, False
    if node.op_type.startswith("Reduce"):
        return float(read), False
    if node.op_type in ("MaxPool", "AveragePool", "LpPool"):
        window = attribute(node, "kernel_shape")
        return float(written * math.prod(window if isinstance(window, Sequence) else ())), False
    return float(written), False


def _multiply_adds(node: Node, shapes: ShapeTable) -> int | None:
    """Multiply-adds of the matrix products inside a node; None for an operator that has none."""
    op = node.op_type

    def size(slot: int, axis: int) -> int:
        """Of an axis of an input, -1 the last; 1 where the input or the axis is not there."""
        shape = shapes[node.inputs[slot]] if len(node.inputs) > slot and node.inputs[slot] else ()
        return shape[axis] if len(shape) >= -axis else 1

    if op in _CONVOLUTIONS:
        slot = 3 if op == "QLinearConv" else 1  # behind the input, its scale and its zero point
        weight = shapes[node.inputs[slot]]  # (out channels, in channels / group, *kernel)
        return shapes.elements(node.outputs[0]) * math.prod(weight[1:])
    if op == "ConvTranspose":
        weight = shapes[node.inputs[1]]  # (in channels, out channels / group, *kernel)
        return shapes.elements(node.inputs[0]) * math.prod(weight[1:])
    if op in _PRODUCTS:  # by the rows of the first operand, as weights may be packed
        return shapes.elements(node.outputs[0]) * size(0, -2 if attribute(node, "transA") else -1)
    if op == "Einsum":
        equation = attribute(node, "equation")
        terms = (equation.decode() if isinstance(equation, bytes) else "").split("->")[0].replace(" ", "")
        if "..." in terms:  # it names no batch, which is in the output: that bounds the count from below
            return shapes.elements(node.outputs[0]) * size(0, -1)
        sizes: dict[str, int] = {}
        for term, name in zip(terms.split(","), node.inputs, strict=False):
            sizes.update(zip(term, shapes[name], strict=False))
        return math.prod(sizes.values())
    if op in _RECURRENT:  # every row of every step, by the input's and the recurrent weights of all directions
        rows = math.prod(shapes[node.inputs[0]][:2])
        return rows * (shapes.elements(node.inputs[1]) + shapes.elements(node.inputs[2]))
    # Attention: two products for every query element and key position.
    if node.is_standard and op == "Attention":
        return 2 * shapes.elements(node.inputs[0]) * size(1, -2)
    if not node.is_standard and op in _ATTENTION:
        cache = node.outputs[1] if len(node.outputs) > 1 else ""  # (..., keys, size): it counts whole
        keys = shapes[cache][-2] if cache and len(shapes[cache]) > 1 else 1
        if keys == 1:  # no cache, or one of unknown length
            has_keys = op not in _PROJECTING and len(node.inputs) > 1 and node.inputs[1]
            keys = size(1 if has_keys else 0, -2)
        projection = shapes.elements(node.inputs[0]) * size(1, -1) if op in _PROJECTING else 0
        return projection + 2 * shapes.elements(node.outputs[0]) * keys
    return None


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution, transposed ones included."""
    return (node.is_standard or is_of_runtime(node)) and node.op_type in ("Conv", "ConvTranspose", "FusedConv")


def is_convolutional(model: Model, shapes: Mapping[str, Shape]) -> bool:
    """Whether convolutions have a large share of a model's work, of the FLOPs that tensor cores can compute."""
    table = ShapeTable(model, shapes)
    whole = in_convolutions = 0.0
    for node in model.nodes:
        flops, is_matrix = node_flops(node, table)
        if is_matrix:
            whole += flops
            in_convolutions += flops if is_convolution(node) else 0.0
    return in_convolutions > _CONVOLUTIONAL_SHARE * whole


@dataclass
class GroupCost:
    """What a group computes and moves in one inference; only what enters and leaves it is traffic, with the weights.

    Attributes:
        matrix_flops: in convolutions and matrix products, which tensor cores take; a multiply-add counts 2.
        fp32_bytes: read and written with the group in FP32.
        matrix_elements: elements of the largest output of a convolution or matrix product.
        kernels: 0 for groups of views, metadata and what is folded before the run, else 1.
        recurrences: of each recurrent layer the number of steps and what one costs, which counts here only.
    """

    matrix_flops: float = 0.0
    vector_flops: float = 0.0
    fp32_bytes: float = 0.0
    fp16_bytes: float = 0.0
    matrix_elements: int = 0
    kernels: int = 0
    recurrences: list[tuple[int, GroupCost]] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """All of them."""
        return self.matrix_flops + self.vector_flops + sum(count * step.flops for count, step in self.recurrences)


def group_costs(grouped: GroupedModel, shapes: Mapping[str, Shape]) -> dict[str, GroupCost]:
    """Count FLOPs and bytes of every group; nodes in no group are left out (``ungrouped_cost``).

    ``shapes`` are concrete ones by tensor name, such as those observed on the first sample (``ShapeTable``). What is
    computed from constants and shapes alone is folded before the run and costs nothing; its readers read a weight.
    """
    costs = unit_costs(grouped.model, grouped.owners, shapes)
    return {group.id: costs[group.id] for group in grouped.groups}


def ungrouped_cost(grouped: GroupedModel, shapes: Mapping[str, Shape]) -> GroupCost:
    """What nodes without a precision compute and move together: custom operators, integer and boolean arithmetic."""
    return unit_costs(grouped.model, grouped.owners, shapes)[None]


def unit_costs(model: Model, owners: Mapping[str, K], shapes: Mapping[str, Shape]) -> dict[K | None, GroupCost]:
    """The costs of the units that own nodes, by node name; under None, that of the nodes in no unit."""
    table, folded = ShapeTable(model, shapes), facts_of(model).folded
    costs: dict[K | None, GroupCost] = {unit: GroupCost() for unit in (None, *owners.values())}
    root: dict[str, str] = {}  # result of a view -> the value behind it
    maker: dict[str, K | None] = {}  # value -> the unit that computes it
    leaving = {output.name for output in model.outputs}  # values that are read outside of that unit
    traffic: dict[tuple[K | None, str], int] = {}  # elements that a unit reads or writes of a value
    for node in model.nodes:
        if is_folded(node, folded) or (node.is_standard and node.op_type in _METADATA):
            continue
        if node.is_standard and node.op_type in VIEWS:
            root.update((out, root.get(node.inputs[0], node.inputs[0])) for out in node.outputs[:1])
            continue
        unit = owners.get(node.name)
        maker.update((out, unit) for out in node.outputs if out)
        written = sum(table.elements(out) for out in node.outputs if out)
        for slot, name in enumerate((*node.inputs, *node.captures)):
            value = root.get(name, name)
            if name and (value not in maker or maker[value] != unit):
                is_partial = node.op_type in _PARTIAL_READS and slot == 0
                elements = min(table.elements(name), written) if is_partial else table.elements(name)
                traffic[unit, value] = max(traffic.get((unit, value), 0), elements)
                leaving.add(value)
        cost, (flops, is_matrix) = costs[unit], node_flops(node, table)
        cost.kernels = 1
        if node.is_standard and node.op_type in RECURRENT:
            count, step = _steps(node, table)
            cost.recurrences.append((count, step))
            flops -= count * step.flops
            written = count * step.matrix_elements
        if is_matrix:
            cost.matrix_flops += flops
            cost.matrix_elements = max(cost.matrix_elements, written)
        else:
            cost.vector_flops += flops
    for value in {root.get(name, name) for name in leaving} & maker.keys():
        traffic[maker[value], value] = table.elements(value)
    for (unit, value), elements in traffic.items():
        costs[unit].fp32_bytes += elements * item_bytes(model, value, 4)
        costs[unit].fp16_bytes += elements * item_bytes(model, value, 2)
    return costs


def _steps(node: Node, shapes: ShapeTable) -> tuple[int, GroupCost]:
    """How many steps an LSTM, GRU or RNN has, and what one costs: it reads the recurrent weights."""
    count, rows = (*shapes[node.inputs[0]], 1, 1)[:2]
    if attribute(node, "layout") == 1:
        count, rows = rows, count
    directions, gates, hidden = (*shapes[node.inputs[2]], 1, 1, 1)[:3]  # the gates of all hidden values
    elements, weights = rows * directions * gates, directions * gates * hidden
    return count, GroupCost(2.0 * elements * hidden, 0.0, 4.0 * weights, 2.0 * weights, elements, kernels=1)


def default_workspace_mb(shared_gb: float | None) -> int | None:
    """The limit of TensorRT's workspace where the user gives none, MiB; none where the GPU has its own memory."""
    return None if shared_gb is None else max(1, int(shared_gb * 1e9 * _WORKSPACE_SHARE / 2**20))


@dataclass(frozen=True)
class MemoryNeed:
    """What all-FP32 and all-FP16 need, in bytes; mixed plans lie between.

    Attributes:
        fp32_weights: constants as the run reads them: what is computed from constants alone is folded, and its result
            counts instead of them.
        fp32_activations: the most that is alive at once of inputs, outputs and values between.
        fp16_activations: the same with every FP32 value in FP16 but for inputs and outputs, which keep their types.
        fp32_peak: name of the node at which they are alive.
    """

    fp32_weights: int
    fp16_weights: int
    fp32_activations: int
    fp16_activations: int
    fp32_peak: str
    fp16_peak: str

    def total(self, precision: Precision) -> int:
        """Weights and activations of all-FP32, or of all-FP16 or all-BF16, in bytes."""
        if precision.stored is Precision.FP32:
            return self.fp32_weights + self.fp32_activations
        return self.fp16_weights + self.fp16_activations


def memory_need(model: Model, shapes: Mapping[str, Shape]) -> MemoryNeed:
    """What all-FP32 and all-FP16 need."""
    table, (weights, _) = ShapeTable(model, shapes), _lifetimes(model)
    fp32, fp32_peak = _activations(model, table, lambda value: 4)
    fp16, fp16_peak = _activations(model, table, lambda value: 2)
    fp32_weights, fp16_weights = (sum(_weight_bytes(model, table, name, size) for name in weights) for size in (4, 2))
    return MemoryNeed(fp32_weights, fp16_weights, fp32, fp16, fp32_peak, fp16_peak)


def plan_memory(types: ValueTypes, plan: PrecisionPlan, shapes: Mapping[str, Shape]) -> EngineMemory:
    """Predict what a plan's engine takes: every value and constant in the type that the plan gives it."""
    model, resolution, table = types.model, types.resolve(plan), ShapeTable(types.model, shapes)
    weights = 0
    for name in _lifetimes(model)[0]:
        if name in model.initializers:
            stored_in = resolution.constants.get(name) or {Precision.FP32}
        else:
            stored_in = {resolution.computed_in(name)}
        weights += sum(_weight_bytes(model, table, name, precision.nbytes) for precision in stored_in)
    activations, _ = _activations(model, table, lambda value: resolution.computed_in(value).nbytes)
    return EngineMemory(None, activations, weights, "predicted")


def _weight_bytes(model: Model, table: ShapeTable, name: str, float_bytes: int) -> int:
    """Bytes of a constant or folded value; FP32 counts ``float_bytes`` an element."""
    constant = model.initializers.get(name)
    if constant is not None:
        return constant.nbytes // 2 if constant.dtype == "float" and float_bytes == 2 else constant.nbytes
    return table.elements(name) * item_bytes(model, name, float_bytes)


def _activations(model: Model, table: ShapeTable, float_bytes: Callable[[str], int]) -> tuple[int, str]:
    """The most bytes alive at once, and the name of the node at which they are."""
    interface = {info.name for info in (*model.inputs, *model.outputs)}

    def size(value: str) -> int:
        return table.elements(value) * item_bytes(model, value, 4 if value in interface else float_bytes(value))

    change = np.zeros(len(model.nodes) + 2, np.int64)
    for value, last in _lifetimes(model)[1].items():
        change[model.producer[value]] += size(value)
        change[last + 1] -= size(value)
    alive = change.cumsum()  # beside the inputs, which the caller keeps, at each node
    peak = int(alive.argmax())
    name = model.nodes[peak].name if alive[peak] else ""
    return sum(size(info.name) for info in model.inputs) + int(alive[peak]), name


@once
def _lifetimes(model: Model) -> tuple[frozenset[str], dict[str, int]]:
    """The weights, and for each computed value that has memory of its own the index of the last node that reads it.

    Weights are the constants and folded values that the run reads or gives back. Views count as what they show.
    """
    folded = facts_of(model).folded
    outputs = {info.name for info in model.outputs}
    root: dict[str, str] = {}  # result of a view -> the value behind it
    last: dict[str, int] = {}
    read = {*outputs}
    for node in model.nodes:
        is_view = node.op_type in VIEWS and node.is_standard and bool(node.inputs and node.outputs)
        is_free = is_folded(node, folded)  # such a node reads nothing at run time
        if not is_free:
            read.update((*node.inputs, *node.captures))
            behind = {root.get(name, name) for name in (*node.inputs, *node.captures)}
            last.update(dict.fromkeys(behind & last.keys(), node.index))
            last.update((out, node.index) for out in node.outputs if out)
        # A view that is an output is copied, as is one of a weight.
        if is_view and (node.inputs[0] in folded) is is_free and (is_free or node.outputs[0] not in outputs):
            root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
            last.pop(node.outputs[0], None)
    last.update((name, len(model.nodes)) for name in outputs & last.keys())
    return frozenset(root.get(name, name) for name in read if name in folded), last


def memory_warnings(need: MemoryNeed, target: Target, *, measured: bool = False) -> tuple[str, ...]:
    """A warning where a model will not fit on a device, or only just; all-FP32 counts, since it is the baseline.

    Where engines are ``measured``, the baseline and a candidate, which may be nearly all FP32, are loaded at a time.
    """
    if target.memory_gb is None:
        return ()
    usable = target.memory_gb * 1e9 * _USABLE[target.kind]
    fp32, fp16 = need.total(Precision.FP32), need.total(Precision.FP16)
    if (2 * fp32 if measured else fp32) <= usable:
        return ()
    weights, activations = f"weights {need.fp32_weights / 1e9:.2g}", f"activations {need.fp32_activations / 1e9:.2g}"
    need_gb, what = (fp32 / 1e9, "all-FP32") if fp32 > usable else (2 * fp32 / 1e9, "the baseline beside a candidate")
    return (
        f"{what} needs about {need_gb:.2g} GB of memory ({weights}, {activations} at {need.fp32_peak!r}), all-FP16"
        f" {fp16 / 1e9:.2g} GB, and about {usable / 1e9:.2g} GB are free on {target.title}: close other programs, or"
        " give a smaller --batch or smaller inputs",
    )
