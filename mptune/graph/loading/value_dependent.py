"""Values whose shape depends on values, shapes that are computed in floating point, and what is folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mptune.graph.loading.inference import INLINE_LIMIT
from mptune.graph.loading.model import Model, Node, once, output_types
from mptune.graph.loading.tensors import all_graphs, fixed_shape, subgraphs, type_of
from mptune.graph.ops import COUNTING, QUANTISING, RANDOM, SELECTING, SHAPE_OF, operator

REASON = "computes a shape: FP16 is not exact above 2048, and TensorRT takes no FP16 shapes"

_INTEGERS = ("int", "uint")


@once
def shape_arithmetic(model: Model) -> frozenset[int]:
    """Indices of the nodes that compute shapes; found once per model.

    A node does where each use of its results leads to a shape input and to nothing else. It also does where it computes
    from shapes (or from integer inputs of rank 1 and less) alone, and a shape input is among its uses: such a value is
    small, and computing it in FP32 costs nothing.
    """
    as_shape: set[int] = set()
    as_data: set[int] = set()
    outputs = {info.name for info in model.outputs}
    for node in reversed(model.nodes):
        for name in node.outputs:
            if name in outputs:
                as_data.add(node.index)
            for index in model.consumers.get(name, ()) if name else ():
                shape, data = _uses(model.nodes[index], name, index in as_shape, index in as_data)
                if shape:
                    as_shape.add(node.index)
                if data:
                    as_data.add(node.index)
    integers = [info for info in model.inputs if info.dtype.startswith(_INTEGERS) and info.shape is not None]
    small = {info.name for info in integers if len(info.shape or ()) <= 1}
    from_shapes = computed_beforehand(model, SHAPE_OF, small) - computed_beforehand(model)
    candidates = (index for index in as_shape if index not in as_data or index in from_shapes)
    # Shape and Size read values of any type, and compute integers.
    return frozenset(i for i in candidates if not (model.nodes[i].is_standard and model.nodes[i].op_type in SHAPE_OF))


def shape_inputs(model: Model) -> tuple[str, ...]:
    """The integer inputs of a fixed shape and rank 0 or 1 whose values decide a shape: TensorRT's shape tensors."""
    computing = shape_arithmetic(model)
    return tuple(
        info.name
        for info in model.inputs
        if info.dtype.startswith(_INTEGERS)
        and len(fixed_shape(info.shape) or (0, 0)) <= 1
        and any(_uses(model.nodes[k], info.name, k in computing, False)[0] for k in model.consumers.get(info.name, ()))
    )


def _uses(reader: Node, name: str, shape: bool, data: bool) -> tuple[bool, bool]:
    """Whether a node uses a value for a shape, and whether for anything else, given the same of the node's results."""
    if reader.is_standard and reader.op_type in SHAPE_OF:
        return False, False  # the shape of the value is read, not the value
    own = operator(reader.op_type).sizes if reader.is_standard else frozenset[int]()
    slots = {slot for slot, given in enumerate(reader.inputs) if given == name}
    captured = name in reader.captures
    as_shape, others = bool(slots & own) or captured, bool(slots - own)
    if captured:  # what the subgraph does with it is not looked at
        return True, True
    return as_shape or (others and shape), others and (data or not shape)


_FLOATS = frozenset({"float", "float16", "double", "bfloat16"})

_RENAMES = frozenset({"Identity", "Cast"})


@dataclass(frozen=True)
class DependentOutput:
    """An output of the model whose shape depends on floating-point values.

    Attributes:
        axis: the axis whose size depends on them; None where the model does not tell.
        nodes: names of the nodes that decide, in topological order.
        index_columns: columns that hold positions in another value, which need not agree where rows do: the box index
            that NonMaxSuppression returns beside batch and class.
        is_indices: it is what NonZero returns, where the first axis holds the coordinates of one position.
    """

    name: str
    axis: int | None
    nodes: tuple[str, ...]
    index_columns: tuple[int, ...] = ()
    is_indices: bool = False


@dataclass(frozen=True)
class ShapeFacts:
    """What the shapes of a model depend on.

    Attributes:
        folded: constants, and values that a runtime computes from constants and shapes before it runs the model.
        deciding: value -> names of the nodes whose floating-point inputs decide its shape.
        nodes: of the model whose output shape depends on floating-point values themselves, in topological order.
    """

    folded: frozenset[str]
    deciding: Mapping[str, frozenset[str]]
    outputs: tuple[DependentOutput, ...]
    nodes: tuple[Node, ...]


def computed_beforehand(
    model: Model, sources: frozenset[str] = frozenset(), given: Iterable[str] = ()
) -> frozenset[int]:
    """Indices of the nodes that compute from constants, ``given`` values and what these operators give alone."""
    values = {name for name, constant in model.initializers.items() if not constant.overridable}.union(given)
    indices = set[int]()
    for node in model.nodes:
        if not node.is_standard or node.op_type in RANDOM or node.has_subgraph:
            continue
        if node.op_type in sources or all(name in values for name in node.inputs if name):
            indices.add(node.index)
            values.update(name for name in node.outputs if name)
    return frozenset(indices)


@once
def shape_facts(model: Model) -> ShapeFacts:
    """Walk over the model, in topological order; once per model.

    Weights that are stored quantised do not count as folded from there on: neither ONNX Runtime nor TensorRT computes
    QuantizeLinear and DequantizeLinear beforehand.
    """
    walk = _Walk(model)
    for node in model.nodes:
        walk.visit(node)
    order = {node.name: node.index for node in model.nodes}
    outputs = tuple(
        DependentOutput(
            info.name,
            walk.axis(info.name),
            tuple(sorted(walk.deciding[info.name], key=order.__getitem__)),
            (2,) if _source(model, info.name) == "NonMaxSuppression" else (),
            _source(model, info.name) == "NonZero",
        )
        for info in model.outputs
        if info.name in walk.deciding
    )
    return ShapeFacts(frozenset(walk.folded), walk.deciding, outputs, tuple(walk.nodes))


class _Walk:
    """The sets of values, grown node by node."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._outputs = {info.name for info in model.outputs}
        self._sizes = {dim for info in model.inputs for dim in info.shape or () if isinstance(dim, str)}
        self._from_floats = {info.name for info in model.inputs if info.dtype in _FLOATS}
        self._unknown: set[str] = set()
        self.folded = {name for name, constant in model.initializers.items() if not constant.overridable}
        self.deciding: dict[str, frozenset[str]] = {}
        self.nodes: list[Node] = []

    def visit(self, node: Node) -> None:
        """Add what a node computes."""
        outs = [out for out in node.outputs if out]
        read = [name for name in (*node.inputs, *node.captures) if name]
        is_measure = node.is_standard and node.op_type in SHAPE_OF
        if is_measure and read[0] in self._unknown:
            self._from_floats.update(outs if read[0] in self.deciding else ())
            return
        if is_measure or self._is_folded(node, read):
            self.folded.update(outs)
            return
        if any(name in self._from_floats for name in read):
            self._from_floats.update(outs)
        self._from_floats.update(out for out in outs if self._model.info(out).dtype in _FLOATS)
        deciding, shaped = self._deciding(node), self._shape_of(node)
        open_outs = [out for out in outs if not self._is_known(out, node)]
        if any(name not in self.folded for name in deciding) or any(name in self._unknown for name in shaped):
            self._unknown.update(open_outs)
        passed = frozenset[str]().union(*(self.deciding.get(name, frozenset()) for name in shaped))
        if any(name in self._from_floats for name in deciding):
            self.nodes.append(node)
            passed |= {node.name}
        if passed:
            self.deciding.update(dict.fromkeys(open_outs, passed))

    def axis(self, output: str) -> int | None:
        """The first axis of an output whose size is neither fixed nor an input's."""
        if _source(self._model, output) == "NonZero":
            return 1
        dims = self._model.info(output).shape
        return next(
            (k for k, dim in enumerate(dims or ()) if not isinstance(dim, int) and dim not in self._sizes), None
        )

    def _is_folded(self, node: Node, read: list[str]) -> bool:
        if not node.is_standard or node.has_subgraph or node.op_type in RANDOM | QUANTISING:
            return False
        return (bool(read) or node.op_type == "Constant") and all(name in self.folded for name in read)

    def _deciding(self, node: Node) -> list[str]:
        """The values of a node's inputs that decide on the shapes of its outputs."""
        inner = (op.op_type for outer in subgraphs(node.proto) for graph in all_graphs(outer) for op in graph.node)
        if not SELECTING.isdisjoint(inner):
            return [name for name in (*node.inputs, *node.captures) if name]
        if not node.is_standard:
            return []
        if node.op_type in SELECTING:
            return [name for name in node.inputs if name]
        slots = operator(node.op_type).sizes if node.op_type not in COUNTING else frozenset[int]()
        return [node.inputs[k] for k in sorted(slots) if k < len(node.inputs) and node.inputs[k]]

    def _shape_of(self, node: Node) -> list[str]:
        """The inputs whose shapes decide on the shapes of a node's outputs."""
        slots = operator(node.op_type).shaped_like if node.is_standard else None
        names = (*node.inputs, *node.captures) if slots is None else [node.inputs[k] for k in slots]
        return [name for name in names if name]

    def _is_known(self, out: str, node: Node) -> bool:
        """Whether inference finds a shape without unknown sizes. What a file says of its outputs may be one example."""
        shape = self._inferred(node).get(out) if out in self._outputs else self._model.info(out).shape
        return shape is not None and all(isinstance(dim, int) or dim in self._sizes for dim in shape)

    def _inferred(self, node: Node) -> dict[str, tuple[int | str | None, ...] | None]:
        """The shapes of a node's outputs, from those of its inputs alone."""
        constants = self._model.initializers
        small = {
            name: constants[name].numpy()
            for name in node.inputs
            if name in constants and constants[name].nbytes <= INLINE_LIMIT and constants[name].dtype != "string"
        }
        inferred = output_types(self._model, node, {}, small)
        return {name: type_of(kind)[1] for name, kind in inferred.items()}


def _source(model: Model, output: str) -> str:
    """The operator that computes an output, Identity and Cast looked through."""
    index = model.producer.get(output)
    while index is not None and model.nodes[index].op_type in _RENAMES and model.nodes[index].is_standard:
        index = model.producer.get(model.nodes[index].inputs[0])
    return "" if index is None or not model.nodes[index].is_standard else model.nodes[index].op_type
