"""One emulation for many plans: a boolean input for each group and precision turns its roundings on at run time.

``emulate`` writes one model for one plan; this is one model for all plans of some groups, in one session.
A value of these groups is rounded in a branch of an If, or always, and a Where selects the rounded or the exact one. An
If avoids most of the work on a CPU; on a GPU it would wait for the host each time. Values that no rounding changes have
neither: a mask that is computed from constants alone is still folded when the session opens. Such a model may begin at
a waist, with the values at the waist as its inputs: the groups before it are FP32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import onnx
import onnx.helper

from mptune.files import write_bytes
from mptune.graph.casting.small_integers import small_integers
from mptune.graph.casting.value_types import ValueTypes, new_suffix, value_types
from mptune.graph.fused import FUSED_IN, FusedNodes, FusedReads, steps_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.carried import is_held
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import ONNX_TYPES
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import needs_rounding
from mptune.graph.writing.model_file import clip_node, declare_rounded_outputs, saturate
from mptune.graph.writing.waists import Waist
from mptune.graph.writing.weights import WeightBank

_BEFORE_ALL = Waist()
_NO_SOURCES: Mapping[Precision, str] = MappingProxyType({})
_NO_READS: Mapping[int, tuple[str, Collection[int]]] = MappingProxyType({})


class _Kinds(NamedTuple):
    """What the names of the things of one precision end with."""

    switch: str
    reduced: str
    rounded: str
    saturated: str


_KINDS: Mapping[Precision, _Kinds] = {
    Precision.FP16: _Kinds("switch", "half", "rounded", "saturated"),
    Precision.BF16: _Kinds("switch_bf16", "bf16", "rounded_bf16", "saturated_bf16"),
}


class SwitchedEmulator:
    """Writes switched emulations of one model."""

    def __init__(
        self,
        grouped: GroupedModel,
        bank: WeightBank,
        *,
        branches: bool = False,
        fused: Sequence[FusedNodes] = (),
    ) -> None:
        """Prepare for one model.

        Args:
            branches: round in branches of an If, not beside a Where.
        """
        self._types = value_types(grouped)
        self._shared_reads = FusedReads(self._types, fused).readers
        self._inside = steps_inside(fused)
        self._bank = bank
        self._branches = branches
        self._exact = frozenset(small_integers(grouped.model))
        kinds = ["raw", "same", "chosen", "by", "or", "any", "both", *chain.from_iterable(_KINDS.values())]
        self._suffix = {kind: new_suffix(grouped.model, kind) for kind in kinds}
        self.switches: Mapping[Precision, Mapping[str, str]] = {
            precision: {
                group.id: group.id + self._suffix[names.switch]
                for position, group in enumerate(grouped.groups)
                if position not in self._types.lacking(precision)
            }
            for precision, names in _KINDS.items()
        }
        """Precision -> group id -> name of the scalar boolean input that puts it there; of groups that can have it."""

    def on(self, plan: PrecisionPlan) -> frozenset[str]:
        """The switches that are on under a plan."""
        return frozenset(
            switch
            for precision, switches in self.switches.items()
            for group, switch in switches.items()
            if plan.precision[group] is precision
        )

    def write(
        self,
        path: Path,
        switched: Collection[str],
        start: Waist = _BEFORE_ALL,
        precisions: Sequence[Precision] = (Precision.FP16,),
    ) -> Path:
        """Write the emulation of all plans with no group but these reduced to ``path``, in the weight bank's folder.

        Args:
            switched: ids of the groups that have switches; none of their nodes lies before ``start``.
            start: its tensors become inputs, and no node before it is there.
        """
        switches = {p: {g: name for g, name in self.switches[p].items() if g in switched} for p in precisions}
        writing = _Writing(
            self._types,
            self._suffix,
            switches,
            branches=self._branches,
            exact=self._exact,
            shared_reads=self._shared_reads,
            inside=self._inside,
        )
        for node in self._types.model.nodes[start.last + 1 :]:
            writing.add(node)
        return write_bytes(path, [writing.finish(self._bank, start.tensors, self._types.model.proto.graph.output)])

    def write_head(self, path: Path, waists: Sequence[Waist]) -> Path:
        """Write the FP32 model whose outputs are the tensors of these waists."""
        model = self._types.model
        writing = _Writing(self._types, self._suffix, {}, branches=False)
        for node in model.nodes[: max(waist.last for waist in waists) + 1]:
            writing.add(node)
        tensors = dict.fromkeys(tensor for waist in waists for tensor in waist.tensors)
        return write_bytes(path, [writing.finish(self._bank, (), [_value(model, tensor) for tensor in tensors])])


class _Writing:
    """One model while it is written."""

    def __init__(
        self,
        types: ValueTypes,
        suffix: Mapping[str, str],
        switches: Mapping[Precision, Mapping[str, str]],
        *,
        branches: bool,
        exact: Collection[str] = (),
        shared_reads: Mapping[int, tuple[str, Collection[int]]] = _NO_READS,
        inside: Collection[str] = (),
    ) -> None:
        self._types = types
        self._shared_reads = shared_reads
        self._inside = inside
        self._exact = exact
        self._model = types.model
        self._suffix = suffix
        self._branches = branches
        ids = [group.id for group in types.groups]
        self._switch: dict[int, list[tuple[Precision, str]]] = {}
        for precision, by_group in switches.items():
            for group, name in by_group.items():
                self._switch.setdefault(ids.index(group), []).append((precision, name))
        self._maker = {
            node.outputs[slot]: types.group_of[node.index]
            for node, rule in zip(types.model.nodes, types.rules, strict=True)
            for slot in rule.outputs
        }
        self._graph = onnx.GraphProto(name="emulation")
        self._made: set[str] = set()
        self._read: set[str] = set()
        self._reduced: dict[Precision, set[str]] = {}

    def add(self, node: Node) -> None:
        """Append a node, with the switched roundings of its inputs and outputs."""
        if node.op_type == "Constant" and node.outputs[0] in self._model.initializers:
            return
        rule, group = self._types.rules[node.index], self._types.group_of[node.index]
        inputs, outputs, behind = list(node.inputs), list(node.outputs), list[int]()
        rounded_in: Sequence[tuple[Precision, str]] = ()
        switch = self._switch.get(group)
        if switch is not None:
            for slot in rule.inputs:
                if self._maker.get(inputs[slot]) != group and inputs[slot] not in self._exact:
                    inputs[slot] = self._read_by(node, inputs[slot], group, switch)
            if needs_rounding(self._types, node):
                rounded_in = switch
                if node.name in self._inside:
                    rounded_in = [(precision, name) for precision, name in switch if precision is not FUSED_IN]
                behind = [s for s in rule.outputs if rounded_in and outputs[s] not in self._exact]
        for slot in behind:
            outputs[slot] += self._suffix["raw"]
        self._read.update(inputs, node.captures)
        proto = self._graph.node.add()
        proto.CopyFrom(node.proto)
        proto.name = node.name
        proto.input[:], proto.output[:] = inputs, outputs
        saturated = self._saturated(proto, [precision for precision, _ in rounded_in]) if behind else {}
        for slot in behind:
            sources = {precision: outputs[slot] + suffix for precision, suffix in saturated.items()}
            self._choose(rounded_in, outputs[slot], node.outputs[slot], sources)

    def _saturated(self, node: onnx.NodeProto, precisions: Sequence[Precision]) -> dict[Precision, str]:
        """Append a node again for each precision that cannot hold its attributes; what its outputs' names end with."""
        suffixes = {}
        for precision in precisions:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            if saturate(copy, precision):
                suffixes[precision] = self._suffix[_KINDS[precision].saturated]
                copy.name += suffixes[precision]
                copy.output[:] = [name + suffixes[precision] for name in node.output]
                self._append(copy)
        return suffixes

    def _read_by(self, node: Node, tensor: str, group: int, switch: Sequence[tuple[Precision, str]]) -> str:
        """The name that a node reads in place of a value that another group computes."""
        source, others = self._shared_reads.get(node.index, ("", ()))
        if source != tensor:
            return self._chosen(tensor, group, switch)
        by = {self._types.group_of[index] for index in others}
        if group in by:
            return self._chosen(tensor, group, switch)
        shared = []
        for precision, name in switch:
            also = [n for position in sorted(by) for p, n in self._switch.get(position, ()) if p is precision]
            if precision is not FUSED_IN:
                shared.append((precision, name))
            elif also:
                shared.append((precision, self._both(name, also, f"{tensor}.{group}")))
        return self._chosen(tensor, group, shared) if shared else tensor

    def _both(self, switch: str, others: Sequence[str], stem: str) -> str:
        """The name of a value that says whether a switch is on, and one of the others."""
        result = stem + self._suffix["both"]
        if result not in self._made:
            on = others[0]
            for number, other in enumerate(others[1:]):
                self._append(_node("Or", [on, other], f"{stem}.{number}{self._suffix['any']}"))
                on = f"{stem}.{number}{self._suffix['any']}"
            self._append(_node("And", [switch, on], result))
        return result

    def _chosen(self, tensor: str, group: int, switch: Sequence[tuple[Precision, str]]) -> str:
        """The name that the nodes of a group read in place of a value that another group computes."""
        result = f"{tensor}.{group}{self._suffix['chosen']}"
        if result not in self._made:
            self._choose(switch, tensor, result)
        return result

    def _choose(
        self,
        switches: Sequence[tuple[Precision, str]],
        tensor: str,
        result: str,
        sources: Mapping[Precision, str] = _NO_SOURCES,
    ) -> None:
        """Append the nodes that compute ``result``: the value, rounded as the switch says that is on.

        ``sources`` are values that are rounded in place of ``tensor``.
        """
        otherwise = tensor
        for number, (precision, switch) in enumerate(switches, 1):
            chosen = result if number == len(switches) else f"{result}.{precision}{self._suffix['or']}"
            self._choose_between(precision, switch, sources.get(precision, tensor), otherwise, chosen)
            otherwise = chosen

    def _choose_between(self, precision: Precision, switch: str, tensor: str, otherwise: str, result: str) -> None:
        """Append the nodes that compute ``result``: ``tensor`` rounded where the switch is on, else ``otherwise``."""
        self._read.update((switch, tensor))
        name = result + self._suffix["by"]  # a node of the model may have the name of its result
        if self._branches:
            same = result + self._suffix["same"]
            branches = {
                "then_branch": _branch(self._rounding(precision, tensor, result)),
                "else_branch": _branch([_node("Identity", [otherwise], same)]),
            }
            self._append(_node("If", [switch], result, name, **branches))
            return
        rounding = self._rounding(precision, tensor, tensor)
        rounded = rounding[-1].output[0]
        if rounded not in self._made:
            self._append(*rounding)
        self._append(_node("Where", [switch, rounded, otherwise], result, name))

    def _rounding(self, precision: Precision, tensor: str, stem: str) -> list[onnx.NodeProto]:
        """The nodes that cast a value to a reduced precision and back; constants are stored in it too."""
        kinds = _KINDS[precision]
        reduced, rounded = stem + self._suffix[kinds.reduced], stem + self._suffix[kinds.rounded]
        if tensor in self._types.constants:
            self._reduced.setdefault(precision, set()).add(tensor)
            return [_node("Cast", [tensor + self._suffix[kinds.reduced]], rounded, to=onnx.TensorProto.FLOAT)]
        held, source = list[onnx.NodeProto](), tensor
        if is_held(self._model, tensor, precision):
            source = stem + self._suffix[kinds.saturated]
            held = clip_node(tensor, source, precision, self._model.opset)
            for _, switch in self._switch.get(self._maker.get(tensor, -1), ()):  # only what is FP32 is limited
                limited, source = source, f"{source}.{switch}"
                held.append(_node("Where", [switch, tensor, limited], source))
        return [
            *held,
            _node("Cast", [source], reduced, to=ONNX_TYPES[precision]),
            _node("Cast", [reduced], rounded, to=onnx.TensorProto.FLOAT),
        ]

    def _append(self, *nodes: onnx.NodeProto) -> None:
        self._made.update(node.output[0] for node in nodes)
        self._graph.node.extend(nodes)

    def finish(self, bank: WeightBank, entered: Sequence[str], outputs: Sequence[onnx.ValueInfoProto]) -> bytes:
        """The model, with inputs and constants for what its nodes read."""
        model, graph = self._model, self._graph
        read = self._read | {output.name for output in outputs}
        for name, constant in model.initializers.items():
            if name in read:
                graph.initializer.append(bank.tensor_or_inline(constant, name))
            for precision, names in self._reduced.items():
                if name in names:
                    stored = name + self._suffix[_KINDS[precision].reduced]
                    graph.initializer.append(bank.tensor_or_inline(constant, stored, precision))
        graph.sparse_initializer.extend(s for s in model.proto.graph.sparse_initializer if s.values.name in read)
        graph.input.extend(value for value in model.proto.graph.input if value.name in read)
        graph.input.extend(_value(model, name) for name in entered if name in read)
        for switch in (name for names in self._switch.values() for _, name in names):
            graph.input.append(onnx.helper.make_tensor_value_info(switch, onnx.TensorProto.BOOL, []))
        graph.output.extend(outputs)
        declare_rounded_outputs(graph, model)
        proto = onnx.ModelProto(ir_version=max(model.proto.ir_version, 4), graph=graph)
        proto.opset_import.extend(model.proto.opset_import)
        return bytes(proto.SerializeToString(deterministic=True))


def _node(op_type: str, inputs: Sequence[str], output: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    return onnx.helper.make_node(op_type, inputs, [output], name=name or output, **attributes)


def _branch(nodes: Sequence[onnx.NodeProto]) -> onnx.GraphProto:
    """A subgraph that reads the graph around it, and whose last node computes its FP32 output."""
    output = onnx.helper.make_tensor_value_info(nodes[-1].output[0], onnx.TensorProto.FLOAT, None)
    return onnx.helper.make_graph(nodes, nodes[-1].name, [], [output])


def _value(model: Model, name: str) -> onnx.ValueInfoProto:
    code = onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
    return onnx.helper.make_tensor_value_info(name, code, None)
