"""A model taken apart once into serialised pieces, from which variants are put together in milliseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import RunError
from mptune.graph import wire
from mptune.graph.flow import Flow, Resolution
from mptune.graph.model import Model, Node
from mptune.graph.tensors import Initializer
from mptune.graph.weights import WeightBank, inline_tensor, round_to_fp16

SELF_CONTAINED_LIMIT = 1_900_000_000
"""Bytes up to which one file holds the model: protobuf messages end at 2 GiB."""

_CAST_CACHE = 1 << 16
_HOLD_BELOW_BYTES = 1 << 16


class Suffixed(dict[str, str]):
    """Name -> the name with a suffix, made once: look-ups compare objects, not letters."""

    def __init__(self, suffix: str) -> None:
        super().__init__()
        self._suffix = suffix

    def __missing__(self, name: str) -> str:
        self[name] = made = name + self._suffix
        return made


@dataclass(frozen=True)
class Spelling:
    """The names that FP16 nodes use under every plan.

    Attributes:
        constants: FP32 constants -> what FP16 nodes read in their place.
        outputs: values -> what FP16 nodes compute in their place.
        retyped: whether FP16 nodes that state their output's type in an attribute state FP16.
    """

    constants: Mapping[str, str]
    outputs: Mapping[str, str]
    retyped: bool


@dataclass(frozen=True)
class Variant:
    """How a variant's nodes differ from the model's, beside what ``Spelling`` says.

    Attributes:
        follow: new names of what FP16 nodes read at inputs that follow their precision.
        other: new names of FP32 values everywhere else.
        any_type: new names for operators that read either type.
        after: value -> the nodes that stand right after its producer.
        lead: nodes before all others.
        constants: initializers, as fields of the graph.
        dropped: indices of nodes that the variant leaves out.
    """

    follow: Mapping[str, str]
    other: Mapping[str, str]
    any_type: Mapping[str, str]
    after: Mapping[str, bytes]
    lead: Sequence[bytes]
    constants: Sequence[wire.Piece]
    dropped: Collection[int]


_FOLLOW, _OTHER, _ANY_TYPE = range(3)


class _Names(NamedTuple):
    """A node's inputs and outputs in one precision, as fields, where no variant says otherwise.

    ``variable``: the inputs that a variant may rename, as (slot, name in the model, which of the variant's maps).
    """

    fields: tuple[bytes, ...]
    rest_size: int
    variable: tuple[tuple[int, str, int], ...]

    def spell(self, maps: Sequence[Mapping[str, str]], inputs: Mapping[str, bytes]) -> bytes:
        """The beginning of the node as a field of the graph, up to its name, under the names of a variant."""
        fields = list(self.fields)
        for slot, name, kind in self.variable:
            renamed = maps[kind].get(name)
            if renamed is not None:
                fields[slot] = inputs[renamed]
        names = b"".join(fields)
        return wire.opening(wire.GRAPH_NODE, len(names) + self.rest_size) + names


class _Inputs(dict[str, bytes]):
    """Name -> the field of a node that reads it."""

    def __missing__(self, name: str) -> bytes:
        self[name] = made = wire.string(wire.NODE_INPUT, name)
        return made


class Parts:
    """The pieces of one model: each node's names in either precision, its unchanging rest, and the frame around them.

    A node is three pieces: its inputs and outputs, everything else about it, and what a variant puts behind it. A plan
    costs one selection over all nodes, and work only where a name changes.
    """

    def __init__(self, flow: Flow, spelling: Spelling) -> None:
        self.flow = flow
        self.model = model = flow.model
        self._spelling = spelling
        self._inputs = _Inputs()
        rests = [_held(node) for node in model.nodes]
        retyped = (n for n in model.nodes if flow.rules[n.index].attribute and spelling.retyped)
        self._retyped = {n.index: _node_rest(_retype(n)) for n in retyped}
        self._fp32_names = [self._names(node, False, len(rest)) for node, rest in zip(model.nodes, rests, strict=True)]
        self._fp16_names = [
            self._names(node, True, len(self._retyped.get(node.index, rest)))
            for node, rest in zip(model.nodes, rests, strict=True)
        ]
        unchanged: tuple[Mapping[str, str], ...] = ({}, {}, {})
        self._fp16_heads = [names.spell(unchanged, self._inputs) for names in self._fp16_names]
        self._fp32: list[wire.Piece] = [b""] * (3 * len(model.nodes))
        self._fp32[0::3] = [names.spell(unchanged, self._inputs) for names in self._fp32_names]
        self._fp32[1::3] = rests
        self._frame, self._graph_rest = _frame(model)

    def _names(self, node: Node, is_fp16: bool, rest_size: int) -> _Names:
        rule, model, spelling = self.flow.rules[node.index], self.flow.model, self._spelling
        inputs, outputs = list(node.inputs), list(node.outputs)
        variable = []
        for slot, name in enumerate(node.inputs):
            follows = is_fp16 and slot in rule.inputs
            if follows and name in spelling.constants:
                inputs[slot] = spelling.constants[name]
            elif model.info(name).dtype in ("float", "float16"):
                variable.append((slot, name, _FOLLOW if follows else _ANY_TYPE if slot in rule.reads_any else _OTHER))
        if is_fp16 and rule.outputs:
            outputs = [spelling.outputs.get(name, name) for name in outputs]
        fields = [self._inputs[name] for name in inputs]
        return _Names((*fields, wire.strings(wire.NODE_OUTPUT, outputs)), rest_size, tuple(variable))

    def put_together(self, resolution: Resolution, variant: Variant) -> list[wire.Piece]:
        """The serialised variant in pieces."""
        fp16_nodes, nodes, producer = resolution.fp16_nodes, self.model.nodes, self.model.producer
        together: list[wire.Piece] = self._fp32.copy()
        together[0::3] = [
            half if is_fp16 else full
            for is_fp16, half, full in zip(fp16_nodes, self._fp16_heads, self._fp32[0::3], strict=True)
        ]
        for index, rest in self._retyped.items():
            if fp16_nodes[index]:
                together[3 * index + 1] = rest
        maps = (variant.follow, variant.other, variant.any_type)
        for index in self._readers(maps):
            names = self._fp16_names[index] if fp16_nodes[index] else self._fp32_names[index]
            together[3 * index] = names.spell(maps, self._inputs)
        for name, behind in variant.after.items():
            if name in producer:
                index = producer[name]
                together[3 * index + 2] = behind if len(nodes[index].outputs) == 1 else _behind(nodes[index], variant)
        for index in variant.dropped:
            together[3 * index : 3 * index + 3] = (b"", b"", b"")
        graph = [*variant.lead, *wire.merged(together), *wire.merged(variant.constants), self._graph_rest]
        return [self._frame + wire.opening(wire.MODEL_GRAPH, wire.total_size(graph)), *graph]

    def _readers(self, maps: Iterable[Iterable[str]]) -> set[int]:
        """The nodes that read a value under a new name."""
        consumers = self.model.consumers
        return {index for renamed in maps for name in renamed for index in consumers.get(name, ())}


def _behind(node: Node, variant: Variant) -> bytes:
    """What stands behind a node with several outputs, in their order."""
    return b"".join([variant.after[name] for name in node.outputs if name in variant.after])


def _held(node: Node) -> wire.Piece:
    """What stands behind a node's inputs and outputs; where that is large, only a promise of it."""
    rest = _node_rest(node)
    if len(rest) < _HOLD_BELOW_BYTES:
        return rest
    return wire.Streamed(b"", len(rest), lambda: (_node_rest(node),))


def _frame(model: Model) -> tuple[bytes, bytes]:
    """What stands around the nodes and constants: of the model, and of its graph."""
    graph = onnx.GraphProto()
    source = model.proto.graph
    graph.name = source.name or "graph"
    if source.HasField("doc_string"):
        graph.doc_string = source.doc_string
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.sparse_initializer.extend(source.sparse_initializer)
    graph.quantization_annotation.extend(source.quantization_annotation)
    # Old types would be wrong now. Only where ONNX cannot infer them are they kept: nothing changes type there.
    opaque = {out for node in model.nodes if not node.is_standard for out in node.outputs}
    graph.value_info.extend(v for v in source.value_info if v.name in opaque)
    frame = _without_graph(model.proto)
    frame.ir_version = max(frame.ir_version, 4)  # from 4 on, initializers need not be inputs
    return frame.SerializeToString(deterministic=True), graph.SerializeToString(deterministic=True)


def _retype(node: Node) -> Node:
    """The node with the attribute that states its output's type set to FP16."""
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    if node.op_type == "Cast":
        next(a for a in proto.attribute if a.name == "to").i = onnx.TensorProto.FLOAT16
    else:  # ConstantOfShape: FP32 zero where it has no value
        values = [onnx.numpy_helper.to_array(a.t) for a in proto.attribute if a.name == "value"]
        del proto.attribute[:]
        value = round_to_fp16(values[0] if values else np.zeros(1, np.float32))
        proto.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(value)))
    return replace(node, proto=proto)


def _node_rest(node: Node) -> bytes:
    """Everything about a node but its inputs and outputs, serialised; its name made unique."""
    whole = bytes(node.proto.SerializeToString(deterministic=True))
    names = wire.strings(wire.NODE_INPUT, node.inputs) + wire.strings(wire.NODE_OUTPUT, node.outputs)
    if node.proto.name == node.name and whole.startswith(names):
        return whole[len(names) :]
    proto = onnx.NodeProto()
    proto.CopyFrom(node.proto)
    del proto.input[:]
    del proto.output[:]
    proto.name = node.name
    return bytes(proto.SerializeToString(deterministic=True))


def _without_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    frame = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name in ("graph", "functions"):
            continue
        if hasattr(value, "extend"):
            getattr(frame, descriptor.name).extend(value)
        else:
            setattr(frame, descriptor.name, value)
    return frame


@lru_cache(_CAST_CACHE)
def cast_node(tensor: str, result: str, to: int, name: str) -> bytes:
    """A Cast, as a field of the graph."""
    names = wire.string(wire.NODE_INPUT, tensor) + wire.string(wire.NODE_OUTPUT, result)
    return wire.field(wire.GRAPH_NODE, names + wire.string(wire.NODE_NAME, name) + _cast_rest(to))


@lru_cache
def _cast_rest(to: int) -> bytes:
    """What all Casts to one type have in common."""
    proto = onnx.NodeProto(op_type="Cast")
    proto.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return bytes(proto.SerializeToString(deterministic=True))


def bank_source(bank: WeightBank) -> Callable[[Initializer, str, bool], onnx.TensorProto]:
    """Constants by reference into the bank; small ones inline."""

    def source(constant: Initializer, name: str, half: bool) -> onnx.TensorProto:
        return bank.tensor(constant, name, half) or inline_tensor(constant, name, half)

    return source


def write_bytes(path: Path, data: bytes) -> Path:
    """As ``write_pieces``, of one."""
    return write_pieces(path, [data])


def write_pieces(path: Path, pieces: Sequence[wire.Piece], publish: Callable[[], object] | None = None) -> Path:
    """Write a file whole or not at all; ``publish`` is called right before it takes its name.

    Raises:
        RunError: it cannot be written, or the disk is full.
    """
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                for piece in pieces:
                    file.writelines((piece,) if isinstance(piece, bytes) else piece)
            if publish is not None:
                publish()
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    return path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell an OSError as a RunError about ``path``."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}", "free some space or give another path"
        ) from None
