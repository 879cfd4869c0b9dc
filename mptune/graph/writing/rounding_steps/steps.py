"""The nodes of a model with a node for each step after which the provider rounds."""

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
from mptune.graph.grouping.lookup import reduced_axes
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import Initializer, TensorInfo, make_initializer

_AXES_ARE_INPUTS = {"Unsqueeze": 13, "ReduceSum": 13, "ReduceMean": 18}
"""Operator -> the first operator set in which its axes are an input, not an attribute."""

_WHERE_HAS_BF16 = 16
"""The first operator set in which Where has BFLOAT16."""

_EPSILON_STEPS = ("tiny", "large", "whole_one", "more", "partly", "wide", "narrow", "added", "taken")
_SIGMOID_STEPS = ("size", "exponent", "power", "sum", "large", "small", "positive", "stepwise", "whole")

_ROUNDED_BY_BOTH, _ROUNDED_BY_BF16 = 1.0 + 2.0**-12, 1.0 + 2.0**-9
"""Which precisions round them to 1: FP16 has 11 bits, BF16 8."""


class Steps:
    """The nodes of the model that is written, so far."""

    def __init__(self, model: Model, roots: frozenset[str], silus: frozenset[str]) -> None:
        self._model = model
        self._roots = roots
        self._silus = silus
        kinds = ("unrounded", "axes", "column", "count", "step", "root", "one", "zero", "mark", "kept", *_SIGMOID_STEPS)
        self._suffix = {kind: new_suffix(model, kind) for kind in (*kinds, *_EPSILON_STEPS)}
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
        elif node.is_standard and node.op_type == "Sigmoid":
            self._sigmoid(node)
        elif node.name in self._roots:
            self._times_root_of_half(node)
        if len(self.nodes) == before:
            self.nodes.append(node)
        else:
            self.parts[node.name] = tuple(n.name for n in self.nodes[before:] if n.op_type != "Constant")

    def constants(self, nodes: Sequence[Node]) -> dict[str, Initializer]:
        """The constants among ``nodes``, the new ones and those of the model where they stand now."""
        initializers = {}
        for node in nodes:
            name = node.outputs[0] if node.outputs else ""
            if name in self._values:
                initializers[name] = make_initializer(name, self._values[name], self._model.path, node_index=node.index)
            elif node.op_type == "Constant" and name in self._model.initializers:
                initializers[name] = replace(self._model.initializers[name], node_index=node.index)
        return initializers

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
        shape = self._model.info(x).shape
        axes = reduced_axes(self._model, node, len(shape or ()))
        if shape is None or not axes or not self._model.info(out).is_float32:
            return
        sizes = [size for size in shape[axes[0] :] if isinstance(size, int)]
        if not axes[0] > 0 or axes != tuple(range(axes[0], len(shape))) or len(sizes) < len(axes):
            return
        keep = next((a.i for a in node.proto.attribute if a.name == "keepdims"), 1)
        raw, count = out + self._suffix["unrounded"], out + self._suffix["count"]
        self._tensor(raw, self._model.info(out).shape)
        self._reshaping("ReduceSum", x, raw, axes, keepdims=keep)
        self._constant(count, np.array(math.prod(sizes), np.float32))
        self._append(onnx.helper.make_node("Div", [raw, count], [out]), node.name)

    def _sigmoid(self, node: Node) -> None:
        """``Sigmoid(x)`` in steps, taken where the precision is one whose kernel rounds after each of them.

        That is seen by a constant near 1, which such a precision rounds to 1: in FP32 the sigmoid stays as it is.
        """
        x, (out,) = node.inputs[0], node.outputs
        if self._model.opset < _WHERE_HAS_BF16 or not self._model.info(out).is_float32:
            return
        shape = self._model.info(out).shape
        unit, zero, mark, kept = (out + self._suffix[kind] for kind in ("one", "zero", "mark", "kept"))
        name = {step: out + self._suffix[step] for step in _SIGMOID_STEPS}
        self._constant(unit, np.array(1.0, np.float32))
        self._constant(zero, np.array(0.0, np.float32))
        rounded = _ROUNDED_BY_BOTH if node.name in self._silus else _ROUNDED_BY_BF16
        self._constant(mark, np.array(rounded, np.float32))
        for op_type, inputs, step in (
            ("Abs", (x,), "size"),
            ("Neg", (name["size"],), "exponent"),
            ("Exp", (name["exponent"],), "power"),
            ("Add", (name["power"], unit), "sum"),
            ("Div", (unit, name["sum"]), "large"),
            ("Sub", (unit, name["large"]), "small"),
            ("Greater", (x, zero), "positive"),
            ("Where", (name["positive"], name["large"], name["small"]), "stepwise"),
            ("Greater", (mark, unit), "whole"),
        ):
            self.tensors[name[step]] = TensorInfo(
                name[step],
                "bool" if op_type == "Greater" else "float",
                () if step == "whole" else shape,
            )
            self._append(onnx.helper.make_node(op_type, inputs, [name[step]]))
        self._tensor(kept, shape)
        self._append(onnx.helper.make_node("Sigmoid", [x], [kept]))
        self._append(onnx.helper.make_node("Where", [name["whole"], kept, name["stepwise"]], [out]), node.name)

    def add_with_epsilon(self, node: Node, slot: int, epsilon: float) -> None:
        """Take the node of a norm that adds its epsilon, with another one in FP16.

        A constant that is zero in FP16 alone tells where the norm is FP16.
        """
        own, before = node.inputs[slot], len(self.nodes)
        name = {step: own + node.outputs[0] + self._suffix[step] for step in _EPSILON_STEPS}
        in_fp16 = float(np.float16(self._model.initializers[own].numpy().reshape(-1)[0]))
        for constant, value in (
            ("tiny", 2.0**-30),
            ("large", 2.0**15),
            ("whole_one", 1.0),
            ("more", epsilon - in_fp16),
        ):
            self._constant(name[constant], np.array(value, np.float32))
        name["own"] = own
        for op_type, inputs, step in (
            ("Mul", ("tiny", "large"), "partly"),
            ("Mul", ("partly", "large"), "wide"),
            ("Sub", ("whole_one", "wide"), "narrow"),
            ("Mul", ("more", "narrow"), "added"),
            ("Add", ("own", "added"), "taken"),
        ):
            self._tensor(name[step], ())
            self._append(onnx.helper.make_node(op_type, [name[i] for i in inputs], [name[step]]), rounds=False)
        proto = onnx.NodeProto()
        proto.CopyFrom(node.proto)
        proto.input[slot] = name["taken"]
        self._append(proto, node.name)
        self.parts[node.name] = tuple(n.name for n in self.nodes[before:] if n.op_type != "Constant")

    def _times_root_of_half(self, node: Node) -> None:
        """``x / sqrt(2)`` as ``x * sqrt(0.5)``."""
        root = node.outputs[0] + self._suffix["root"]
        shape = self._model.initializers[node.inputs[1]].shape
        self._constant(root, np.full(shape, math.sqrt(0.5), np.float32))
        self._append(onnx.helper.make_node("Mul", [node.inputs[0], root], node.outputs), node.name)

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

    def _append(self, proto: onnx.NodeProto, name: str = "", *, rounds: bool = True) -> None:
        proto.name = name or proto.output[0] + self._suffix["step"]
        inputs, outputs = tuple(proto.input), tuple(proto.output)
        self.nodes.append(Node(-1, proto.name, proto.op_type, proto.domain, inputs, outputs, (), proto, rounds))
