"""Carry out a plan: the same model with constants in reduced precisions and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing. Beside
Casts it adds nothing but a subtraction of zero where TensorRT-RTX needs one (``mptune.graph.value_types``), and
a Clip before the Cast of a mask that is made of constants beyond the range (``mptune.graph.hazards.masks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.folded import FoldedValues, LeftOut
from mptune.graph.groups import GroupedModel, LayerGroup, find_groups
from mptune.graph.hazards.masks import is_held
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import Resolution, add_barrier, needs_barrier, new_suffix, value_types
from mptune.graph.writing.model_file import METADATA_PREFIX, add_node, cast_node, clip_node, frame_of, saturate
from mptune.graph.writing.weights import (
    NeededConstant,
    WeightBank,
    inline_tensor,
    is_self_contained,
    rounded_tensor,
    write_self_contained,
)


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
        # Constant nodes that the bank holds become constants of the graph; the others stay nodes in FP32.
        in_bank = {} if bank is None else bank.places[Precision.FP32]
        by_name = {n: c.node_index for n, c in model.initializers.items() if c.node_index is not None}
        self._constant_nodes = {name: index for name, index in by_name.items() if name not in in_bank}
        self._moved = frozenset(index for name, index in by_name.items() if name in in_bank)

    def write(self, plan: PrecisionPlan, path: Path, folded: FoldedValues | None = None) -> Path:
        """Write the typed model to ``path``, which must lie in the weight bank's folder.

        Args:
            folded: values that are constants already, in place of the nodes that compute them.
        """
        proto, constants = self._typed(plan, folded)
        stored = inline_tensor if self._bank is None else self._bank.tensor_or_inline
        proto.graph.initializer.extend(stored(*needed) for needed in constants)
        return write_bytes(path, [proto.SerializeToString(deterministic=True)])

    def export(self, plan: PrecisionPlan, path: Path, metadata: Mapping[str, str] | None = None) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        Args:
            metadata: what to say of it in ``metadata_props``, whose keys get the prefix ``mptune.``.
        """
        proto, constants = self._typed(plan)
        for key, text in (metadata or {}).items():
            writable = text.encode("utf-8", "replace").decode("utf-8")
            proto.metadata_props.add(key=METADATA_PREFIX + key, value=writable)
        return write_self_contained(proto, constants, path)

    def exported_files(self, plan: PrecisionPlan, path: Path) -> tuple[Path, ...]:
        """What ``export`` would write and replace: ``path``, and past 2 GiB the file of weights beside it."""
        return (path,) if is_self_contained(*self._typed(plan)) else (path, path.with_name(path.name + ".data"))

    def typed(self, plan: PrecisionPlan) -> onnx.ModelProto:
        """The typed model in memory, self-contained."""
        proto, constants = self._typed(plan)
        proto.graph.initializer.extend(inline_tensor(*needed) for needed in constants)
        return proto

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        return self.types.node_precisions(plan)

    def _typed(
        self, plan: PrecisionPlan, folded: FoldedValues | None = None
    ) -> tuple[onnx.ModelProto, list[NeededConstant]]:
        """The typed model without the constants that it reads of the model, and these."""
        types, resolution = self.types, self.types.resolve(plan.stored)
        left_out = LeftOut() if folded is None else folded.left_out(types, resolution)
        constants, unread = list[NeededConstant](), set[int]()  # nodes Constant that the plan reads in no FP32
        for name, constant in self._model.initializers.items():
            precisions = resolution.constants.get(name, ()) if name in types.constants else (Precision.FP32,)
            if name not in self._constant_nodes:
                constants += [(constant, name, None)] if Precision.FP32 in precisions else []
            elif Precision.FP32 not in precisions:
                unread.add(self._constant_nodes[name])
            reduced = [precision for precision in REDUCED if precision in precisions]
            constants += [(types.in_precision(name, p), name + self._suffixes[p], p) for p in reduced]
        dropped = self._moved | unread | resolution.dropped | left_out.nodes
        proto = onnx.ModelProto()
        proto.CopyFrom(self._frame)
        for value in self._frame.graph.input:
            self._add_casts(proto.graph, value.name, resolution)
        for node, precision in zip(self._model.nodes, resolution.node_precisions, strict=True):
            if node.index not in dropped:
                self._add_node(proto.graph, node, precision, resolution)
            for name in node.outputs:
                self._add_casts(proto.graph, name, resolution)
        proto.graph.initializer.extend(left_out.values)
        return proto, [needed for needed in constants if needed[0].name not in left_out.unread]

    def _name(self, value: str, wanted: Precision | None, computed: Precision) -> str:
        """The name of a value's form in a precision, None for as it is computed; what keeps its name keeps it in FP32.

        The model's own name for that form serves where it has one.
        """
        precision = wanted or computed
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
        return self._name(value, wanted, resolution.computed_in(value))

    def _add_node(self, graph: onnx.GraphProto, node: Node, precision: Precision, resolution: Resolution) -> None:
        wanted = (self.types.precision_of_input(node, slot, precision) for slot in range(len(node.inputs)))
        inputs = [self._name_read(name, p, resolution) for name, p in zip(node.inputs, wanted, strict=True)]
        if needs_barrier(self.types, node, resolution):
            inputs[0] = add_barrier(graph, inputs[0], node.name + self._barrier, self._zero)
        proto = add_node(graph, node, inputs, [self._name_read(name, None, resolution) for name in node.outputs])
        if precision is not Precision.FP32:
            saturate(proto, precision)
            if self.types.rules[node.index].attribute and node.op_type == "Cast":
                next(a for a in proto.attribute if a.name == "to").i = precision.onnx_type
            elif self.types.rules[node.index].attribute:
                filled = rounded_tensor(fill_value(proto), precision)
                del proto.attribute[:]
                proto.attribute.append(onnx.helper.make_attribute("value", filled))

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
            graph.node.append(cast_node(source, result, precision, name))


def rewrite(model: Model, plan: PrecisionPlan, groups: Sequence[LayerGroup] | None = None) -> onnx.ModelProto:
    """Apply a plan to a model in memory; the result is self-contained, ``groups`` default to fusion granularity.

    Raises:
        PlanError: the plan does not fit the model.
    """
    grouped = GroupedModel(model, find_groups(model) if groups is None else tuple(groups))
    return Rewriter(grouped).typed(plan)
