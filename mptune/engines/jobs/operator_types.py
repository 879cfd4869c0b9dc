"""Which types the operators of a model have that ONNX does not define: asked of ONNX Runtime's own session.

ONNX Runtime types a graph when it loads it. The values asked for are marked as outputs, and nothing is optimised, so
that they are all there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx

from mptune.engines.base import EngineError
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import Provider, SessionOptions
from mptune.engines.worker.child import WorkerState
from mptune.graph.loading.foreign import RuntimeTypes, element_type
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.schemas import OperatorSchema


@dataclass(frozen=True)
class OperatorTypesJob:
    """Type values of a model, and read the schemas of the operators that compute them.

    Attributes:
        model: a serialised model; its large constants are inputs.
    """

    model: bytes
    values: tuple[str, ...]
    provider: Provider

    def run(self, state: WorkerState) -> RuntimeTypes:
        """See the class. A model that ONNX Runtime does not load gives the schemas, and why it does not."""
        proto = onnx.load_model_from_string(self.model)
        schemas = _schemas(proto, self.values)
        named = {name for value in (*proto.graph.input, *proto.graph.output) for name in _symbols(value)}
        declared = {output.name for output in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=v) for v in self.values if v not in declared)
        options = SessionOptions(self.provider, timing=False, optimise=False)
        try:
            session = state.transient(partial(open_session, proto.SerializeToString(), options))
        except EngineError as error:
            return RuntimeTypes({}, schemas, error.message)
        found = session.outputs
        values = {v: _info(v, *found[v], named) for v in self.values if v in found and element_type(found[v][0])}
        return RuntimeTypes(values, schemas)


def _info(name: str, kind: str, shape: Iterable[int | str | None], named: set[str]) -> TensorInfo:
    """A value as mptune describes it. Symbols that ONNX Runtime made up are left out: they stand for nothing.

    ONNX Runtime shows a value of unknown rank like a scalar, without a dimension: such a shape is not known.
    """
    dims = tuple(dim if isinstance(dim, int) or dim in named else None for dim in shape)
    return TensorInfo(name, element_type(kind), dims or None)


def _symbols(value: onnx.ValueInfoProto) -> list[str]:
    return [dim.dim_param for dim in value.type.tensor_type.shape.dim if dim.dim_param]


def _schemas(proto: onnx.ModelProto, values: Sequence[str]) -> Mapping[tuple[str, str], OperatorSchema]:
    """The newest schemas that the model's operator sets allow; none where ONNX Runtime was built without them."""
    from onnxruntime.capi import _pybind_state

    if not hasattr(_pybind_state, "get_all_operator_schema"):
        return {}
    wanted = frozenset(values)
    operators = {(n.domain, n.op_type) for n in proto.graph.node if not wanted.isdisjoint(n.output)}
    versions = {_domain(o.domain): o.version for o in proto.opset_import}
    newest: dict[tuple[str, str], tuple[int, OperatorSchema]] = {}
    for schema in _pybind_state.get_all_operator_schema():
        for domain in {schema.domain, "ai.onnx"} if not schema.domain else {schema.domain}:
            key, since = (domain, schema.name), schema.since_version
            allowed = key in operators and since <= versions.get(schema.domain, 0)
            if allowed and since > newest.get(key, (0, None))[0]:
                newest[key] = since, OperatorSchema.of(schema, "typeStr")
    return {key: schema for key, (_, schema) in newest.items()}


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
