"""What rounding changes at single nodes on data, and which of it is a hazard.

A probe takes a node's operands and results on one sample and a precision, and gives facts: numbers that NumPy computes
in the worker process. ``probe_hazards`` judges them over all samples; each judgement stands behind its probe. Means and
shares are taken of at most ``_MOST`` elements at even distances, since a value may have tens of millions. What a single
element decides, such as a pole or a comparison, is looked at in all, a block at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from mptune.graph.facts import Facts, attribute, casts_integers, facts_of, float_attribute, origin, walk
from mptune.graph.hazards.hazard import Hazard, HazardPlace, NodeFacts, ObservedValues, TensorRange, group_of, spacing
from mptune.graph.hazards.masks import comes_to_softmax
from mptune.graph.hazards.static import state_pairs
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import from_stored, to_stored
from mptune.graph.ops import (
    ADDS,
    ARITHMETIC,
    BOUNDS,
    CENTRING_NORMS,
    COMPARISONS,
    COPIES,
    ELEMENTWISE,
    EXTREMES,
    MATRIX_PRODUCTS,
    MOVEMENT,
)
from mptune.graph.patterns import find_patterns
from mptune.graph.plan import Precision
from mptune.graph.value_types import ValueTypes

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
    "Neg": np.negative, "Abs": np.abs, "Sqrt": np.sqrt, "Identity": np.positive,
    "Min": lambda *operands: reduce(np.minimum, operands), "Max": lambda *operands: reduce(np.maximum, operands),
    "Clip": lambda x, low=-np.inf, high=np.inf: np.clip(x, low, high),
    "Greater": np.greater, "Less": np.less, "Equal": np.equal,
    "GreaterOrEqual": np.greater_equal, "LessOrEqual": np.less_equal,
}  # fmt: skip


@dataclass(frozen=True)
class ProbedNode:
    """A node whose operands are rounded.

    Attributes:
        key: the FP32 value that its facts are filed under: what it gives, or else reads.
        steps: the nodes that compute the operand which may not reach zero, in topological order: they are computed
            again of rounded operands.
    """

    node: Node
    key: str
    steps: tuple[Node, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """The values that a probe is computed from."""
        return frozenset((*self.node.inputs, self.node.outputs[0], *self.leaves)) - {""}

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
        steps = set[int]()
        if node.op_type in POLES:
            pole = node.inputs[POLES[node.op_type]]
            power = facts.number(node.inputs[1]) if node.op_type == "Pow" else -1.0
            is_value = model.info(pole).is_float32 and not facts.is_static(pole)
            if not is_value or power is None or (power > 0 and power.is_integer()):
                continue
            names = {pole}  # arithmetic before it; what reductions give is taken as it is
            for _ in range(_POLE_DEPTH):
                makers = [maker for maker in map(facts.producer, names) if maker is not None]
                makers = [maker for maker in makers if maker.is_standard and maker.op_type in _RECOMPUTED]
                makers = [maker for maker in makers if all(n and model.info(n).is_float32 for n in maker.inputs)]
                steps.update(maker.index for maker in makers)
                names = {name for maker in makers for name in maker.inputs}
        probed += [ProbedNode(node, key, tuple(model.nodes[index] for index in sorted(steps)))] if key else []
    return tuple(probed)


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
        return _PROBES[probed.node.op_type][0](probed, values, precision)


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


def _magnitude(values: np.ndarray) -> float:
    """The largest finite one."""
    return max((float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0)) for (b,) in _blocks(values)), default=0.0)


# -- over all samples -------------------------------------------------------------------------------------------------


def probe_hazards(types: ValueTypes, observed: ObservedValues, guarded: Collection[str | None]) -> list[Hazard]:
    """What rounding changes at single nodes, for the groups that would hold the operands in FP16 or BF16.

    ``guarded``: groups with an epsilon that vanishes.
    """
    facts, nodes = types.facts, {node.name: node for node in types.model.nodes}
    patterns = (pattern for pattern in find_patterns(types.model) if pattern.kind in ("activation", "norm"))
    inside = {index for pattern in patterns for index in pattern.nodes}
    hazards: list[Hazard] = []
    for record in observed.probes:
        node, precision = nodes[record.node], record.precision
        group, judge = group_of(types, node), _PROBES[node.op_type][1]
        if judge is None or group is None or types.group_of[node.index] in types.lacking(precision):
            continue
        ranges = (observed.ranges[name] for name in (*node.inputs, *node.outputs) if name in observed.ranges)
        if any(values.absmax > precision.largest for values in ranges):
            continue  # that is an overflow, and rounded figures say nothing more
        if node.op_type in POLES and group in guarded:
            continue  # by an epsilon that vanishes, which is named already
        hazards += judge(_Look(types, observed, record, node, group, is_inside=node.index in inside))
    in_fp16 = {(hazard.code, hazard.place.node) for hazard in hazards if hazard.precision is Precision.FP16}
    hazards = [h for h in hazards if h.precision is Precision.FP16 or (h.code, h.place.node) not in in_fp16]

    # The same for the groups that compute what such a node reads: rounded there, it is as wrong as rounded here.
    of_operands = list[Hazard]()
    for hazard in hazards:
        node, done = nodes[hazard.place.node or ""], {hazard.place.group}
        is_pole = node.op_type in POLES
        if hazard.code not in (("vanishing-values",) if is_pole else ("cancellation", "spacing", "angle-spacing")):
            continue
        if hazard.code == "angle-spacing":
            held: Iterable[str] = _coarse_angles(facts, observed, hazard.place.tensor, hazard.precision)
        else:
            operands = (hazard.place.tensor,) if is_pole else facts.varying(node)
            held = (origin(types.model, name, MOVEMENT)[0] for name in operands if types.model.info(name).is_float32)
        for source in map(facts.producer, held):
            group = None if source is None else group_of(types, source)
            if source is None or group in done or types.group_of[source.index] in types.lacking(hazard.precision):
                continue
            if group is not None:
                done.add(group)
                of_operands.append(replace(hazard, place=replace(hazard.place, group=group, node=None)))
    return hazards + of_operands


class _Look:
    """One node with its facts on data, over all samples."""

    def __init__(
        self, types: ValueTypes, observed: ObservedValues, record: NodeFacts, node: Node, group: str, *, is_inside: bool
    ) -> None:
        self.facts, self.observed, self.node, self.group = types.facts, observed, node, group
        self.is_inside = is_inside  # a norm or an activation, where an epsilon is no step
        self.on_samples, self.precision = record.facts, record.precision
        # Of a pair of limits for FP16 and BF16, which one: that of the precision whose mantissa is most alike.
        self.limit = int(self.precision.mantissa_bits - Precision.BF16.mantissa_bits < 2)

    def sums(self, *names: str) -> list[float]:
        """Facts, each summed over the samples."""
        return [sum(self.on_samples[name]) for name in names]

    def worst(self, name: str) -> int:
        """Position of the sample on which a fact is the largest, among those where it is finite."""
        values = self.on_samples[name]
        return max(range(len(values)), key=lambda k: values[k] if math.isfinite(values[k]) else -1.0)

    def hazard(
        self, code: str, tensor: str, evidence: Mapping[str, float], worst_by: str, value: float, **about: Any
    ) -> Hazard:
        """A hazard at the node; ``worst_by``: the fact that is largest on the sample that is named."""
        words = {"operator": self.node.op_type, **about.pop("words", {})}
        place = HazardPlace(self.node.name, self.group, tensor, (self.observed.sample(self.worst(worst_by)),))
        return Hazard(code, place, evidence, value=value, words=words, precision=self.precision, **about)


# -- sums and differences ---------------------------------------------------------------------------------------------

_LOST_SHARE = 0.5
_CANCELLATION_FACTOR = 32.0
_CANCELLATION_ERROR = (0.01, 0.03)
"""Relative error of a difference that rounding its operands makes, in FP16 and in BF16, as all pairs here: FP16's own
rounding is 2.8e-4 in the mean, BF16's 2.3e-3. At eight times FP16's limit BF16 would only fail where FP16 does."""
_STEP_BY_STEP = ELEMENTWISE - {"Where"} | {"Identity", "Cast"}
"""Functions of single elements. What a Where chooses may have nothing to do with its condition."""


def _sum(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Of Add and Sub: mean squares; and of how many elements the smaller side is lost, as the rounded sum is the other.

    Where a Sub loses its first side, what is left is the negated second: a difference, not a step.
    """
    node, size = probed.node, values[probed.node.outputs[0]].size
    arrays = [*np.broadcast_arrays(*(values[name] for name in (*node.inputs, node.outputs[0])))]
    if size > _MOST:
        positions = np.unravel_index(_spaced(size, _MOST), arrays[0].shape)
        arrays = [each[positions] for each in arrays]
    first, second, result = arrays
    a, b = rounded(first, precision), rounded(second, precision)
    exact = _FUNCTIONS[node.op_type](a, b)
    total, count = rounded(exact, precision), max(1, result.size)
    squared = {"first": first, "second": second, "result": result, "error": exact - result}
    facts = {name: _squares(each) / count for name, each in squared.items()}
    step, base = (first, b) if facts["first"] < facts["second"] else (second, a)
    steps = (np.abs(step) > 0) & (np.abs(base) > 0) & np.isfinite(base)
    facts["steps"] = np.count_nonzero(steps) * size / count
    facts["lost"] = np.count_nonzero(steps & (total == base)) * size / count
    return facts


def _sum_hazards(look: _Look) -> Iterator[Hazard]:
    """A result much smaller than its operands, which their rounding changes; or a step that is lost."""
    steps, lost, first, second, result, error = look.sums("steps", "lost", "first", "second", "result", "error")
    if steps and lost >= _LOST_SHARE * steps and not look.is_inside:
        yield from _stagnation(look, lost / steps, first, second)
    if math.isfinite(first + second + result + error) and result > 0:
        factor, relative = (math.sqrt(first) + math.sqrt(second)) / math.sqrt(result), math.sqrt(error / result)
        if factor >= _CANCELLATION_FACTOR and relative >= _CANCELLATION_ERROR[look.limit]:
            evidence = {"factor": factor, "relative_error": relative}
            yield look.hazard("cancellation", look.node.outputs[0], evidence, "error", factor)


def _stagnation(look: _Look, share: float, first: float, second: float) -> Iterator[Hazard]:
    """A step that is lost on most elements, as the rounded sum is the other side."""
    facts, node, steps = look.facts, look.node, sum(look.on_samples["steps"])
    (step, moved), (base, unchanged) = sorted(zip((first, second), node.inputs, strict=True), key=lambda side: side[0])
    # What comes back as the input of the next step is counted up, as a clock or a running sum is.
    outputs = {given: output for output, given in state_pairs(facts.model)}
    is_counted = facts.root(outputs.get(facts.root(unchanged), "")) == facts.root(node.outputs[0])
    is_aside = facts.is_static(moved) or facts.is_vector(unchanged) or facts.is_single(unchanged)
    if (is_aside or comes_to_softmax(facts.model, node)) and not is_counted:
        return

    def elementwise(value: str) -> Iterable[str]:
        maker = facts.producer(value)
        return facts.varying(maker) if maker is not None and maker.op_type in _STEP_BY_STEP else ()

    # A step that is made of the other side element by element, as x + 0.04 x**3 is, adds nothing up.
    if not any(facts.root(value) == facts.root(unchanged) for value in walk([moved], elementwise)):
        size, at = (math.sqrt(square / len(look.on_samples["lost"])) for square in (step, base))
        evidence = {"share": share, "elements": int(steps), "step": size, "base": at}
        evidence["spacing"] = spacing(at, look.precision)
        place, words = (node.outputs[0], evidence, "lost", at), {"moved": moved, "unchanged": unchanged}
        yield look.hazard("stagnation", *place, severity="error", words=words)


# -- norms ------------------------------------------------------------------------------------------------------------

_MOVED_NORM = (0.03, 0.1)
"""In standard deviations of a norm's results, of which FP16's own rounding is 3e-4, BF16's 2e-3."""


def _norm(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Mean square of what rounding a norm's operand changes of its results before they are scaled; and of these."""
    node, operand = probed.node, values[probed.node.inputs[0]]
    shape, axis, groups = operand.shape, attribute(node, "axis"), attribute(node, "num_groups")
    count = shape[0] * (groups if isinstance(groups, int) else shape[1])  # over a channel of a sample, or some of them
    if node.op_type == "LayerNormalization":
        count = math.prod(shape[: axis if isinstance(axis, int) else -1])
    if not operand.size:
        return dict.fromkeys(("error", "square", "magnitude"), 0.0)
    rows = operand.reshape(count, -1)
    rows = rows[_spaced(count, max(_FEWEST_ROWS, _MOST // rows.shape[1]))]
    rows = rows[:, _spaced(rows.shape[1], _MOST)]
    results, moved = (
        (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + float_attribute(node, "epsilon", 1e-5))
        for x in (rows.astype(np.float64), rounded(rows, precision).astype(np.float64))
    )
    error, square = _squares(moved - results) / rows.size, _squares(results) / rows.size
    return {"error": error, "square": square, "magnitude": _magnitude(operand)}


def _norm_hazards(look: _Look) -> Iterator[Hazard]:
    """A norm that takes a large mean out of values whose differences rounding has changed by then."""
    error, square = look.sums("error", "square")
    relative = math.sqrt(error / square) if error > 0 and math.isfinite(error + square) else 0.0
    if relative >= _MOVED_NORM[look.limit]:
        reached = look.on_samples["magnitude"][look.worst("error")]
        gap = spacing(reached, look.precision)
        evidence = {"magnitude": reached, "spacing": gap, "relative_error": relative}
        yield look.hazard("cancellation", look.node.inputs[0], evidence, "error", relative, wording="norm")


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


# -- poles ------------------------------------------------------------------------------------------------------------


def _pole(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How many operands rounding brings to a pole.

    ``lost`` operands come to zero or below, ``vanished`` ones by their own rounding and not by that of a difference.
    """
    node, names = probed.node, ("values", "lost", "vanished", "zeroed", "small")
    is_root = node.op_type == "Sqrt" or (node.op_type == "Pow" and values[node.inputs[1]].flat[0] > 0)
    limit = 0.0 if is_root else next(value for value in _LEAST if value < precision.smallest_normal)
    pole = node.inputs[POLES[node.op_type]]
    facts = dict.fromkeys(names, 0.0) | {"smallest": np.inf}
    for operand, *read in _blocks(values[pole], *(values[name] for name in probed.leaves)):
        again = {name: rounded(block, precision) for name, block in zip(probed.leaves, read, strict=True)}
        for step in probed.steps:
            again[step.outputs[0]] = rounded(_FUNCTIONS[step.op_type](*(again[n] for n in step.inputs)), precision)
        alone = rounded(operand, precision)
        before, after = operand, again.get(pole, alone)
        if node.op_type in ("Div", "Reciprocal"):  # whatever the sign
            before, after, alone = np.abs(before), np.abs(after), np.abs(alone)
        is_sound = before > 0
        lost = is_sound & (after < limit)  # NaN is below no limit: it came from before
        facts["values"] += np.count_nonzero(is_sound)
        facts["lost"] += np.count_nonzero(lost)
        facts["vanished"] += np.count_nonzero(lost & (alone < limit))
        facts["smallest"] = min(facts["smallest"], float(np.min(before, where=lost, initial=np.inf)))
        facts["zeroed"] += np.count_nonzero(is_sound & (alone == 0))
        facts["small"] += np.count_nonzero(is_sound & (before < precision.smallest_normal))
    return facts


def _pole_hazards(look: _Look) -> Iterator[Hazard]:
    """Operands that a precision brings to zero or below it, where FP32 does not: Inf or NaN, or most of them lost."""
    values, lost, vanished, zeroed, small = look.sums("values", "lost", "vanished", "zeroed", "small")
    if not lost and zeroed <= _LOST_SHARE * values:  # a few zeros that give no Inf change little
        return
    evidence, vanishes, operator = dict[str, float](), 2 * vanished >= lost, look.node.op_type
    if vanishes:
        evidence = {"zero_share": zeroed / values, "subnormal_share": (small - zeroed) / values}
        evidence["smallest_normal"] = look.precision.smallest_normal
    if lost:
        evidence |= {"lost": int(lost), "values": int(values), "smallest": min(look.on_samples["smallest"])}
    about: dict[str, Any] = {"wording": f"pole {operator}" if lost else ""}
    about["severity"] = "error" if lost and vanishes else "warning"
    code, operand = "vanishing-values" if vanishes else "cancellation", look.node.inputs[POLES[operator]]
    yield look.hazard(code, operand, evidence, "lost" if lost else "zeroed", lost, **about)


# -- angles -----------------------------------------------------------------------------------------------------------

_COARSE = 0.125
"""Radians, 1/50 of a period. Rounding to values so far apart changes a sine by up to 6 %, which is what FP16 does from
128 rad on and BF16 from 16 rad on; each doubling of the angle doubles it."""
_MOVED_SINE = (0.01, 0.03)
"""Relative error of all sines. A few large angles among many small ones, or whole numbers, change less."""
_SCALES_ANGLE = MATRIX_PRODUCTS | {"Mul", "Div"}
_PASSES_ANGLE = _SCALES_ANGLE | ADDS | BOUNDS | MOVEMENT | COPIES | {"Neg", "Abs", "Where"}
"""The nodes that compute an angle from other values. What a CumSum adds up has an angle's size only as the sum."""
_WHOLE = frozenset({"Range", "Floor", "Ceil", "Round"})
_SCALES_SINE = MOVEMENT | {"Mul", "Div", "Pow"}


def _angle(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """Mean squares of sines and of what rounding the angles changes of them; and how many angles stay different.

    Those are counted whose spacing is ``_COARSE``.
    """
    angles, turn = values[probed.node.inputs[0]], {"Sin": np.sin, "Cos": np.cos}[probed.node.op_type]
    spread = angles.reshape(-1)[_spaced(angles.size, _MOST)]
    near, exact = rounded(spread, precision), turn(spread)
    is_coarse = np.abs(spread) >= math.ldexp(_COARSE, precision.mantissa_bits)
    different, left = (float(np.unique(each[is_coarse]).size) for each in (spread, near))
    size = max(1, spread.size)
    facts = {"error": _squares(turn(near) - exact) / size, "square": _squares(exact) / size}
    return {**facts, "largest": _magnitude(angles), "different": different, "left": left}


def _angle_hazards(look: _Look) -> Iterator[Hazard]:
    """Angles so large that they turn by a considerable part of a period from one value of a precision to the next."""
    error, square = look.sums("error", "square")
    largest, angle = max(look.on_samples["largest"]), look.node.inputs[0]
    gap, relative = spacing(largest, look.precision), math.sqrt(error / square) if square > 0 else 0.0
    if gap < _COARSE or not _MOVED_SINE[look.limit] <= relative < math.inf:
        return
    coarse, facts = _coarse_angles(look.facts, look.observed, angle, look.precision), look.facts

    # What is added to the value that its angle is made of, as Snake's x + sin(ax)**2 / a, has errors as small as that.
    def scaled(value: str) -> Iterable[str]:
        return [reader.outputs[0] for reader in facts.readers(value) if reader.op_type in _SCALES_SINE]

    added = (facts.other(r, v) for v in walk(look.node.outputs, scaled) for r in facts.readers(v) if r.op_type in ADDS)
    if any(facts.root(other) in coarse for other in added):
        return
    makers = (node for node in map(facts.producer, coarse) if node is not None and node.op_type not in MOVEMENT)
    first = min(makers, key=lambda node: node.index, default=look.node)
    counts = {name: int(look.on_samples[name][look.worst("largest")]) for name in ("different", "left")}
    evidence = {"largest": largest, "spacing": gap, "periods": gap / math.tau, **counts}
    words = {"first": first.name, "coarse_from": math.ldexp(_COARSE, look.precision.mantissa_bits)}
    yield look.hazard("angle-spacing", angle, evidence, "largest", largest, severity="error", words=words)


def _coarse_angles(facts: Facts, observed: ObservedValues, angle: str, precision: Precision) -> dict[str, float]:
    """The values from which rounding makes an angle coarse, back from the angle; each with the radians of one unit."""
    radians = {facts.root(angle): 1.0}

    def onward(value: str) -> Iterable[str]:
        node = facts.producer(value)
        for name in map(facts.root, () if node is None or node.op_type not in _PASSES_ANGLE else facts.varying(node)):
            reached, maker = observed.absmax.get(name, 0.0), origin(facts.model, name, MOVEMENT - {"Cast"})[1]
            is_whole = maker is not None and (maker.op_type in _WHOLE or casts_integers(facts.model, maker))
            if name in radians or not reached or (is_whole and reached <= precision.exact_integers):
                continue
            scales = node is not None and node.op_type in _SCALES_ANGLE
            unit = radians[value] * (observed.absmax.get(value, reached) / reached if scales else 1.0)
            if spacing(reached, precision) * unit >= _COARSE:
                radians[name] = unit
                yield name

    return {value: radians[value] for value in walk([*radians], onward)}


# -- decisions --------------------------------------------------------------------------------------------------------

_MOVED_WEIGHTS = (0.01, 0.02)
"""Share of a softmax's weight that rounding its logits moves, in the mean over the rows. Of 64 normal logits of a
standard deviation of 3 to 10 BF16 moves 0.3 to 0.4 %."""
_MOVED_ROWS = (0.05, 0.1)
"""Share of the rows that rounding decides otherwise. Of normal scores of 10 classes BF16 decides 0.2 % otherwise, of
1,000 classes 1.2 %."""
_FEWEST_MOVED = 2.0


def _comparison(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How many answers change, of how many; of Equal those are counted that are equal, before or after."""
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


def _decision_hazards(look: _Look) -> Iterator[Hazard]:
    """Decisions that rounding changes: a softmax's weights, the largest element, a comparison."""
    moved, rows = look.sums("moved", "rows")
    op_type, share = look.node.op_type, moved / rows if rows else math.nan
    is_softmax = op_type == "Softmax"
    least = (_MOVED_WEIGHTS if is_softmax else _MOVED_ROWS)[look.limit]
    if least <= share < math.inf and (is_softmax or moved >= _FEWEST_MOVED):
        worst = look.worst("moved")
        magnitude, gap = look.on_samples["magnitude"][worst], look.on_samples["gap"][worst]
        evidence = {"magnitude": magnitude, "spacing": spacing(magnitude, look.precision), "share": share}
        evidence |= {"gap": gap} if math.isfinite(gap) else {}
        wording = "softmax" if is_softmax else "comparison" if op_type in COMPARISONS else "largest"
        wording += " Equal" if op_type == "Equal" else ""
        yield look.hazard("spacing", look.node.inputs[0], evidence, "moved", magnitude, wording=wording)


_Probe = Callable[[ProbedNode, Arrays, Precision], Numbers]
_PROBES: Mapping[str, tuple[_Probe, Callable[[_Look], Iterable[Hazard]] | None]] = {
    **dict.fromkeys(("Add", "Sub"), (_sum, _sum_hazards)),
    **dict.fromkeys(POLES, (_pole, _pole_hazards)),
    **dict.fromkeys(("Softmax", *EXTREMES), (_rows, _decision_hazards)),
    **dict.fromkeys(COMPARISONS, (_comparison, _decision_hazards)),
    **dict.fromkeys(CENTRING_NORMS, (_norm, _norm_hazards)),
    **dict.fromkeys(("Sin", "Cos"), (_angle, _angle_hazards)),
    "BatchNormalization": (_batch_norm, None),  # the first one far off says it all: see ``find``
}
