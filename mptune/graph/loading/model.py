"""An ONNX model, loaded, checked and typed: what every other part of mptune works on.

Weights stay where they are: external data is read through memory maps when it is asked for, so a model larger
than memory can be loaded and rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from sys import intern
from typing import TypeVar

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.errors import ModelError
from mptune.files import files_sha256
from mptune.graph.loading.inference import (
    AskRuntime,
    RuntimeTypes,
    infer_types,
    node_types,
    types_by_schema,
    without_weights,
)
from mptune.graph.loading.reading import read_model, unique_names
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    Initializer,
    TensorInfo,
    all_tensors,
    constant_value,
    external_location,
    is_external,
    make_initializer,
    subgraphs,
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
    proto, opset = read_model(path, opset)
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
    given, names = _given(graph) | {""}, unique_names(graph)
    maker: dict[str, int] = {}
    for position, proto in enumerate(graph.node):
        for out in filter(None, proto.output):
            if out in maker or out in given:
                raise ModelError(f"{path}: {out!r} is computed twice", "the file is not valid ONNX; export it again")
            maker[out] = position
    for output in graph.output:
        if output.name not in maker and output.name not in given:
            raise ModelError(f"{path}: nothing computes the output {output.name!r}", "export the model again")
    captures = [_captures(proto) for proto in graph.node]
    needs: list[list[int]] = []  # positions of the nodes that each node waits for
    for proto, name, outer in zip(graph.node, names, captures, strict=True):
        read = [value for value in (*proto.input, *outer) if value not in given]
        missing = next((value for value in read if value not in maker), None)
        if missing is not None:
            raise ModelError(f"{path}: {name!r} reads {missing!r}, which nothing computes", "export it again")
        needs.append([maker[value] for value in read])
    order: dict[int, None] = {}  # as a set that keeps its order: the nodes that are placed
    entered = bytearray(len(names))
    for root in range(len(names)):  # depth first, without recursion: a graph may be 50,000 nodes deep
        stack = [root]
        while stack:
            at = stack[-1]
            waiting = [] if at in order else [position for position in needs[at] if position not in order]
            if waiting and entered[at]:
                raise ModelError(f"{path}: the graph has a cycle through {names[at]!r}", "export the model again")
            entered[at] = True
            if waiting:
                stack.extend(reversed(waiting))
            else:
                order[stack.pop()] = None
    nodes = []
    for index, at in enumerate(order):
        proto = graph.node[at]
        inputs, outputs, captured = (tuple(map(intern, part)) for part in (proto.input, proto.output, captures[at]))
        op_type, domain = intern(proto.op_type), intern(proto.domain)
        nodes.append(Node(index, names[at], op_type, domain, inputs, outputs, captured, proto))
    return tuple(nodes)


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


_ML_DOMAIN = "ai.onnx.ml"
"""Tree ensembles, linear classifiers and the like: their outputs are always FP32, integers, text or maps."""


def _check_tunable(model: Model) -> None:
    """Refuse a model without a layer that computes in FP32, or with outputs that no error is defined of."""
    for output in model.proto.graph.output:
        kind = output.type
        while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
            kind = getattr(kind, which).elem_type
        if which == "map_type":
            raise ModelError(
                f"{model.path}: output {output.name!r} holds maps, not tensors, so its error cannot be measured",
                "export without ZipMap (skl2onnx: options={'zipmap': False})",
            )
    nodes = [node for node in model.nodes if node.domain != _ML_DOMAIN and node.op_type != "Constant"]
    computed = [model.info(out).dtype for node in nodes for out in node.outputs if out]
    if "float" in computed and any(node.op_type != "Cast" for node in nodes):
        return
    text, hint = f"{model.path} has no FP32 layer to tune", "mptune decides between FP32 and FP16; give an FP32 model"
    reduced = next((name for dtype, name in (("float16", "FP16"), ("bfloat16", "BF16")) if dtype in computed), None)
    learners = sorted({node.op_type for node in model.nodes if node.domain == _ML_DOMAIN})
    if reduced:
        text = f"{model.path} is {reduced} already: no layer computes in FP32"
        hint = "give the FP32 model that it was made from"
    elif learners:
        text = f"{text}: it computes with {', '.join(learners)} of {_ML_DOMAIN}"
        hint = "these operators have no FP16 form: deploy the model as it is"
    raise ModelError(text, hint)


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
