"""The model with its FP32 values observed: the range of each on real data, reduced inside the graph.

It has a few small outputs per value instead of the value itself, so that all of them fit in memory at once. Largest,
smallest and sum of a value say all where the sum is finite. Where it is not, as with a mask of minus infinity, a second
model looks at each element of that value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from mptune.files import write_bytes
from mptune.graph.casting.value_types import new_suffix
from mptune.graph.facts import Facts, attribute, facts_of
from mptune.graph.folded import FoldedValues, LeftOut
from mptune.graph.hazards.constants import softmax_rows
from mptune.graph.hazards.hazard import FP16_MAX
from mptune.graph.hazards.probes import Probe, find_probes, is_root
from mptune.graph.loading.model import Model, Node, needed_nodes
from mptune.graph.ops import ARITHMETIC, BOUNDS, GUARDS, onnx_schema
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.weights import WeightBank, inline_tensor

_FLOAT = onnx.TensorProto.FLOAT

_AXES_OF_SUM_SINCE = 13

_AXES_OF_OTHERS_SINCE = 18

"""Operator sets from which ReduceSum, and the other reductions, take their axes as an input."""


class ProbeBuilder:
    """Appends nodes whose names are new."""

    def __init__(self, graph: onnx.GraphProto, opset: int, suffix: str) -> None:
        self._graph = graph
        self._opset = opset
        self._suffix = suffix
        self._count = 0
        self._name, self.precision = "tap", Precision.FP16
        self._constants: dict[tuple[float, str], str] = {}
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
        if key not in self._constants:
            self._constants[key] = f"probe.{len(self._constants)}{self._suffix}"
            array = np.asarray(value, dtype)
            self._graph.initializer.append(onnx.numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

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
            reduced = self.add("Cast", value, to=self.precision.onnx_type)
            self._rounded[key] = self.add("Cast", reduced, to=_FLOAT)
        return self._rounded[key]

    def flat(self, value: str, end: float) -> str:
        """All elements in one axis, and one more, so that there is one where a value has none."""
        row = self.add("Reshape", value, self.constant((-1,), np.int64))
        return self.add("Concat", row, self.constant((end,)), axis=0)

    def mean_square(self, value: str) -> str:
        """Mean of the squares of all elements."""
        return self.reduce("ReduceMean", self.add("Mul", value, value))

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


_POLE_DEPTH = 4

"""So many operators before a pole are computed again: a variance is subtracted, clipped, and an epsilon is added."""

_LEAST = (1e-30, 1e-38)

"""No precision has a value between zero and one of these; or subnormal ones, which engines take for zero."""

_RECOMPUTED = ARITHMETIC | BOUNDS | {"Neg", "Abs", "Sqrt", "Identity"}


def add_probes(
    build: ProbeBuilder, model: Model, precisions: Sequence[str], observed: Collection[str]
) -> Iterator[Probe]:
    """Append the nodes that answer the probes filed under these values, and their outputs, to the observing graph."""
    keys = frozenset(observed)
    rows, nodes, facts = softmax_rows(model), {node.name: node for node in model.nodes}, facts_of(model)
    cast = onnx_schema("Cast", model.opset)
    types = cast.types["T2"] if cast is not None else ()
    # A precision without an ONNX type of its own has the answers of one of its digits.
    asked = [Precision.named(name) for name in precisions]
    precisions = [row for row in asked if row.is_rounded_by_casts and f"tensor({row.dtype})" in types]
    for probe in find_probes(model, precisions):
        if probe.key not in keys:
            continue
        node = nodes[probe.node]
        build.start(f"{probe.kind}.{node.index}.{probe.precision}", probe.precision)
        answers, vectors = _answer(build, probe, node, facts, rows)
        for name in answers.values():
            build.give(name)
        for name in vectors.values():
            build.give(name, [None])
        if answers or vectors:
            yield replace(probe, outputs=answers, vectors=vectors)


_Answer = tuple[dict[str, str], dict[str, str]]


def _answer(
    build: ProbeBuilder, probe: Probe, node: Node, facts: Facts, rows: Mapping[str, tuple[int, ...]]
) -> _Answer:
    match probe.kind:
        case "sum":
            return _sum(build, node), {}
        case "norm":
            return _norm(build, node), {}
        case "pole":
            return _pole(build, node, probe.value, facts), {}
        case "batch-norm":
            rank = len(facts.model.info(probe.value).shape or ())
            return {}, {"mean": build.reduce("ReduceMean", probe.value, (0, *range(2, rank)))}
        case "comparison":
            return _comparison(build, node), {}
        case "softmax":
            axes = rows.get(node.inputs[0], ())
            return (_softmax(build, node, axes) if axes else {}), {}
        case "largest":
            stated = attribute(node, "axis")
            return _largest(build, node, stated if isinstance(stated, int) else 0), {}


def _sum(build: ProbeBuilder, node: Node) -> dict[str, str]:
    first, second, result = node.inputs[0], node.inputs[1], node.outputs[0]
    a, b = build.rounded(first), build.rounded(second)
    exact = build.add(node.op_type, a, b)
    total = build.rounded(exact)
    zero, infinity = build.constant(0.0), build.constant(np.inf)
    sizes = {a: build.add("Abs", a), b: build.add("Abs", b)}
    answers = {
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
        answers[f"{name}_steps"] = build.count(steps)
        answers[f"{name}_lost"] = build.count(build.add("And", steps, build.add("Equal", total, kept)))
    return answers


def _norm(build: ProbeBuilder, node: Node) -> dict[str, str]:
    operand, result = node.inputs[0], node.outputs[0]
    again = build.again(node, build.rounded(operand), *node.inputs[1:])
    return {
        "error": build.mean_square(build.add("Sub", again, result)),
        "mean": build.reduce("ReduceMean", result),
        "square": build.mean_square(result),
        "magnitude": build.reduce("ReduceMax", build.add("Abs", operand)),
    }


def _pole(build: ProbeBuilder, node: Node, value: str, facts: Facts) -> dict[str, str]:
    zero, infinity = build.constant(0.0), build.constant(np.inf)
    rounded = _recomputed(build, value, facts.model, _POLE_DEPTH)
    size = build.add("Abs", value)
    before, after, alone = value, rounded, build.rounded(value)
    changed = _with_vanished(build, node, value, size)
    if node.op_type in ("Div", "Reciprocal"):
        before, after, alone = size, build.add("Abs", rounded), build.add("Abs", alone)
    stands = build.add("Greater", before, zero)
    # NaN is below neither limit: it was made before.
    least = next(value for value in _LEAST if value < build.precision.smallest_normal)
    limit = zero if is_root(facts, node) else build.constant(least)
    lost = build.add("And", stands, build.add("Less", after, limit))
    gone = build.add("And", lost, build.add("Less", alone, limit))
    return {
        "values": build.count(stands),
        "lost": build.count(lost),
        "vanished": build.count(gone),
        "smallest": build.reduce("ReduceMin", build.flat(build.add("Where", lost, size, infinity), np.inf)),
        **_vanishing(build, _before_epsilon(facts.model, value)),
        **changed,
    }


def _vanishing(build: ProbeBuilder, value: str) -> dict[str, str]:
    """How many elements are not zero, how many of these become zero, and how many are below the smallest normal."""
    zero, size = build.constant(0.0), build.add("Abs", value)
    is_there = build.add("Greater", size, zero)
    is_kept = build.add("Greater", build.add("Abs", build.rounded(value)), zero)
    is_small = build.add("Less", size, build.constant(build.precision.smallest_normal))
    return {
        "nonzero": build.count(is_there),
        "zeroed": build.count(build.add("And", is_there, build.add("Not", is_kept))),
        "small": build.count(build.add("And", is_there, is_small)),
    }


def _with_vanished(build: ProbeBuilder, node: Node, value: str, size: str) -> dict[str, str]:
    """What rounding the operand's elements below the smallest normal, and no others, changes of the finite results."""
    is_small = build.add("Less", size, build.constant(build.precision.smallest_normal))
    operand = build.add("Where", is_small, build.rounded(value), value)
    result = node.outputs[0]
    moved = build.add("Sub", build.again(node, *(operand if i == value else i for i in node.inputs)), result)
    is_finite = build.add("Less", build.add("Abs", moved), build.constant(np.inf))
    return {
        "error": build.mean_square(build.add("Where", is_finite, moved, build.constant(0.0))),
        "mean": build.reduce("ReduceMean", result),
        "square": build.mean_square(result),
    }


def _before_epsilon(model: Model, value: str) -> str:
    """What a constant is added to, or is the least of, where that is how a value is computed; else the value."""
    index = model.producer.get(value)
    node = None if index is None else model.nodes[index]
    if node is None or node.op_type not in GUARDS or not node.is_standard:
        return value
    operands = [i for i in node.inputs if i and i not in model.initializers]
    return operands[0] if len(operands) == 1 and model.info(operands[0]).is_float32 else value


def _recomputed(build: ProbeBuilder, value: str, model: Model, depth: int) -> str:
    """A value as FP16 or BF16 computes it of what the last operators before it read, rounded; reductions as seen."""
    index = model.producer.get(value)
    node = None if index is None else model.nodes[index]
    is_recomputed = node is not None and node.is_standard and node.op_type in _RECOMPUTED and node.outputs[0] == value
    if node is None or not is_recomputed or depth == 0 or not all(i and model.info(i).is_float32 for i in node.inputs):
        return build.rounded(value)
    key = value, depth, build.precision
    if key not in build.recomputed:
        operands = [_recomputed(build, i, model, depth - 1) for i in node.inputs]
        build.recomputed[key] = build.rounded(build.again(node, *operands))
    return build.recomputed[key]


def _comparison(build: ProbeBuilder, node: Node) -> dict[str, str]:
    first, second = node.inputs[:2]
    answer, rounded = node.outputs[0], build.again(node, build.rounded(first), build.rounded(second))
    changed = build.add("Xor", answer, rounded)
    is_equal = node.op_type == "Equal"  # of few: what is found is counted, and not what is not
    return {
        "rows": build.count(build.add("Or", answer, rounded)) if is_equal else build.size(answer),
        "moved": build.count(changed),
        "magnitude": build.reduce("ReduceMax", build.add("Abs", first)),
        "gap": build.reduce("ReduceMean", build.add("Abs", build.add("Sub", first, second))),
    }


def _softmax(build: ProbeBuilder, node: Node, axes: tuple[int, ...]) -> dict[str, str]:
    value = node.inputs[0]
    weights = build.again(node, build.rounded(value))
    apart = build.reduce("ReduceSum", build.add("Abs", build.add("Sub", weights, node.outputs[0])))
    answers = _extremes(build, value, axes, largest=True)
    return {**answers, "moved": build.add("Mul", apart, build.constant(0.5))}


def _largest(build: ProbeBuilder, node: Node, axis: int) -> dict[str, str]:
    value = node.inputs[0]
    chosen = build.again(node, build.rounded(value))
    same = build.add("Equal", chosen, node.outputs[0])
    answers = _extremes(build, value, (axis,), largest=node.op_type == "ArgMax")
    return {**answers, "moved": build.count(build.add("Not", same))}


def _extremes(build: ProbeBuilder, value: str, axes: tuple[int, ...], *, largest: bool) -> dict[str, str]:
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


@dataclass(frozen=True)
class Tap:
    """The names of the outputs that describe one value, scalars unless said otherwise.

    Attributes:
        shape: int64, one entry per dimension.
        lowest, highest: smallest and largest value; finite ones alone where there is ``non_finite``.
        total: sum of the values, which is finite only if all of them are; "" where there is ``non_finite``.
        non_finite: how many values are NaN or infinite, FP32; "" where elements are not looked at.
        masked: how many rows of a softmax have no element within FP16's range, FP32; "" where none is taken.
    """

    tensor: str
    shape: str
    lowest: str
    highest: str
    total: str = ""
    non_finite: str = ""
    masked: str = ""
    probes: tuple[Probe, ...] = ()


def observed_tensors(model: Model) -> tuple[str, ...]:
    """The FP32 values that are observed: graph inputs and everything computed, in topological order."""
    names = [i.name for i in model.inputs]
    names += [out for node in model.nodes for out in node.outputs if out and out not in model.initializers]
    return tuple(n for n in names if model.info(n).is_float32 and 0 not in (model.info(n).shape or ()))


def write_observing_model(
    model: Model,
    bank: WeightBank | None,
    path: Path,
    *,
    tensors: Collection[str] | None = None,
    by_element: bool = False,
    outputs: bool = False,
    folded: FoldedValues | None = None,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
) -> tuple[Tap, ...]:
    """Write the observing model to ``path`` (in the bank's folder, if there is one). Its outputs are the taps.

    Args:
        bank: holds its weights; None writes them into the file.
        outputs: the model's own outputs are there, too.
        tensors: values to observe, of ``observed_tensors``: the file holds the nodes that these need; None takes all.
        by_element: look at each element, and at no probes; else as fast as it goes: with a third of the nodes.
        folded: values that are constants already, in place of the nodes that compute them.
    """
    observed = [name for name in observed_tensors(model) if tensors is None or name in tensors]
    added, rows = onnx.GraphProto(), softmax_rows(model)
    build = ProbeBuilder(added, model.opset, new_suffix(model, "tap"))
    answers: dict[str, list[Probe]] = {}
    if by_element:
        taps = [_tap_by_element(build, tensor) for tensor in observed]
    else:
        taps = [_tap(build, tensor, rows.get(tensor, ())) for tensor in observed]
        for answer in add_probes(build, model, precisions, observed):
            answers.setdefault(answer.key, []).append(answer)
    read = {name for node in added.node for name in node.input}
    if outputs:
        added.output.extend(model.proto.graph.output)
        read.update(value.name for value in model.outputs)
    proto = without_outputs(model, bank, "observe", (folded or FoldedValues()).unread(model, read), read)
    _interleave(proto.graph, added.node)
    del added.node[:]
    proto.graph.MergeFrom(added)
    write_bytes(path, [proto.SerializeToString(deterministic=True)])
    return tuple(replace(tap, probes=tuple(answers.get(tap.tensor, ()))) for tap in taps)


def _interleave(graph: onnx.GraphProto, added: Sequence[onnx.NodeProto]) -> None:
    """Insert each node right behind the last one that it reads.

    A session that runs in the order of the file frees a value once its taps ran.
    """
    nodes = list(graph.node)
    at = {name: position for position, node in enumerate(nodes) for name in node.output}
    behind: dict[int, list[onnx.NodeProto]] = {}
    for node in added:
        position = max((at.get(name, -1) for name in node.input), default=-1)
        at.update(dict.fromkeys(node.output, position))
        behind.setdefault(position, []).append(node)
    merged = [*behind.get(-1, ())]
    for position, node in enumerate(nodes):
        merged += [node, *behind.get(position, ())]
    del graph.node[:]
    graph.node.extend(merged)


def write_with_outputs(model: Model, bank: WeightBank | None, path: Path, tensors: Sequence[str]) -> None:
    """Write the model with these values, of the main graph, as its only outputs."""
    proto = without_outputs(model, bank, "watch")
    for name in tensors:
        code = onnx.TensorProto.DataType.Value(model.info(name).dtype.upper())
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, code, None))
    write_bytes(path, [proto.SerializeToString(deterministic=True)])


def without_outputs(
    model: Model,
    bank: WeightBank | None,
    name: str,
    left_out: LeftOut = LeftOut(),  # noqa: B008  it is frozen
    wanted: Collection[str] | None = None,
) -> onnx.ModelProto:
    """The model as it is, but for its outputs and what is left out; large constants lie in the bank.

    ``wanted``: values that are read; what computes none of them is left out, too. None wants all.
    """
    nodes = model.nodes if wanted is None else needed_nodes(model, wanted)
    nodes = [node for node in nodes if node.index not in left_out.nodes]
    read = None if wanted is None else {*wanted, *(n for node in nodes for n in (*node.inputs, *node.captures))}
    proto = onnx.ModelProto(ir_version=max(model.proto.ir_version, 4))
    proto.opset_import.extend(model.proto.opset_import)
    graph = proto.graph
    graph.name = name
    graph.input.extend(model.proto.graph.input)
    graph.sparse_initializer.extend(model.proto.graph.sparse_initializer)
    for node in nodes:
        graph.node.add().CopyFrom(node.proto)
        graph.node[-1].name = node.name
    graph.initializer.extend(value for value in left_out.values if read is None or value.name in read)
    stored = inline_tensor if bank is None else bank.tensor_or_inline
    for constant in model.initializers.values():
        is_read = read is None or constant.overridable or constant.name in read
        if is_read and constant.node_index is None and constant.name not in left_out.unread:
            graph.initializer.append(stored(constant, constant.name))
    return proto


def _tap(build: ProbeBuilder, tensor: str, row: tuple[int, ...]) -> Tap:
    """Largest, smallest and sum of a value; ``row`` are the axes of a row, where a softmax is taken of the value."""
    lowest, highest, total = (build.give(build.reduce(op, tensor)) for op in ("ReduceMin", "ReduceMax", "ReduceSum"))
    masked = ""
    if row:
        below = build.add("Less", build.reduce("ReduceMax", tensor, row), build.constant(-FP16_MAX))
        masked = build.give(build.count(below))
    return Tap(tensor, build.give_shape(tensor), lowest, highest, total, masked=masked)


def _tap_by_element(build: ProbeBuilder, tensor: str) -> Tap:
    """Largest and smallest of the finite elements, and how many are not. NaN compares false with everything."""
    finite = build.add("Less", build.add("Abs", tensor), build.constant(np.inf))
    kept = build.add("Where", finite, tensor, build.constant(0.0))
    lowest, highest = (build.give(build.reduce(op, kept)) for op in ("ReduceMin", "ReduceMax"))
    non_finite = build.give(build.count(build.add("Not", finite)))
    return Tap(tensor, build.give_shape(tensor), lowest, highest, non_finite=non_finite)
