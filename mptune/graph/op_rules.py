"""Which inputs and outputs of a node may change to a reduced precision, and to which.

The operators' own schemas decide: an input or output follows the node's precision when its type constraint admits
``tensor(float)`` and the reduced type, such as ``tensor(float16)``. What the schemas cannot say, the table of operators
says, with its reason (``Operator.fp32``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model, Node, once
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
    schema, info = schema_of(model, node), model.info
    row = operator(node.op_type if node.is_standard else "")
    float_inputs = tuple(i for i, name in enumerate(node.inputs) if name and info(name).is_float32)
    float_outputs = tuple(i for i, name in enumerate(node.outputs) if name and info(name).is_float32)
    # What its place in the model, or its domain, rules out.
    if schema is None and not node.is_standard:
        return NodeRule(fixed=f"operator of the domain {node.domain!r}: its types are not known to ONNX")
    if node.has_subgraph:
        return NodeRule(fixed=f"{node.op_type} runs a subgraph, which stays FP32")
    if node.op_type == "Constant" and node.is_standard:
        return NodeRule(fixed="a constant is stored in each type that reads it")
    if (float_inputs or float_outputs) and node.index in facts_of(model).shape_nodes:
        return NodeRule(fixed=COMPUTES_SHAPE)
    if schema is None:
        return NodeRule(fixed=f"ONNX has no operator {node.op_type!r} at opset {model.opset}")
    # What the table rules out, or an attribute types.
    if row.fp32 and not row.fp32_inputs and not dequantises_weights(model, node):
        return NodeRule(fixed=row.fp32)
    if is_quantised(node):
        return NodeRule(fixed="scales must stay FP32: small scales vanish in FP16")
    if node.is_standard and node.op_type in SHAPE_OF:  # whatever the type is
        return NodeRule(reads_any=float_inputs)
    if node.is_standard and node.op_type == "Cast":
        if not float_outputs:
            return NodeRule(reads_any=float_inputs)
        if info(node.inputs[0]).dtype in FLOAT_TYPES:
            return NodeRule(reads_any=float_inputs, fixed="computes nothing: folded where a plan makes it needless")
        if info(node.inputs[0]).dtype == "string":
            return NodeRule(fixed="parses text; done once in FP32, then cast")
        return NodeRule(schema.admitted(schema.output_type(0)), (), (0,), (), "to")
    if node.is_standard and node.op_type == "ConstantOfShape":
        precisions = schema.admitted(schema.output_type(0))
        return NodeRule(precisions, (), (0,), (), "value") if float_outputs else NodeRule()
    # What the schema says: types of inputs decide, and outputs follow.
    for name in (*node.inputs, *node.outputs):
        if name and info(name).dtype in _OPAQUE:
            return NodeRule(fixed=f"{name!r} is {_OPAQUE[info(name).dtype]}")
    given = {schema.input_type(i) for i, name in enumerate(node.inputs) if name}
    for i in float_outputs:  # such as a state whose optional input is omitted
        parameter = schema.output_type(i)
        if parameter not in given and Precision.FP16 in schema.admitted(parameter):
            return NodeRule(
                fixed=f"the type of its output {node.outputs[i]!r} does not follow from those of its inputs"
            )
    admitting = (i for i in float_inputs if Precision.FP16 in schema.admitted(schema.input_type(i)))
    inputs = tuple(i for i in admitting if i not in row.fp32_inputs)
    if not inputs:
        return NodeRule(fixed=f"{node.op_type} takes no input that could be FP16" if float_inputs else None)
    bound = {schema.input_type(i) for i in inputs}
    outputs = tuple(i for i in float_outputs if schema.output_type(i) in bound)
    return NodeRule(frozenset.intersection(*map(schema.admitted, bound)), inputs, outputs)


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
