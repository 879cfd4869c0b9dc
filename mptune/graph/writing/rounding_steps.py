"""Where ONNX Runtime's CUDA provider rounds within a node, or not between nodes: products with scales, GELUs, SiLUs.

And how it rounds the weights of a convolution when it folds a BatchNormalization into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.graph.facts import Facts, attribute, facts_of, float_attribute
from mptune.graph.fused import FusedNodes, steps_inside
from mptune.graph.groups import GroupedModel
from mptune.graph.loading.model import Node, consumers_of
from mptune.graph.loading.tensors import Initializer, TensorInfo
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.value_types import new_suffix

_NEARLY = 1e-3
"""Relative difference of a constant that was written with few digits, or in FP16."""
_AXES_ARE_INPUTS = {"Unsqueeze": 13, "ReduceSum": 13, "ReduceMean": 18}
"""Operator -> the first operator set in which its axes are an input, not an attribute."""
_WHERE_SINCE, _WHERE_HAS_BF16, _SIGMOID_HAS_BF16 = 9, 16, 13
"""The first operator sets in which there is Where, Where has BFLOAT16, and Sigmoid has BFLOAT16."""
_ROUNDED_BY_BOTH, _ROUNDED_BY_BF16 = 1.0 + 2.0**-12, 1.0 + 2.0**-9
"""Which precisions round them to 1: FP16 has 11 bits, BF16 8."""

# -- what the provider computes together; of one group each, as a plan may put a Cast between groups ------------------


def divisions_of_gelus(grouped: GroupedModel, facts: Facts) -> frozenset[str]:
    """The names of the divisions by the root of 2 that begin a GELU: ``x / sqrt(2)``, its Erf, and that plus one."""
    divisions: set[str] = set()
    for erf in grouped.model.nodes:
        if not erf.is_standard or erf.op_type != "Erf":
            continue
        division, after = facts.producer(erf.inputs[0]), facts.only_reader(erf)
        if division is None or after is None or facts.only_reader(division) is not erf:
            continue
        nodes = (division, erf, after)
        if [node.op_type for node in nodes] != ["Div", "Erf", "Add"] or not all(n.is_standard for n in nodes):
            continue
        if division.inputs[1] not in grouped.model.initializers or not grouped.in_one_group(nodes):
            continue
        root, addend = facts.number(division.inputs[1]), facts.number(facts.other(after, erf.outputs[0]))
        close = partial(math.isclose, rel_tol=_NEARLY)
        if close(root or 0.0, math.sqrt(2.0)) and close(addend or 0.0, 1.0):
            divisions.add(division.name)
    return frozenset(divisions)


def sigmoids_of_silus(grouped: GroupedModel, facts: Facts) -> frozenset[str]:
    """The names of the sigmoids that are multiplied by their own input, or by what is scaled to it: QuickGelu."""
    sigmoids: set[str] = set()
    for sigmoid in grouped.model.nodes:
        if not sigmoid.is_standard or sigmoid.op_type != "Sigmoid":
            continue
        product, scale = facts.only_reader(sigmoid), facts.producer(sigmoid.inputs[0])
        if product is None or not product.is_standard or product.op_type != "Mul":
            continue
        other, nodes = facts.other(product, sigmoid.outputs[0]), [sigmoid, product]
        if other != sigmoid.inputs[0]:
            if scale is None or not scale.is_standard or scale.op_type != "Mul" or other not in scale.inputs:
                continue
            if facts.only_reader(scale) is not sigmoid or facts.number(facts.other(scale, other)) is None:
                continue
            nodes.append(scale)
        if grouped.in_one_group(nodes):
            sigmoids.add(sigmoid.name)
    return frozenset(sigmoids)


def folded_norms(grouped: GroupedModel, facts: Facts) -> dict[str, Node]:
    """Name of a BatchNormalization that is folded into a convolution -> the convolution (``conv_bn_fusion.cc``)."""
    model, folded = grouped.model, dict[str, Node]()
    for norm in model.nodes:
        if not norm.is_standard or norm.op_type != "BatchNormalization" or len(norm.outputs) > 1:
            continue
        conv = facts.producer(norm.inputs[0])
        if conv is None or not conv.is_standard or conv.op_type != "Conv" or norm.inputs[0] not in conv.outputs:
            continue
        constants = [model.initializers.get(name) for name in (*conv.inputs[1:], *norm.inputs[1:]) if name]
        is_constant = all(constant is not None and not constant.overridable for constant in constants)
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
            is_scale = constant is not None and facts.is_scalar(scale) and value not in model.initializers
            if is_scale and constant is not None and shape and len(constant.shape) <= len(shape):
                return value
        return None

    matrix_products = {node.name for node in model.nodes if node.is_standard and node.op_type == "MatMul"}
    behind, ahead, merged = set(matrix_products), set(matrix_products), set[str]()  # products, and scales beside them
    for node in model.nodes:
        if node.name in behind:
            reader = next_of_group(node)
            if reader is not None and scaled(reader) == node.outputs[0]:
                behind.add(reader.name)
                merged.add(node.name)
    for node in reversed(model.nodes):
        if node.name not in behind and scaled(node):
            reader = next_of_group(node)
            if reader is not None and reader.name in ahead:
                ahead.add(node.name)
                merged.add(node.name)
    return frozenset(merged)


# -- nodes that are written out in steps ------------------------------------------------------------------------------

_Row = tuple[str, Sequence[str], str] | tuple[str, Sequence[str], str, Mapping[str, Any]]
"""Operator, inputs, what it computes ("": the result of the node that is written out), and attributes."""

_SIGMOID: tuple[_Row, ...] = (
    ("Abs", ("x",), "size"),
    ("Neg", ("size",), "exponent"),
    ("Exp", ("exponent",), "power"),
    ("Add", ("power", "unit"), "sum"),
    ("Div", ("unit", "sum"), "large"),
    ("Sub", ("unit", "large"), "small"),
    ("Greater", ("x", "zero"), "positive"),
    ("Where", ("positive", "large", "small"), "stepwise"),
    ("Greater", ("mark", "unit"), "whole"),
    ("Sigmoid", ("x",), "kept"),
    ("Where", ("whole", "kept", "stepwise"), ""),
)
_HARD_SIGMOID: tuple[_Row, ...] = (
    ("Mul", ("x", "alpha"), "scaled"),
    ("Add", ("scaled", "beta"), "sum"),
    ("Min", ("sum", "unit"), "limited"),
    ("Relu", ("limited",), ""),
)
_LEAKY_RELU: tuple[_Row, ...] = (("PRelu", ("x", "alpha"), ""),)
_FACTOR: tuple[_Row, ...] = (
    ("Add", ("variance", "epsilon"), "shifted"),
    ("Sqrt", ("shifted",), "deviation"),
    ("Div", ("scale", "deviation"), "factor"),
)
_NEW_BIAS: tuple[_Row, ...] = (("Mul", ("mean", "factor"), "moved"), ("Sub", ("offset", "moved"), "bias"))
_CHANGED_BIAS: tuple[_Row, ...] = (
    ("Sub", ("b", "mean"), "centred"),
    ("Mul", ("centred", "factor"), "moved"),
    ("Add", ("moved", "offset"), "bias"),
)
_OF_CONSTANTS = {row[2] for row in (*_FACTOR, *_NEW_BIAS, *_CHANGED_BIAS)} | {"column", "factors", "weights"}
"""Results of rows that do not have the shape of what the node computes."""

_UNROUNDED = frozenset({"whole", "scaled"})
"""Results of rows that are not rounded: a boolean, and a product that is part of a fused multiply-add."""


class Steps:
    """The nodes of the model that is written, so far."""

    def __init__(self, grouped: GroupedModel, precisions: Sequence[str]) -> None:
        self._model = model = grouped.model
        facts = facts_of(model)
        lacks_bf16 = Precision.BF16 in precisions and _SIGMOID_HAS_BF16 <= model.opset < _WHERE_HAS_BF16
        self._has_where = model.opset >= _WHERE_SINCE and not lacks_bf16
        self._roots = divisions_of_gelus(grouped, facts)
        self._silus = sigmoids_of_silus(grouped, facts)
        self._norms = folded_norms(grouped, facts)
        self._suffix = new_suffix(model, "step")
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.parts: dict[str, tuple[str, ...]] = {conv.name: () for conv in self._norms.values()}
        """Node that was written out -> the nodes that it became; none where a later node's have its part."""
        self._values: dict[str, onnx.TensorProto] = {}

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
        elif is_float and node.op_type == "Sigmoid" and self._has_where:
            # A constant near 1, which only a precision rounds to 1 whose kernel rounds after each step, tells where.
            mark = _ROUNDED_BY_BOTH if node.name in self._silus else _ROUNDED_BY_BF16
            self._write(node, _SIGMOID, {"unit": 1.0, "zero": 0.0, "mark": mark}, {"x": node.inputs[0]})
        elif is_float and node.op_type == "HardSigmoid":  # its attributes are rounded, too
            own = {name: float_attribute(node, name, default) for name, default in (("alpha", 0.2), ("beta", 0.5))}
            self._write(node, _HARD_SIGMOID, {"unit": 1.0, **own}, {"x": node.inputs[0]})
        elif is_float and node.op_type == "LeakyRelu":
            self._write(node, _LEAKY_RELU, {"alpha": float_attribute(node, "alpha", 0.01)}, {"x": node.inputs[0]})
        elif node.name in self._roots:  # x / sqrt(2) as x * sqrt(0.5)
            root = np.full(self._model.initializers[node.inputs[1]].shape, math.sqrt(0.5))
            self._write(node, [("Mul", ["x", "root"], "")], {"root": root}, {"x": node.inputs[0]})
        if node.name not in self.parts:
            self.nodes.append(node)

    def constants(self, nodes: Sequence[Node]) -> dict[str, Initializer]:
        """The constants among ``nodes``, the new ones and those of the model where they stand now."""
        initializers = {}
        for node in nodes:
            name = node.outputs[0] if node.outputs else ""
            if name in self._values:
                initializers[name] = Initializer(name, self._values[name], self._model.path, node_index=node.index)
            elif node.op_type == "Constant" and name in self._model.initializers:
                initializers[name] = replace(self._model.initializers[name], node_index=node.index)
        return initializers

    def _folded(self, norm: Node, conv: Node) -> None:
        """``BatchNormalization(Conv(x, w))`` as one convolution with bias; each step to its constants is rounded."""
        rank = len(self._model.initializers[conv.inputs[1]].shape)
        factors, axes = self._with_axes("Unsqueeze", "factor", "factors", range(1, rank))
        bias = _CHANGED_BIAS if len(conv.inputs) > 2 and conv.inputs[2] else _NEW_BIAS
        epsilon = float_attribute(norm, "epsilon", 1e-5)
        names = dict(zip(("scale", "offset", "mean", "variance"), norm.inputs[1:], strict=True))
        names |= dict(zip("xwb", conv.inputs, strict=False))
        rows = (*_FACTOR, factors, ("Mul", ("w", "factors"), "weights"), *bias)
        made = self._write(conv, rows, {"epsilon": epsilon, **axes}, names)
        inputs = (conv.inputs[0], made["weights"], made["bias"])
        self._convolution(replace(norm, op_type="Conv", inputs=inputs, proto=conv.proto), conv.inputs[1])

    def _convolution(self, node: Node, weights: str) -> None:
        """``Conv(x, w, b)`` as ``Conv(x, w) + b``; ``weights`` has the rank of ``w``."""
        shape = self._model.info(node.outputs[0]).shape or self._model.info(weights).shape
        if len(node.inputs) < 3 or not node.inputs[2] or shape is None:
            return
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.proto.attribute}
        column, axes = self._with_axes("Unsqueeze", "b", "column", range(1, len(shape) - 1))
        rows = [column, (node.op_type, ["x", "w"], "raw", attributes), ("Add", ["raw", "column"], "")]
        self._write(node, rows, axes, dict(zip("xwb", node.inputs, strict=True)))

    def _mean(self, node: Node) -> None:
        """``ReduceMean(x)`` over the last axes as ``ReduceSum(x) / count``."""
        shape = self._model.info(node.inputs[0]).shape
        axes = facts_of(self._model).reduced_axes(node)
        if shape is None or not axes or axes[0] == 0 or axes != tuple(range(axes[0], len(shape))):
            return
        sizes = [size for size in shape[axes[0] :] if isinstance(size, int)]
        if len(sizes) < len(axes):
            return
        keep = next((a.i for a in node.proto.attribute if a.name == "keepdims"), 1)
        total, constants = self._with_axes("ReduceSum", "x", "raw", axes, keepdims=keep)
        rows = [total, ("Div", ["raw", "count"], "")]
        self._write(node, rows, {**constants, "count": math.prod(sizes)}, {"x": node.inputs[0]})

    def _with_axes(
        self, op_type: str, x: str, result: str, axes: Sequence[int], **attributes: Any
    ) -> tuple[_Row, dict[str, np.ndarray]]:
        """An operator with axes, which later operator sets read as an input, and the constant ``axes``."""
        if self._model.opset < _AXES_ARE_INPUTS[op_type]:
            return (op_type, [x], result, {"axes": list(axes), **attributes}), {}
        return (op_type, [x, "axes"], result, attributes), {"axes": np.array(axes, np.int64)}

    def _write(
        self, node: Node, rows: Sequence[_Row], constants: Mapping[str, float | np.ndarray], others: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Append nodes in place of one; ``others`` are the values of the model that the rows read.

        Returns:
            What the rows call a value -> its name.
        """
        (out,), before = node.outputs, len(self.nodes)
        names = {"": out, **others}
        for step in (*constants, *(row[2] for row in rows if row[2])):
            names[step] = f"{out}.{step}{self._suffix}"
        for step, value in constants.items():
            dtype = "int64" if step == "axes" else "float"
            array = np.asarray(value, np.int64 if step == "axes" else np.float32)
            self._values[names[step]] = tensor = onnx.numpy_helper.from_array(array)
            self.tensors[names[step]] = TensorInfo(names[step], dtype, array.shape)
            self._append(onnx.helper.make_node("Constant", [], [names[step]], value=tensor))
        for op_type, inputs, step, *attributes in rows:
            if step:
                shape = () if step == "whole" else None if step in _OF_CONSTANTS else self._model.info(out).shape
                dtype = "bool" if op_type == "Greater" else "float"
                self.tensors[names[step]] = TensorInfo(names[step], dtype, shape)
            more = attributes[0] if attributes else {}
            proto = onnx.helper.make_node(op_type, [names[i] for i in inputs], [names[step]], **more)
            self._append(proto, "" if step else node.name, rounds=step not in _UNROUNDED)
        self.parts[node.name] = tuple(n.name for n in self.nodes[before:] if n.op_type != "Constant")
        return names

    def _append(self, proto: onnx.NodeProto, name: str = "", *, rounds: bool = True) -> None:
        proto.name = name or proto.output[0]
        inputs, outputs = tuple(proto.input), tuple(proto.output)
        self.nodes.append(Node(-1, proto.name, proto.op_type, proto.domain, inputs, outputs, (), proto, rounds))


def with_rounding_steps(
    grouped: GroupedModel, fused: Sequence[FusedNodes] = (), precisions: Sequence[str] = REDUCED
) -> GroupedModel:
    """The model with biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes.

    Nodes that are computed together with their readers get ``rounds=False``. ``precisions`` are those that plans have.

    Returns:
        A model that computes the same in FP32 and takes the same plans, and its groups. ``proto`` stays the model's.
    """
    model, steps = grouped.model, Steps(grouped, precisions)
    merged, inside = merged_with_scales(grouped), steps_inside(fused)
    for node in model.nodes:
        if node.name in inside:
            steps.nodes.append(node)
        else:
            steps.add(replace(node, rounds=False) if node.name in merged else node)
    nodes = tuple(replace(node, index=index) for index, node in enumerate(steps.nodes))
    written_out = replace(
        model,
        nodes=nodes,
        tensors={**model.tensors, **steps.tensors},
        initializers={**model.initializers, **steps.constants(nodes)},
        producer={out: node.index for node in nodes for out in node.outputs if out},
        consumers=consumers_of(nodes),
    )
    groups = tuple(
        replace(group, nodes=tuple(n for name in group.nodes for n in steps.parts.get(name, (name,))))
        for group in grouped.groups
    )
    return GroupedModel(written_out, groups, grouped)
