"""One cached view of a network: who computes and reads each value, and what each value depends on.

Four notions stand beside each other, since they answer four questions:

- *static*: is a value computed from constants alone? Patterns and hazards ask it: a weight is one, however it is
  written down, also one that is stored quantised.
- *folded*: does a runtime compute a value before it runs the model, from constants and shapes? Costs, inspection and
  the written models ask it. Values behind QuantizeLinear and DequantizeLinear are not: runtimes keep these. Nor is what
  depends on a shape that values decide.
- *shape nodes*: which nodes compute what is used as a shape? These stay FP32, whatever they are computed from.
- *dependent outputs*: which outputs have a shape that floating-point values decide? Their rows are compared as sets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx

from mptune.graph.loading.inference import INLINE_LIMIT
from mptune.graph.loading.model import Model, Node, once, output_types
from mptune.graph.loading.tensors import all_graphs, fixed_shape, subgraphs, type_of
from mptune.graph.ops import ALIASES, COUNTING, FLOAT_TYPES, QUANTISING, RANDOM, SELECTING, SHAPE_OF, operator

_FLOATS = frozenset({"float", "float16", "double", "bfloat16"})

_INTEGERS = ("int", "uint")


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


@once
def facts_of(model: Model) -> Facts:
    """The facts of a model; made once."""
    return Facts(model)


class Facts:
    """See above. Identity, Dropout and Casts between FP32, FP16 and BF16 are looked through: they are aliases.

    Attributes:
        static: constants, and what is computed from them alone.
        alias_nodes: the aliases of values that are not static, by index.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = frozenset(name for name, constant in model.initializers.items() if not constant.overridable)
        self._from_constants = self._computed_from(self.constants)
        outputs = (name for index in self._from_constants for name in model.nodes[index].outputs if name)
        self.static = self.constants.union(outputs)
        self.alias_nodes: dict[int, Node] = {}
        self._root: dict[str, str] = {}
        self._outputs = frozenset(output.name for output in model.outputs)
        for node in model.nodes:
            if self._is_alias(node):
                self.alias_nodes[node.index] = node
                self._root[node.outputs[0]] = self.root(node.inputs[0])

    def _is_alias(self, node: Node) -> bool:
        if not node.is_standard or not node.inputs or not node.outputs or node.inputs[0] in self.static:
            return False
        if node.op_type == "Cast":
            return all(self.model.info(t).dtype in FLOAT_TYPES for t in (node.inputs[0], node.outputs[0]))
        return node.op_type in ALIASES and not any(node.outputs[1:])

    def _computed_from(self, values: Collection[str], sources: Collection[str] = ()) -> frozenset[int]:
        """Indices of the nodes that compute from these values, and from what ``sources`` (operators) give, alone."""
        there, indices = set(values), set[int]()
        for node in self.model.nodes:
            if not node.is_standard or node.op_type in RANDOM or node.has_subgraph:
                continue
            if node.op_type in sources or all(name in there for name in node.inputs if name):
                indices.add(node.index)
                there.update(name for name in node.outputs if name)
        return frozenset(indices)

    # -- who computes and reads a value ---------------------------------------------------------------------------

    def root(self, tensor: str) -> str:
        """The value that ``tensor`` is another name of."""
        return self._root.get(tensor, tensor)

    def producer(self, tensor: str) -> Node | None:
        """The node that computes a value; None for graph inputs and static values."""
        root = self.root(tensor)
        index = None if root in self.static else self.model.producer.get(root)
        return None if index is None else self.model.nodes[index]

    def readers(self, tensor: str) -> list[Node]:
        """The nodes that read a value under any of its names, each once; Shape and Size do not count."""
        indices = [index for name in self._names(tensor) for index in self.model.consumers.get(name, ())]
        nodes = [self.model.nodes[index] for index in dict.fromkeys(indices) if index not in self.alias_nodes]
        return [node for node in nodes if node.op_type not in SHAPE_OF]

    def _names(self, tensor: str) -> list[str]:
        """The name of a value, and those that aliases give it."""
        names = [tensor]
        for name in names:  # grows
            readers = self.model.consumers.get(name, ())
            names += [self.alias_nodes[index].outputs[0] for index in readers if index in self.alias_nodes]
        return names

    def only_reader(self, node: Node) -> Node | None:
        """The one node that reads a node's result; None where there are several, or it leaves the model."""
        if not node.outputs or self.is_output(node.outputs[0]):
            return None
        readers = self.readers(node.outputs[0])
        return readers[0] if len(readers) == 1 else None

    def is_output(self, tensor: str) -> bool:
        """Whether a value leaves the model under any of its names."""
        return not self._outputs.isdisjoint(self._names(tensor))

    def with_aliases(self, nodes: Collection[int]) -> frozenset[int]:
        """The nodes, with the aliases of what they compute and those that nothing else reads."""
        indices = set(nodes)
        for index in nodes:
            node = self.model.nodes[index]
            stack = list(node.outputs)
            while stack:
                for reader in self.model.consumers.get(stack.pop(), ()):
                    if reader in self.alias_nodes and reader not in indices:
                        indices.add(reader)
                        stack += self.model.nodes[reader].outputs
            for at in node.inputs:
                while (maker := self.model.producer.get(at, -1)) in self.alias_nodes and maker not in indices:
                    if self.is_output(at) or not all(r.index in nodes for r in self.readers(at)):
                        break
                    indices.add(maker)
                    at = self.model.nodes[maker].inputs[0]
        return frozenset(indices)

    # -- what a value is ------------------------------------------------------------------------------------------

    def is_static(self, tensor: str) -> bool:
        """Whether a value is computed from constants alone."""
        return self.root(tensor) in self.static

    def is_scalar(self, tensor: str) -> bool:
        """Whether a value is static and a single number."""
        shape = fixed_shape(self.model.info(self.root(tensor)).shape)
        return self.is_static(tensor) and shape is not None and math.prod(shape) == 1

    def is_single(self, tensor: str) -> bool:
        """Whether a value is a single number per model run, static or computed from shapes: a scale, not a mask."""
        shape = self.model.info(tensor).shape
        return shape is not None and all(dim == 1 for dim in shape)

    def is_vector(self, tensor: str) -> bool:
        """Whether a value is static with at most one dimension that is not 1: a bias, a scale per channel."""
        shape = self.model.info(self.root(tensor)).shape
        return self.is_static(tensor) and shape is not None and sum(dim != 1 for dim in shape) <= 1

    def number(self, tensor: str) -> float | None:
        """The value of a constant that is a single number."""
        constant = self.model.initializers.get(self.root(tensor))
        if constant is None or math.prod(constant.shape) != 1:
            return None
        value = np.asarray(constant.numpy()).reshape(-1)[0]
        return float(value) if np.issubdtype(value.dtype, np.number) else None

    def varying(self, node: Node) -> list[str]:
        """The inputs of a node that are not static."""
        return [i for i in node.inputs if i and not self.is_static(i)]

    def other(self, node: Node, tensor: str) -> str:
        """The other operand of a binary node; "" where it has not exactly two, or both are ``tensor``."""
        if len(node.inputs) != 2:
            return ""
        roots, wanted = [self.root(i) for i in node.inputs], self.root(tensor)
        return node.inputs[1 - roots.index(wanted)] if roots.count(wanted) == 1 else ""

    def reduced_axes(self, node: Node) -> tuple[int, ...]:
        """Over which axes a reduction goes, ascending; none where they are all, or not known."""
        rank, stated = len(self.model.info(node.inputs[0]).shape or ()), attribute(node, "axes")
        axes = list(stated) if isinstance(stated, (list, tuple)) else []
        if len(node.inputs) > 1 and node.inputs[1] in self.model.initializers:
            axes = self.model.initializers[node.inputs[1]].numpy().ravel().tolist()
        return tuple(sorted(int(axis) % rank for axis in axes)) if rank else ()

    # -- what is folded, and whose shape values decide ------------------------------------------------------------

    @cached_property
    def folded(self) -> frozenset[str]:
        """Constants, and values that a runtime computes from constants and shapes before it runs the model."""
        return frozenset(self._shapes.folded)

    @cached_property
    def folded_nodes(self) -> frozenset[int]:
        """Indices of the nodes that compute such values, Constants among them."""
        return frozenset(index for name in self.folded if (index := self.model.producer.get(name)) is not None)

    @property
    def deciding_nodes(self) -> tuple[Node, ...]:
        """The nodes whose floating-point inputs decide the shape of what they compute, in topological order."""
        return tuple(self._shapes.nodes)

    @cached_property
    def dependent_outputs(self) -> tuple[DependentOutput, ...]:
        """The outputs whose shape such nodes decide, directly or not."""
        order, dependent = {node.name: node.index for node in self.model.nodes}, []
        sizes = {dim for info in self.model.inputs for dim in info.shape or () if isinstance(dim, str)}
        for info in self.model.outputs:
            deciding = self._shapes.deciding.get(info.name)
            if deciding is None:
                continue
            index = self.model.producer.get(info.name)
            while index is not None and self.model.nodes[index].op_type in ("Identity", "Cast"):
                index = self.model.producer.get(self.model.nodes[index].inputs[0])
            source = "" if index is None or not self.model.nodes[index].is_standard else self.model.nodes[index].op_type
            # The first axis whose size is neither fixed nor an input's.
            open_axes = (k for k, d in enumerate(info.shape or ()) if not isinstance(d, int) and d not in sizes)
            axis = 1 if source == "NonZero" else next(open_axes, None)
            names = tuple(sorted(deciding, key=order.__getitem__))
            columns = (2,) if source == "NonMaxSuppression" else ()
            dependent.append(DependentOutput(info.name, axis, names, columns, source == "NonZero"))
        return tuple(dependent)

    @cached_property
    def _shapes(self) -> _ShapeWalk:
        walk = _ShapeWalk(self)
        for node in self.model.nodes:
            walk.visit(node)
        return walk

    # -- what is used as a shape ----------------------------------------------------------------------------------

    @cached_property
    def shape_nodes(self) -> frozenset[int]:
        """Indices of the nodes that compute shapes.

        A node does where each use of its results leads to a shape input and to nothing else. It also does where it
        computes from shapes (or from integer inputs of rank 1 and less) alone, and a shape input is among its uses:
        such a value is small, and computing it in FP32 costs nothing.
        """
        model, as_shape, as_data = self.model, set[int](), set[int]()
        for node in reversed(model.nodes):
            for name in node.outputs:
                if name in self._outputs:
                    as_data.add(node.index)
                for index in model.consumers.get(name, ()) if name else ():
                    shape, data = _uses(model.nodes[index], name, index in as_shape, index in as_data)
                    as_shape.update([node.index] if shape else ())
                    as_data.update([node.index] if data else ())
        integers = [info for info in model.inputs if info.dtype.startswith(_INTEGERS) and info.shape is not None]
        small = {info.name for info in integers if len(info.shape or ()) <= 1}
        from_shapes = self._computed_from(self.constants | small, SHAPE_OF) - self._from_constants
        candidates = (model.nodes[i] for i in as_shape if i not in as_data or i in from_shapes)
        # Shape and Size read values of any type, and compute integers.
        return frozenset(node.index for node in candidates if not (node.is_standard and node.op_type in SHAPE_OF))

    @property
    def shape_inputs(self) -> tuple[str, ...]:
        """The integer inputs of a fixed shape, rank 0 or 1, whose values decide a shape: TensorRT's shape tensors."""
        model = self.model

        def decides(name: str) -> bool:
            readers = model.consumers.get(name, ())
            return any(_uses(model.nodes[k], name, k in self.shape_nodes, False)[0] for k in readers)

        small = (i for i in model.inputs if i.dtype.startswith(_INTEGERS) and len(fixed_shape(i.shape) or (0, 0)) <= 1)
        return tuple(info.name for info in small if decides(info.name))


def _uses(reader: Node, name: str, shape: bool, data: bool) -> tuple[bool, bool]:
    """Whether a node uses a value for a shape, and whether for anything else, given the same of the node's results."""
    if reader.is_standard and reader.op_type in SHAPE_OF:
        return False, False  # the shape of the value is read, not the value
    if name in reader.captures:  # what the subgraph does with it is not looked at
        return True, True
    own = operator(reader.op_type).sizes if reader.is_standard else frozenset[int]()
    slots = {slot for slot, given in enumerate(reader.inputs) if given == name}
    others = bool(slots - own)
    return bool(slots & own) or (others and shape), others and (data or not shape)


class _ShapeWalk:
    """What the shapes of a model depend on, grown node by node in topological order.

    Attributes:
        folded: see ``Facts``.
        deciding: value -> names of the nodes whose floating-point inputs decide its shape.
        nodes: of the model whose output shape depends on floating-point values themselves.
    """

    def __init__(self, facts: Facts) -> None:
        self._model = model = facts.model
        self._outputs = {info.name for info in model.outputs}
        self._sizes = {dim for info in model.inputs for dim in info.shape or () if isinstance(dim, str)}
        self._from_floats = {info.name for info in model.inputs if info.dtype in _FLOATS}
        self._unknown: set[str] = set()  # values of a shape that is not known before the run
        self.folded = set(facts.constants)
        self.nodes: list[Node] = []
        self.deciding: dict[str, frozenset[str]] = {}

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
        deciding, shaped = self._deciding_inputs(node, read), self._shaping_inputs(node, read)
        open_outs = [out for out in outs if not self._has_known_shape(out, node)]
        if any(name not in self.folded for name in deciding) or any(name in self._unknown for name in shaped):
            self._unknown.update(open_outs)
        passed = frozenset[str]().union(*(self.deciding.get(name, frozenset()) for name in shaped))
        if any(name in self._from_floats for name in deciding):
            self.nodes.append(node)
            passed |= {node.name}
        if passed:
            self.deciding.update(dict.fromkeys(open_outs, passed))

    def _is_folded(self, node: Node, read: list[str]) -> bool:
        if not node.is_standard or node.has_subgraph or node.op_type in RANDOM | QUANTISING:
            return False
        return (bool(read) or node.op_type == "Constant") and all(name in self.folded for name in read)

    def _deciding_inputs(self, node: Node, read: list[str]) -> Iterable[str]:
        """The inputs whose values decide on the shapes of a node's outputs."""
        inner = (op.op_type for outer in subgraphs(node.proto) for graph in all_graphs(outer) for op in graph.node)
        if not SELECTING.isdisjoint(inner) or (node.is_standard and node.op_type in SELECTING):
            return read
        if not node.is_standard or node.op_type in COUNTING:
            return ()
        slots = sorted(operator(node.op_type).sizes)
        return [node.inputs[k] for k in slots if k < len(node.inputs) and node.inputs[k]]

    def _shaping_inputs(self, node: Node, read: list[str]) -> Iterable[str]:
        """The inputs whose shapes decide on the shapes of a node's outputs."""
        slots = operator(node.op_type).shaped_like if node.is_standard else None
        return read if slots is None else [node.inputs[k] for k in slots]

    def _has_known_shape(self, out: str, node: Node) -> bool:
        """Whether inference finds a shape without unknown sizes. What a file says of its outputs may be one example."""
        shape = self._model.info(out).shape
        if out in self._outputs:
            constants = self._model.initializers
            small = {
                name: constants[name].numpy()
                for name in node.inputs
                if name in constants and constants[name].nbytes <= INLINE_LIMIT and constants[name].dtype != "string"
            }
            kind = output_types(self._model, node, {}, small).get(out)
            shape = None if kind is None else type_of(kind)[1]
        return shape is not None and all(isinstance(dim, int) or dim in self._sizes for dim in shape)


def attribute(node: Node, name: str) -> object:
    """The value of an attribute; None where it is not stated."""
    stated = next((a for a in node.proto.attribute if a.name == name), None)
    return None if stated is None else onnx.helper.get_attribute_value(stated)


def float_attribute(node: Node, name: str, default: float) -> float:
    """The value of a float attribute; the default where it is not stated."""
    stated = attribute(node, name)
    return float(stated) if isinstance(stated, float) else default
