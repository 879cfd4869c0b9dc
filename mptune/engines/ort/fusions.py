"""What ONNX Runtime makes of a graph: where nodes run, types, constants folded, nodes computed as one in FP32."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from mptune.engines.base import EngineError, MissingKernel
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OPTIMISED_MODEL, PROVIDERS, Provider, SessionOptions, translated
from mptune.graph.facts import FusedNodes, facts_of
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import RuntimeTypes
from mptune.graph.loading.tensors import TensorInfo, element_type
from mptune.graph.ops import OperatorSchema
from mptune.graph.patterns import find_patterns
from mptune.processes.child import WorkerState

_RENAMING = [
    *("ConstantSharing", "CommonSubexpressionElimination", "ReshapeFusion", "UnsqueezeElimination", "CastElimination"),
    *("EliminateSlice", "EliminateIdentity", "ExpandElimination", "CastChainElimination", "NoopElimination"),
    *("PreShapeNodeElimination", "MatMulAddFusion", "MatmulTransposeFusion"),
]
"""Optimisers of ONNX Runtime that would put another name in place of a folded value's."""


@dataclass(frozen=True)
class FoldJob:
    """Have ONNX Runtime write a model of ``write_without_weights`` with its constants folded, as for every provider."""

    model: Path
    folded: Path

    def run(self, state: WorkerState) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: that a kernel to fold with is missing is no fault
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.enable_mem_reuse = False  # to plan buffers takes longest
        options.optimized_model_filepath = str(self.folded)
        opened = partial(onnxruntime.InferenceSession, str(self.model), options, providers=[PROVIDERS["cpu"]])
        translated(partial(opened, disabled_optimizers=_RENAMING))


# How ONNX Runtime names what it computes in another type than the graph has it (insert_cast_transformer.cc).
_RETYPED = re.compile(r"^InsertedPrecisionFreeCast_(?P<name>.+?)(?:_token_\d+)?$")
_CENTRED = frozenset({"LayerNormalization", "SkipLayerNormalization"})
_NORMS = _CENTRED | {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
_ROUND_ONCE = _NORMS | {"BiasSoftmax", "Gelu"}
_OPERATOR_SINCE = 17
"""The operator set from which LayerNormalization is one of ONNX's own operators, of one type."""
OptimisedNode = tuple[str, tuple[str, ...], str]
"""A node of a session's graph: its operator, the nodes of the typed model that became it, the one of its result."""


@dataclass(frozen=True)
class FusionsJob:
    """Name the nodes that several of a typed model's became; all weights are written to the folder, which is empty."""

    model: Path
    folder: Path
    provider: Provider

    def run(self, state: WorkerState) -> tuple[OptimisedNode, ...]:
        options = SessionOptions(self.provider, optimised_dir=self.folder)
        state.transient(partial(open_session, self.model, options))
        typed, optimised = (
            onnx.load(path, load_external_data=False).graph for path in (self.model, self.folder / OPTIMISED_MODEL)
        )
        producer = {out: node for node in typed.node for out in node.output if out}
        # Nodes that cannot be folded: an input of theirs depends on the inputs of the model.
        values = {value.name for value in typed.input} - {value.name for value in typed.initializer}
        varying = set()
        for node in typed.node:
            if not values.isdisjoint(node.input) or any(attribute.HasField("g") for attribute in node.attribute):
                varying.add(node.name)
                values.update(node.output)

        def in_typed(name: str) -> str | None:
            """The name in the typed graph of a tensor of the optimised one; None where it is a new one."""
            if name not in producer:
                match = _RETYPED.match(name)
                name = match["name"] if match else ""
            return name if name in producer else None

        # Each computes the producers of its outputs in the typed graph, and what is between these and the tensors that
        # are still in the optimised graph.
        nodes: list[OptimisedNode] = []
        left = {in_typed(name) or name for node in optimised.node for name in (*node.input, *node.output)}
        for node in optimised.node:
            if node.op_type not in _ROUND_ONCE:
                continue
            computed: dict[str, None] = {}
            pending = [name for name in map(in_typed, node.output) if name is not None]
            while pending:
                before = producer[pending.pop()]
                if before.name not in computed:
                    computed[before.name] = None
                    inner = (name for name in before.input if name in producer and name not in left)
                    pending += [name for name in inner if producer[name].name in varying]
            result = in_typed(node.output[0])
            if len(computed) > 1 and result is not None:
                nodes.append((node.op_type, tuple(computed), producer[result].name))
        return tuple(nodes)


def may_fuse(grouped: GroupedModel) -> bool:
    """Whether a model has nodes that may be fused so: else there is nothing to ask."""
    facts = facts_of(grouped.model)
    for node in grouped.model.nodes:
        before = facts.producer(node.inputs[0]) if node.op_type == "Softmax" else None
        if node.op_type == "Erf" or (before is not None and before.op_type == "Add"):
            return True
    return any(pattern.squares for pattern in find_patterns(grouped.model))


def fused_nodes(grouped: GroupedModel, optimised: Iterable[OptimisedNode]) -> tuple[FusedNodes, ...]:
    """The nodes of a model that are fused under every plan that has them in FP16."""
    model = grouped.model
    named = {node.name: node for node in model.nodes}
    fused = []
    for op_type, nodes, result in optimised:
        if op_type in _CENTRED and model.opset >= _OPERATOR_SINCE:
            continue
        members = sorted((named[name] for name in nodes if name in named), key=lambda node: node.index)
        if op_type.startswith("Skip"):  # the sums before the norm: a plan may have them in another precision
            members = [node for node in members if grouped.in_one_group((node, members[-1]))]
        if len(members) < 2 or members[-1].name != result or not grouped.in_one_group(members):
            continue
        fused.append(FusedNodes(tuple(node.name for node in members)))
    return tuple(fused)


@dataclass(frozen=True)
class PlacementJob:
    """Open two typed models, and name the nodes that the provider runs in FP32, and another one in FP16.

    Fused nodes have names of their own, and are left out.
    """

    fp16: Path
    fp32: Path
    provider: Provider

    def run(self, state: WorkerState) -> tuple[MissingKernel, ...]:
        options, wanted = SessionOptions(self.provider), PROVIDERS[self.provider]
        fp16, fp32 = (
            state.transient(partial(open_session, model, options)).placement() for model in (self.fp16, self.fp32)
        )
        at_home = {name for name, (_, provider) in fp32.items() if provider == wanted}
        return tuple(
            MissingKernel(name, op_type, wanted, provider)
            for name, (op_type, provider) in fp16.items()
            if provider != wanted and name in at_home
        )


@dataclass(frozen=True)
class OperatorTypesJob:
    """Type values of a model on the CPU, and read the schemas of the operators that compute them."""

    model: bytes
    values: tuple[str, ...]

    def run(self, state: WorkerState) -> RuntimeTypes:
        """See the class. A model that ONNX Runtime does not load gives the schemas, and why it does not."""
        from onnxruntime.capi import _pybind_state

        proto = onnx.load_model_from_string(self.model)
        # The newest schemas that the model's operator sets allow; none where ONNX Runtime was built without them.
        operators = {(n.domain, n.op_type) for n in proto.graph.node if not set(self.values).isdisjoint(n.output)}
        versions = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
        newest: dict[tuple[str, str], tuple[int, OperatorSchema]] = {}
        for schema in getattr(_pybind_state, "get_all_operator_schema", tuple)():
            for domain in {schema.domain, "ai.onnx"} if not schema.domain else {schema.domain}:
                key, since = (domain, schema.name), schema.since_version
                allowed = key in operators and since <= versions.get(schema.domain, 0)
                if allowed and since > newest.get(key, (0, None))[0]:
                    newest[key] = since, OperatorSchema.read(schema, "typeStr")
        schemas = {key: schema for key, (_, schema) in newest.items()}

        shown = (*proto.graph.input, *proto.graph.output)
        named = {dim.dim_param for value in shown for dim in value.type.tensor_type.shape.dim if dim.dim_param}
        declared = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=v) for v in self.values if v not in declared)
        options = SessionOptions(preset="values")
        try:
            session = state.transient(partial(open_session, proto.SerializeToString(), options))
        except EngineError as error:
            return RuntimeTypes({}, schemas, error.message)
        values = {}
        for name in self.values:
            kind, shape = session.outputs.get(name, ("", ()))
            if element_type(kind):
                # Symbols that ONNX Runtime made up are left out: they stand for nothing. And it shows a value of
                # unknown rank like a scalar, without a dimension: such a shape is not known.
                dims = tuple(dim if isinstance(dim, int) or dim in named else None for dim in shape)
                values[name] = TensorInfo(name, element_type(kind), dims or None)
        return RuntimeTypes(values, schemas)
