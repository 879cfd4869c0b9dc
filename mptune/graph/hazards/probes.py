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

from mptune.graph.facts import Facts, attribute, facts_of, float_attribute
from mptune.graph.hazards.observed_values import TensorRange
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
        opset: of the model.
    """

    node: Node
    key: str
    pole: str = ""
    before_epsilon: str = ""
    steps: tuple[Node, ...] = ()
    opset: int = 17

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
    facts = facts_of(model)
    if model.opset < _FIRST_OPSET:
        return ()
    probed = []
    for node in model.nodes:
        if not node.is_standard or node.op_type not in _PROBES or not facts.varying(node):
            continue
        info = model.info(node.inputs[0]) if node.inputs[0] else None
        is_empty = info is None or not info.is_float32 or 0 in (info.shape or ())
        if is_empty or attribute(node, "training_mode") == 1:
            continue
        computed = (name for name in (node.outputs[0], *node.inputs[:2]) if name not in model.initializers)
        key = next((name for name in computed if model.info(name).is_float32), "")
        if node.op_type in POLES:
            pole = _pole_of(facts, node)
            if pole:
                probed.append(ProbedNode(node, key, pole, _before_epsilon(model, pole), _steps(model, pole)))
        elif key:
            probed.append(ProbedNode(node, key, opset=model.opset))
    return tuple(probed)


def _pole_of(facts: Facts, node: Node) -> str:
    """The computed operand at whose zero a node's result is infinite, or below which it is NaN; "" if none."""
    name = node.inputs[POLES[node.op_type]]
    if facts.is_static(name) or not facts.model.info(name).is_float32:
        return ""
    power = facts.number(node.inputs[1]) if node.op_type == "Pow" else None
    has_pole = node.op_type != "Pow" or (power is not None and not (power > 0 and power == int(power)))
    return name if has_pole else ""


def _before_epsilon(model: Model, value: str) -> str:
    node = model.nodes[model.producer[value]] if value in model.producer else None
    if node is None or node.op_type not in GUARDS or not node.is_standard:
        return value
    operands = [name for name in node.inputs if name and name not in model.initializers]
    return operands[0] if len(operands) == 1 and model.info(operands[0]).is_float32 else value


def _steps(model: Model, value: str) -> tuple[Node, ...]:
    """Arithmetic before a value, a few operators deep; what reductions give is taken as it is."""
    steps, values = set[int](), {value}
    for _ in range(_POLE_DEPTH):
        makers = [model.nodes[model.producer[name]] for name in values if name in model.producer]
        makers = [node for node in makers if node.is_standard and node.op_type in _RECOMPUTED]
        makers = [node for node in makers if all(name and model.info(name).is_float32 for name in node.inputs)]
        steps.update(node.index for node in makers)
        values = {name for node in makers for name in node.inputs}
    return tuple(model.nodes[index] for index in sorted(steps))


# -- on one sample ----------------------------------------------------------------------------------------------------


def range_of(values: np.ndarray, row_axes: tuple[int, ...] = ()) -> TensorRange:
    """The range of a value on one sample; ``row_axes`` are those of a row, where a softmax is taken of the value."""
    lowest, highest, non_finite = 0.0, 0.0, 0
    if values.size:
        lowest, highest = float(values.min()), float(values.max())
    if not np.isfinite(highest - lowest):  # NaN comes through, and an infinity is an end
        lowest = highest = 0.0
        for (block,) in _blocks(values):
            finite = block[np.isfinite(block)]
            non_finite += block.size - finite.size
            lowest = min(lowest, float(finite.min(initial=0.0)))
            highest = max(highest, float(finite.max(initial=0.0)))
    absmax, limit, masked = max(highest, -lowest, 0.0), Precision.FP16.largest, 0
    if row_axes and (non_finite or lowest < -limit):
        masked = int(np.count_nonzero(values.max(axis=row_axes) < -limit))
    return TensorRange(
        absmax, values.shape, non_finite, lowest, highest, beyond=int(absmax > limit), masked_rows=masked
    )


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


def _as_rows(values: np.ndarray, count: int) -> np.ndarray:
    return values.reshape(count, values.size // max(1, count))


def _thinned(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Arrays that are broadcast to one shape, each at even distances along its longest axes: ``_MOST`` elements."""
    arrays = np.broadcast_arrays(*arrays)
    while (size := arrays[0].size) > _MOST:
        axis = int(np.argmax(arrays[0].shape))
        length = arrays[0].shape[axis]
        positions = _spaced(length, length * _MOST // size)
        arrays = [np.take(values, positions, axis) for values in arrays]
    return arrays


def _spaced(length: int, count: int) -> np.ndarray:
    """At most ``count`` positions, one at least; not all even or all odd, as those of a fixed step may be."""
    count = max(1, min(length, count))
    return np.arange(count if length else 0) * length // count


def _row_blocks(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Rows, [rows, length], some at a time, with the position of the first."""
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows) if rows.size else 0, step):
        yield start, rows[start : start + step]


def _squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _sum(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Of Add and Sub: mean squares; and of how many elements a side is lost, as the rounded sum is the other side."""
    node, size = probed.node, values[probed.node.outputs[0]].size
    first, second, result = _thinned([values[name] for name in (*node.inputs, node.outputs[0])])
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
    """Mean square of what rounding a norm's operand changes of its results before they are scaled; and of these.

    And of a BatchNormalization how far its operand lies off the running mean, in standard deviations: the median over
    the channels, as a dead one with a variance near zero says nothing.
    """
    operand, node = values[probed.node.inputs[0]], probed.node
    epsilon, shape, statistics = float_attribute(node, "epsilon", 1e-5), operand.shape, list[np.ndarray]()
    axis, groups = attribute(node, "axis"), attribute(node, "num_groups")
    if node.op_type == "BatchNormalization":
        rows = _as_rows(np.moveaxis(operand, 1, 0), shape[1])
        statistics = [values[name].astype(np.float64)[:, None] for name in node.inputs[3:5]]
    elif node.op_type == "LayerNormalization":
        rows = _as_rows(operand, math.prod(shape[: axis if isinstance(axis, int) else -1]))
    else:  # over one channel of a sample, or over a group of them
        rows = _as_rows(operand, shape[0] * (groups if isinstance(groups, int) else shape[1]))

    if statistics:  # each row is a channel, whose statistics are its own
        rows = rows[:, _spaced(rows.shape[1], _MOST // max(1, len(rows)))]
    else:
        rows = rows[_spaced(len(rows), max(_FEWEST_ROWS, _MOST // max(1, rows.shape[1])))]

    def normal(block: np.ndarray, start: int) -> np.ndarray:
        x = block.astype(np.float64)
        stored = [each[start : start + len(x)] for each in statistics]
        centre, spread = stored or (x.mean(-1, keepdims=True), x.var(-1, keepdims=True))
        normalised: np.ndarray = (x - centre) / np.sqrt(spread + epsilon)
        return normalised

    facts, shifts, size = dict.fromkeys(("error", "mean", "square"), 0.0), list[float](), max(1, rows.size)
    for start, block in _row_blocks(rows):
        results = normal(block, start)
        facts["error"] += _squares(normal(rounded(block, precision), start) - results) / size
        facts["mean"] += float(results.sum()) / size
        facts["square"] += _squares(results) / size
        shifts += np.abs(results.mean(-1)).tolist()
    if statistics and shifts:
        # Statistics of 0 and 1 are of a model that was not trained; even powers of two come from rescaling.
        (mean, variance), powers = statistics, np.log2(np.abs(statistics[1]) + epsilon) / 2
        is_trained = (mean != 0).any() or (variance != 1).any()
        if is_trained and not np.allclose(powers, np.round(powers), atol=1e-3):
            facts["deviations"] = float(np.median(shifts))
    return {**facts, "magnitude": _magnitude(operand)}


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
    operand, op_type = values[probed.node.inputs[0]], probed.node.op_type
    is_softmax, axis = op_type == "Softmax", attribute(probed.node, "axis")
    if is_softmax and probed.opset < 13:  # a row has all axes from this one on
        operand = _as_rows(operand, math.prod(operand.shape[: axis if isinstance(axis, int) else 1]))
    else:
        default = -1 if is_softmax else 0
        axis = axis if isinstance(axis, int) else default
        operand = _as_rows(np.moveaxis(operand, axis, -1), operand.size // max(1, operand.shape[axis]))
    facts = {"rows": 0.0, "moved": 0.0, "magnitude": 0.0, "gap": 0.0}
    if is_softmax:
        operand = operand[_spaced(len(operand), max(_FEWEST_ROWS, _MOST // max(1, operand.shape[1])))]
    for _, block in _row_blocks(operand):
        rows = -block if op_type == "ArgMin" else block
        near, largest = rounded(rows, precision), rows.max(-1, keepdims=True)
        if is_softmax:
            weights = [np.exp(each - each.max(-1, keepdims=True)) for each in (rows, near)]
            exact, again = (each / each.sum(-1, keepdims=True) for each in weights)
            facts["moved"] += float(np.abs(exact - again).sum(dtype=np.float64)) / 2
        else:
            facts["moved"] += np.count_nonzero(near.argmax(-1) != rows.argmax(-1))
        away = largest - rows
        facts["rows"] += len(rows)
        facts["magnitude"] = max(facts["magnitude"], _magnitude(largest))
        facts["gap"] += float(np.min(away, -1, where=away > 0, initial=np.inf).sum(dtype=np.float64))
    return {**facts, "gap": facts["gap"] / max(1.0, facts["rows"])}


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
}
