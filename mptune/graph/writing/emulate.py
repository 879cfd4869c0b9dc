"""The FP32 model that rounds as a plan's precisions would: the plan's error on any machine, without FP16 kernels.

Every value that the plan puts in FP16 (node outputs, inputs that cross a boundary, weights) goes through an explicit
pair of Casts to FP16 and back. Running the FP16-typed model on a provider without FP16 kernels is no substitute: it
computes in FP32 and drops the roundings between nodes. Norms that ONNX Runtime fuses are one operator, with FP32 inside
(``mptune.graph.facts``); its CUDA provider rounds within some nodes, and not between others
(``mptune.graph.writing.rounding_steps``). What TensorRT's builder fuses is known once an engine is built: emulated
errors of norms that are written out are upper ones there.

One file may also serve all plans: a boolean input for each group and precision turns its roundings on at run time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.facts import FUSED_IN, FusedNodes, steps_inside
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards.masks import is_held
from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.ops import COMPARISONS, COPIES
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import new_suffix, value_types
from mptune.graph.writing import rewrite
from mptune.graph.writing.weights import NeededConstant, WeightBank, inline_tensor, write_self_contained

_Modes = Sequence[tuple[Precision, str]]
"""The precisions that a group may have, each with the input that turns its roundings on; "" where they always are."""


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
        self.frame = rewrite.frame_of(model)
        self.inside = steps_inside(fused)
        self.rounds: set[int] = set()
        """Nodes whose results rounding can change: not where they only select among rounded inputs and zero."""
        for node in model.nodes:
            floats = {slot for slot, name in enumerate(node.inputs) if name and model.info(name).is_float32}
            selects = node.op_type in COPIES | {"Relu"} and floats <= set(types.rules[node.index].inputs)
            if node.rounds and not selects:
                self.rounds.add(node.index)
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
        """Results of Constant nodes that stay nodes."""
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

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the emulation of one plan to ``path``, which must lie in the weight bank's folder."""
        return self._write(self._emulation(plan), path)

    def export(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the emulation of one plan self-contained; past 2 GiB its weights lie in ``path`` + ``.data``."""
        emulation = self._emulation(plan)
        return write_self_contained(emulation.proto, emulation.constants(), path)

    def write_switched(
        self, path: Path, switched: Collection[str], precisions: Sequence[Precision] = (Precision.FP16,)
    ) -> Path:
        """Write the emulation of all plans with no group but these reduced to ``path``, in the weight bank's folder.

        Args:
            switched: ids of the groups that have switches.
        """
        modes: dict[int, _Modes] = {
            position: [(p, self.switches[p][group.id]) for p in precisions if group.id in self.switches[p]]
            for position, group in enumerate(self.types.groups)
            if group.id in switched
        }
        return self._write(_Emulation(self, modes), path)

    def _emulation(self, plan: PrecisionPlan) -> _Emulation:
        modes: dict[int, _Modes] = {
            position: [(plan.precision[group.id], "")]
            for position, group in enumerate(self.types.groups)
            if group.id in self.switches.get(plan.precision[group.id], ())
        }
        return _Emulation(self, modes)

    def _write(self, emulation: _Emulation, path: Path) -> Path:
        emulation.proto.graph.initializer.extend(self.stored(*needed) for needed in emulation.constants())
        return write_bytes(path, [emulation.proto.SerializeToString(deterministic=True)])


class _Emulation:
    """One model, with the roundings of its nodes, and the switches; without the constants that it reads."""

    def __init__(self, emulator: Emulator, modes: Mapping[int, _Modes]) -> None:
        """Write all nodes; ``modes`` are those of the groups, by position."""
        self._emulator, self._types, self._model = emulator, emulator.types, emulator.types.model
        self._suffix, self._modes = emulator.suffix, modes
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(emulator.frame)
        self._graph = graph = self.proto.graph
        self._computed: set[str] = set()
        self._read = {output.name for output in graph.output}
        self._reduced: set[tuple[str, Precision]] = set()
        for node in self._model.nodes:
            is_constant = node.op_type == "Constant" and node.outputs[0] in self._model.initializers
            if not is_constant or node.outputs[0] in emulator.constant_nodes:
                self._add(node)
        switches = [switch for each in modes.values() for _, switch in each if switch]
        graph.input.extend(onnx.helper.make_tensor_value_info(s, onnx.TensorProto.BOOL, []) for s in switches)
        rewrite.declare_rounded_outputs(graph, self._model)

    def constants(self) -> list[NeededConstant]:
        """The constants that the nodes read."""
        needed: list[NeededConstant] = []
        for name, constant in self._model.initializers.items():
            reduced = [p for p in REDUCED if (name, p) in self._reduced]
            is_kept = constant.overridable or (constant.node_index is None and not reduced)
            if (name in self._read or is_kept) and name not in self._emulator.constant_nodes:
                needed.append((constant, name, None))
            needed += [(self._types.in_precision(name, p), name + self._suffix[p], p) for p in reduced]
        return needed

    def _add(self, node: Node) -> None:
        """Append a node, with the roundings of its inputs and outputs."""
        emulator, rule, group = self._emulator, self._types.rules[node.index], self._types.group_of[node.index]
        inputs, outputs = list(node.inputs), list(node.outputs)
        modes = self._modes.get(group, ())
        is_compared = node.op_type in COMPARISONS  # reads values as they are
        for slot in rule.inputs if modes and not is_compared else ():
            if emulator.maker.get(inputs[slot]) != group:
                inputs[slot] = self._read_by(group, inputs[slot], modes)
        roundings = modes if node.index in emulator.rounds else ()
        if node.name in emulator.inside:
            roundings = [(precision, switch) for precision, switch in roundings if precision is not FUSED_IN]
        rounded = [slot for slot in rule.outputs if roundings and outputs[slot] in emulator.maker]
        for slot in rounded:
            outputs[slot] += self._suffix["raw"]
        self._read.update(inputs, node.captures)
        rewrite.add_node(self._graph, node, inputs, outputs)
        # What fills a tensor fills it with what the precision can hold.
        fill = abs(float(fill_value(node.proto).reshape(-1)[0])) if rule.attribute == "value" else 0.0
        for slot in rounded:
            self._choose(roundings, outputs[slot], node.outputs[slot], fill if math.isfinite(fill) else 0.0)

    def _read_by(self, group: int, tensor: str, modes: _Modes) -> str:
        """The name that the nodes of a group read in place of a value that another group computes."""
        result = f"{tensor}.{group}{self._suffix['chosen']}"
        precision, switch = modes[0]
        if not switch:  # one plan: all groups of one precision read the same
            if modes[0] in self._modes.get(self._emulator.maker.get(tensor, -1), ()):
                return tensor
            result = tensor + self._suffix[f"{precision}_rounded"]
        if result not in self._computed:
            self._choose(modes, tensor, result)
        return result

    def _choose(self, modes: _Modes, tensor: str, result: str, fill: float = 0.0) -> None:
        """Append the nodes that compute ``result``: the value, rounded as the switch says that is on."""
        otherwise = tensor
        for number, (precision, switch) in enumerate(modes, 1):
            is_limited = fill > precision.largest
            if not switch:
                self._round(tensor, precision, result, is_limited=is_limited)
                return
            self._read.add(tensor)
            rounded = self._round(tensor, precision, is_limited=is_limited)
            chosen = result if number == len(modes) else f"{result}.{precision}{self._suffix['or']}"
            # A node of the model may have the name of its result.
            name = chosen + self._suffix["by"]
            self._append(rewrite.node("Where", chosen, switch, rounded, otherwise, name=name))
            otherwise = chosen

    def _round(self, tensor: str, precision: Precision, result: str = "", *, is_limited: bool = False) -> str:
        """Append the nodes that cast a value to a reduced precision and back; constants are stored in it too."""
        reduced, name = tensor + self._suffix[precision], tensor + self._suffix[f"{precision}_rounded"]
        result = result or name
        if result in self._computed:
            return result
        if tensor in self._types.constants:
            self._reduced.add((tensor, precision))
            self._append(rewrite.cast_node(reduced, result, Precision.FP32, name))
            return result
        self._read.add(tensor)
        source, switches = tensor, [s for _, s in self._modes.get(self._emulator.maker.get(tensor, -1), ())]
        is_mask = tensor not in self._types.own.sources and is_held(self._model, tensor, precision)
        if is_limited or (is_mask and all(switches)):  # only what is FP32 is limited
            source = tensor + self._suffix[f"{precision}_held"]
            self._append(*rewrite.clip_node(tensor, source, precision, self._model.opset))
            for switch in switches:
                limited, source = source, f"{source}.{switch}"
                self._append(rewrite.node("Where", source, switch, tensor, limited))
        rounding = rewrite.rounding_nodes(source, reduced, result, precision)
        rounding[-1].name = name
        self._append(*rounding)
        return result

    def _append(self, *nodes: onnx.NodeProto) -> None:
        self._computed.update(node.output[0] for node in nodes)
        self._graph.node.extend(nodes)
