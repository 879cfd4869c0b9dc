"""The nodes that answer a probe inside the observing graph: scalars per sample, so that no value leaves the graph.

The facts of each kind (all FP32 scalars unless said otherwise; "rounded" means to FP16 or BF16 and back):

- sum: ``first``, ``second``, ``result``: mean squares of the operands and the result; ``error``: mean square of what
  rounding the operands does to the result; ``first_steps``, ``second_steps``: elements where that operand is not zero
  and the other, rounded, is finite and not zero; ``first_lost``, ``second_lost``: those of them where the rounded sum
  is the other operand.
- softmax, largest: ``rows``; ``moved``: of softmax, the sum over the rows of the total variation distance between
  the weights of rounded and of exact values; else the rows that rounding decides otherwise;
  ``magnitude``: largest of a row's extreme; ``gap``: mean distance of the extreme from the next value.
- comparison: ``rows``: elements; ``moved``: those whose answer rounding changes; ``magnitude``; ``gap``: mean distance.
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

import numpy as np

from mptune.graph.grouping.lookup import attribute
from mptune.graph.hazards.masked_rows import softmax_rows
from mptune.graph.hazards.probes import Probe, ProbeKind, find_probes
from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import Precision
from mptune.graph.writing.probing.builder import ProbeBuilder

_BF16_SINCE = 13
"""Operator set from which Cast has BFLOAT16."""

_POLE_DEPTH = 4
"""So many operators before a pole are computed again: a variance is subtracted, clipped, and an epsilon is added."""
_LEAST: Mapping[Precision, float] = {Precision.FP16: 1e-30, Precision.BF16: 1e-38}
"""Each has no value between zero and this one; BF16 subnormal ones, which engines take for zero."""
_RECOMPUTED = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Max", "Min", "Clip", "Identity"})


@dataclass(frozen=True)
class ProbeTap:
    """The names of the outputs that answer one probe.

    Attributes:
        key: the value that the answer is filed under.
        outputs: fact -> scalar output.
        vectors: fact -> output of rank 1.
    """

    kind: ProbeKind
    node: str
    key: str
    outputs: Mapping[str, str] = field(hash=False)
    vectors: Mapping[str, str] = field(default_factory=dict, hash=False)
    precision: Precision = Precision.FP16


def add_probes(build: ProbeBuilder, model: Model, precisions: Sequence[str]) -> tuple[ProbeTap, ...]:
    """Append the nodes that answer the model's probes, and their outputs, to the observing graph."""
    rows = softmax_rows(model)
    if model.opset < _BF16_SINCE:
        precisions = [precision for precision in precisions if precision != Precision.BF16]
    taps = []
    for probe in find_probes(model, precisions):
        node = model.nodes[probe.node]
        build.start(f"{probe.kind}.{probe.node}.{probe.precision}", probe.precision)
        facts, vectors = _answer(build, probe, node, model, rows)
        for name in facts.values():
            build.give(name)
        for name in vectors.values():
            build.give(name, [None])
        if facts or vectors:
            taps.append(ProbeTap(probe.kind, node.name, probe.key, facts, vectors, probe.precision))
    return tuple(taps)


_Answer = tuple[dict[str, str], dict[str, str]]


def _answer(
    build: ProbeBuilder, probe: Probe, node: Node, model: Model, rows: Mapping[str, tuple[int, ...]]
) -> _Answer:
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
        facts[f"{name}_steps"] = build.count(steps)
        facts[f"{name}_lost"] = build.count(build.add("And", steps, build.equal(total, kept)))
    return facts


def _pole(build: ProbeBuilder, node: Node, value: str, model: Model) -> dict[str, str]:
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


def _smallest_variance(build: ProbeBuilder, value: str, rank: int) -> str:
    axes = tuple(range(2, rank))
    centred = build.add("Sub", value, build.reduce("ReduceMean", value, axes, keepdims=1))
    return build.reduce("ReduceMin", build.reduce("ReduceMean", build.add("Mul", centred, centred), axes))


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
    facts = _extremes(build, value, axes, largest=True)
    return {**facts, "moved": build.add("Mul", apart, build.constant(0.5))}


def _largest(build: ProbeBuilder, node: Node, axis: int) -> dict[str, str]:
    value = node.inputs[0]
    chosen = build.again(node, build.rounded(value))
    same = build.add("Equal", chosen, node.outputs[0])
    facts = _extremes(build, value, (axis,), largest=node.op_type == "ArgMax")
    return {**facts, "moved": build.count(build.add("Not", same))}


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
