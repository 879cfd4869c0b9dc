"""Carry out a plan: the same model with constants in reduced precisions and explicit Casts; and the parts of its file.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged, but for
``GroupedModel.io``; each value is cast at most once per type, right after its producer; constants are converted, never
cast at run time; shape, index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan
changes nothing. Beside Casts it adds nothing but a subtraction of zero where TensorRT-RTX needs one
(``mptune.graph.value_types``), and a Clip before the Cast of a mask that is made of constants beyond the range
(``mptune.graph.hazards.masks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.facts import attribute, node_rule
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.hazards.masks import is_held
from mptune.graph.interface import with_reduced_interface
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import STANDARD_DOMAINS, declaration, fill_value
from mptune.graph.ops import COPIES, FLOAT_TYPES, OPAQUE_TYPES, RECURRENT
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import Resolution, ValueTypes, new_suffix, value_types
from mptune.graph.writing import weights
from mptune.graph.writing.weights import NeededConstant, WeightBank, inline_tensor

_CLIP_HAS_INPUTS = 11  # from this operator set on, Clip reads its limits
_METADATA_PREFIX = "mptune."  # of the keys in ``metadata_props`` that say what made a model


class Rewriter:
    """Writes typed models of one model. Made once; a plan then takes milliseconds."""

    def __init__(self, grouped: GroupedModel, bank: WeightBank | None = None) -> None:
        self.types = value_types(grouped)
        self._model = model = grouped.model
        self._bank = bank
        self._suffixes = {precision: new_suffix(model, str(precision)) for precision in PRECISIONS}
        self._held = {precision: new_suffix(model, f"{precision}_held") for precision in REDUCED}
        self._barrier, self._zero = new_suffix(model, "barrier"), new_suffix(model, "zero")
        self._frame = frame_of(model)
        reduced = with_reduced_interface(grouped)
        self._of_mixed = self if reduced is grouped else Rewriter(reduced, bank)
        # Constant nodes that the bank holds become constants of the graph; the others stay nodes in FP32.
        in_bank = {} if bank is None else bank.places[Precision.FP32]
        by_name = {n: c.node_index for n, c in model.initializers.items() if c.node_index is not None}
        self._constant_nodes = {name: index for name, index in by_name.items() if name not in in_bank}
        self._moved = frozenset(index for name, index in by_name.items() if name in in_bank)

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the typed model to ``path``, which must lie in the weight bank's folder."""
        proto, constants = self._typed(plan)
        stored = inline_tensor if self._bank is None else self._bank.tensor_or_inline
        proto.graph.initializer.extend(stored(*needed) for needed in constants)
        return write_bytes(path, [proto.SerializeToString(deterministic=True)])

    def export(self, plan: PrecisionPlan, path: Path, metadata: Mapping[str, str] | None = None) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        ``metadata`` is what to say of it in ``metadata_props``, whose keys get the prefix ``mptune.``.
        """
        proto, constants = self._typed(plan, is_documented=True)
        for key, text in (metadata or {}).items():
            proto.metadata_props.add(key=_METADATA_PREFIX + key, value=text.encode("utf-8", "replace").decode("utf-8"))
        return weights.write_self_contained(proto, constants, path)

    def exported_files(self, plan: PrecisionPlan, path: Path) -> tuple[Path, ...]:
        """What ``export`` would write and replace: ``path``, and past 2 GiB the file of weights beside it."""
        return (path,) if weights.is_self_contained(*self._typed(plan)) else (path, path.with_name(path.name + ".data"))

    def _declare_values(self, graph: onnx.GraphProto, resolution: Resolution) -> None:
        """Repeat the file's ``value_info`` of values that are there in their old type, for its documentation.

        Shapes are the inferred ones: a wrong name of a size makes ONNX Runtime reuse a buffer that is too small.
        """
        changed = resolution.computed.keys() - self.types.named
        undeclared = {name for node in graph.node for name in node.output} - {v.name for v in graph.value_info}
        given = self.types.facts.input_sizes
        for value in self._model.proto.graph.value_info:
            info = self._model.info(value.name)
            if value.name in undeclared - changed and info.dtype not in OPAQUE_TYPES:
                sizes = info.shape and tuple(d if isinstance(d, int) or d in given else None for d in info.shape)
                graph.value_info.add().CopyFrom(value)
                graph.value_info[-1].type.CopyFrom(declaration(replace(info, shape=sizes)).type)

    def _typed(self, plan: PrecisionPlan, is_documented: bool = False) -> tuple[onnx.ModelProto, list[NeededConstant]]:
        """The typed model without the constants that it reads of the model, and these."""
        if self._of_mixed is not self and plan.reduced_groups:
            return self._of_mixed._typed(plan, is_documented=is_documented)
        types, resolution = self.types, self.types.resolve(plan.stored)
        constants, unread = list[NeededConstant](), set[int]()  # nodes Constant that the plan reads in no FP32
        for name, constant in self._model.initializers.items():
            precisions = resolution.constants.get(name, ()) if name in types.constants else (Precision.FP32,)
            if name not in self._constant_nodes:
                constants += [(constant, name, None)] if Precision.FP32 in precisions else []
            elif Precision.FP32 not in precisions:
                unread.add(self._constant_nodes[name])
            reduced = [precision for precision in REDUCED if precision in precisions]
            constants += [(constant, name + self._suffixes[p], p) for p in reduced]
        dropped = self._moved | unread | resolution.dropped
        proto = onnx.ModelProto()
        proto.CopyFrom(self._frame)
        for value in self._frame.graph.input:
            self._add_casts(proto.graph, value.name, resolution)
        for node, precision in zip(self._model.nodes, resolution.node_precisions, strict=True):
            if node.index not in dropped:
                self._add_node(proto.graph, node, precision, resolution)
            for name in node.outputs:
                self._add_casts(proto.graph, name, resolution)
        if is_documented:
            self._declare_values(proto.graph, resolution)
        return proto, constants

    def _name(self, value: str, wanted: Precision | None, resolution: Resolution) -> str:
        """The name of a value's form in a precision, None for as it is computed: the model's own where it has one."""
        own = self.types.own
        if wanted not in (None, Precision.FP32):
            value = own.same.get(value, value)
            if (value, wanted) in own.reduced:
                return own.reduced[value, wanted]
        computed = resolution.computed_in(value)
        precision = wanted or computed
        if (value, precision) in own.forms and (precision, computed) != (Precision.FP32, Precision.FP32):
            return own.forms[value, precision]
        plain = Precision.FP32 if value in self.types.named else computed
        return value if precision is plain else value + self._suffixes[precision]

    def _add_node(self, graph: onnx.GraphProto, node: Node, precision: Precision, resolution: Resolution) -> None:
        rule, inputs = self.types.rules[node.index], list[str]()
        for slot, name in enumerate(node.inputs):
            wanted = precision if slot in rule.inputs else None if slot in rule.reads_any else Precision.FP32
            inputs.append(self._name(name, wanted, resolution))
        if needs_barrier(self.types, node, resolution):
            if all(constant.name != self._zero for constant in graph.initializer):  # all barriers share it
                graph.initializer.add(name=self._zero, data_type=onnx.TensorProto.FLOAT, float_data=[0.0])
            name = node.name + self._barrier
            graph.node.add(op_type="Sub", name=name, input=[inputs[0], self._zero], output=[name])
            inputs[0] = name
        proto = add_node(graph, node, inputs, [self._name(name, None, resolution) for name in node.outputs])
        if precision is not Precision.FP32:
            if rule.attribute and node.op_type == "Cast":
                next(a for a in proto.attribute if a.name == "to").i = precision.onnx_type
            elif rule.attribute:
                filled = weights.rounded_tensor(fill_value(proto), precision)
                del proto.attribute[:]
                proto.attribute.append(onnx.helper.make_attribute("value", filled))

    def _add_casts(self, graph: onnx.GraphProto, value: str, resolution: Resolution) -> None:
        """Append the Casts of a value, which stand right after its producer."""
        needed, computed, own = resolution.casts.get(value, ()), resolution.computed_in(value), self.types.own
        for precision in (row for row in PRECISIONS if row in needed):
            result, name = self._name(value, precision, resolution), value + self._suffixes[precision]
            is_own = own.forms.get((value, precision)) == result
            if is_own:
                name = self._model.nodes[self._model.producer[result]].name
            source = own.sources.get(value) or self._name(value, None, resolution)
            is_added = computed is Precision.FP32 and not is_own and value not in own.sources
            if is_added and is_held(self._model, value, precision):
                held = value + self._held[precision]
                graph.node.extend(clip_node(source, held, precision, self._model.opset))
                source = held
            graph.node.append(cast_node(source, result, precision, name))


_MOVES = COPIES | {"Dropout", "MaxPool", "Pad"}  # TensorRT-RTX moves a Cast past them where they change nothing


def needs_barrier(types: ValueTypes, node: Node, resolution: Resolution) -> bool:
    """Whether a plan puts a Cast to FP32, and nothing that computes, before the input of a forward recurrent layer."""
    if node.op_type not in RECURRENT or not node.is_standard or attribute(node, "direction", b"forward") != b"forward":
        return False
    if resolution.node_precisions[node.index] is not Precision.FP32:
        return False
    value = node.inputs[0]
    while resolution.computed_in(value) is Precision.FP32:
        maker = types.model.nodes[types.model.producer[value]] if value in types.model.producer else None
        if maker is None or not maker.is_standard or maker.op_type not in _MOVES:
            return False
        value = maker.inputs[0]
    return True


def rewrite(model: Model, plan: PrecisionPlan, groups: Sequence[LayerGroup] | None = None) -> onnx.ModelProto:
    """Apply a plan to a model in memory; the result is self-contained, ``groups`` default to fusion granularity.

    Raises:
        PlanError: the plan does not fit the model.
    """
    grouped = GroupedModel(model, find_groups(model) if groups is None else tuple(groups))
    proto, constants = Rewriter(grouped)._typed(plan, is_documented=True)
    proto.graph.initializer.extend(inline_tensor(*needed) for needed in constants)
    return proto


# -- the parts of every written model: the frame of the original, nodes, Casts, roundings ------------------------------


def frame_of(model: Model) -> onnx.ModelProto:
    """Everything of a model but its nodes, constants and local functions, which are inlined.

    What mptune wrote into a model about its plan is left out: it does not hold for one that is made from it.
    """
    source, frame = model.proto.graph, onnx.ModelProto()
    for message, copy, others in (
        (model.proto, frame, ("graph", "functions", "metadata_props")),
        (source, frame.graph, ("node", "initializer", "value_info")),
    ):
        for descriptor, value in message.ListFields():
            if descriptor.name not in others and hasattr(value, "extend"):
                getattr(copy, descriptor.name).extend(value)
            elif descriptor.name not in others:
                setattr(copy, descriptor.name, value)
    frame.metadata_props.extend(e for e in model.proto.metadata_props if not e.key.startswith(_METADATA_PREFIX))
    frame.graph.name = source.name or "graph"
    for value in (*frame.graph.input, *frame.graph.output):  # where the model has the interface in another type
        dtype = model.info(value.name).dtype
        if value.type.tensor_type.elem_type and dtype in FLOAT_TYPES:
            value.type.tensor_type.elem_type = FLOAT_TYPES[dtype].onnx_type
    # Old types would be wrong now. Only where ONNX cannot infer them do they stay: no plan changes a type there.
    foreign = [(node.outputs, node_rule(model, node).outputs) for node in model.nodes if not node.is_standard]
    opaque = {name for names, typed in foreign for slot, name in enumerate(names) if slot not in typed}
    frame.graph.value_info.extend(v for v in source.value_info if v.name in opaque)
    return frame


def add_node(graph: onnx.GraphProto, node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    """Append a node under its unique name, with these inputs and outputs; returns the copy."""
    proto: onnx.NodeProto = graph.node.add()
    proto.CopyFrom(node.proto)
    proto.name = node.name
    proto.input[:], proto.output[:] = inputs, outputs
    return proto


def cast_node(source: str, result: str, precision: Precision, name: str = "") -> onnx.NodeProto:
    """A Cast of one value, named like its result by default."""
    return onnx.helper.make_node("Cast", [source], [result], name or result, to=precision.onnx_type)


def rounding_nodes(source: str, reduced: str, rounded: str, precision: Precision) -> list[onnx.NodeProto]:
    """The nodes that round an FP32 value to a precision, as FP32: a pair of Casts, or a mantissa that is split."""
    if precision.stored is precision:
        return [cast_node(source, reduced, precision), cast_node(reduced, rounded, Precision.FP32)]
    return split_nodes(source, reduced, rounded, Precision.FP32.mantissa_bits - precision.mantissa_bits)


def split_nodes(source: str, prefix: str, rounded: str, digits: int) -> list[onnx.NodeProto]:
    """The nodes that round an FP32 value to a mantissa of ``digits`` bits fewer, to nearest. What would overflow stays.

    By Dekker (A floating-point technique for extending the available precision, Numerische Mathematik 18, 1971,
    Eq. 5.5): with ``s = 2 ** digits + 1``, ``x * s - (x * s - x)`` has ``digits`` fewer.
    """
    return [
        constant_node(f"{prefix}.factor", 2.0**digits + 1),
        constant_node(f"{prefix}.beyond", 2.0 ** (126 - digits)),
        node("Mul", f"{prefix}.scaled", source, f"{prefix}.factor"),
        node("Sub", f"{prefix}.rest", f"{prefix}.scaled", source),
        node("Sub", f"{prefix}.split", f"{prefix}.scaled", f"{prefix}.rest"),
        node("Abs", f"{prefix}.size", source),
        node("Less", f"{prefix}.fits", f"{prefix}.size", f"{prefix}.beyond"),
        node("Where", rounded, f"{prefix}.fits", f"{prefix}.split", source),
    ]


def clip_node(source: str, result: str, precision: Precision, opset: int) -> list[onnx.NodeProto]:
    """The nodes that compute an FP32 value limited to the finite values of a precision; named like their results."""
    largest = precision.largest
    if opset < _CLIP_HAS_INPUTS:
        return [onnx.helper.make_node("Clip", [source], [result], name=result, min=-largest, max=largest)]
    limits = [constant_node(f"{result}.lowest", -largest), constant_node(f"{result}.highest", largest)]
    return [*limits, node("Clip", result, source, *(limit.name for limit in limits))]


def node(op_type: str, result: str, *inputs: str, name: str = "") -> onnx.NodeProto:
    """A node without attributes, named like its result by default."""
    return onnx.helper.make_node(op_type, inputs, [result], name=name or result)


def constant_node(result: str, value: float) -> onnx.NodeProto:
    """A Constant of one FP32 number, named like its result."""
    number = onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [value])
    return onnx.helper.make_node("Constant", [], [result], name=result, value=number)


def declare_rounded_outputs(graph: onnx.GraphProto, model: Model) -> None:
    """Give what operators of runtimes compute for an output of the graph, and its roundings, the output's shape.

    ONNX Runtime infers that the new key-value cache of GroupQueryAttention has the shape of the old one, and reuses
    buffers by that; only for outputs of the graph it goes by what the graph declares.
    """
    makers = {name: node for node in graph.node for name in node.output if name}
    for value in graph.output:
        added, names = dict[str, onnx.NodeProto](), [value.name]
        for name in names:  # grows
            node = makers.get(name)
            if node is not None and node.op_type in ("Cast", "Where") and node.domain in STANDARD_DOMAINS:
                new = {n: makers[n] for n in node.input if n in makers and n not in model.tensors and n not in added}
                added.update(new)
                names += node.input if node.op_type == "Cast" else new  # a Where of the model may stretch what it reads
        if any(node.domain not in STANDARD_DOMAINS for node in added.values()):
            for name, node in added.items():
                declared = graph.value_info.add()
                declared.CopyFrom(value)
                declared.name = name
                if node.op_type == "Cast":
                    declared.type.tensor_type.elem_type = node.attribute[0].i
                for axis, dim in enumerate(declared.type.tensor_type.shape.dim):
                    if dim.WhichOneof("value") is None:
                        dim.dim_param = f"{value.name}.{axis}"
