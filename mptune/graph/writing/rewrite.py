"""Carry out a plan: the same model with constants in reduced precisions and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing. Beside
Casts it adds nothing but a subtraction of zero where TensorRT-RTX needs one (``mptune.graph.casting.value_types``), and
a Clip before the Cast of a mask that is made of constants beyond the range (``mptune.graph.hazards.masks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import whole_file, write_bytes, writing
from mptune.graph.casting.value_types import Resolution, add_barrier, needs_barrier, new_suffix, value_types
from mptune.graph.folded import FoldedValues, LeftOut
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.hazards.masks import is_held
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import Initializer, fill_value, is_external
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.model_file import (
    add_cast,
    add_metadata,
    add_node,
    clip_node,
    frame_of,
    inside,
    saturate,
    serialized,
    serialized_size,
)
from mptune.graph.writing.weights import (
    ConstantStore,
    LargeConstant,
    NeededConstants,
    StoredConstant,
    WeightBank,
    banked,
    in_file,
    inline,
    rounded_tensor,
)

SELF_CONTAINED_LIMIT = 1_900_000_000
"""Bytes up to which one file holds the model: protobuf messages end at 2 GiB."""


class Rewriter:
    """Writes typed models of one model. Made once; a plan then takes milliseconds."""

    def __init__(self, grouped: GroupedModel, bank: WeightBank | None = None) -> None:
        self.types = value_types(grouped)
        self._model = model = grouped.model
        self._suffixes = {precision: new_suffix(model, str(precision)) for precision in PRECISIONS}
        self._held = {precision: new_suffix(model, f"{precision}_held") for precision in REDUCED}
        self._barrier, self._zero = new_suffix(model, "barrier"), new_suffix(model, "zero")
        self._frame = frame_of(model)
        self._constants = NeededConstants(self.types, bank, self._suffixes)
        self._store: ConstantStore = inline if bank is None else banked(bank)

    def write(self, plan: PrecisionPlan, path: Path, folded: FoldedValues | None = None) -> Path:
        """Write the typed model to ``path``, which must lie in the weight bank's folder.

        Args:
            folded: values that are constants already, in place of the nodes that compute them.
        """
        return write_bytes(path, serialized(*self._typed(plan, self._store, folded=folded)))

    def export(self, plan: PrecisionPlan, path: Path, metadata: Mapping[str, str] | None = None) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        Args:
            metadata: what to say of it in ``metadata_props``, whose keys get the prefix ``mptune.``.
        """
        return write_self_contained(lambda store: self._typed(plan, store, metadata), path)

    def exported_files(
        self, plan: PrecisionPlan, path: Path, metadata: Mapping[str, str] | None = None
    ) -> tuple[Path, ...]:
        """What ``export`` would write and replace: ``path``, and past 2 GiB the file of weights beside it."""
        if serialized_size(*self._typed(plan, inline, metadata)) <= SELF_CONTAINED_LIMIT:
            return (path,)
        return path, path.with_name(path.name + ".data")

    def beside(self, plan: PrecisionPlan, path: Path, metadata: Mapping[str, str] | None = None) -> ConstantStore:
        """Constants by reference into what ``export`` wrote with the same arguments; small ones inline."""
        if len(self.exported_files(plan, path, metadata)) == 1:
            tensors = inside(*self._typed(plan, inline, metadata), path.name)
        else:
            constants = onnx.load(path, load_external_data=False).graph.initializer
            tensors = {tensor.name: tensor for tensor in constants if is_external(tensor)}

        def store(constant: Initializer, name: str, rounded_to: Precision | None) -> StoredConstant:
            return tensors.get(name) or inline(constant, name, rounded_to)

        return store

    def exported(self, plan: PrecisionPlan) -> Iterator[bytes]:
        """The bytes of the typed model, self-contained."""
        return serialized(*self._typed(plan, inline))

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        return self.types.node_precisions(plan)

    def _typed(
        self,
        plan: PrecisionPlan,
        store: ConstantStore,
        metadata: Mapping[str, str] | None = None,
        folded: FoldedValues | None = None,
    ) -> tuple[onnx.ModelProto, list[LargeConstant]]:
        """The typed model, and the constants whose data are still to be written."""
        resolution = self.types.resolve(plan.stored)
        left_out = LeftOut() if folded is None else folded.left_out(self.types, resolution)
        dropped = self._constants.dropped_nodes(resolution) | resolution.dropped | left_out.nodes
        proto = onnx.ModelProto()
        proto.CopyFrom(self._frame)
        add_metadata(proto, metadata or {})
        for value in self._frame.graph.input:
            self._add_casts(proto.graph, value.name, resolution)
        for node, precision in zip(self._model.nodes, resolution.node_precisions, strict=True):
            if node.index not in dropped:
                self._add_node(proto.graph, node, precision, resolution)
            for name in node.outputs:
                self._add_casts(proto.graph, name, resolution)
        proto.graph.initializer.extend(left_out.values)
        return proto, self._constants.add_to(proto.graph, resolution, store, left_out.unread)

    def _name(self, value: str, precision: Precision, computed: Precision) -> str:
        """The name of a value's form in a precision; what must keep its name keeps it in FP32.

        The model's own name for that form serves where it has one.
        """
        own = self.types.own.forms.get((value, precision))
        if own is not None and (precision, computed) != (Precision.FP32, Precision.FP32):
            return own
        plain = Precision.FP32 if value in self.types.named else computed
        return value if precision is plain else value + self._suffixes[precision]

    def _name_read(self, value: str, wanted: Precision | None, resolution: Resolution) -> str:
        """The name that a node reads for a value of the model in a precision; None for as it is computed."""
        own = self.types.own
        if wanted not in (None, Precision.FP32):
            value = own.same.get(value, value)
            if (value, wanted) in own.reduced:
                return own.reduced[value, wanted]
        computed = resolution.computed_in(value)
        return self._name(value, wanted or computed, computed)

    def _add_node(self, graph: onnx.GraphProto, node: Node, precision: Precision, resolution: Resolution) -> None:
        wanted = (self.types.precision_of_input(node, slot, precision) for slot in range(len(node.inputs)))
        inputs = [self._name_read(name, p, resolution) for name, p in zip(node.inputs, wanted, strict=True)]
        if needs_barrier(self.types, node, resolution):
            inputs[0] = add_barrier(graph, inputs[0], node.name + self._barrier, self._zero)
        proto = add_node(graph, node, inputs, [self._name_read(name, None, resolution) for name in node.outputs])
        if precision is not Precision.FP32:
            saturate(proto, precision)
            if self.types.rules[node.index].attribute:
                _set_output_type(proto, precision)

    def _add_casts(self, graph: onnx.GraphProto, value: str, resolution: Resolution) -> None:
        """Append the Casts of a value, which stand right after its producer."""
        needed, computed, own = resolution.casts.get(value, ()), resolution.computed_in(value), self.types.own
        for precision in PRECISIONS:
            if precision not in needed:
                continue
            result, name = self._name(value, precision, computed), value + self._suffixes[precision]
            is_own = own.forms.get((value, precision)) == result
            if is_own:
                name = self._model.nodes[self._model.producer[result]].name
            source = own.sources.get(value) or self._name(value, computed, computed)
            is_added = computed is Precision.FP32 and not is_own and value not in own.sources
            if is_added and is_held(self._model, value, precision):
                held = value + self._held[precision]
                graph.node.extend(clip_node(source, held, precision, self._model.opset))
                source = held
            add_cast(graph, source, result, precision, name)


def write_self_contained(
    typed: Callable[[ConstantStore], tuple[onnx.ModelProto, list[LargeConstant]]], path: Path
) -> Path:
    """Write a model that holds its constants; past 2 GiB they lie in ``path`` + ``.data``.

    Args:
        typed: the model with its constants in a store, and those whose data are still to be written.
    """
    if serialized_size(*typed(inline)) <= SELF_CONTAINED_LIMIT:
        return write_bytes(path, serialized(*typed(inline)))
    data_path = path.with_name(path.name + ".data")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (  # The last ends first, so the data have their name before the model has.
            whole_file(path) as model_file,
            whole_file(data_path) as data_file,
            data_file.open("wb") as data,
            model_file.open("wb") as file,
        ):
            file.writelines(serialized(*typed(in_file(data, data_path.name))))
    return path


def _set_output_type(node: onnx.NodeProto, precision: Precision) -> None:
    """Set the attribute that states the type of a node's output."""
    if node.op_type == "Cast":
        next(a for a in node.attribute if a.name == "to").i = precision.onnx_type
        return
    tensor = rounded_tensor(fill_value(node), precision)
    del node.attribute[:]
    node.attribute.append(onnx.helper.make_attribute("value", tensor))


def rewrite(model: Model, plan: PrecisionPlan, groups: Sequence[LayerGroup] | None = None) -> onnx.ModelProto:
    """Apply a plan to a model in memory; the result is self-contained, ``groups`` default to fusion granularity.

    Raises:
        PlanError: the plan does not fit the model.
    """
    grouped = GroupedModel(model, find_groups(model) if groups is None else tuple(groups))
    return onnx.load_model_from_string(b"".join(Rewriter(grouped).exported(plan)))
