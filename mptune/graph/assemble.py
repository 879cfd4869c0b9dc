"""A model taken apart once into serialised pieces, from which variants are put together in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import RunError
from mptune.graph import wire
from mptune.graph.flow import Flow, Resolution
from mptune.graph.model import Model, Node
from mptune.graph.tensors import Initializer
from mptune.graph.weights import Place, WeightBank, align, external_tensor, inline_tensor, round_to_fp16

SELF_CONTAINED_LIMIT = 1_900_000_000
"""Bytes of weights up to which one file holds the model: protobuf messages end at 2 GiB."""

TensorSource = Callable[[Initializer, str, bool], onnx.TensorProto]
"""(constant, name in the variant, in FP16?) -> its TensorProto."""


@dataclass(frozen=True)
class Variant:
    """How a variant's nodes differ from the model's.

    Attributes:
        follow: new names of what FP16 nodes read at inputs that follow their precision.
        other: new names of FP32 values everywhere else.
        any_type: new names for operators that read either type.
        output: new names of what FP16 nodes compute.
        after: value -> the nodes that stand right after its producer.
        lead: nodes before all others.
        constants: initializers, as fields of the graph.
        dropped: indices of nodes that the variant leaves out.
        retyped: whether FP16 nodes that state their output's type in an attribute state FP16.
    """

    follow: Mapping[str, str]
    other: Mapping[str, str]
    any_type: Mapping[str, str]
    output: Mapping[str, str]
    after: Mapping[str, bytes]
    lead: Sequence[bytes]
    constants: Sequence[bytes]
    dropped: Container[int]
    retyped: bool


class Parts:
    """The pieces of one model: each node's unchanging rest, the constants, and the frame around them."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.model = model = flow.model
        self._rest = [_node_rest(node) for node in model.nodes]
        self._retyped = {n.index: _node_rest(_retype(n)) for n in model.nodes if flow.rules[n.index].attribute}
        self._whole = [self._node(n.index, n.inputs, n.outputs, self._rest[n.index]) for n in model.nodes]
        self._frame, self._graph_rest = _frame(model)

    @staticmethod
    def _node(index: int, inputs: Iterable[str], outputs: Iterable[str], rest: bytes) -> bytes:
        payload = wire.strings(wire.NODE_INPUT, inputs) + wire.strings(wire.NODE_OUTPUT, outputs)
        return wire.field(wire.GRAPH_NODE, payload + rest)

    def put_together(self, resolution: Resolution, variant: Variant) -> bytes:
        """The serialised variant: one pass over the nodes."""
        out: list[bytes] = list(variant.lead)
        after = variant.after
        for node, is_fp16 in zip(self.model.nodes, resolution.fp16_nodes, strict=True):
            if node.index in variant.dropped:
                continue
            out.append(self._renamed(node, is_fp16, variant))
            for name in node.outputs:
                if name in after:
                    out.append(after[name])
        graph = b"".join((*out, *variant.constants, self._graph_rest))
        return self._frame + wire.field(wire.MODEL_GRAPH, graph)

    def _renamed(self, node: Node, is_fp16: bool, variant: Variant) -> bytes:
        rule = self.flow.rules[node.index]
        other, any_type = variant.other, variant.any_type
        if is_fp16:
            follow = variant.follow
            inputs = [
                (follow if slot in rule.inputs else any_type if slot in rule.reads_any else other).get(name, name)
                for slot, name in enumerate(node.inputs)
            ]
            outputs = [
                variant.output.get(name, name) if slot in rule.outputs else name
                for slot, name in enumerate(node.outputs)
            ]
            if variant.retyped and node.index in self._retyped:
                return self._node(node.index, inputs, outputs, self._retyped[node.index])
        else:
            if not any(name in other or name in any_type for name in node.inputs):
                return self._whole[node.index]
            inputs = [
                (any_type if slot in rule.reads_any else other).get(name, name) for slot, name in enumerate(node.inputs)
            ]
            outputs = list(node.outputs)
        return self._node(node.index, inputs, outputs, self._rest[node.index])


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


def cast_node(tensor: str, result: str, to: int, name: str) -> bytes:
    """A Cast, as a field of the graph."""
    proto = onnx.NodeProto(op_type="Cast", name=name, input=[tensor], output=[result])
    proto.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return wire.field(wire.GRAPH_NODE, proto.SerializeToString(deterministic=True))


def initializer(tensor: onnx.TensorProto) -> bytes:
    """A constant, as a field of the graph."""
    return wire.field(wire.GRAPH_INITIALIZER, tensor.SerializeToString(deterministic=True))


def bank_source(bank: WeightBank) -> TensorSource:
    """Constants by reference into the bank; small ones inline."""

    def source(constant: Initializer, name: str, half: bool) -> onnx.TensorProto:
        return bank.tensor(constant, name, half) or inline_tensor(constant, name, half)

    return source


def beside_source(path: Path) -> TensorSource:
    """Large constants appended to one data file beside the model at ``path``: for models past 2 GiB.

    Raises (when called):
        RunError: the file cannot be written, or the disk is full.
    """
    data = path.with_name(path.name + ".data")
    data.unlink(missing_ok=True)

    def source(constant: Initializer, name: str, half: bool) -> onnx.TensorProto:
        tensor = inline_tensor(constant, name, half)
        if len(tensor.raw_data) < 1024:
            return tensor
        with data.open("ab") as file:
            start = align(file)
            file.write(tensor.raw_data)
        place = Place(start, len(tensor.raw_data))
        return external_tensor(name, tensor.data_type, constant.shape, data.name, place)

    return source


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all.

    Raises:
        RunError: it cannot be written, or the disk is full.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}", "free some space or give another path"
        ) from None
    return path
