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

from mptune.graph.facts import FusedNodes, attribute, facts_of, steps_inside
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Node, new_node, with_nodes
from mptune.graph.loading.tensors import Initializer, TensorInfo, fixed_shape
from mptune.graph.ops import ALIASES
from mptune.graph.patterns import activation
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.value_types import new_suffix

_NEARLY = 1e-3  # relative difference of a constant that was written with few digits, or in FP16
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


def _in_activation(grouped: GroupedModel, node: Node) -> str:
    """Of which activation a node is a step: "GELU" for its division, "SiLU" for its sigmoid, "" for others."""
    model, facts = grouped.model, facts_of(grouped.model)
    reader, is_division = facts.only_reader(node), node.op_type == "Div"
    whole = None if reader is None else activation(facts, reader if is_division else node)
    members = [] if whole is None else [model.nodes[index] for index in whole.nodes]
    if reader is None or whole is None or not grouped.in_one_group(members):
        return ""
    if is_division:  # x / sqrt(2), of which the Erf is taken
        divisor = facts.number(node.inputs[1]) if node.inputs[1] in model.initializers else None
        return "GELU" * (reader.op_type == "Erf" and math.isclose(divisor or 0.0, math.sqrt(2.0), rel_tol=_NEARLY))
    # Multiplied by its own input, or by what is scaled to it: QuickGelu.
    is_silu = facts.root(facts.other(reader, node.outputs[0])) == whole.entry
    return "SiLU" * (is_silu and {n.op_type for n in members} <= {"Sigmoid", "Mul"} | ALIASES)


def with_rounding_steps(
    grouped: GroupedModel, fused: Sequence[FusedNodes] = (), precisions: Sequence[str] = REDUCED
) -> GroupedModel:
    """The model with biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes.

    Nodes that are computed together with their readers get ``rounds=False``. ``precisions`` are those that plans have.
    The model computes the same in FP32 and takes the same plans; ``proto`` stays.
    """
    model, norms, suffix = grouped.model, folded_norms(grouped), new_suffix(grouped.model, "step")
    merged, inside = merged_with_scales(grouped), steps_inside(fused)
    has_silus = Precision.BF16 not in precisions or not _SIGMOID_HAS_BF16 <= model.opset < _WHERE_HAS_BF16
    nodes, tensors, constants = list[Node](), dict[str, TensorInfo](), dict[str, Initializer]()
    # Node that is written out -> its steps; none yet of convolutions that a later norm is folded into.
    parts: dict[str, tuple[str, ...]] = {conv.name: () for conv in norms.values()}

    def write(node: Node, steps: str, values: Mapping[str, Any], **attributes: Any) -> dict[str, str]:
        """Append the steps ``label = Operator labels``; ``result`` has the node's name. Returns the values by label.

        ``values`` are names of values, or numbers to append a Constant of: a list of sizes, else FP32. The attributes
        are those of the step "raw", or of "exact", which is not rounded.
        """
        names = {"result": node.outputs[0]}
        for label, value in values.items():
            name = names[label] = value if isinstance(value, str) else f"{node.outputs[0]}.{label}{suffix}"
            if not isinstance(value, str):
                array = np.array(value, np.int64 if isinstance(value, list) else np.float32)
                nodes.append(new_node("Constant", (), name, value=onnx.numpy_helper.from_array(array, name)))
                constants[name] = Initializer(name, nodes[-1].proto.attribute[0].t, model.path, node_index=0)
                tensors[name] = TensorInfo(name, constants[name].dtype, array.shape)
        for label, op_type, *operands in (step.replace(" =", "").split() for step in steps.split("; ")):
            result = names.setdefault(label, f"{node.outputs[0]}.{label}{suffix}")
            name, own = node.name if label == "result" else result, attributes if label in ("raw", "exact") else {}
            step = new_node(op_type, [names[operand] for operand in operands], result, name, **own)
            nodes.append(replace(step, rounds=label != "exact"))
            parts[node.name] = (*parts.get(node.name, ()), name)
            if label != "result":
                tensors[result] = TensorInfo(result, "bool" if op_type == "Greater" else "float", None)
        return names

    for node in model.nodes:
        if node.name in inside:
            nodes.append(node)
        if node.name in inside or node.name in parts:
            continue
        inputs, conv = node.inputs, norms.get(node.name, node)
        is_float = bool(node.outputs) and node.is_standard and model.info(node.outputs[0]).is_float32
        op_type = conv.op_type if is_float or conv is not node else ""
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in conv.proto.attribute}
        if conv is not node:  # ``BatchNormalization(Conv(x, w))`` as one convolution with bias
            x, w, *b = filter(None, conv.inputs)
            values: dict[str, Any] = dict(zip(("scale", "offset", "mean", "variance"), inputs[1:], strict=True))
            values |= {"w": w, "b": "".join(b), "epsilon": attribute(node, "epsilon", 1e-5)}
            steps = "shifted = Add variance epsilon; deviation = Sqrt shifted; factor = Div scale deviation; "
            steps += "factors = Reshape factor column; weights = Mul w factors; "
            steps += "centred = Sub b mean; moved = Mul centred factor; " if b else "moved = Mul mean factor; "
            steps += "bias = Add moved offset" if b else "bias = Sub offset moved"
            names = write(conv, steps, values | {"column": [-1] + [1] * (len(model.initializers[w].shape) - 1)})
            inputs = (x, names["weights"], names["bias"])
        if op_type in ("Conv", "ConvTranspose"):  # with a bias, as ``Conv(x, w) + b``
            rank = len(model.info(node.outputs[0]).shape or model.info(conv.inputs[1]).shape or ())
            if len(inputs) > 2 and inputs[2] and rank:
                values = dict(zip("xwb", inputs, strict=True)) | {"shape": [-1] + [1] * (rank - 2)}
                steps = f"column = Reshape b shape; raw = {op_type} x w; result = Add raw column"
                write(node, steps, values, **attributes)
        elif op_type == "ReduceMean":  # over the last axes, as the sum, which is rounded, over the count
            shape, axes = model.info(inputs[0]).shape or (), facts_of(model).reduced_axes(node)
            sizes = fixed_shape(shape[axes[0] :]) if axes and axes[0] else None
            if sizes is not None and len(sizes) == len(axes):
                values = dict(zip(("x", "axes"), inputs, strict=False)) | {"count": math.prod(sizes)}
                steps = f"exact = ReduceMean {' '.join([*values][:-1])}; sum = Mul exact count; result = Div sum count"
                write(node, steps, values, **attributes)
        elif op_type == "Sigmoid" and has_silus and _in_activation(grouped, node) == "SiLU":
            # As the kernel (``OP_Sigmoid``) computes it: ``1 / (1 + exp(-abs(x)))``, or 1 less that.
            steps = "size = Abs x; exponent = Neg size; power = Exp exponent; sum = Add power unit; "
            steps += "large = Div unit sum; small = Sub unit large; "
            steps += "positive = Greater x zero; result = Where positive large small"
            write(node, steps, {"x": inputs[0], "unit": 1.0, "zero": 0.0})
        elif op_type == "Div" and _in_activation(grouped, node) == "GELU":  # x / sqrt(2) as x * sqrt(0.5)
            root = np.full(model.initializers[inputs[1]].shape, math.sqrt(0.5))
            write(node, "result = Mul x root", {"x": inputs[0], "root": root})
        if node.name not in parts:
            nodes.append(replace(node, rounds=False) if node.name in merged else node)
    written = ((step for name in group.nodes for step in parts.get(name, (name,))) for group in grouped.groups)
    groups = tuple(replace(group, nodes=tuple(steps)) for group, steps in zip(grouped.groups, written, strict=True))
    written_out = with_nodes(model, nodes, {**model.initializers, **constants}, tensors)
    return GroupedModel(written_out, groups, grouped.io)
