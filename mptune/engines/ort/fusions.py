"""What ONNX Runtime makes of a graph: the optimised nodes, folded shape arithmetic, nodes computed as one in FP32."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OPTIMISED_MODEL, PROVIDERS, Provider, SessionOptions, translated
from mptune.graph.facts import Facts, facts_of
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.loading.model import Node
from mptune.processes.child import WorkerState

# How ONNX Runtime names what it computes in another type than the graph has it (insert_cast_transformer.cc).
_RETYPED = re.compile(r"^InsertedPrecisionFreeCast_(?P<name>.+?)(?:_token_\d+)?$")
Nodes = tuple[str, ...]


def take_optimised(folder: Path) -> onnx.GraphProto:
    """Read the graph that a session saved as it was optimised, and delete it: beside it lies a copy of all weights."""
    graph = load_graph(folder / OPTIMISED_MODEL)
    for path in folder.glob("optimised.*"):
        path.unlink()
    return graph


def load_graph(path: Path) -> onnx.GraphProto:
    """The graph of a model, without its external data."""
    try:
        return onnx.load(path, load_external_data=False).graph
    except (OSError, ValueError) as error:
        raise EngineError(FailureKind.ERROR, f"ONNX Runtime left no graph as it optimised it: {error}") from error


def computed_nodes(typed: onnx.GraphProto, optimised: onnx.GraphProto) -> list[Nodes]:
    """The nodes of the typed model that each node of the optimised graph computes.

    These are the producers of its outputs in the typed model, and the nodes between them and the tensors that are still
    in the optimised graph, which were fused into it; empty where it has no such output.
    """
    producer = {name: node for node in typed.node for name in node.output if name}
    varying = _varying(typed)
    in_typed = partial(given_name, producer=producer)
    left = {in_typed(name) or name for node in optimised.node for name in (*node.input, *node.output)}
    return [
        _between([name for name in map(in_typed, node.output) if name is not None], producer, left, varying)
        for node in optimised.node
    ]


def given_name(name: str, producer: Container[str]) -> str | None:
    """The name that a tensor of the optimised graph has in the one that was given; None where it is a new one."""
    if name in producer:
        return name
    match = _RETYPED.match(name)
    return match["name"] if match and match["name"] in producer else None


def _varying(graph: onnx.GraphProto) -> frozenset[str]:
    """Names of the nodes that cannot be folded: an input of theirs depends on the inputs of the model."""
    constants = {value.name for value in graph.initializer}
    values = {value.name for value in graph.input} - constants
    varying = set()
    for node in graph.node:
        has_subgraph = any(attribute.HasField("g") for attribute in node.attribute)
        if has_subgraph or not values.isdisjoint(node.input):
            varying.add(node.name)
            values.update(node.output)
    return frozenset(varying)


def _between(
    given: Sequence[str], producer: Mapping[str, onnx.NodeProto], left: set[str], varying: frozenset[str]
) -> Nodes:
    """The producers of these tensors, and of their inputs as far as those are not in the optimised graph."""
    nodes: dict[str, None] = {}
    pending = list(given)
    while pending:
        node = producer[pending.pop()]
        if node.name in nodes:
            continue
        nodes[node.name] = None
        before = [name for name in node.input if name in producer and name not in left]
        pending += [name for name in before if producer[name].name in varying]
    return tuple(nodes)


_RENAMING = [
    *("ConstantSharing", "CommonSubexpressionElimination", "ReshapeFusion", "UnsqueezeElimination", "CastElimination"),
    *("EliminateSlice", "EliminateIdentity", "ExpandElimination", "CastChainElimination", "NoopElimination"),
    *("PreShapeNodeElimination", "MatMulAddFusion", "MatmulTransposeFusion"),
]
"""Optimisers of ONNX Runtime that would put another name in place of a folded value's."""


@dataclass(frozen=True)
class FoldJob:
    """Have ONNX Runtime write a model of ``write_without_weights`` with its constants folded; no session runs it.

    Folding is the same for every provider: it uses the CPU's kernels, before nodes are given to providers.
    """

    model: Path
    folded: Path

    def run(self, state: WorkerState) -> None:
        """See the class."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: that a kernel to fold with is missing is no fault
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.enable_mem_reuse = False  # to plan buffers takes longest
        options.optimized_model_filepath = str(self.folded)
        providers = [PROVIDERS["cpu"]]
        translated(
            lambda: onnxruntime.InferenceSession(
                str(self.model), options, providers=providers, disabled_optimizers=_RENAMING
            )
        )


_CENTRED = frozenset({"LayerNormalization", "SkipLayerNormalization"})
_NORMS = _CENTRED | {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
_OTHERS = frozenset({"BiasSoftmax", "Gelu"})
_OPERATOR_SINCE = 17
"""The operator set from which LayerNormalization is one of ONNX's own operators, of one type."""


@dataclass(frozen=True)
class OptimisedNode:
    """A node of a session's graph."""

    op_type: str
    nodes: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class FusionsJob:
    """Open a typed model as a search opens it, and name the nodes that several of its own became.

    ``folder`` is empty before and afterwards.
    """

    model: Path
    folder: Path
    provider: Provider

    def run(self, state: WorkerState) -> tuple[OptimisedNode, ...]:
        options = SessionOptions(self.provider, timing=False, optimised_dir=self.folder)
        state.transient(partial(open_session, self.model, options))
        return tuple(optimised_nodes(load_graph(self.model), take_optimised(self.folder)))


def may_fuse(grouped: GroupedModel) -> bool:
    """Whether a model has nodes that may be fused so: else there is nothing to ask."""
    facts = facts_of(grouped.model)
    if any(node.op_type == "Erf" or _adds_bias(facts, node) for node in grouped.model.nodes):
        return True
    return any(pattern.squares for pattern in find_patterns(grouped.model))


def _adds_bias(facts: Facts, softmax: Node) -> bool:
    before = facts.producer(softmax.inputs[0]) if softmax.op_type == "Softmax" else None
    return before is not None and before.op_type == "Add"


def optimised_nodes(typed: onnx.GraphProto, optimised: onnx.GraphProto) -> Iterator[OptimisedNode]:
    """The nodes of an optimised graph that several of the typed one became, of the operators that round once."""
    producer = {out: node.name for node in typed.node for out in node.output if out}
    for node, computed in zip(optimised.node, computed_nodes(typed, optimised), strict=True):
        if node.op_type not in _NORMS | _OTHERS or len(computed) < 2:
            continue
        result = given_name(node.output[0], producer)
        if result is not None:
            yield OptimisedNode(node.op_type, computed, producer[result])


def fused_nodes(grouped: GroupedModel, optimised: Iterable[OptimisedNode]) -> tuple[FusedNodes, ...]:
    """The nodes of a model that are fused under every plan that has them in FP16."""
    model, facts = grouped.model, facts_of(grouped.model)
    named = {node.name: node for node in model.nodes}
    fused = []
    for fusion in optimised:
        if fusion.op_type in _CENTRED and model.opset >= _OPERATOR_SINCE:
            continue
        members = sorted((named[name] for name in fusion.nodes if name in named), key=lambda node: node.index)
        if fusion.op_type.startswith("Skip"):  # the sums before the norm: a plan may have them in another precision
            members = [node for node in members if grouped.in_one_group((node, members[-1]))]
        if len(members) < 2 or members[-1].name != fusion.result or not grouped.in_one_group(members):
            continue
        names = tuple(node.name for node in members)
        fused.append(FusedNodes(names, _source(facts, members) if fusion.op_type in _NORMS else ""))
    return tuple(fused)


def _source(facts: Facts, members: Sequence[Node]) -> str:
    """The first value that the nodes read from elsewhere and that varies; "" where there is none."""
    made = {out for node in members for out in node.outputs}
    read = (name for node in members for name in facts.varying(node))
    return next((name for name in read if name not in made and facts.model.info(name).is_float32), "")
