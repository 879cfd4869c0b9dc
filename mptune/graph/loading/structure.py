"""Checks of an ONNX file before anything reads it: what protobuf does not check and ONNX's inference relies on.

Every check ends in a ``ModelError``; nothing here needs more memory than one constant.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx
import onnx.helper
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from mptune.errors import ModelError
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    all_graphs,
    all_tensors,
    is_external,
    is_known_type,
    tensor_nbytes,
)

_CONSTANT_VALUES = {
    "value": onnx.AttributeProto.TENSOR,
    "sparse_value": onnx.AttributeProto.SPARSE_TENSOR,
    "value_float": onnx.AttributeProto.FLOAT,
    "value_floats": onnx.AttributeProto.FLOATS,
    "value_int": onnx.AttributeProto.INT,
    "value_ints": onnx.AttributeProto.INTS,
    "value_string": onnx.AttributeProto.STRING,
    "value_strings": onnx.AttributeProto.STRINGS,
}
_INT32_MAX = 2**31 - 1
_NODE_LIMIT = 5_000_000
_HINT = "the file is not valid ONNX; export it again, or check that the copy is complete"
_INFERENCE_FAULTS: Mapping[str, tuple[str, Callable[[Any, onnx.NodeProto], bool], str]] = {
    "Einsum": (
        "equation",
        lambda value, _: b"." in value.replace(b"...", b""),
        "has a dot outside an ellipsis",
    ),
    "Split": ("num_outputs", lambda value, node: value != len(node.output), "is not the number of outputs"),
    "GatherND": ("batch_dims", lambda value, _: not 0 <= value <= _INT32_MAX, "is out of range"),
    "LayerNormalization": ("axis", lambda value, _: abs(value) > _INT32_MAX, "is out of range"),
    "RMSNormalization": ("axis", lambda value, _: abs(value) > _INT32_MAX, "is out of range"),
}
"""Operator -> (attribute, whether its value is a fault, what is wrong with it): what crashes onnx's shape inference, or
in Einsum's case never ends. Found by 60,000 random nodes of every operator under onnx 1.23.2; ``onnx.checker`` lets all
of it pass, none of it is valid."""


def check_structure(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse a file whose text, constants, names, types or functions are inconsistent."""
    undecodable = _undecodable(proto)
    if undecodable:
        raise ModelError(f"{path}: the text in {undecodable} is not UTF-8", _HINT)
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{path} has IR version {proto.ir_version}, the installed onnx {onnx.__version__} knows up to "
            f"{onnx.IR_VERSION}",
            "pip install --upgrade onnx, or export with an older one",
        )
    _check_functions(proto, path)
    bodies = (node for function in proto.functions for node in function.node)
    graphs = [*all_graphs(proto.graph), *(g for node in bodies for g in _graphs_of(node))]
    for graph in graphs:
        _check_names(graph, path)
        if graph is not proto.graph:
            _check_subgraph_outputs(graph, path)
        for value in (*graph.input, *graph.output, *graph.value_info):
            _check_type(value.type, value.name, path)
    for graph in graphs:
        _check_nodes(graph.node, path)
    for function in proto.functions:
        _check_nodes(function.node, path)
    for tensor in all_tensors(proto.graph):
        _check_tensor(tensor, path)


def _undecodable(message: Any) -> str:
    """The full name of a string field that is not UTF-8; "" where all are: protobuf hands such ones over as bytes."""
    if isinstance(message, onnx.TensorProto):  # without its data, which may be large
        texts = (message.name, message.doc_string, *(t for e in message.external_data for t in (e.key, e.value)))
        return "" if all(isinstance(text, str) for text in texts) else "onnx.TensorProto"
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.type == FieldDescriptor.TYPE_STRING:
            if not all(isinstance(text, str) for text in values):
                return str(field.full_name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in values:
                field_name = _undecodable(inner)
                if field_name:
                    return field_name
    return ""


def _graphs_of(node: onnx.NodeProto) -> Iterable[onnx.GraphProto]:
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            yield from all_graphs(graph)


def _check_functions(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse recursive functions, and functions whose calls inline to too many nodes."""
    calls = {(f.domain, f.name): [*_called(f.node)] for f in proto.functions}
    if len(calls) < len(proto.functions):
        raise ModelError(f"{path} defines a local function twice", _HINT)
    size: dict[tuple[str, str], int] = {}  # nodes of a function with all its calls inlined
    try:
        for function in TopologicalSorter(calls).static_order():
            size[function] = sum(size[called] for called in calls[function]) if function in calls else 1
    except CycleError as error:
        raise ModelError(f"{path}: the local function {error.args[1][0][1]!r} calls itself", _HINT) from None
    if sum(size.get(called, 1) for called in _called(proto.graph.node)) > _NODE_LIMIT:
        raise ModelError(
            f"{path} has more than {_NODE_LIMIT} nodes with its local functions inlined",
            "export it without functions",
        )


def _called(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    """Domain and operator of every node, those of subgraphs included."""
    for node in nodes:
        yield node.domain, node.op_type
        for graph in _graphs_of(node):
            yield from ((inner.domain, inner.op_type) for inner in graph.node)


def _check_names(graph: onnx.GraphProto, path: Path) -> None:
    sparse = [s.values.name for s in graph.sparse_initializer]
    for what, names in (
        ("input", [v.name for v in graph.input]),
        ("output", [v.name for v in graph.output]),
        ("constant", [t.name for t in graph.initializer] + sparse),
    ):
        counts = Counter(names)
        if counts[""]:
            raise ModelError(f"{path}: a graph {what} has no name", _HINT)
        if len(counts) < len(names) and what != "output":  # a value may be given twice
            twice = next(name for name, count in counts.items() if count > 1)
            raise ModelError(f"{path}: the graph {what} {twice!r} is there twice", _HINT)


def _check_subgraph_outputs(graph: onnx.GraphProto, path: Path) -> None:
    """Refuse subgraphs with outputs from outside: ONNX Runtime does not load them, onnx's inference hangs on them."""
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {s.values.name for s in graph.sparse_initializer} | {out for node in graph.node for out in node.output}
    for output in graph.output:
        if output.name not in own:
            raise ModelError(
                f"{path}: the subgraph {graph.name!r} has the output {output.name!r}, which it does not compute",
                "put an Identity into the subgraph, or export the model again",
            )


def _check_nodes(nodes: Iterable[onnx.NodeProto], path: Path) -> None:
    for node in nodes:
        if not node.op_type:
            raise ModelError(f"{path}: the node {node.name!r} has no operator", _HINT)
        if node.op_type == "Constant" and node.domain in STANDARD_DOMAINS:
            _check_constant(node, path)
        fault = _inference_fault(node)
        if fault:
            raise ModelError(f"{path}: the node {node.name!r} is not valid: {fault}", _HINT)


def _inference_fault(node: onnx.NodeProto) -> str:
    """Why onnx's shape inference would crash or hang on a node; "" where nothing is known."""
    if node.op_type not in _INFERENCE_FAULTS:
        return ""
    name, is_fault, what = _INFERENCE_FAULTS[node.op_type]
    for attribute in node.attribute:
        if attribute.name == name and is_fault(attribute.s if name == "equation" else attribute.i, node):
            return f"{node.op_type}'s attribute {name} {what}"
    return ""


def _check_constant(node: onnx.NodeProto, path: Path) -> None:
    """Refuse a Constant without exactly one output and one value attribute of the right type."""
    held = [a.name for a in node.attribute if a.name in _CONSTANT_VALUES and a.type == _CONSTANT_VALUES[a.name]]
    if len(held) != 1 or len(node.output) != 1:
        raise ModelError(f"{path}: the Constant node {node.name!r} holds no value", _HINT)


def _check_type(kind: onnx.TypeProto, name: str, path: Path) -> None:
    """Refuse unknown element types and negative dimensions."""
    which = kind.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        _check_type(getattr(kind, which).elem_type, name, path)
    elif which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, which)
        if not is_known_type(tensor.elem_type):
            raise ModelError(f"{path}: {name!r} has the unknown element type {tensor.elem_type}", _HINT)
        if any(dim.dim_value < 0 for dim in tensor.shape.dim):
            raise ModelError(f"{path}: {name!r} has a negative dimension", _HINT)


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Refuse a constant whose data do not match its dimensions."""
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"{path}: the constant {tensor.name!r} has a negative dimension", _HINT)
    if tensor.HasField("segment"):
        raise ModelError(f"{path}: the constant {tensor.name!r} is stored in segments", "export the model again")
    expected = tensor_nbytes(tensor)
    if is_external(tensor):
        if tensor.data_type == onnx.TensorProto.STRING:
            raise ModelError(f"{path}: the constant {tensor.name!r} keeps strings in external data", _HINT)
        return
    unit = "bytes"
    if tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
        held = len(tensor.raw_data)
    else:
        count, unit = math.prod(tensor.dims), "values"
        per_value = 2 if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128) else 1
        expected = expected if expected < count else count * per_value  # less than a byte each: packed
        held = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
    if held != expected:
        raise ModelError(
            f"{path}: the constant {tensor.name!r} of shape {list(tensor.dims)} holds {held} {unit}, not {expected}",
            _HINT,
        )
