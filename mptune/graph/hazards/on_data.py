"""Hazards that running the model on data shows: lost steps, cancellation, changed decisions, long sums, poles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from mptune.findings.wording import Severity
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.facts import Facts, float_attribute
from mptune.graph.grouping.patterns import Pattern
from mptune.graph.hazards.hazard import Hazard, group_of, largest, spacing
from mptune.graph.hazards.interface import state_pairs
from mptune.graph.hazards.masks import comes_to_softmax
from mptune.graph.hazards.seen import ProbeRecord, Seen
from mptune.graph.loading.model import Node
from mptune.graph.ops import ARITHMETIC, BOUNDS, ELEMENTWISE, MOVEMENT, SUMMING, operator
from mptune.graph.plan import Precision


def pole_hazards(facts: Facts, seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    """Operands that FP16 or BF16 brings to zero or below it, where FP32 does not, and what then gives Inf or NaN.

    And those of which so many are below the smallest normal value that the results change.
    """
    values, lost, vanished = (sum(record.scalars[name]) for name in ("values", "lost", "vanished"))
    relative = _relative_change(record)
    if not math.isfinite(lost) or (not lost and relative < _by_digits(_MOVED_NORM, record.precision)):
        return []
    operand = node.inputs[1] if node.op_type == "Div" else node.inputs[0]
    row = "cancellation"
    severity: Severity = "warning"
    evidence: dict[str, float] = {}
    if 2 * vanished >= lost:
        row = "vanishing-values"
        nonzero, zeroed, small = (sum(record.scalars[name]) for name in ("nonzero", "zeroed", "small"))
        evidence["zero_share"] = zeroed / max(1, nonzero)
        evidence["subnormal_share"] = (small - zeroed) / max(1, nonzero)
        evidence["smallest_normal"] = record.precision.smallest_normal
        # What limits the results takes the infinite ones, too: their error shows what that does.
        readers = facts.readers(node.outputs[0])
        is_limited = bool(readers) and all(reader.op_type in BOUNDS | {"Where"} for reader in readers)
        severity = "error" if lost and not is_limited else "warning"
    if lost:
        evidence |= {"lost": int(lost), "values": int(values), "smallest": min(record.scalars["smallest"])}
    else:
        evidence["relative_error"] = relative
    wording = f"pole {node.op_type}" if lost else ""
    about = _about(seen, record, node, "lost" if lost else "error")
    return [Hazard("pole", row, group, node.name, operand, lost, evidence, wording, severity=severity, **about)]


def _about(seen: Seen, record: ProbeRecord, node: Node, worst_by: str) -> dict[str, Any]:
    """What a hazard says of the operator, the precision, and the sample on which a fact is largest."""
    sample = seen.sample(largest(record.scalars[worst_by]))
    return {"names": {"operator": node.op_type}, "samples": (sample,), "precision": record.precision}


def _relative_change(record: ProbeRecord) -> float:
    """Root mean square of what vanishing values change of the results, in standard deviations of these; 0 of none."""
    error, mean, square = (fmean(record.scalars[name]) for name in ("error", "mean", "square"))
    variance = square - mean**2
    scale = variance if variance > _ROUNDING_OF_SUMS * square else square
    return math.sqrt(error / scale) if error > 0 and math.isfinite(error + scale) else 0.0


_LOST_SHARE = 0.5

_CANCELLATION_FACTOR = 32.0

_CANCELLATION_ERROR: Mapping[Precision, float] = {Precision.FP16: 0.01, Precision.BF16: 0.03}

"""Relative error of a difference that rounding its operands makes: FP16's own rounding is 2.8e-4 in the mean, BF16's
2.3e-3. At eight times FP16's limit BF16 would only fail where FP16 does."""

_MOVED_NORM: Mapping[Precision, float] = {Precision.FP16: 0.03, Precision.BF16: 0.1}
"""In standard deviations of a norm's results, of which FP16's own rounding is 3e-4, BF16's 2e-3."""

_ROUNDING_OF_SUMS = 1e-5
"""Share of a mean square below which the variance is what summing in FP32 leaves of nothing."""

_MOVED_WEIGHTS: Mapping[Precision, float] = {Precision.FP16: 0.01, Precision.BF16: 0.02}

"""Share of a softmax's weight that rounding its logits moves, in the mean over the rows. Of 64 normal logits of a
standard deviation of 3 to 10 BF16 moves 0.3 to 0.4 %."""

_MOVED_ROWS: Mapping[Precision, float] = {Precision.FP16: 0.05, Precision.BF16: 0.1}

"""Share of the rows that rounding decides otherwise. Of normal scores of 10 classes BF16 decides 0.2 % otherwise, of
1,000 classes 1.2 %."""

_FEWEST_MOVED = 2.0


_STEP_BY_STEP = ELEMENTWISE - {"Where"} | {"Identity", "Cast"}
"""Functions of single elements. What a Where chooses may have nothing to do with its condition."""

_MAX_STEPS = 64


def _by_digits(limits: Mapping[Precision, float], precision: Precision) -> float:
    """The limit of a precision, or of the one whose mantissa is most like its own."""
    return limits[min(limits, key=lambda row: abs(row.mantissa_bits - precision.mantissa_bits))]


def on_data_hazards(types: ValueTypes, patterns: tuple[Pattern, ...], seen: Seen) -> list[Hazard]:
    """Stagnation, cancellation and spacing, for the groups that would hold the operands in FP16 or BF16."""
    facts, nodes = types.facts, {node.name: node for node in types.model.nodes}
    inside = {index for pattern in patterns if pattern.kind in ("activation", "norm") for index in pattern.nodes}
    hazards: list[Hazard] = []
    for record in seen.records:
        node = nodes[record.node]
        group = group_of(types, node)
        if group is None or _overflows(seen, node, record.precision):
            continue
        if types.group_of[node.index] in types.lacking(record.precision):
            continue
        if record.kind == "sum":
            lost = None if node.index in inside else _stagnation(facts, seen, record, node, group.id)
            hazards += [hazard for hazard in (lost, _cancellation(seen, record, node, group.id)) if hazard]
        elif record.kind == "norm":
            hazards += _removed_offset(seen, record, node, group.id)
        elif record.kind == "pole":
            hazards += pole_hazards(facts, seen, record, node, group.id)
        elif record.kind in ("softmax", "largest", "comparison"):
            hazards += _spacing(seen, record, node, group.id)
    in_fp16 = {(hazard.code, hazard.node) for hazard in hazards if hazard.precision is Precision.FP16}
    hazards = [h for h in hazards if h.precision is Precision.FP16 or (h.code, h.node) not in in_fp16]
    return hazards + [other for hazard in hazards for other in _of_operands(types, nodes[hazard.node or ""], hazard)]


def _of_operands(types: ValueTypes, node: Node, hazard: Hazard) -> Iterator[Hazard]:
    """The same for the groups that compute what a node reads: rounded there, it is as wrong as rounded here."""
    is_pole = hazard.kind == "pole"
    if hazard.code not in (("vanishing-values",) if is_pole else ("cancellation", "spacing")):
        return
    facts, done = types.facts, {hazard.group}
    for name in (hazard.tensor,) if is_pole else facts.varying(node):
        source = facts.producer(name)
        for _ in range(_MAX_STEPS):
            if source is None or source.op_type not in MOVEMENT or not source.inputs:
                break
            source = facts.producer(source.inputs[0])
        group = None if source is None or not types.model.info(name).is_float32 else group_of(types, source)
        if source is None or group is None or types.group_of[source.index] in types.lacking(hazard.precision):
            continue
        if group.id not in done:
            done.add(group.id)
            yield replace(hazard, group=group.id, node=None)


def _overflows(seen: Seen, node: Node, precision: Precision) -> bool:
    """Whether an operand lies beyond the precision: that is an overflow, and rounded figures say nothing more."""
    values = (seen.values[name] for name in (*node.inputs, *node.outputs) if name in seen.values)
    return any(max(abs(value.lowest), abs(value.highest)) > precision.largest for value in values)


def _stagnation(facts: Facts, seen: Seen, record: ProbeRecord, node: Node, group: str) -> Hazard | None:
    sides = zip(("first", "second"), ("second", "first"), node.inputs, reversed(node.inputs), strict=True)
    for step, base, moved, kept in sides:
        if not _is_counted_up(facts, node, kept) and (
            facts.is_static(moved)
            or facts.is_vector(kept)
            or facts.is_single(kept)
            or comes_to_softmax(facts.model, node)
        ):
            continue
        if node.op_type == "Sub" and step == "first":
            continue  # what is left is the negated base: a difference, not a step
        steps, lost = (record.scalars[f"{step}_{what}"] for what in ("steps", "lost"))
        if not sum(steps) or sum(lost) < _LOST_SHARE * sum(steps) or _follows(facts, moved, kept):
            continue
        size, at = (_root_mean(record.scalars[side]) for side in (step, base))
        evidence = {"share": sum(lost) / sum(steps), "elements": int(sum(steps)), "step": size, "base": at}
        evidence["spacing"] = spacing(at, record.precision)
        about = _about(seen, record, node, f"{step}_lost")
        about["names"] |= {"moved": moved, "unchanged": kept}
        place = group, node.name, node.outputs[0], at
        return Hazard("stagnation", "stagnation", *place, evidence, severity="error", **about)
    return None


def _is_counted_up(facts: Facts, node: Node, kept: str) -> bool:
    """Whether what a node adds to comes back as its input in the next step: a counter, a clock, a running sum."""
    outputs = {given: output for output, given in state_pairs(facts.model)}
    return facts.root(outputs.get(facts.root(kept), "")) == facts.root(node.outputs[0])


def _follows(facts: Facts, moved: str, kept: str) -> bool:
    """Whether the step is made of the other side element by element, as x + 0.04 x**3 is: nothing is added up."""
    wanted, stack, done = facts.root(kept), [moved], set[str]()
    while stack and len(done) < _MAX_STEPS:
        at = facts.root(stack.pop())
        if at == wanted:
            return True
        node = facts.producer(at)
        if at not in done and node is not None and node.op_type in _STEP_BY_STEP and len(facts.varying(node)) > 0:
            done.add(at)
            stack += facts.varying(node)
    return False


def _cancellation(seen: Seen, record: ProbeRecord, node: Node, group: str) -> Hazard | None:
    first, second, result, error = (sum(record.scalars[name]) for name in ("first", "second", "result", "error"))
    if not all(map(math.isfinite, (first, second, result, error))) or result <= 0:
        return None
    factor = (math.sqrt(first) + math.sqrt(second)) / math.sqrt(result)
    relative = math.sqrt(error / result)
    if factor < _CANCELLATION_FACTOR or relative < _by_digits(_CANCELLATION_ERROR, record.precision):
        return None
    place, evidence = (group, node.name, node.outputs[0], factor), {"factor": factor, "relative_error": relative}
    return Hazard("cancellation", "cancellation", *place, evidence, **_about(seen, record, node, "error"))


def _removed_offset(seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    """A norm that takes a large mean out of values whose differences rounding has changed by then."""
    error, mean, square = (fmean(record.scalars[name]) for name in ("error", "mean", "square"))
    variance = square - mean**2
    if not math.isfinite(error + square) or variance <= _ROUNDING_OF_SUMS * square:
        return []
    relative = math.sqrt(error / variance)
    if relative < _by_digits(_MOVED_NORM, record.precision):
        return []
    magnitude = record.scalars["magnitude"][largest(record.scalars["error"])]
    evidence = {"magnitude": magnitude, "spacing": spacing(magnitude, record.precision), "relative_error": relative}
    place, about = (group, node.name, node.inputs[0], relative), _about(seen, record, node, "error")
    return [Hazard("cancellation", "cancellation", *place, evidence, "norm", **about)]


def _spacing(seen: Seen, record: ProbeRecord, node: Node, group: str) -> list[Hazard]:
    moved, rows = sum(record.scalars["moved"]), sum(record.scalars["rows"])
    if not rows or not math.isfinite(moved):
        return []
    share = moved / rows
    is_softmax = record.kind == "softmax"
    if share < _by_digits(_MOVED_WEIGHTS if is_softmax else _MOVED_ROWS, record.precision) or (
        not is_softmax and moved < _FEWEST_MOVED
    ):
        return []
    worst = largest(record.scalars["moved"])
    magnitude, gap = record.scalars["magnitude"][worst], record.scalars["gap"][worst]
    evidence = {"magnitude": magnitude, "spacing": spacing(magnitude, record.precision)}
    evidence |= {**({"gap": gap} if math.isfinite(gap) else {}), "share": share}
    is_equality = record.kind == "comparison" and node.op_type == "Equal"
    wording = "comparison Equal" if is_equality else record.kind
    place, about = (group, node.name, node.inputs[0], magnitude), _about(seen, record, node, "moved")
    return [Hazard("spacing", "spacing", *place, evidence, wording, **about)]


def _root_mean(squares: tuple[float, ...]) -> float:
    return math.sqrt(sum(squares) / max(1, len(squares)))


_FAR = 5.0

"""Standard deviations: right data stay below 0.1, pixels of 0..255 instead of 0..1 give 65 and more."""

_ONE_SIGNED = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})

"""Sums of magnitudes or squares, whatever the signs of what is summed."""

_KEEPS_INDEX = MOVEMENT | ARITHMETIC | BOUNDS | {"Mod", "Where", "Neg", "Concat"}

_CARRIES_INDEX = _KEEPS_INDEX | {"Floor", "Ceil", "Round", "Abs", "Sum", "ReduceSum", "CumSum", "Gather"} - {"Cast"}

"""Through these the value that becomes an index is computed: what they read and what they give is as large."""

_MAX_INDEX_STEPS = 256


def long_sum_hazards(types: ValueTypes, seen: Seen, precisions: Sequence[str]) -> list[Hazard]:
    """Sums of so many values of one sign that a term is below half of the spacing at the sum, in FP16 or in BF16."""
    hazards = []
    narrowest = _narrowest(precisions)
    name, exact = narrowest.name, narrowest.exact_integers
    for node in types.model.nodes:
        group = group_of(types, node)
        if group is None or node.op_type not in SUMMING or not node.is_standard:
            continue
        terms = _terms(types, node, seen)
        value = seen.values.get(node.inputs[0])
        if terms < exact or value is None or value.lowest == value.highest == 0:
            continue
        if node.op_type not in _ONE_SIGNED and value.lowest < 0 < value.highest:
            continue
        place = group.id, node.name, node.inputs[0], float(terms)
        evidence = {"terms": terms, "lowest": value.lowest, "highest": value.highest}
        names = {"operator": node.op_type, "narrowest": name, "exact_to": exact}
        samples = (seen.sample(value.sample),)
        hazards.append(Hazard("sum", "long-sum", *place, evidence, severity="info", names=names, samples=samples))
    return hazards


def _narrowest(precisions: Sequence[str]) -> Precision:
    """The precision of the fewest digits among FP16 and these."""
    return min((Precision.FP16, *map(Precision.named, precisions)), key=lambda precision: precision.mantissa_bits)


def _terms(types: ValueTypes, node: Node, seen: Seen) -> int:
    """How many values one sum has; 0 where it is not known."""
    shape = seen.shapes.get(node.inputs[0])
    if shape is None or not node.outputs or not math.prod(shape):
        return 0
    if node.op_type == "CumSum":
        axis = types.model.initializers.get(node.inputs[1])
        return 0 if axis is None else int(shape[int(axis.numpy().reshape(-1)[0])])
    out = seen.shapes.get(node.outputs[0])
    return 0 if out is None else math.prod(shape) // max(1, math.prod(out))


def index_hazards(
    types: ValueTypes, ranges: Mapping[str, float], seen: Seen, precisions: Sequence[str]
) -> list[Hazard]:
    """Casts to integers that become an index or a size, of values above the whole numbers that FP16 or BF16 holds.

    The groups that compute such a value are kept in FP32, back to where values are smaller or no index yet.
    """
    hazards = []
    narrowest = _narrowest(precisions)
    name, exact = narrowest.name, narrowest.exact_integers
    for node in types.model.nodes:
        if node.op_type != "Cast" or not node.is_standard or not types.model.info(node.inputs[0]).is_float32:
            continue
        reached = ranges.get(node.inputs[0], 0.0)
        reader = _indexes(types.facts, node) if reached > exact else None
        if reader is None:
            continue
        value = seen.values.get(node.inputs[0])
        evidence: dict[str, float | str] = {"largest": reached, "exact_to": exact, "reader": reader.name}
        about: dict[str, Any] = {
            "names": {"narrowest": name},
            "samples": () if value is None else (seen.sample(value.sample),),
            "precision": Precision.FP16 if reached > Precision.FP16.exact_integers else narrowest,
        }
        for group, source in _carriers(types, node.inputs[0], ranges, exact).items():
            place = group, source.name, node.inputs[0], reached
            hazards.append(Hazard("index", "index-in-float", *place, evidence, severity="error", **about))
    return hazards


def _carriers(types: ValueTypes, index: str, ranges: Mapping[str, float], exact: float) -> dict[str, Node]:
    """The groups that hold a value which becomes an index, or what it is computed from, each with its last node."""
    carriers: dict[str, Node] = {}
    stack, done = [index], set[str]()
    while stack and len(done) < _MAX_INDEX_STEPS:
        at = stack.pop()
        done.add(at)
        source = types.facts.producer(at)
        if source is None or ranges.get(at, 0.0) <= exact:
            continue
        group = group_of(types, source)
        if group is not None:
            carriers.setdefault(group.id, source)
        if source.is_standard and source.op_type in _CARRIES_INDEX:
            stack += [name for name in source.inputs if name and name not in done]
    return carriers


def _indexes(facts: Facts, cast: Node) -> Node | None:
    """The node that takes the result of a Cast as an index or a size, through arithmetic on integers; None if none."""
    if "int" not in facts.model.info(cast.outputs[0]).dtype:
        return None
    stack, done = list(cast.outputs), set[str]()
    while stack and len(done) < _MAX_INDEX_STEPS:
        at = stack.pop()
        done.add(at)
        for reader in facts.readers(at):
            row = operator(reader.op_type if reader.is_standard else "")
            slots = row.sizes | row.indices
            if any(slot < len(reader.inputs) and facts.root(reader.inputs[slot]) == facts.root(at) for slot in slots):
                return reader
            if reader.op_type in _KEEPS_INDEX:
                stack += [
                    out for out in reader.outputs if out and out not in done and "int" in facts.model.info(out).dtype
                ]
    return None


def _is_rescaled(variance: np.ndarray) -> bool:
    """Whether variances, epsilon included, are even powers of two: what ``casting.rescaled`` makes, not statistics."""
    powers = np.log2(variance) / 2
    return bool(np.allclose(powers, np.round(powers), atol=1e-3))


def fit_hazards(types: ValueTypes, seen: Seen) -> list[Hazard]:
    """The first BatchNormalization whose input lies far off its running mean, in its own standard deviations.

    The median over the channels is judged: one dead channel with a variance near zero says nothing.
    """
    nodes = {node.name: node for node in types.model.nodes}
    far: list[tuple[Node, float]] = []
    for record in seen.of("batch-norm"):
        node = nodes[record.node]
        mean, variance = (types.model.initializers[i].numpy().astype(np.float64) for i in node.inputs[3:5])
        variance = np.abs(variance) + float_attribute(node, "epsilon", 1e-5)
        if _is_rescaled(variance):
            continue
        deviation = np.sqrt(variance)
        off = float(np.median(np.abs(np.asarray(record.vectors["mean"]) - mean) / deviation))
        if off > _FAR:
            far.append((node, off))
    if not far:
        return []
    first, off = far[0]
    place, evidence = (None, first.name, first.inputs[0], off), {"standard_deviations": off, "limit": _FAR}
    evidence["nodes"] = len(far)
    return [Hazard("fit", "data-do-not-fit", *place, evidence, "norm", names={"more": len(far) - 1 or None})]
