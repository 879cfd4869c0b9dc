"""What rounding changes at single nodes on data, computed by NumPy from the values that the node reads and gives.

Each probe takes a node's operands and results on one sample and a precision, and gives facts, numbers that
``mptune.graph.hazards.on_data`` judges over all samples. Means and shares are taken of at most ``_MOST`` elements at
even distances, since a value may have tens of millions. What a single element decides, such as a pole or a comparison,
is looked at in all, a block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from mptune.graph.facts import attribute, facts_of, float_attribute
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import from_stored, to_stored
from mptune.graph.ops import ARITHMETIC, BOUNDS, CENTRING_NORMS, COMPARISONS, EXTREMES, GUARDS
from mptune.graph.plan import Precision

Arrays = Mapping[str, np.ndarray]
Numbers = dict[str, float]
_BLOCK = 1 << 16
"""Elements that are computed at a time: what stays in a core's cache."""
_MOST = 1 << 18
"""Elements from which means and shares are estimated."""
_FEWEST_ROWS = 16
"""Of a norm or a softmax, however long they are."""
POLES: Mapping[str, int] = {"Log": 0, "Sqrt": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}
"""Operator -> which of its inputs may not reach zero, or fall below it."""
_FIRST_OPSET = 11
"""The first operator set whose Equal takes floats, and whose Clip takes its bounds as inputs."""
_POLE_DEPTH = 4
"""Operators before a pole that are computed again: a variance is subtracted, clipped, and an epsilon is added."""
_RECOMPUTED = ARITHMETIC | BOUNDS | {"Neg", "Abs", "Sqrt", "Identity"}
_LEAST = (1e-30, 1e-38)
"""No precision has a value between zero and one of these; or subnormal ones, which engines take for zero."""
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power,
    "Neg": np.negative, "Abs": np.abs, "Sqrt": np.sqrt, "Log": np.log, "Reciprocal": np.reciprocal,
    "Identity": np.positive, "Min": lambda *operands: reduce(np.minimum, operands),
    "Max": lambda *operands: reduce(np.maximum, operands),
    "Clip": lambda x, low=-np.inf, high=np.inf: np.clip(x, low, high),
    "Greater": np.greater, "Less": np.less, "Equal": np.equal,
    "GreaterOrEqual": np.greater_equal, "LessOrEqual": np.less_equal,
}  # fmt: skip


@dataclass(frozen=True)
class ProbedNode:
    """A node whose operands are rounded.

    Attributes:
        key: the FP32 value that its facts are filed under: what it gives, or else reads.
        pole: the operand at whose zero the result is infinite, or below which it is NaN; "" where there is none.
        before_epsilon: what a constant is added to, or is the least of, to give ``pole``; else ``pole``.
        steps: the nodes that compute ``pole``, in topological order, which are computed again of rounded operands.
    """

    node: Node
    key: str
    pole: str = ""
    before_epsilon: str = ""
    steps: tuple[Node, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """The values that a probe is computed from."""
        names = {*self.node.inputs, self.node.outputs[0], self.before_epsilon, *self.leaves}
        return frozenset(names - {""})

    @property
    def leaves(self) -> tuple[str, ...]:
        """What the steps read of other nodes."""
        computed = {step.outputs[0] for step in self.steps}
        return tuple(dict.fromkeys(name for step in self.steps for name in step.inputs if name not in computed))


def probed_nodes(model: Model) -> tuple[ProbedNode, ...]:
    """The nodes of a model that have a probe, in topological order."""
    facts, probed = facts_of(model), list[ProbedNode]()
    for node in model.nodes if model.opset >= _FIRST_OPSET else ():
        if not node.is_standard or node.op_type not in _PROBES or not facts.varying(node) or not node.inputs[0]:
            continue
        info = model.info(node.inputs[0])
        if not info.is_float32 or 0 in (info.shape or ()) or attribute(node, "training_mode") == 1:
            continue
        computed = (name for name in (node.outputs[0], *node.inputs[:2]) if name not in model.initializers)
        key = next((name for name in computed if model.info(name).is_float32), "")
        if node.op_type not in POLES:
            probed += [ProbedNode(node, key)] if key else []
            continue
        pole = node.inputs[POLES[node.op_type]]
        power = facts.number(node.inputs[1]) if node.op_type == "Pow" else -1.0
        if facts.is_static(pole) or not model.info(pole).is_float32 or power is None:
            continue
        if power > 0 and power == int(power):
            continue
        source, before = facts.producer(pole), pole
        if source is not None and source.op_type in GUARDS and source.is_standard:
            operands = [name for name in source.inputs if name and name not in model.initializers]
            before = operands[0] if len(operands) == 1 and model.info(operands[0]).is_float32 else pole
        steps, names = set[int](), {pole}  # arithmetic before it; what reductions give is taken as it is
        for _ in range(_POLE_DEPTH):
            makers = [maker for maker in map(facts.producer, names) if maker is not None]
            makers = [maker for maker in makers if maker.is_standard and maker.op_type in _RECOMPUTED]
            makers = [maker for maker in makers if all(n and model.info(n).is_float32 for n in maker.inputs)]
            steps.update(maker.index for maker in makers)
            names = {name for maker in makers for name in maker.inputs}
        probed.append(ProbedNode(node, key, pole, before, tuple(model.nodes[index] for index in sorted(steps))))
    return tuple(probed)


# -- on one sample ----------------------------------------------------------------------------------------------------


def range_of(values: np.ndarray, row_axes: tuple[int, ...] = ()) -> TensorRange:
    """The range of a value on one sample; ``row_axes`` are those of a row, where a softmax is taken of the value."""
    lowest, highest = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not np.isfinite(highest - lowest):  # NaN comes through, and an infinity is an end
        lowest = highest = 0.0
        for (block,) in _blocks(values):
            finite = block[np.isfinite(block)]
            lowest, highest = min(lowest, float(finite.min(initial=0.0))), max(highest, float(finite.max(initial=0.0)))
    absmax, limit, masked = max(highest, -lowest, 0.0), Precision.FP16.largest, 0
    if row_axes and lowest < -limit:
        largest = values.max(axis=row_axes)  # a row that is -inf throughout is NaN in FP32 already
        masked = int(np.count_nonzero((largest < -limit) & (largest > -np.inf)))
    return TensorRange(absmax, values.shape, lowest, highest, beyond=int(absmax > limit), masked_rows=masked)


def facts_on(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """The facts of a node on one sample; ``values`` holds those that it ``reads``."""
    with np.errstate(all="ignore"):
        return _PROBES[probed.node.op_type](probed, values, precision)


def rounded(values: np.ndarray, precision: Precision) -> np.ndarray:
    """FP32 values rounded to the nearest value of a precision, ties to even; overflow gives infinity."""
    return from_stored(to_stored(values, precision))


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """The elements of arrays that are broadcast to one shape, a block of each at a time."""
    reading: Any = [["readonly"]] * len(arrays)
    with np.nditer(
        arrays, ["external_loop", "buffered", "zerosize_ok"], reading, order="C", buffersize=_BLOCK
    ) as blocks:
        for block in blocks if arrays[0].size else ():
            yield block if isinstance(block, tuple) else (block,)


def _spaced(length: int, count: int) -> np.ndarray:
    """At most ``count`` positions, one at least; not all even or all odd, as those of a fixed step may be."""
    count = max(1, min(length, count))
    return np.arange(count if length else 0) * length // count


def _squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _sum(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Of Add and Sub: mean squares; and of how many elements a side is lost, as the rounded sum is the other side."""
    node, size = probed.node, values[probed.node.outputs[0]].size
    arrays: Sequence[np.ndarray] = np.broadcast_arrays(*(values[name] for name in (*node.inputs, node.outputs[0])))
    while (left := arrays[0].size) > _MOST:  # at even distances along the longest axes
        axis = int(np.argmax(arrays[0].shape))
        positions = _spaced(arrays[0].shape[axis], arrays[0].shape[axis] * _MOST // left)
        arrays = [np.take(each, positions, axis) for each in arrays]
    first, second, result = arrays
    a, b = rounded(first, precision), rounded(second, precision)
    exact = _FUNCTIONS[node.op_type](a, b)
    total, count = rounded(exact, precision), max(1, result.size)
    squared = {"first": first, "second": second, "result": result, "error": exact - result}
    facts = {name: _squares(each) / count for name, each in squared.items()}
    for name, step, base, unchanged in (
        ("first", first, b, b if node.op_type == "Add" else -b),
        ("second", second, a, a),
    ):
        steps = (np.abs(step) > 0) & (np.abs(base) > 0) & np.isfinite(base)
        facts[f"{name}_steps"] = np.count_nonzero(steps) * size / count
        facts[f"{name}_lost"] = np.count_nonzero(steps & (total == unchanged)) * size / count
    return facts


def _norm(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Mean square of what rounding a norm's operand changes of its results before they are scaled; and of these."""
    node, operand = probed.node, values[probed.node.inputs[0]]
    shape, axis, groups = operand.shape, attribute(node, "axis"), attribute(node, "num_groups")
    count = shape[0] * (groups if isinstance(groups, int) else shape[1])  # over a channel of a sample, or some of them
    if node.op_type == "LayerNormalization":
        count = math.prod(shape[: axis if isinstance(axis, int) else -1])
    if not operand.size:
        return dict.fromkeys(("error", "mean", "square", "magnitude"), 0.0)
    rows = operand.reshape(count, -1)
    rows = rows[_spaced(count, max(_FEWEST_ROWS, _MOST // rows.shape[1]))]
    rows = rows[:, _spaced(rows.shape[1], _MOST)]
    results, moved = (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + float_attribute(node, "epsilon", 1e-5))
        for x in (rows.astype(np.float64), rounded(rows, precision).astype(np.float64))
    )
    error, square = _squares(moved - results) / rows.size, _squares(results) / rows.size
    return {"error": error, "mean": float(results.mean()), "square": square, "magnitude": _magnitude(operand)}


def _batch_norm(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How far the operand lies off the running mean, in standard deviations.

    The median over the channels, as a dead one with a variance near zero says nothing. Statistics of 0 and 1 are of a
    model that was not trained; even powers of two come from rescaling.
    """
    node, operand = probed.node, values[probed.node.inputs[0]]
    mean, variance = (values[name].astype(np.float64) for name in node.inputs[3:5])
    deviation = np.sqrt(np.abs(variance) + float_attribute(node, "epsilon", 1e-5))
    powers, is_trained = np.log2(deviation), (mean != 0).any() or (variance != 1).any()
    if not operand.size or not is_trained or np.allclose(powers, np.round(powers), atol=1e-3):
        return {}
    centres = np.moveaxis(operand, 1, 0).reshape(len(mean), -1).mean(-1, dtype=np.float64)
    return {"deviations": float(np.median(np.abs(centres - mean) / deviation))}


def _pole(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How many operands rounding brings to a pole; and what their tiny ones change of the results.

    ``lost`` operands come to zero or below, ``vanished`` ones by their own rounding and not by that of a difference.
    """
    node, smallest_normal = probed.node, precision.smallest_normal
    slot, takes_sign = node.inputs.index(probed.pole), node.op_type not in ("Div", "Reciprocal")
    is_root = node.op_type == "Sqrt" or (node.op_type == "Pow" and values[node.inputs[1]].flat[0] > 0)
    limit = 0.0 if is_root else next(value for value in _LEAST if value < smallest_normal)  # a root of zero is zero
    names = ("values", "lost", "vanished", "nonzero", "zeroed", "small", "error", "mean", "square")
    facts = dict.fromkeys(names, 0.0) | {"smallest": np.inf}
    for operand, *read in _blocks(values[probed.pole], *(values[name] for name in probed.leaves)):
        again = {name: rounded(block, precision) for name, block in zip(probed.leaves, read, strict=True)}
        for step in probed.steps:
            again[step.outputs[0]] = rounded(_FUNCTIONS[step.op_type](*(again[n] for n in step.inputs)), precision)
        alone = rounded(operand, precision)
        before, after, kept = operand, again.get(probed.pole, alone), alone
        if not takes_sign:
            before, after, kept = np.abs(before), np.abs(after), np.abs(kept)
        lost = (before > 0) & (after < limit)  # NaN is below no limit: it was made before
        facts["values"] += np.count_nonzero(before > 0)
        facts["lost"] += np.count_nonzero(lost)
        facts["vanished"] += np.count_nonzero(lost & (kept < limit))
        facts["smallest"] = min(facts["smallest"], float(np.min(np.abs(operand), where=lost, initial=np.inf)))
    for (operand,) in _blocks(values[probed.before_epsilon]):
        magnitude = np.abs(operand)
        facts["nonzero"] += np.count_nonzero(magnitude > 0)
        facts["zeroed"] += np.count_nonzero((magnitude > 0) & (rounded(magnitude, precision) == 0))
        facts["small"] += np.count_nonzero((magnitude > 0) & (magnitude < smallest_normal))
    size = max(1, values[node.outputs[0]].size)
    for *operands, result in _blocks(*(values[name] for name in (*node.inputs, node.outputs[0]))):
        small = np.abs(operands[slot]) < smallest_normal
        if small.any():
            operands = [operand[small] for operand in operands]
            operands[slot] = rounded(operands[slot], precision)
            moved = _FUNCTIONS[node.op_type](*operands) - result[small]
            facts["error"] += _squares(moved[np.isfinite(moved)]) / size
        facts["mean"] += float(result.sum(dtype=np.float64)) / size
        facts["square"] += _squares(result) / size
    return facts


def _comparison(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How many answers change. Equal is of few: what is equal is counted, and not what is not."""
    node, rows, moved, gap, size = probed.node, 0, 0, 0.0, 0
    for first, second, answer in _blocks(*(values[name] for name in (*node.inputs[:2], node.outputs[0]))):
        again = _FUNCTIONS[node.op_type](rounded(first, precision), rounded(second, precision))
        rows += np.count_nonzero(answer | again) if node.op_type == "Equal" else answer.size
        moved += np.count_nonzero(answer ^ again)
        gap += float(np.abs(first - second).sum(dtype=np.float64))
        size += answer.size
    magnitude = _magnitude(values[node.inputs[0]])
    return {"rows": float(rows), "moved": float(moved), "magnitude": magnitude, "gap": gap / max(1, size)}


def _rows(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Of Softmax how much weight moves to other elements, of ArgMax and ArgMin in how many rows another one is chosen.

    And how many rows there are, the magnitude of their largest, and how far the next one is in the mean.
    """
    op_type, stated = probed.node.op_type, attribute(probed.node, "axis")
    default = -1 if op_type == "Softmax" else 0
    operand = np.moveaxis(values[probed.node.inputs[0]], stated if isinstance(stated, int) else default, -1)
    if not operand.size:
        return dict.fromkeys(("rows", "moved", "magnitude", "gap"), 0.0)
    rows = operand.reshape(-1, operand.shape[-1])  # enough of them at even distances for ``_MOST`` elements
    rows = rows[_spaced(len(rows), max(_FEWEST_ROWS, _MOST // rows.shape[1]))]
    rows = -rows if op_type == "ArgMin" else rows
    near, largest = rounded(rows, precision), rows.max(-1, keepdims=True)
    if op_type == "Softmax":
        weights = [np.exp(each - each.max(-1, keepdims=True)) for each in (rows, near)]
        exact, again = (each / each.sum(-1, keepdims=True) for each in weights)
        moved = float(np.abs(exact - again).sum(dtype=np.float64)) / 2
    else:
        moved = float(np.count_nonzero(near.argmax(-1) != rows.argmax(-1)))
    away = largest - rows
    gap = float(np.min(away, -1, where=away > 0, initial=np.inf).mean(dtype=np.float64))
    return {"rows": float(len(rows)), "moved": moved, "magnitude": _magnitude(largest), "gap": gap}


def _magnitude(values: np.ndarray) -> float:
    """The largest finite one."""
    return max((float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0)) for (b,) in _blocks(values)), default=0.0)


_PROBES: Mapping[str, Callable[[ProbedNode, Arrays, Precision], Numbers]] = {
    "Add": _sum,
    "Sub": _sum,
    "Softmax": _rows,
    **dict.fromkeys(POLES, _pole),
    **dict.fromkeys(EXTREMES, _rows),
    **dict.fromkeys(COMPARISONS, _comparison),
    **dict.fromkeys(CENTRING_NORMS, _norm),
    "BatchNormalization": _batch_norm,
}
