"""An ONNX model, loaded, checked and typed: what every other part of mptune works on.

Weights stay where they are: external data is read through memory maps when it is asked for, so a model larger
than memory can be loaded and rewritten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from sys import intern
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx.helper
import onnx.inliner
import onnx.numpy_helper
import onnx.shape_inference
import onnx.version_converter
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from mptune.errors import ModelError
from mptune.files import files_sha256
from mptune.graph.loading.inference import (
    AskRuntime,
    RuntimeTypes,
    infer_types,
    last_line,
    node_types,
    types_by_schema,
    without_weights,
)
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    Initializer,
    TensorInfo,
    all_graphs,
    all_tensors,
    constant_value,
    external_location,
    is_external,
    is_known_type,
    make_initializer,
    subgraphs,
    tensor_nbytes,
    type_of,
)
from mptune.graph.ops import onnx_schema

K = TypeVar("K")

T = TypeVar("T")


def once(find: Callable[[K], T]) -> Callable[[K], T]:
    """Let a function of one object keep its result in that object, for as long as it lives."""
    name = f"once: {find.__module__}.{find.__qualname__}"

    @wraps(find)
    def result_of(subject: K) -> T:
        results = vars(subject)
        if name not in results:
            results[name] = find(subject)
        result: T = results[name]
        return result

    return result_of


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
        if len(set(names)) == len(names):
            continue
        for node, name in zip(inner.node, unique_names(inner), strict=True):
            node.name = name


_TORCH = ("a PyTorch file", "load it in Python and export it: torch.onnx.export(model, inputs, 'model.onnx')")

_ENGINE = ("a TensorRT engine", "give the ONNX model that it was built from")

_TENSORFLOW = ("a TensorFlow model", "export it: python -m tf2onnx.convert --help")

_OTHERS = {
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ckpt"), _TORCH),
    ".safetensors": ("a file of weights", "export the model that has them to ONNX, such as with torch.onnx.export"),
    **dict.fromkeys((".engine", ".plan", ".trt"), _ENGINE),
    **dict.fromkeys((".pb", ".h5", ".keras", ".tflite"), _TENSORFLOW),
    **dict.fromkeys((".npz", ".npy"), ("arrays", "the model comes first; --data takes the samples")),
    ".ort": ("ONNX Runtime's own format", "give the .onnx file that it was made from"),
}

_AGAIN = "export it again, or check that the copy is complete (compare its size or sha256 with the original)"


def no_model(path: Path, data: bytes) -> tuple[str, str]:
    """What is wrong with a file that does not parse as ONNX, and what to do about it."""
    explanation = _OTHERS.get(path.suffix.lower())
    if explanation is None and data[:2] == b"PK" and b"data.pkl" in data[:4096]:
        explanation = _TORCH
    if explanation is None:
        return f"{path} is not an ONNX model, or it is truncated", _AGAIN
    what, hint = explanation
    return f"{path} is not an ONNX model: {what}", hint


def no_graph(path: Path, data: bytes) -> tuple[str, str]:
    """The same for a file that parses, as short and random bytes may, and holds no graph."""
    text, hint = no_model(path, data)
    return (f"{path} holds no ONNX graph", hint) if hint == _AGAIN else (text, hint)


_GROUP_NORM_BY_CHANNEL = 21


def raised(proto: onnx.ModelProto, path: Path, opset: int) -> onnx.ModelProto:
    """The model, which has no local functions, at a newer operator set; the same model where it is there already."""
    current = next(o.version for o in proto.opset_import if o.domain in STANDARD_DOMAINS)
    newest = onnx.defs.onnx_opset_version()
    if opset < current:
        raise ModelError(
            f"{path} uses opset {current}: --opset {opset} would lower it", "an operator set can only be raised"
        )
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


def _clear_dynamic(proto: onnx.ModelProto) -> None:
    """Leave dimensions of -1 or named ``?`` unnamed: exporters of Paddle write dynamic ones so, each its own size."""
    for graph in all_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type"):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_value == -1 or dim.dim_param == "?":
                        dim.Clear()


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
    bodies = (graph for function in proto.functions for node in function.node for graph in subgraphs(node))
    graphs = [inner for graph in (proto.graph, *bodies) for inner in all_graphs(graph)]
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
    for descriptor, value in message.ListFields():
        values = value if descriptor.is_repeated else (value,)
        if descriptor.type == FieldDescriptor.TYPE_STRING:
            if not all(isinstance(text, str) for text in values):
                return str(descriptor.full_name)
        elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in values:
                field_name = _undecodable(inner)
                if field_name:
                    return field_name
    return ""


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
        for graph in subgraphs(node):
            yield from _called(graph.node)


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
    own = _given(graph) | {out for node in graph.node for out in node.output}
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
        for attribute in node.attribute if node.op_type in _INFERENCE_FAULTS else ():
            name, is_fault, what = _INFERENCE_FAULTS[node.op_type]
            if attribute.name == name and is_fault(attribute.s if name == "equation" else attribute.i, node):
                fault = f"{node.op_type}'s attribute {name} {what}"
                raise ModelError(f"{path}: the node {node.name!r} is not valid: {fault}", _HINT)


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


_ML_DOMAIN = "ai.onnx.ml"
"""Tree ensembles, linear classifiers and the like: their outputs are always FP32, integers, text or maps."""

MIN_OPSET = 9
"""Below opset 9 the operators' schemas lack the FP16 types that rewriting relies on (Cast-9, ConstantOfShape-9)."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the main graph.

    Attributes:
        index: position in topological order.
        captures: outer values that the node's subgraphs read.
        rounds: whether what it computes in FP16 is rounded; False in a model that is written for emulation
            (``mptune.graph.writing.rounding_steps``), where a node is computed together with the one that reads it.
    """

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...]
    proto: onnx.NodeProto = field(repr=False, compare=False)
    rounds: bool = True

    @property
    def is_standard(self) -> bool:
        """Whether the operator is one of ONNX's own."""
        return self.domain in STANDARD_DOMAINS

    @property
    def has_subgraph(self) -> bool:
        """Whether an attribute holds a graph (If, Loop, Scan)."""
        return any(True for _ in subgraphs(self.proto))


@dataclass(frozen=True, eq=False)
class Model:
    """A typed ONNX model. Immutable by convention: nobody changes ``proto``.

    Attributes:
        path: where it was loaded from.
        sha256: over the file and all external data that it refers to.
        opset: version of the default operator set.
        inputs: graph inputs that must be fed (initializers that double as inputs are left out).
        outputs: graph outputs.
        nodes: in topological order.
        tensors: every value of the main graph by name.
        initializers: graph initializers and Constant nodes by tensor name.
        producer: tensor -> index of the node that computes it.
        consumers: tensor -> indices of the nodes that read it, captures by subgraphs included, each node once.
        runtime: what the runtime said of operators that ONNX does not define.
    """

    path: Path
    sha256: str
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorInfo]
    initializers: Mapping[str, Initializer]
    producer: Mapping[str, int]
    consumers: Mapping[str, tuple[int, ...]]
    proto: onnx.ModelProto = field(repr=False)
    runtime: RuntimeTypes = field(default_factory=RuntimeTypes, repr=False)

    def info(self, tensor: str) -> TensorInfo:
        """Type and shape of a value; ``undefined`` where nothing is known."""
        return self.tensors.get(tensor) or TensorInfo(tensor, "undefined", None)


def output_types(
    model: Model,
    node: Node,
    shapes: Mapping[str, tuple[int | str | None, ...] | None],
    values: Mapping[str, np.ndarray],
) -> Mapping[str, onnx.TypeProto]:
    """Types of what a node computes, from its inputs' types, shapes (the model's where none is given) and values."""
    types = {}
    for name in filter(None, node.inputs):
        info = model.info(name)
        code = onnx.TensorProto.DataType.Value(info.dtype.upper())
        types[name] = onnx.helper.make_tensor_type_proto(code, shapes.get(name, info.shape))
    data = {name: onnx.numpy_helper.from_array(array, name) for name, array in values.items()}
    return node_types(node.proto, types, data, model.proto.opset_import, model.proto.ir_version)


def load_model(
    path: str | Path, ask: AskRuntime | None = None, *, any_precision: bool = False, opset: int | None = None
) -> Model:
    """Load, check and type a model.

    Args:
        path: of the ONNX file.
        ask: says which types the operators have that ONNX does not define; None where nobody does: then what they
            compute, and what is computed from it, has no type (``mptune.engines.loading.load_typed_model`` asks).
        any_precision: take a model that computes nothing in FP32, too, such as one that is FP16 throughout.
        opset: the operator set that ONNX's converter raises the model to; None leaves it as it is.

    Raises:
        ModelError: no such file, not ONNX, truncated, an opset or a construct that cannot be tuned, external data that
            is missing, too short or outside the model's folder, or no FP32 value to tune.
    """
    path = Path(path)
    proto = _read(path)
    _clear_dynamic(proto)
    check_structure(proto, path)
    if proto.functions:
        proto = _inlined(proto, path)
    name_apart(proto.graph)
    version = _check_opset(proto, path)
    proto = proto if opset is None else raised(proto, path, opset)
    opset = opset or version
    base_dir = path.resolve().parent
    nodes = _sorted_nodes(proto.graph, path)
    initializers = _initializers(proto.graph, nodes, base_dir)
    files = {external_location(t, base_dir).path for t in all_tensors(proto.graph) if is_external(t)}
    sha256 = files_sha256(path, *sorted(files))
    protos = [node.proto for node in nodes]
    outside = (n for n in nodes if not n.is_standard or onnx_schema(n.op_type, opset) is None)
    foreign = tuple(out for node in outside for out in node.outputs if out)
    runtime = RuntimeTypes()
    if foreign and ask is not None:
        slim = without_weights(proto, protos, initializers)
        runtime = ask(slim, foreign)
        if runtime.failure:
            runtime = types_by_schema(slim, foreign, runtime)
    tensors = infer_types(proto, protos, initializers, foreign, runtime.values, path)
    graph_inputs = [TensorInfo(i.name, *type_of(i.type)) for i in proto.graph.input]
    model = Model(
        path=path,
        sha256=sha256,
        opset=opset,
        inputs=tuple(i for i in graph_inputs if i.name not in initializers),
        outputs=tuple(tensors.get(o.name, TensorInfo(o.name, *type_of(o.type))) for o in proto.graph.output),
        nodes=nodes,
        tensors=tensors,
        initializers=initializers,
        producer={out: node.index for node in nodes for out in node.outputs if out},
        consumers=consumers_of(nodes),
        proto=proto,
        runtime=runtime,
    )
    if not any_precision:
        _check_tunable(model)
    return model


def _read(path: Path) -> onnx.ModelProto:
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
    except DecodeError:
        raise ModelError(*no_model(path, data)) from None
    if not proto.graph.node or not proto.ir_version:
        raise ModelError(*no_graph(path, data))
    return proto


def _inlined(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The model with its local functions inlined."""
    try:
        return onnx.inliner.inline_local_functions(proto)
    except Exception as error:  # onnx raises ValidationError, InferenceError, ValueError and RuntimeError
        raise ModelError(
            f"{path}: a local function cannot be inlined: {last_line(error)}",
            "onnx.inliner.inline_local_functions(model) says more",
        ) from None


def _check_opset(proto: onnx.ModelProto, path: Path) -> int:
    versions = {("" if o.domain in STANDARD_DOMAINS else o.domain): o.version for o in proto.opset_import}
    if "" not in versions:
        raise ModelError(f"{path} imports no standard ONNX operator set", "export it with the default opset")
    newest = onnx.defs.onnx_opset_version()
    if versions[""] > newest:
        raise ModelError(
            f"{path} uses opset {versions['']}, the installed onnx {onnx.__version__} knows up to {newest}",
            "pip install --upgrade onnx, or export at a lower opset (17 to 21 are served best)",
        )
    if versions[""] < MIN_OPSET:
        raise ModelError(
            f"{path} uses opset {versions['']}, mptune needs {MIN_OPSET} or newer",
            "export it again at opset 17, or convert it with onnx.version_converter",
        )
    return int(versions[""])


def _given(graph: onnx.GraphProto) -> set[str]:
    """The values of a graph that no node computes: inputs and constants."""
    sparse = [constant.values for constant in graph.sparse_initializer]
    return {value.name for value in (*graph.input, *graph.initializer, *sparse)}


def _captures(node: onnx.NodeProto) -> tuple[str, ...]:
    """Outer values that the node's subgraphs read, in order of appearance."""
    names: dict[str, None] = {}
    for graph in subgraphs(node):
        own = _given(graph) | {out for inner in graph.node for out in inner.output}
        read = [name for inner in graph.node for name in (*inner.input, *_captures(inner))]
        read += [o.name for o in graph.output]
        names.update(dict.fromkeys(name for name in read if name and name not in own))
    return tuple(names)


def _sorted_nodes(graph: onnx.GraphProto, path: Path) -> tuple[Node, ...]:
    """Name the nodes uniquely and bring them into topological order, keeping the file's order where it is one.

    Names are interned: at 50,000 nodes, look-ups are bound by memory latency.
    """
    given = _given(graph) | {""}
    names = unique_names(graph)
    made: dict[str, int] = {}
    needs = []
    for position, proto in enumerate(graph.node):
        for out in proto.output:
            if out and (out in made or out in given):
                raise ModelError(f"{path}: {out!r} is computed twice", "the file is not valid ONNX; export it again")
            made[out] = position
        needs.append(_captures(proto))
    for output in graph.output:
        if output.name not in made and output.name not in given:
            raise ModelError(f"{path}: nothing computes the output {output.name!r}", "export the model again")
    order: list[int] = []
    state = bytearray(len(names))  # 0 unseen, 1 open, 2 done
    for root in range(len(names)):
        stack = [root] if not state[root] else []
        while stack:
            at = stack[-1]
            if state[at] == 2:
                stack.pop()
                continue
            proto = graph.node[at]
            waiting = [
                made[i] for i in (*proto.input, *needs[at]) if i not in given and i in made and state[made[i]] != 2
            ]
            if state[at] == 1 and waiting:
                raise ModelError(f"{path}: the graph has a cycle through {names[at]!r}", "export the model again")
            for i in (*proto.input, *needs[at]):
                if i not in given and i not in made:
                    raise ModelError(f"{path}: {names[at]!r} reads {i!r}, which nothing computes", "export it again")
            state[at] = 1
            if waiting:
                stack.extend(reversed(waiting))
            else:
                state[at] = 2
                order.append(at)
                stack.pop()
    protos = [graph.node[at] for at in order]
    return tuple(
        Node(
            index,
            names[at],
            intern(proto.op_type),
            intern(proto.domain),
            tuple(map(intern, proto.input)),
            tuple(map(intern, proto.output)),
            tuple(map(intern, needs[at])),
            proto,
        )
        for index, (at, proto) in enumerate(zip(order, protos, strict=True))
    )


def consumers_of(nodes: tuple[Node, ...]) -> dict[str, tuple[int, ...]]:
    """Tensor -> indices of the nodes that read it, captures by subgraphs included, each node once."""
    readers: dict[str, dict[int, None]] = {}
    for node in nodes:
        for name in (*node.inputs, *node.captures):
            if name:
                readers.setdefault(name, {})[node.index] = None
    return {name: tuple(indices) for name, indices in readers.items()}


def _initializers(graph: onnx.GraphProto, nodes: tuple[Node, ...], base_dir: Path) -> dict[str, Initializer]:
    graph_inputs = {i.name for i in graph.input}
    constants = {}
    for proto in graph.initializer:
        name = intern(proto.name)
        constants[name] = make_initializer(name, proto, base_dir, overridable=name in graph_inputs)
    for node in nodes:
        if node.op_type == "Constant" and node.is_standard:
            value = constant_value(node.proto)
            if value is not None:
                constants[node.outputs[0]] = make_initializer(node.outputs[0], value, base_dir, node_index=node.index)
    return constants


def _holds_map(value: onnx.TypeProto) -> bool:
    """Whether a type is a map, or a sequence or an optional of maps."""
    kind = value.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return _holds_map(getattr(value, kind).elem_type)
    return bool(kind == "map_type")


def _check_tunable(model: Model) -> None:
    for output in model.proto.graph.output:
        if _holds_map(output.type):
            raise ModelError(
                f"{model.path}: output {output.name!r} holds maps, not tensors, so its error cannot be measured",
                "export without ZipMap (skl2onnx: options={'zipmap': False})",
            )
    nodes = [node for node in model.nodes if node.domain != _ML_DOMAIN and node.op_type != "Constant"]
    computed = [model.info(out).dtype for node in nodes for out in node.outputs if out]
    if "float" in computed and any(node.op_type != "Cast" for node in nodes):
        return
    reduced = next((name for dtype, name in (("float16", "FP16"), ("bfloat16", "BF16")) if dtype in computed), None)
    if reduced:
        message = f"{model.path} is {reduced} already: no layer computes in FP32"
        raise ModelError(message, "give the FP32 model that it was made from")
    learners = sorted({node.op_type for node in model.nodes if node.domain == _ML_DOMAIN})
    if learners:
        raise ModelError(
            f"{model.path} has no FP32 layer to tune: it computes with {', '.join(learners)} of {_ML_DOMAIN}",
            "these operators have no FP16 form: deploy the model as it is",
        )
    raise ModelError(
        f"{model.path} has no FP32 layer to tune", "mptune decides between FP32 and FP16; give an FP32 model"
    )


def needed_nodes(model: Model, values: Iterable[str]) -> list[Node]:
    """The nodes that these values depend on, in topological order."""
    wanted = set(values)
    needed = []
    for node in reversed(model.nodes):
        if not wanted.isdisjoint(node.outputs):
            needed.append(node)
            wanted.update(node.inputs)
            wanted.update(node.captures)
            wanted.discard("")  # an omitted input is nobody's output
    return needed[::-1]
