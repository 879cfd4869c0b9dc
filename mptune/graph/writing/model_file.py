"""The parts of every written model: the frame of the original, nodes, Casts, roundings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.graph.facts import node_rule
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import STANDARD_DOMAINS
from mptune.graph.plan import Precision

MIN_IR_VERSION = 4
"""From 4 on, constants of the graph need not be among its inputs."""
_CLIP_HAS_INPUTS = 11
"""From this operator set on, Clip reads its limits."""
METADATA_PREFIX = "mptune."
"""Of the keys in ``metadata_props`` that say what made a model."""


def frame_of(model: Model) -> onnx.ModelProto:
    """Everything of a model but its nodes, constants and local functions, which are inlined.

    What mptune wrote into a model about its plan is left out: it does not hold for one that is made from it.
    """
    source = model.proto.graph
    frame = onnx.ModelProto()
    for descriptor, value in model.proto.ListFields():
        if descriptor.name in ("graph", "functions"):
            continue
        if hasattr(value, "extend"):
            getattr(frame, descriptor.name).extend(value)
        else:
            setattr(frame, descriptor.name, value)
    del frame.metadata_props[:]
    frame.metadata_props.extend(e for e in model.proto.metadata_props if not e.key.startswith(METADATA_PREFIX))
    frame.ir_version = max(frame.ir_version, MIN_IR_VERSION)
    graph = frame.graph
    graph.name = source.name or "graph"
    if source.HasField("doc_string"):
        graph.doc_string = source.doc_string
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.sparse_initializer.extend(source.sparse_initializer)
    graph.quantization_annotation.extend(source.quantization_annotation)
    # Old types would be wrong now. Only where ONNX cannot infer them do they stay: no plan changes a type there.
    opaque = {
        name
        for node in model.nodes
        if not node.is_standard
        for slot, name in enumerate(node.outputs)
        if slot not in node_rule(model, node).outputs
    }
    graph.value_info.extend(v for v in source.value_info if v.name in opaque)
    return frame


def add_node(graph: onnx.GraphProto, node: Node, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    """Append a node under its unique name, with these inputs and outputs; returns the copy."""
    proto: onnx.NodeProto = graph.node.add()
    proto.CopyFrom(node.proto)
    proto.name = node.name
    if inputs != node.inputs:
        proto.input[:] = inputs
    if outputs != node.outputs:
        proto.output[:] = outputs
    return proto


def saturate(node: onnx.NodeProto, precision: Precision) -> bool:
    """Limit what a ConstantOfShape fills with to a precision's largest value; True where it was beyond."""
    if node.op_type != "ConstantOfShape" or node.domain not in STANDARD_DOMAINS or not node.attribute:
        return False
    filled = node.attribute[0].t
    value = float(onnx.numpy_helper.to_array(filled).reshape(-1)[0])
    if not math.isfinite(value) or abs(value) <= precision.largest:
        return False
    largest = math.copysign(precision.largest, value)
    filled.CopyFrom(onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, filled.dims, [largest]))
    return True


def cast_node(source: str, result: str, precision: Precision, name: str = "") -> onnx.NodeProto:
    """A Cast of one value, named like its result by default."""
    proto = onnx.NodeProto(op_type="Cast", name=name or result, input=[source], output=[result])
    proto.attribute.add(name="to", type=onnx.AttributeProto.INT, i=precision.onnx_type)
    return proto


def rounding_nodes(source: str, reduced: str, rounded: str, precision: Precision) -> list[onnx.NodeProto]:
    """The nodes that round an FP32 value to a precision, as FP32: a pair of Casts, or a mantissa that is split."""
    if precision.is_rounded_by_casts:
        return [cast_node(source, reduced, precision), cast_node(reduced, rounded, Precision.FP32)]
    return split_nodes(source, reduced, rounded, Precision.FP32.mantissa_bits - precision.mantissa_bits)


def split_nodes(source: str, prefix: str, rounded: str, digits: int) -> list[onnx.NodeProto]:
    """The nodes that round an FP32 value to a mantissa of ``digits`` bits fewer, to nearest. What would overflow stays.

    By Dekker (A floating-point technique for extending the available precision, Numerische Mathematik 18, 1971,
    Eq. 5.5): with ``s = 2 ** digits + 1``, ``x * s - (x * s - x)`` has ``digits`` fewer.
    """
    steps = [
        ("Constant", [], "factor", {"value": scalar(2.0**digits + 1)}),
        ("Constant", [], "beyond", {"value": scalar(2.0 ** (126 - digits))}),
        ("Mul", [source, f"{prefix}.factor"], "scaled", {}),
        ("Sub", [f"{prefix}.scaled", source], "rest", {}),
        ("Sub", [f"{prefix}.scaled", f"{prefix}.rest"], "split", {}),
        ("Abs", [source], "size", {}),
        ("Less", [f"{prefix}.size", f"{prefix}.beyond"], "fits", {}),
    ]
    return [
        *(onnx.helper.make_node(op, i, [f"{prefix}.{o}"], name=f"{prefix}.{o}", **more) for op, i, o, more in steps),
        onnx.helper.make_node("Where", [f"{prefix}.fits", f"{prefix}.split", source], [rounded], name=rounded),
    ]


def clip_node(source: str, result: str, precision: Precision, opset: int) -> list[onnx.NodeProto]:
    """The nodes that compute an FP32 value limited to the finite values of a precision; named like their results."""
    largest = precision.largest
    if opset < _CLIP_HAS_INPUTS:
        return [onnx.helper.make_node("Clip", [source], [result], name=result, min=-largest, max=largest)]
    ends = {f"{result}.lowest": -largest, f"{result}.highest": largest}
    return [
        *(onnx.helper.make_node("Constant", [], [name], name=name, value=scalar(end)) for name, end in ends.items()),
        onnx.helper.make_node("Clip", [source, *ends], [result], name=result),
    ]


def scalar(value: float) -> onnx.TensorProto:
    """An FP32 number."""
    return onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [value])


def declare_rounded_outputs(graph: onnx.GraphProto, model: Model) -> None:
    """Give what operators of runtimes compute for an output of the graph, and its roundings, the output's shape.

    ONNX Runtime infers that the new key-value cache of GroupQueryAttention has the shape of the old one, and reuses
    buffers by that; only for outputs of the graph it goes by what the graph declares.
    """
    makers = {name: node for node in graph.node for name in node.output if name}
    for value in graph.output:
        added, waiting = dict[str, onnx.NodeProto](), [value.name]
        while waiting:
            node = makers.get(waiting.pop())
            if node is not None and node.op_type in ("Cast", "Where") and node.domain in STANDARD_DOMAINS:
                new = {n: makers[n] for n in node.input if n in makers and n not in model.tensors and n not in added}
                added.update(new)
                # A Where of the model may stretch what it reads.
                waiting += node.input if node.op_type == "Cast" else new
        if any(node.domain not in STANDARD_DOMAINS for node in added.values()):
            for name, node in added.items():
                declared = graph.value_info.add()
                declared.CopyFrom(value)
                declared.name = name
                if node.op_type == "Cast":
                    declared.type.tensor_type.elem_type = node.attribute[0].i
                for axis, dim in enumerate(declared.type.tensor_type.shape.dim):
                    if dim.WhichOneof("value") is None:
                        dim.dim_param = f"{value.name}.{axis}"
