"""Reads an ONNX file: refused where it is not sound, with its functions inlined, at the operator set that is wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import onnx
import onnx.helper
import onnx.inliner
import onnx.numpy_helper
import onnx.version_converter
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from mptune.errors import ModelError
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    TYPE_NAMES,
    Initializer,
    all_graphs,
    all_tensors,
    external_location,
    is_external,
    tensor_nbytes,
)

MIN_OPSET = 9
"""Below opset 9 the operators' schemas lack the FP16 types that rewriting relies on (Cast-9, ConstantOfShape-9)."""
_LEAST_RAISED_OPSET = 7
"""From this one on, ONNX's converter raises a model to ``MIN_OPSET``; before, broadcasts were written otherwise."""
_FREE_CONSTANTS_IR = 4  # from this IR version on, constants of the graph need not be among its inputs
_MOST_INSIDE_BYTES = 1_900_000_000  # of external data that are read into the model: protobuf messages end at 2 GiB
INLINE_LIMIT = 4096  # constants up to this many bytes stay in the graph for shape inference: shapes, axes, scales
NOT_VALID = "the file is not valid ONNX; export it again, or check that the copy is complete"
"""The hint about a file that contradicts itself."""


def read_model(path: Path, opset: int | None = None) -> tuple[onnx.ModelProto, int, tuple[Path, ...], int | None]:
    """The model of a file, with functions inlined, equally named nodes numbered, and large Constants as the graph's.

    Constants that are inputs because they had to be, below IR version 4, are so no longer. ``opset`` and errors are as
    of ``load_model``. Returned with it: its operator set, its files of external data, and its own operator set if
    mptune had to raise it.
    """
    proto = _parsed(path)
    # Exporters of Paddle write dynamic dimensions as -1 or ``?``, each its own size.
    for graph in all_graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type"):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_value == -1 or dim.dim_param == "?":
                        dim.Clear()
    if proto.functions:
        try:
            proto = onnx.inliner.inline_local_functions(proto)
        except Exception as error:  # onnx raises ValidationError, InferenceError, ValueError and RuntimeError
            text = f"{path}: a local function cannot be inlined: {last_line(error)}"
            raise ModelError(text, "onnx.inliner.inline_local_functions(model) says more") from None
    fault = _fault(proto)
    if fault:
        raise ModelError(f"{path}: {fault}", NOT_VALID)
    name_apart(proto.graph)
    if proto.ir_version < _FREE_CONSTANTS_IR:
        constants = {tensor.name for tensor in proto.graph.initializer}
        given = [value for value in proto.graph.input if value.name not in constants]
        del proto.graph.input[:]
        proto.graph.input.extend(given)
        proto.ir_version = _FREE_CONSTANTS_IR
    outside = [tensor for tensor in all_tensors(proto.graph) if is_external(tensor)]
    files = {external_location(tensor, path.resolve().parent)[0] for tensor in outside}
    if files:
        _read_inside(proto.graph, path)
    # The operator set is one that the installed onnx has, and that mptune can work on.
    current = next((entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS), None)
    if current is None:
        raise ModelError(f"{path} imports no standard ONNX operator set", "export it with the default opset")
    versions = ("IR version", proto.ir_version, onnx.IR_VERSION), ("opset", current, onnx.defs.onnx_opset_version())
    for what, version, newest in versions:
        if version > newest:
            text = f"{path} has {what} {version}, the installed onnx {onnx.__version__} knows up to {newest}"
            raise ModelError(text, "pip install --upgrade onnx, or export at a lower opset (17 to 21 are served best)")
    if current < _LEAST_RAISED_OPSET:
        hint = "export it again at opset 17, or convert it with onnx.version_converter"
        raise ModelError(f"{path} uses opset {current}, mptune needs {_LEAST_RAISED_OPSET} or newer", hint)
    wanted = max(current, MIN_OPSET) if opset is None else opset
    _raise_opset(proto, path, current, wanted)
    return proto, wanted, tuple(sorted(files)), current if opset is None and current < wanted else None


def _parsed(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        text = f"{path} is not a file" if path.exists() else f"no such file: {path}"
        raise ModelError(text, "check the path; mptune takes an .onnx file, and reads it more than once")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    try:
        proto = onnx.load_model_from_string(data)
        text = f"{path} holds no ONNX graph"  # short and random bytes may parse
    except DecodeError:
        proto, text = onnx.ModelProto(), f"{path} is not an ONNX model, or it is truncated"
    if not proto.graph.node or not proto.ir_version:
        hint = "export it again (a PyTorch module: torch.onnx.export), or compare the copy with the original"
        raise ModelError(text, hint)
    return proto


def _fault(proto: onnx.ModelProto) -> str:
    """What is inconsistent first about a model's names, types and constants; "" where nothing is.

    Beyond what ``onnx.checker`` sees, and before onnx's inference, which some of it crashes.
    """
    for graph in all_graphs(proto.graph):
        constants = [t.name for t in graph.initializer] + [s.values.name for s in graph.sparse_initializer]
        inputs, outputs = [value.name for value in graph.input], [value.name for value in graph.output]
        for what, names in (("input", inputs), ("output", outputs), ("constant", constants)):
            if "" in names:
                return f"a graph {what} has no name"
            if what != "output" and len({*names}) < len(names):  # a value may be given twice
                return f"the graph {what} {Counter(names).most_common(1)[0][0]!r} is there twice"
        # ONNX Runtime does not load a subgraph that gives out an outer value, and onnx's inference hangs on it.
        own = {*inputs, *constants, *(out for node in graph.node for out in node.output)}
        foreign = next((name for name in outputs if name not in own), None)
        if graph is not proto.graph and foreign is not None:
            return f"the subgraph {graph.name!r} has the output {foreign!r}, which it does not compute"
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor = value.type.tensor_type
            if tensor.elem_type not in TYPE_NAMES:
                return f"{value.name!r} has the unknown element type {tensor.elem_type}"
            if any(dim.dim_value < 0 for dim in tensor.shape.dim):
                return f"{value.name!r} has a negative dimension"
    for tensor in all_tensors(proto.graph):
        if TYPE_NAMES.get(tensor.data_type, "undefined") == "undefined":
            return f"the constant {tensor.name!r} has the unknown element type {tensor.data_type}"
        is_whole = is_external(tensor)  # ``external_location`` compares
        if tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
            is_whole |= len(tensor.raw_data) == tensor_nbytes(tensor)
        elif not is_whole:
            with suppress(ValueError):  # NumPy's, of the shape
                is_whole = onnx.numpy_helper.to_array(tensor).shape == tuple(tensor.dims)
        if not is_whole or min(tensor.dims, default=0) < 0:
            return f"the constant {tensor.name!r} has other data than its shape {list(tensor.dims)} says"
    return ""


def _read_inside(graph: onnx.GraphProto, path: Path) -> None:
    """Leave external data to the graph's own constants: all else is written as it is, into other folders.

    Large Constant nodes become constants of the graph; what attributes and subgraphs hold is read.
    """
    moved = []
    for index, (node, name) in enumerate(zip(graph.node, unique_names(graph), strict=True)):
        node.name = name  # one that is made has the node's position in it
        if node.op_type == "Constant" and node.domain in STANDARD_DOMAINS:
            tensor = node.attribute[0].t  # an empty one in attributes of other types
            if is_external(tensor) and tensor_nbytes(tensor) > INLINE_LIMIT:
                moved.append(index)
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = node.output[0]
    for index in reversed(moved):
        del graph.node[index]
    inside = [tensor for tensor in islice(all_tensors(graph), len(graph.initializer), None) if is_external(tensor)]
    nbytes = sum(map(tensor_nbytes, inside))
    if nbytes > _MOST_INSIDE_BYTES:
        text = f"{path}: subgraphs and attributes have {nbytes / 1e9:.3g} GB of external data, ONNX files end at 2 GiB"
        raise ModelError(text, "make these constants initializers of the main graph, which subgraphs may read")
    for tensor in inside:
        data, offset, length = external_location(tensor, path.resolve().parent)
        with data.open("rb") as file:
            file.seek(offset)
            tensor.raw_data = file.read(length)
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def unique_names(graph: onnx.GraphProto) -> list[str]:
    """The nodes' names; made where there is none, numbered where one is there again."""
    stated = {node.name for node in graph.node}
    used: dict[str, None] = {}
    count = Counter[str]()
    for position, node in enumerate(graph.node):
        stem = name = node.name or f"{node.op_type}_{position}"
        while name in used or (name in stated and name != node.name):
            count[stem] += 1
            name = f"{stem}_{count[stem] + 1}"
        used[name] = None
    return list(used)


def name_apart(graph: onnx.GraphProto) -> None:
    """Number, in place, nodes of one graph or subgraph that have one name: ONNX Runtime 1.31 refuses such a model."""
    for inner in all_graphs(graph):
        names = [node.name for node in inner.node if node.name]
        if len(set(names)) < len(names):
            for node, name in zip(inner.node, unique_names(inner), strict=True):
                node.name = name


def _raise_opset(proto: onnx.ModelProto, path: Path, current: int, opset: int) -> None:
    """Bring a model, which has no local functions, to a newer operator set."""
    newest = onnx.defs.onnx_opset_version()
    if not current <= opset <= newest:
        text = f"is {opset}, the model has {current}, and the installed onnx {onnx.__version__} knows up to {newest}"
        raise ModelError(text, "an operator set can only be raised", setting="opset")
    if opset == current:
        return
    refused = f"{path} cannot be brought from opset {current} to {opset} by ONNX's converter"
    cure = "export it again at that opset" + (", or search at the opset that it has" if current >= MIN_OPSET else "")
    operators = {node.op_type for graph in all_graphs(proto.graph) for node in graph.node}
    if "GroupNormalization" in operators and current < 21 <= opset:  # it converts this wrongly
        raise ModelError(f"{refused}: from 21 on a GroupNormalization has a scale for each channel, not group", cure)
    slim = without_weights(proto, proto.graph.node, {})
    slim.graph.value_info.extend(proto.graph.value_info)
    try:
        converted = onnx.version_converter.convert_version(slim, opset)
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own ConvertError
        raise ModelError(f"{refused}: {last_line(error)}", cure) from None
    del proto.graph.node[:]
    proto.graph.node.extend(converted.graph.node)
    del proto.graph.value_info[:]  # of values that the converter has renamed or typed anew
    there = {constant.name for constant in proto.graph.initializer}
    proto.graph.initializer.extend(c for c in converted.graph.initializer if c.name not in there)
    for entry in proto.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = opset
    proto.ir_version = max(proto.ir_version, converted.ir_version)


def without_weights(
    proto: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    initializers: Mapping[str, Initializer],
    limit: int = INLINE_LIMIT,
) -> onnx.ModelProto:
    """The model with constants of more bytes than the limit, and those in external data, as inputs."""
    graph = onnx.GraphProto(name=proto.graph.name or "graph", input=proto.graph.input, output=proto.graph.output)
    large = {n: c for n, c in initializers.items() if c.node_index is not None and c.nbytes > limit}
    graph.node.extend(n for n in nodes if n.op_type != "Constant" or n.output[0] not in large)
    outside = [(name, constant.proto.data_type, constant.shape) for name, constant in large.items()]
    for tensor in proto.graph.initializer:
        if not is_external(tensor) and tensor_nbytes(tensor) <= limit:
            graph.initializer.append(tensor)
        else:
            outside.append((tensor.name, tensor.data_type, tuple(tensor.dims)))
    outside += [(s.values.name, s.values.data_type, tuple(s.dims)) for s in proto.graph.sparse_initializer]
    declared = {i.name for i in graph.input}
    graph.input.extend(onnx.helper.make_tensor_value_info(*value) for value in outside if value[0] not in declared)
    return onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, graph=graph)


def last_line(error: Exception) -> str:
    """The last line of an error that onnx raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
