"""The FP32 model that rounds as a plan's precisions would: the plan's error on any machine, without FP16 kernels.

Every value that the plan puts in FP16 (node outputs, inputs that cross a boundary, weights) goes through an explicit
pair of Casts to FP16 and back. Running the FP16-typed model on a provider without FP16 kernels is no substitute: it
computes in FP32 and drops the roundings between nodes.

Which steps are rounded depends on the engine:

- ONNX Runtime: norms that it fuses (``mptune.engines.ort.fusions`` asks it) are one operator, with FP32 inside
  (``mptune.graph.fused``). Its CUDA provider rounds within some nodes, too, and not between others
  (``mptune.graph.writing.rounding_steps``). Its CPU provider computes FP16 in FP32 and leaves out roundings, so its
  errors are below the emulated ones.
- TensorRT and TensorRT-RTX, here or for a profile of another device: each node of the model is rounded. What their
  builder fuses is known once an engine is built, and differs by version and device; a strongly typed network promises
  the types of its tensors, not the precision inside a fused kernel. So emulated errors of norms that are written out
  are upper ones there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from mptune.files import write_bytes
from mptune.graph.casting.value_types import Resolution, ValueTypes, new_suffix, value_types
from mptune.graph.fused import FUSED_IN, FusedNodes, FusedReads, steps_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.hazards.constants import is_held
from mptune.graph.loading.model import Node
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.model_file import (
    add_cast,
    add_node,
    clip_node,
    declare_rounded_outputs,
    frame_of,
    rounding_nodes,
    saturate,
    serialized,
)
from mptune.graph.writing.weights import ConstantStore, NeededConstants, WeightBank, banked, inline, unlimited

_CHOOSES = DATA_MOVEMENT - {"Cast", "Dropout"} | {"Concat", "Gather", "GatherElements", "GatherND", "Relu"}
"""Operators whose every output element is one of their input elements, or zero."""


def needs_rounding(types: ValueTypes, node: Node) -> bool:
    """Whether rounding a node's output can change it: not where it only selects among rounded inputs."""
    if not node.rounds:
        return False
    floats = {slot for slot, name in enumerate(node.inputs) if name and types.model.info(name).is_float32}
    return node.op_type not in _CHOOSES or not floats <= set(types.rules[node.index].inputs)


class Emulator:
    """Writes emulations of one model's plans. Made once; a plan then takes milliseconds."""

    def __init__(
        self,
        grouped: GroupedModel,
        bank: WeightBank | None = None,
        fused: Sequence[FusedNodes] = (),
        *,
        limits: bool = True,
    ) -> None:
        """Prepare for one model.

        Args:
            grouped: the model and its groups; what a node with ``rounds=False`` computes is not rounded.
            fused: nodes that the engine computes as one in FP16.
            limits: hold constants beyond a precision as its largest finite value, as mptune's models do; else they
                become infinite, as in models of other tools.
        """
        self._limits = limits
        self._types = value_types(grouped)
        self._fused_reads = FusedReads(self._types, fused)
        steps = steps_inside(fused)
        self._inside = frozenset(out for node in grouped.model.nodes if node.name in steps for out in node.outputs)
        self._model = model = grouped.model
        self._rounds = frozenset(
            node.outputs[slot]
            for node, rule in zip(model.nodes, self._types.rules, strict=True)
            if needs_rounding(self._types, node)
            for slot in rule.outputs
        )
        self._raw = new_suffix(model, "raw")
        self._reduced = {precision: new_suffix(model, str(precision)) for precision in REDUCED}
        self._rounded = {precision: new_suffix(model, f"{precision}_rounded") for precision in REDUCED}
        self._held = {precision: new_suffix(model, f"{precision}_held") for precision in REDUCED}
        self._frame = frame_of(model)
        self._constants = NeededConstants(self._types, bank, self._reduced)
        store = inline if bank is None else banked(bank)
        self._store = store if limits else unlimited(store)

    def write(self, plan: PrecisionPlan, path: Path, store: ConstantStore | None = None) -> Path:
        """Write the emulation to ``path``, which must lie in the weight bank's folder.

        Args:
            store: holds the constants in place of the weight bank; ``path`` may then lie elsewhere.
        """
        resolution = self._resolve(plan)
        read = self._read_through_casts(resolution)
        exact = self._fused_reads.under(resolution)
        dropped = self._constants.dropped_nodes(resolution)
        proto = onnx.ModelProto()
        proto.CopyFrom(self._frame)
        for name, precisions in resolution.constants.items():
            for precision in REDUCED:
                if precision in precisions:  # stored in it, and in FP32 again
                    reduced, rounded = name + self._reduced[precision], name + self._rounded[precision]
                    add_cast(proto.graph, reduced, rounded, Precision.FP32, rounded)
        for name in (*(value.name for value in self._frame.graph.input), *self._types.stored):
            self._add_roundings(proto.graph, name, resolution)
        for node, precision in zip(self._model.nodes, resolution.node_precisions, strict=True):
            if node.index not in dropped:
                self._add_node(proto.graph, node, precision, resolution, read, exact)
            for name in node.outputs:
                self._add_roundings(proto.graph, name, resolution)
        declare_rounded_outputs(proto.graph, self._model)
        large = self._constants.add_to(proto.graph, resolution, store or self._store)
        return write_bytes(path, serialized(proto, large))

    def _resolve(self, plan: PrecisionPlan) -> Resolution:
        """As ``ValueTypes.resolve``; the model's own Casts all stay in an emulation, and read FP32.

        What is cast from integers in two types is computed in FP32 and rounded for the others.
        """
        resolution = self._types.resolve(plan)
        exact = {v for v in self._types.integers if Precision.FP32 in resolution.casts.get(v, ())}
        if exact:
            casts = {v: ({*resolution.casts[v], resolution.computed_in(v)} - {Precision.FP32}) for v in exact}
            computed = {v: p for v, p in resolution.computed.items() if v not in exact}
            resolution = replace(resolution, computed=computed, casts={**resolution.casts, **casts})
        return resolution.with_fp32(c.source for c in self._types.own_casts if c.source in self._types.constants)

    def _add_node(
        self,
        graph: onnx.GraphProto,
        node: Node,
        precision: Precision,
        resolution: Resolution,
        read: Mapping[tuple[str, Precision], str],
        exact: Collection[tuple[int, str]],
    ) -> None:
        inputs = []
        for slot, name in enumerate(node.inputs):
            wanted = self._types.precision_of_input(node, slot, precision) or Precision.FP32
            if (name, wanted) in read:
                name = read[name, wanted]
            elif (
                wanted is not Precision.FP32
                and resolution.computed_in(name) is not wanted
                and (node.index, name) not in exact
            ):
                name += self._rounded[wanted]
            inputs.append(name)
        proto = add_node(graph, node, inputs, [self._computed_name(name, resolution) for name in node.outputs])
        if precision is not Precision.FP32 and self._limits:
            saturate(proto, precision)

    def _computed_name(self, value: str, resolution: Resolution) -> str:
        """The name under which a node computes a value: another one where a rounding follows."""
        return value + self._raw if self._is_rounded(value, resolution) else value

    def _is_rounded(self, value: str, resolution: Resolution) -> bool:
        """Whether a rounding follows where the value is computed."""
        computed = resolution.computed.get(value)
        if computed is None or value not in self._rounds:
            return False
        return computed is not FUSED_IN or value not in self._inside

    def _add_roundings(self, graph: onnx.GraphProto, value: str, resolution: Resolution) -> None:
        """Append the pairs of Casts after a value: for its own precision, and for those of its readers."""
        if self._is_rounded(value, resolution):
            computed = resolution.computed[value]
            self._add_rounding(graph, self._computed_name(value, resolution), value, value, computed)
        needed = resolution.casts.get(value, ())
        for precision in REDUCED:
            if precision in needed:
                source = value
                is_fp32 = resolution.computed_in(value) is Precision.FP32
                if self._limits and is_fp32 and is_held(self._model, value, precision):
                    source = value + self._held[precision]
                    graph.node.extend(clip_node(value, source, precision, self._model.opset))
                self._add_rounding(graph, source, value + self._rounded[precision], value, precision)

    def _add_rounding(self, graph: onnx.GraphProto, source: str, result: str, value: str, precision: Precision) -> None:
        nodes = rounding_nodes(source, value + self._reduced[precision], result, precision)
        nodes[-1].name = value + self._rounded[precision]
        graph.node.extend(nodes)

    def _read_through_casts(self, resolution: Resolution) -> dict[tuple[str, Precision], str]:
        """What nodes in reduced precisions read in place of the results of the model's own Casts to FP32."""
        read = {}
        for (name, wanted), root in resolution.folds.narrow.items():
            is_cast = wanted in resolution.casts.get(root, ()) or wanted in resolution.constants.get(root, ())
            read[name, wanted] = root + self._rounded[wanted] if is_cast else name
        return read
