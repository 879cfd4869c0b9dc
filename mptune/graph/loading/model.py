"""An ONNX model, loaded, checked and typed: what every other part of mptune works on.

Weights stay where they are: external data is read through memory maps when it is asked for, so a model larger
than memory can be loaded and rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from sys import intern
from typing import Any, TypeVar

import numpy as np
import onnx

from mptune.errors import ModelError, MptuneError
from mptune.files import files_sha256
from mptune.graph.loading.reading import NOT_VALID, last_line, read_model, unique_names, without_weights
from mptune.graph.loading.tensors import (
    STANDARD_DOMAINS,
    Initializer,
    Shape,
    TensorInfo,
    all_graphs,
    constant_value,
    declaration,
    subgraphs,
    type_of,
)
from mptune.graph.ops import OperatorSchema, onnx_schema

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
    """One node of the main graph."""

    index: int  # position in topological order
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...]  # outer values that its subgraphs read
    proto: onnx.NodeProto = field(repr=False, compare=False)
    # Whether what it computes in FP16 is rounded; False in emulated models (``mptune.graph.writing.rounding_steps``),
    # where a node is computed together with the one that reads it.
    rounds: bool = True

    @property
    def is_standard(self) -> bool:
        """Whether the operator is one of ONNX's own."""
        return self.domain in STANDARD_DOMAINS

    @property
    def has_subgraph(self) -> bool:
        """Whether an attribute holds a graph (If, Loop, Scan)."""
        return any(True for _ in subgraphs(self.proto))


@dataclass(frozen=True)
class RuntimeTypes:
    """What a runtime knows of operators that ONNX does not define; ``failure`` says why it could not type a model."""

    values: Mapping[str, TensorInfo] = field(default_factory=dict)
    schemas: Mapping[tuple[str, str], OperatorSchema] = field(default_factory=dict)
    failure: str = ""


AskRuntime = Callable[[onnx.ModelProto, Sequence[str]], RuntimeTypes]
"""Types these values of a model, the outputs of nodes that ONNX does not define; its large constants are inputs."""


@dataclass(frozen=True, eq=False)
class Model:
    """A typed ONNX model. Immutable by convention: nobody changes ``proto``."""

    path: Path
    sha256: str  # over the file and all external data that it refers to
    opset: int  # version of the default operator set
    inputs: tuple[TensorInfo, ...]  # graph inputs that must be fed (initializers that double as inputs are left out)
    outputs: tuple[TensorInfo, ...]
    nodes: tuple[Node, ...]  # in topological order
    tensors: Mapping[str, TensorInfo]  # every value of the main graph by name
    initializers: Mapping[str, Initializer]  # graph initializers and Constant nodes by tensor name
    proto: onnx.ModelProto = field(repr=False)
    # What the runtime said of operators that ONNX does not define
    runtime: RuntimeTypes = field(default_factory=RuntimeTypes, repr=False)
    data_files: tuple[Path, ...] = ()  # where its external data lie
    raised_from: int | None = None  # the file's operator set where it was raised because mptune cannot work on it
    # Outputs whose shape the file declares wrongly; ``outputs`` and ``proto`` have the inferred one
    reshaped: tuple[str, ...] = ()

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Tensor -> index of the node that computes it."""
        return {out: node.index for node in self.nodes for out in node.outputs if out}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor -> indices of the nodes that read it, captures by subgraphs included, each node once."""
        readers: dict[str, dict[int, None]] = {}
        for node in self.nodes:
            for name in filter(None, (*node.inputs, *node.captures)):
                readers.setdefault(name, {})[node.index] = None
        return {name: tuple(indices) for name, indices in readers.items()}

    def info(self, tensor: str) -> TensorInfo:
        """Type and shape of a value; ``undefined`` where nothing is known."""
        return self.tensors.get(tensor) or TensorInfo(tensor, "undefined", None)


def load_model(
    path: str | Path, ask: AskRuntime | None = None, *, any_precision: bool = False, opset: int | None = None
) -> Model:
    """Load, check and type a model.

    Args:
        ask: says which types the operators have that ONNX does not define; None where nobody does: then what they
            compute, and what is computed from it, has no type (``mptune.engines.loading.load_typed_model`` asks).
        any_precision: take a model that computes nothing in FP32, too, such as one that is FP16 throughout.
        opset: the operator set that ONNX's converter raises the model to; None leaves it as it is.

    Raises:
        ModelError: no such file, not ONNX, truncated, an opset or a construct that cannot be tuned, external data that
            is missing, too short or outside the model's folder, or no FP32 value to tune.
    """
    path = Path(path)
    try:
        proto, opset, data_files, raised_from = read_model(path, opset)
        nodes, base_dir = _sorted_nodes(proto.graph, path), path.resolve().parent
        # Constants: those of the graph, and Constant nodes.
        graph_inputs = {i.name: TensorInfo(i.name, *type_of(i.type)) for i in proto.graph.input}
        initializers: dict[str, Initializer] = {}
        for tensor in proto.graph.initializer:
            name = intern(tensor.name)
            initializers[name] = Initializer(name, tensor, base_dir, overridable=name in graph_inputs)
        for node in nodes:
            value = constant_value(node.proto) if node.op_type == "Constant" and node.is_standard else None
            if value is not None:
                initializers[node.outputs[0]] = Initializer(node.outputs[0], value, base_dir, node_index=node.index)
        inputs = tuple(info for info in graph_inputs.values() if info.name not in initializers)
        sha256, types = files_sha256(path, *data_files), RuntimeTypes()
        model = Model(path, sha256, opset, inputs, (), nodes, {}, initializers, proto, types, data_files, raised_from)
        model = _typed(model, ask)
    except MptuneError:
        raise
    except Exception as error:  # contradictions that only a damaged file has, such as text that is not UTF-8
        raise ModelError(f"{path} cannot be read: {type(error).__name__}: {last_line(error)}", NOT_VALID) from error
    if not any_precision:
        _check_tunable(model)
    return model


def _typed(model: Model, ask: AskRuntime | None) -> Model:
    """The model with all types; outputs that are declared in a wrong shape have the inferred one, in ``proto``, too."""
    proto = model.proto
    # The runtime types the values that ONNX cannot; for those it cannot type either, the file's value_info is trusted.
    outside = (n for n in model.nodes if not n.is_standard or onnx_schema(n.op_type, model.opset) is None)
    foreign = tuple(out for node in outside for out in node.outputs if out)
    slim = without_weights(proto, [node.proto for node in model.nodes], model.initializers)
    runtime = ask(slim, foreign) if foreign and ask is not None else RuntimeTypes()
    untyped = {*foreign} - runtime.values.keys()
    slim.graph.value_info.extend(value for value in proto.graph.value_info if value.name in untyped)
    typed_by_runtime = {*foreign} - untyped - {output.name for output in proto.graph.output}
    slim.graph.value_info.extend(declaration(runtime.values[name]) for name in typed_by_runtime)
    for graph in all_graphs(slim.graph):
        for node in graph.node:
            # onnx 1.23 refuses its own definition of it; an Identity gives the same type.
            if node.op_type == "MeanVarianceNormalization" and node.domain in STANDARD_DOMAINS:
                del node.attribute[:]
                node.op_type = "Identity"
    infer = partial(onnx.shape_inference.infer_shapes, check_type=True, strict_mode=not foreign)

    def typed_graph() -> onnx.GraphProto:
        try:
            return infer(slim, data_prop=True).graph
        except onnx.shape_inference.InferenceError:
            # With values, onnx 1.23 refuses the outer product of two computed FP32 vectors ("Invalid rank for Mul
            # broadcasting"). So first without; the values then give what is missing, and are not strict about it.
            return onnx.shape_inference.infer_shapes(infer(slim), check_type=True, data_prop=True).graph

    reshaped = []
    try:
        try:
            typed = typed_graph()
        except onnx.shape_inference.InferenceError:
            # ONNX Runtime goes by what it infers where the file declares another shape of an output.
            for value in slim.graph.output:
                if value.type.HasField("tensor_type"):
                    value.type.tensor_type.ClearField("shape")
            for declared, value in zip(proto.graph.output, typed_graph().output, strict=True):
                (_, shape), (_, inferred) = type_of(declared.type), type_of(value.type)
                is_rank = shape is None or inferred is None or len(shape) == len(inferred)
                pairs = zip(shape or (), inferred or (), strict=False)
                if not is_rank or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
                    declared.type.CopyFrom(value.type)
                    reshaped.append(value.name)
            del slim.graph.output[:]
            slim.graph.output.extend(proto.graph.output)
            typed = typed_graph()
    except Exception as error:  # onnx raises InferenceError, TypeError, RuntimeError and ValueError for a bad model
        text = f"{model.path} does not type-check: {last_line(error)}"
        raise ModelError(text, "onnx.checker.check_model(path, full_check=True) says more") from None
    tensors = {}
    for value in (*typed.input, *typed.value_info, *typed.output):
        name = intern(value.name)
        tensors[name] = TensorInfo(name, *type_of(value.type))
    for sparse in proto.graph.sparse_initializer:  # declared as dense in ``slim``, but no Cast takes one
        tensors[sparse.values.name] = TensorInfo(sparse.values.name, "sparse_tensor", tuple(sparse.dims))
    for initializer in model.initializers.values():
        tensors[initializer.name] = TensorInfo(initializer.name, initializer.dtype, initializer.shape)
    outputs = tuple(tensors.get(o.name, TensorInfo(o.name, *type_of(o.type))) for o in proto.graph.output)
    return replace(model, outputs=outputs, tensors=tensors, runtime=runtime, reshaped=tuple(reshaped))


def given(graph: onnx.GraphProto) -> set[str]:
    """The values of a graph that no node computes: inputs and constants."""
    sparse = [constant.values for constant in graph.sparse_initializer]
    return {value.name for value in (*graph.input, *graph.initializer, *sparse)}


def _captures(node: onnx.NodeProto) -> tuple[str, ...]:
    """Outer values that the node's subgraphs read, in order of appearance."""
    names: dict[str, None] = {}
    for graph in subgraphs(node):
        own = given(graph) | {out for inner in graph.node for out in inner.output}
        read = [name for inner in graph.node for name in (*inner.input, *_captures(inner))]
        read += [o.name for o in graph.output]
        names.update(dict.fromkeys(name for name in read if name and name not in own))
    return tuple(names)


def _sorted_nodes(graph: onnx.GraphProto, path: Path) -> tuple[Node, ...]:
    """Name the nodes uniquely and bring them into topological order, keeping the file's order where it is one.

    Names are interned: at 50,000 nodes, look-ups are bound by memory latency.
    """
    outside, names = given(graph) | {""}, unique_names(graph)
    maker: dict[str, int] = {}
    for position, proto in enumerate(graph.node):
        for out in filter(None, proto.output):
            if out in maker or out in outside:
                raise ModelError(f"{path}: {out!r} is computed twice", NOT_VALID)
            maker[out] = position
    for output in graph.output:
        if output.name not in maker and output.name not in outside:
            raise ModelError(f"{path}: nothing computes the output {output.name!r}", NOT_VALID)
    captures = [_captures(proto) for proto in graph.node]
    needs: list[list[int]] = []  # positions of the nodes that each node waits for
    for proto, name, outer in zip(graph.node, names, captures, strict=True):
        read = [value for value in (*proto.input, *outer) if value not in outside]
        missing = next((value for value in read if value not in maker), None)
        if missing is not None:
            raise ModelError(f"{path}: {name!r} reads {missing!r}, which nothing computes", NOT_VALID)
        needs.append([maker[value] for value in read])
    is_sorted = all(position < at for at, positions in enumerate(needs) for position in positions)
    try:
        order = range(len(names)) if is_sorted else [*TopologicalSorter(dict(enumerate(needs))).static_order()]
    except CycleError as error:
        at = error.args[1][0]
        raise ModelError(f"{path}: the graph has a cycle through {names[at]!r}", NOT_VALID) from None
    nodes = []
    for index, at in enumerate(order):
        proto = graph.node[at]
        inputs, outputs, captured = (tuple(map(intern, part)) for part in (proto.input, proto.output, captures[at]))
        name, op_type, domain = map(intern, (names[at], proto.op_type, proto.domain))
        nodes.append(Node(index, name, op_type, domain, inputs, outputs, captured, proto))
    return tuple(nodes)


def with_nodes(
    model: Model, nodes: Iterable[Node], initializers: Mapping[str, Initializer], tensors: Mapping[str, TensorInfo] = {}
) -> Model:
    """The model with other nodes, in topological order, and constants; ``tensors`` are new values. ``proto`` stays."""
    numbered = tuple(replace(node, index=index) for index, node in enumerate(nodes))
    held = {node.outputs[0]: node.index for node in numbered if node.op_type == "Constant"}
    constants = {n: replace(c, node_index=held[n]) if n in held else c for n, c in initializers.items()}
    return replace(model, nodes=numbered, tensors={**model.tensors, **tensors}, initializers=constants)


def _check_tunable(model: Model) -> None:
    """Refuse a model without a layer that computes in FP32, or with outputs that no error is defined of."""
    for output in model.proto.graph.output:
        if "map_type" in (output.type.WhichOneof("value"), output.type.sequence_type.elem_type.WhichOneof("value")):
            text = f"{model.path}: output {output.name!r} holds maps, not tensors, so its error cannot be measured"
            raise ModelError(text, "export without ZipMap (skl2onnx: options={'zipmap': False})")
    # Outputs of tree ensembles, linear classifiers and the like are always FP32, integers, text or maps.
    nodes = [node for node in model.nodes if node.domain != "ai.onnx.ml" and node.op_type != "Constant"]
    computed = [model.info(out).dtype for node in nodes for out in node.outputs if out]
    if "float" not in computed or all(node.op_type == "Cast" for node in nodes):
        reduced = next((name for dtype, name in (("float16", "FP16"), ("bfloat16", "BF16")) if dtype in computed), None)
        text = f"is {reduced} already: no layer computes in FP32" if reduced else "has no FP32 layer to tune"
        raise ModelError(f"{model.path} {text}", "mptune decides between FP32 and FP16; give an FP32 model")


def output_types(
    model: Model, node: Node, shapes: Mapping[str, Shape | None], values: Mapping[str, np.ndarray]
) -> Mapping[str, onnx.TypeProto]:
    """Types of what a node computes, from its inputs' types, shapes (the model's where none is given) and values.

    Nothing where ONNX cannot say.
    """
    try:
        infos = [model.info(name) for name in node.inputs if name]
        types = {i.name: declaration(replace(i, shape=shapes.get(i.name, i.shape))).type for i in infos}
        inferred: Mapping[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, model.opset, "" if node.is_standard else node.domain),
            node.proto,
            types,
            {name: onnx.numpy_helper.from_array(array, name) for name, array in values.items()},
            opset_imports=[*model.proto.opset_import],
            ir_version=model.proto.ir_version,
        )
    except Exception:  # onnx raises several kinds where an input has no type, or the node holds a graph
        return {}
    return inferred


def new_node(op_type: str, inputs: Sequence[str], result: str, name: str = "", **attributes: Any) -> Node:
    """A node of one of ONNX's operators that the file does not have, named like its result by default."""
    proto = onnx.helper.make_node(op_type, inputs, [result], name or result, **attributes)
    return Node(-1, proto.name, op_type, "", tuple(inputs), (result,), (), proto)


def needed_nodes(model: Model, values: Iterable[str], given: Collection[str] = ()) -> list[Node]:
    """The nodes that these values depend on, in topological order; not those before values that are ``given``."""
    wanted, needed = set(values), list[Node]()
    for node in reversed(model.nodes):
        if not wanted.isdisjoint(node.outputs):
            needed.append(node)
            wanted.update(name for name in (*node.inputs, *node.captures) if name and name not in given)
    return needed[::-1]
