"""Which inputs and outputs of a node may change to a reduced precision, and to which.

The operators' own schemas decide: an input or output follows the node's precision when its type constraint admits
``tensor(float)`` and the reduced type, such as ``tensor(float16)``. What the schemas cannot say, the table of operators
says, with its reason (``Operator.fp32``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import TensorInfo
from mptune.graph.ops import FLOAT_TYPES, MOVEMENT, PRODUCTS, SHAPE_OF, OperatorSchema, onnx_schema, operator
from mptune.graph.plan import Precision

_FIRST_OPSET = 19

COMPUTES_SHAPE = "computes a shape: FP16 is not exact above 2048, and TensorRT takes no FP16 shapes"


def dequantises_weights(model: Model, node: Node) -> bool:
    """Whether a node dequantises a constant for products of activations that are not quantised, and may do so in FP16.

    Its scales must be normal numbers of FP16: smaller ones lose digits, and vanish.
    """
    if node.op_type != "DequantizeLinear" or not node.is_standard or model.opset < _FIRST_OPSET:
        return False
    weight, scale = (model.initializers.get(name) for name in node.inputs[:2])
    if weight is None or scale is None or weight.overridable or scale.overridable or scale.dtype != "float":
        return False
    if any(attribute.name == "output_dtype" and attribute.i for attribute in node.proto.attribute):
        return False
    (out,) = node.outputs
    readers = [model.nodes[index] for index in model.consumers.get(out, ())]
    if not readers or out in {output.name for output in model.outputs}:
        return False
    if not all(_multiplies(model, reader, out) for reader in readers):
        return False
    values = np.abs(scale.numpy())
    return bool(
        values.size and values.min() >= Precision.FP16.smallest_normal and values.max() <= Precision.FP16.largest
    )


def _multiplies(model: Model, node: Node, weight: str) -> bool:
    """Whether a node is a product of a weight with something that is not dequantised."""
    if node.op_type not in PRODUCTS or not node.is_standard or weight not in node.inputs[:2]:
        return False
    others = [name for name in node.inputs[:2] if name != weight]
    return len(others) == 1 and not is_dequantised(model, others[0])


def is_dequantised(model: Model, tensor: str) -> bool:
    """Whether a value comes out of DequantizeLinear, maybe through views."""
    while tensor in model.producer:
        node = model.nodes[model.producer[tensor]]
        if node.op_type == "DequantizeLinear":
            return True
        if node.op_type not in MOVEMENT or not node.inputs:
            return False
        tensor = node.inputs[0]
    return False


@dataclass(frozen=True)
class NodeRule:
    """What a reduced precision would change about one node.

    Attributes:
        precisions: the reduced precisions that it can run in; none where it has no precision of its own. FP16 is among
            them if any is: an operator that has BF16 and no FP16 stays FP32.
        reads_any: positions of FP32 inputs that take any type as it comes, without a Cast.
        attribute: name of the attribute that states the output's type (``to`` of Cast); None where the
            inputs' types determine it.
        fixed: why the node has no precision of its own; None where it has one, or nothing of FP32 type.
    """

    precisions: frozenset[Precision] = frozenset()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    reads_any: tuple[int, ...] = ()
    attribute: str | None = None
    fixed: str | None = None


_QUANTISED = ("Q", "DynamicQuantize", "Dequantize", "MatMulInteger", "GemmFloat8")
"""How the names of quantised operators begin, those of ONNX Runtime's own domain."""

_WEIGHTS_ONLY = frozenset({"QuickGelu", "QMoE"})
"""Operators that are named so and compute with activations that are not quantised."""

_OPAQUE: Mapping[str, str] = {
    "sequence": "a sequence, which keeps its type",
    "optional": "an optional, which keeps its type",
    "map": "a map, which keeps its type",
    "sparse_tensor": "a sparse tensor, which keeps its type",
    "undefined": "of a type that ONNX cannot infer",
}


@once
def node_rules(model: Model) -> tuple[NodeRule, ...]:
    """What a reduced precision would change about each node, [nodes]; found once per model."""
    return tuple(_rule_of(model, node) for node in model.nodes)


def node_rule(model: Model, node: Node) -> NodeRule:
    """What a reduced precision would change about ``node``, one of the model's."""
    return node_rules(model)[node.index]


def _rule_of(model: Model, node: Node) -> NodeRule:
    schema = schema_of(model, node)
    if schema is None and not node.is_standard:
        return NodeRule(fixed=f"operator of the domain {node.domain!r}: its types are not known to ONNX")
    if node.has_subgraph:
        return NodeRule(fixed=f"{node.op_type} runs a subgraph, which stays FP32")
    if node.op_type == "Constant" and node.is_standard:
        return NodeRule(fixed="a constant is stored in each type that reads it")
    has_fp32 = any(model.info(name).is_float32 for name in (*node.inputs, *node.outputs) if name)
    if has_fp32 and node.index in facts_of(model).shape_nodes:
        return NodeRule(fixed=COMPUTES_SHAPE)
    if schema is None:
        return NodeRule(fixed=f"ONNX has no operator {node.op_type!r} at opset {model.opset}")
    if dequantises_weights(model, node):
        return _typed_rule(node, schema, model.info)
    if node.is_standard:
        return _rule(node, schema, model.info)
    if is_quantised(node):
        return NodeRule(fixed="scales must stay FP32: small scales vanish in FP16")
    chosen = _chosen_by_runtime(node, schema, model.info)
    if chosen:
        return NodeRule(fixed=f"the type of its output {chosen!r} does not follow from those of its inputs")
    return _typed_rule(node, schema, model.info)


def schema_of(model: Model, node: Node) -> OperatorSchema | None:
    """The schema of a node's operator: ONNX's, else that of the runtime that defines it; None where there is none."""
    schema = onnx_schema(node.op_type, model.opset) if node.is_standard else None
    return schema or model.runtime.schemas.get((node.domain, node.op_type))


def is_quantised(node: Node) -> bool:
    """Whether an operator of a runtime computes with quantised values: its FP32 inputs are their scales."""
    is_of_runtime = node.domain.startswith("com.microsoft")
    return is_of_runtime and node.op_type.startswith(_QUANTISED) and node.op_type not in _WEIGHTS_ONLY


def casts_integers(model: Model, node: Node) -> bool:
    """Whether a node casts integers or truth values to FP32."""
    if node.op_type != "Cast" or not node.is_standard or not model.info(node.outputs[0]).is_float32:
        return False
    return model.info(node.inputs[0]).dtype.startswith(("int", "uint", "bool"))


def _rule(node: Node, schema: OperatorSchema, info: Callable[[str], TensorInfo]) -> NodeRule:
    row = operator(node.op_type)
    if row.fp32 and not row.fp32_inputs:
        return NodeRule(fixed=row.fp32)
    if node.op_type in SHAPE_OF | {"Cast"}:  # the result does not depend on the type of the input: it needs no Cast
        return _reads_any_rule(node, schema, info)
    if node.op_type == "ConstantOfShape":
        is_float = bool(node.outputs) and info(node.outputs[0]).is_float32
        return NodeRule(schema.admitted(schema.output_type(0)), (), (0,), (), "value") if is_float else NodeRule()
    untold = _typed_by_omitted(node, schema, info)
    if untold:
        return NodeRule(fixed=f"the input that has the type of its output {untold!r} is omitted")
    return _typed_rule(node, schema, info, row.fp32_inputs)


def _typed_rule(
    node: Node, schema: OperatorSchema, info: Callable[[str], TensorInfo], kept: frozenset[int] = frozenset()
) -> NodeRule:
    """By the schema alone; the inputs ``kept`` stay FP32."""
    float_inputs = [i for i, name in enumerate(node.inputs) if name and info(name).is_float32]
    for name in (*node.inputs, *node.outputs):
        if name and info(name).dtype in _OPAQUE:
            return NodeRule(fixed=f"{name!r} is {_OPAQUE[info(name).dtype]}")
    inputs = tuple(i for i in float_inputs if i not in kept and Precision.FP16 in schema.admitted(schema.input_type(i)))
    bound = {schema.input_type(i) for i in inputs}
    outputs = tuple(
        i for i, name in enumerate(node.outputs) if name and info(name).is_float32 and schema.output_type(i) in bound
    )
    if not inputs:
        return NodeRule(fixed=f"{node.op_type} takes no input that could be FP16" if float_inputs else None)
    return NodeRule(frozenset.intersection(*map(schema.admitted, bound)), inputs, outputs)


def _chosen_by_runtime(node: Node, schema: OperatorSchema, info: Callable[[str], TensorInfo]) -> str:
    """An FP32 output that could be FP16, and no input says whether it is; "" where there is none."""
    given = {schema.input_type(i) for i, name in enumerate(node.inputs) if name}
    for i, name in enumerate(node.outputs):
        parameter = schema.output_type(i)
        if name and info(name).is_float32 and parameter not in given and schema.admitted(parameter):
            return name
    return ""


def _typed_by_omitted(node: Node, schema: OperatorSchema, info: Callable[[str], TensorInfo]) -> str:
    """An FP32 output that has the type of an optional input, such as a state, which is not there; "" where none has."""
    given = {schema.input_type(i) for i, name in enumerate(node.inputs) if name}
    for i, name in enumerate(node.outputs):
        parameter = schema.output_type(i)
        is_free = parameter in schema.inputs and parameter not in given
        if name and info(name).is_float32 and is_free and Precision.FP16 in schema.admitted(parameter):
            return name
    return ""


def _reads_any_rule(node: Node, schema: OperatorSchema, info: Callable[[str], TensorInfo]) -> NodeRule:
    reads_any = tuple(i for i, name in enumerate(node.inputs) if name and info(name).is_float32)
    if node.op_type != "Cast" or not info(node.outputs[0]).is_float32:
        return NodeRule(reads_any=reads_any)
    if info(node.inputs[0]).dtype in FLOAT_TYPES:
        return NodeRule(reads_any=reads_any, fixed="computes nothing: folded where a plan makes it needless")
    if info(node.inputs[0]).dtype == "string":
        return NodeRule(fixed="parses text; done once in FP32, then cast")
    return NodeRule(schema.admitted(schema.output_type(0)), (), (0,), reads_any, "to")
