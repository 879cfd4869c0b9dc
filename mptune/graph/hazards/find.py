"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure.

Constants are rounded and compared, values are judged by what was observed of them, and ``structure_hazards`` adds
what the graph alone shows. Those of severity ``error`` pin their group to FP32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
import onnx.numpy_helper

from mptune.graph.casting.value_types import Flow
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.grouping.lookup import Lookup, attribute
from mptune.graph.grouping.patterns import find_patterns
from mptune.graph.hazards.hazard import FP16_MAX, FP16_NORMAL, FP16_TINY, SEVERITIES, Hazard, Severity
from mptune.graph.hazards.structural import broadcast_hazards, epsilon_hazards, int64_hazards, norm_hazards
from mptune.graph.loading.model import Model, Node
from mptune.graph.writing.weights import Rounding, chunks, measure_rounding, round_to_fp16

__all__ = ["FP16_MAX", "Hazard", "Severity", "find_hazards", "over_threshold", "pinned_by_hazards"]

_VANISHING_SHARE = 0.01
_MOSTLY_VANISHING_SHARE = 0.5
_HEADROOM = 2.0
"""Values seen within this factor of FP16's end: other data may well go beyond it."""
_LIMITS = frozenset({"Where", "Clip", "Min", "Max"})
"""An infinite constant means something to these. Not to a product: 0 * -inf is NaN, so (1 - mask) * -1e9 fails."""
_MASKED = frozenset({"Softmax", "LogSoftmax", "Exp", "ArgMax", "TopK", "ReduceMax", "Max", "Sigmoid"})
"""What -inf is an answer to, so that an added mask may become one."""
_ON_THE_WAY = frozenset({"Add", "Sub", "Where", "Reshape", "Transpose", "Cast", "Identity", "Unsqueeze", "Squeeze"})
_MAX_STEPS = 32
_KEPT = "the group is kept in FP32"


def find_hazards(
    model: Model,
    groups: Sequence[LayerGroup],
    ranges: Mapping[str, float] | None = None,
    roundings: Sequence[Rounding] = (),
) -> tuple[Hazard, ...]:
    """All hazards of a model, most severe first.

    Args:
        model: the model.
        groups: its groups; a hazard belongs to the group of the node that would compute in FP16.
        ranges: value -> largest finite magnitude on the search samples, where they were observed.
        roundings: what the weight bank saw when it rounded; constants that it does not hold are rounded here.
    """
    flow, look, ranges = Flow(model, groups), Lookup(model), ranges or {}
    known = {r.tensor: r for r in roundings}
    found: list[Hazard] = []
    for name in sorted(flow.convertible_constants()):
        rounding = known.get(name) or _rounding(model, name)
        found += _constant_hazards(flow, look, name, rounding)
    found += _fill_hazards(flow, look)
    for tensor, absmax in ranges.items():
        found += _range_hazards(flow, tensor, absmax)
    found += norm_hazards(flow, find_patterns(model, look), ranges)
    found += epsilon_hazards(flow)
    found += broadcast_hazards(flow, look)
    found += int64_hazards(model, look)
    return tuple(sorted(found, key=lambda h: (SEVERITIES.index(h.severity), h.group or "~", h.kind, h.tensor)))


def _rounding(model: Model, name: str) -> Rounding:
    parts = [measure_rounding(name, c, round_to_fp16(c)) for c in chunks(model.initializers[name])]
    return Rounding(
        name,
        max(p.absmax for p in parts),
        sum(p.overflowed for p in parts),
        sum(p.vanished for p in parts),
        sum(p.size for p in parts),
    )


def _readers(flow: Flow, tensor: str) -> list[Node]:
    """The nodes that would read a value in FP16."""
    nodes = (flow.model.nodes[i] for i in flow.model.consumers.get(tensor, ()))
    return [n for n in nodes if any(n.inputs[slot] == tensor for slot in flow.rules[n.index].inputs)]


def _group(flow: Flow, node: Node) -> LayerGroup | None:
    """The group that would be FP16 there; None where none would be under any plan."""
    position = flow.group_of[node.index]
    return flow.groups[position] if position >= 0 and flow.groups[position].pinned is None else None


def _constant_hazards(flow: Flow, look: Lookup, name: str, rounding: Rounding) -> list[Hazard]:
    """Weights and constants that overflow or vanish: one hazard per group that reads them."""
    found = []
    seen = set[tuple[str, bool]]()
    for node in _readers(flow, name):
        group = _group(flow, node)
        if group is None:
            continue
        harmless = bool(rounding.overflowed) and _may_be_infinite(look, node)
        if (group.id, harmless) in seen:
            continue
        seen.add((group.id, harmless))
        where = (group.id, node.name, name, rounding.absmax)
        if rounding.overflowed:
            one = f"{rounding.absmax:.4g} exceeds FP16's {FP16_MAX:g} and becomes infinite"
            many = (
                f"{rounding.overflowed} of {rounding.size} values exceed FP16's {FP16_MAX:g} and become infinite, the"
                f" largest is {rounding.absmax:.4g}"
            )
            found.append(_overflow(where, one if rounding.size == 1 else many, harmless))
        elif rounding.size == 1 and rounding.vanished:
            found.append(
                Hazard(
                    "warning",
                    "epsilon",
                    *where,
                    f"the constant {rounding.absmax:g} is zero in FP16, so nothing guards the division any more",
                    "keep the group in FP32, or export with an epsilon of 1e-5 or more",
                )
            )
        elif rounding.vanished > _VANISHING_SHARE * rounding.size:
            found.append(
                Hazard(
                    "warning" if rounding.vanished > _MOSTLY_VANISHING_SHARE * rounding.size else "info",
                    "vanishing",
                    *where,
                    f"{rounding.vanished} of {rounding.size} values are too small for FP16 and become zero",
                    "harmless where the error says so; otherwise keep the group in FP32",
                )
            )
    return found


def _overflow(where: tuple[str, str, str, float], reason: str, harmless: bool) -> Hazard:
    if not harmless:
        return Hazard("error", "overflow", *where, reason, f"{_KEPT}; scale the value at export to free it")
    cure = "a limit may stay infinite, but a row that is masked everywhere gives NaN: use -1e4 for masks"
    return Hazard("warning", "overflow", *where, reason, cure)


def _may_be_infinite(look: Lookup, node: Node) -> bool:
    """Whether a node makes a limit or a mask of a constant: clips at it, chooses it, or adds it before a softmax."""
    if node.op_type in _LIMITS:
        return True
    if node.op_type not in ("Add", "Sub"):
        return False
    seen: set[int] = set()
    stack = look.readers(node.outputs[0])
    while stack and len(seen) < _MAX_STEPS:
        at = stack.pop()
        if at.op_type in _MASKED:
            return True
        if at.op_type in _ON_THE_WAY and at.index not in seen and at.outputs:
            seen.add(at.index)
            stack += look.readers(at.outputs[0])
    return False


def _fill_hazards(flow: Flow, look: Lookup) -> list[Hazard]:
    """ConstantOfShape with a value beyond FP16: a mask that is filled at run time."""
    found = []
    for node in flow.model.nodes:
        group = _group(flow, node)
        if node.op_type != "ConstantOfShape" or group is None:
            continue
        stated = attribute(node, "value")
        if not isinstance(stated, onnx.TensorProto):
            continue
        value = abs(float(onnx.numpy_helper.to_array(stated).reshape(-1)[0]))
        if math.isfinite(value) and value > FP16_MAX:
            harmless = all(_may_be_infinite(look, reader) for reader in look.readers(node.outputs[0]))
            where = (group.id, node.name, node.outputs[0], value)
            found.append(_overflow(where, f"filled with {value:g}, which exceeds FP16's {FP16_MAX:g}", harmless))
    return found


def _range_hazards(flow: Flow, tensor: str, absmax: float) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them in FP16."""
    if absmax > FP16_MAX:
        severity: Severity = "error"
        kind, reason, cure = "range", f"reached {absmax:.4g} on the calibration data, FP16 ends at {FP16_MAX:g}", _KEPT
    elif absmax > FP16_MAX / _HEADROOM:
        severity, kind = "warning", "range"
        reason = f"reached {absmax:.4g} on the calibration data, close to FP16's end at {FP16_MAX:g}"
        cure = "make sure that the calibration data hold the extremes, or keep the group in FP32"
    elif 0 < absmax <= FP16_NORMAL:
        severity, kind = "warning", "underflow"
        lost = "become zero" if absmax <= FP16_TINY / 2 else "lose digits"
        reason = f"stayed below {absmax:.2g} on the calibration data: in FP16 all values {lost}"
        cure = "keep the group in FP32, or scale the values up in the model"
    else:
        return []
    model = flow.model
    touching = _readers(flow, tensor)
    if tensor in model.producer:
        producer = model.nodes[model.producer[tensor]]
        if tensor in {producer.outputs[o] for o in flow.rules[producer.index].outputs}:
            touching = [producer, *touching]
    found, seen = [], set()
    for node in touching:
        group = _group(flow, node)
        if group is None or group.id in seen:
            continue
        seen.add(group.id)
        found.append(Hazard(severity, kind, group.id, node.name, tensor, absmax, reason, cure))
    return found


def pinned_by_hazards(hazards: Sequence[Hazard]) -> dict[str, str]:
    """Groups that FP16 cannot serve, each with the reason of its first hazard."""
    pinned: dict[str, str] = {}
    for hazard in hazards:
        if hazard.severity == "error" and hazard.group is not None:
            pinned.setdefault(hazard.group, f"{hazard.tensor}: {hazard.reason}")
    return pinned


def over_threshold(
    model: Model, groups: Sequence[LayerGroup], ranges: Mapping[str, float], threshold: float
) -> tuple[str, ...]:
    """Ids of the groups that read or compute a value whose magnitude exceeds ``threshold`` (AutoCast's rule: 512)."""
    flow = Flow(model, groups)
    found = set()
    for node, position in zip(model.nodes, flow.group_of, strict=True):
        touched = [
            *(node.inputs[i] for i in flow.rules[node.index].inputs),
            *(node.outputs[o] for o in flow.rules[node.index].outputs),
        ]
        if position >= 0 and any(ranges.get(t, 0.0) > threshold for t in touched):
            found.add(flow.groups[position].id)
    return tuple(sorted(found))
