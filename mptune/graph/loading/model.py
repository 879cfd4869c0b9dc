"""An ONNX model, loaded, checked and typed: what every other part of mptune works on.

Weights stay where they are: external data is read through memory maps when it is asked for, so a model larger
than memory can be loaded and rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx.inliner
import onnx.numpy_helper
import onnx.shape_inference
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from mptune.errors import ModelError
from mptune.files import files_sha256
from mptune.graph.loading.foreign import AskRuntime, RuntimeTypes, types_by_schema
from mptune.graph.loading.formats import no_graph, no_model
from mptune.graph.loading.inference import infer_types, last_line, without_weights
from mptune.graph.loading.node_names import name_apart, unique_names
from mptune.graph.loading.opset import raised
from mptune.graph.loading.structure import check_structure
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    Initializer,
    TensorInfo,
    all_tensors,
    constant_value,
    external_location,
    is_external,
    make_initializer,
    type_of,
)
from mptune.graph.schemas import onnx_schema

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
    check_structure(proto, path)
    if proto.functions:
        proto = _inlined(proto, path)
    name_apart(proto.graph)
    version = _check_opset(proto, path)
    proto = proto if opset is None else raised(proto, path, opset)
    opset = opset or version
    base_dir = path.resolve().parent
    names = _names(proto.graph)
    nodes = _sorted_nodes(proto.graph, names, path)
    initializers = _initializers(proto.graph, nodes, names, base_dir)
    sha256 = _hash(path, proto, base_dir)
    protos = [node.proto for node in nodes]
    outside = (n for n in nodes if not n.is_standard or onnx_schema(n.op_type, opset) is None)
    foreign = tuple(out for node in outside for out in node.outputs if out)
    runtime = RuntimeTypes()
    if foreign and ask is not None:
        slim = without_weights(proto, protos, initializers)
        runtime = ask(slim, foreign)
        if runtime.failure:
            runtime = types_by_schema(slim, foreign, runtime)
    tensors = infer_types(proto, protos, initializers, foreign, runtime.values, names, path)
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


def _captures(node: onnx.NodeProto) -> tuple[str, ...]:
    """Outer values that the node's subgraphs read, in order of appearance."""
    names: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
            own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
            own |= {s.values.name for s in graph.sparse_initializer}
            own |= {out for inner in graph.node for out in inner.output}
            read = [name for inner in graph.node for name in (*inner.input, *_captures(inner))]
            read += [o.name for o in graph.output]
            names.update(dict.fromkeys(name for name in read if name and name not in own))
    return tuple(names)


def _names(graph: onnx.GraphProto) -> dict[str, str]:
    """One string object for each name, allocated together: at 50,000 nodes, look-ups are bound by memory latency."""
    made: dict[str, str] = {}
    for value in (*graph.input, *graph.initializer):
        made.setdefault(value.name, value.name)
    for node in graph.node:
        for name in node.output:
            made.setdefault(name, name)
    return made


def _sorted_nodes(graph: onnx.GraphProto, same: dict[str, str], path: Path) -> tuple[Node, ...]:
    """Name the nodes uniquely and bring them into topological order, keeping the file's order where it is one."""
    given = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    given |= {s.values.name for s in graph.sparse_initializer}
    given.add("")
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
    shared = same.setdefault
    protos = [graph.node[at] for at in order]
    return tuple(
        Node(
            index,
            names[at],
            shared(proto.op_type, proto.op_type),
            shared(proto.domain, proto.domain),
            tuple([shared(name, name) for name in proto.input]),
            tuple([shared(name, name) for name in proto.output]),
            tuple([shared(name, name) for name in needs[at]]),
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


def _initializers(
    graph: onnx.GraphProto, nodes: tuple[Node, ...], names: Mapping[str, str], base_dir: Path
) -> dict[str, Initializer]:
    graph_inputs = {i.name for i in graph.input}
    constants = {}
    for proto in graph.initializer:
        name = names[proto.name]
        constants[name] = make_initializer(name, proto, base_dir, overridable=name in graph_inputs)
    for node in nodes:
        if node.op_type == "Constant" and node.is_standard:
            value = constant_value(node.proto)
            if value is not None:
                constants[node.outputs[0]] = make_initializer(node.outputs[0], value, base_dir, node_index=node.index)
    return constants


def _hash(path: Path, proto: onnx.ModelProto, base_dir: Path) -> str:
    """The hash of the model's files."""
    files = {external_location(t, base_dir).path for t in all_tensors(proto.graph) if is_external(t)}
    return files_sha256(path, *sorted(files))


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
