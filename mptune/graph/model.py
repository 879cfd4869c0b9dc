"""An ONNX model, loaded, checked and typed: what every other part of mptune works on.

Weights stay where they are: external data is read through memory maps when it is asked for, so a model larger
than memory can be loaded and rewritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx.inliner
import onnx.numpy_helper
import onnx.shape_inference
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from mptune.errors import ModelError
from mptune.graph.tensors import (
    Initializer,
    TensorInfo,
    all_tensors,
    constant_value,
    external_location,
    is_external,
    make_initializer,
    tensor_nbytes,
    type_of,
)

STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
MIN_OPSET = 9
"""Below opset 9 the operators' schemas lack the FP16 types that rewriting relies on (Cast-9, ConstantOfShape-9)."""

_INLINE_LIMIT = 4096
"""Initializers up to this many bytes stay in the graph for shape inference: shapes, axes, scales."""


@dataclass(frozen=True)
class Node:
    """One node of the main graph.

    Attributes:
        index: position in topological order.
        name: unique; the user's own wherever there is one.
        inputs: names, "" for an omitted optional input.
        captures: outer values that the node's subgraphs read.
    """

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...]
    proto: onnx.NodeProto = field(repr=False, compare=False)

    @property
    def is_standard(self) -> bool:
        """Whether the operator is one of ONNX's own."""
        return self.domain in STANDARD_DOMAINS

    @property
    def has_subgraph(self) -> bool:
        """Whether an attribute holds a graph (If, Loop, Scan)."""
        return any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in self.proto.attribute)


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

    def info(self, tensor: str) -> TensorInfo:
        """Type and shape of a value; ``undefined`` where nothing is known."""
        return self.tensors.get(tensor) or TensorInfo(tensor, "undefined", None)


def load_model(path: str | Path) -> Model:
    """Load, check and type a model.

    Raises:
        ModelError: no such file, not ONNX, truncated, an opset or a construct that cannot be tuned, external data that
            is missing, too short or outside the model's folder, or no FP32 value to tune.
    """
    path = Path(path)
    proto = _read(path)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    opset = _check_opset(proto, path)
    base_dir = path.resolve().parent
    for tensor in all_tensors(proto.graph):
        if is_external(tensor):
            external_location(tensor, base_dir)
    nodes = _sorted_nodes(proto.graph, path)
    initializers = _initializers(proto.graph, nodes, base_dir)
    tensors = _infer_types(proto, nodes, initializers, path)
    graph_inputs = [TensorInfo(i.name, *type_of(i.type)) for i in proto.graph.input]
    model = Model(
        path=path,
        sha256=_hash(path, proto, base_dir),
        opset=opset,
        inputs=tuple(i for i in graph_inputs if i.name not in initializers),
        outputs=tuple(tensors.get(o.name, TensorInfo(o.name, *type_of(o.type))) for o in proto.graph.output),
        nodes=nodes,
        tensors=tensors,
        initializers=initializers,
        producer={out: node.index for node in nodes for out in node.outputs if out},
        consumers=_consumers(nodes),
        proto=proto,
    )
    _check_tunable(model)
    return model


def _read(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        raise ModelError(f"{path} is a folder, not an ONNX file", "give the .onnx file inside it")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"no such file: {path}", "check the path; mptune takes an .onnx file") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    hint = "export it again, or check that the copy is complete (compare its size or sha256 with the original)"
    try:
        proto = onnx.load_model_from_string(data)
    except DecodeError:
        raise ModelError(f"{path} is not an ONNX model, or it is truncated", hint) from None
    if not proto.graph.node or not proto.ir_version:
        raise ModelError(f"{path} holds no ONNX graph", hint)
    return proto


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


def _captures(node: onnx.NodeProto) -> tuple[str, ...]:
    """Outer values that the node's subgraphs read, in order of appearance."""
    found: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
            own |= {s.values.name for s in graph.sparse_initializer}
            own |= {out for inner in graph.node for out in inner.output}
            read = [name for inner in graph.node for name in (*inner.input, *_captures(inner))]
            read += [o.name for o in graph.output]
            found.update(dict.fromkeys(name for name in read if name and name not in own))
    return tuple(found)


def _sorted_nodes(graph: onnx.GraphProto, path: Path) -> tuple[Node, ...]:
    """Name the nodes uniquely and bring them into topological order, keeping the file's order where it is one."""
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    known |= {s.values.name for s in graph.sparse_initializer}
    known.add("")
    taken: set[str] = {n.name for n in graph.node if n.name}
    used: set[str] = set()
    made: dict[str, int] = {}
    names, needs = [], []
    for position, proto in enumerate(graph.node):
        name = proto.name or f"{proto.op_type}_{position}"
        if name in used or (not proto.name and name in taken):
            stem, count = name, 2
            while (name := f"{stem}_{count}") in taken or name in used:
                count += 1
        used.add(name)
        names.append(name)
        for out in proto.output:
            if out and (out in made or out in known):
                raise ModelError(f"{path}: {out!r} is computed twice", "the file is not valid ONNX; export it again")
            made[out] = position
        needs.append(_captures(proto))
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
                made[i] for i in (*proto.input, *needs[at]) if i not in known and i in made and state[made[i]] != 2
            ]
            if state[at] == 1 and waiting:
                raise ModelError(f"{path}: the graph has a cycle through {names[at]!r}", "export the model again")
            for i in proto.input:
                if i not in known and i not in made:
                    raise ModelError(f"{path}: {names[at]!r} reads {i!r}, which nothing computes", "export it again")
            state[at] = 1
            if waiting:
                stack.extend(reversed(waiting))
            else:
                state[at] = 2
                order.append(at)
                stack.pop()
    return tuple(
        Node(
            index,
            names[at],
            graph.node[at].op_type,
            graph.node[at].domain,
            tuple(graph.node[at].input),
            tuple(graph.node[at].output),
            needs[at],
            graph.node[at],
        )
        for index, at in enumerate(order)
    )


def _consumers(nodes: tuple[Node, ...]) -> dict[str, tuple[int, ...]]:
    readers: dict[str, dict[int, None]] = {}
    for node in nodes:
        for name in (*node.inputs, *node.captures):
            if name:
                readers.setdefault(name, {})[node.index] = None
    return {name: tuple(indices) for name, indices in readers.items()}


def _initializers(graph: onnx.GraphProto, nodes: tuple[Node, ...], base_dir: Path) -> dict[str, Initializer]:
    graph_inputs = {i.name for i in graph.input}
    found = {}
    for proto in graph.initializer:
        found[proto.name] = make_initializer(proto.name, proto, base_dir, overridable=proto.name in graph_inputs)
    for node in nodes:
        if node.op_type == "Constant" and node.is_standard:
            value = constant_value(node.proto)
            if value is not None:
                found[node.outputs[0]] = make_initializer(node.outputs[0], value, base_dir, node_index=node.index)
    return found


def _infer_types(
    proto: onnx.ModelProto, nodes: tuple[Node, ...], initializers: Mapping[str, Initializer], path: Path
) -> dict[str, TensorInfo]:
    """Type every value with ONNX's strict inference, on a copy that holds no large weights.

    Old value_info is not trusted, except for the outputs of operators that ONNX cannot infer.
    """
    slim = onnx.ModelProto()
    slim.ir_version = max(proto.ir_version, 4)  # from 4 on, initializers need not be inputs
    slim.opset_import.extend(proto.opset_import)
    graph = slim.graph
    graph.name = proto.graph.name or "graph"
    graph.node.extend(n.proto for n in nodes)
    graph.input.extend(proto.graph.input)
    declared = {i.name for i in graph.input}
    for tensor in proto.graph.initializer:
        if not is_external(tensor) and tensor_nbytes(tensor) <= _INLINE_LIMIT:
            graph.initializer.append(tensor)
        elif tensor.name not in declared:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    for sparse in proto.graph.sparse_initializer:
        graph.input.append(
            onnx.helper.make_tensor_value_info(sparse.values.name, sparse.values.data_type, list(sparse.dims))
        )
    graph.output.extend(proto.graph.output)
    opaque = {out for n in nodes if not n.is_standard for out in n.outputs}
    graph.value_info.extend(v for v in proto.graph.value_info if v.name in opaque)
    try:
        typed = onnx.shape_inference.infer_shapes(slim, check_type=True, strict_mode=not opaque, data_prop=True)
    except Exception as error:  # onnx raises InferenceError, TypeError, RuntimeError and ValueError for a bad model
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ModelError(
            f"{path} does not type-check: {reason}", "onnx.checker.check_model(path, full_check=True) says more"
        ) from None
    found = {}
    for value in (*typed.graph.input, *typed.graph.value_info, *typed.graph.output):
        found[value.name] = TensorInfo(value.name, *type_of(value.type))
    for initializer in initializers.values():
        found[initializer.name] = TensorInfo(initializer.name, initializer.dtype, initializer.shape)
    return found


def _hash(path: Path, proto: onnx.ModelProto, base_dir: Path) -> str:
    digest = hashlib.sha256()
    files = {external_location(t, base_dir).path for t in all_tensors(proto.graph) if is_external(t)}
    for file in (path, *sorted(files)):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _check_tunable(model: Model) -> None:
    computed = [
        model.info(out).dtype for node in model.nodes if node.op_type != "Constant" for out in node.outputs if out
    ]
    if "float" in computed:
        return
    if "float16" in computed:
        raise ModelError(
            f"{model.path} is FP16 already: no layer computes in FP32", "give the FP32 model that it was made from"
        )
    raise ModelError(
        f"{model.path} has no FP32 layer to tune", "mptune decides between FP32 and FP16; give an FP32 model"
    )
