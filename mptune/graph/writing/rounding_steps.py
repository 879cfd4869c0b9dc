"""Where ONNX Runtime's CUDA provider rounds within a node, or not between nodes: products with scales, GELUs, SiLUs.

And how it rounds the weights of a convolution when it folds a BatchNormalization into them. Nodes are looked at in one
group each, as a plan may put a Cast between groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

_NEARLY = 1e-3
"""Relative difference of a constant that was written with few digits, or in FP16."""
_AXES_ARE_INPUTS = 13
"""The first operator set in which axes of Unsqueeze and ReduceSum are an input, not an attribute."""
_SIGMOID_HAS_BF16, _WHERE_HAS_BF16 = 13, 16
"""The first operator sets in which Sigmoid has BFLOAT16, and Where has."""


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


class _Steps:
    """The nodes of the model that is written, so far; a node may have become several, its steps."""

    def __init__(self, grouped: GroupedModel, precisions: Sequence[str]) -> None:
        self._grouped, self._model = grouped, grouped.model
        self._facts, self._norms = facts_of(grouped.model), folded_norms(grouped)
        self._has_silus = Precision.BF16 not in precisions or not (
            _SIGMOID_HAS_BF16 <= grouped.model.opset < _WHERE_HAS_BF16
        )
        self._suffix = new_suffix(grouped.model, "step")
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.values: dict[str, onnx.TensorProto] = {}
        """Results of the Constant nodes among them."""
        self.parts: dict[str, tuple[str, ...]] = {conv.name: () for conv in self._norms.values()}
        """Node that was written out -> its steps; none yet of convolutions that a later norm is folded into."""

    def add(self, node: Node) -> None:
        """Take a node, written out where the provider rounds in its midst."""
        is_float = bool(node.outputs) and node.is_standard and self._model.info(node.outputs[0]).is_float32
        if node.name in self.parts:
            return
        if node.name in self._norms:
            self._folded(node, self._norms[node.name])
        elif is_float and node.op_type in ("Conv", "ConvTranspose"):
            self._convolution(node, node.inputs[1])
        elif is_float and node.op_type == "ReduceMean":
            self._mean(node)
        elif is_float and node.op_type == "Sigmoid" and self._has_silus and self._is_of_silu(node):
            self._sigmoid(node)
        elif is_float and node.op_type == "Div" and self._begins_gelu(node):  # x / sqrt(2) as x * sqrt(0.5)
            root = np.full(self._model.initializers[node.inputs[1]].shape, math.sqrt(0.5), np.float32)
            self._step(node, "", "Mul", node.inputs[0], self._constant(node, "root", root))
        if node.name not in self.parts:
            self.nodes.append(node)

    def _next(self, node: Node | None, op_type: str) -> Node | None:
        """The one node that reads a result, where it is of one of ONNX's operators."""
        reader = None if node is None else self._facts.only_reader(node)
        return reader if reader is not None and reader.is_standard and reader.op_type == op_type else None

    def _begins_gelu(self, division: Node) -> bool:
        """Whether it is ``x / sqrt(2)``, of which the Erf is taken, and one added to that."""
        erf = self._next(division, "Erf")
        after = self._next(erf, "Add")
        if erf is None or after is None or division.inputs[1] not in self._model.initializers:
            return False
        numbers = {division.inputs[1]: math.sqrt(2.0), self._facts.other(after, erf.outputs[0]): 1.0}
        is_gelu = all(math.isclose(self._facts.number(n) or 0.0, x, rel_tol=_NEARLY) for n, x in numbers.items())
        return is_gelu and self._grouped.in_one_group((division, erf, after))

    def _is_of_silu(self, sigmoid: Node) -> bool:
        """Whether it is multiplied by its own input, or by what is scaled to it: QuickGelu."""
        facts, product = self._facts, self._next(sigmoid, "Mul")
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
        return self._grouped.in_one_group(nodes)

    def _sigmoid(self, node: Node) -> None:
        """As the kernel (``OP_Sigmoid``) computes it: ``1 / (1 + exp(-abs(x)))``, or 1 less that."""
        (x,) = node.inputs
        unit, zero = self._constant(node, "unit", 1.0), self._constant(node, "zero", 0.0)
        exponent = self._step(node, "exponent", "Neg", self._step(node, "size", "Abs", x))
        total = self._step(node, "sum", "Add", self._step(node, "power", "Exp", exponent), unit)
        large = self._step(node, "large", "Div", unit, total)
        small = self._step(node, "small", "Sub", unit, large)
        self._step(node, "", "Where", self._step(node, "positive", "Greater", x, zero), large, small)

    def _folded(self, norm: Node, conv: Node) -> None:
        """``BatchNormalization(Conv(x, w))`` as one convolution with bias; each step to its constants is rounded."""
        x, w, *b = filter(None, conv.inputs)
        scale, offset, mean, variance = norm.inputs[1:]
        epsilon = self._constant(conv, "epsilon", float_attribute(norm, "epsilon", 1e-5))
        axes, stated = self._axes(conv, range(1, len(self._model.initializers[w].shape)))
        deviation = self._step(conv, "deviation", "Sqrt", self._step(conv, "shifted", "Add", variance, epsilon))
        factor = self._step(conv, "factor", "Div", scale, deviation)
        factors = self._step(conv, "factors", "Unsqueeze", factor, *axes, **stated)
        weights = self._step(conv, "weights", "Mul", w, factors)
        centred = self._step(conv, "centred", "Sub", *b, mean) if b else mean
        moved = self._step(conv, "moved", "Mul", centred, factor)
        bias = self._step(conv, "bias", *(("Add", moved, offset) if b else ("Sub", offset, moved)))
        self._convolution(replace(norm, op_type="Conv", inputs=(x, weights, bias), proto=conv.proto), w)

    def _convolution(self, node: Node, weights: str) -> None:
        """``Conv(x, w, b)`` as ``Conv(x, w) + b``; ``weights`` has the rank of ``w``."""
        shape = self._model.info(node.outputs[0]).shape or self._model.info(weights).shape
        if len(node.inputs) < 3 or not node.inputs[2] or shape is None:
            return
        x, w, b = node.inputs
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.proto.attribute}
        axes, stated = self._axes(node, range(1, len(shape) - 1))
        column = self._step(node, "column", "Unsqueeze", b, *axes, **stated)
        self._step(node, "", "Add", self._step(node, "raw", node.op_type, x, w, **attributes), column)

    def _mean(self, node: Node) -> None:
        """``ReduceMean(x)`` over the last axes as ``ReduceSum(x) / count``."""
        shape, reduced = self._model.info(node.inputs[0]).shape or (), self._facts.reduced_axes(node)
        sizes = fixed_shape(shape[reduced[0] :]) if reduced else None
        if sizes is None or reduced[0] == 0 or len(sizes) != len(reduced):
            return
        keep = attribute(node, "keepdims")
        axes, stated = self._axes(node, reduced)
        count, keepdims = self._constant(node, "count", math.prod(sizes)), 1 if keep is None else keep
        raw = self._step(node, "raw", "ReduceSum", node.inputs[0], *axes, keepdims=keepdims, **stated)
        self._step(node, "", "Div", raw, count)

    def _axes(self, node: Node, axes: Sequence[int]) -> tuple[list[str], dict[str, list[int]]]:
        """The constant input, or before its operator set the attribute, that says over which axes a step goes."""
        if self._model.opset < _AXES_ARE_INPUTS:
            return [], {"axes": list(axes)}
        return [self._constant(node, "axes", np.array(axes, np.int64))], {}

    def _constant(self, node: Node, step: str, value: float | np.ndarray) -> str:
        """Append a Constant for the steps of a node; returns its result."""
        name = f"{node.outputs[0]}.{step}{self._suffix}"
        array = value if isinstance(value, np.ndarray) else np.array(value, np.float32)
        self.values[name] = tensor = onnx.numpy_helper.from_array(array)
        self.tensors[name] = TensorInfo(name, "int64" if array.dtype == np.int64 else "float", array.shape)
        self._append(onnx.helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    def _step(self, node: Node, step: str, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a step of a node; returns its result. The last step, "", takes the node's name and result."""
        result = f"{node.outputs[0]}.{step}{self._suffix}" if step else node.outputs[0]
        name = result if step else node.name
        if step:
            self.tensors[result] = TensorInfo(result, "bool" if op_type == "Greater" else "float", None)
        self._append(onnx.helper.make_node(op_type, inputs, [result], name=name, **attributes))
        self.parts[node.name] = (*self.parts.get(node.name, ()), name)
        return result

    def _append(self, proto: onnx.NodeProto) -> None:
        io = tuple(proto.input), tuple(proto.output)
        self.nodes.append(Node(-1, proto.name, proto.op_type, proto.domain, *io, (), proto))


def with_rounding_steps(
    grouped: GroupedModel, fused: Sequence[FusedNodes] = (), precisions: Sequence[str] = REDUCED
) -> GroupedModel:
    """The model with biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes.

    Nodes that are computed together with their readers get ``rounds=False``. ``precisions`` are those that plans have.

    Returns:
        A model that computes the same in FP32 and takes the same plans, and its groups. ``proto`` stays the model's.
    """
    model, steps = grouped.model, _Steps(grouped, precisions)
    merged, inside = merged_with_scales(grouped), steps_inside(fused)
    for node in model.nodes:
        if node.name in inside:
            steps.nodes.append(node)
        else:
            steps.add(replace(node, rounds=False) if node.name in merged else node)
    held = {name: Initializer(name, tensor, model.path, node_index=0) for name, tensor in steps.values.items()}
    written_out = with_nodes(model, steps.nodes, {**model.initializers, **held}, steps.tensors)
    groups = tuple(
        replace(group, nodes=tuple(n for name in group.nodes for n in steps.parts.get(name, (name,))))
        for group in grouped.groups
    )
    return GroupedModel(written_out, groups, grouped, grouped.io)
