"""THE table of what rounding does at single nodes on data: operator and values -> code and evidence.

A row of ``_TABLE`` has probes and judges. A probe takes a node's operands on one sample, and a precision, and gives
numbers, in the worker process. A judge takes them over all samples, and gives the hazard, with the values that are as
wrong where other nodes round them. Means and shares are taken of at most ``_MOST`` elements at even distances, since a
value may have tens of millions; at a pole, where a single one decides, all are looked at.

Every node is judged. At one that measurement says makes an error (``find.blame``), a tenth of each limit is enough:
that it matters is shown already, and only why is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np

from mptune.graph import ops
from mptune.graph.facts import Facts, attribute, casts_integers, facts_of, origin, walk
from mptune.graph.hazards.hazard import Hazard, HazardPlace, NodeFacts, ObservedValues, TensorRange, group_of, spacing
from mptune.graph.hazards.masks import masks_of
from mptune.graph.hazards.static import state_pairs
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import rounded
from mptune.graph.patterns import find_patterns
from mptune.graph.plan import Precision
from mptune.graph.value_types import ValueTypes

Arrays = Mapping[str, np.ndarray]
Numbers = dict[str, float]
Named = tuple[Hazard, Iterable[str]]  # a hazard, and the values whose rounding elsewhere does the same
_BLOCK, _MOST, _OF_ROW, _FEWEST_ROWS = 1 << 16, 1 << 15, 1 << 18, 16
"""Elements that stay in a core's cache; from which means and shares are estimated, to half a percent; the same of rows,
and how many rows at least, however long they are."""
POLES: Mapping[str, int] = {"Log": 0, "Sqrt": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}
"""Operator -> which of its inputs may not reach zero, or fall below it."""
_FIRST_OPSET = 11  # whose Equal takes floats, and whose Clip takes its bounds as inputs
_POLE_DEPTH = 4  # operators that are computed again: a variance is subtracted, clipped, and an epsilon is added
_RECOMPUTED = ops.ARITHMETIC | ops.BOUNDS | {"Neg", "Abs", "Sqrt", "Identity"}
_LEAST = (1e-30, 1e-38)
"""No precision has a value between zero and one of these; or subnormal ones, which engines take for zero."""
_WHOLE = frozenset({"Floor", "Ceil", "Round"})
_NORMS, _OF_ROWS = ops.CENTRING_NORMS - {"BatchNormalization"}, ops.EXTREMES | {"Softmax"}


def _weights(rows: np.ndarray) -> Any:
    exponentials = np.exp(rows - rows.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _normalised(rows: np.ndarray, epsilon: float) -> Any:
    wide = rows.astype(np.float64)
    return (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + epsilon)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power,
    "Neg": np.negative, "Abs": np.abs, "Sqrt": np.sqrt, "Identity": np.positive,
    "Min": lambda *operands: reduce(np.minimum, operands), "Max": lambda *operands: reduce(np.maximum, operands),
    "Clip": lambda x, low=-np.inf, high=np.inf: np.clip(x, low, high),
    "Greater": np.greater, "Less": np.less, "Equal": np.equal,
    "GreaterOrEqual": np.greater_equal, "LessOrEqual": np.less_equal,
    "Log": np.log, "Acos": np.arccos, "Asin": np.arcsin, "Sin": np.sin, "Cos": np.cos,
    "Floor": np.floor, "Ceil": np.ceil, "Round": np.rint, "Cast": np.trunc,
    "Softmax": _weights, "ArgMax": partial(np.argmax, axis=-1), "ArgMin": partial(np.argmin, axis=-1),
}  # fmt: skip


@dataclass(frozen=True)
class ProbedNode:
    """A node whose operands are rounded."""

    node: Node
    key: str  # the FP32 value that its facts are filed under: what it gives, or else reads
    steps: tuple[Node, ...] = ()  # compute the operand that may not reach zero; they are computed of rounded operands

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
        if not node.is_standard or node.op_type not in _TABLE or attribute(node, "training_mode") == 1:
            continue
        info, is_whole = model.info(node.inputs[0]), node.op_type in _WHOLE | {"Cast"}
        if not info.is_float32 or 0 in (info.shape or ()) or not facts.varying(node):
            continue
        computed = (name for name in (node.outputs[0], *node.inputs[:2]) if name not in model.initializers)
        key, steps = next((name for name in computed if model.info(name).is_float32), ""), set[int]()
        if not key or (is_whole and index_reader(facts, node) is None):
            continue
        if node.op_type in POLES:
            pole = node.inputs[POLES[node.op_type]]
            power = facts.number(node.inputs[1]) if node.op_type == "Pow" else -1.0
            is_value = model.info(pole).is_float32 and not facts.is_static(pole)
            if not is_value or power is None or (power > 0 and power.is_integer()):
                continue
            names = {pole}  # arithmetic before it; what reductions give is taken as it is
            for _ in range(_POLE_DEPTH):
                makers = [m for m in map(facts.producer, names) if m and m.is_standard and m.op_type in _RECOMPUTED]
                makers = [maker for maker in makers if all(n and model.info(n).is_float32 for n in maker.inputs)]
                steps.update(maker.index for maker in makers)
                names = {name for maker in makers for name in maker.inputs}
        probed.append(ProbedNode(node, key, tuple(model.nodes[index] for index in sorted(steps))))
    return tuple(probed)


def range_of(values: np.ndarray, row_axes: tuple[int, ...] = ()) -> TensorRange:
    """The range of a value on one sample; ``row_axes`` are those of a row, where a softmax is taken of the value."""
    lowest, highest = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not np.isfinite(highest - lowest):  # NaN comes through, and an infinity is an end
        finite = np.isfinite(values)
        lowest, highest = (float(end(values, where=finite, initial=0.0)) for end in (np.min, np.max))
    absmax, limit, masked = max(highest, -lowest, 0.0), Precision.FP16.largest, 0
    if row_axes and lowest < -limit:
        largest = values.max(axis=row_axes)  # a row that is -inf throughout is NaN in FP32 already
        masked = int(np.count_nonzero((largest < -limit) & (largest > -np.inf)))
    return TensorRange(absmax, values.shape, lowest, highest, beyond=int(absmax > limit), masked_rows=masked)


def facts_on(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """The facts of a node on one sample; ``values`` holds those that it ``reads``. None where there are no elements."""
    with np.errstate(all="ignore"):
        every = [probe(probed, values, precision) for probe in _TABLE[probed.node.op_type][0]]
    return {name: float(number) for facts in every for name, number in facts.items()}


def _spaced(length: int, count: int) -> np.ndarray:
    """At most ``count`` positions, one at least; not all even or all odd, as those of a fixed step may be."""
    count = max(1, min(length, count))
    return np.arange(count if length else 0) * length // count


def _mean_square(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum()) / max(1, values.size)


def _sources(
    facts: Facts, values: Iterable[str], operators: Collection[str], among: Collection[str] | None = None
) -> list[str]:
    """Values, and those that these operators compute them from, one behind another; ``among`` these only."""

    def operands(value: str) -> list[str]:
        maker = facts.producer(value)
        names = facts.varying(maker) if maker is not None and maker.op_type in operators else []
        return [name for name in names if among is None or name in among]

    return [*walk(values, operands)]


# -- all nodes over all samples ---------------------------------------------------------------------------------------


def probe_hazards(
    types: ValueTypes, observed: ObservedValues, guarded: Collection[str | None], blamed: Collection[str]
) -> list[Hazard]:
    """What rounding changes at single nodes, for the groups that would hold the operands in FP16 or BF16.

    ``guarded``: groups with an epsilon that vanishes. ``blamed``: nodes that make errors.
    """
    nodes, named = {node.name: node for node in types.model.nodes}, list[Named]()
    patterns = (pattern for pattern in find_patterns(types.model) if pattern.kind in ("activation", "norm"))
    inside = {index for pattern in patterns for index in pattern.nodes}
    for record in observed.probes:
        node, precision = nodes[record.node], record.precision
        group, maker = group_of(types, node, precision), types.facts.producer(node.inputs[0])
        if group is None and node.op_type not in ("NonMaxSuppression", "Cast"):  # which read what FP16 has rounded
            continue
        ranges = (observed.ranges[name] for name in (*node.inputs, *node.outputs) if name in observed.ranges)
        if any(values.absmax > precision.largest for values in ranges) or not any(map(any, record.facts.values())):
            continue  # that is an overflow, and rounded figures say nothing more; or there are no elements
        look = _Look(types.facts, observed, record, node, group, node.index in inside, node.name in blamed)
        judges = (j for j in _TABLE[node.op_type][1] if j is not _pole_hazard or group not in guarded)
        why = next(filter(None, (judge(look) for judge in judges)), None)  # the first that says it
        # What a sum has lost is named there, and not again where its logarithm is taken.
        is_lost = maker and any(h.code == "stagnation" and h.place.node == maker.name for h, _ in named)
        named += [why] if why and not is_lost else []
    in_fp16 = {(hazard.code, hazard.place.node) for hazard, _ in named if hazard.precision is Precision.FP16}
    named = [(h, v) for h, v in named if h.precision is Precision.FP16 or (h.code, h.place.node) not in in_fp16]

    # The same for the groups that compute what such a node reads: rounded there, it is as wrong as rounded here.
    hazards = [hazard for hazard, _ in named if hazard.place.group or hazard.code != "index-in-float"]
    for hazard, values in named:
        done = {hazard.place.group, None}
        for source in filter(None, map(types.facts.producer, values)):
            group = group_of(types, source, hazard.precision)
            if group not in done:
                name = source.name if hazard.code == "index-in-float" else None  # it has no digits left there
                hazards.append(replace(hazard, place=replace(hazard.place, group=group, node=name)))
                done.add(group)
    return hazards


@dataclass(frozen=True)
class _Look:
    """One node with its facts on data, over all samples."""

    facts: Facts
    observed: ObservedValues
    record: NodeFacts
    node: Node
    group: str | None
    is_inside: bool  # of a norm or an activation, where neither an epsilon nor a mean is a step
    is_blamed: bool  # it makes an error

    @cached_property
    def mean(self) -> Numbers:
        """The facts, each as its mean over the samples."""
        return {name: sum(numbers) / len(numbers) for name, numbers in self.record.facts.items()}

    @property
    def operands(self) -> list[str]:
        """The values that the node reads, where they were computed."""
        names = (name for name in self.facts.varying(self.node) if self.facts.model.info(name).is_float32)
        return [origin(self.facts.model, name, ops.MOVEMENT)[0] for name in names]

    def limit(self, limits: tuple[float, float]) -> float:
        """Of a pair for FP16 and BF16 that of the precision whose mantissa is most alike."""
        limit = limits[int(self.record.precision.mantissa_bits - Precision.BF16.mantissa_bits < 2)]
        return 0.1 * limit if self.is_blamed else limit

    def at(self, node: str) -> Mapping[str, tuple[float, ...]]:
        """The facts of another node."""
        precision = self.record.precision
        return next((r.facts for r in self.observed.probes if r.node == node and r.precision is precision), {})

    def worst(self, name: str) -> int:
        """Position of the sample on which a fact is the largest, among those where it is finite."""
        values = self.record.facts[name]
        return max(range(len(values)), key=lambda k: values[k] if math.isfinite(values[k]) else -1.0)

    def spaced(self, *tensors: str, magnitude: float = 0.0) -> Numbers:
        """The largest magnitude of some values, and the precision's spacing there."""
        magnitude = max((magnitude, *(self.observed.absmax.get(tensor, 0.0) for tensor in tensors)))
        return {"magnitude": magnitude, "spacing": spacing(magnitude, self.record.precision)}

    def names(
        self, code: str, tensor: str, evidence: Numbers, worst_by: str, also: Iterable[str] = (), **about: Any
    ) -> Named:
        """A hazard at the node; ``worst_by``: the fact that is largest on the sample that is named."""
        place = HazardPlace(self.node.name, self.group, tensor, (self.observed.sample(self.worst(worst_by)),))
        words = {"operator": self.node.op_type, **about.pop("words", {})}
        value = next(iter(evidence.values()))
        return Hazard(code, place, evidence, value=value, words=words, precision=self.record.precision, **about), also


def _change(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """What changes of a node's result where its operands are rounded; as mean squares where nothing else is said.

    ``moved`` of ``rows`` results are others; of Softmax, how much weight is elsewhere; of Equal, those are counted that
    are equal, before or after. ``gap``: how far the two operands, or the next largest of a row, are away in the mean.
    ``idle`` of ``steps`` elements are those whose smaller side is lost, as the rounded sum is the other. Where a Sub
    loses its first side, what is left is the negated second: a difference, not a step.
    """
    node, operand = probed.node, values[probed.node.inputs[0]]
    op_type, function = node.op_type, _FUNCTIONS.get(node.op_type, np.positive)
    if not values[node.outputs[0]].size or not operand.size:
        return {}
    if op_type in _NORMS | _OF_ROWS:
        if op_type in _OF_ROWS:
            lines = np.moveaxis(operand, attribute(node, "axis", -1 if op_type == "Softmax" else 0), -1)
            lines = lines.reshape(-1, lines.shape[-1])
        else:  # over a channel of a sample, or some of them
            count = operand.shape[0] * attribute(node, "num_groups", operand.shape[1])
            if op_type == "LayerNormalization":
                count = math.prod(operand.shape[: attribute(node, "axis", -1)])
            function = partial(_normalised, epsilon=attribute(node, "epsilon", 1e-5))
            lines = operand.reshape(count, -1)
            lines = lines[:, _spaced(lines.shape[1], _OF_ROW)]
        operands = [lines[_spaced(len(lines), max(_FEWEST_ROWS, _OF_ROW // lines.shape[1]))]]
    else:
        operands = [*np.broadcast_arrays(*(values[name] for name in node.inputs))]
        if operands[0].size > _MOST:
            positions = np.unravel_index(_spaced(operands[0].size, _MOST), operands[0].shape)
            operands = [each[positions] for each in operands]
    near = [rounded(each, precision) for each in operands]
    exact, again = (function(*each) for each in (operands, near))
    facts: dict[str, Any] = {"rows": exact.size, "moved": np.count_nonzero(exact != again)}
    facts |= {"error": _mean_square(np.subtract(again, exact, dtype=np.float64)), "square": _mean_square(exact)}
    facts |= {"first": _mean_square(operands[0]), "shift": _mean_square(near[0] - operands[0])}
    facts["whole"] = all((each == np.rint(each)).all() for each in operands)
    if op_type in ("Add", "Sub"):
        facts["second"] = _mean_square(operands[1])
        step, base = (operands[0], near[1]) if facts["first"] < facts["second"] else (operands[1], near[0])
        steps, size = (np.abs(step) > 0) & (np.abs(base) > 0) & np.isfinite(base), values[node.outputs[0]].size
        facts["steps"] = np.count_nonzero(steps) * size / exact.size
        facts["idle"] = np.count_nonzero(steps & (rounded(again, precision) == base)) * size / exact.size
        facts |= {"variance": exact.var(dtype=np.float64), "rounding": _mean_square(rounded(exact, precision) - exact)}
    elif op_type in ops.COMPARISONS:
        facts["gap"] = np.abs(operands[0] - operands[1]).mean(dtype=np.float64)
        facts["rows"] = np.count_nonzero(exact | again) if op_type == "Equal" else exact.size
    elif op_type in ("Sin", "Cos"):
        coarse = np.abs(operands[0]) >= math.ldexp(_COARSE, precision.mantissa_bits)
        facts |= {"different": np.unique(operands[0][coarse]).size, "left": np.unique(near[0][coarse]).size}
    elif op_type in _OF_ROWS:
        rows = -operands[0] if op_type == "ArgMin" else operands[0]
        away = (largest := rows.max(-1, keepdims=True)) - rows
        facts["gap"] = np.min(away, -1, where=away > 0, initial=np.inf).mean(dtype=np.float64)
        facts |= {"rows": len(rows), "largest": np.max(np.abs(largest), where=np.isfinite(largest), initial=0.0)}
        if op_type == "Softmax":
            facts["moved"] = np.abs(exact - again).sum(dtype=np.float64) / 2
    return facts


_LOST_SHARE = 0.5
_STEP_BY_STEP = ops.ELEMENTWISE - {"Where"} | {"Identity", "Cast"}
"""Functions of single elements. What a Where chooses may have nothing to do with its condition."""


def _step_hazard(look: _Look) -> Named | None:
    """A step that is lost on most elements, as the rounded sum is the other side."""
    facts, node, mean = look.facts, look.node, look.mean
    # Where a logarithm is taken of the sum, one plus a small value is no matter of rounding: what is left is zero.
    is_logged = any(reader.op_type == "Log" for reader in facts.readers(node.outputs[0]))
    if not mean["steps"] or mean["idle"] < _LOST_SHARE * mean["steps"] or (look.is_inside and not is_logged):
        return None
    (step, moved), (base, unchanged) = sorted(zip((mean["first"], mean["second"]), node.inputs, strict=True))
    # What comes back as the input of the next step is counted up, as a clock or a running sum is.
    outputs = {given: output for output, given in state_pairs(facts.model)}
    is_counted = facts.root(outputs.get(facts.root(unchanged), "")) == facts.root(node.outputs[0])
    is_level = (facts.is_vector(unchanged) or facts.is_single(unchanged)) and not is_logged
    is_score = node.outputs[0] in masks_of(facts.model).before_softmax
    if (facts.is_static(moved) or is_level or is_score) and not is_counted:
        return None
    # A step that is made of the other side element by element, as x + 0.04 x**3 is, adds nothing up.
    if facts.root(unchanged) in map(facts.root, _sources(facts, [moved], _STEP_BY_STEP)):
        return None
    evidence = {"base": math.sqrt(base), "spacing": spacing(math.sqrt(base), look.record.precision)}
    evidence |= {"step": math.sqrt(step), "share": mean["idle"] / mean["steps"]}
    evidence["elements"] = round(mean["steps"] * len(look.record.facts["steps"]))
    severity = "warning" if is_logged else "error"  # where the sum is read at once, its error shows the loss
    words = {"moved": moved, "unchanged": unchanged, "is_logged": is_logged}
    return look.names("stagnation", node.outputs[0], evidence, "idle", severity=severity, words=words)


_FACTOR, _RELATIVE = (32.0, 32.0), (0.01, 0.03)
"""Of a difference, the ratio of its operands to it; and the relative error that rounding them makes, in FP16 and in
BF16, as all pairs here: FP16's own rounding is 2.8e-4 in the mean, BF16's 2.3e-3."""
_MOVED_NORM = (0.03, 0.1)  # in standard deviations of a norm's results, or of an output within a sample


def _error_hazard(look: _Look) -> Named | None:
    """A result much smaller than its operands, which their rounding changes; or of a function so steep."""
    mean, (operand, *others) = look.mean, look.node.inputs
    square, sizes = mean["square"], [math.sqrt(mean.get(name, 0.0)) for name in ("first", "second")]
    if not 0 < mean["error"] < math.inf or not 0 < square < math.inf or not math.isfinite(sum(sizes)):
        return None
    relative = math.sqrt(mean["error"] / square)
    if look.node.op_type in _NORMS:  # which take a large mean out of values whose differences rounding has changed
        if relative < look.limit(_MOVED_NORM):
            return None
        evidence = {**look.spaced(operand), "relative_error": relative}
        return look.names("cancellation", operand, evidence, "error", look.operands, wording="norm")
    factor = sum(sizes) / math.sqrt(square) if others else relative / math.sqrt(mean["shift"] / mean["first"])
    if factor < look.limit(_FACTOR) or relative < look.limit(_RELATIVE):
        return None
    evidence, tensor = {"factor": factor, "relative_error": relative}, look.node.outputs[0] if others else operand
    return look.names("cancellation", tensor, evidence, "error", look.operands, wording="" if others else "slope")


def _level_hazard(look: _Look) -> Named | None:
    """An output on so high a level that the precision's spacing hides how it varies within a sample.

    An error over all samples does not show it where each sample has a level of its own.
    """
    rounding, variance, output = look.mean["rounding"], look.mean["variance"], look.node.outputs[0]
    ends = (origin(look.facts.model, end.name, ops.MOVEMENT)[0] for end in look.facts.model.outputs)
    relative = math.sqrt(rounding / variance) if variance > 0 else 0.0
    if not look.limit(_MOVED_NORM) <= relative < math.inf or output not in ends:
        return None
    evidence = {**look.spaced(output), "varies": math.sqrt(variance), "relative_error": relative}
    return look.names("spacing", output, evidence, "rounding", wording="output", severity="error")


def _pole(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How many operands rounding brings to a pole.

    ``lost`` operands come to zero or below, ``vanished`` ones by their own rounding and not by that of a difference.
    """
    node, pole = probed.node, probed.node.inputs[POLES[probed.node.op_type]]
    is_root = node.op_type == "Sqrt" or (node.op_type == "Pow" and values[node.inputs[1]].flat[0] > 0)
    limit = 0.0 if is_root else next(value for value in _LEAST if value < precision.smallest_normal)
    facts = dict.fromkeys(("values", "lost", "vanished", "zeroed", "small"), 0.0) | {"smallest": np.inf}
    read, flags = [values[name] for name in (pole, *probed.leaves)], ["external_loop", "buffered"]
    if not read[0].size:
        return {}
    iterate: Any = np.nditer  # whose types do not know these lists
    with iterate(read, flags, [["readonly"]] * len(read), order="C", buffersize=_BLOCK) as blocks:
        for block in blocks:
            before, *leaves = block if isinstance(block, tuple) else (block,)
            again = {name: rounded(leaf, precision) for name, leaf in zip(probed.leaves, leaves, strict=True)}
            for step in probed.steps:
                again[step.outputs[0]] = rounded(_FUNCTIONS[step.op_type](*(again[n] for n in step.inputs)), precision)
            alone = rounded(before, precision)
            after = again.get(pole, alone)
            if node.op_type in ("Div", "Reciprocal"):  # whatever the sign
                before, after, alone = np.abs(before), np.abs(after), np.abs(alone)
            is_sound = before > 0
            lost = is_sound & (after < limit)  # NaN is below no limit: it came from before
            counted = {"values": is_sound, "lost": lost, "vanished": lost & (alone < limit)}
            counted |= {"zeroed": is_sound & (alone == 0), "small": is_sound & (before < precision.smallest_normal)}
            facts |= {name: facts[name] + np.count_nonzero(each) for name, each in counted.items()}
            facts["smallest"] = min(facts["smallest"], float(np.min(before, where=lost, initial=np.inf)))
    return facts


def _pole_hazard(look: _Look) -> Named | None:
    """Operands that a precision brings to zero or below it, where FP32 does not: Inf or NaN, or most of them lost."""
    names = ("values", "lost", "vanished", "zeroed", "small")
    values, lost, vanished, zeroed, small = (sum(look.record.facts[name]) for name in names)
    if not lost and zeroed <= _LOST_SHARE * values:  # a few zeros that give no Inf change little
        return None
    evidence, vanishes, op_type = Numbers(), 2 * vanished >= lost, look.node.op_type
    if lost:
        evidence |= {"lost": int(lost), "values": int(values), "smallest": min(look.record.facts["smallest"])}
    if vanishes:
        evidence |= {"zero_share": zeroed / values, "subnormal_share": (small - zeroed) / values}
        evidence["smallest_normal"] = look.record.precision.smallest_normal
    operand = look.node.inputs[POLES[op_type]]
    also = [origin(look.facts.model, operand, ops.MOVEMENT)[0]] if vanishes else []
    place = ("vanishing-values" if vanishes else "cancellation", operand, evidence, "lost" if lost else "zeroed", also)
    severity = "error" if lost and vanishes else "warning"
    return look.names(*place, wording=f"pole {op_type}" if lost else "", severity=severity)


# -- angles and coordinates -------------------------------------------------------------------------------------------

_COARSE = 0.125
"""Radians, 1/50 of a period. Rounding to values so far apart changes a sine by up to 6 %, which is what FP16 does from
128 rad on and BF16 from 16 rad on; each doubling of the angle doubles it."""
_SCALES = ops.MATRIX_PRODUCTS | {"Mul", "Div"}
_PASSES = _SCALES | ops.ADDS | ops.BOUNDS | ops.MOVEMENT | ops.COPIES | {"Neg", "Abs", "Where"}
"""The nodes that compute an angle from other values. What a CumSum adds up has an angle's size only as the sum."""
_SCALES_SINE = ops.MOVEMENT | {"Mul", "Div", "Pow"}


def _angle_hazard(look: _Look) -> Named | None:
    """Angles so large that they turn by a considerable part of a period from one value of a precision to the next.

    A few large angles among many small ones, or whole numbers, change less of all sines.
    """
    facts, angle, mean = look.facts, look.node.inputs[0], look.mean
    largest, gap = look.spaced(angle).values()
    relative = math.sqrt(mean["error"] / mean["square"]) if mean["square"] > 0 else 0.0
    if gap < _COARSE or not look.limit(_RELATIVE) <= relative < math.inf:
        return None
    coarse = _coarse(look, angle, _COARSE)
    # What is added to the value that its angle is made of, as Snake's x + sin(ax)**2 / a, has errors as small as that.
    for value in facts.onward(look.node.outputs, _SCALES_SINE):
        added = (facts.other(reader, value) for reader in facts.readers(value) if reader.op_type in ops.ADDS)
        if any(facts.root(name) in coarse for name in added):
            return None
    makers = (node for node in map(facts.producer, coarse) if node is not None and node.op_type not in ops.MOVEMENT)
    first = min(makers, key=lambda node: node.index, default=look.node)
    counts = {name: int(look.record.facts[name][look.worst("different")]) for name in ("different", "left")}
    evidence = {"largest": largest, "spacing": gap, "periods": gap / math.tau, **counts}
    words = {"first": first.name, "coarse_from": math.ldexp(_COARSE, look.record.precision.mantissa_bits)}
    return look.names("angle-spacing", angle, evidence, "different", coarse, severity="error", words=words)


def _coarse(look: _Look, value: str, least: float) -> list[str]:
    """The values whose spacing is ``least`` of a value that is computed from them, or more; back from that value."""
    facts, units, reached = look.facts, {look.facts.root(value): 1.0}, look.observed.absmax

    def onward(value: str) -> Iterable[str]:
        node = facts.producer(value)
        for name in map(facts.root, () if node is None or node.op_type not in _PASSES else facts.varying(node)):
            largest, maker = reached.get(name, 0.0), origin(facts.model, name, ops.MOVEMENT - {"Cast"})[1]
            is_whole = maker is not None and (maker.op_type in _WHOLE | {"Range"} or casts_integers(facts.model, maker))
            if name in units or not largest or (is_whole and largest <= look.record.precision.exact_integers):
                continue
            # What one unit of it is of the last value.
            unit = units[value] * (reached.get(value, largest) / largest if node and node.op_type in _SCALES else 1.0)
            if spacing(largest, look.record.precision) * unit >= least:
                units[name] = unit
                yield name

    return list(walk([*units], onward))


_MOVED_PLACE: Mapping[str, tuple[float, float]] = {"GridSample": (0.05, 0.2), "NonMaxSuppression": (0.02, 0.1)}
"""Root mean square of what rounding moves a place: in pixels; of boxes, in their sides."""


def _place(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How far rounding moves coordinates, in pixels or in sides of a box; ``unit`` is that of 1 there."""
    node, places = probed.node, values[probed.node.inputs[0]]
    if node.op_type == "GridSample":  # -1 and 1 are the edges of the image; of the last axis, x comes first
        unit, places = np.array(places.shape[:1:-1]) / 2, values[node.inputs[1]].clip(-1, 1)
    else:
        start = 0 if attribute(node, "center_point_box") == 1 else places[..., :2]
        side = np.median(np.abs(places[..., 2:] - start)) if places.size else 0.0
        unit = np.array([1 / side if side > 0 else 0.0])
    return {"error": _mean_square((rounded(places, precision) - places) * unit), "unit": float(unit.max())}


def _place_hazard(look: _Look) -> Named | None:
    """Coordinates that rounding moves by a part of a pixel, or of a box."""
    op_type, moved = look.node.op_type, math.sqrt(look.mean["error"])
    places, limit = look.node.inputs[op_type == "GridSample"], look.limit(_MOVED_PLACE[op_type])
    if not limit <= moved < math.inf:
        return None
    coarse = _coarse(look, places, math.sqrt(12) * limit / look.mean["unit"])  # values that are as far apart as that
    return look.names("spacing", places, {**look.spaced(places), "moved": moved}, "error", coarse, wording=op_type)


# -- decisions and whole numbers --------------------------------------------------------------------------------------

_MOVED_WEIGHTS, _MOVED_ROWS = (0.01, 0.02), (0.05, 0.1)
"""Share of a softmax's weight that rounding its logits moves, in the mean over the rows; and of the rows that it
decides otherwise. Of 64 normal logits of a standard deviation of 3 to 10 BF16 moves 0.3 to 0.4 %, and of normal scores
of 10 classes it decides 0.2 % otherwise, of 1,000 classes 1.2 %."""
_MOVED_INDICES = (0.01, 0.05)
"""Share of the indices that are others once the fractions are rounded which they are made of."""
_FEWEST_MOVED = 2.0
_OF_INTEGERS = ops.MOVEMENT | ops.ARITHMETIC | ops.BOUNDS | {"Mod", "Where", "Neg", "Concat"}
_OF_WHOLE_FLOATS = ops.MOVEMENT | ops.BOUNDS | _WHOLE | {"Add", "Mul", "Abs", "Neg", "Where", "Concat", "CumSum"}
"""Through these a whole number stays one on its way to where it is an index; a difference may be a fraction's."""
_CARRIES_INDEX = _OF_INTEGERS - {"Cast"} | _WHOLE | {"Abs", "Sum", "ReduceSum", "CumSum", "Gather"}
"""Through these the value that becomes an index is computed: what they read and what they give is as large."""
_COMPARED = ops.MOVEMENT | {"Sub", "Abs", "Neg"}
"""Through these a difference of whole numbers comes to where it is compared."""


def _decision_hazard(look: _Look) -> Named | None:
    """Decisions that rounding changes: a softmax's weights, the largest element, a comparison."""
    moved, rows, op_type, facts = look.mean["moved"], look.mean["rows"], look.node.op_type, look.record.facts
    is_softmax, share, worst = op_type == "Softmax", moved / rows if rows else math.nan, look.worst("moved")
    if op_type in ops.COMPARISONS:
        evidence, kind = look.spaced(*look.operands), "comparison" + " Equal" * (op_type == "Equal")
    else:
        evidence, kind = look.spaced(magnitude=facts["largest"][worst]), "softmax" if is_softmax else "largest"
    is_few = not is_softmax and moved * len(facts["moved"]) < _FEWEST_MOVED
    if is_few or not look.limit(_MOVED_WEIGHTS if is_softmax else _MOVED_ROWS) <= share < math.inf:
        return None
    evidence |= {"share": share, **({"gap": gap} if math.isfinite(gap := facts["gap"][worst]) else {})}
    return look.names("spacing", look.node.inputs[0], evidence, "moved", look.operands, wording=kind)


def _fraction_hazard(look: _Look) -> Named | None:
    """Fractions that become another index, or another whole number to compare, once they are rounded."""
    facts, reader = look.record.facts, index_reader(look.facts, look.node)
    share = look.mean["moved"] / max(1.0, look.mean["rows"])
    is_few = sum(facts["moved"]) < _FEWEST_MOVED or share < look.limit(_MOVED_INDICES)
    if reader is None or is_few or all(facts["whole"]) or not all(look.at(reader.name).get("whole", ())):
        return None
    about: Any = {"wording": "fraction", "words": {"reader": reader.name}}
    return look.names("index-in-float", look.node.inputs[0], {"share": share}, "moved", look.operands, **about)


def _number_hazard(look: _Look) -> Named | None:
    """Whole numbers beyond a precision that become an index or a size, or are compared, back to where they are not."""
    facts, node, exact = look.facts, look.node, look.record.precision.exact_integers
    reader = index_reader(facts, node) if node.op_type == "Cast" else node
    read = [node.inputs[0]] if reader is not node else _sources(facts, node.inputs, _COMPARED)
    large = {value: size for value, size in look.observed.absmax.items() if size > exact}
    makers = (node, *filter(None, map(facts.producer, read if reader is node else ())))
    whole = (each for each in (look.at(maker.name) for maker in makers) if all(each.get("whole", [0.0])))
    if reader is None or large.keys().isdisjoint(read) or not any(any(each["moved"]) for each in whole):
        return None
    starts = [value for value in read if value in large]
    carried = _sources(facts, starts, _CARRIES_INDEX, large)
    tensor = max(starts, key=large.__getitem__)
    about: Any = {"wording": "compared" if reader is node else "", "words": {"reader": reader.name}}
    evidence = {"largest": large[tensor], "exact_to": float(exact)}
    return look.names("index-in-float", tensor, evidence, "moved", carried, severity="error", **about)


def index_reader(facts: Facts, node: Node) -> Node | None:
    """The node that takes a result as an index or a size, or compares it, through what keeps it whole; None if none."""

    def is_integer(value: str) -> bool:
        return "int" in facts.model.info(value).dtype

    def onward(value: str) -> Iterable[str]:
        outs = [(reader, out) for reader in facts.readers(value) for out in reader.outputs if out]
        return [out for r, out in outs if r.op_type in (_OF_INTEGERS if is_integer(out) else _OF_WHOLE_FLOATS)]

    for value in walk(node.outputs, onward) if node.op_type != "Cast" or is_integer(node.outputs[0]) else ():
        for reader in facts.readers(value):
            row = ops.operator(reader.op_type if reader.is_standard else "")
            read = [reader.inputs[slot] for slot in row.sizes | row.indices if slot < len(reader.inputs)]
            if reader.op_type in ops.COMPARISONS or any(facts.root(name) == facts.root(value) for name in read):
                return reader
    return None


def _batch_norm(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """How far the operand lies off the running mean, in standard deviations.

    The median over the channels, as a dead one with a variance near zero says nothing. Statistics of 0 and 1 are of a
    model that was not trained.
    """
    node, operand = probed.node, values[probed.node.inputs[0]]
    mean, variance = (values[name].astype(np.float64) for name in node.inputs[3:5])
    deviation = np.sqrt(np.abs(variance) + attribute(node, "epsilon", 1e-5))
    if not operand.size or not ((mean != 0).any() or (variance != 1).any()):
        return {}
    centres = np.moveaxis(operand, 1, 0).reshape(len(mean), -1).mean(-1, dtype=np.float64)
    return {"deviations": float(np.median(np.abs(centres - mean) / deviation))}


# -- the table --------------------------------------------------------------------------------------------------------

_Probe = Callable[[ProbedNode, Arrays, Precision], Numbers]
_Judge = Callable[[_Look], "Named | None"]
_TABLE: Mapping[str, tuple[tuple[_Probe, ...], tuple[_Judge, ...]]] = {
    **dict.fromkeys(("Add", "Sub"), ((_change,), (_step_hazard, _error_hazard, _level_hazard))),
    **dict.fromkeys((*_NORMS, "Acos", "Asin"), ((_change,), (_error_hazard,))),
    **dict.fromkeys(POLES, ((_pole,), (_pole_hazard,))),
    "Log": ((_pole, _change), (_pole_hazard, _error_hazard)),
    **dict.fromkeys(("Sin", "Cos"), ((_change,), (_angle_hazard,))),
    **dict.fromkeys(_MOVED_PLACE, ((_place,), (_place_hazard,))),
    **dict.fromkeys(_OF_ROWS, ((_change,), (_decision_hazard,))),
    **dict.fromkeys(ops.COMPARISONS, ((_change,), (_number_hazard, _decision_hazard))),
    **dict.fromkeys(_WHOLE, ((_change,), (_fraction_hazard,))),
    "Cast": ((_change,), (_number_hazard, _fraction_hazard)),
    "BatchNormalization": ((_batch_norm,), ()),  # the first one far off says it all: see ``find``
}
