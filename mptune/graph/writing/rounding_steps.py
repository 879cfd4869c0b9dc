"""Where ONNX Runtime's CUDA provider rounds within a node, or not between nodes: products with scales, GELUs, SiLUs.

And how it rounds the weights of a convolution when it folds a BatchNormalization into them. Nodes are looked at in one
group each, as a plan may put a Cast between groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.graph.facts import FusedNodes, attribute, facts_of, float_attribute, steps_inside
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Node, with_nodes
from mptune.graph.loading.tensors import Initializer, TensorInfo, fixed_shape
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.value_types import new_suffix

_NEARLY = 1e-3  # relative difference of a constant that was written with few digits, or in FP16
_AXES_ARE_INPUTS = 13  # the first operator set in which axes of Unsqueeze and ReduceSum are an input, not an attribute
_SIGMOID_HAS_BF16, _WHERE_HAS_BF16 = 13, 16  # the first operator sets in which they have it


def folded_norms(grouped: GroupedModel) -> dict[str, Node]:
    """Name of a BatchNormalization that is folded into a convolution -> the convolution (``conv_bn_fusion.cc``)."""
    model, facts, folded = grouped.model, facts_of(grouped.model), dict[str, Node]()
    for norm in model.nodes:
        if not norm.is_standard or norm.op_type != "BatchNormalization" or len(norm.outputs) > 1:
            continue
        conv = facts.producer(norm.inputs[0])
        if conv is None or not conv.is_standard or conv.op_type != "Conv" or norm.inputs[0] not in conv.outputs:
            continue
        is_constant = facts.constants.issuperset(name for name in (*conv.inputs[1:], *norm.inputs[1:]) if name)
        if not is_constant or facts.only_reader(conv) is not norm or facts.is_output(norm.outputs[0]):
            continue
        if grouped.in_one_group((conv, norm)) and not attribute(norm, "training_mode"):
            folded[norm.name] = conv
    return folded


def merged_with_scales(grouped: GroupedModel) -> frozenset[str]:
    """The names of nodes whose result is only an intermediate one of a product with its scales."""
    model, facts = grouped.model, facts_of(grouped.model)

    def next_of_group(node: Node) -> Node | None:
        """The one node of the same group that reads the result, where nothing else does."""
        (out,), reader = node.outputs, facts.only_reader(node)
        if reader is None or model.consumers[out] != (reader.index,) or not model.info(out).is_float32:
            return None
        return reader if grouped.in_one_group((node, reader)) and reader.inputs.count(out) == 1 else None

    def scaled(node: Node) -> str | None:
        """What a node multiplies by, or divides by, one constant number."""
        if not node.is_standard or node.op_type not in ("Mul", "Div"):
            return None
        for value, scale in (node.inputs, node.inputs[::-1])[: 1 if node.op_type == "Div" else 2]:
            constant, shape = model.initializers.get(scale), model.info(value).shape
            if constant is not None and facts.is_scalar(scale) and value not in model.initializers and shape:
                return value if len(constant.shape) <= len(shape) else None
        return None

    matrix_products = {node.name for node in model.nodes if node.is_standard and node.op_type == "MatMul"}
    behind, ahead, merged = set(matrix_products), set(matrix_products), set[str]()  # products, and scales beside them
    for node in model.nodes:
        reader = next_of_group(node) if node.name in behind else None
        if reader is not None and scaled(reader) == node.outputs[0]:
            behind.add(reader.name)
            merged.add(node.name)
    for node in reversed(model.nodes):
        reader = next_of_group(node) if node.name not in behind and scaled(node) else None
        if reader is not None and reader.name in ahead:
            ahead.add(node.name)
            merged.add(node.name)
    return frozenset(merged)


def _next(grouped: GroupedModel, node: Node | None, op_type: str) -> Node | None:
    """The one node that reads a result, where it is of one of ONNX's operators."""
    reader = None if node is None else facts_of(grouped.model).only_reader(node)
    return reader if reader is not None and reader.is_standard and reader.op_type == op_type else None


def _begins_gelu(grouped: GroupedModel, division: Node) -> bool:
    """Whether it is ``x / sqrt(2)``, of which the Erf is taken, and one added to that."""
    erf = _next(grouped, division, "Erf")
    after = _next(grouped, erf, "Add")
    if erf is None or after is None or division.inputs[1] not in grouped.model.initializers:
        return False
    facts = facts_of(grouped.model)
    numbers = {division.inputs[1]: math.sqrt(2.0), facts.other(after, erf.outputs[0]): 1.0}
    is_gelu = all(math.isclose(facts.number(n) or 0.0, x, rel_tol=_NEARLY) for n, x in numbers.items())
    return is_gelu and grouped.in_one_group((division, erf, after))


def _is_of_silu(grouped: GroupedModel, sigmoid: Node) -> bool:
    """Whether it is multiplied by its own input, or by what is scaled to it: QuickGelu."""
    facts, product = facts_of(grouped.model), _next(grouped, sigmoid, "Mul")
    if product is None:
        return False
    other, nodes = facts.other(product, sigmoid.outputs[0]), [sigmoid, product]
    if other != sigmoid.inputs[0]:
        scale = facts.producer(sigmoid.inputs[0])
        if scale is None or not scale.is_standard or scale.op_type != "Mul" or other not in scale.inputs:
            return False
        if facts.only_reader(scale) is not sigmoid or facts.number(facts.other(scale, other)) is None:
            return False
        nodes.append(scale)
    return grouped.in_one_group(nodes)


def with_rounding_steps(
    grouped: GroupedModel, fused: Sequence[FusedNodes] = (), precisions: Sequence[str] = REDUCED
) -> GroupedModel:
    """The model with biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes.

    Nodes that are computed together with their readers get ``rounds=False``. ``precisions`` are those that plans have.

    Returns:
        A model that computes the same in FP32 and takes the same plans, and its groups. ``proto`` stays the model's.
    """
    model, norms, suffix = grouped.model, folded_norms(grouped), new_suffix(grouped.model, "step")
    merged, inside = merged_with_scales(grouped), steps_inside(fused)
    has_silus = Precision.BF16 not in precisions or not _SIGMOID_HAS_BF16 <= model.opset < _WHERE_HAS_BF16
    nodes: list[Node] = []
    tensors: dict[str, TensorInfo] = {}
    constants: dict[str, Initializer] = {}
    # Node that is written out -> its steps; none yet of convolutions that a later norm is folded into.
    parts: dict[str, tuple[str, ...]] = {conv.name: () for conv in norms.values()}

    def append(name: str, op_type: str, inputs: Sequence[str], result: str, **attributes: Any) -> None:
        proto = onnx.helper.make_node(op_type, inputs, [result], name=name, **attributes)
        nodes.append(Node(-1, name, op_type, "", tuple(inputs), (result,), (), proto))

    def write(node: Node, steps: str, values: Mapping[str, Any], **raw_attributes: Any) -> dict[str, str]:
        """Append the steps ``label = Operator labels``; ``result`` has the node's name. Returns the values by label.

        ``values`` are names of values, or numbers to append a Constant of; the attributes are those of the step "raw".
        """
        names = {label: f"{node.outputs[0]}.{label}{suffix}" for label in values} | {"result": node.outputs[0]}
        for label, value in values.items():
            if isinstance(value, str):
                names[label] = value
            elif label != "axes" or model.opset >= _AXES_ARE_INPUTS:
                name, dtype = names[label], np.int64 if label == "axes" else np.float32
                tensor = onnx.numpy_helper.from_array(np.array(value, dtype))
                append(name, "Constant", (), name, value=tensor)
                constants[name] = Initializer(name, tensor, model.path, node_index=0)
                tensors[name] = TensorInfo(name, constants[name].dtype, constants[name].shape)
        for label, op_type, *operands in (step.replace(" =", "").split() for step in steps.split("; ")):
            attributes = raw_attributes if label == "raw" else {}
            if "axes" in operands and model.opset < _AXES_ARE_INPUTS:
                operands.remove("axes")
                attributes = attributes | {"axes": list(values["axes"])}
            result = names.setdefault(label, f"{node.outputs[0]}.{label}{suffix}")
            name = node.name if label == "result" else result
            if label != "result":
                tensors[result] = TensorInfo(result, "bool" if op_type == "Greater" else "float", None)
            append(name, op_type, [names[operand] for operand in operands], result, **attributes)
            parts[node.name] = (*parts.get(node.name, ()), name)
        return names

    for node in model.nodes:
        if node.name in inside:
            nodes.append(node)
        if node.name in inside or node.name in parts:
            continue
        inputs, conv = node.inputs, norms.get(node.name, node)
        is_float = bool(node.outputs) and node.is_standard and model.info(node.outputs[0]).is_float32
        op_type = conv.op_type if is_float or conv is not node else ""
        if conv is not node:  # ``BatchNormalization(Conv(x, w))`` as one convolution with bias
            x, w, *b = filter(None, conv.inputs)
            values: dict[str, Any] = dict(zip(("scale", "offset", "mean", "variance"), inputs[1:], strict=True))
            values |= {"w": w, "b": "".join(b), "epsilon": float_attribute(node, "epsilon", 1e-5)}
            steps = "shifted = Add variance epsilon; deviation = Sqrt shifted; factor = Div scale deviation; "
            steps += "factors = Unsqueeze factor axes; weights = Mul w factors; "
            steps += "centred = Sub b mean; moved = Mul centred factor; " if b else "moved = Mul mean factor; "
            steps += "bias = Add moved offset" if b else "bias = Sub offset moved"
            names = write(conv, steps, values | {"axes": range(1, len(model.initializers[w].shape))})
            inputs = (x, names["weights"], names["bias"])
        if op_type in ("Conv", "ConvTranspose"):  # with a bias, as ``Conv(x, w) + b``
            rank = len(model.info(node.outputs[0]).shape or model.info(conv.inputs[1]).shape or ())
            if len(inputs) > 2 and inputs[2] and rank:
                attributes = {a.name: onnx.helper.get_attribute_value(a) for a in conv.proto.attribute}
                steps = f"column = Unsqueeze b axes; raw = {op_type} x w; result = Add raw column"
                write(node, steps, dict(zip("xwb", inputs, strict=True)) | {"axes": range(1, rank - 1)}, **attributes)
        elif op_type == "ReduceMean":  # over the last axes, as ``ReduceSum(x) / count``
            shape, axes = model.info(inputs[0]).shape or (), facts_of(model).reduced_axes(node)
            sizes = fixed_shape(shape[axes[0] :]) if axes and axes[0] else None
            if sizes is not None and len(sizes) == len(axes):
                stated = attribute(node, "keepdims")
                values = {"x": inputs[0], "axes": axes, "count": math.prod(sizes)}
                keepdims = 1 if stated is None else stated
                write(node, "raw = ReduceSum x axes; result = Div raw count", values, keepdims=keepdims)
        elif op_type == "Sigmoid" and has_silus and _is_of_silu(grouped, node):
            # As the kernel (``OP_Sigmoid``) computes it: ``1 / (1 + exp(-abs(x)))``, or 1 less that.
            steps = "size = Abs x; exponent = Neg size; power = Exp exponent; sum = Add power unit; "
            steps += "large = Div unit sum; small = Sub unit large; "
            steps += "positive = Greater x zero; result = Where positive large small"
            write(node, steps, {"x": inputs[0], "unit": 1.0, "zero": 0.0})
        elif op_type == "Div" and _begins_gelu(grouped, node):  # x / sqrt(2) as x * sqrt(0.5)
            root = np.full(model.initializers[inputs[1]].shape, math.sqrt(0.5))
            write(node, "result = Mul x root", {"x": inputs[0], "root": root})
        if node.name not in parts:
            nodes.append(replace(node, rounds=False) if node.name in merged else node)
    groups = tuple(
        replace(group, nodes=tuple(n for name in group.nodes for n in parts.get(name, (name,))))
        for group in grouped.groups
    )
    written_out = with_nodes(model, nodes, {**model.initializers, **constants}, tensors)
    return GroupedModel(written_out, groups, grouped, grouped.io)
