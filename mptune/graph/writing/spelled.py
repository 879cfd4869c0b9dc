"""A model in the steps after which ONNX Runtime's CUDA provider rounds to FP16, for its emulation.

Measured on an H200 (ResNet-50, groups alone in FP16): a convolution's result is rounded before the bias is added and
again after, a mean over the last axes before the division and again after. Emulated with one rounding each, the errors
of these groups are 0.88 (median of 53 convolutions) and 0.71 of the measured ones; written out, 1.00 both. A product
and its scales are one step (``mptune.graph.writing.scales``). TensorRT adds the bias before it rounds, so that its
emulation takes the model as it is.
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
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.loading.model import Model, Node, consumers_of
from mptune.graph.loading.tensors import Initializer, TensorInfo, make_initializer
from mptune.graph.writing.scales import merged_with_scales

_AXES_ARE_INPUTS = {"Unsqueeze": 13, "ReduceSum": 13, "ReduceMean": 18}
"""Operator -> the first operator set in which its axes are an input, not an attribute."""


def spell_out(model: Model, groups: Sequence[LayerGroup]) -> tuple[Model, tuple[LayerGroup, ...]]:
    """Write out biases of convolutions and divisions of means as nodes of their own, in the groups of their nodes, and
    say which nodes are computed together with their readers.

    Args:
        model: the model.
        groups: all of them.

    Returns:
        A model that computes the same in FP32 and takes the same plans, and its groups. ``proto`` stays the model's.
    """
    writing = _Writing(model)
    merged = merged_with_scales(model, groups)
    for node in model.nodes:
        writing.add(replace(node, rounds=False) if node.name in merged else node)
    nodes = tuple(replace(node, index=index) for index, node in enumerate(writing.nodes))
    spelled = replace(
        model,
        nodes=nodes,
        tensors={**model.tensors, **writing.tensors},
        initializers={**model.initializers, **writing.constants(nodes)},
        producer={out: node.index for node in nodes for out in node.outputs if out},
        consumers=consumers_of(nodes),
    )
    return spelled, tuple(
        replace(group, nodes=tuple(n for name in group.nodes for n in writing.parts.get(name, (name,))))
        for group in groups
    )


class _Writing:
    """The nodes so far."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._suffix = {kind: new_suffix(model, kind) for kind in ("unrounded", "axes", "column", "count", "step")}
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
