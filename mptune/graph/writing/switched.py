"""One emulation for many plans: a boolean input for each group and precision turns its roundings on at run time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.helper

from mptune.errors import ModelError
from mptune.files import write_bytes
from mptune.graph.casting.value_types import ValueTypes, new_suffix, value_types
from mptune.graph.fused import FUSED_IN, FusedNodes, FusedReads, steps_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import DATA_MOVEMENT
from mptune.graph.hazards.constants import is_held
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import needs_rounding
from mptune.graph.writing.model_file import clip_node, declare_rounded_outputs, rounding_nodes, saturate
from mptune.graph.writing.weights import WeightBank

LIMIT = 256

"""Every whole number up to this is a value of FP16 and of BF16."""

_MOST_ELEMENTS = 1 << 16

"""Constants of more elements are weights: none is looked at."""

_MOVES = DATA_MOVEMENT - {"Cast", "Dropout"} | {
    *("Concat", "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Where", "Pad", "Tile"),
    *("Expand", "Split", "Relu", "Neg", "Abs", "Max", "Min"),
}

"""Operators whose every output element is one of their input elements, but for its sign, or zero."""

_REDUCES = frozenset({"ScatterND", "ScatterElements"})

"""Of these, those that may add what they write to what is there."""


def small_integers(model: Model) -> dict[str, int]:
    """The float values that are whole numbers of at most ``LIMIT`` for any input -> bound of their magnitude."""
    bounds: dict[str, int] = {}
    for name, constant in model.initializers.items():
        if model.info(name).is_float32 and not constant.overridable and np.prod(constant.shape) <= _MOST_ELEMENTS:
            _keep(bounds, name, _bound_of(constant.numpy()))
    for node in model.nodes:
        if node.is_standard and not node.has_subgraph:
            bound = _bound(model, node, bounds)
            for name in node.outputs if bound is not None else ():
                if name and model.info(name).is_float32:
                    _keep(bounds, name, bound)
    return bounds


def _keep(bounds: dict[str, int], name: str, bound: int | None) -> None:
    if bound is not None and bound <= LIMIT:
        bounds[name] = bound


def _bound_of(values: np.ndarray) -> int | None:
    """The largest magnitude of whole numbers; None where there is another number among them."""
    if not np.isfinite(values).all() or (values != np.rint(values)).any():
        return None
    return int(np.abs(values).max(initial=0.0))


def _bound(model: Model, node: Node, bound_of: dict[str, int]) -> int | None:
    """The bound of a node's float outputs; None where they may be other numbers."""
    if node.op_type == "ConstantOfShape":
        return _bound_of(fill_value(node.proto))
    if node.op_type == "Cast":
        return 1 if model.info(node.inputs[0]).dtype == "bool" else bound_of.get(node.inputs[0])
    bounds = [bound_of.get(name) for name in node.inputs if name and model.info(name).is_float32]
    input_bounds = [bound for bound in bounds if bound is not None]
    if not input_bounds or len(input_bounds) < len(bounds):
        return None
    if node.op_type in _MOVES:
        adds = node.op_type in _REDUCES and any(a.name == "reduction" for a in node.proto.attribute)
        return None if adds else max(input_bounds)
    if node.op_type in ("Add", "Sub"):
        return sum(input_bounds)
    if node.op_type == "Mul":
        return int(np.prod(input_bounds))
    return None


@dataclass(frozen=True)
class Waist:
    """A place between two nodes where a model can be entered.

    Attributes:
        last: index of the last node before it; -1 before all nodes.
        tensors: the values computed before it and read after it, without constants and the model's inputs.
        nbytes: of these values together, for one sample.
    """

    last: int = -1
    tensors: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class Stretch:
    """Consecutive groups, and the waist before all their nodes."""

    start: Waist
    groups: tuple[str, ...]


def find_stretches(
    grouped: GroupedModel,
    shapes: Mapping[str, Sequence[int]],
    count: int,
    max_bytes: int,
) -> tuple[Stretch, ...]:
    """Divide the groups into about ``count`` stretches of about as many groups each, at waists.

    Args:
        shapes: concrete shape of FP32 values; no waist is made where one is missing.
        max_bytes: what the values of all waists together may take for one sample.

    Returns:
        In the model's order; the first starts before all nodes.
    """
    index = {node.name: node.index for node in grouped.model.nodes}
    begins = {group.id: min(index[name] for name in group.nodes) for group in grouped.groups}
    ordered = sorted(begins, key=lambda group: begins[group])
    waists = _waists(grouped.model, shapes)
    start, left, done = Waist(), max_bytes, 0
    stretches = []
    for number in range(1, count + 1):
        # End at the narrowest waist within half a stretch of the even division; without one, the next stretch starts
        # at the same waist.
        low, middle, high = (_rounded(len(ordered) * (number + shift) / count) for shift in (-0.5, 0, 0.5))
        end, following = middle, start
        if number < count and high < len(ordered):
            first, last = begins[ordered[max(low, done)]], begins[ordered[high]]
            near = [w for w in waists if max(first, start.last + 1) <= w.last < last and w.nbytes <= left]
            if near:
                following = min(near, key=lambda w: (w.nbytes, abs(2 * w.last - first - last)))
                left -= following.nbytes
                end = sum(begins[group] <= following.last for group in ordered)
        if end > done:
            stretches.append(Stretch(start, tuple(ordered[done:end])))
        start, done = following, max(end, done)
    return tuple(stretches)


def _rounded(position: float) -> int:
    """The nearest integer, halves rounded up: Python's ``round`` takes the even one, which shifts only some ends."""
    return math.floor(position + 0.5)


def _waists(model: Model, shapes: Mapping[str, Sequence[int]]) -> list[Waist]:
    """The cuts of the graph before the first output of the model whose tensors all have known sizes."""
    outputs = {output.name for output in model.outputs}
    last_read: dict[str, int] = {}
    for node in model.nodes:
        for name in (*node.inputs, *node.captures):
            if name in model.producer and name not in model.initializers:
                last_read[name] = node.index
    waists: list[Waist] = []
    live: dict[str, int | None] = {}
    for node in model.nodes:
        live.update((name, _nbytes(model, name, shapes)) for name in node.outputs if name in last_read)
        live = {name: size for name, size in live.items() if last_read[name] > node.index}
        if not outputs.isdisjoint(node.outputs):
            break
        sizes = [size for size in live.values() if size is not None]
        if live and len(sizes) == len(live):
            waists.append(Waist(node.index, tuple(live), sum(sizes)))
    return waists


def _nbytes(model: Model, name: str, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Size of a value; None where it is not known, or no tensor."""
    info = model.info(name)
    shape = shapes.get(name, info.shape)
    try:
        itemsize = info.numpy_dtype.itemsize
    except ModelError:
        return None
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        return None
    return math.prod(int(dim or 0) for dim in shape) * itemsize


_BEFORE_ALL = Waist()

_NO_SOURCES: Mapping[Precision, str] = MappingProxyType({})

_NO_READS: Mapping[int, tuple[str, Collection[int]]] = MappingProxyType({})


_KINDS = ("switch", "reduced", "rounded", "saturated")
"""What the names of the things of a precision end with, and its name behind that."""


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
        kinds = [
            "raw",
            "same",
            "chosen",
            "by",
            "or",
            "any",
            "both",
            *(f"{kind}_{p}" for kind in _KINDS for p in REDUCED),
        ]
        self._suffix = {kind: new_suffix(grouped.model, kind) for kind in kinds}
        self.switches: Mapping[Precision, Mapping[str, str]] = {
            precision: {
                group.id: group.id + self._suffix[f"switch_{precision}"]
                for position, group in enumerate(grouped.groups)
                if position not in self._types.lacking(precision)
            }
            for precision in REDUCED
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
                suffixes[precision] = self._suffix[f"saturated_{precision}"]
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
        reduced, rounded = (stem + self._suffix[f"{kind}_{precision}"] for kind in ("reduced", "rounded"))
        if tensor in self._types.constants:
            self._reduced.setdefault(precision, set()).add(tensor)
            return [_node("Cast", [tensor + self._suffix[f"reduced_{precision}"]], rounded, to=onnx.TensorProto.FLOAT)]
        held, source = list[onnx.NodeProto](), tensor
        if is_held(self._model, tensor, precision):
            source = stem + self._suffix[f"saturated_{precision}"]
            held = clip_node(tensor, source, precision, self._model.opset)
            for _, switch in self._switch.get(self._maker.get(tensor, -1), ()):  # only what is FP32 is limited
                limited, source = source, f"{source}.{switch}"
                held.append(_node("Where", [switch, tensor, limited], source))
        return [*held, *rounding_nodes(source, reduced, rounded, precision)]

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
                    stored = name + self._suffix[f"reduced_{precision}"]
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
