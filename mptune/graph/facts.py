"""One cached view of a network: who computes and reads each value, what each depends on, and which types may change.

Notions that stand beside each other, since they answer different questions:

- *static*: is a value computed from constants alone, also from quantised ones? Patterns and hazards ask it.
- *folded*: does a runtime compute a value before it runs the model, from constants and shapes? Costs, inspection and
  the written models ask it. Runtimes keep what stands behind QuantizeLinear and DequantizeLinear.
- *shape nodes*: which nodes compute what is used as a shape? These stay FP32, whatever they are computed from.
- *dependent outputs*: which outputs have a shape that floating-point values decide? Their rows are compared as sets.
- *rules*: which inputs and outputs of a node may change to a reduced precision, and to which?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from mptune.graph import ops
from mptune.graph.loading.model import Model, Node, once, output_types
from mptune.graph.loading.reading import INLINE_LIMIT
from mptune.graph.loading.tensors import all_graphs, fixed_shape, subgraphs, type_of
from mptune.graph.ops import SHAPE_OF, NodeRule, OperatorSchema, operator
from mptune.graph.plan import Precision

_FLOATS = frozenset({"float", "float16", "double", "bfloat16"})
_INTEGERS = ("int", "uint")
_MOST_VALUES = 256  # of a walk


@dataclass(frozen=True)
class DependentOutput:
    """An output of the model whose shape depends on floating-point values, or whose rows a TopK selects."""

    name: str
    axis: int | None  # whose size depends on them; None where the model does not tell
    nodes: tuple[str, ...]  # names of the nodes that decide, in topological order
    # Columns of positions in another value, which need not agree where rows do: the box index of NonMaxSuppression.
    index_columns: tuple[int, ...] = ()
    is_indices: bool = False  # what NonZero returns, where the first axis holds the coordinates of one position
    is_selection: bool = False  # its shape is fixed, and values decide which rows it has, and their order: a TopK


@once
def facts_of(model: Model) -> Facts:
    """The facts of a model; made once."""
    return Facts(model)


class Facts:
    """See above. Identity, Dropout and Casts between FP32, FP16 and BF16 are looked through: they are aliases."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = frozenset(name for name, constant in model.initializers.items() if not constant.overridable)
        self.static = self._computed_from(self.constants)  # these among them
        self.alias_nodes: dict[int, Node] = {}  # of values that are not static, by index
        self._root: dict[str, str] = {}
        self._outputs = frozenset(output.name for output in model.outputs)
        # Names of sizes that inputs have.
        self.input_sizes = {dim for info in model.inputs for dim in info.shape or () if isinstance(dim, str)}
        for node in model.nodes:
            if not node.is_standard or not node.inputs or not node.outputs or node.inputs[0] in self.static:
                continue
            is_alias = node.op_type in ops.ALIASES and not any(node.outputs[1:])
            if node.op_type == "Cast":
                is_alias = all(model.info(t).dtype in ops.FLOAT_TYPES for t in (node.inputs[0], node.outputs[0]))
            if is_alias:
                self.alias_nodes[node.index] = node
                self._root[node.outputs[0]] = self.root(node.inputs[0])

    def _computed_from(self, values: Collection[str], sources: Collection[str] = ()) -> frozenset[str]:
        """These values, and what is computed from them and from what ``sources`` (operators) give alone."""
        there = set(values)
        for node in self.model.nodes:
            if not node.is_standard or node.op_type in ops.RANDOM or node.has_subgraph:
                continue
            if node.op_type in sources or there.issuperset(filter(None, node.inputs)):
                there.update(filter(None, node.outputs))
        return frozenset(there)

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
            indices.update(self.model.producer[name] for out in node.outputs for name in self._names(out)[1:])
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
        return self.is_static(tensor) and self.is_single(self.root(tensor))

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

    def onward(self, values: Iterable[str], operators: Collection[str]) -> Iterator[str]:
        """Values, and what these operators compute from them, one behind another; each once, and not without end."""

        def results(value: str) -> list[str]:
            readers = (reader for reader in self.readers(value) if reader.op_type in operators)
            return [out for reader in readers for out in reader.outputs if out]

        return walk(values, results)

    def reduced_axes(self, node: Node) -> tuple[int, ...]:
        """Over which axes a reduction goes, ascending; none where they are all, or not known."""
        rank, axes = len(self.model.info(node.inputs[0]).shape or ()), attribute(node, "axes", ())
        if len(node.inputs) > 1 and node.inputs[1] in self.model.initializers:
            axes = self.model.initializers[node.inputs[1]].numpy().ravel().tolist()
        return tuple(sorted(int(axis) % rank for axis in axes)) if rank else ()

    # -- what is folded, and whose shape values decide ------------------------------------------------------------

    @cached_property
    def folded(self) -> frozenset[str]:
        """Constants, and values that a runtime computes from constants and shapes before it runs the model."""
        return self._shape_walk[0]

    @cached_property
    def folded_nodes(self) -> frozenset[int]:
        """Indices of the nodes that compute such values, Constants among them."""
        return frozenset(index for name in self.folded if (index := self.model.producer.get(name)) is not None)

    @property
    def deciding_nodes(self) -> tuple[Node, ...]:
        """The nodes whose floating-point inputs decide the shape of what they compute, in topological order."""
        return self._shape_walk[2]

    @cached_property
    def row_outputs(self) -> tuple[DependentOutput, ...]:
        """The outputs whose shape such nodes decide, then those whose rows a TopK selects: compared as sets of rows.

        Rows are followed by their number: a value that is computed from selected rows, and may have an axis of their
        number, has them still. So gathers, attention among the rows and heads are passed, and a sum over them is not.
        """
        model, firsts = self.model, {info.shape[0] for info in self.model.inputs if info.shape}
        selected: dict[str, dict[int, int]] = {}  # value -> index of a TopK -> number of rows

        def is_open(dim: int | str | None) -> bool:
            return not isinstance(dim, int) and dim not in self.input_sizes

        def axis_of(number: int, shape: Sequence[int | str | None]) -> int | None:
            # A batch may have this number by chance; behind layers and batch, rows lie on axis 2.
            axes = (k for k in ((1, 0, 2) if len(shape) > 3 else (1, 0)) if k < len(shape) and shape[k] == number)
            return next((k for k in axes if k or number not in firsts), None)

        for node in model.nodes:
            numbers = {k: n for name in (*node.inputs, *node.captures) for k, n in selected.get(name, {}).items()}
            if node.is_standard and node.op_type == "TopK" and not self.is_static(node.inputs[0]):
                count = int(self.number(node.inputs[1]) or 0)
                numbers |= {node.index: count} if count > 1 else {}
            for out in node.outputs if numbers else ():
                shape = model.info(out).shape if out else ()
                may_fit = shape is None or any(map(is_open, shape))
                selected[out] = {k: n for k, n in numbers.items() if may_fit or axis_of(n, shape or ()) is not None}
        rows = []
        for info in model.outputs:
            shape, deciding = info.shape or (), self._shape_walk[1].get(info.name)
            if deciding is not None:
                maker = origin(model, info.name, ("Identity", "Cast"))[1]
                source = "" if maker is None or not maker.is_standard else maker.op_type
                axis = 1 if source == "NonZero" else next((k for k, dim in enumerate(shape) if is_open(dim)), None)
                names = tuple(node.name for node in self.deciding_nodes if node.name in deciding)
                columns = (2,) if source == "NonMaxSuppression" else ()
                rows.append(DependentOutput(info.name, axis, names, columns, source == "NonZero"))
            elif selected.get(info.name):
                index, number = max(selected[info.name].items())  # the last one
                if (axis := axis_of(number, shape)) is not None:
                    rows.append(DependentOutput(info.name, axis, (model.nodes[index].name,), is_selection=True))
        return tuple(sorted(rows, key=lambda output: output.is_selection))

    @cached_property
    def _shape_walk(self) -> tuple[frozenset[str], dict[str, frozenset[str]], tuple[Node, ...]]:
        """Folded values; value -> names of the nodes whose floats decide its shape; all these nodes."""
        model, folded, unknown = self.model, set(self.constants), set[str]()
        from_floats = {info.name for info in model.inputs if info.dtype in _FLOATS}
        deciding: dict[str, frozenset[str]] = {}
        nodes = []
        for node in model.nodes:
            outs = [out for out in node.outputs if out]
            read = [name for name in (*node.inputs, *node.captures) if name]
            is_measure = node.is_standard and node.op_type in SHAPE_OF
            if is_measure and read[0] in unknown:
                from_floats.update(outs if read[0] in deciding else ())
                continue
            stays = not node.is_standard or node.has_subgraph or node.op_type in ops.RANDOM | ops.QUANTISING
            if is_measure or (not stays and (read or node.op_type == "Constant") and folded.issuperset(read)):
                folded.update(outs)
                continue
            from_floats.update(() if from_floats.isdisjoint(read) else outs)
            from_floats.update(out for out in outs if model.info(out).dtype in _FLOATS)
            # The inputs whose values, and those whose shapes, decide on the shapes of the outputs.
            row = operator(node.op_type if node.is_standard else "")
            inner = {op.op_type for g in subgraphs(node.proto) for graph in all_graphs(g) for op in graph.node}
            slots = () if "counts" in row.traits else sorted(row.sizes)
            sizing = [node.inputs[k] for k in slots if k < len(node.inputs) and node.inputs[k]]
            if "selects" in row.traits or not ops.SELECTING.isdisjoint(inner):
                sizing = read
            shaping = read if row.shaped_like is None else [node.inputs[k] for k in row.shaped_like]
            # Outputs of which inference finds no whole shape. What a file says of its outputs may be one example.
            open_outs = []
            for out in outs:
                shape = model.info(out).shape
                if out in self._outputs:
                    constants = [model.initializers[name] for name in node.inputs if name in model.initializers]
                    small = {c.name: c.numpy() for c in constants if c.nbytes <= INLINE_LIMIT and c.dtype != "string"}
                    kind = output_types(model, node, {}, small).get(out)
                    shape = None if kind is None else type_of(kind)[1]
                if shape is None or not all(isinstance(dim, int) or dim in self.input_sizes for dim in shape):
                    open_outs.append(out)
            if not folded.issuperset(sizing) or not unknown.isdisjoint(shaping):
                unknown.update(open_outs)  # before the run
            passed = frozenset[str]().union(*(deciding.get(name, ()) for name in shaping))
            if not from_floats.isdisjoint(sizing):
                nodes.append(node)
                passed |= {node.name}
            if passed:
                deciding.update(dict.fromkeys(open_outs, passed))
        return frozenset(folded), deciding, tuple(nodes)

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
        from_shapes = self._computed_from(self.constants | small, SHAPE_OF) - self.static
        pure = {node.index for node in model.nodes if not from_shapes.isdisjoint(node.outputs)}
        candidates = (model.nodes[i] for i in as_shape if i not in as_data or i in pure)
        # Shape and Size read values of any type, and compute integers.
        return frozenset(node.index for node in candidates if not (node.is_standard and node.op_type in SHAPE_OF))

    @property
    def shape_inputs(self) -> tuple[str, ...]:
        """The integer inputs of a fixed shape, rank 0 or 1, whose values decide a shape: TensorRT's shape tensors."""
        model, names = self.model, []
        for info in model.inputs:
            readers = model.consumers.get(info.name, ()) if info.dtype.startswith(_INTEGERS) else ()
            is_shape = any(_uses(model.nodes[k], info.name, k in self.shape_nodes, False)[0] for k in readers)
            names += [info.name] if is_shape and len(fixed_shape(info.shape) or (0, 0)) <= 1 else []
        return tuple(names)


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


# -- what an engine computes as one operator ------------------------------------------------------------------------

# Names of nodes, all of one group and in topological order, that an engine computes as one operator, FP32 inside:
# norms above all that are written out in the model. ONNX Runtime's kernel takes the statistics in FP32 whatever the
# type of what it reads, and rounds once, at its end. The engine says which nodes (``mptune.engines.ort.fusions``).
FusedNodes = tuple[str, ...]
# The precision that an engine is asked about: in BF16 the same nodes are not always fused, so each step is rounded.
FUSED_IN = Precision.FP16


def steps_inside(fused: Iterable[FusedNodes]) -> frozenset[str]:
    """The names of the nodes whose results stay inside, in FP32: all but the last ones."""
    return frozenset(name for nodes in fused for name in nodes[:-1])


def values_inside(model: Model, fused: Iterable[FusedNodes]) -> frozenset[str]:
    """The results of the steps inside, which FP16 does not hold."""
    steps = steps_inside(fused)
    return frozenset(out for node in model.nodes if node.name in steps for out in node.outputs if out)


# -- attributes, and what a reduced precision would change ------------------------------------------------------------


def attribute(node: Node, name: str, default: Any = None) -> Any:
    """The value of an attribute; the default where it is not stated."""
    stated = next((a for a in node.proto.attribute if a.name == name), None)
    return default if stated is None else onnx.helper.get_attribute_value(stated)


@once
def node_rules(model: Model) -> tuple[NodeRule, ...]:
    """What a reduced precision would change about each node, [nodes]; made once per model."""
    return tuple(_rule_of(model, node) for node in model.nodes)


def node_rule(model: Model, node: Node) -> NodeRule:
    """What a reduced precision would change about ``node``, one of the model's."""
    return node_rules(model)[node.index]


def _rule_of(model: Model, node: Node) -> NodeRule:
    """The operators' own schemas decide, and what they cannot say, the table of operators (``Operator.fp32``).

    An input or output follows the node's precision when its type constraint admits ``tensor(float)`` and the reduced
    type, such as ``tensor(float16)``.
    """
    schema, info = schema_of(model, node), model.info
    op_type = node.op_type if node.is_standard else ""
    row, given_inputs = operator(op_type), {i for i, name in enumerate(node.inputs) if name}
    float_inputs = tuple(i for i in sorted(given_inputs) if info(node.inputs[i]).is_float32)
    float_outputs = tuple(i for i, name in enumerate(node.outputs) if name and info(name).is_float32)
    # The attribute that states the type of what it computes, and the type that a Cast to FP32 reads.
    type_attribute = {"Cast": "to", "ConstantOfShape": "value"}.get(op_type)
    source = info(node.inputs[0]).dtype if op_type == "Cast" and float_outputs else ""
    is_foreign = schema is None and not node.is_standard
    is_shape = bool(float_inputs or float_outputs) and node.index in facts_of(model).shape_nodes
    is_scattered_sum = op_type.startswith("Scatter") and attribute(node, "reduction", b"none") != b"none"
    of_norm = node.inputs[1:] if op_type == "BatchNormalization" else ()
    constants = (model.initializers[name].numpy() for name in of_norm if name in model.initializers)
    is_beyond = any(np.abs(values).max(initial=0) > Precision.FP16.largest for values in constants)
    reasons = (
        # What its place in the model, or its domain, rules out.
        (is_foreign, f"operator of the domain {node.domain!r}: its types are not known to ONNX"),
        (node.has_subgraph, f"{node.op_type} runs a subgraph, which stays FP32"),
        (op_type == "Constant", "a constant is stored in each type that reads it"),
        (is_shape, "computes a shape: FP16 is not exact above 2048, and TensorRT takes no FP16 shapes"),
        (schema is None, f"ONNX has no operator {node.op_type!r} at opset {model.opset}"),
        # What the table rules out, or an attribute.
        (not row.fp32_inputs and (not row.fp32_with or row.fp32_with & given_inputs), row.fp32),
        (is_scattered_sum, "reduces while it scatters: ONNX Runtime's CPU provider refuses that in FP16"),
        (is_quantised(node), "scales must stay FP32: small scales vanish in FP16"),
        (is_beyond, "its constants are beyond FP16's range: in it, the norm would be another one"),
        (source == "string", "parses text; done once in FP32, then cast"),
    )
    fixed = next((why for holds, why in reasons if holds and why), None)
    if fixed or schema is None:
        return NodeRule(fixed=fixed)
    if op_type in SHAPE_OF or (type_attribute and not float_outputs):  # whatever the type is
        return NodeRule(reads_any=float_inputs)
    if source in ops.FLOAT_TYPES:
        return NodeRule(reads_any=float_inputs, fixed="computes nothing: goes where a plan makes it needless")
    if type_attribute:
        return NodeRule(schema.admitted(schema.output_type(0)), (), (0,), (), type_attribute)
    # What the schema says: types of inputs decide, and outputs follow.
    for name in filter(None, (*node.inputs, *node.outputs)):
        if info(name).dtype in ops.OPAQUE_TYPES:
            return NodeRule(fixed=f"{name!r} is no tensor, or of a type that ONNX cannot infer")
    given = {schema.input_type(i) for i in given_inputs}
    for i in float_outputs:  # such as a state whose optional input is omitted
        parameter = schema.output_type(i)
        if parameter not in given and Precision.FP16 in schema.admitted(parameter):
            what = f"the type of its output {node.outputs[i]!r} does not follow from those of its inputs"
            return NodeRule(fixed=what)
    admitting = (i for i in float_inputs if Precision.FP16 in schema.admitted(schema.input_type(i)))
    inputs = tuple(i for i in admitting if i not in row.fp32_inputs)
    if not inputs:
        return NodeRule(fixed=f"{node.op_type} takes no input that could be FP16" if float_inputs else None)
    bound = {schema.input_type(i) for i in inputs}
    outputs = tuple(i for i in float_outputs if schema.output_type(i) in bound)
    return NodeRule(frozenset.intersection(*map(schema.admitted, bound)), inputs, outputs)


def schema_of(model: Model, node: Node) -> OperatorSchema | None:
    """The schema of a node's operator: ONNX's, else that of the runtime that defines it; None where there is none."""
    schema = ops.onnx_schema(node.op_type, model.opset) if node.is_standard else None
    return schema or model.runtime.schemas.get((node.domain, node.op_type))


def is_quantised(node: Node) -> bool:
    """Whether an operator of a runtime computes with quantised values: its FP32 inputs are their scales."""
    is_named_so = node.op_type.startswith(ops.QUANTISED_NAMES) and node.op_type not in ops.WEIGHTS_ONLY
    return is_named_so and node.domain.startswith("com.microsoft")


def casts_integers(model: Model, node: Node) -> bool:
    """Whether a node casts integers or truth values to FP32."""
    if node.op_type != "Cast" or not node.is_standard or not model.info(node.outputs[0]).is_float32:
        return False
    return model.info(node.inputs[0]).dtype.startswith(("int", "uint", "bool"))


def origin(model: Model, tensor: str, passed: Collection[str]) -> tuple[str, Node | None]:
    """The value that ``tensor`` was before these operators, over their first inputs; and the node that computes it."""
    while True:
        node = model.nodes[model.producer[tensor]] if tensor in model.producer else None
        if node is None or node.op_type not in passed or not node.inputs:
            return tensor, node
        tensor = node.inputs[0]


def walk(start: Iterable[str], onward: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Values from the first ones on, each once, as far as ``onward`` leads, and not without end."""
    stack, done = list(start), set[str]()
    while stack and len(done) < _MOST_VALUES:
        value = stack.pop()
        if value not in done:
            done.add(value)
            yield value
            stack += onward(value)


def is_dequantised(model: Model, tensor: str) -> bool:
    """Whether a value comes out of DequantizeLinear, maybe through views."""
    maker = origin(model, tensor, ops.MOVEMENT)[1]
    return maker is not None and maker.op_type == "DequantizeLinear"
