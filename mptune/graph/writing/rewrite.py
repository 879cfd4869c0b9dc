"""Carry out a plan: the same model with constants in reduced precisions and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing. Beside
Casts it adds nothing but a subtraction of zero where TensorRT-RTX needs one (``mptune.graph.casting.value_types``), and
a Clip before the Cast of a mask that is made of constants beyond the range (``mptune.graph.hazards.masks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import Resolution, add_barrier, needs_barrier, new_suffix, value_types
from mptune.graph.folded import FoldedValues, LeftOut
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.hazards.masks import is_held
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.plan import PRECISIONS, REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.model_file import add_cast, add_metadata, add_node, clip_node, frame_of, saturate
from mptune.graph.writing.weights import (
    NeededConstant,
    WeightBank,
    inline_tensor,
    is_self_contained,
    rounded_tensor,
    write_self_contained,
)


@dataclass(frozen=True)
class _FoldedNames:
    """What folding the model's own Casts changes about the names of one plan's model.

    Attributes:
        read: (value, what it is read in, None for any type) -> the name that is read.
        casts: (value, what it is cast to) -> name and result of the model's own Cast that is used for it.
        sources: value that a Cast which goes away has computed -> what is cast in its place.
    """

    read: Mapping[tuple[str, Precision | None], str] = field(default_factory=dict)
    casts: Mapping[tuple[str, Precision], tuple[str, str]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


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
        proto, constants = self._typed(plan, folded=folded)
        stored = inline_tensor if self._bank is None else self._bank.tensor_or_inline
        proto.graph.initializer.extend(stored(*needed) for needed in constants)
        return write_bytes(path, [proto.SerializeToString(deterministic=True)])

    def export(self, plan: PrecisionPlan, path: Path, metadata: Mapping[str, str] | None = None) -> Path:
        """Write the typed model self-contained; past 2 GiB its weights lie in ``path`` + ``.data``.

        Args:
            metadata: what to say of it in ``metadata_props``, whose keys get the prefix ``mptune.``.
        """
        return write_self_contained(*self._typed(plan, metadata), path)

    def exported_files(self, plan: PrecisionPlan, path: Path) -> tuple[Path, ...]:
        """What ``export`` would write and replace: ``path``, and past 2 GiB the file of weights beside it."""
        data_path = path.with_name(path.name + ".data")
        return (path,) if is_self_contained(*self._typed(plan)) else (path, data_path)

    def typed(self, plan: PrecisionPlan) -> onnx.ModelProto:
        """The typed model in memory, self-contained."""
        proto, constants = self._typed(plan)
        proto.graph.initializer.extend(inline_tensor(*needed) for needed in constants)
        return proto

    def node_precisions(self, plan: PrecisionPlan) -> dict[str, Precision]:
        """The precision of every node that has one, by node name."""
        return self.types.node_precisions(plan)

    def _typed(
        self, plan: PrecisionPlan, metadata: Mapping[str, str] | None = None, folded: FoldedValues | None = None
    ) -> tuple[onnx.ModelProto, list[NeededConstant]]:
        """The typed model without the constants that it reads of the model, and these."""
        types, resolution = self.types, self.types.resolve(plan.stored)
        names = self._folded(resolution) if types.own_casts else _FoldedNames()
        left_out = LeftOut() if folded is None else folded.left_out(types, resolution)
        constants, unread = self._constants(resolution)
        dropped = self._moved | unread | resolution.folds.dropped | left_out.nodes
        proto = onnx.ModelProto()
        proto.CopyFrom(self._frame)
        add_metadata(proto, metadata or {})
        for name in (*(value.name for value in self._frame.graph.input), *types.stored):
            self._add_casts(proto.graph, name, resolution, names)
        for node, precision in zip(self._model.nodes, resolution.node_precisions, strict=True):
            if node.index not in dropped:
                self._add_node(proto.graph, node, precision, resolution, names)
            for name in node.outputs:
                self._add_casts(proto.graph, name, resolution, names)
        proto.graph.initializer.extend(left_out.values)
        return proto, [needed for needed in constants if needed[0].name not in left_out.unread]

    def _constants(self, resolution: Resolution) -> tuple[list[NeededConstant], frozenset[int]]:
        """The constants that a plan reads, and the indices of the Constant nodes that it does not need."""
        types, unread = self.types, set[int]()
        constants: list[NeededConstant] = []
        for name, constant in self._model.initializers.items():
            precisions = resolution.constants.get(name, ()) if name in types.constants else (Precision.FP32,)
            if name not in self._constant_nodes:
                constants += [(constant, name, None)] if Precision.FP32 in precisions else []
            elif Precision.FP32 not in precisions:
                unread.add(self._constant_nodes[name])
            for precision in REDUCED:
                if precision in precisions:
                    constants.append((types.in_precision(name, precision), name + self._suffixes[precision], precision))
        return constants, frozenset(unread)

    def _name(self, value: str, precision: Precision, computed: Precision) -> str:
        """The name of a value's form in a precision; what must keep its name keeps it in FP32."""
        plain = Precision.FP32 if value in self.types.named else computed
        return value if precision is plain else value + self._suffixes[precision]

    def _computed_name(self, value: str, resolution: Resolution) -> str:
        """The name under which a node computes a value."""
        computed = resolution.computed_in(value)
        return resolution.folds.renamed.get(value) or self._name(value, computed, computed)

    def _add_node(
        self, graph: onnx.GraphProto, node: Node, precision: Precision, resolution: Resolution, names: _FoldedNames
    ) -> None:
        inputs = []
        for slot, name in enumerate(node.inputs):
            wanted = self.types.precision_of_input(node, slot, precision)
            computed = resolution.computed_in(name)
            inputs.append(names.read.get((name, wanted)) or self._name(name, wanted or computed, computed))
        if needs_barrier(self.types, node, resolution):
            inputs[0] = add_barrier(graph, inputs[0], node.name + self._barrier, self._zero)
        outputs = [self._computed_name(name, resolution) for name in node.outputs]
        proto = add_node(graph, node, inputs, outputs)
        if precision is not Precision.FP32:
            saturate(proto, precision)
            if self.types.rules[node.index].attribute:
                _set_output_type(proto, precision)

    def _add_casts(self, graph: onnx.GraphProto, value: str, resolution: Resolution, names: _FoldedNames) -> None:
        """Append the Casts of a value, which stand right after its producer."""
        needed, computed = resolution.casts.get(value, ()), resolution.computed_in(value)
        for precision in [precision for precision in PRECISIONS if precision in needed] if needed else ():
            default = value + self._suffixes[precision], self._name(value, precision, computed)
            name, result = names.casts.get((value, precision), default)
            own = self.types.integers.get(value) or names.sources.get(value)
            source = own or self._computed_name(value, resolution)
            is_own = own is not None or (value, precision) in names.casts
            if computed is Precision.FP32 and not is_own and is_held(self._model, value, precision):
                held = value + self._held[precision]
                graph.node.extend(clip_node(source, held, precision, self._model.opset))
                source = held
            add_cast(graph, source, result, precision, name)

    def _folded(self, resolution: Resolution) -> _FoldedNames:
        """The names that replace the results of redundant Casts: their readers read the roots instead."""
        folds, computed, constants = resolution.folds, resolution.computed, resolution.constants
        adopted: dict[tuple[str, Precision | None], str] = {key: cast.result for key, cast in folds.adopted.items()}

        def form(root: str, wanted: Precision) -> str:
            while folds.folded.get(root, ("", None))[1] is wanted:
                root = folds.folded[root][0]
            if root in self.types.constants:
                return self._name(root, wanted, Precision.FP32) if wanted in constants.get(root, ()) else root
            if computed.get(root) is wanted:
                return self._computed_name(root, resolution)
            if wanted in resolution.casts.get(root, ()):
                return adopted.get((root, wanted)) or self._name(root, wanted, resolution.computed_in(root))
            return root  # the model's own

        sources = {name: form(root, precision) for name, (root, precision) in folds.folded.items()}
        read = adopted | {
            (root, precision): name for root, name in folds.renamed.items() for precision in (computed[root], None)
        }
        read |= {(name, wanted): form(root, wanted) for (name, wanted), root in folds.narrow.items()}
        read |= {(name, Precision.FP32): form(root, Precision.FP32) for name, root in folds.wide.items()}
        read |= {(name, Precision.FP32): source for name, source in sources.items()}
        for name, root in folds.either.items():
            read[name, None] = sources.get(root) or self._computed_name(root, resolution)
        nodes = self._model.nodes
        casts = {key: (nodes[cast.index].name, cast.result) for key, cast in folds.adopted.items()}
        return _FoldedNames(read, casts, sources)


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
    return Rewriter(grouped).typed(plan)
