"""The nodes that answer a probe inside the observing graph: scalars per sample, so that no value leaves the graph.

The facts of each kind (all FP32 scalars unless said otherwise; "rounded" means to FP16 or BF16 and back):

- sum: ``first``, ``second``, ``result``: mean squares of the operands and the result; ``error``: mean square of what
  rounding the operands does to the result; ``first_steps``, ``second_steps``: elements where that operand is not zero
  and the other, rounded, is finite and not zero; ``first_lost``, ``second_lost``: those of them where the rounded sum
  is the other operand.
- softmax, largest, top: ``rows``; ``moved``: of softmax, the sum over the rows of the total variation distance between
  the weights of rounded and of exact values; else the rows (or chosen places) that rounding decides otherwise;
  ``magnitude``: largest of a row's extreme; ``gap``: mean distance of the extreme from the next value.
- comparison: ``rows``: elements; ``moved``: those whose answer rounding changes; ``magnitude``; ``gap``: mean distance.
- periodic: ``rows``: elements; ``moved``: those whose sine or cosine rounding the angle changes by more than 0.1;
  ``magnitude``.
- grid: ``rows``: coordinates; ``moved``: those that rounding moves by more than a quarter of a pixel; ``magnitude``.
- guard: ``smallest``: smallest magnitude that the constant is added to, or bounds.
- pole: ``values``: elements of the operand that are not zero (of Log, Sqrt and Pow: above zero); ``lost``: those of
  them that are zero (or below) where the operand is computed of rounded values; ``vanished``: those of them that
  rounding alone makes zero; ``smallest``: smallest magnitude of those that are lost, infinite where none is.
- variance: ``smallest``: of the variances per sample and channel.
- batch-norm: ``mean``: of the data, [channels].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.graph.grouping.lookup import attribute
from mptune.graph.hazards.masked_rows import softmax_rows
from mptune.graph.hazards.probes import Probe, ProbeKind, find_probes
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import ONNX_TYPES
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision

_FLOAT = onnx.TensorProto.FLOAT
_BF16_SINCE = 13
"""Operator set from which Cast has BFLOAT16."""
_AXES_OF_SUM_SINCE = 13
_AXES_OF_OTHERS_SINCE = 18
"""Operator sets from which ReduceSum, and the other reductions, take their axes as an input."""

_POLE_DEPTH = 4
"""So many operators before a pole are computed again: a variance is subtracted, clipped, and an epsilon is added."""
_LEAST: Mapping[Precision, float] = {Precision.FP16: 1e-30, Precision.BF16: 1e-38}
"""Each has no value between zero and this one; BF16 subnormal ones, which engines take for zero."""
_FAR_OFF, _PIXELS_OFF = 0.1, 0.25
"""What rounding an angle changes of its sine, and a coordinate of a place in an image, to be counted."""
_RECOMPUTED = frozenset({"Add", "Sub", "Mul", "Neg", "Abs", "Sqrt", "Max", "Min", "Clip", "Identity"})


@dataclass(frozen=True)
class ProbeTap:
    """The names of the outputs that answer one probe.

    Attributes:
        kind: what is asked.
        node: name of the node.
        key: the value that the answer is filed under.
        outputs: fact -> scalar output.
        vectors: fact -> output of rank 1.
        precision: that operands are rounded to, where they are.
    """

    kind: ProbeKind
    node: str
    key: str
    outputs: Mapping[str, str] = field(hash=False)
    vectors: Mapping[str, str] = field(default_factory=dict, hash=False)
    precision: Precision = Precision.FP16


def add_probes(
    graph: onnx.GraphProto, model: Model, suffix: str, precisions: Sequence[str] = DEFAULT_PRECISIONS
) -> tuple[ProbeTap, ...]:
    """Append the nodes that answer the model's probes, and their outputs, to the observing graph.

    Args:
        graph: of the model, which is added to.
        model: the model.
        suffix: ends every new name.
        precisions: that groups may have; BF16 is asked about from the operator set on in which Cast has it.
    """
    build, rows = _Builder(graph, model.opset, suffix), softmax_rows(model)
    if model.opset < _BF16_SINCE:
        precisions = [precision for precision in precisions if precision != Precision.BF16]
    taps = []
    for probe in find_probes(model, precisions):
        node = model.nodes[probe.node]
        build.start(f"{probe.kind}.{probe.node}.{probe.precision}", probe.precision)
        facts, vectors = _answer(build, probe, node, model, rows)
        if facts or vectors:
            graph.output.extend(onnx.helper.make_tensor_value_info(name, _FLOAT, []) for name in facts.values())
            graph.output.extend(onnx.helper.make_tensor_value_info(name, _FLOAT, [None]) for name in vectors.values())
            taps.append(ProbeTap(probe.kind, node.name, probe.key, facts, vectors, probe.precision))
    return tuple(taps)


_Answer = tuple[dict[str, str], dict[str, str]]


class _Builder:
    """Appends nodes whose names are new."""

    def __init__(self, graph: onnx.GraphProto, opset: int, suffix: str) -> None:
        self._graph = graph
        self._opset = opset
        self._suffix = suffix
        self._count = 0
        self._name, self.precision = "", Precision.FP16
        self._known: dict[tuple[float, str], str] = {}
        self._rounded: dict[tuple[str, Precision], str] = {}
        self.recomputed: dict[tuple[str, int, Precision], str] = {}

    def start(self, name: str, precision: Precision) -> None:
        self._name, self.precision = name, precision

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{self._name}.{self._count}.{k}{self._suffix}" for k in range(outputs)]
        self._count += 1
        self._graph.node.append(onnx.helper.make_node(op, inputs, names, name=names[0], **attributes))
        return names[-1]

    def again(self, node: Node, *inputs: str, output: int = 0) -> str:
        """The same operator on other inputs; the name of one of its outputs."""
        copied = onnx.NodeProto()
        copied.CopyFrom(node.proto)
        names = [f"{self._name}.{self._count}.{k}{self._suffix}" for k in range(max(len(node.outputs), output + 1))]
        self._count += 1
        del copied.input[:], copied.output[:]
        copied.input.extend(inputs)
        copied.output.extend(names)
        copied.name = names[0]
        self._graph.node.append(copied)
        return names[output]

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        key = (float(value) if np.ndim(value) == 0 else hash(tuple(value)), str(np.dtype(dtype)) + str(np.ndim(value)))
        if key not in self._known:
            self._known[key] = f"probe.{len(self._known)}{self._suffix}"
            array = np.asarray(value, dtype)
            self._graph.initializer.append(onnx.numpy_helper.from_array(array, self._known[key]))
        return self._known[key]

    def reduce(self, op: str, value: str, axes: tuple[int, ...] = (), keepdims: int = 0) -> str:
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
        return self.reduce("ReduceMean", self.add("Mul", value, value))

    def count(self, truth: str) -> str:
        return self.reduce("ReduceSum", self.add("Cast", truth, to=_FLOAT))

    def size(self, value: str) -> str:
        return self.add("Cast", self.add("Size", value), to=_FLOAT)


def _answer(build: _Builder, probe: Probe, node: Node, model: Model, rows: Mapping[str, tuple[int, ...]]) -> _Answer:
    match probe.kind:
        case "sum":
            return _sum(build, node), {}
        case "guard":
            return {"smallest": build.reduce("ReduceMin", build.add("Abs", probe.value))}, {}
        case "pole":
            return _pole(build, node, probe.value, model), {}
        case "variance":
            return {"smallest": _smallest_variance(build, probe.value, len(model.info(probe.value).shape or ()))}, {}
        case "batch-norm":
            rank = len(model.info(probe.value).shape or ())
            return {}, {"mean": build.reduce("ReduceMean", probe.value, (0, *range(2, rank)))}
        case "comparison":
            return _comparison(build, node), {}
        case "periodic":
            return _periodic(build, node), {}
        case "grid":
            return _grid(build, node), {}
        case "softmax":
            axes = rows.get(node.inputs[0], ())
            return (_softmax(build, node, axes) if axes else {}), {}
        case "largest":
            stated = attribute(node, "axis")
            return _largest(build, node, stated if isinstance(stated, int) else 0), {}
        case "top":
            stated = attribute(node, "axis")
            return _top(build, node, stated if isinstance(stated, int) else -1), {}


def _sum(build: _Builder, node: Node) -> dict[str, str]:
    first, second, result = node.inputs[0], node.inputs[1], node.outputs[0]
    a, b = build.rounded(first), build.rounded(second)
    exact = build.add(node.op_type, a, b)
    total = build.rounded(exact)
    zero, infinity = build.constant(0.0), build.constant(np.inf)
    sizes = {a: build.add("Abs", a), b: build.add("Abs", b)}
    facts = {
        "first": build.mean_square(first),
        "second": build.mean_square(second),
        "result": build.mean_square(result),
        "error": build.mean_square(build.add("Sub", exact, result)),
    }
    for name, step, base, kept in (
        ("first", first, b, b if node.op_type == "Add" else build.add("Neg", b)),
        ("second", second, a, a),
    ):
        moves = build.add("Greater", build.add("Abs", step), zero)
        is_base = build.add("And", build.add("Greater", sizes[base], zero), build.add("Less", sizes[base], infinity))
        steps = build.add("And", moves, is_base)
        differs = build.add("Greater", build.add("Abs", build.add("Sub", total, kept)), zero)
        facts[f"{name}_steps"] = build.count(steps)
        facts[f"{name}_lost"] = build.count(build.add("And", steps, build.add("Not", differs)))
    return facts


def _pole(build: _Builder, node: Node, value: str, model: Model) -> dict[str, str]:
    zero, infinity = build.constant(0.0), build.constant(np.inf)
    rounded = _recomputed(build, value, model, _POLE_DEPTH)
    size = build.add("Abs", value)
    before, after, alone = value, rounded, build.rounded(value)
    if node.op_type in ("Div", "Reciprocal"):
        before, after, alone = size, build.add("Abs", rounded), build.add("Abs", alone)
    stands = build.add("Greater", before, zero)
    # NaN is below neither limit: it was made before.
    limit = zero if node.op_type == "Sqrt" else build.constant(_LEAST[build.precision])
    lost = build.add("And", stands, build.add("Less", after, limit))
    gone = build.add("And", lost, build.add("Less", alone, limit))
    return {
        "values": build.count(stands),
        "lost": build.count(lost),
        "vanished": build.count(gone),
        "smallest": build.reduce("ReduceMin", build.flat(build.add("Where", lost, size, infinity), np.inf)),
    }


def _recomputed(build: _Builder, value: str, model: Model, depth: int) -> str:
    """A value as FP16 or BF16 computes it of what the last operators before it read, rounded; reductions as seen."""
    index = model.producer.get(value)
    node = None if index is None else model.nodes[index]
    known = node is not None and node.is_standard and node.op_type in _RECOMPUTED and node.outputs[0] == value
    if node is None or not known or depth == 0 or not all(i and model.info(i).is_float32 for i in node.inputs):
        return build.rounded(value)
    key = value, depth, build.precision
    if key not in build.recomputed:
        operands = [_recomputed(build, i, model, depth - 1) for i in node.inputs]
        build.recomputed[key] = build.rounded(build.again(node, *operands))
    return build.recomputed[key]


def _smallest_variance(build: _Builder, value: str, rank: int) -> str:
    axes = tuple(range(2, rank))
    centred = build.add("Sub", value, build.reduce("ReduceMean", value, axes, keepdims=1))
    return build.reduce("ReduceMin", build.reduce("ReduceMean", build.add("Mul", centred, centred), axes))


def _comparison(build: _Builder, node: Node) -> dict[str, str]:
    first, second = node.inputs[:2]
    changed = build.add("Xor", node.outputs[0], build.again(node, build.rounded(first), build.rounded(second)))
    return {
        "rows": build.size(node.outputs[0]),
        "moved": build.count(changed),
        "magnitude": build.reduce("ReduceMax", build.add("Abs", first)),
        "gap": build.reduce("ReduceMean", build.add("Abs", build.add("Sub", first, second))),
    }


def _periodic(build: _Builder, node: Node) -> dict[str, str]:
    angle, result = node.inputs[0], node.outputs[0]
    apart = build.add("Abs", build.add("Sub", build.again(node, build.rounded(angle)), result))
    return {
        "rows": build.size(result),
        "moved": build.count(build.add("Greater", apart, build.constant(_FAR_OFF))),
        "magnitude": build.reduce("ReduceMax", build.add("Abs", angle)),
    }


def _grid(build: _Builder, node: Node) -> dict[str, str]:
    """Coordinates from -1 to 1 lie along the axes of the image that they are of: the last of them is the first axis."""
    image, grid = node.inputs[:2]
    ends = (build.constant((axis,), np.int64) for axis in (-1, 1, 0, -1))
    sizes = build.add("Cast", build.add("Slice", build.add("Shape", image), *ends), to=_FLOAT)
    apart = build.add("Abs", build.add("Sub", build.rounded(grid), grid))
    pixels = build.add("Mul", apart, build.add("Mul", sizes, build.constant(0.5)))
    return {
        "rows": build.size(grid),
        "moved": build.count(build.add("Greater", pixels, build.constant(_PIXELS_OFF))),
        "magnitude": build.reduce("ReduceMax", build.add("Abs", grid)),
    }


def _softmax(build: _Builder, node: Node, axes: tuple[int, ...]) -> dict[str, str]:
    value = node.inputs[0]
    weights = build.again(node, build.rounded(value))
    apart = build.reduce("ReduceSum", build.add("Abs", build.add("Sub", weights, node.outputs[0])))
    facts = _extremes(build, value, axes, largest=True)
    return {**facts, "moved": build.add("Mul", apart, build.constant(0.5))}


def _largest(build: _Builder, node: Node, axis: int) -> dict[str, str]:
    value = node.inputs[0]
    chosen = build.again(node, build.rounded(value))
    same = build.add("Equal", chosen, node.outputs[0])
    facts = _extremes(build, value, (axis,), largest=node.op_type == "ArgMax")
    return {**facts, "moved": build.count(build.add("Not", same))}


def _top(build: _Builder, node: Node, axis: int) -> dict[str, str]:
    """What rounding puts among the top k although it does not belong there."""
    value, k = node.inputs[:2]
    largest = attribute(node, "largest") != 0
    values = build.again(node, value, k)
    places = build.again(node, build.rounded(value), k, output=1)
    found = build.add("GatherElements", value, places, axis=axis)
    limit = build.reduce("ReduceMin" if largest else "ReduceMax", values, (axis,), keepdims=1)
    facts = _extremes(build, value, (axis,), largest=largest)
    wrong = build.add("Less" if largest else "Greater", found, limit)
    return {**facts, "rows": build.size(values), "moved": build.count(wrong)}


def _extremes(build: _Builder, value: str, axes: tuple[int, ...], *, largest: bool) -> dict[str, str]:
    """How many rows there are, the magnitude of their extremes, and how far the next value is, in the mean."""
    extreme = build.reduce("ReduceMax" if largest else "ReduceMin", value, axes, keepdims=1)
    away = build.add("Abs", build.add("Sub", value, extreme))
    positive = build.add("Greater", away, build.constant(0.0))
    others = build.add("Where", positive, away, build.constant(np.inf))
    return {
        "rows": build.size(extreme),
        "magnitude": build.reduce("ReduceMax", build.add("Abs", extreme)),
        "gap": build.reduce("ReduceMean", build.reduce("ReduceMin", others, axes)),
    }
