"""What each layer group computes and moves: FLOPs and bytes, counted on concrete shapes.

Once as one kernel per group, as where epilogues are fused (``group_costs``), and once kernel by kernel, as ONNX
Runtime's CUDA provider launches them (``kernel_costs``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mptune.graph.grouping.activations import find_activation
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.value_dependent import shape_facts
from mptune.graph.plan import Precision
from mptune.targets.flops import Shape, ShapeTable, is_of_runtime, node_flops
from mptune.targets.recurrence import Recurrence, is_recurrent, recurrence_of

VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
"""Operators that only give their first input another shape: no traffic, no kernel."""

_METADATA = frozenset({"Shape", "Size", "Constant"})
"""Operators that read and write no element at run time."""

_PARTIAL_READS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
"""Operators that read only those elements of their first input that they return."""

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv"})

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

    Args:
        grouped: the model and its layer groups.
        shapes: concrete shapes by tensor name, such as those observed on the first sample. What is missing is taken
            from the model, symbolic dimensions by their names.

    Returns:
        One cost per group id. Nodes in no group are left out (``ungrouped_cost``). What is computed from constants and
        shapes alone is folded before the run and costs nothing; what reads the result reads a weight.
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
    listed in microsoft/onnxruntime pull request 17200).

    Returns:
        Kernels in topological order by group id. What is computed from constants and shapes alone is folded, and takes
        none.
    """
    model = grouped.model
    look = Lookup(model)
    folded = shape_facts(model).folded
    nodes = {node.name: node for node in model.nodes}
    joined = _joined(model, look)
    units: dict[tuple[str, int], list[str]] = {}
    for group in grouped.groups:
        for name in group.nodes:
            node = nodes[name]
            if not is_folded(node, folded):
                units.setdefault((group.id, joined.get(node.index, node.index)), []).append(name)
    counter = _Counter(model, list(units.values()), ShapeTable(model, shapes))
    found: dict[str, list[GroupCost]] = {group.id: [] for group in grouped.groups}
    for k, ((group_id, _), names) in enumerate(units.items()):
        first = nodes[names[0]]
        cost = counter.cost([nodes[name] for name in names], k)
        beside = counter.beside_convolution(first, precision) if is_convolution(first) else ()
        found[group_id] += [kernel for kernel in (cost, *beside) if kernel.kernels]
    return {group: tuple(kernels) for group, kernels in found.items()}


def _joined(model: Model, look: Lookup) -> dict[int, int]:
    """Node of a norm or activation that was written out -> the node that stands for all of them."""
    joined = {i: p.nodes[0] for p in find_patterns(model, look) if p.kind == "norm" for i in p.nodes}
    for node in model.nodes:
        activation = find_activation(look, node)
        if activation is not None and joined.keys().isdisjoint(activation.nodes):
            joined.update(dict.fromkeys(activation.nodes, min(activation.nodes)))
    return joined


def ungrouped_cost(grouped: GroupedModel, shapes: Mapping[str, Shape]) -> GroupCost:
    """What nodes without a precision compute and move together: custom operators, integer and boolean arithmetic."""
    model, owners = grouped.model, grouped.owners
    rest = [node for node in model.nodes if node.name not in owners]
    return _Counter(model, [group.nodes for group in grouped.groups], ShapeTable(model, shapes)).cost(rest, -1)


def is_folded(node: Node, folded: Collection[str]) -> bool:
    """Whether all that a node computes is folded before the run (``mptune.graph.loading.value_dependent``)."""
    return bool(node.outputs) and all(not out or out in folded for out in node.outputs)


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution, transposed ones included."""
    return (node.is_standard or is_of_runtime(node)) and node.op_type in _CONVOLUTIONS


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
        self._folded = shape_facts(model).folded
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
                    self._readers.setdefault(self._root_of(name), set()).add(self._owner(node))
        for output in model.outputs:
            self._readers.setdefault(self._root_of(output.name), set()).add(-2)  # the caller

    def _root_of(self, tensor: str) -> str:
        return self._root.get(tensor, tensor)

    def _owner(self, node: Node) -> int:
        return self._unit_of.get(node.name, -1)

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
            if is_recurrent(node):
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
        converted = () if precision is Precision.FP32 else (operands, result)
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
