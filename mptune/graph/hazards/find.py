"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure.

``static`` has those that the model alone shows, ``probes`` what rounding changes at single nodes on data. Here are
those that follow from the ranges of observed values: overflow, long sums, indices. Those of severity ``error`` pin
their group to FP32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean

from mptune.finding import BREAKING_CODES
from mptune.findings.numbers import in_samples
from mptune.findings.wording import Severity
from mptune.graph.facts import FusedNodes, facts_of, steps_inside, values_inside
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards import hazard, static
from mptune.graph.hazards.hazard import FP16_MAX, Hazard, HazardPlace, ObservedValues, TensorRange
from mptune.graph.hazards.masks import is_held, mask_input, stays_right
from mptune.graph.hazards.probes import probe_hazards
from mptune.graph.ops import BOUNDS, MEANS, MOVEMENT, SOFTMAX, SUMMING
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.value_types import ValueTypes, value_types

_HEADROOM = 2.0  # values seen within this factor of FP16's end: other data may well go beyond it
_SATURATED = BOUNDS | {"Tanh", "Sigmoid", "HardSigmoid", "Erf"}
"""What gives the same of an infinite value as of those beyond FP16's end."""
_ONE_SIGNED = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})
"""Sums of magnitudes or squares, whatever the signs of what is summed."""
_COUNTERS = {"CumSum": 0, "LSTM": 2}  # operators that count up into one value -> which output the sums are
_SQUARED, _EXPONENTIAL = frozenset({"ReduceL2", "GlobalLpPool"}), frozenset({"ReduceLogSum", "ReduceLogSumExp"})
"""Operators that take a root or a logarithm of a sum. TensorRT writes them out, and holds the sum in FP16."""
_FAR = 5.0  # standard deviations: right data stay below 0.1, pixels of 0..255 instead of 0..1 give 65 and more


def find_hazards(
    grouped: GroupedModel,
    observed: ObservedValues = ObservedValues(),  # noqa: B008 (it is frozen)
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    fused: Sequence[FusedNodes] = (),
    blamed: Collection[str] = (),
) -> tuple[Hazard, ...]:
    """All hazards of a model, those of the groups with the most severe ones first, in the order of the graph.

    What goes wrong first is what the rest comes from: the square of a norm before the mean of the squares.

    Args:
        observed: what the values were on the search samples.
        fused: nodes that the engine computes as one, with FP32 inside: what is wrong in FP16 there is no hazard.
        blamed: nodes that make errors, so that less is enough to say why.
    """
    model, types = grouped.model, value_types(grouped)
    narrowest = min((Precision.FP16, *map(Precision.named, precisions)), key=lambda precision: precision.mantissa_bits)
    hazards = static.constant_hazards(types, observed)
    guarded = {h.place.group for h in hazards if h.code == "vanishing-epsilon" and h.wording != "weights"}
    hazards += [*_range_hazards(types, observed), *probe_hazards(types, observed, guarded, blamed)]
    hazards += [*_sum_hazards(types, observed, narrowest), *_fit_hazards(types, observed)]
    hazards += static.norm_hazards(types, observed)
    hazards += [*static.broadcast_hazards(types), *static.int64_hazards(types.facts)]
    inside, steps = values_inside(model, fused), steps_inside(fused)
    # What the nodes read is not fused: that is FP16 where it is computed in FP16.
    of_steps = (each for each in hazards if each.place.node in steps)
    of_step = [each for each in of_steps if each.code == "long-sum" or types.facts.is_scalar(each.place.tensor)]
    left = [each for each in hazards if each.place.tensor not in inside and each not in of_step]
    groups: dict[str | None, int] = {group.id: position for position, group in enumerate(grouped.groups)}
    nodes: dict[str | None, int] = {node.name: node.index for node in model.nodes}

    def position(each: Hazard) -> tuple[float, bool, float, str, str]:
        place, is_norm = each.place, each.code == "norm-written-out"  # a norm's squares only may overflow
        at = groups.get(place.group, math.inf), is_norm, nodes.get(place.node, math.inf)
        return *at, each.code, place.tensor

    return hazard.worst_first(sorted(left, key=position))


def nodes_beyond(grouped: GroupedModel, hazards: Sequence[Hazard]) -> tuple[set[str], set[str]]:
    """The nodes that compute or read values beyond FP16, and the groups that something else rules FP16 out of.

    Nodes of such a group are not among them: the group is in FP32 as a whole. One with large angles need not be: its
    error is finite, and says which nodes hold them. Nor need that of an output on a high level, which its last node is.
    """
    types, apart = value_types(grouped), ("angle-spacing", "spacing")
    errors = [each for each in hazards if each.rules_out(Precision.FP16) and each.place.group is not None]
    others = {h.place.group for h in errors if h.place.group and not h.is_of_range and h.code not in apart}
    values = {(h.place.group, h.place.tensor) for h in errors if h.is_of_range and h.place.group not in others}
    touched = {(group, node.name) for group, tensor in values for node in hazard.touching(types, tensor)}
    touched |= {(h.place.group, h.place.node or "") for h in errors if h.code == "spacing"}  # an output's last node
    return {name for group, name in touched if grouped.owners.get(name) == group}, others


def blame(
    grouped: GroupedModel, observed: ObservedValues, nodes: Collection[str], precisions: Sequence[str]
) -> dict[str, Hazard]:
    """Why rounding at nodes makes errors, by their values: node -> its hazard, where a row of the table fits.

    What reads a node's result, moved or not, meets the same rounding, so that it may be the place.
    """
    facts, places = facts_of(grouped.model), {name: [name] for name in nodes}
    for node in (node for node in grouped.model.nodes if node.name in places):
        moved = facts.onward(node.outputs, MOVEMENT)
        places[node.name] += [reader.name for value in moved for reader in facts.readers(value)]
    every = find_hazards(grouped, observed, precisions, blamed={name for near in places.values() for name in near})
    named = (h for h in reversed(every) if h.code in BREAKING_CODES and not h.is_note and h.severity != "info")
    at = {each.place.node: each for each in named}
    return {name: at[place] for name, near in places.items() for place in reversed(near) if place in at}


def pinning_hazards(
    hazards: Sequence[Hazard], precision: Precision = Precision.FP16, *, is_measured: bool = False
) -> dict[str, Hazard]:
    """Groups that a reduced precision cannot serve, each with the first hazard that says so.

    ``is_measured``: errors of plans are measured or emulated. A constant beyond the precision, which is held as the
    largest finite value, then pins no group: the error shows what that does.
    """
    pinned: dict[str, Hazard] = {}
    for each in hazards:
        if each.place.group is not None and each.rules_out(precision, is_measured=is_measured):
            pinned.setdefault(each.place.group, each)
    return pinned


def pinned_by_hazards(
    hazards: Sequence[Hazard], precision: Precision = Precision.FP16, *, is_measured: bool = False
) -> dict[str, str]:
    """The groups of ``pinning_hazards``, each with the reason in words."""
    pinned = pinning_hazards(hazards, precision, is_measured=is_measured)
    return {group: f"{each.place.tensor}: {each.reason}" for group, each in pinned.items()}


# -- what ranges show -------------------------------------------------------------------------------------------------


def _range_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them; and rows masked whole."""
    model, hazards = types.model, list[Hazard]()
    for tensor, values in observed.ranges.items():
        absmax = values.absmax
        for node in types.facts.readers(tensor) if values.masked_rows else ():
            if node.op_type in SOFTMAX or mask_input(node) == tensor:
                group, shown = hazard.group_of(types, node), observed.sample(values.masked_sample)
                place = HazardPlace(node.name, group, tensor, (shown,))
                rows = {"masked_rows": values.masked_rows, "limit": -FP16_MAX}
                samples = {"samples": values.masked_samples if values.masked_samples > 1 else None}
                hazards.append(Hazard("mask", place, rows, "rows", "warning", absmax, samples))
        is_beyond, readers = absmax > FP16_MAX, {reader.op_type for reader in types.facts.readers(tensor)}
        is_saturated = bool(readers) and readers <= _SATURATED and not types.facts.is_output(tensor)
        if absmax <= FP16_MAX / _HEADROOM or (is_beyond and is_held(model, tensor, Precision.FP16)):
            continue  # the constants that a mask is made of are hazards of their own, and are held within the range
        beyond = {"samples_beyond": values.beyond, "samples": values.samples} if values.beyond else {}
        evidence = {"absmax": absmax, "fp16_max": FP16_MAX, **beyond}
        sample, done = observed.sample(values.sample), set[tuple[str, bool]]()
        words = {"in_samples": in_samples(values.beyond, values.samples, sample)}
        for node in hazard.touching(types, tensor):
            # What lies far below the other scores of a softmax, and becomes -inf, weighs nothing either way.
            is_mask = is_beyond and (is_saturated or (values.highest <= FP16_MAX and stays_right(model, node)))
            group = hazard.group_of(types, node)
            if group is None or (group, is_mask) in done:
                continue
            done.add((group, is_mask))
            about: tuple[str, Severity] = ("seen", "error") if is_beyond else ("near", "warning")
            if is_mask:
                about = ("saturated", "info") if is_saturated else ("mask", "warning")
            place = HazardPlace(node.name, group, tensor, (sample,))
            hazards.append(Hazard("overflow", place, evidence, *about, absmax, words))
    return hazards


def _sum_hazards(types: ValueTypes, observed: ObservedValues, narrowest: Precision) -> list[Hazard]:
    """Sums that leave FP16's range inside an operator, or whose terms are below half of the spacing at the sum."""
    hazards, exact, none = [], narrowest.exact_integers, TensorRange(0.0)
    for node in types.model.nodes:
        out, op_type = _COUNTERS.get(node.op_type, 0), node.op_type
        is_sum = op_type in SUMMING | _COUNTERS.keys() | _SQUARED | _EXPONENTIAL and len(node.outputs) > out
        if not is_sum or not node.is_standard or (group := hazard.group_of(types, node)) is None:
            continue
        values, result = (observed.ranges.get(name, none) for name in (node.inputs[0], node.outputs[out]))
        if not values.absmax or not result.absmax:
            continue
        terms, is_one_signed = math.prod(values.shape) / max(1, math.prod(result.shape)), op_type in _ONE_SIGNED
        if op_type in _COUNTERS:  # so many of the largest, at least; a step of a cell's state is 1 at most
            terms = result.absmax / (values.absmax if op_type != "LSTM" else 1.0)
        total = result.absmax * (terms if op_type in MEANS else 1.0)
        total = total**2 if op_type in _SQUARED else math.exp(min(total, 99.0)) if op_type in _EXPONENTIAL else total
        place = HazardPlace(node.name, group, node.inputs[0], (observed.sample(values.sample),))
        words = {"operator": op_type, "narrowest": narrowest.name, "exact_to": exact}
        if op_type in _SQUARED | _EXPONENTIAL and total > FP16_MAX:
            evidence = {"absmax": total, "fp16_max": FP16_MAX}
            hazards.append(Hazard("overflow", place, evidence, "inside", "error", total, words))
        elif terms >= exact and (is_one_signed or op_type == "LSTM" or not values.lowest < 0 < values.highest):
            evidence = {"terms": round(terms), "lowest": values.lowest, "highest": values.highest, "sum": total}
            hazards.append(Hazard("long-sum", place, evidence, "", "info", terms, words))
    return hazards


def _fit_hazards(types: ValueTypes, observed: ObservedValues) -> list[Hazard]:
    """The first BatchNormalization whose input lies far off its running mean, in its own standard deviations."""
    deviations = {each.node: fmean(each.facts["deviations"]) for each in observed.probes if "deviations" in each.facts}
    far = [node for node in types.model.nodes if deviations.get(node.name, 0.0) > _FAR]
    if not far:
        return []
    off, place = deviations[far[0].name], HazardPlace(far[0].name, None, far[0].inputs[0])
    evidence, words = {"standard_deviations": off, "limit": _FAR, "nodes": len(far)}, {"more": len(far) - 1 or None}
    return [Hazard("data-do-not-fit", place, evidence, "norm", value=off, words=words)]
