"""A node in serialised pieces, each in all the forms that a plan can give it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.graph.casting.value_types import Flow
from mptune.graph.loading.model import Node
from mptune.graph.writing import wire
from mptune.graph.writing.weights import round_to_fp16

_HOLD_BELOW_BYTES = 1 << 16
_BOTH = (False, True)


class Spelling(ABC):
    """How a variant of a model names the forms of values and constants, and which nodes make one form of another.

    ``is_half`` says whether the plan has a value computed in FP16. One that is not keeps its name in FP32.

    Attributes:
        retyped: whether FP16 nodes that state their output's type in an attribute state FP16.
    """

    retyped: bool

    @abstractmethod
    def constant(self, name: str) -> str:
        """What FP16 nodes read in place of an FP32 constant."""

    @abstractmethod
    def computed(self, name: str) -> str:
        """What FP16 nodes compute in place of a value."""

    @abstractmethod
    def in_fp16(self, name: str, is_half: bool) -> str:
        """The name of a value's FP16 form."""

    @abstractmethod
    def in_fp32(self, name: str, is_half: bool) -> str:
        """The name of a value's FP32 form."""

    @abstractmethod
    def behind(self, name: str, is_half: bool) -> bytes:
        """The nodes that stand right after a value's producer and make its other form, as fields of the graph."""


class Reads(Enum):
    """Which form of a value a node takes at an input."""

    FP16 = "an FP16 node's input that follows its precision"
    FP32 = "any other"
    AS_COMPUTED = "an input that takes either type"


class Segment(NamedTuple):
    """One input whose name depends on the plan, and what follows it up to the next such input or the node's end.

    Attributes:
        name: of that input in the model; "" for what stands before the first of them.
        reads: which form of it the node takes, as an FP32 node and as an FP16 one.
        forms: the segment in the FP32 node and in the FP16 one, each with the value computed in FP32 and in FP16.
        tail: what follows the input, in the FP32 node and in the FP16 one.
    """

    name: str
    reads: tuple[Reads, Reads]
    forms: tuple[wire.Piece, ...]
    tail: tuple[wire.Piece, wire.Piece]

    def renamed(self, name: str, is_fp16: bool) -> wire.Piece:
        """The segment with another input."""
        return wire.prefixed(wire.string(wire.NODE_INPUT, name), self.tail[is_fp16])


class Segmenter:
    """Takes the nodes of one model apart. ``cast_names``: what the model's own Casts read and compute."""

    def __init__(self, flow: Flow, spelling: Spelling) -> None:
        self.cast_names = frozenset(name for c in flow.own_casts for name in (c.source, c.result))
        self._flow = flow
        self._spelling = spelling
        self._maker = dict(zip(flow.values, flow.maker.tolist(), strict=True))

    def segments(self, node: Node) -> Iterator[Segment]:
        """The node, but for its opening, in at least one piece."""
        inputs = node.inputs
        cuts = (-1, *(slot for slot in range(len(inputs)) if self._varies(node, slot)), len(inputs))
        ends = [self._end(node, is_fp16) for is_fp16 in _BOTH]
        for head, end in itertools.pairwise(cuts):
            fixed = [self._fixed(node, range(head + 1, end), is_fp16) for is_fp16 in _BOTH]
            full, half = map(wire.prefixed, fixed, ends) if end == len(inputs) else fixed
            if half == full:
                half = full
            if head < 0:
                if len(full):
                    yield Segment("", (Reads.FP32, Reads.FP32), (full, full, half, half), (full, half))
                continue
            reads = self._reads(node, head, False), self._reads(node, head, True)
            names = [self._spelt(inputs[head], r, is_half) for r in reads for is_half in _BOTH]
            in_full = [wire.prefixed(wire.string(wire.NODE_INPUT, name), full) for name in names[:2]]
            in_half = [wire.prefixed(wire.string(wire.NODE_INPUT, name), half) for name in names[2:]]
            yield Segment(inputs[head], reads, (*in_full, *in_half), (full, half))

    def _varies(self, node: Node, slot: int) -> bool:
        """Whether more than the node's own precision decides under which name it reads an input."""
        name = node.inputs[slot]
        if name in self.cast_names:
            return True
        if self._maker.get(name, -1) in (-1, self._flow.group_of[node.index]):
            return False
        both = {self._reads(node, slot, is_fp16) for is_fp16 in _BOTH}
        return any(self._spelt(name, reads, False) != self._spelt(name, reads, True) for reads in both)

    def _fixed(self, node: Node, slots: Iterable[int], is_fp16: bool) -> bytes:
        """Inputs that do not vary: what comes from the node's own group has the node's precision."""
        group = self._flow.group_of[node.index]
        names = []
        for slot in slots:
            name = node.inputs[slot]
            is_half = is_fp16 and self._maker.get(name, -1) == group
            names.append(self._spelt(name, self._reads(node, slot, is_fp16), is_half))
        return wire.strings(wire.NODE_INPUT, names)

    def _reads(self, node: Node, slot: int, is_fp16: bool) -> Reads:
        rule = self._flow.rules[node.index]
        if is_fp16 and slot in rule.inputs:
            return Reads.FP16
        return Reads.AS_COMPUTED if slot in rule.reads_any else Reads.FP32

    def _spelt(self, name: str, reads: Reads, is_half: bool) -> str:
        if reads is Reads.FP16:
            constant = name in self._flow.constants
            return self._spelling.constant(name) if constant else self._spelling.in_fp16(name, is_half)
        if reads is Reads.AS_COMPUTED and is_half:
            return self._spelling.in_fp16(name, is_half)
        return self._spelling.in_fp32(name, is_half)

    def _end(self, node: Node, is_fp16: bool) -> wire.Piece:
        """What stands behind a node's inputs."""
        rule = self._flow.rules[node.index]
        if not is_fp16:
            return wire.prefixed(wire.strings(wire.NODE_OUTPUT, node.outputs), _held(node))
        computed = [self._spelling.computed(o) if i in rule.outputs else o for i, o in enumerate(node.outputs)]
        rest = _node_rest(_retyped(node)) if rule.attribute and self._spelling.retyped else _held(node)
        return wire.prefixed(wire.strings(wire.NODE_OUTPUT, computed), rest)


def _held(node: Node) -> wire.Piece:
    """What stands behind a node's inputs and outputs; where that is large, only a promise of it."""
    rest = _node_rest(node)
    if len(rest) < _HOLD_BELOW_BYTES:
        return rest
    return wire.Streamed(b"", len(rest), lambda: (_node_rest(node),))


def _retyped(node: Node) -> Node:
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
