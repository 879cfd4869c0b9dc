"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure.

Constants are rounded and compared (``constants``), values are judged by what was observed of them, and ``structural``
adds what the graph alone shows. Those of severity ``error`` pin their group to FP32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mptune.finding import Severity
from mptune.graph.casting.value_types import ValueTypes, value_types
from mptune.graph.fused import FusedNodes, steps_inside, values_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.hazards.constants import BEYOND_CURE, LIMIT_CURE, constant_hazards, fill_hazards, is_limit
from mptune.graph.hazards.hazard import (
    BF16_MAX,
    FP16_MAX,
    FP16_NORMAL,
    FP16_TINY,
    KEPT,
    Hazard,
    group_of,
    readers_in_fp16,
    worst_first,
)
from mptune.graph.hazards.masks import MaskValues
from mptune.graph.hazards.reductions import fit_hazards, index_hazards, long_sum_hazards
from mptune.graph.hazards.rounding.on_data import on_data_hazards
from mptune.graph.hazards.saturated import SaturatedRanges
from mptune.graph.hazards.seen import Seen, SeenValue
from mptune.graph.hazards.structural import broadcast_hazards, epsilon_hazards, int64_hazards, norm_hazards
from mptune.graph.plan import DEFAULT_PRECISIONS, REDUCED, Precision
from mptune.graph.writing.weights import Rounding

__all__ = ["FP16_MAX", "Hazard", "find_hazards", "over_threshold", "pinned_by_hazards"]

_OUT_OF_FP16 = "the group is kept out of FP16, in FP32 or BF16"
_HEADROOM = 2.0
"""Values seen within this factor of FP16's end: other data may well go beyond it."""


def find_hazards(
    grouped: GroupedModel,
    ranges: Mapping[str, float] | None = None,
    roundings: Sequence[Rounding] = (),
    seen: Seen | None = None,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    fused: Sequence[FusedNodes] = (),
) -> tuple[Hazard, ...]:
    """All hazards of a model, those of the groups with the most severe ones first, in the order of the graph.

    What goes wrong first is what the rest comes from: the square of a norm before the mean of the squares.

    Args:
        grouped: the model and its groups; a hazard belongs to the group of the node that would compute in FP16.
        ranges: value -> largest finite magnitude on the search samples, where they were observed.
        roundings: what the weight bank saw when it rounded; constants that it does not hold are rounded here.
        seen: what else the same samples showed.
        precisions: that groups may have: BF16 holds fewer digits than FP16.
        fused: nodes that the engine computes as one, with FP32 inside: what is wrong in FP16 there is no hazard.
    """
    model = grouped.model
    types, look, ranges = value_types(grouped), Lookup(model), ranges or {}
    seen, patterns = seen or Seen(), find_patterns(model, look)
    smallest = {
        record.node: min(record.scalars["smallest"])
        for record in seen.of("guard", "variance")
        if record.scalars.get("smallest")
    }
    by_name = {r.tensor: r for r in roundings if r.precision is Precision.FP16}
    found = constant_hazards(types, look, by_name, smallest)
    found += epsilon_hazards(types, smallest)
    found = [_with_sample(hazard, seen) for hazard in found]
    found += fill_hazards(types, look)
    masks = MaskValues(look, ranges)
    saturated = {precision: SaturatedRanges(types, ranges, precision) for precision in REDUCED}
    for tensor, absmax in ranges.items():
        in_fp16 = saturated[Precision.FP16]
        is_held = absmax > FP16_MAX and in_fp16.fits(tensor)
        if is_held and all(is_limit(look, constant) for constant in in_fp16.sources(tensor)):
            continue  # these constants are hazards of their own
        in_bf16 = saturated[Precision.BF16].bound(tensor) if absmax > BF16_MAX else absmax
        for hazard in _range_hazards(types, masks, tensor, absmax, in_bf16, seen):
            found.append(_held(hazard) if is_held and hazard.severity == "error" else hazard)
    found += on_data_hazards(types, look, patterns, seen)
    has_bf16 = Precision.BF16 in precisions
    found += long_sum_hazards(types, seen, has_bf16=has_bf16)
    found += index_hazards(types, look, ranges, seen, has_bf16=has_bf16)
    found += fit_hazards(types, seen)
    found += norm_hazards(types, look, patterns, ranges)
    found += broadcast_hazards(types, look)
    found += int64_hazards(model, look)
    guarded = {hazard.group for hazard in found if hazard.kind == "epsilon"}
    found = [hazard for hazard in found if hazard.kind != "pole" or hazard.group not in guarded]
    if has_bf16:
        found = [
            replace(h, cure=_OUT_OF_FP16) if h.cure == KEPT and not h.rules_out(Precision.BF16) else h for h in found
        ]
    found = _outside(found, look, fused)
    groups = {group.id: position for position, group in enumerate(grouped.groups)}
    nodes = {node.name: node.index for node in model.nodes}

    def place(hazard: Hazard) -> tuple[int, bool, int, str, str]:
        group, node = groups.get(hazard.group or "", len(groups)), nodes.get(hazard.node or "", len(nodes))
        return group, hazard.kind == "norm", node, hazard.kind, hazard.tensor  # a norm's squares only may overflow

    return worst_first(sorted(found, key=place))


def _outside(found: Sequence[Hazard], look: Lookup, fused: Sequence[FusedNodes]) -> list[Hazard]:
    """The hazards without those of what fused nodes keep in FP32: results of the steps inside, and their constants.

    What they read is not among these: that is FP16 where it is computed in FP16.
    """
    inside, steps = values_inside(look.model, fused), steps_inside(fused)

    def is_inside(hazard: Hazard) -> bool:
        by_step = hazard.node in steps and (hazard.kind == "sum" or look.is_scalar(hazard.tensor))
        return by_step or hazard.tensor in inside

    return [hazard for hazard in found if not is_inside(hazard)]


def _with_sample(hazard: Hazard, seen: Seen) -> Hazard:
    """A hazard of an epsilon with the sample in which what it guards came closest to zero."""
    answers = [record.scalars["smallest"] for record in seen.of("guard", "variance") if record.node == hazard.node]
    if hazard.code != "vanishing-epsilon" or not answers:
        return hazard
    lowest = min(range(len(answers[0])), key=lambda k: answers[0][k])
    return replace(hazard, samples=(seen.sample(lowest),))


def _held(hazard: Hazard) -> Hazard:
    """A value beyond FP16 that is finite there, as constants are held as FP16's largest finite value."""
    reason = f"{hazard.reason}; the constants beyond it that this comes from are held as {FP16_MAX:g} there"
    evidence = {**hazard.evidence, "held_as": FP16_MAX}
    return replace(hazard, severity="warning", reason=reason, cure=BEYOND_CURE, code="overflow", evidence=evidence)


def _range_hazards(
    types: ValueTypes, masks: MaskValues, tensor: str, absmax: float, in_bf16: float, seen: Seen
) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them in FP16.

    ``in_bf16`` is the magnitude where constants are held in BF16.
    """
    value = seen.values.get(tensor)
    samples = () if value is None else (seen.sample(value.sample),)
    shown = "" if value is None else f", {_in_samples(value, seen.sample(value.sample))}"
    if absmax > FP16_MAX:
        severity: Severity = "error"
        kind, reason, cure = (
            "range",
            f"reached {absmax:.4g} on the calibration data, FP16 ends at {FP16_MAX:g}{shown}",
            KEPT,
        )
    elif absmax > FP16_MAX / _HEADROOM:
        severity, kind = "warning", "range"
        reason = f"reached {absmax:.4g} on the calibration data, close to FP16's end at {FP16_MAX:g}{shown}"
        cure = "make sure that the calibration data hold the extremes, or keep the group in FP32"
    elif 0 < absmax <= FP16_NORMAL:
        severity, kind = "warning", "underflow"
        lost = "become zero" if absmax <= FP16_TINY / 2 else "lose digits"
        reason = f"stayed below {absmax:.2g} on the calibration data: in FP16 all values {lost}"
        cure = "keep the group in FP32, or scale the values up in the model"
    else:
        return []
    model = types.model
    touching = readers_in_fp16(types, tensor)
    if tensor in model.producer:
        producer = model.nodes[model.producer[tensor]]
        if tensor in {producer.outputs[o] for o in types.rules[producer.index].outputs}:
            touching = [producer, *touching]
    found, done = [], set()
    for node in touching:
        group = group_of(types, node)
        is_mask = absmax > FP16_MAX and masks.may_be_infinite(node, tensor)
        if group is None or (group.id, is_mask) in done:
            continue
        done.add((group.id, is_mask))
        code = None if absmax <= FP16_MAX else "mask" if masks.is_made_into_one(node, tensor) else "overflow"
        evidence: dict[str, int | float | str] = {"absmax": absmax, "fp16_max": FP16_MAX}
        if value is not None and value.beyond:
            evidence |= {"samples_beyond": value.beyond, "samples": value.samples}
        place = (kind, group.id, node.name, tensor, in_bf16, reason)
        if is_mask:
            found.append(Hazard("warning", *place, LIMIT_CURE, None, evidence, samples))
        else:
            found.append(Hazard(severity, *place, cure, code, evidence, samples))
    return found


def _in_samples(value: SeenValue, largest: int) -> str:
    """How many samples hold a value beyond FP16's end, and the index of that with the largest magnitude."""
    if not value.beyond or value.samples == 1:
        return f"in sample {largest}"
    if value.beyond == 1:
        return f"in 1 of {value.samples} samples: sample {largest}"
    share = f"all {value.samples}" if value.beyond == value.samples else f"{value.beyond} of {value.samples}"
    return f"in {share} samples, most in sample {largest}"


def pinned_by_hazards(
    hazards: Sequence[Hazard], precision: Precision = Precision.FP16, *, is_measured: bool = False
) -> dict[str, str]:
    """Groups that a reduced precision cannot serve, each with the reason of its first hazard.

    Args:
        hazards: of the model.
        precision: a reduced one.
        is_measured: whether the errors of plans are measured or emulated. A constant beyond the precision, which is
            held as the largest finite value, then pins no group: the error shows what that does.
    """
    pinned: dict[str, str] = {}
    for hazard in hazards:
        rules_out = hazard.rules_out(precision) or (not is_measured and hazard.changes_constant(precision))
        if rules_out and hazard.group is not None:
            pinned.setdefault(hazard.group, f"{hazard.tensor}: {hazard.reason}")
    return pinned


def over_threshold(grouped: GroupedModel, ranges: Mapping[str, float], threshold: float) -> tuple[str, ...]:
    """Ids of the groups that read or compute a value whose magnitude exceeds ``threshold`` (AutoCast's rule: 512)."""
    types = value_types(grouped)
    found = set()
    for node, position in zip(grouped.model.nodes, types.group_of, strict=True):
        touched = [
            *(node.inputs[i] for i in types.rules[node.index].inputs),
            *(node.outputs[o] for o in types.rules[node.index].outputs),
        ]
        if position >= 0 and any(ranges.get(t, 0.0) > threshold for t in touched):
            found.add(types.groups[position].id)
    return tuple(sorted(found))
