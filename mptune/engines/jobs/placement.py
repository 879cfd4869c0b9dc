"""Which nodes a provider runs elsewhere in FP16, and the types of operators that ONNX does not define."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from mptune.engines.base import EngineError, MissingKernel
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import PROVIDERS, Provider, SessionOptions
from mptune.graph.loading.inference import RuntimeTypes, element_type
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.ops import OperatorSchema
from mptune.processes.child import WorkerState


@dataclass(frozen=True)
class PlacementJob:
    """Open two typed models, and name the nodes that the provider runs in FP32, and another one in FP16.

    Nodes that are elsewhere in FP32 as well (the arithmetic of shapes) are there for another reason. Fused nodes have
    names of their own, and are left out.
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
                    newest[key] = since, OperatorSchema.of(schema, "typeStr")
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
