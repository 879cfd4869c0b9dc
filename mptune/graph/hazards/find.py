"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure.

``static`` has those that the model alone shows, ``probes`` what rounding changes at single nodes on data. Here are
those that follow from the ranges of observed values: overflow, long sums, indices. Those of severity ``error`` pin
their group to FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from mptune.findings.numbers import in_samples
from mptune.findings.wording import Severity
from mptune.graph.facts import Facts, FusedNodes, steps_inside, values_inside, walk
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards import static
from mptune.graph.hazards.hazard import FP16_MAX, Hazard, HazardPlace, ObservedValues, group_of, touching, worst_first
from mptune.graph.hazards.masks import is_held, mask_input, stays_right
from mptune.graph.hazards.probes import probe_hazards
from mptune.graph.loading.model import Node
from mptune.graph.ops import ARITHMETIC, BOUNDS, MOVEMENT, SOFTMAX, SUMMING, operator
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.value_types import ValueTypes, value_types

_NOT_OBSERVED = ObservedValues()
_HEADROOM = 2.0
"""Values seen within this factor of FP16's end: other data may well go beyond it."""
_ONE_SIGNED = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})
"""Sums of magnitudes or squares, whatever the signs of what is summed."""
_KEEPS_INDEX = MOVEMENT | ARITHMETIC | BOUNDS | {"Mod", "Where", "Neg", "Concat"}
_CARRIES_INDEX = _KEEPS_INDEX | {"Floor", "Ceil", "Round", "Abs", "Sum", "ReduceSum", "CumSum", "Gather"} - {"Cast"}
"""Through these the value that becomes an index is computed: what they read and what they give is as large."""
_FAR = 5.0
"""Standard deviations: right data stay below 0.1, pixels of 0..255 instead of 0..1 give 65 and more."""


def find_hazards(
    grouped: GroupedModel,
    observed: ObservedValues = _NOT_OBSERVED,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    fused: Sequence[FusedNodes] = (),
) -> tuple[Hazard, ...]:
    """All hazards of a model, those of the groups with the most severe ones first, in the order of the graph.

    What goes wrong first is what the rest comes from: the square of a norm before the mean of the squares.

    Args:
        observed: what the values were on the search samples, where they were observed.
        fused: nodes that the engine computes as one, with FP32 inside: what is wrong in FP16 there is no hazard.
    """
    model, types = grouped.model, value_types(grouped)
    narrowest = min((Precision.FP16, *map(Precision.named, precisions)), key=lambda precision: precision.mantissa_bits)
    hazards = static.constant_hazards(types, observed)
    guarded = {h.place.group for h in hazards if h.code == "vanishing-epsilon" and h.wording != "weights"}
    hazards += [*_range_hazards(types, observed), *probe_hazards(types, observed, guarded)]
    hazards += [*_sum_hazards(types, observed, narrowest), *_index_hazards(types, observed, narrowest)]
    hazards += [*_fit_hazards(types, observed), *static.norm_hazards(types, observed)]
    hazards += [*static.broadcast_hazards(types), *static.int64_hazards(types.facts)]
    inside, steps = values_inside(model, fused), steps_inside(fused)
    groups = {group.id: position for position, group in enumerate(grouped.groups)}
    nodes = {node.name: node.index for node in model.nodes}

    def is_fused(hazard: Hazard) -> bool:  # what the nodes read is not: that is FP16 where it is computed in FP16
        of_step = hazard.code == "long-sum" or types.facts.is_scalar(hazard.place.tensor)
        return hazard.place.tensor in inside or (hazard.place.node in steps and of_step)

    def position(hazard: Hazard) -> tuple[int, bool, int, str, str]:
        place, is_norm = hazard.place, hazard.code == "norm-written-out"  # a norm's squares only may overflow
        group, node = groups.get(place.group or "", len(groups)), nodes.get(place.node or "", len(nodes))
        return group, is_norm, node, hazard.code, place.tensor

    return worst_first(sorted((hazard for hazard in hazards if not is_fused(hazard)), key=position))


def nodes_beyond(grouped: GroupedModel, hazards: Sequence[Hazard]) -> tuple[set[str], set[str]]:
    """The nodes that compute or read values beyond FP16, and the groups that something else rules FP16 out of.

    Nodes of such a group are not among them: the group is in FP32 as a whole. One with large angles need not be: its
    error is finite, and says which nodes hold them.
    """
    types = value_types(grouped)
    errors = [hazard for hazard in hazards if hazard.rules_out(Precision.FP16) and hazard.place.group is not None]
    others = {h.place.group for h in errors if h.place.group and not h.is_of_range and h.code != "angle-spacing"}
    values = {(h.place.group, h.place.tensor) for h in errors if h.is_of_range and h.place.group not in others}
    touched = ((group, node.name) for group, tensor in values for node in touching(types, tensor))
    return {name for group, name in touched if grouped.owners.get(name) == group}, others


def pinning_hazards(
    hazards: Sequence[Hazard], precision: Precision = Precision.FP16, *, is_measured: bool = False
) -> dict[str, Hazard]:
    """Groups that a reduced precision cannot serve, each with the first hazard that says so.

    Args:
        is_measured: whether the errors of plans are measured or emulated. A constant beyond the precision, which is
            held as the largest finite value, then pins no group: the error shows what that does.
    """
    pinned: dict[str, Hazard] = {}
    for hazard in hazards:
        rules_out = hazard.rules_out(precision) or (not is_measured and hazard.changes_constant(precision))
        if rules_out and hazard.place.group is not None:
            pinned.setdefault(hazard.place.group, hazard)
    return pinned


def pinned_by_hazards(
    hazards: Sequence[Hazard], precision: Precision = Precision.FP16, *, is_measured: bool = False
) -> dict[str, str]:
    """The groups of ``pinning_hazards``, each with the reason in words."""
    pinned = pinning_hazards(hazards, precision, is_measured=is_measured)
    return {group: f"{hazard.place.tensor}: {hazard.reason}" for group, hazard in pinned.items()}


# -- what ranges show -------------------------------------------------------------------------------------------------


def _range_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them; and rows masked whole."""
    model, hazards = types.model, list[Hazard]()
    for tensor, values in observed.ranges.items():
        absmax = values.absmax
        for node in types.facts.readers(tensor) if values.masked_rows else ():
            if node.op_type in SOFTMAX or mask_input(node) == tensor:
                place = HazardPlace(node.name, group_of(types, node), tensor, (observed.sample(values.masked_sample),))
                rows = {"masked_rows": values.masked_rows, "limit": -FP16_MAX}
                samples = {"samples": values.masked_samples if values.masked_samples > 1 else None}
                hazards.append(Hazard("mask", place, rows, "rows", "warning", absmax, samples))
        is_beyond = absmax > FP16_MAX
        if absmax <= FP16_MAX / _HEADROOM or (is_beyond and is_held(model, tensor, Precision.FP16)):
            continue  # the constants that a mask is made of are hazards of their own, and are held within the range
        evidence: dict[str, float] = {"absmax": absmax, "fp16_max": FP16_MAX}
        if values.beyond:
            evidence |= {"samples_beyond": values.beyond, "samples": values.samples}
        sample, done = observed.sample(values.sample), set[tuple[str, bool]]()
        words = {"in_samples": in_samples(values.beyond, values.samples, sample)}
        for node in touching(types, tensor):
            # What lies far below the other scores of a softmax, and becomes -inf, weighs nothing either way.
            is_mask = is_beyond and values.highest <= FP16_MAX and stays_right(model, node)
            group = group_of(types, node)
            if group is None or (group, is_mask) in done:
                continue
            done.add((group, is_mask))
            severity: Severity = "error" if is_beyond and not is_mask else "warning"
            wording = "mask" if is_mask else "seen" if is_beyond else "near"
            place = HazardPlace(node.name, group, tensor, (sample,))
            hazards.append(Hazard("overflow", place, evidence, wording, severity, absmax, words))
    return hazards


def _sum_hazards(types: ValueTypes, observed: ObservedValues, narrowest: Precision) -> list[Hazard]:
    """Sums of values of one sign, enough that a term is below half of the spacing at the sum, in FP16 or in BF16."""
    hazards, exact = [], narrowest.exact_integers
    for node in types.model.nodes:
        group = group_of(types, node)
        if group is None or node.op_type not in SUMMING or not node.is_standard:
            continue
        values, result = (observed.ranges.get(name) for name in (node.inputs[0], node.outputs[0]))
        if values is None or result is None or values.lowest == values.highest == 0:
            continue
        terms = math.prod(values.shape) // max(1, math.prod(result.shape))
        is_of_one_sign = node.op_type in _ONE_SIGNED or not values.lowest < 0 < values.highest
        if terms >= exact and is_of_one_sign:
            place = HazardPlace(node.name, group, node.inputs[0], (observed.sample(values.sample),))
            evidence = {"terms": terms, "lowest": values.lowest, "highest": values.highest}
            words = {"operator": node.op_type, "narrowest": narrowest.name, "exact_to": exact}
            hazards.append(Hazard("long-sum", place, evidence, "", "info", float(terms), words))
    return hazards


def _index_hazards(types: ValueTypes, observed: ObservedValues, narrowest: Precision) -> list[Hazard]:
    """Casts to integers that become an index or a size, of values above the whole numbers that FP16 or BF16 holds.

    The groups that compute such a value are kept in FP32, back to where values are smaller or no index yet.
    """
    hazards, facts, exact = list[Hazard](), types.facts, narrowest.exact_integers
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
        for source in map(facts.producer, walk([tensor], carried_from)):
            group = None if source is None else group_of(types, source)
            if source is not None and group is not None:
                carriers.setdefault(group, source)
        reached, sample = observed.absmax[tensor], observed.sample(observed.ranges[tensor].sample)
        evidence: dict[str, float | str] = {"largest": reached, "exact_to": exact, "reader": reader.name}
        precision = Precision.FP16 if reached > Precision.FP16.exact_integers else narrowest
        for group, source in carriers.items():
            place, words = HazardPlace(source.name, group, tensor, (sample,)), {"narrowest": narrowest.name}
            hazards.append(Hazard("index-in-float", place, evidence, "", "error", reached, words, precision))
    return hazards


def _indexes(facts: Facts, cast: Node) -> Node | None:
    """The node that takes the result of a Cast as an index or a size, through arithmetic on integers; None if none."""

    def onward(value: str) -> Iterable[str]:
        readers = (reader for reader in facts.readers(value) if reader.op_type in _KEEPS_INDEX)
        return [out for reader in readers for out in reader.outputs if out and "int" in facts.model.info(out).dtype]

    for value in walk(cast.outputs, onward) if "int" in facts.model.info(cast.outputs[0]).dtype else ():
        for reader in facts.readers(value):
            row = operator(reader.op_type if reader.is_standard else "")
            read = [reader.inputs[slot] for slot in row.sizes | row.indices if slot < len(reader.inputs)]
            if any(facts.root(name) == facts.root(value) for name in read):
                return reader
    return None


def _fit_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """The first BatchNormalization whose input lies far off its running mean, in its own standard deviations."""
    deviations = {each.node: fmean(each.facts["deviations"]) for each in observed.probes if "deviations" in each.facts}
    far = [node for node in types.model.nodes if deviations.get(node.name, 0.0) > _FAR]
    if not far:
        return []
    off, place = deviations[far[0].name], HazardPlace(far[0].name, None, far[0].inputs[0])
    evidence, words = {"standard_deviations": off, "limit": _FAR, "nodes": len(far)}, {"more": len(far) - 1 or None}
    return [Hazard("data-do-not-fit", place, evidence, "norm", value=off, words=words)]
