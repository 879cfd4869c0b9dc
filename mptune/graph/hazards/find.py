"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure.

``static`` has those that the model alone shows, ``on_data`` those of values that were observed. Those of severity
``error`` pin their group to FP32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mptune.graph.facts import FusedNodes, steps_inside, values_inside
from mptune.graph.groups import GroupedModel, find_apart, set_apart
from mptune.graph.hazards import on_data, static
from mptune.graph.hazards.hazard import OF_RANGE, Hazard, ObservedValues, worst_first
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.value_types import value_types

_NOT_OBSERVED = ObservedValues()


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
    facts = types.facts
    hazards = [*static.constant_hazards(types, observed), *static.node_hazards(types)]
    guarded = {h.place.group for h in hazards if h.code == "vanishing-epsilon" and h.wording != "weights"}
    hazards += on_data.range_hazards(types, observed)
    hazards += on_data.probe_hazards(types, observed, guarded)
    hazards += on_data.long_sum_hazards(types, observed, precisions)
    hazards += on_data.index_hazards(types, observed, precisions)
    hazards += on_data.fit_hazards(types, observed)
    hazards += [*static.norm_hazards(types, observed), *static.broadcast_hazards(types), *static.int64_hazards(facts)]
    inside, steps = values_inside(model, fused), steps_inside(fused)
    groups = {group.id: position for position, group in enumerate(grouped.groups)}
    nodes = {node.name: node.index for node in model.nodes}

    def is_fused(hazard: Hazard) -> bool:  # what the nodes read is not: that is FP16 where it is computed in FP16
        of_step = hazard.code == "long-sum" or facts.is_scalar(hazard.place.tensor)
        return hazard.place.tensor in inside or (hazard.place.node in steps and of_step)

    def position(hazard: Hazard) -> tuple[int, bool, int, str, str]:
        place, is_norm = hazard.place, hazard.code == "norm-written-out"  # a norm's squares only may overflow
        group, node = groups.get(place.group or "", len(groups)), nodes.get(place.node or "", len(nodes))
        return group, is_norm, node, hazard.code, place.tensor

    return worst_first(sorted((hazard for hazard in hazards if not is_fused(hazard)), key=position))


def find_split(
    grouped: GroupedModel,
    observed: ObservedValues,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    fused: Sequence[FusedNodes] = (),
) -> tuple[GroupedModel, tuple[Hazard, ...]]:
    """The groups, without the nodes that hold values beyond FP16 where the rest may then be FP16; and all hazards."""
    model, types = grouped.model, value_types(grouped)
    hazards = find_hazards(grouped, observed, precisions, fused)
    errors = [hazard for hazard in hazards if hazard.rules_out(Precision.FP16) and hazard.place.group is not None]
    others = {hazard.place.group for hazard in errors if hazard.code not in OF_RANGE}
    beyond: dict[str, list[str]] = {}
    for hazard in errors if Precision.FP16 in precisions else ():
        group = hazard.place.group
        names = [node.name for node in on_data.touching(types, hazard.place.tensor)]
        if group is not None and group not in others:
            beyond.setdefault(group, []).extend(name for name in names if grouped.owners.get(name) == group)
    apart = find_apart(model, grouped.groups, beyond) if beyond else ()
    if not apart:
        return grouped, hazards
    split = GroupedModel(model, set_apart(model, grouped.groups, apart))
    kept = [
        replace(hazard, place=replace(hazard.place, group=split.owners[hazard.place.node]))
        for hazard in errors
        if hazard.place.node is not None and hazard.place.node in apart
    ]
    return split, worst_first((*kept, *find_hazards(split, observed, precisions, fused)))


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


def over_threshold(grouped: GroupedModel, ranges: Mapping[str, float], threshold: float) -> tuple[str, ...]:
    """Ids of the groups that read or compute a value whose magnitude exceeds ``threshold`` (AutoCast's rule: 512)."""
    types = value_types(grouped)
    large = (tensor for tensor, absmax in ranges.items() if absmax > threshold)
    positions = {types.group_of[node.index] for tensor in large for node in on_data.touching(types, tensor)}
    return tuple(sorted(types.groups[position].id for position in positions if position >= 0))
