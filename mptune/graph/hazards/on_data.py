"""Hazards that running the model on data shows: overflow, lost steps, cancellation, changed decisions, poles, sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean
from typing import Any

from mptune.findings.numbers import in_samples
from mptune.findings.wording import Severity
from mptune.graph.facts import Facts
from mptune.graph.hazards.hazard import (
    FP16_MAX,
    Hazard,
    HazardPlace,
    NodeFacts,
    ObservedValues,
    group_of,
    readers_in_fp16,
    spacing,
)
from mptune.graph.hazards.masks import comes_to_softmax, is_held, mask_input, mask_values, stays_right
from mptune.graph.hazards.probes import POLES
from mptune.graph.hazards.static import state_pairs
from mptune.graph.loading.model import Node
from mptune.graph.ops import (
    ARITHMETIC,
    BOUNDS,
    CENTRING_NORMS,
    COMPARISONS,
    ELEMENTWISE,
    MOVEMENT,
    SOFTMAX,
    SUMMING,
    operator,
)
from mptune.graph.patterns import find_patterns
from mptune.graph.plan import Precision
from mptune.graph.value_types import ValueTypes

_HEADROOM = 2.0
"""Values seen within this factor of FP16's end: other data may well go beyond it."""
_FEW = 0.01
"""Share of vanishing values up to which a lost epsilon, which is named already, says it all."""
_LOST_SHARE = 0.5
_CANCELLATION_FACTOR = 32.0
_CANCELLATION_ERROR = (0.01, 0.03)
"""Relative error of a difference that rounding its operands makes, in FP16 and in BF16, as all pairs here: FP16's own
rounding is 2.8e-4 in the mean, BF16's 2.3e-3. At eight times FP16's limit BF16 would only fail where FP16 does."""
_MOVED_NORM = (0.03, 0.1)
"""In standard deviations of a norm's results, of which FP16's own rounding is 3e-4, BF16's 2e-3."""
_ROUNDING_OF_SUMS = 1e-5
"""Share of a mean square below which the variance is what summing in FP32 leaves of nothing."""
_MOVED_WEIGHTS = (0.01, 0.02)
"""Share of a softmax's weight that rounding its logits moves, in the mean over the rows. Of 64 normal logits of a
standard deviation of 3 to 10 BF16 moves 0.3 to 0.4 %."""
_MOVED_ROWS = (0.05, 0.1)
"""Share of the rows that rounding decides otherwise. Of normal scores of 10 classes BF16 decides 0.2 % otherwise, of
1,000 classes 1.2 %."""
_FEWEST_MOVED = 2.0
_FAR = 5.0
"""Standard deviations: right data stay below 0.1, pixels of 0..255 instead of 0..1 give 65 and more."""
_STEP_BY_STEP = ELEMENTWISE - {"Where"} | {"Identity", "Cast"}
"""Functions of single elements. What a Where chooses may have nothing to do with its condition."""
_ONE_SIGNED = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})
"""Sums of magnitudes or squares, whatever the signs of what is summed."""
_KEEPS_INDEX = MOVEMENT | ARITHMETIC | BOUNDS | {"Mod", "Where", "Neg", "Concat"}
_CARRIES_INDEX = _KEEPS_INDEX | {"Floor", "Ceil", "Round", "Abs", "Sum", "ReduceSum", "CumSum", "Gather"} - {"Cast"}
"""Through these the value that becomes an index is computed: what they read and what they give is as large."""
_MAX_STEPS = 256
_DIGITS = attrgetter("mantissa_bits")


def _walk(start: Iterable[str], onward: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Values from the first ones on, each once, as far as ``onward`` leads, and not without end."""
    stack, done = list(start), set[str]()
    while stack and len(done) < _MAX_STEPS:
        value = stack.pop()
        if value not in done:
            done.add(value)
            yield value
            stack += onward(value)


# -- ranges -----------------------------------------------------------------------------------------------------------


def range_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them; and rows masked whole."""
    model, hazards, masks = types.model, list[Hazard](), mask_values(types.model, observed.absmax)
    for tensor, values in observed.ranges.items():
        absmax = values.absmax
        for node in types.facts.readers(tensor) if values.masked_rows else ():
            if node.op_type in SOFTMAX or mask_input(node) == tensor:
                group, sample = group_of(types, node), observed.sample(values.masked_sample)
                place = HazardPlace(node.name, None if group is None else group.id, tensor, (sample,))
                rows = {"masked_rows": values.masked_rows, "limit": -FP16_MAX}
                samples = {"samples": values.masked_samples if values.masked_samples > 1 else None}
                hazards.append(Hazard("mask", place, rows, "rows", "warning", values.absmax, samples))
        is_beyond = absmax > FP16_MAX
        if is_beyond and tensor in masks and is_held(model, tensor, Precision.FP16):
            continue  # the constants that it is made of are hazards of their own, and are held within the range
        if not is_beyond and absmax <= FP16_MAX / _HEADROOM:
            continue
        evidence: dict[str, float] = {"absmax": absmax, "fp16_max": FP16_MAX}
        if values.beyond:
            evidence |= {"samples_beyond": values.beyond, "samples": values.samples}
        sample = observed.sample(values.sample)
        words = {"in_samples": in_samples(values.beyond, values.samples, sample)}
        done = set[tuple[str, bool]]()
        for node in touching(types, tensor):
            group, is_mask = group_of(types, node), is_beyond and tensor in masks and stays_right(model, node)
            if group is None or (group.id, is_mask) in done:
                continue
            done.add((group.id, is_mask))
            place = HazardPlace(node.name, group.id, tensor, (sample,))
            makes_mask = is_beyond and tensor in masks and node.op_type == "Mul" and comes_to_softmax(model, node)
            severity: Severity = "error" if is_beyond and not is_mask else "warning"
            wording = "mask" if is_mask else "seen" if is_beyond else "near"
            code = "mask" if makes_mask else "overflow"
            hazards.append(Hazard(code, place, evidence, wording, severity, absmax, words))
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


def probe_hazards(types: ValueTypes, observed: ObservedValues, guarded: Collection[str | None]) -> list[Hazard]:
    """What rounding changes at single nodes, for the groups that would hold the operands in FP16 or BF16.

    ``guarded``: groups with an epsilon that vanishes.
    """
    nodes = {node.name: node for node in types.model.nodes}
    patterns = (pattern for pattern in find_patterns(types.model) if pattern.kind in ("activation", "norm"))
    inside = {index for pattern in patterns for index in pattern.nodes}
    hazards: list[Hazard] = []
    for record in observed.probes:
        node, precision = nodes[record.node], record.precision
        group = group_of(types, node)
        if group is None or types.group_of[node.index] in types.lacking(precision):
            continue
        ranges = (observed.ranges[name] for name in (*node.inputs, *node.outputs) if name in observed.ranges)
        if any(values.absmax > precision.largest for values in ranges):
            continue  # that is an overflow, and rounded figures say nothing more
        look = _Look(types.facts, observed, record, node, group.id)
        if node.op_type in ("Add", "Sub"):
            hazards += [*(() if node.index in inside else look.stagnation()), *look.cancellation()]
        elif node.op_type in CENTRING_NORMS:
            hazards += look.removed_offset() if "error" in record.facts else ()
        elif node.op_type in POLES:
            hazards += look.pole(is_guarded=group.id in guarded)
        else:
            hazards += look.spacing()
    in_fp16 = {(hazard.code, hazard.place.node) for hazard in hazards if hazard.precision is Precision.FP16}
    hazards = [h for h in hazards if h.precision is Precision.FP16 or (h.code, h.place.node) not in in_fp16]

    # The same for the groups that compute what such a node reads: rounded there, it is as wrong as rounded here.
    of_operands = list[Hazard]()
    for hazard in hazards:
        node, done = nodes[hazard.place.node or ""], {hazard.place.group}
        is_pole = node.op_type in POLES
        if hazard.code not in (("vanishing-values",) if is_pole else ("cancellation", "spacing")):
            continue
        for name in (hazard.place.tensor,) if is_pole else types.facts.varying(node):
            source = types.facts.producer(name)
            while source is not None and source.op_type in MOVEMENT and source.inputs:
                source = types.facts.producer(source.inputs[0])
            group = None if source is None or not types.model.info(name).is_float32 else group_of(types, source)
            if source is None or group is None or types.group_of[source.index] in types.lacking(hazard.precision):
                continue
            if group.id not in done:
                done.add(group.id)
                of_operands.append(replace(hazard, place=replace(hazard.place, group=group.id, node=None)))
    return hazards + of_operands


def _largest(values: Sequence[float]) -> int:
    """Position of the largest finite value."""
    return max(range(len(values)), key=lambda k: values[k] if math.isfinite(values[k]) else -1.0)


class _Look:
    """One node with its facts on data, looked at for one cause after another."""

    def __init__(self, facts: Facts, observed: ObservedValues, record: NodeFacts, node: Node, group: str) -> None:
        self.facts, self.observed, self.node, self.group = facts, observed, node, group
        self.on_samples, self.precision = record.facts, record.precision

    def _sums(self, *names: str) -> list[float]:
        return [sum(self.on_samples[name]) for name in names]

    def _limit(self, limits: tuple[float, float]) -> float:
        """Of a pair for FP16 and BF16, that of the one whose mantissa is most like the precision's."""
        return limits[self.precision.mantissa_bits - Precision.BF16.mantissa_bits < 2]

    def _relative_error(self) -> float:
        """Root mean square of what rounding changes of the results, in standard deviations of these; 0 of none."""
        error, mean, square = (fmean(self.on_samples[name]) for name in ("error", "mean", "square"))
        variance = square - mean**2
        scale = variance if variance > _ROUNDING_OF_SUMS * square else square
        return math.sqrt(error / scale) if error > 0 and math.isfinite(error + scale) else 0.0

    def _hazard(
        self, code: str, tensor: str, evidence: Mapping[str, float], worst_by: str, value: float, **about: Any
    ) -> Hazard:
        """A hazard at the node; ``worst_by``: the fact that is largest on the sample that is named."""
        words = {"operator": self.node.op_type, **about.pop("words", {})}
        sample = self.observed.sample(_largest(self.on_samples[worst_by]))
        place = HazardPlace(self.node.name, self.group, tensor, (sample,))
        return Hazard(code, place, evidence, value=value, words=words, precision=self.precision, **about)

    def stagnation(self) -> Iterator[Hazard]:
        """A side that is lost on most elements, as the rounded sum is the other side."""
        facts, node = self.facts, self.node

        def elementwise(value: str) -> Iterable[str]:
            maker = facts.producer(value)
            return facts.varying(maker) if maker is not None and maker.op_type in _STEP_BY_STEP else ()

        outputs = {given: output for output, given in state_pairs(facts.model)}
        sides = zip(("first", "second"), ("second", "first"), node.inputs, reversed(node.inputs), strict=True)
        for step, base, moved, kept in sides:
            # What comes back as the input of the next step is counted up, as a clock or a running sum is.
            is_counted = facts.root(outputs.get(facts.root(kept), "")) == facts.root(node.outputs[0])
            is_aside = facts.is_static(moved) or facts.is_vector(kept) or facts.is_single(kept)
            if (is_aside or comes_to_softmax(facts.model, node)) and not is_counted:
                continue
            if node.op_type == "Sub" and step == "first":
                continue  # what is left is the negated base: a difference, not a step
            steps, lost = self._sums(f"{step}_steps", f"{step}_lost")
            # A step that is made of the other side element by element, as x + 0.04 x**3 is, adds nothing up.
            follows = any(facts.root(value) == facts.root(kept) for value in _walk([moved], elementwise))
            if follows or not steps or lost < _LOST_SHARE * steps:
                continue
            size, at = (math.sqrt(fmean(self.on_samples[side])) for side in (step, base))
            evidence = {"share": lost / steps, "elements": int(steps), "step": size, "base": at}
            evidence["spacing"] = spacing(at, self.precision)
            words, place = {"moved": moved, "unchanged": kept}, (node.outputs[0], evidence, f"{step}_lost", at)
            yield self._hazard("stagnation", *place, severity="error", words=words)
            return

    def cancellation(self) -> Iterator[Hazard]:
        """A result much smaller than its operands, which their rounding changes."""
        first, second, result, error = self._sums("first", "second", "result", "error")
        if math.isfinite(first + second + result + error) and result > 0:
            factor, relative = (math.sqrt(first) + math.sqrt(second)) / math.sqrt(result), math.sqrt(error / result)
            if factor >= _CANCELLATION_FACTOR and relative >= self._limit(_CANCELLATION_ERROR):
                evidence = {"factor": factor, "relative_error": relative}
                yield self._hazard("cancellation", self.node.outputs[0], evidence, "error", factor)

    def removed_offset(self) -> Iterator[Hazard]:
        """A norm that takes a large mean out of values whose differences rounding has changed by then."""
        relative = self._relative_error()
        if relative >= self._limit(_MOVED_NORM):
            reached = self.on_samples["magnitude"][_largest(self.on_samples["error"])]
            evidence = {"magnitude": reached, "spacing": spacing(reached, self.precision), "relative_error": relative}
            yield self._hazard("cancellation", self.node.inputs[0], evidence, "error", relative, wording="norm")

    def spacing(self) -> Iterator[Hazard]:
        """Decisions that rounding changes: a softmax's weights, the largest element, a comparison."""
        moved, rows = self._sums("moved", "rows")
        op_type, share = self.node.op_type, moved / rows if rows else math.nan
        is_softmax = op_type == "Softmax"
        least = self._limit(_MOVED_WEIGHTS if is_softmax else _MOVED_ROWS)
        if least <= share < math.inf and (is_softmax or moved >= _FEWEST_MOVED):
            worst = _largest(self.on_samples["moved"])
            magnitude, gap = self.on_samples["magnitude"][worst], self.on_samples["gap"][worst]
            evidence = {"magnitude": magnitude, "spacing": spacing(magnitude, self.precision), "share": share}
            evidence |= {"gap": gap} if math.isfinite(gap) else {}
            wording = "softmax" if is_softmax else "comparison" if op_type in COMPARISONS else "largest"
            wording += " Equal" if op_type == "Equal" else ""
            yield self._hazard("spacing", self.node.inputs[0], evidence, "moved", magnitude, wording=wording)

    def pole(self, *, is_guarded: bool) -> Iterator[Hazard]:
        """Operands that a precision brings to zero or below it, where FP32 does not, and what then gives Inf or NaN.

        And those below the smallest normal value, where their share changes the results. ``is_guarded``: by an
        epsilon that vanishes, which is named already: only values that are not zero before it vanish by themselves.
        """
        node, relative = self.node, self._relative_error()
        names = ("values", "lost", "vanished", "nonzero", "zeroed", "small")
        values, lost, vanished, nonzero, zeroed, small = self._sums(*names)
        zero_share, vanishes = zeroed / max(1, nonzero), 2 * vanished >= lost
        if not lost and relative < self._limit(_MOVED_NORM):
            return
        if is_guarded and (not vanishes or zero_share <= _FEW):
            return
        evidence: dict[str, float] = {}
        if vanishes:
            subnormal_share = (small - zeroed) / max(1, nonzero)
            evidence = {"zero_share": zero_share, "subnormal_share": subnormal_share}
            evidence["smallest_normal"] = self.precision.smallest_normal
        if lost:
            evidence |= {"lost": int(lost), "values": int(values), "smallest": min(self.on_samples["smallest"])}
        else:
            evidence["relative_error"] = relative
        code, operand = "vanishing-values" if vanishes else "cancellation", node.inputs[POLES[node.op_type]]
        wording, worst_by = (f"pole {node.op_type}", "lost") if lost else ("", "error")
        severity = "error" if lost and vanishes else "warning"
        yield self._hazard(code, operand, evidence, worst_by, lost, wording=wording, severity=severity)


# -- sums, indices, preprocessing -------------------------------------------------------------------------------------


def long_sum_hazards(types: ValueTypes, observed: ObservedValues, precisions: Sequence[str]) -> list[Hazard]:
    """Sums of values of one sign, enough that a term is below half of the spacing at the sum, in FP16 or in BF16."""
    narrowest = min((Precision.FP16, *map(Precision.named, precisions)), key=_DIGITS)
    hazards, shapes = [], observed.shapes
    exact = narrowest.exact_integers
    for node in types.model.nodes:
        group = group_of(types, node)
        if group is None or node.op_type not in SUMMING or not node.is_standard or node.inputs[0] not in shapes:
            continue
        values, out = observed.ranges[node.inputs[0]], shapes.get(node.outputs[0])
        terms = 0 if out is None else math.prod(shapes[node.inputs[0]]) // max(1, math.prod(out))
        is_of_one_sign = node.op_type in _ONE_SIGNED or not values.lowest < 0 < values.highest
        if terms < exact or not is_of_one_sign or values.lowest == values.highest == 0:
            continue
        place = HazardPlace(node.name, group.id, node.inputs[0], (observed.sample(values.sample),))
        evidence = {"terms": terms, "lowest": values.lowest, "highest": values.highest}
        words = {"operator": node.op_type, "narrowest": narrowest.name, "exact_to": exact}
        hazards.append(Hazard("long-sum", place, evidence, "", "info", float(terms), words))
    return hazards


def index_hazards(types: ValueTypes, observed: ObservedValues, precisions: Sequence[str]) -> list[Hazard]:
    """Casts to integers that become an index or a size, of values above the whole numbers that FP16 or BF16 holds.

    The groups that compute such a value are kept in FP32, back to where values are smaller or no index yet.
    """
    narrowest = min((Precision.FP16, *map(Precision.named, precisions)), key=_DIGITS)
    hazards, facts = list[Hazard](), types.facts
    exact = narrowest.exact_integers
    large = {tensor for tensor, absmax in observed.absmax.items() if absmax > exact}

    def carried_from(value: str) -> Iterable[str]:
        source = facts.producer(value)
        is_carried = source is not None and source.is_standard and source.op_type in _CARRIES_INDEX
        return [name for name in source.inputs if name in large] if source is not None and is_carried else ()

    for node in types.model.nodes:
        tensor = node.inputs[0] if node.op_type == "Cast" and node.is_standard else ""
        reader = _indexes(facts, node) if tensor in large else None
        if reader is None:
            continue
        carriers: dict[str, Node] = {}  # groups that hold the value, or what it is computed from, and their last nodes
        for source in map(facts.producer, _walk([tensor], carried_from)):
            group = None if source is None else group_of(types, source)
            if source is not None and group is not None:
                carriers.setdefault(group.id, source)
        reached, sample = observed.absmax[tensor], observed.sample(observed.ranges[tensor].sample)
        evidence: dict[str, float | str] = {"largest": reached, "exact_to": exact, "reader": reader.name}
        precision = Precision.FP16 if reached > Precision.FP16.exact_integers else narrowest
        for group_id, source in carriers.items():
            place, words = HazardPlace(source.name, group_id, tensor, (sample,)), {"narrowest": narrowest.name}
            hazards.append(Hazard("index-in-float", place, evidence, "", "error", reached, words, precision))
    return hazards


def _indexes(facts: Facts, cast: Node) -> Node | None:
    """The node that takes the result of a Cast as an index or a size, through arithmetic on integers; None if none."""

    def is_integer(value: str) -> bool:
        return bool(value) and "int" in facts.model.info(value).dtype

    def onward(value: str) -> Iterable[str]:
        readers = (reader for reader in facts.readers(value) if reader.op_type in _KEEPS_INDEX)
        return [out for reader in readers for out in reader.outputs if is_integer(out)]

    for value in _walk(filter(is_integer, cast.outputs), onward):
        for reader in facts.readers(value):
            row = operator(reader.op_type if reader.is_standard else "")
            read = [reader.inputs[slot] for slot in row.sizes | row.indices if slot < len(reader.inputs)]
            if any(facts.root(name) == facts.root(value) for name in read):
                return reader
    return None


def fit_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """The first BatchNormalization whose input lies far off its running mean, in its own standard deviations."""
    deviations = {each.node: fmean(each.facts["deviations"]) for each in observed.probes if "deviations" in each.facts}
    far = [node for node in types.model.nodes if deviations.get(node.name, 0.0) > _FAR]
    if not far:
        return []
    off, place = deviations[far[0].name], HazardPlace(far[0].name, None, far[0].inputs[0])
    evidence, words = {"standard_deviations": off, "limit": _FAR, "nodes": len(far)}, {"more": len(far) - 1 or None}
    return [Hazard("data-do-not-fit", place, evidence, "norm", value=off, words=words)]
