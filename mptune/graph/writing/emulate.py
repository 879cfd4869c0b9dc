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

One file may also serve all plans: a boolean input for each group and precision turns its roundings on at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import ValueTypes, new_suffix, value_types
from mptune.graph.fused import FUSED_IN, FusedNodes, steps_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.masks import is_held
from mptune.graph.loading.model import Model, Node
from mptune.graph.ops import COPIES
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.model_file import (
    clip_node,
    declare_rounded_outputs,
    frame_of,
    rounding_nodes,
    saturate,
)
from mptune.graph.writing.stretches import Waist
from mptune.graph.writing.weights import NeededConstant, WeightBank, constants_of_file, inline_tensor

_Modes = Sequence[tuple[Precision, str]]
"""The precisions that a group may have, each with the input that turns its roundings on; "" where they always are."""


def needs_rounding(types: ValueTypes, node: Node) -> bool:
    """Whether rounding a node's output can change it: not where it only selects among rounded inputs and zero."""
    if not node.rounds:
        return False
    floats = {slot for slot, name in enumerate(node.inputs) if name and types.model.info(name).is_float32}
    return node.op_type not in COPIES | {"Relu"} or not floats <= set(types.rules[node.index].inputs)


class Emulator:
    """Writes emulations of one model's plans. Made once; a plan then takes milliseconds."""

    def __init__(self, grouped: GroupedModel, bank: WeightBank | None = None, fused: Sequence[FusedNodes] = ()) -> None:
        """Prepare for one model.

        Args:
            grouped: the model and its groups; what a node with ``rounds=False`` computes is not rounded.
            fused: nodes that the engine computes as one in FP16.
        """
        self.types = types = value_types(grouped)
        model = grouped.model
        self.frame = frame_of(model)
        self.inside = steps_inside(fused)
        self.rounds = frozenset(node.index for node in model.nodes if needs_rounding(types, node))
        self.maker = {
            node.outputs[slot]: types.group_of[node.index]
            for node, rule in zip(model.nodes, types.rules, strict=True)
            for slot in rule.outputs
            if node.outputs[slot] not in types.own.sources  # whoever reads these rounds them, in its own precision
        }
        """Value -> position of the group that rounds it where it is computed."""
        kinds = ["raw", "chosen", "by", "or"]
        kinds += [f"{p}{what}" for p in REDUCED for what in ("", "_rounded", "_held", "_switch")]
        self.suffix = {kind: new_suffix(model, kind) for kind in kinds}
        self.stored = inline_tensor if bank is None else bank.tensor_or_inline
        in_bank = {} if bank is None else bank.places[Precision.FP32]
        self.constant_nodes = frozenset(
            name for name, c in model.initializers.items() if c.node_index is not None and name not in in_bank
        )
        """Results of Constant nodes that stay nodes in the emulation of one plan."""
        self.switches: Mapping[Precision, Mapping[str, str]] = {
            precision: {
                group.id: group.id + self.suffix[f"{precision}_switch"]
                for position, group in enumerate(grouped.groups)
                if position not in types.lacking(precision)
            }
            for precision in REDUCED
        }
        """Precision -> group id -> name of the scalar boolean input that puts it there; of groups that can have it."""

    def on(self, plan: PrecisionPlan) -> frozenset[str]:
        """The switches that are on under a plan."""
        by_precision = self.switches.items()
        return frozenset(s for p, switches in by_precision for g, s in switches.items() if plan.precision[g] is p)

    def write(self, plan: PrecisionPlan, path: Path, typed: Path | None = None) -> Path:
        """Write the emulation of one plan to ``path``, which must lie in the weight bank's folder.

        Args:
            typed: the plan's exported model, in whose folder ``path`` lies: its constants are read in place.
        """
        model = self.types.model
        modes: dict[int, _Modes] = {
            position: [(plan.precision[group.id], "")]
            for position, group in enumerate(self.types.groups)
            if group.id in self.switches.get(plan.precision[group.id], ())
        }
        writing = _Writing(self, modes, is_fixed=True)
        return writing.write(path, model.nodes, model.proto.graph.output, typed=typed)

    def write_switched(
        self,
        path: Path,
        switched: Collection[str],
        start: Waist | None = None,
        precisions: Sequence[Precision] = (Precision.FP16,),
    ) -> Path:
        """Write the emulation of all plans with no group but these reduced to ``path``, in the weight bank's folder.

        Args:
            switched: ids of the groups that have switches; none of their nodes lies before ``start``.
            start: its tensors become inputs, and no node before it is there.
        """
        modes: dict[int, _Modes] = {
            position: [(p, self.switches[p][group.id]) for p in precisions if group.id in self.switches[p]]
            for position, group in enumerate(self.types.groups)
            if group.id in switched
        }
        model, start = self.types.model, start or Waist()
        return _Writing(self, modes).write(path, model.nodes[start.last + 1 :], model.proto.graph.output, start.tensors)

    def write_head(self, path: Path, waists: Sequence[Waist]) -> Path:
        """Write the FP32 model whose outputs are the tensors of these waists."""
        model = self.types.model
        tensors = dict.fromkeys(tensor for waist in waists for tensor in waist.tensors)
        nodes = model.nodes[: max(waist.last for waist in waists) + 1]
        return _Writing(self, {}).write(path, nodes, [_value(model, tensor) for tensor in tensors])


class _Writing:
    """One model while it is written."""

    def __init__(self, emulator: Emulator, modes: Mapping[int, _Modes], *, is_fixed: bool = False) -> None:
        """Begin.

        ``modes`` are those of the groups, by position. ``is_fixed``: of one plan, each group has one mode at most, and
        the model keeps all its inputs.
        """
        self._emulator, self._types, self._model = emulator, emulator.types, emulator.types.model
        self._suffix, self._modes, self._is_fixed = emulator.suffix, modes, is_fixed
        self._constant_nodes = emulator.constant_nodes if is_fixed else frozenset()
        self._proto = onnx.ModelProto()
        self._proto.CopyFrom(emulator.frame)
        self._graph = self._proto.graph
        self._computed: set[str] = set()
        self._read: set[str] = set()
        self._reduced: set[tuple[str, Precision]] = set()

    def write(
        self,
        path: Path,
        nodes: Sequence[Node],
        outputs: Sequence[onnx.ValueInfoProto],
        entered: Sequence[str] = (),
        typed: Path | None = None,
    ) -> Path:
        """Write these nodes with their roundings; values that are ``entered`` are inputs."""
        for node in nodes:
            is_constant = node.op_type == "Constant" and node.outputs[0] in self._model.initializers
            if not is_constant or node.outputs[0] in self._constant_nodes:
                self._add(node)
        self._graph.ClearField("output")
        self._graph.output.extend(outputs)
        self._read.update(output.name for output in outputs)
        self._add_constants(typed)
        self._add_inputs(entered)
        declare_rounded_outputs(self._graph, self._model)
        return write_bytes(path, [self._proto.SerializeToString(deterministic=True)])

    def _add(self, node: Node) -> None:
        """Append a node, with the roundings of its inputs and outputs."""
        emulator, rule, group = self._emulator, self._types.rules[node.index], self._types.group_of[node.index]
        inputs, outputs = list(node.inputs), list(node.outputs)
        modes = self._modes.get(group, ())
        for slot in rule.inputs if modes else ():
            if emulator.maker.get(inputs[slot]) != group:
                inputs[slot] = self._read_by(group, inputs[slot], modes)
        roundings = modes if node.index in emulator.rounds else ()
        if node.name in emulator.inside:
            roundings = [(precision, switch) for precision, switch in roundings if precision is not FUSED_IN]
        rounded = [slot for slot in rule.outputs if roundings and outputs[slot] in emulator.maker]
        for slot in rounded:
            outputs[slot] += self._suffix["raw"]
        self._read.update(inputs, node.captures)
        proto = self._graph.node.add()
        proto.CopyFrom(node.proto)
        proto.name = node.name
        proto.input[:], proto.output[:] = inputs, outputs
        held: dict[Precision, str] = {}  # the ends of names: results with attributes that a precision can hold
        if self._is_fixed:
            saturate(proto, modes[0][0] if modes else Precision.FP32)
        for precision, _ in roundings if rounded and not self._is_fixed else ():
            copy = onnx.NodeProto()
            copy.CopyFrom(proto)
            if saturate(copy, precision):
                held[precision] = self._suffix[f"{precision}_held"]
                copy.name += held[precision]
                copy.output[:] = [name + held[precision] for name in proto.output]
                self._append(copy)
        for slot in rounded:
            sources = {precision: outputs[slot] + suffix for precision, suffix in held.items()}
            self._choose(roundings, outputs[slot], node.outputs[slot], sources)

    def _read_by(self, group: int, tensor: str, modes: _Modes) -> str:
        """The name that the nodes of a group read in place of a value that another group computes."""
        result = f"{tensor}.{group}{self._suffix['chosen']}"
        if self._is_fixed:
            if modes[0] in self._modes.get(self._emulator.maker.get(tensor, -1), ()):
                return tensor
            ((precision, _),) = modes
            result = tensor + self._suffix[f"{precision}_rounded"]
        if result not in self._computed:
            self._choose(modes, tensor, result, {})
        return result

    def _choose(self, modes: _Modes, tensor: str, result: str, sources: Mapping[Precision, str]) -> None:
        """Append the nodes that compute ``result``: the value, rounded as the switch says that is on.

        ``sources`` are values that are rounded in place of ``tensor``.
        """
        otherwise = tensor
        for number, (precision, switch) in enumerate(modes, 1):
            if not switch:
                self._round(tensor, precision, result)
                return
            self._read.add(sources.get(precision, tensor))
            rounded = self._round(sources.get(precision, tensor), precision)
            chosen = result if number == len(modes) else f"{result}.{precision}{self._suffix['or']}"
            # A node of the model may have the name of its result.
            self._append(_node("Where", [switch, rounded, otherwise], chosen, chosen + self._suffix["by"]))
            otherwise = chosen

    def _round(self, tensor: str, precision: Precision, result: str = "") -> str:
        """Append the nodes that cast a value to a reduced precision and back; constants are stored in it too."""
        reduced, name = tensor + self._suffix[precision], tensor + self._suffix[f"{precision}_rounded"]
        result = result or name
        if result in self._computed:
            return result
        if tensor in self._types.constants:
            self._reduced.add((tensor, precision))
            self._append(_node("Cast", [reduced], result, name, to=onnx.TensorProto.FLOAT))
            return result
        self._read.add(tensor)
        source, modes = tensor, self._modes.get(self._emulator.maker.get(tensor, -1), ())
        is_mask = tensor not in self._types.own.sources and is_held(self._model, tensor, precision)
        if is_mask and not (self._is_fixed and modes):
            source = tensor + self._suffix[f"{precision}_held"]
            self._append(*clip_node(tensor, source, precision, self._model.opset))
            for _, switch in modes:  # only what is FP32 is limited
                limited, source = source, f"{source}.{switch}"
                self._append(_node("Where", [switch, tensor, limited], source))
        rounding = rounding_nodes(source, reduced, result, precision)
        rounding[-1].name = name
        self._append(*rounding)
        return result

    def _append(self, *nodes: onnx.NodeProto) -> None:
        self._computed.update(node.output[0] for node in nodes)
        self._graph.node.extend(nodes)

    def _add_constants(self, typed: Path | None) -> None:
        stored, placed = self._emulator.stored, dict[str, onnx.TensorProto]()
        if typed is not None:
            stored, placed = inline_tensor, constants_of_file(typed)
        for name, constant in self._model.initializers.items():
            reduced = [p for p in REDUCED if (name, p) in self._reduced]
            is_kept = self._is_fixed and (constant.overridable or (constant.node_index is None and not reduced))
            is_read = (name in self._read or is_kept) and name not in self._constant_nodes
            needed: list[NeededConstant] = [(constant, name, None)] if is_read else []
            needed += [(self._types.in_precision(name, p), name + self._suffix[p], p) for p in reduced]
            self._graph.initializer.extend(placed.get(each[1]) or stored(*each) for each in needed)

    def _add_inputs(self, entered: Sequence[str]) -> None:
        model, graph = self._model, self._graph
        if not self._is_fixed:
            for field in ("input", "sparse_initializer", "value_info"):
                graph.ClearField(field)
            sparse = model.proto.graph.sparse_initializer
            graph.sparse_initializer.extend(each for each in sparse if each.values.name in self._read)
            graph.input.extend(value for value in model.proto.graph.input if value.name in self._read)
        graph.input.extend(_value(model, name) for name in entered if name in self._read)
        switches = [switch for modes in self._modes.values() for _, switch in modes if switch]
        graph.input.extend(onnx.helper.make_tensor_value_info(s, onnx.TensorProto.BOOL, []) for s in switches)


def _node(op_type: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(op_type, inputs, [output], name=name or output, **attributes)


def _value(model: Model, name: str) -> onnx.ValueInfoProto:
    code = onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
    return onnx.helper.make_tensor_value_info(name, code, None)
