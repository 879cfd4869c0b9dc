"""Carry out a plan: the same model with constants in reduced precisions and explicit Casts.

*Requires* a model from ``load_model`` and groups from ``find_groups``. *Ensures*: the interface is unchanged; each
value is cast at most once per type, right after its producer; constants are converted, never cast at run time; shape,
index and boolean values are untouched; the same plan gives the same bytes; the all-FP32 plan changes nothing. Beside
Casts it adds nothing but a subtraction of zero where TensorRT-RTX needs one (``mptune.graph.casting.value_types``), and
a Clip before the Cast of a mask that is made of constants beyond the range (``mptune.graph.hazards.masks``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        names = self._folded(resolution) if self.types.own_casts else _FoldedNames()
        left_out = LeftOut() if folded is None else folded.left_out(self.types, resolution)
        dropped = self._constants.dropped_nodes(resolution) | resolution.folds.dropped | left_out.nodes
        proto = onnx.ModelProto()
        proto.CopyFrom(self._frame)
        add_metadata(proto, metadata or {})
        for name in (*(value.name for value in self._frame.graph.input), *self.types.stored):
            self._add_casts(proto.graph, name, resolution, names)
        for node, precision in zip(self._model.nodes, resolution.node_precisions, strict=True):
            if node.index not in dropped:
                self._add_node(proto.graph, node, precision, resolution, names)
            for name in node.outputs:
                self._add_casts(proto.graph, name, resolution, names)
        proto.graph.initializer.extend(left_out.values)
        return proto, self._constants.add_to(proto.graph, resolution, store, left_out.unread)

    def _name(self, value: str, precision: Precision, computed: Precision) -> str:
        """The name of a value's form in a precision; what must keep its name keeps it in FP32."""
        plain = Precision.FP32 if value in self.types.named else computed
        return value if precision is plain else value + self._suffixes[precision]

    def _computed_name(self, value: str, resolution: Resolution) -> str:
        """The name under which a node computes a value."""
        computed = resolution.computed_in(value)
        return resolution.folds.renamed.get(value) or self._name(value, computed, computed)

    def _add_node(
        self, graph: onnx.GraphProto, node: Node, precision: Precision, resolution: Resolution, folded: _FoldedNames
    ) -> None:
        inputs = []
        for slot, name in enumerate(node.inputs):
            wanted = self.types.precision_of_input(node, slot, precision)
            computed = resolution.computed_in(name)
            inputs.append(folded.read.get((name, wanted)) or self._name(name, wanted or computed, computed))
        if needs_barrier(self.types, node, resolution):
            inputs[0] = add_barrier(graph, inputs[0], node.name + self._barrier, self._zero)
        outputs = [self._computed_name(name, resolution) for name in node.outputs]
        proto = add_node(graph, node, inputs, outputs)
        if precision is not Precision.FP32:
            saturate(proto, precision)
            if self.types.rules[node.index].attribute:
                _set_output_type(proto, precision)

    def _add_casts(self, graph: onnx.GraphProto, value: str, resolution: Resolution, folded: _FoldedNames) -> None:
        """Append the Casts of a value, which stand right after its producer."""
        needed = resolution.casts.get(value)
        if needed is None:
            return
        computed = resolution.computed_in(value)
        for precision in PRECISIONS:
            if precision not in needed:
                continue
            default = value + self._suffixes[precision], self._name(value, precision, computed)
            name, result = folded.casts.get((value, precision), default)
            own = self.types.integers.get(value) or folded.sources.get(value)
            source = own or self._computed_name(value, resolution)
            is_own = own is not None or (value, precision) in folded.casts
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
