"""Appends nodes and outputs to an observing graph, under new names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import ONNX_TYPES
from mptune.graph.plan import Precision

_FLOAT = onnx.TensorProto.FLOAT
_AXES_OF_SUM_SINCE = 13
_AXES_OF_OTHERS_SINCE = 18
"""Operator sets from which ReduceSum, and the other reductions, take their axes as an input."""
_EQUAL_OF_FLOATS_SINCE = 11


class ProbeBuilder:
    """Appends nodes whose names are new."""

    def __init__(self, graph: onnx.GraphProto, opset: int, suffix: str) -> None:
        self._graph = graph
        self._opset = opset
        self._suffix = suffix
        self._count = 0
        self._name, self.precision = "tap", Precision.FP16
        self._known: dict[tuple[float, str], str] = {}
        self._added: dict[tuple[str, tuple[str, ...], str], str] = {}
        self._rounded: dict[tuple[str, Precision], str] = {}
        self._given: set[str] = set()
        self.recomputed: dict[tuple[str, int, Precision], str] = {}

    def start(self, name: str, precision: Precision) -> None:
        """Begin a probe: new names start with its name, and values are rounded to its precision."""
        self._name, self.precision = name, precision

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node unless the same one is there, as probes share what they ask; the name of its output."""
        key = op, inputs, repr(sorted(attributes.items()))
        if key not in self._added:
            name = self._added[key] = f"{self._name}.{self._count}{self._suffix}"
            self._count += 1
            self._graph.node.append(onnx.helper.make_node(op, inputs, [name], name=name, **attributes))
        return self._added[key]

    def again(self, node: Node, *inputs: str) -> str:
        """The same operator on other inputs; the name of its first output."""
        copied = onnx.NodeProto()
        copied.CopyFrom(node.proto)
        names = [f"{self._name}.{self._count}.{k}{self._suffix}" for k in range(len(node.outputs))]
        self._count += 1
        del copied.input[:], copied.output[:]
        copied.input.extend(inputs)
        copied.output.extend(names)
        copied.name = names[0]
        self._graph.node.append(copied)
        return names[0]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """The name of a constant, which is there once."""
        key = (float(value) if np.ndim(value) == 0 else hash(tuple(value)), str(np.dtype(dtype)) + str(np.ndim(value)))
        if key not in self._known:
            self._known[key] = f"probe.{len(self._known)}{self._suffix}"
            array = np.asarray(value, dtype)
            self._graph.initializer.append(onnx.numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def reduce(self, op: str, value: str, axes: tuple[int, ...] = (), keepdims: int = 0) -> str:
        """Reduce over some axes, or over all."""
        if not axes:
            return self.add(op, value, keepdims=keepdims)
        if self._opset >= (_AXES_OF_SUM_SINCE if op == "ReduceSum" else _AXES_OF_OTHERS_SINCE):
            return self.add(op, value, self.constant(axes, np.int64), keepdims=keepdims)
        return self.add(op, value, keepdims=keepdims, axes=list(axes))

    def rounded(self, value: str) -> str:
        """A value rounded to the precision of the probe and back."""
        key = value, self.precision
        if key not in self._rounded:
            reduced = self.add("Cast", value, to=ONNX_TYPES[self.precision])
            self._rounded[key] = self.add("Cast", reduced, to=_FLOAT)
        return self._rounded[key]

    def flat(self, value: str, end: float) -> str:
        """All elements in one axis, and one more, so that there is one where a value has none."""
        row = self.add("Reshape", value, self.constant((-1,), np.int64))
        return self.add("Concat", row, self.constant((end,)), axis=0)

    def mean_square(self, value: str) -> str:
        """Mean of the squares of all elements."""
        return self.reduce("ReduceMean", self.add("Mul", value, value))

    def equal(self, first: str, second: str) -> str:
        """Where two values are equal; NaN, and infinities, may count as either."""
        if self._opset >= _EQUAL_OF_FLOATS_SINCE:
            return self.add("Equal", first, second)
        apart = self.add("Abs", self.add("Sub", first, second))
        return self.add("Not", self.add("Greater", apart, self.constant(0.0)))

    def give(self, value: str, shape: Sequence[None] = (), code: int = _FLOAT) -> str:
        """Make a value an output of the graph, once: two probes may have an answer in common."""
        if value not in self._given:
            self._given.add(value)
            self._graph.output.append(onnx.helper.make_tensor_value_info(value, code, shape))
        return value

    def give_shape(self, value: str) -> str:
        """Make the shape of a value, int64 [rank], an output of the graph."""
        return self.give(self.add("Shape", value), [None], onnx.TensorProto.INT64)

    def count(self, truth: str) -> str:
        """How many elements are true."""
        return self.reduce("ReduceSum", self.add("Cast", truth, to=_FLOAT))

    def size(self, value: str) -> str:
        """How many elements there are."""
        return self.add("Cast", self.add("Size", value), to=_FLOAT)
