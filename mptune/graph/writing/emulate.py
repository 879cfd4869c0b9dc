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
from mptune.graph.loading.model import needed_nodes
from mptune.graph.loading.tensors import declaration, fill_value
from mptune.graph.ops import COMPARISONS, COPIES
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.value_types import new_suffix, value_types
from mptune.graph.writing import rewrite
from mptune.graph.writing.weights import NeededConstant, WeightBank, inline_tensor, write_self_contained

# The precisions that a group may have, each with the input that turns its roundings on; "" where they always are.
_Modes = Sequence[tuple[Precision, str]]
_Emulation = tuple[onnx.ModelProto, list[NeededConstant]]
Cut = tuple[Collection[str], Collection[str]]  # values that a part of a model is given, and outputs that it computes


class Emulator:
    """Writes emulations of one model's plans. Made once; a plan then takes milliseconds."""

    def __init__(self, grouped: GroupedModel, bank: WeightBank | None = None, fused: Sequence[FusedNodes] = ()) -> None:
        """Prepare for one model, of which the engine computes ``fused`` nodes as one in FP16.

        Neither their inner results nor what a node with ``rounds=False`` computes is rounded.
        """
        self.types = types = value_types(grouped)
        model = grouped.model
        self.frame = rewrite.frame_of(model)
        self.inside = steps_inside(fused)
        # Nodes whose results rounding can change: not where they only select among rounded inputs and zero.
        self.rounds: set[int] = set()
        for node in model.nodes:
            floats = {slot for slot, name in enumerate(node.inputs) if name and model.info(name).is_float32}
            selects = node.op_type in COPIES | {"Relu"} and floats <= set(types.rules[node.index].inputs)
            if node.rounds and not selects:
                self.rounds.add(node.index)
        # Value -> position of the group that rounds it where it is computed.
        self.maker = {
            node.outputs[slot]: types.group_of[node.index]
            for node, rule in zip(model.nodes, types.rules, strict=True)
            for slot in rule.outputs
            if node.outputs[slot] not in types.own.sources  # whoever reads these rounds them, in its own precision
        }
        kinds = ["raw", "chosen", "by", "or"]
        kinds += [f"{p}{what}" for p in REDUCED for what in ("", "_rounded", "_held", "_switch")]
        self.suffix = {kind: new_suffix(model, kind) for kind in kinds}
        self.stored = inline_tensor if bank is None else bank.tensor_or_inline
        in_bank = {} if bank is None else bank.places[Precision.FP32]
        # Results of Constant nodes that stay nodes.
        constant_nodes = (name for name, c in model.initializers.items() if c.node_index is not None)
        self.constant_nodes = frozenset(name for name in constant_nodes if name not in in_bank)
        # Precision -> group id -> name of the scalar boolean input that puts it there; of groups that can have it.
        self.switches: dict[Precision, dict[str, str]] = {}
        for p in REDUCED:
            able = (group.id for k, group in enumerate(grouped.groups) if k not in types.lacking(p))
            self.switches[p] = {group: group + self.suffix[f"{p}_switch"] for group in able}

    def on(self, plan: PrecisionPlan) -> frozenset[str]:
        """The switches that are on under a plan."""
        by_precision = self.switches.items()
        return frozenset(s for p, switches in by_precision for g, s in switches.items() if plan.precision[g] is p)

    def write(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the emulation of one plan to ``path``, which must lie in the weight bank's folder."""
        return self._write(self._modes(plan), path)

    def export(self, plan: PrecisionPlan, path: Path) -> Path:
        """Write the emulation of one plan self-contained; past 2 GiB its weights lie in ``path`` + ``.data``."""
        return write_self_contained(*self._emulation(self._modes(plan)), path)

    def write_switched(
        self,
        path: Path,
        switched: Collection[str],
        precisions: Sequence[Precision] = (Precision.FP16,),
        cut: Cut | None = None,  # of these groups, where only what they change is to run
    ) -> Path:
        """Write the emulation of all plans that reduce these groups (ids) alone to ``path``, in the bank's folder."""
        groups = [(position, group.id) for position, group in enumerate(self.types.groups) if group.id in switched]
        switches = [(p, self.switches[p]) for p in precisions]
        modes = {k: [(p, by_group[name]) for p, by_group in switches if name in by_group] for k, name in groups}
        return self._write(modes, path, cut)

    def cut(self, switched: Collection[str]) -> Cut:
        """What nodes that these groups change read of what they leave as it is; and the outputs that they change."""
        types, model = self.types, self.types.model
        changed, read = set[str](), dict[str, None]()
        for node, group in zip(model.nodes, types.group_of, strict=True):
            sources = (*node.inputs, *node.captures)
            if (group >= 0 and types.groups[group].id in switched) or not changed.isdisjoint(sources):
                changed.update(filter(None, node.outputs))
                read.update(dict.fromkeys(sources))
        # The part reads graph inputs itself, and computes itself what depends on constants alone.
        given = [v for v in read if v in model.producer and v not in changed and not types.facts.is_static(v)]
        return given, [output.name for output in model.outputs if output.name in changed]

    def _modes(self, plan: PrecisionPlan) -> dict[int, _Modes]:
        """The modes of the groups that a plan reduces, by position."""
        wanted = [(plan.precision[group.id], group.id) for group in self.types.groups]
        return {k: [(p, "")] for k, (p, name) in enumerate(wanted) if name in self.switches.get(p, ())}

    def _write(self, modes: Mapping[int, _Modes], path: Path, cut: Cut | None = None) -> Path:
        proto, constants = self._emulation(modes, cut)
        proto.graph.initializer.extend(self.stored(*needed) for needed in constants)
        return write_bytes(path, [proto.SerializeToString(deterministic=True)])

    def _emulation(self, modes: Mapping[int, _Modes], cut: Cut | None = None) -> _Emulation:
        """The model with the roundings of its nodes, and the switches; and the constants that it reads."""
        types, model, suffix = self.types, self.types.model, self.suffix
        proto = onnx.ModelProto()
        proto.CopyFrom(self.frame)
        graph, nodes = proto.graph, list(model.nodes)
        if cut is not None:
            given, outputs = cut
            nodes = needed_nodes(model, outputs, given)
            graph.input.extend(declaration(model.info(name)) for name in given)
            del graph.output[:]
            graph.output.extend(value for value in self.frame.graph.output if value.name in outputs)
        computed: set[str] = set()  # by the nodes that are added
        read = {output.name for output in graph.output}
        reduced: set[tuple[str, Precision]] = set()  # constants that are read in a reduced precision

        def append(*nodes: onnx.NodeProto) -> None:
            computed.update(node.output[0] for node in nodes)
            graph.node.extend(nodes)

        def round_to(precision: Precision, tensor: str, result: str = "", *, is_limited: bool = False) -> str:
            """Append the nodes that cast a value to a reduced precision and back; constants are stored in it too."""
            cast, name = tensor + suffix[precision], tensor + suffix[f"{precision}_rounded"]
            result = result or name
            if result in computed:
                return result
            if tensor in types.constants:
                reduced.add((tensor, precision))
                append(rewrite.cast_node(cast, result, Precision.FP32, name))
                return result
            read.add(tensor)
            source, switches = tensor, [s for _, s in modes.get(self.maker.get(tensor, -1), ())]
            is_mask = tensor not in types.own.sources and is_held(model, tensor, precision)
            if is_limited or (is_mask and all(switches)):  # only what is FP32 is limited
                source = tensor + suffix[f"{precision}_held"]
                append(*rewrite.clip_node(tensor, source, precision, model.opset))
                for switch in switches:
                    limited, source = source, f"{source}.{switch}"
                    append(rewrite.node("Where", source, switch, tensor, limited))
            rounding = rewrite.rounding_nodes(source, cast, result, precision)
            rounding[-1].name = name
            append(*rounding)
            return result

        def choose(roundings: _Modes, tensor: str, result: str, fill: float = 0.0) -> None:
            """Append the nodes that compute ``result``: the value, rounded as the switch says that is on."""
            otherwise = tensor
            for number, (precision, switch) in enumerate(roundings, 1):
                is_limited = fill > precision.largest
                if not switch:
                    round_to(precision, tensor, result, is_limited=is_limited)
                    return
                read.add(tensor)
                rounded = round_to(precision, tensor, is_limited=is_limited)
                chosen = result if number == len(roundings) else f"{result}.{precision}{suffix['or']}"
                # A node of the model may have the name of its result.
                append(rewrite.node("Where", chosen, switch, rounded, otherwise, name=chosen + suffix["by"]))
                otherwise = chosen

        for node in nodes:
            is_constant = node.op_type == "Constant" and node.outputs[0] in model.initializers
            if is_constant and node.outputs[0] not in self.constant_nodes:
                continue
            rule, group = types.rules[node.index], types.group_of[node.index]
            inputs, outputs = [*node.inputs], [*node.outputs]
            own = modes.get(group, ())
            is_compared = node.op_type in COMPARISONS  # reads values as they are
            for slot in rule.inputs if own and not is_compared else ():
                value, (precision, switch) = inputs[slot], own[0]
                maker = self.maker.get(value, -1)
                # Under one plan, all groups of one precision read the same.
                if maker == group or (not switch and own[0] in modes.get(maker, ())):
                    continue
                inputs[slot] += f".{group}{suffix['chosen']}" if switch else suffix[f"{precision}_rounded"]
                if inputs[slot] not in computed:
                    choose(own, value, inputs[slot])
            roundings = own if node.index in self.rounds else ()
            if node.name in self.inside:
                roundings = [mode for mode in roundings if mode[0] is not FUSED_IN]
            rounded = [slot for slot in rule.outputs if roundings and outputs[slot] in self.maker]
            for slot in rounded:
                outputs[slot] += suffix["raw"]
            read.update(inputs, node.captures)
            rewrite.add_node(graph, node, inputs, outputs)
            # What fills a tensor fills it with what the precision can hold.
            fill = abs(float(fill_value(node.proto).reshape(-1)[0])) if rule.attribute == "value" else 0.0
            for slot in rounded:
                choose(roundings, outputs[slot], node.outputs[slot], fill if math.isfinite(fill) else 0.0)
        switches = [switch for each in modes.values() for _, switch in each if switch]
        graph.input.extend(onnx.helper.make_tensor_value_info(s, onnx.TensorProto.BOOL, []) for s in switches)
        rewrite.declare_rounded_outputs(graph, model)
        needed: list[NeededConstant] = []
        for name, constant in model.initializers.items():
            precisions = [p for p in REDUCED if (name, p) in reduced]
            stays = constant.overridable or (constant.node_index is None and not precisions)
            if (name in read or stays) and name not in self.constant_nodes:
                needed.append((constant, name, None))
            needed += [(constant, name + suffix[p], p) for p in precisions]
        return proto, needed
