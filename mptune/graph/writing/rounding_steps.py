"""A model written out in the steps after which ONNX Runtime's CUDA provider rounds to FP16, for its emulation.

Measured on an H200 (ResNet-50, groups alone in FP16): a convolution's result is rounded before the bias is added and
again after, a mean over the last axes before the division and again after. Emulated with one rounding each, the errors
of these groups are 0.88 (median of 53 convolutions) and 0.71 of the measured ones; written out, 1.00 both. TensorRT
adds the bias before it rounds, so its emulation takes the model as it is.

A matrix product and its scales are computed in one step, without a rounding in between: ``MatMul(q, k) * 0.125`` is one
product with a factor, and so are scales in front of it, and several in a row
(``onnxruntime/core/optimizer/matmul_scale_fusion.cc``). Measured on an H200 (a flow network, groups alone in FP16, 256
rows): with roundings in between, the errors of two correlations were emulated 1.21 and 1.17 times too large, without
them at 0.94 and 1.00 of the measured ones; those of four attention cores are within 1.2 %, and were within 2.2 %.

A GELU that is written out with an Erf becomes one kernel, which multiplies by FP16's nearest value to the root of 0.5
where the model divides by the root of 2 (``onnxruntime/core/optimizer/gelu_fusion.cc``; ``benchmarks.roundings`` on an
H200: all values are those of the formula). FP16's 1.4141 is 1e-4 too small, its 0.7071 too, so with a division each
value that goes into the Erf would be 2e-4 larger.
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

from mptune.graph.casting.value_types import new_suffix
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Model, Node, consumers_of
from mptune.graph.loading.tensors import Initializer, TensorInfo, make_initializer

_AXES_ARE_INPUTS = {"Unsqueeze": 13, "ReduceSum": 13, "ReduceMean": 18}
"""Operator -> the first operator set in which its axes are an input, not an attribute."""

_NEARLY = 1e-3
"""Relative difference of a constant that was written with few digits, or in FP16."""


def with_rounding_steps(grouped: GroupedModel) -> GroupedModel:
    """The model with biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes.

    Nodes that are computed together with their readers get ``rounds=False``.

    Args:
        grouped: the model and its groups.

    Returns:
        A model that computes the same in FP32 and takes the same plans, and its groups. ``proto`` stays the model's.
    """
    model = grouped.model
    steps = _Steps(model, _divisions_of_gelus(grouped))
    merged = merged_with_scales(grouped)
    for node in model.nodes:
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
    return GroupedModel(written_out, groups)


class _Steps:
    """The nodes of the model that is written, so far."""

    def __init__(self, model: Model, roots: frozenset[str]) -> None:
        self._model = model
        self._roots = roots
        kinds = ("unrounded", "axes", "column", "count", "step", "root")
        self._suffix = {kind: new_suffix(model, kind) for kind in kinds}
        self.nodes: list[Node] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.parts: dict[str, tuple[str, ...]] = {}
        """Node that was written out -> the nodes that it became."""
        self._values: dict[str, onnx.TensorProto] = {}

    def add(self, node: Node) -> None:
        """Take a node, written out where the provider rounds in its midst."""
        before = len(self.nodes)
        if node.is_standard and node.op_type in ("Conv", "ConvTranspose"):
            self._convolution(node)
        elif node.is_standard and node.op_type == "ReduceMean":
            self._mean(node)
        elif node.name in self._roots:
            self._times_root_of_half(node)
        if len(self.nodes) == before:
            self.nodes.append(node)
        else:
            self.parts[node.name] = tuple(n.name for n in self.nodes[before:] if n.op_type != "Constant")

    def constants(self, nodes: Sequence[Node]) -> dict[str, Initializer]:
        """The constants among ``nodes``, the new ones and those of the model where they stand now."""
        found = {}
        for node in nodes:
            name = node.outputs[0] if node.outputs else ""
            if name in self._values:
                found[name] = make_initializer(name, self._values[name], self._model.path, node_index=node.index)
            elif node.op_type == "Constant" and name in self._model.initializers:
                found[name] = replace(self._model.initializers[name], node_index=node.index)
        return found

    def _convolution(self, node: Node) -> None:
        """``Conv(x, w, b)`` as ``Conv(x, w) + b``."""
        (out,) = node.outputs
        rank = self._rank(out) or self._rank(node.inputs[1])
        if len(node.inputs) < 3 or not node.inputs[2] or rank is None or not self._model.info(out).is_float32:
            return
        bias = node.inputs[2]
        raw, column = out + self._suffix["unrounded"], out + self._suffix["column"]
        self._tensor(raw, self._model.info(out).shape)
        self._tensor(column, None)
        self._reshaping("Unsqueeze", bias, column, range(1, rank - 1))
        proto = onnx.NodeProto()
        proto.CopyFrom(node.proto)
        proto.input[:], proto.output[:] = node.inputs[:2], [raw]
        self._append(proto)
        self._append(onnx.helper.make_node("Add", [raw, column], [out]), node.name)

    def _mean(self, node: Node) -> None:
        """``ReduceMean(x)`` over the last axes as ``ReduceSum(x) / count``."""
        x, (out,) = node.inputs[0], node.outputs
        shape, axes = self._model.info(x).shape, self._axes(node)
        if shape is None or not axes or not self._model.info(out).is_float32:
            return
        axes = sorted(axis % len(shape) for axis in axes)
        sizes = [size for size in shape[axes[0] :] if isinstance(size, int)]
        if not axes[0] > 0 or axes != list(range(axes[0], len(shape))) or len(sizes) < len(axes):
            return
        keep = next((a.i for a in node.proto.attribute if a.name == "keepdims"), 1)
        raw, count = out + self._suffix["unrounded"], out + self._suffix["count"]
        self._tensor(raw, self._model.info(out).shape)
        self._reshaping("ReduceSum", x, raw, axes, keepdims=keep)
        self._constant(count, np.array(math.prod(sizes), np.float32))
        self._append(onnx.helper.make_node("Div", [raw, count], [out]), node.name)

    def _times_root_of_half(self, node: Node) -> None:
        """``x / sqrt(2)`` as ``x * sqrt(0.5)``."""
        root = node.outputs[0] + self._suffix["root"]
        shape = self._model.initializers[node.inputs[1]].shape
        self._constant(root, np.full(shape, math.sqrt(0.5), np.float32))
        self._append(onnx.helper.make_node("Mul", [node.inputs[0], root], node.outputs), node.name)

    def _axes(self, node: Node) -> list[int]:
        """The axes of a reduction; none where they are all, or not known."""
        if len(node.inputs) < 2:
            return next((list(a.ints) for a in node.proto.attribute if a.name == "axes"), [])
        known = self._model.initializers.get(node.inputs[1])
        return [] if known is None else [int(axis) for axis in known.numpy().ravel()]

    def _rank(self, tensor: str) -> int | None:
        shape = self._model.info(tensor).shape
        return None if shape is None else len(shape)

    def _tensor(self, name: str, shape: tuple[int | str | None, ...] | None) -> None:
        self.tensors[name] = TensorInfo(name, "float", shape)

    def _constant(self, name: str, value: np.ndarray) -> None:
        self._values[name] = onnx.numpy_helper.from_array(value)
        self.tensors[name] = TensorInfo(name, "float" if value.dtype == np.float32 else "int64", value.shape)
        self._append(onnx.helper.make_node("Constant", [], [name], value=self._values[name]))

    def _reshaping(self, op_type: str, x: str, out: str, axes: Sequence[int], **attributes: Any) -> None:
        """An operator with axes, which later operator sets read as an input."""
        if self._model.opset < _AXES_ARE_INPUTS[op_type]:
            self._append(onnx.helper.make_node(op_type, [x], [out], axes=list(axes), **attributes))
            return
        self._constant(out + self._suffix["axes"], np.array(axes, np.int64))
        self._append(onnx.helper.make_node(op_type, [x, out + self._suffix["axes"]], [out], **attributes))

    def _append(self, proto: onnx.NodeProto, name: str = "") -> None:
        proto.name = name or proto.output[0] + self._suffix["step"]
        self.nodes.append(
            Node(-1, proto.name, proto.op_type, proto.domain, tuple(proto.input), tuple(proto.output), (), proto)
        )


def _divisions_of_gelus(grouped: GroupedModel) -> frozenset[str]:
    """The names of the divisions by the root of 2 that begin a GELU: ``x / sqrt(2)``, its Erf, and that plus one.

    All are of one group: a plan may put a Cast between groups.
    """
    look, owners = Lookup(grouped.model), grouped.owners
    found: set[str] = set()
    for erf in grouped.model.nodes:
        if not erf.is_standard or erf.op_type != "Erf":
            continue
        division, after = look.producer(erf.inputs[0]), look.only_reader(erf)
        if division is None or after is None or look.only_reader(division) is not erf:
            continue
        if len(division.inputs) != 2 or division.inputs[1] not in grouped.model.initializers:
            continue
        nodes = (division, erf, after)
        if [node.op_type for node in nodes] != ["Div", "Erf", "Add"] or not all(n.is_standard for n in nodes):
            continue
        is_gelu = _is(look, division.inputs[1], math.sqrt(2.0)) and _is(look, look.other(after, erf.outputs[0]), 1.0)
        if is_gelu and owners.get(erf.name) and len({owners.get(node.name) for node in nodes}) == 1:
            found.add(division.name)
    return frozenset(found)


def _is(look: Lookup, constant: str, value: float) -> bool:
    number = look.number(constant)
    return number is not None and math.isclose(number, value, rel_tol=_NEARLY)


def merged_with_scales(grouped: GroupedModel) -> frozenset[str]:
    """The names of nodes whose result is only an intermediate one of a product with its scales.

    Those of another group than their reader are not among them: a plan may put a Cast between the two.
    """
    return _Merging(grouped).found()


class _Merging:
    def __init__(self, grouped: GroupedModel) -> None:
        self._model = grouped.model
        self._look = Lookup(grouped.model)
        self._owners = grouped.owners

    def found(self) -> frozenset[str]:
        products: set[str] = set()  # and the scales behind them
        ahead: set[str] = set()  # scales in front of products
        merged: set[str] = set()
        for node in self._model.nodes:
            if node.name in products or _is_product(node):
                reader = self._reader(node)
                if reader is not None and self._scaled(reader) == node.outputs[0]:
                    products.add(reader.name)
                    merged.add(node.name)
        for node in reversed(self._model.nodes):
            if node.name not in products and self._scaled(node):
                reader = self._reader(node)
                if reader is not None and (_is_product(reader) or reader.name in ahead):
                    ahead.add(node.name)
                    merged.add(node.name)
        return frozenset(merged)

    def _reader(self, node: Node) -> Node | None:
        """The one node of the same group that reads the result, where nothing else does."""
        (out,) = node.outputs
        reader = self._look.only_reader(node)
        if reader is None or self._model.consumers[out] != (reader.index,) or not self._model.info(out).is_float32:
            return None
        together = node.name in self._owners and self._owners.get(reader.name) == self._owners[node.name]
        return reader if together and reader.inputs.count(out) == 1 else None

    def _scaled(self, node: Node) -> str | None:
        """What a node multiplies by, or divides by, one constant number."""
        if not node.is_standard or node.op_type not in ("Mul", "Div"):
            return None
        for value, scale in (node.inputs, node.inputs[::-1])[: 1 if node.op_type == "Div" else 2]:
            constant, shape = self._model.initializers.get(scale), self._model.info(value).shape
            if constant is None or not self._look.is_scalar(scale) or not shape or value in self._model.initializers:
                continue
            if len(constant.shape) <= len(shape):
                return value
        return None


def _is_product(node: Node) -> bool:
    return node.is_standard and node.op_type == "MatMul"
