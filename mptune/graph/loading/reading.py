"""Reads an ONNX file: refused where it is not sound, with its functions inlined, at the operator set that is wanted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, cast

import onnx
import onnx.helper
import onnx.inliner
import onnx.version_converter
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from mptune.errors import ModelError
from mptune.graph.loading.inference import last_line, without_weights
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    all_graphs,
    all_tensors,
    is_external,
    is_known_type,
    subgraphs,
    tensor_nbytes,
)

MIN_OPSET = 9
"""Below opset 9 the operators' schemas lack the FP16 types that rewriting relies on (Cast-9, ConstantOfShape-9)."""

_HINT = "the file is not valid ONNX; export it again, or check that the copy is complete"


def read_model(path: Path, opset: int | None = None) -> tuple[onnx.ModelProto, int]:
    """The model of a file, with functions inlined and equally named nodes numbered, and its operator set.

    Args:
        opset: the operator set that ONNX's converter raises the model to; None leaves it as it is.

    Raises:
        ModelError: no such file, not ONNX, not valid, or an operator set that cannot be had.
    """
    proto = _parsed(path)
    # Exporters of Paddle write dynamic dimensions as -1 or ``?``, each its own size.
    for graph in all_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type"):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_value == -1 or dim.dim_param == "?":
                        dim.Clear()
    fault = next(_faults(proto), None)
    if fault is not None:
        raise ModelError(f"{path}: {fault}", _HINT)
    if proto.functions:
        try:
            proto = onnx.inliner.inline_local_functions(proto)
        except Exception as error:  # onnx raises ValidationError, InferenceError, ValueError and RuntimeError
            raise ModelError(
                f"{path}: a local function cannot be inlined: {last_line(error)}",
                "onnx.inliner.inline_local_functions(model) says more",
            ) from None
    name_apart(proto.graph)
    current = _opset_of(proto, path)
    return (proto, current) if opset is None else (_raised(proto, path, current, opset), opset)


_TORCH = ("a PyTorch file", "load it in Python and export it: torch.onnx.export(model, inputs, 'model.onnx')")

_OTHER_FILES = {
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ckpt", ".safetensors"), _TORCH),
    **dict.fromkeys((".engine", ".plan", ".trt"), ("a TensorRT engine", "give the ONNX model that it was built from")),
    **dict.fromkeys(
        (".pb", ".h5", ".keras", ".tflite"), ("a TensorFlow model", "export it: python -m tf2onnx.convert")
    ),
    **dict.fromkeys((".npz", ".npy"), ("arrays", "the model comes first; --data takes the samples")),
    ".ort": ("ONNX Runtime's own format", "give the .onnx file that it was made from"),
}


def _parsed(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        raise ModelError(f"{path} is a folder, not an ONNX file", "give the .onnx file inside it")
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is not a file", "mptune takes an .onnx file, and reads it more than once")
    try:
        if path.stat().st_size >= 1 << 31:
            raise ModelError(
                f"{path} is larger than 2 GiB, the limit of protobuf: no ONNX file",
                "export it with its weights in external data",
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"no such file: {path}", "check the path; mptune takes an .onnx file") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    try:
        proto = onnx.load_model_from_string(data)
        text = f"{path} holds no ONNX graph"  # short and random bytes may parse
    except DecodeError:
        proto, text = onnx.ModelProto(), f"{path} is not an ONNX model, or it is truncated"
    if proto.graph.node and proto.ir_version:
        return proto
    hint = "export it again, or check that the copy is complete (compare its size or sha256 with the original)"
    is_torch = data[:2] == b"PK" and b"data.pkl" in data[:4096]
    other = _OTHER_FILES.get(path.suffix.lower(), _TORCH if is_torch else None)
    if other is not None:
        text, hint = f"{path} is not an ONNX model: {other[0]}", other[1]
    raise ModelError(text, hint)


_NODE_LIMIT = 5_000_000

_INT32_MAX = 2**31 - 1

_CRASHES: Mapping[str, tuple[str, Callable[[Any, onnx.NodeProto], bool], str]] = {
    "Einsum": ("equation", lambda value, _: b"." in value.replace(b"...", b""), "has a dot outside an ellipsis"),
    "Split": ("num_outputs", lambda value, node: value != len(node.output), "is not the number of outputs"),
    "GatherND": ("batch_dims", lambda value, _: not 0 <= value <= _INT32_MAX, "is out of range"),
    "LayerNormalization": ("axis", lambda value, _: abs(value) > _INT32_MAX, "is out of range"),
    "RMSNormalization": ("axis", lambda value, _: abs(value) > _INT32_MAX, "is out of range"),
}
"""Operator -> (attribute, whether its value is a fault, what is wrong with it): what crashes onnx's shape inference, or
in Einsum's case never ends. Found by 60,000 random nodes of every operator under onnx 1.23.2; ``onnx.checker`` lets all
of it pass, none of it is valid."""

_CONSTANT_VALUES = {name: int(cast("Any", a.type)) for name, a in onnx.defs.get_schema("Constant").attributes.items()}
"""Attribute of a Constant node -> its type."""


def _faults(proto: onnx.ModelProto) -> Iterator[str]:
    """What is inconsistent about a model's text, functions, names, types, nodes and constants.

    Beyond what ``onnx.checker`` sees, and before onnx's inference, which some of it crashes. The first one counts:
    each rests on what stands before it.
    """
    undecodable = _undecodable(proto)
    if undecodable:
        yield f"the text in {undecodable} is not UTF-8"
    yield from _function_faults(proto)
    bodies = (graph for function in proto.functions for node in function.node for graph in subgraphs(node))
    graphs = [inner for graph in (proto.graph, *bodies) for inner in all_graphs(graph)]
    for graph in graphs:
        constants = [t.name for t in graph.initializer] + [s.values.name for s in graph.sparse_initializer]
        named = {"input": [v.name for v in graph.input], "output": [v.name for v in graph.output]}
        for what, names in (*named.items(), ("constant", constants)):
            if "" in names:
                yield f"a graph {what} has no name"
            twice = next((name for name, count in Counter(names).items() if count > 1), None)
            if twice is not None and what != "output":  # a value may be given twice
                yield f"the graph {what} {twice!r} is there twice"
        # ONNX Runtime does not load a subgraph that gives out an outer value, and onnx's inference hangs on it.
        own = {*named["input"], *constants, *(out for node in graph.node for out in node.output)}
        foreign = next((name for name in named["output"] if name not in own), None)
        if graph is not proto.graph and foreign is not None:
            yield f"the subgraph {graph.name!r} has the output {foreign!r}, which it does not compute"
        for value in (*graph.input, *graph.output, *graph.value_info):
            kind = value.type
            while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
                kind = getattr(kind, which).elem_type
            if which in ("tensor_type", "sparse_tensor_type"):
                tensor = getattr(kind, which)
                if not is_known_type(tensor.elem_type):
                    yield f"{value.name!r} has the unknown element type {tensor.elem_type}"
                if any(dim.dim_value < 0 for dim in tensor.shape.dim):
                    yield f"{value.name!r} has a negative dimension"
    for nodes in (*(graph.node for graph in graphs), *(function.node for function in proto.functions)):
        for node in nodes:
            yield from _node_faults(node)
    for tensor in all_tensors(proto.graph):
        yield from _tensor_faults(tensor)


def _undecodable(message: Any) -> str:
    """The full name of a string field that is not UTF-8; "" where all are: protobuf hands such ones over as bytes."""
    if isinstance(message, onnx.TensorProto):  # without its data, which may be large
        texts = (message.name, message.doc_string, *(t for e in message.external_data for t in (e.key, e.value)))
        return "" if all(isinstance(text, str) for text in texts) else "onnx.TensorProto"
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else (value,)
        if descriptor.type == FieldDescriptor.TYPE_STRING and not all(isinstance(text, str) for text in values):
            return str(descriptor.full_name)
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            inside = next(filter(None, map(_undecodable, values)), "")
            if inside:
                return inside
    return ""


def _function_faults(proto: onnx.ModelProto) -> Iterator[str]:
    """Local functions that call themselves, or inline to more nodes than memory holds."""

    def called(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
        for node in nodes:
            yield node.domain, node.op_type
            for graph in subgraphs(node):
                yield from called(graph.node)

    calls = {(function.domain, function.name): [*called(function.node)] for function in proto.functions}
    if len(calls) < len(proto.functions):
        yield "a local function is defined twice"
    size: dict[tuple[str, str], int] = {}  # nodes of a function with all its calls inlined
    try:
        for name in TopologicalSorter(calls).static_order():
            size[name] = sum(size[call] for call in calls[name]) if name in calls else 1
    except CycleError as error:
        yield f"the local function {error.args[1][0][1]!r} calls itself"
    if sum(size.get(call, 1) for call in called(proto.graph.node)) > _NODE_LIMIT:
        yield f"there are more than {_NODE_LIMIT} nodes with local functions inlined"


def _node_faults(node: onnx.NodeProto) -> Iterator[str]:
    if not node.op_type:
        yield f"the node {node.name!r} has no operator"
    if node.op_type == "Constant" and node.domain in STANDARD_DOMAINS:
        values = [a for a in node.attribute if a.type == _CONSTANT_VALUES.get(a.name)]
        if len(values) != 1 or len(node.output) != 1:
            yield f"the Constant node {node.name!r} holds no value"
    name, is_fault, what = _CRASHES.get(node.op_type, ("", lambda *_: False, ""))
    for attribute in node.attribute if name else ():
        if attribute.name == name and is_fault(attribute.s if name == "equation" else attribute.i, node):
            yield f"the node {node.name!r} is not valid: {node.op_type}'s attribute {name} {what}"


def _tensor_faults(tensor: onnx.TensorProto) -> Iterator[str]:
    """Data that do not match the dimensions."""
    what = f"the constant {tensor.name!r}"
    if any(dim < 0 for dim in tensor.dims):
        yield f"{what} has a negative dimension"
    if tensor.HasField("segment"):
        yield f"{what} is stored in segments"
    expected, unit = tensor_nbytes(tensor), "bytes"
    if is_external(tensor):
        if tensor.data_type == onnx.TensorProto.STRING:
            yield f"{what} keeps strings in external data"
        return
    if tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
        held = len(tensor.raw_data)
    else:
        count, unit = math.prod(tensor.dims), "values"
        per_value = 2 if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128) else 1
        expected = expected if expected < count else count * per_value  # less than a byte each: packed
        held = len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type)))
    if held != expected:
        yield f"{what} of shape {list(tensor.dims)} holds {held} {unit}, not {expected}"


def unique_names(graph: onnx.GraphProto) -> list[str]:
    """The nodes' names; made where there is none, numbered where one is there again."""
    stated = {node.name for node in graph.node}
    used: set[str] = set()
    count: dict[str, int] = {}
    names = []
    for position, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{position}"
        if name in used or (not node.name and name in stated):
            stem, number = name, count.get(name, 2)
            while (name := f"{stem}_{number}") in stated or name in used:
                number += 1
            count[stem] = number + 1
        used.add(name)
        names.append(name)
    return names


def name_apart(graph: onnx.GraphProto) -> None:
    """Number, in place, nodes of one graph or subgraph that have one name: ONNX Runtime 1.31 refuses such a model."""
    for inner in all_graphs(graph):
        names = [node.name for node in inner.node if node.name]
        if len(set(names)) < len(names):
            for node, name in zip(inner.node, unique_names(inner), strict=True):
                node.name = name


def _opset_of(proto: onnx.ModelProto, path: Path) -> int:
    """The default operator set of a model, where the installed onnx knows it and mptune can work on it."""
    opset = next((entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS), None)
    if opset is None:
        raise ModelError(f"{path} imports no standard ONNX operator set", "export it with the default opset")
    versions = ("IR version", proto.ir_version, onnx.IR_VERSION), ("opset", opset, onnx.defs.onnx_opset_version())
    for what, version, newest in versions:
        if version > newest:
            raise ModelError(
                f"{path} has {what} {version}, the installed onnx {onnx.__version__} knows up to {newest}",
                "pip install --upgrade onnx, or export at a lower opset (17 to 21 are served best)",
            )
    if opset < MIN_OPSET:
        raise ModelError(
            f"{path} uses opset {opset}, mptune needs {MIN_OPSET} or newer",
            "export it again at opset 17, or convert it with onnx.version_converter",
        )
    return int(opset)


_GROUP_NORM_BY_CHANNEL = 21


def _raised(proto: onnx.ModelProto, path: Path, current: int, opset: int) -> onnx.ModelProto:
    """The model, which has no local functions, at a newer operator set; the same model where it is there already."""
    newest = onnx.defs.onnx_opset_version()
    if opset < current:
        text = f"{path} uses opset {current}: --opset {opset} would lower it"
        raise ModelError(text, "an operator set can only be raised")
    if opset > newest:
        raise ModelError(
            f"is {opset}, the installed onnx {onnx.__version__} knows up to {newest}",
            f"give at most {newest}, or pip install --upgrade onnx",
            setting="opset",
        )
    if opset == current:
        return proto
    refused = f"{path} cannot be brought from opset {current} to {opset} by ONNX's converter"
    cure = "export it again at that opset, or search at the opset that it has"
    nodes = (node for graph in all_graphs(proto.graph) for node in graph.node)
    norm = next((n for n in nodes if n.op_type == "GroupNormalization" and n.domain in STANDARD_DOMAINS), None)
    if norm is not None and current < _GROUP_NORM_BY_CHANNEL <= opset:
        what = f"GroupNormalization {norm.name!r} has a scale for each group, from {_GROUP_NORM_BY_CHANNEL} on one for"
        raise ModelError(f"{refused}: {what} each channel, and the converter leaves it as it is", cure)
    slim = without_weights(proto, proto.graph.node, {})
    slim.graph.value_info.extend(proto.graph.value_info)
    try:
        converted = onnx.version_converter.convert_version(slim, opset)
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own ConvertError
        raise ModelError(f"{refused}: {last_line(error)}", cure) from None
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.graph.node[:]
    result.graph.node.extend(converted.graph.node)
    del result.graph.value_info[:]  # of values that the converter has renamed or typed anew
    there = {constant.name for constant in result.graph.initializer}
    result.graph.initializer.extend(c for c in converted.graph.initializer if c.name not in there)
    for entry in result.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = opset
    result.ir_version = max(proto.ir_version, converted.ir_version)
    return result
