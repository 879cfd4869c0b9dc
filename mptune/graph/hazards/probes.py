"""THE table of what rounding does at single nodes on data: operator and values -> code and evidence.

A row of ``_TABLE`` has probes and judges. A probe takes a node's operands on one sample, and a precision, and gives
numbers; NumPy computes them in the worker process. A judge takes them over all samples, and names the code, the
evidence, and the values that are as wrong where they are rounded by the nodes that compute them. Means and shares are
taken of at most ``_MOST`` elements at even distances, since a value may have tens of millions. What a single element
decides, as at a pole, is looked at in all, a block at a time.

``inspect`` and a search judge every node. At a node that measurement says makes the error of its group (``blame``), a
tenth of each limit is enough: that it matters is shown already, and only why is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from mptune.graph import ops
from mptune.graph.facts import Facts, attribute, casts_integers, facts_of, float_attribute, origin, walk
from mptune.graph.hazards.hazard import Hazard, HazardPlace, NodeFacts, ObservedValues, TensorRange, group_of, spacing
from mptune.graph.hazards.masks import comes_to_softmax
from mptune.graph.hazards.static import state_pairs
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import from_stored, to_stored
from mptune.graph.patterns import find_patterns
from mptune.graph.plan import Precision
from mptune.graph.value_types import ValueTypes

Arrays = Mapping[str, np.ndarray]
Numbers = dict[str, float]
Judged = Iterator[tuple[Hazard, Iterable[str]]]
"""Hazards, each with the values whose rounding elsewhere does the same."""
_BLOCK, _MOST, _FEWEST_ROWS = 1 << 16, 1 << 18, 16
"""Elements that stay in a core's cache; from which means and shares are estimated; rows, however long they are."""
POLES: Mapping[str, int] = {"Log": 0, "Sqrt": 0, "Reciprocal": 0, "Div": 1, "Pow": 0}
"""Operator -> which of its inputs may not reach zero, or fall below it."""
_FIRST_OPSET = 11
"""The first operator set whose Equal takes floats, and whose Clip takes its bounds as inputs."""
_POLE_DEPTH = 4
"""Operators before a pole that are computed again: a variance is subtracted, clipped, and an epsilon is added."""
_RECOMPUTED = ops.ARITHMETIC | ops.BOUNDS | {"Neg", "Abs", "Sqrt", "Identity"}
_LEAST = (1e-30, 1e-38)
"""No precision has a value between zero and one of these; or subnormal ones, which engines take for zero."""
_WHOLE = frozenset({"Floor", "Ceil", "Round"})
_NORMS = ops.CENTRING_NORMS - {"BatchNormalization"}


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
        if not node.is_standard or node.op_type not in _TABLE or not facts.varying(node) or not node.inputs[0]:
            continue
        info = model.info(node.inputs[0])
        if not info.is_float32 or 0 in (info.shape or ()) or attribute(node, "training_mode") == 1:
            continue
        if node.op_type in _WHOLE | {"Cast"} and index_reader(facts, node) is None:
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
        finite = np.isfinite(values)
        lowest, highest = (float(end(values, where=finite, initial=0.0)) for end in (np.min, np.max))
    absmax, limit, masked = max(highest, -lowest, 0.0), Precision.FP16.largest, 0
    if row_axes and lowest < -limit:
        largest = values.max(axis=row_axes)  # a row that is -inf throughout is NaN in FP32 already
        masked = int(np.count_nonzero((largest < -limit) & (largest > -np.inf)))
    return TensorRange(absmax, values.shape, lowest, highest, beyond=int(absmax > limit), masked_rows=masked)


def facts_on(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """The facts of a node on one sample; ``values`` holds those that it ``reads``."""
    with np.errstate(all="ignore"):
        every = [probe(probed, values, precision) for probe in _TABLE[probed.node.op_type][0]]
    return {name: number for facts in every for name, number in facts.items()}


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


def _mean_square(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum()) / max(1, values.size)


# -- what a judge sees ------------------------------------------------------------------------------------------------


def probe_hazards(
    types: ValueTypes, observed: ObservedValues, guarded: Collection[str | None], blamed: Collection[str] = ()
) -> list[Hazard]:
    """What rounding changes at single nodes, for the groups that would hold the operands in FP16 or BF16.

    Args:
        guarded: groups with an epsilon that vanishes.
        blamed: nodes at which a part of each limit is enough.
    """
    nodes = {node.name: node for node in types.model.nodes}
    patterns = (pattern for pattern in find_patterns(types.model) if pattern.kind in ("activation", "norm"))
    inside = {index for pattern in patterns for index in pattern.nodes}
    judged: list[tuple[Hazard, Iterable[str]]] = []
    for record in observed.probes:
        node, precision = nodes[record.node], record.precision
        group = group_of(types, node)
        has_precision = group is not None and types.group_of[node.index] not in types.lacking(precision)
        if not has_precision and node.op_type != "NonMaxSuppression":  # which reads what FP16 has rounded
            continue
        ranges = (observed.ranges[name] for name in (*node.inputs, *node.outputs) if name in observed.ranges)
        if any(values.absmax > precision.largest for values in ranges):
            continue  # that is an overflow, and rounded figures say nothing more
        if not any(map(any, record.facts.values())):
            continue  # there are no elements
        look = _Look(types.facts, observed, record, node, group, node.index in inside, node.name in blamed)
        judges = (j for j in _TABLE[node.op_type][1] if j is not _pole_hazards or group not in guarded)
        every = next(filter(None, (list(judge(look)) for judge in judges)), [])  # the first that says why
        # What a sum has lost is named there, and not again where its logarithm is taken.
        maker, lost = types.facts.producer(node.inputs[0]), {h.place.node for h, _ in judged if h.code == "stagnation"}
        judged += every if maker is None or maker.name not in lost else []
    in_fp16 = {(hazard.code, hazard.place.node) for hazard, _ in judged if hazard.precision is Precision.FP16}
    judged = [(h, v) for h, v in judged if h.precision is Precision.FP16 or (h.code, h.place.node) not in in_fp16]

    # The same for the groups that compute what such a node reads: rounded there, it is as wrong as rounded here.
    hazards = [hazard for hazard, _ in judged]
    for hazard, values in judged:
        done = {hazard.place.group}
        for source in map(types.facts.producer, values):
            group = None if source is None else group_of(types, source)
            if source is None or group in done or types.group_of[source.index] in types.lacking(hazard.precision):
                continue
            done.add(group)
            hazards.append(replace(hazard, place=replace(hazard.place, group=group, node=None)))
    return hazards


@dataclass(frozen=True)
class _Look:
    """One node with its facts on data, over all samples.

    Attributes:
        is_inside: it is part of a norm or an activation, where an epsilon is no step.
        is_blamed: it makes an error.
    """

    facts: Facts
    observed: ObservedValues
    record: NodeFacts
    node: Node
    group: str | None
    is_inside: bool
    is_blamed: bool

    @property
    def precision(self) -> Precision:
        return self.record.precision

    @property
    def operands(self) -> list[str]:
        """The values that the node reads, where they were computed."""
        names = (name for name in self.facts.varying(self.node) if self.facts.model.info(name).is_float32)
        return [origin(self.facts.model, name, ops.MOVEMENT)[0] for name in names]

    def limit(self, limits: tuple[float, float]) -> float:
        """Of a pair for FP16 and BF16 that of the precision whose mantissa is most alike."""
        limit = limits[int(self.precision.mantissa_bits - Precision.BF16.mantissa_bits < 2)]
        return 0.1 * limit if self.is_blamed else limit

    def sums(self, *names: str) -> list[float]:
        """Facts, each summed over the samples."""
        return [sum(self.record.facts.get(name, ())) for name in names]

    def worst(self, name: str) -> int:
        """Position of the sample on which a fact is the largest, among those where it is finite."""
        values = self.record.facts[name]
        return max(range(len(values)), key=lambda k: values[k] if math.isfinite(values[k]) else -1.0)

    def spaced(self, *tensors: str) -> dict[str, float]:
        """The largest magnitude of some values, and the precision's spacing there."""
        magnitude = max((self.observed.absmax.get(tensor, 0.0) for tensor in tensors), default=0.0)
        return {"magnitude": magnitude, "spacing": spacing(magnitude, self.precision)}

    def hazard(
        self, code: str, tensor: str, evidence: Mapping[str, float | str], worst_by: str, value: float, **about: Any
    ) -> Hazard:
        """A hazard at the node; ``worst_by``: the fact that is largest on the sample that is named."""
        words = {"operator": self.node.op_type, **about.pop("words", {})}
        place = HazardPlace(self.node.name, self.group, tensor, (self.observed.sample(self.worst(worst_by)),))
        return Hazard(code, place, evidence, value=value, words=words, precision=self.precision, **about)


# -- what rounding the operands changes -------------------------------------------------------------------------------


_OF_ROWS = ops.EXTREMES | {"Softmax"}


def _change(probed: ProbedNode, values: Arrays, precision: Precision) -> Numbers:
    """What changes of a node's result where its operands are rounded; as mean squares where nothing else is said.

    ``moved`` of ``rows`` results are others; of Softmax, how much weight is elsewhere; of Equal, those are counted that
    are equal, before or after. ``gap``: how far the two operands, or the next largest of a row, are away in the mean.
    ``idle`` of ``steps`` elements are those whose smaller side is lost, as the rounded sum is the other. Where a Sub
    loses its first side, what is left is the negated second: a difference, not a step.
    """
    node, operand, facts = probed.node, values[probed.node.inputs[0]], dict[str, Any]()
    op_type, function = node.op_type, _FUNCTIONS.get(node.op_type, np.positive)
    if not values[node.outputs[0]].size or not operand.size:
        return {}
    if op_type in _NORMS:  # over a channel of a sample, or some of them
        axis, groups = attribute(node, "axis"), attribute(node, "num_groups")
        count = operand.shape[0] * (groups if isinstance(groups, int) else operand.shape[1])
        if op_type == "LayerNormalization":
            count = math.prod(operand.shape[: axis if isinstance(axis, int) else -1])
        function = partial(_normalised, epsilon=float_attribute(node, "epsilon", 1e-5))
        lines = operand.reshape(count, -1)
        lines = lines[:, _spaced(lines.shape[1], _MOST)]
    elif op_type in _OF_ROWS:
        axis = attribute(node, "axis")
        lines = np.moveaxis(operand, axis if isinstance(axis, int) else -1 if op_type == "Softmax" else 0, -1)
        lines = lines.reshape(-1, lines.shape[-1])
    else:
        operands = [*np.broadcast_arrays(*(values[name] for name in node.inputs))]
        positions = np.unravel_index(_spaced(operands[0].size, _MOST), operands[0].shape)
        operands = [each[positions] for each in operands] if operands[0].size > _MOST else operands
    if op_type in _NORMS | _OF_ROWS:
        operands = [lines[_spaced(len(lines), max(_FEWEST_ROWS, _MOST // lines.shape[1]))]]

    near = [rounded(each, precision) for each in operands]
    exact, again = (function(*each) for each in (operands, near))
    facts |= {"rows": exact.size, "moved": np.count_nonzero(exact != again)}
    facts |= {"error": _mean_square(np.subtract(again, exact, dtype=np.float64)), "square": _mean_square(exact)}
    facts |= {"first": _mean_square(operands[0]), "shift": _mean_square(near[0] - operands[0])}
    facts["whole"] = all((each == np.rint(each)).all() for each in operands)
    if op_type in ("Add", "Sub"):
        facts["second"] = _mean_square(operands[1])
        step, base = (operands[0], near[1]) if facts["first"] < facts["second"] else (operands[1], near[0])
        steps = (np.abs(step) > 0) & (np.abs(base) > 0) & np.isfinite(base)
        size = values[node.outputs[0]].size / exact.size
        facts["steps"] = size * np.count_nonzero(steps)
        facts["idle"] = size * np.count_nonzero(steps & (rounded(again, precision) == base))
        facts |= {"variance": exact.var(dtype=np.float64), "rounding": _mean_square(rounded(exact, precision) - exact)}
    elif op_type in ops.COMPARISONS:
        facts["gap"] = np.abs(operands[0] - operands[1]).mean(dtype=np.float64)
        facts["rows"] = np.count_nonzero(exact | again) if op_type == "Equal" else exact.size
    elif op_type in ("Sin", "Cos"):
        coarse = np.abs(operands[0]) >= math.ldexp(_COARSE, precision.mantissa_bits)
        facts |= {"different": np.unique(operands[0][coarse]).size, "left": np.unique(near[0][coarse]).size}
    elif op_type in _OF_ROWS:
        rows = -operands[0] if op_type == "ArgMin" else operands[0]
        largest = rows.max(-1, keepdims=True)
        away = largest - rows
        facts["gap"] = np.min(away, -1, where=away > 0, initial=np.inf).mean(dtype=np.float64)
        facts |= {"rows": len(rows), "largest": np.max(np.abs(largest), where=np.isfinite(largest), initial=0.0)}
        if op_type == "Softmax":
            facts["moved"] = np.abs(exact - again).sum(dtype=np.float64) / 2
    return {name: float(value) for name, value in facts.items()}


_LOST_SHARE = 0.5
_STEP_BY_STEP = ops.ELEMENTWISE - {"Where"} | {"Identity", "Cast"}
"""Functions of single elements. What a Where chooses may have nothing to do with its condition."""


def _step_hazards(look: _Look) -> Judged:
    """A step that is lost on most elements, as the rounded sum is the other side."""
    facts, node, (steps, idle, first, second) = look.facts, look.node, look.sums("steps", "idle", "first", "second")
    # Where a logarithm is taken of the sum, one plus a small value is no matter of rounding: what is left is zero.
    is_logged = any(reader.op_type == "Log" for reader in facts.readers(node.outputs[0]))
    if not steps or idle < _LOST_SHARE * steps or (look.is_inside and not is_logged):
        return
    (step, moved), (base, unchanged) = sorted(zip((first, second), node.inputs, strict=True), key=lambda side: side[0])
    # What comes back as the input of the next step is counted up, as a clock or a running sum is.
    outputs = {given: output for output, given in state_pairs(facts.model)}
    is_counted = facts.root(outputs.get(facts.root(unchanged), "")) == facts.root(node.outputs[0])
    is_level = (facts.is_vector(unchanged) or facts.is_single(unchanged)) and not is_logged
    if (facts.is_static(moved) or is_level or comes_to_softmax(facts.model, node)) and not is_counted:
        return

    def elementwise(value: str) -> Iterable[str]:
        maker = facts.producer(value)
        return facts.varying(maker) if maker is not None and maker.op_type in _STEP_BY_STEP else ()

    # A step that is made of the other side element by element, as x + 0.04 x**3 is, adds nothing up.
    if not any(facts.root(value) == facts.root(unchanged) for value in walk([moved], elementwise)):
        size, at = (math.sqrt(square / len(look.record.facts["idle"])) for square in (step, base))
        evidence = {"share": idle / steps, "elements": int(steps), "step": size, "base": at}
        evidence["spacing"] = spacing(at, look.precision)
        words = {"moved": moved, "unchanged": unchanged, "is_logged": is_logged}
        severity = "warning" if is_logged else "error"  # where the sum is read at once, its error shows the loss
        yield look.hazard("stagnation", node.outputs[0], evidence, "idle", at, severity=severity, words=words), ()


_CANCELLATION_FACTOR = (32.0, 32.0)
_CANCELLATION_ERROR = (0.01, 0.03)
"""Relative error of a difference that rounding its operands makes, in FP16 and in BF16, as all pairs here: FP16's own
rounding is 2.8e-4 in the mean, BF16's 2.3e-3. At eight times FP16's limit BF16 would only fail where FP16 does."""
_MOVED_NORM = (0.03, 0.1)
"""In standard deviations of a norm's results, of which FP16's own rounding is 3e-4, BF16's 2e-3."""


def _error_hazards(look: _Look) -> Judged:
    """A result much smaller than its operands, which their rounding changes; or of a function so steep."""
    error, square, shift, first, second = look.sums("error", "square", "shift", "first", "second")
    if not 0 < error < math.inf or not 0 < square < math.inf or not math.isfinite(first + second):
        return
    relative, (operand, *others) = math.sqrt(error / square), look.node.inputs
    if look.node.op_type in _NORMS:  # which take a large mean out of values whose differences rounding has changed
        if relative >= look.limit(_MOVED_NORM):
            evidence = look.spaced(operand) | {"relative_error": relative}
            yield look.hazard("cancellation", operand, evidence, "error", relative, wording="norm"), look.operands
        return
    factor = (math.sqrt(first) + math.sqrt(second)) / math.sqrt(square)
    wording, tensor = "", look.node.outputs[0]
    if not others:
        factor, wording, tensor = relative / math.sqrt(shift / first), "slope", operand
    if factor >= look.limit(_CANCELLATION_FACTOR) and relative >= look.limit(_CANCELLATION_ERROR):
        evidence = {"factor": factor, "relative_error": relative}
        yield look.hazard("cancellation", tensor, evidence, "error", factor, wording=wording), look.operands


_COARSE_LEVEL = (0.03, 0.1)
"""Rounding error of an output in standard deviations over one sample. An error over all samples does not show it where
each sample has a level of its own."""


def _level_hazards(look: _Look) -> Judged:
    """An output on so high a level that the precision's spacing hides how it varies within a sample."""
    rounding, variance = look.sums("rounding", "variance")
    ends = (origin(look.facts.model, output.name, ops.MOVEMENT)[0] for output in look.facts.model.outputs)
    if variance > 0 and look.node.outputs[0] in ends:
        relative, varies = math.sqrt(rounding / variance), math.sqrt(variance / len(look.record.facts["variance"]))
        if look.limit(_COARSE_LEVEL) <= relative < math.inf:
            evidence = look.spaced(look.node.outputs[0]) | {"varies": varies, "relative_error": relative}
            about: dict[str, Any] = {"wording": "output", "severity": "error"}
            yield look.hazard("spacing", look.node.outputs[0], evidence, "rounding", relative, **about), ()


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


def _pole_hazards(look: _Look) -> Judged:
    """Operands that a precision brings to zero or below it, where FP32 does not: Inf or NaN, or most of them lost."""
    values, lost, vanished, zeroed, small = look.sums("values", "lost", "vanished", "zeroed", "small")
    if not lost and zeroed <= _LOST_SHARE * values:  # a few zeros that give no Inf change little
        return
    evidence, vanishes, op_type = dict[str, float](), 2 * vanished >= lost, look.node.op_type
    if vanishes:
        evidence = {"zero_share": zeroed / values, "subnormal_share": (small - zeroed) / values}
        evidence["smallest_normal"] = look.precision.smallest_normal
    if lost:
        evidence |= {"lost": int(lost), "values": int(values), "smallest": min(look.record.facts["smallest"])}
    about: dict[str, Any] = {"wording": f"pole {op_type}" if lost else ""}
    about["severity"] = "error" if lost and vanishes else "warning"
    code, operand = "vanishing-values" if vanishes else "cancellation", look.node.inputs[POLES[op_type]]
    hazard = look.hazard(code, operand, evidence, "lost" if lost else "zeroed", lost, **about)
    yield hazard, [origin(look.facts.model, operand, ops.MOVEMENT)[0]] if vanishes else ()


# -- angles and coordinates -------------------------------------------------------------------------------------------

_COARSE = 0.125
"""Radians, 1/50 of a period. Rounding to values so far apart changes a sine by up to 6 %, which is what FP16 does from
128 rad on and BF16 from 16 rad on; each doubling of the angle doubles it."""
_MOVED_SINE = (0.01, 0.03)
"""Relative error of all sines. A few large angles among many small ones, or whole numbers, change less."""
_SCALES = ops.MATRIX_PRODUCTS | {"Mul", "Div"}
_PASSES = _SCALES | ops.ADDS | ops.BOUNDS | ops.MOVEMENT | ops.COPIES | {"Sub", "Neg", "Abs", "Where"}
"""The nodes that compute an angle from other values. What a CumSum adds up has an angle's size only as the sum."""
_SCALES_SINE = ops.MOVEMENT | {"Mul", "Div", "Pow"}


def _angle_hazards(look: _Look) -> Judged:
    """Angles so large that they turn by a considerable part of a period from one value of a precision to the next."""
    (error, square), angle = look.sums("error", "square"), look.node.inputs[0]
    largest, gap = look.spaced(angle).values()
    relative = math.sqrt(error / square) if square > 0 else 0.0
    if gap < _COARSE or not look.limit(_MOVED_SINE) <= relative < math.inf:
        return
    facts, coarse = look.facts, _coarse(look, angle, _COARSE)

    # What is added to the value that its angle is made of, as Snake's x + sin(ax)**2 / a, has errors as small as that.
    def scaled(value: str) -> Iterable[str]:
        return [reader.outputs[0] for reader in facts.readers(value) if reader.op_type in _SCALES_SINE]

    added = (
        facts.other(r, v) for v in walk(look.node.outputs, scaled) for r in facts.readers(v) if r.op_type in ops.ADDS
    )
    if any(facts.root(other) in coarse for other in added):
        return
    makers = (node for node in map(facts.producer, coarse) if node is not None and node.op_type not in ops.MOVEMENT)
    first = min(makers, key=lambda node: node.index, default=look.node)
    counts = {name: int(look.record.facts[name][look.worst("different")]) for name in ("different", "left")}
    evidence = {"largest": largest, "spacing": gap, "periods": gap / math.tau, **counts}
    words = {"first": first.name, "coarse_from": math.ldexp(_COARSE, look.precision.mantissa_bits)}
    yield look.hazard("angle-spacing", angle, evidence, "different", largest, severity="error", words=words), coarse


def _coarse(look: _Look, value: str, least: float) -> list[str]:
    """The values whose spacing is ``least`` of a value that is computed from them, or more; back from that value."""
    facts, units = look.facts, {look.facts.root(value): 1.0}  # what one unit of each is of the last one

    def onward(value: str) -> Iterable[str]:
        node = facts.producer(value)
        for name in map(facts.root, () if node is None or node.op_type not in _PASSES else facts.varying(node)):
            reached, maker = look.observed.absmax.get(name, 0.0), origin(facts.model, name, ops.MOVEMENT - {"Cast"})[1]
            is_whole = maker is not None and (maker.op_type in _WHOLE | {"Range"} or casts_integers(facts.model, maker))
            if name in units or not reached or (is_whole and reached <= look.precision.exact_integers):
                continue
            scales = node is not None and node.op_type in _SCALES
            unit = units[value] * (look.observed.absmax.get(value, reached) / reached if scales else 1.0)
            if spacing(reached, look.precision) * unit >= least:
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
        has_size = attribute(node, "center_point_box") == 1
        side = np.median(np.abs(places[..., 2:] - (0 if has_size else places[..., :2]))) if places.size else 0.0
        unit = np.array([1 / side if side > 0 else 0.0])
    return {"error": _mean_square((rounded(places, precision) - places) * unit), "unit": float(unit.max())}


def _place_hazards(look: _Look) -> Judged:
    """Coordinates that rounding moves by a part of a pixel, or of a box."""
    (error, unit), places = look.sums("error", "unit"), look.node.inputs[look.node.op_type == "GridSample"]
    samples, limit = len(look.record.facts["error"]), look.limit(_MOVED_PLACE[look.node.op_type])
    moved = math.sqrt(error / samples)
    if limit <= moved < math.inf:
        evidence = look.spaced(places) | {"moved": moved}
        coarse = _coarse(look, places, math.sqrt(12) * limit * samples / unit)  # as large as that error
        yield look.hazard("spacing", places, evidence, "error", moved, wording=look.node.op_type), coarse


# -- decisions and whole numbers --------------------------------------------------------------------------------------

_MOVED_WEIGHTS = (0.01, 0.02)
"""Share of a softmax's weight that rounding its logits moves, in the mean over the rows. Of 64 normal logits of a
standard deviation of 3 to 10 BF16 moves 0.3 to 0.4 %."""
_MOVED_ROWS = (0.05, 0.1)
"""Share of the rows that rounding decides otherwise. Of normal scores of 10 classes BF16 decides 0.2 % otherwise, of
1,000 classes 1.2 %."""
_MOVED_INDICES = (0.01, 0.05)
"""Share of the indices that are others once the fractions are rounded which they are made of."""
_FEWEST_MOVED = 2.0
_OF_INTEGERS = ops.MOVEMENT | ops.ARITHMETIC | ops.BOUNDS | {"Mod", "Where", "Neg", "Concat"}
_OF_WHOLE_FLOATS = ops.MOVEMENT | ops.BOUNDS | _WHOLE | {"Add", "Mul", "Abs", "Neg", "Where", "Concat", "CumSum"}
"""Through these a whole number stays one on its way to where it is an index; a difference may be a fraction's."""


def _decision_hazards(look: _Look) -> Judged:
    """Decisions that rounding changes: a softmax's weights, the largest element, a comparison."""
    moved, rows = look.sums("moved", "rows")
    op_type, operand, worst = look.node.op_type, look.node.inputs[0], look.worst("moved")
    is_softmax, share = op_type == "Softmax", moved / rows if rows else math.nan
    evidence = look.spaced(*look.operands)
    if op_type in ops.COMPARISONS:
        wording = "comparison Equal" if op_type == "Equal" else "comparison"
        if all(look.record.facts["whole"]) and evidence["magnitude"] > look.precision.exact_integers:
            return  # of whole numbers, which are looked at with indices
    else:
        largest, wording = look.record.facts["largest"][worst], "softmax" if is_softmax else "largest"
        evidence = {"magnitude": largest, "spacing": spacing(largest, look.precision)}
    least = look.limit(_MOVED_WEIGHTS if is_softmax else _MOVED_ROWS)
    if least <= share < math.inf and (is_softmax or moved >= _FEWEST_MOVED):
        gap = look.record.facts["gap"][worst]
        evidence |= {"share": share, **({"gap": gap} if math.isfinite(gap) else {})}
        yield look.hazard("spacing", operand, evidence, "moved", evidence["magnitude"], wording=wording), look.operands


def _whole_hazards(look: _Look) -> Judged:
    """Fractions that become another index, or another whole number to compare, once they are rounded."""
    (moved, rows), reader = look.sums("moved", "rows"), index_reader(look.facts, look.node)
    if reader is None or moved < _FEWEST_MOVED or moved < look.limit(_MOVED_INDICES) * rows:
        return
    compared = (each for each in look.observed.probes if each.node == reader.name and reader.op_type in ops.COMPARISONS)
    if not all(look.record.facts["whole"]) and all(all(each.facts["whole"]) for each in compared):
        evidence: dict[str, float | str] = {"share": moved / rows, "reader": reader.name}
        place = (look.node.inputs[0], evidence, "moved", 0.0)
        yield look.hazard("index-in-float", *place, wording="fraction"), look.operands


def index_reader(facts: Facts, node: Node) -> Node | None:
    """The node that takes a result as an index or a size, or compares it, through what keeps it whole; None if none."""

    def onward(value: str) -> Iterable[str]:
        for reader in facts.readers(value):
            for out in filter(None, reader.outputs):
                is_integer = "int" in facts.model.info(out).dtype
                if reader.op_type in (_OF_INTEGERS if is_integer else _OF_WHOLE_FLOATS):
                    yield out

    is_float = "int" not in facts.model.info(node.outputs[0]).dtype
    for value in walk(node.outputs, onward) if node.op_type != "Cast" or not is_float else ():
        for reader in facts.readers(value):
            row = ops.operator(reader.op_type if reader.is_standard else "")
            read = [reader.inputs[slot] for slot in row.sizes | row.indices if slot < len(reader.inputs)]
            if reader.op_type in ops.COMPARISONS or any(facts.root(name) == facts.root(value) for name in read):
                return reader
    return None


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


# -- the table --------------------------------------------------------------------------------------------------------

_Probe = Callable[[ProbedNode, Arrays, Precision], Numbers]
_Judge = Callable[[_Look], Judged]
_TABLE: Mapping[str, tuple[tuple[_Probe, ...], tuple[_Judge, ...]]] = {
    **dict.fromkeys(("Add", "Sub"), ((_change,), (_step_hazards, _error_hazards, _level_hazards))),
    **dict.fromkeys((*_NORMS, "Acos", "Asin"), ((_change,), (_error_hazards,))),
    **dict.fromkeys(POLES, ((_pole,), (_pole_hazards,))),
    "Log": ((_pole, _change), (_pole_hazards, _error_hazards)),
    **dict.fromkeys(("Sin", "Cos"), ((_change,), (_angle_hazards,))),
    **dict.fromkeys(_MOVED_PLACE, ((_place,), (_place_hazards,))),
    **dict.fromkeys(("Softmax", *ops.EXTREMES, *ops.COMPARISONS), ((_change,), (_decision_hazards,))),
    **dict.fromkeys((*_WHOLE, "Cast"), ((_change,), (_whole_hazards,))),
    "BatchNormalization": ((_batch_norm,), ()),  # the first one far off says it all: see ``find``
}
