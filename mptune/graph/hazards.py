"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mptune.graph.flow import Flow
from mptune.graph.groups import LayerGroup
from mptune.graph.model import Model, Node
from mptune.graph.weights import Rounding, chunks, measure_rounding, round_to_fp16

FP16_MAX = 65504.0
"""Largest finite FP16 value, (2 - 2**-10) * 2**15 (IEEE 754-2008, binary16)."""
_VANISHING_SHARE = 0.01
_SATURATING = frozenset({"Where", "Clip", "Min", "Max", "Add"})
"""An infinite constant means something to these. Not to a product: 0 * -inf is NaN, so (1 - mask) * -1e9 fails."""

Severity = Literal["info", "warning", "error"]
"""error: FP16 cannot be right here, the group is pinned to FP32. warning: it may be. info: good to know."""


@dataclass(frozen=True)
class Hazard:
    """One place where FP16 cannot hold a value.

    Attributes:
        severity: what it means for the search.
        kind: ``overflow``, ``range``, ``vanishing`` or ``epsilon``.
        group: id of the layer group that would be FP16 there; None where no group is.
        node: the node that reads or computes the value.
        tensor: the value.
        value: its magnitude.
        reason: why FP16 fails here.
        cure: what to do about it.
    """

    severity: Severity
    kind: str
    group: str | None
    node: str | None
    tensor: str
    value: float
    reason: str
    cure: str

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self)


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
    flow = Flow(model, groups)
    known = {r.tensor: r for r in roundings}
    found: list[Hazard] = []
    for name in sorted(flow.convertible_constants()):
        rounding = known.get(name) or _rounding(model, name)
        found += _constant_hazards(flow, name, rounding)
    for tensor, absmax in (ranges or {}).items():
        found += _range_hazards(flow, tensor, absmax)
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda h: (order[h.severity], h.group or "", h.tensor)))


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
    position = flow.group_of[node.index]
    return flow.groups[position] if position >= 0 else None


def _constant_hazards(flow: Flow, name: str, rounding: Rounding) -> list[Hazard]:
    """Weights and constants that overflow or vanish: one hazard per group that reads them."""
    found = []
    scalar = rounding.size == 1
    for node in _readers(flow, name):
        group = _group(flow, node)
        if group is None:
            continue
        where = (group.id, node.name, name)
        if rounding.overflowed:
            saturates = node.op_type in _SATURATING
            found.append(
                Hazard(
                    "warning" if saturates else "error",
                    "overflow",
                    *where,
                    rounding.absmax,
                    f"{rounding.overflowed} of {rounding.size} values exceed FP16's {FP16_MAX:g} and become infinite",
                    "a limit may stay infinite, but a row that is masked everywhere gives NaN: use -1e4 for masks"
                    if saturates
                    else "keep the group in FP32, or scale the weights",
                )
            )
        elif scalar and rounding.vanished:
            found.append(
                Hazard(
                    "warning",
                    "epsilon",
                    *where,
                    rounding.absmax,
                    f"the constant {rounding.absmax:g} is zero in FP16, so nothing guards the division any more",
                    "keep the group in FP32, or export with an epsilon of 1e-5 or more",
                )
            )
        elif rounding.vanished > _VANISHING_SHARE * rounding.size:
            found.append(
                Hazard(
                    "info",
                    "vanishing",
                    *where,
                    rounding.absmax,
                    f"{rounding.vanished} of {rounding.size} values are too small for FP16 and become zero",
                    "harmless where the error says so; otherwise keep the group in FP32",
                )
            )
    return found


def _range_hazards(flow: Flow, tensor: str, absmax: float) -> list[Hazard]:
    """Values that were seen beyond FP16's range: every group that would hold them in FP16 overflows."""
    if absmax <= FP16_MAX:
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
        found.append(
            Hazard(
                "error",
                "range",
                group.id,
                node.name,
                tensor,
                absmax,
                f"reached {absmax:.4g} on the calibration data, FP16 ends at {FP16_MAX:g}",
                "the group is kept in FP32",
            )
        )
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
