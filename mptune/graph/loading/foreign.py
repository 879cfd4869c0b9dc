"""Operators that ONNX does not define: their types as the runtime knows them that executes them.

ONNX Runtime's optimiser writes operators of its own domain (``com.microsoft``), and some of the default domain at
operator sets that lack them (LayerNormalization below 17). ONNX's inference stops at each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import onnx.helper

from mptune.graph.loading.inference import node_types
from mptune.graph.loading.tensors import TensorInfo, type_of
from mptune.graph.schemas import OperatorSchema


@dataclass(frozen=True)
class RuntimeTypes:
    """What a runtime knows of operators that ONNX does not define; ``failure`` says why it could not type a model."""

    values: Mapping[str, TensorInfo] = field(default_factory=dict)
    schemas: Mapping[tuple[str, str], OperatorSchema] = field(default_factory=dict)
    failure: str = ""


_ELEMENT_TYPES = frozenset(onnx.TensorProto.DataType.keys())

AskRuntime = Callable[[onnx.ModelProto, Sequence[str]], RuntimeTypes]
"""Types these values of a model, the outputs of nodes that ONNX does not define; its large constants are inputs."""


def types_by_schema(slim: onnx.ModelProto, foreign: Sequence[str], runtime: RuntimeTypes) -> RuntimeTypes:
    """Add the types, without shapes, that schemas determine: for a runtime that lacks an operator, or a kernel for one.

    ``slim`` is the model without its large constants; ``foreign`` are outputs of the nodes that ONNX does not define.
    """
    types: dict[str, onnx.TypeProto] = {i.name: i.type for i in slim.graph.input}
    types |= {t.name: onnx.helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in slim.graph.initializer}
    wanted, values = frozenset(foreign), dict(runtime.values)
    for node in slim.graph.node:
        if wanted.isdisjoint(node.output):
            given = {name: types[name] for name in node.input if name in types}
            types |= node_types(node, given, {}, slim.opset_import, slim.ir_version)
            continue
        schema = runtime.schemas.get((node.domain, node.op_type))
        for slot, name in enumerate(node.output):
            dtype = "" if schema is None or not name else _output_dtype(node, schema, slot, types)
            if dtype:
                types[name] = onnx.helper.make_tensor_type_proto(onnx.TensorProto.DataType.Value(dtype.upper()), None)
                values.setdefault(name, TensorInfo(name, dtype, None))
    return replace(runtime, values=values)


def _output_dtype(node: onnx.NodeProto, schema: OperatorSchema, slot: int, types: Mapping[str, onnx.TypeProto]) -> str:
    """Element type of an output: that of an input of the same type parameter, or the only one that is admitted."""
    parameter = schema.output_type(slot)
    for position, name in enumerate(node.input):
        if name in types and schema.input_type(position) == parameter:
            return type_of(types[name])[0]
    admitted = schema.types.get(parameter, frozenset({parameter}))
    return element_type(next(iter(admitted))) if len(admitted) == 1 else ""


def element_type(text: str) -> str:
    """``TensorInfo``'s dtype of a type as schemas and runtimes write it, such as ``tensor(float)``; "" if no tensor."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    return inner if text == f"tensor({inner})" and inner.upper() in _ELEMENT_TYPES else ""
