"""The type and shape of every value: ONNX's strict inference, and ONNX Runtime for operators that ONNX lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from sys import intern

import onnx
import onnx.helper
import onnx.shape_inference

from mptune.errors import ModelError
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    Initializer,
    TensorInfo,
    all_graphs,
    is_external,
    tensor_nbytes,
    type_of,
)
from mptune.graph.ops import OperatorSchema

INLINE_LIMIT = 4096
"""Constants up to this many bytes stay in the graph for shape inference: shapes, axes, scales."""

_PROPAGATED_LIMIT = 1 << 16
"""Integers that may be propagated in one value. Shapes have a handful; a chain of Concats can ask for 2**40."""

_TYPED_AS_CAST: Mapping[str, list[int]] = {
    "EyeLike": [],
    "RegexFullMatch": [onnx.TensorProto.BOOL],
    "MeanVarianceNormalization": [],
}
"""Where onnx 1.23 fails: it crashes on an input of unknown type, and refuses its own definition of the last."""

_PASSES_INTEGERS = frozenset(
    {"Identity", "Cast", "Gather", "Slice", "Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div", "Floor", "Where"}
)


def infer_types(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    initializers: Mapping[str, Initializer],
    foreign: Iterable[str],
    runtime_types: Mapping[str, TensorInfo],
    path: Path,
) -> dict[str, TensorInfo]:
    """Type every value of the main graph, on a copy that holds no large weights.

    Args:
        foreign: outputs of operators that ONNX cannot infer: only for them is the file's own value_info trusted, where
            nothing better is known.
    """
    opaque = frozenset(foreign)
    slim = without_weights(proto, nodes, initializers)
    outputs = {output.name for output in proto.graph.output}
    slim.graph.value_info.extend(v for v in proto.graph.value_info if v.name in opaque and v.name not in runtime_types)
    typed_by_runtime = opaque.intersection(runtime_types) - outputs
    slim.graph.value_info.extend(declaration(runtime_types[name]) for name in typed_by_runtime)
    for graph in all_graphs(slim.graph):
        for node in graph.node:
            if node.op_type in _TYPED_AS_CAST and not node.domain:  # a Cast gives the same type
                to = [a.i for a in node.attribute if a.name == "dtype"] or _TYPED_AS_CAST[node.op_type]
                del node.attribute[:]
                node.op_type = "Cast" if to else "Identity"
                node.attribute.extend(onnx.helper.make_attribute("to", code) for code in to[:1])
    infer = partial(onnx.shape_inference.infer_shapes, check_type=True, strict_mode=not opaque)
    try:
        if _most_propagated(slim.graph) > _PROPAGATED_LIMIT:
            typed = infer(slim)
        else:
            try:
                typed = infer(slim, data_prop=True)
            except onnx.shape_inference.InferenceError:
                # With values, onnx 1.23 refuses the outer product of two computed FP32 vectors ("Invalid rank for Mul
                # broadcasting"). So first without; the values then give what is missing, and are not strict about it.
                typed = onnx.shape_inference.infer_shapes(infer(slim), check_type=True, data_prop=True)
    except Exception as error:  # onnx raises InferenceError, TypeError, RuntimeError and ValueError for a bad model
        raise ModelError(
            f"{path} does not type-check: {last_line(error)}",
            "onnx.checker.check_model(path, full_check=True) says more",
        ) from None
    infos = {}
    for value in (*typed.graph.input, *typed.graph.value_info, *typed.graph.output):
        name = intern(value.name)
        infos[name] = TensorInfo(name, *type_of(value.type))
    for sparse in proto.graph.sparse_initializer:  # declared as dense above, but no Cast takes one
        infos[sparse.values.name] = TensorInfo(sparse.values.name, "sparse_tensor", tuple(sparse.dims))
    for initializer in initializers.values():
        infos[initializer.name] = TensorInfo(initializer.name, initializer.dtype, initializer.shape)
    return infos


def _most_propagated(graph: onnx.GraphProto) -> int:
    """How many integers, at most, the propagation of shapes would hold in one value."""
    held: dict[str, int] = {}
    for inner in all_graphs(graph):
        integers = (t for t in inner.initializer if t.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32))
        held.update((t.name, math.prod(t.dims)) for t in integers)
        for node in inner.node:
            sizes = [held[name] for name in node.input if name in held]
            if node.output and node.op_type in ("Shape", "Size", "Constant"):
                held[node.output[0]] = 8
            elif node.output and node.op_type == "Concat" and len(sizes) == len(node.input):
                held[node.output[0]] = sum(sizes)
            elif node.output and node.op_type in _PASSES_INTEGERS and sizes:
                held[node.output[0]] = max(sizes)
    return max(held.values(), default=0)


def node_types(
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    values: Mapping[str, onnx.TensorProto],
    opsets: Sequence[onnx.OperatorSetIdProto],
    ir_version: int,
) -> Mapping[str, onnx.TypeProto]:
    """Types of what a node computes, from types and values of its inputs alone; nothing where ONNX cannot say."""
    domain = "" if node.domain in STANDARD_DOMAINS else node.domain
    try:
        opset = next(entry.version for entry in opsets if entry.domain in STANDARD_DOMAINS)
        schema = onnx.defs.get_schema(node.op_type, opset, domain)
        inferred: Mapping[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema, node, dict(types), dict(values), opset_imports=list(opsets), ir_version=max(ir_version, 4)
        )
    except Exception:  # onnx raises several kinds where an input has no type, or the node holds a graph
        return {}
    return inferred


def declaration(info: TensorInfo) -> onnx.ValueInfoProto:
    """A tensor's name, type and shape as ONNX declares them."""
    code = onnx.TensorProto.DataType.Value(info.dtype.upper())
    return onnx.helper.make_tensor_value_info(info.name, code, info.shape)


def last_line(error: Exception) -> str:
    """The last line of an error that onnx raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def without_weights(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    initializers: Mapping[str, Initializer],
    limit: int = INLINE_LIMIT,
) -> onnx.ModelProto:
    """The model with constants of more bytes than the limit, and those in external data, as inputs."""
    slim = onnx.ModelProto()
    slim.ir_version = max(proto.ir_version, 4)  # from 4 on, initializers need not be inputs
    slim.opset_import.extend(proto.opset_import)
    graph = slim.graph
    graph.name = proto.graph.name or "graph"
    large = {n: c for n, c in initializers.items() if c.node_index is not None and c.nbytes > limit}
    graph.node.extend(n for n in nodes if n.op_type != "Constant" or n.output[0] not in large)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    outside = [(name, constant.proto.data_type, constant.shape) for name, constant in large.items()]
    for tensor in proto.graph.initializer:
        if not is_external(tensor) and tensor_nbytes(tensor) <= limit:
            graph.initializer.append(tensor)
        else:
            outside.append((tensor.name, tensor.data_type, tuple(tensor.dims)))
    outside += [(s.values.name, s.values.data_type, tuple(s.dims)) for s in proto.graph.sparse_initializer]
    declared = {i.name for i in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, data_type, list(shape))
        for name, data_type, shape in outside
        if name not in declared
    )
    return slim


@dataclass(frozen=True)
class RuntimeTypes:
    """What a runtime knows of operators that ONNX does not define; ``failure`` says why it could not type a model."""

    values: Mapping[str, TensorInfo] = field(default_factory=dict)
    schemas: Mapping[tuple[str, str], OperatorSchema] = field(default_factory=dict)
    failure: str = ""


AskRuntime = Callable[[onnx.ModelProto, Sequence[str]], RuntimeTypes]
"""Types these values of a model, the outputs of nodes that ONNX does not define; its large constants are inputs."""


def types_by_schema(slim: onnx.ModelProto, foreign: Sequence[str], runtime: RuntimeTypes) -> RuntimeTypes:
    """Add the types, without shapes, that schemas determine: for a runtime that lacks an operator, or a kernel for one.

    ``slim`` is the model without its large constants; ``foreign`` are outputs of the nodes that ONNX does not define.
    """
    types: dict[str, onnx.TypeProto] = {i.name: i.type for i in slim.graph.input}
    types |= {t.name: onnx.helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in slim.graph.initializer}
    wanted, values = frozenset(foreign), dict(runtime.values)
    for node in slim.graph.node:
        if wanted.isdisjoint(node.output):
            given = {name: types[name] for name in node.input if name in types}
            types |= node_types(node, given, {}, slim.opset_import, slim.ir_version)
            continue
        schema = runtime.schemas.get((node.domain, node.op_type))
        for slot, name in enumerate(node.output):
            if schema is None or not name:
                continue
            # That of an input of the same type parameter, or the only one that is admitted.
            parameter = schema.output_type(slot)
            like = (n for k, n in enumerate(node.input) if n in types and schema.input_type(k) == parameter)
            admitted = [*schema.types.get(parameter, {parameter})]
            alike = next(like, None)
            dtype = "" if len(admitted) > 1 else element_type(admitted[0])
            dtype = dtype if alike is None else type_of(types[alike])[0]
            if dtype:
                types[name] = onnx.helper.make_tensor_type_proto(onnx.TensorProto.DataType.Value(dtype.upper()), None)
                values.setdefault(name, TensorInfo(name, dtype, None))
    return replace(runtime, values=values)


def element_type(text: str) -> str:
    """``TensorInfo``'s dtype of a type as schemas and runtimes write it, such as ``tensor(float)``; "" if no tensor."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    return inner if text == f"tensor({inner})" and inner.upper() in onnx.TensorProto.DataType.keys() else ""  # noqa: SIM118
