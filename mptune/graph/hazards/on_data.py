"""Hazards that running the model on data shows: overflow, lost steps, cancellation, changed decisions, poles, sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from mptune.findings.numbers import in_samples
from mptune.findings.wording import Severity
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.facts import Facts
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.hazards.hazard import (
    BF16_MAX,
    FP16_MAX,
    FP16_NORMAL,
    FP16_TINY,
    Hazard,
    HazardPlace,
    group_of,
    readers_in_fp16,
    spacing,
)
from mptune.graph.hazards.interface import state_pairs
from mptune.graph.hazards.masks import MaskValues, comes_to_softmax, held_bounds, is_limit
from mptune.graph.hazards.seen import NodeFacts, Seen
from mptune.graph.loading.model import Node
from mptune.graph.ops import ARITHMETIC, BOUNDS, CENTRING_NORMS, COMPARISONS, ELEMENTWISE, MOVEMENT, SUMMING, operator
from mptune.graph.plan import Precision

_HEADROOM = 2.0
"""Values seen within this factor of FP16's end: other data may well go beyond it."""
_FEW = 0.01
"""Share of vanishing values up to which a lost epsilon, which is named already, says it all."""
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
_FAR = 5.0
"""Standard deviations: right data stay below 0.1, pixels of 0..255 instead of 0..1 give 65 and more."""
_STEP_BY_STEP = ELEMENTWISE - {"Where"} | {"Identity", "Cast"}
"""Functions of single elements. What a Where chooses may have nothing to do with its condition."""
_MAX_STEPS = 64
_ONE_SIGNED = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})
"""Sums of magnitudes or squares, whatever the signs of what is summed."""
_KEEPS_INDEX = MOVEMENT | ARITHMETIC | BOUNDS | {"Mod", "Where", "Neg", "Concat"}
_CARRIES_INDEX = _KEEPS_INDEX | {"Floor", "Ceil", "Round", "Abs", "Sum", "ReduceSum", "CumSum", "Gather"} - {"Cast"}
"""Through these the value that becomes an index is computed: what they read and what they give is as large."""
_MAX_INDEX_STEPS = 256


# -- ranges -----------------------------------------------------------------------------------------------------------


def range_hazards(types: ValueTypes, seen: Seen) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them in FP16."""
    model, hazards = types.model, list[Hazard]()
    masks = MaskValues(types.facts, seen.absmax)
    in_fp16, in_bf16 = (held_bounds(types, seen.absmax, precision) for precision in (Precision.FP16, Precision.BF16))
    smaller = types.rescaled(Precision.FP16).values
    for tensor, observed in seen.ranges.items():
        absmax = observed.absmax / smaller.get(tensor, 1.0)
        bound, sources = in_fp16.get(tensor, (observed.absmax, frozenset()))
        is_beyond = absmax > FP16_MAX
        is_held = is_beyond and bound < Precision.FP16.overflows_at
        if is_held and all(is_limit(model, constant) for constant in sources):
            continue  # these constants are hazards of their own
        severity: Severity = "error" if is_beyond else "warning"
        code, wording = "overflow", "seen"
        if is_held:  # as constants are held as FP16's largest finite value
            wording, severity = "held", "warning"
        elif FP16_MAX >= absmax > FP16_MAX / _HEADROOM:
            wording = "near"
        elif 0 < absmax <= FP16_NORMAL:
            wording = "underflow become zero" if absmax <= FP16_TINY / 2 else "underflow lose digits"
            code = "vanishing-values"
        elif not is_beyond:
            continue
        sample = seen.sample(observed.sample)
        words = {"in_samples": in_samples(observed.beyond, observed.samples, sample)}
        evidence: dict[str, int | float | str] = {"absmax": absmax, "fp16_max": FP16_MAX}
        if observed.beyond:
            evidence |= {"samples_beyond": observed.beyond, "samples": observed.samples}
        value = in_bf16.get(tensor, (observed.absmax,))[0] if absmax > BF16_MAX else absmax
        done = set[tuple[str, bool]]()
        for node in touching(types, tensor):
            group, is_mask = group_of(types, node), is_beyond and masks.may_be_infinite(node, tensor)
            if group is None or (group.id, is_mask) in done:
                continue
            done.add((group.id, is_mask))
            hazard = Hazard(
                code,
                HazardPlace(node.name, group.id, tensor, (sample,)),
                evidence,
                wording=wording,
                severity=severity,
                value=value,
                words=words,
            )
            if is_mask:
                hazard = replace(hazard, wording="mask", severity="warning")
            elif is_held:
                hazard = replace(hazard, evidence={**evidence, "held_as": FP16_MAX})
            elif is_beyond and masks.is_made_into_one(node, tensor):
                hazard = replace(hazard, code="mask")
            hazards.append(hazard)
    return hazards


def touching(types: ValueTypes, tensor: str) -> list[Node]:
    """The nodes that would compute a value in FP16, or read it in that."""
    model, readers = types.model, readers_in_fp16(types, tensor)
    if tensor in model.producer:
        producer = model.nodes[model.producer[tensor]]
        if tensor in {producer.outputs[o] for o in types.rules[producer.index].outputs}:
            return [producer, *readers]
    return readers


# -- roundings of single nodes ----------------------------------------------------------------------------------------


def probe_hazards(types: ValueTypes, seen: Seen, guarded: Collection[str | None]) -> list[Hazard]:
    """What rounding changes at single nodes, for the groups that would hold the operands in FP16 or BF16.

    ``guarded``: groups with an epsilon that vanishes: what is not zero before it vanishes by itself.
    """
    facts, nodes = types.facts, {node.name: node for node in types.model.nodes}
    patterns = (pattern for pattern in find_patterns(types.model) if pattern.kind in ("activation", "norm"))
    inside = {index for pattern in patterns for index in pattern.nodes}
    hazards: list[Hazard] = []
    for record in seen.probes:
        node, precision = nodes[record.node], record.precision
        group = group_of(types, node)
        if group is None or types.group_of[node.index] in types.lacking(precision):
            continue
        ranges = (seen.ranges[name] for name in (*node.inputs, *node.outputs) if name in seen.ranges)
        if any(values.absmax > precision.largest for values in ranges):
            continue  # that is an overflow, and rounded figures say nothing more
        look = _Look(facts, seen, record, node, group.id)
        if node.op_type in ("Add", "Sub"):
            hazards += [] if node.index in inside else look.stagnation()
            hazards += look.cancellation()
        elif node.op_type in CENTRING_NORMS:
            hazards += look.removed_offset()
        elif "lost" in record.facts:
            is_aside = group.id in guarded and look.zero_share <= _FEW
            poles = [] if is_aside else look.pole()
            hazards += [h for h in poles if h.code == "vanishing-values" or group.id not in guarded]
        else:
            hazards += look.spacing()
    in_fp16 = {(hazard.code, hazard.place.node) for hazard in hazards if hazard.precision is Precision.FP16}
    hazards = [h for h in hazards if h.precision is Precision.FP16 or (h.code, h.place.node) not in in_fp16]
    return hazards + [
        other for hazard in hazards for other in _of_operands(types, nodes[hazard.place.node or ""], hazard)
    ]


def _of_operands(types: ValueTypes, node: Node, hazard: Hazard) -> Iterator[Hazard]:
    """The same for the groups that compute what a node reads: rounded there, it is as wrong as rounded here."""
    is_pole = "lost" in hazard.evidence or hazard.code == "vanishing-values"
    if hazard.code not in (("vanishing-values",) if is_pole else ("cancellation", "spacing")):
        return
    facts, done = types.facts, {hazard.place.group}
    for name in (hazard.place.tensor,) if is_pole else facts.varying(node):
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
            yield replace(hazard, place=replace(hazard.place, group=group.id, node=None))


def _by_digits(limits: Mapping[Precision, float], precision: Precision) -> float:
    """The limit of a precision, or of the one whose mantissa is most like its own."""
    return limits[min(limits, key=lambda row: abs(row.mantissa_bits - precision.mantissa_bits))]


def _largest(values: Sequence[float]) -> int:
    """Position of the largest finite value."""
    return max(range(len(values)), key=lambda k: values[k] if math.isfinite(values[k]) else -1.0)


class _Look:
    """One node with its facts on data, looked at for one cause after another; each gives a hazard or none."""

    def __init__(self, facts: Facts, seen: Seen, record: NodeFacts, node: Node, group: str) -> None:
        self.facts, self.seen, self.node, self.group = facts, seen, node, group
        self.on_samples, self.precision = record.facts, record.precision

    def _sums(self, *names: str) -> list[float]:
        return [sum(self.on_samples[name]) for name in names]

    def _means(self, *names: str) -> list[float]:
        return [fmean(self.on_samples[name]) for name in names]

    def _hazard(
        self, code: str, tensor: str, evidence: Mapping[str, float], worst_by: str, value: float, **about: Any
    ) -> list[Hazard]:
        """A hazard at the node; ``worst_by``: the fact that is largest on the sample that is named."""
        words = {"operator": self.node.op_type, **about.pop("words", {})}
        place = HazardPlace(
            self.node.name, self.group, tensor, (self.seen.sample(_largest(self.on_samples[worst_by])),)
        )
        return [Hazard(code, place, evidence, value=value, words=words, precision=self.precision, **about)]

    def stagnation(self) -> list[Hazard]:
        """A side that is lost on most elements, as the rounded sum is the other side."""
        facts, node = self.facts, self.node
        sides = zip(("first", "second"), ("second", "first"), node.inputs, reversed(node.inputs), strict=True)
        for step, base, moved, kept in sides:
            is_aside = facts.is_static(moved) or facts.is_vector(kept) or facts.is_single(kept)
            if (is_aside or comes_to_softmax(facts.model, node)) and not self._is_counted_up(kept):
                continue
            if node.op_type == "Sub" and step == "first":
                continue  # what is left is the negated base: a difference, not a step
            steps, lost = self._sums(f"{step}_steps", f"{step}_lost")
            if not steps or lost < _LOST_SHARE * steps or self._follows(moved, kept):
                continue
            size, at = (math.sqrt(mean) for mean in self._means(step, base))
            evidence = {"share": lost / steps, "elements": int(steps), "step": size, "base": at}
            evidence["spacing"] = spacing(at, self.precision)
            words = {"moved": moved, "unchanged": kept}
            place = node.outputs[0], evidence, f"{step}_lost", at
            return self._hazard("stagnation", *place, severity="error", words=words)
        return []

    def _is_counted_up(self, kept: str) -> bool:
        """Whether what the node adds to comes back as its input in the next step: a counter, a clock, a running sum."""
        facts, outputs = self.facts, {given: output for output, given in state_pairs(self.facts.model)}
        return facts.root(outputs.get(facts.root(kept), "")) == facts.root(self.node.outputs[0])

    def _follows(self, moved: str, kept: str) -> bool:
        """Whether the step is made of the other side element by element, as x + 0.04 x**3 is: nothing is added up."""
        facts, stack, done = self.facts, [moved], set[str]()
        wanted = facts.root(kept)
        while stack and len(done) < _MAX_STEPS:
            at = facts.root(stack.pop())
            if at == wanted:
                return True
            node = facts.producer(at)
            if at not in done and node is not None and node.op_type in _STEP_BY_STEP and len(facts.varying(node)) > 0:
                done.add(at)
                stack += facts.varying(node)
        return False

    def cancellation(self) -> list[Hazard]:
        """A result much smaller than its operands, which their rounding changes."""
        first, second, result, error = self._sums("first", "second", "result", "error")
        if not math.isfinite(first + second + result + error) or result <= 0:
            return []
        factor = (math.sqrt(first) + math.sqrt(second)) / math.sqrt(result)
        relative = math.sqrt(error / result)
        if factor < _CANCELLATION_FACTOR or relative < _by_digits(_CANCELLATION_ERROR, self.precision):
            return []
        evidence = {"factor": factor, "relative_error": relative}
        return self._hazard("cancellation", self.node.outputs[0], evidence, "error", factor)

    def removed_offset(self) -> list[Hazard]:
        """A norm that takes a large mean out of values whose differences rounding has changed by then."""
        relative = math.sqrt(self._means("error")[0])
        if not _by_digits(_MOVED_NORM, self.precision) <= relative < math.inf:
            return []
        magnitude = self.on_samples["magnitude"][_largest(self.on_samples["error"])]
        evidence = {"magnitude": magnitude, "spacing": spacing(magnitude, self.precision), "relative_error": relative}
        return self._hazard("cancellation", self.node.inputs[0], evidence, "error", relative, wording="norm")

    def spacing(self) -> list[Hazard]:
        """Decisions that rounding changes: a softmax's weights, the largest element, a comparison."""
        moved, rows = self._sums("moved", "rows")
        op_type, share = self.node.op_type, moved / rows if rows else math.nan
        is_softmax, is_comparison = op_type == "Softmax", op_type in COMPARISONS
        limits = _MOVED_WEIGHTS if is_softmax else _MOVED_ROWS
        if not _by_digits(limits, self.precision) <= share < math.inf or not (is_softmax or moved >= _FEWEST_MOVED):
            return []
        worst = _largest(self.on_samples["moved"])
        magnitude, gap = self.on_samples["magnitude"][worst], self.on_samples["gap"][worst]
        evidence = {"magnitude": magnitude, "spacing": spacing(magnitude, self.precision), "share": share}
        if math.isfinite(gap):
            evidence["gap"] = gap
        wording = "softmax" if is_softmax else "comparison" if is_comparison else "largest"
        wording += " Equal" if op_type == "Equal" else ""
        return self._hazard("spacing", self.node.inputs[0], evidence, "moved", magnitude, wording=wording)

    @property
    def zero_share(self) -> float:
        """Share of a pole's operands that become zero."""
        nonzero, zeroed = self._sums("nonzero", "zeroed")
        return zeroed / max(1, nonzero)

    def pole(self) -> list[Hazard]:
        """Operands that a precision brings to zero or below it, where FP32 does not, and what then gives Inf or NaN.

        And those of which so many are below the smallest normal value that the results change.
        """
        node, precision = self.node, self.precision
        values, lost, vanished = self._sums("values", "lost", "vanished")
        error, mean, square = self._means("error", "mean", "square")
        variance = square - mean**2
        scale = variance if variance > _ROUNDING_OF_SUMS * square else square
        relative = math.sqrt(error / scale) if error > 0 and math.isfinite(error + scale) else 0.0
        if not lost and relative < _by_digits(_MOVED_NORM, precision):
            return []
        severity: Severity = "warning"
        code, evidence = "cancellation", dict[str, float]()
        if 2 * vanished >= lost:
            code = "vanishing-values"
            nonzero, zeroed, small = self._sums("nonzero", "zeroed", "small")
            evidence["zero_share"] = self.zero_share
            evidence["subnormal_share"] = (small - zeroed) / max(1, nonzero)
            evidence["smallest_normal"] = precision.smallest_normal
            # What limits the results takes the infinite ones, too: their error shows what that does.
            readers = self.facts.readers(node.outputs[0])
            is_limited = bool(readers) and all(reader.op_type in BOUNDS | {"Where"} for reader in readers)
            severity = "error" if lost and not is_limited else "warning"
        if lost:
            evidence |= {"lost": int(lost), "values": int(values), "smallest": min(self.on_samples["smallest"])}
        else:
            evidence["relative_error"] = relative
        wording, worst_by = (f"pole {node.op_type}", "lost") if lost else ("", "error")
        operand = node.inputs[1] if node.op_type == "Div" else node.inputs[0]
        return self._hazard(code, operand, evidence, worst_by, lost, wording=wording, severity=severity)


# -- sums, indices, preprocessing -------------------------------------------------------------------------------------


def long_sum_hazards(types: ValueTypes, seen: Seen, precisions: Sequence[str]) -> list[Hazard]:
    """Sums of so many values of one sign that a term is below half of the spacing at the sum, in FP16 or in BF16."""
    hazards, narrowest = [], _narrowest(precisions)
    exact = narrowest.exact_integers
    for node in types.model.nodes:
        group = group_of(types, node)
        if group is None or node.op_type not in SUMMING or not node.is_standard:
            continue
        terms, values = _terms(types, node, seen), seen.ranges.get(node.inputs[0])
        if terms < exact or values is None or values.lowest == values.highest == 0:
            continue
        if node.op_type not in _ONE_SIGNED and values.lowest < 0 < values.highest:
            continue
        place = HazardPlace(node.name, group.id, node.inputs[0], (seen.sample(values.sample),))
        evidence = {"terms": terms, "lowest": values.lowest, "highest": values.highest}
        words = {"operator": node.op_type, "narrowest": narrowest.name, "exact_to": exact}
        hazards.append(Hazard("long-sum", place, evidence, severity="info", value=float(terms), words=words))
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


def index_hazards(types: ValueTypes, seen: Seen, precisions: Sequence[str]) -> list[Hazard]:
    """Casts to integers that become an index or a size, of values above the whole numbers that FP16 or BF16 holds.

    The groups that compute such a value are kept in FP32, back to where values are smaller or no index yet.
    """
    hazards, narrowest = [], _narrowest(precisions)
    exact = narrowest.exact_integers
    for node in types.model.nodes:
        if node.op_type != "Cast" or not node.is_standard or not types.model.info(node.inputs[0]).is_float32:
            continue
        values = seen.ranges.get(node.inputs[0])
        reader = _indexes(types.facts, node) if values is not None and values.absmax > exact else None
        if reader is None or values is None:
            continue
        reached = values.absmax
        carriers: dict[str, Node] = {}  # groups that hold the value, or what it is computed from, and their last nodes
        stack, done = [node.inputs[0]], set[str]()
        while stack and len(done) < _MAX_INDEX_STEPS:
            at = stack.pop()
            done.add(at)
            source = types.facts.producer(at)
            if source is None or seen.absmax.get(at, 0.0) <= exact:
                continue
            if (group := group_of(types, source)) is not None:
                carriers.setdefault(group.id, source)
            if source.is_standard and source.op_type in _CARRIES_INDEX:
                stack += [name for name in source.inputs if name and name not in done]
        hazards += [
            Hazard(
                "index-in-float",
                HazardPlace(source.name, group_id, node.inputs[0], (seen.sample(values.sample),)),
                {"largest": reached, "exact_to": exact, "reader": reader.name},
                severity="error",
                value=reached,
                words={"narrowest": narrowest.name},
                precision=Precision.FP16 if reached > Precision.FP16.exact_integers else narrowest,
            )
            for group_id, source in carriers.items()
        ]
    return hazards


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
                new = (out for out in reader.outputs if out and out not in done)
                stack += [out for out in new if "int" in facts.model.info(out).dtype]
    return None


def fit_hazards(types: ValueTypes, seen: Seen) -> list[Hazard]:
    """The first BatchNormalization whose input lies far off its running mean, in its own standard deviations."""
    far = {
        record.node: fmean(record.facts["deviations"])
        for record in seen.probes
        if "deviations" in record.facts and fmean(record.facts["deviations"]) > _FAR
    }
    first = next((node for node in types.model.nodes if node.name in far), None)
    if first is None:
        return []
    evidence = {"standard_deviations": far[first.name], "limit": _FAR, "nodes": len(far)}
    place = HazardPlace(first.name, None, first.inputs[0])
    words = {"more": len(far) - 1 or None}
    return [Hazard("data-do-not-fit", place, evidence, wording="norm", value=far[first.name], words=words)]
