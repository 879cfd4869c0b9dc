"""Hazards of constants: weights, masks, scales and epsilons that overflow or vanish in FP16; rows masked whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mptune.finding import Finding, FindingOrigin, Where
from mptune.findings.wording import Severity
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.facts import Facts, attribute, facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.hazard import FP16_MAX, FP16_NORMAL, FP16_TINY, Hazard, group_of, readers_in_fp16
from mptune.graph.hazards.masks import MASK_INPUTS, makes_limit, mask_input
from mptune.graph.hazards.seen import MaskedRows, SeenValue
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.ops import BOUNDS, GLUE, GUARDS, SOFTMAX
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import Rounding, rounding_of


def softmax_rows(model: Model) -> dict[str, tuple[int, ...]]:
    """FP32 values that a softmax is taken of, or that are added to its scores -> the axes of a row, ascending."""
    facts = facts_of(model)
    rows: dict[str, tuple[int, ...]] = {}
    for node in model.nodes:
        for tensor, axes in _reads(facts, node):
            if tensor and model.info(tensor).is_float32 and not facts.is_static(tensor):
                rows.setdefault(tensor, axes)
    return rows


def _reads(facts: Facts, node: Node) -> list[tuple[str, tuple[int, ...]]]:
    if node.op_type in SOFTMAX and node.is_standard:
        stated = attribute(node, "axis")
        return [(node.inputs[0], (stated if isinstance(stated, int) else -1,))]
    if node.op_type == "Exp" and node.is_standard:
        return _written_out(facts, node)
    mask = mask_input(node)
    return [(mask, (-1,))] if mask else []


def _written_out(facts: Facts, node: Node) -> list[tuple[str, tuple[int, ...]]]:
    """``exp(x - max(x))``: x, where the largest is taken along the last axis."""
    shift = facts.producer(node.inputs[0])
    if shift is None or shift.op_type != "Sub":
        return []
    largest = facts.producer(shift.inputs[1])
    if (
        largest is None
        or largest.op_type != "ReduceMax"
        or facts.root(largest.inputs[0]) != facts.root(shift.inputs[0])
    ):
        return []
    rank = len(facts.model.info(shift.inputs[0]).shape or ())
    return [(shift.inputs[0], (-1,))] if rank and facts.reduced_axes(largest) == (rank - 1,) else []


def masked_row_findings(
    grouped: GroupedModel,
    seen: Mapping[str, MaskedRows],
    origin: FindingOrigin,
    indices: Sequence[int] = (),
    reference_findings: Sequence[Finding] = (),
) -> tuple[Finding, ...]:
    """A finding for each value that had rows masked whole.

    Args:
        indices: index in the data of each sample that was seen; empty where they are all of the data.
        reference_findings: of the same model in FP32, where the softmax may be NaN already.
    """
    broken = {
        node for finding in reference_findings if finding.code == "reference-not-finite" for node in finding.where.nodes
    }
    model, owners = grouped.model, grouped.owners
    findings = []
    for tensor, masked in seen.items():
        readers = [model.nodes[i] for i in model.consumers.get(tensor, ())]
        nodes = [n for n in readers if n.op_type in SOFTMAX | {"Sub"} or (n.domain, n.op_type) in MASK_INPUTS]
        groups = tuple(dict.fromkeys(owners[node.name] for node in nodes if node.name in owners))
        sample = indices[masked.sample] if indices else masked.sample
        findings.append(
            Finding.of(
                "mask",
                origin,
                Where(tuple(n.name for n in nodes), groups, (tensor,), samples=(sample,)),
                {"masked_rows": masked.rows, "limit": -FP16_MAX},
                kind="rows in FP32" if broken.intersection(node.name for node in nodes) else "rows",
                samples=masked.samples if masked.samples > 1 else None,
            )
        )
    return tuple(findings)


_VANISHING_SHARE = 0.01

_MOSTLY_VANISHING_SHARE = 0.5

_BEFORE_DIVISION = GLUE | {"Sqrt", "Mul"}

_UNDEFINED_AT_ZERO = frozenset({"Reciprocal", "Log"})

_MAX_STEPS = 32


_Place = tuple[str, str, str, float]

"""Group, node, tensor and value: as ``Hazard`` takes them."""


def constant_hazards(types: ValueTypes, seen: Mapping[str, SeenValue]) -> list[Hazard]:
    """Weights and constants that overflow or vanish: one hazard per group that reads them."""
    hazards: list[Hazard] = []
    for name in sorted(types.convertible_constants()):
        rounding = rounding_of(types.model.initializers[name], Precision.FP16)
        rescaled = types.in_precision(name, Precision.FP16)
        if rescaled is types.model.initializers[name]:
            hazards += _of_constant(types, name, rounding, seen)
        elif rounding.overflowed:
            hazards += _rescaled(types, name, rounding)
    return hazards


def _rescaled(types: ValueTypes, name: str, rounding: Rounding) -> list[Hazard]:
    (node,) = readers_in_fp16(types, name)
    group = group_of(types, node)
    if group is None:
        return []
    place = group.id, node.name, name, rounding.absmax
    names = {"overflowed": rounding.overflowed, "size": rounding.size}
    evidence = {"absmax": rounding.absmax, "fp16_max": FP16_MAX}
    return [Hazard("rescaled", "overflow", *place, evidence, "rescaled", severity="info", names=names)]


def _of_constant(types: ValueTypes, name: str, rounding: Rounding, seen: Mapping[str, SeenValue]) -> list[Hazard]:
    hazards: list[Hazard] = []
    facts, done = types.facts, set[tuple[str, bool]]()
    for node in readers_in_fp16(types, name):
        group = group_of(types, node)
        if group is None:
            continue
        is_limit = bool(rounding.overflowed) and makes_limit(facts.model, node)
        if (group.id, is_limit) in done:
            continue
        done.add((group.id, is_limit))
        place = group.id, node.name, name, rounding.absmax
        if rounding.overflowed:
            wording = "constant" if rounding.size == 1 else "constants"
            counts = {"overflowed": rounding.overflowed, "size": rounding.size}
            hazards.append(_overflow(facts, place, wording, [node], counts))
        elif rounding.size == 1 and rounding.absmax < FP16_NORMAL and _guards_division(facts, node):
            guarded = [seen[value].smallest for value in facts.varying(node) if value in seen]
            hazards += _epsilon(place, min(guarded, default=None), is_direct=not _reaches_root(facts, node))
        elif rounding.vanished > _VANISHING_SHARE * rounding.size:
            hazards.append(_vanishing(place, rounding))
    return hazards


def _epsilon(place: _Place, smallest: float | None, *, is_direct: bool) -> list[Hazard]:
    """An epsilon below FP16's smallest normal: a hazard unless data show that what it guards stays away from zero.

    One that is subnormal still guards a square root; what is divided by it alone leaves FP16's range, which only data
    can show.

    Args:
        smallest: smallest magnitude that it was seen to guard; None without data.
        is_direct: whether the division is by the sum itself, and not by its square root.
    """
    if place[-1] <= FP16_TINY / 2:
        wording = "constant"
        is_harmless = smallest is not None and smallest >= FP16_NORMAL
    else:
        wording = "subnormal"
        is_harmless = not is_direct or smallest is None or smallest > place[-1] or place[-1] * FP16_MAX >= 1
    if is_harmless:
        return []
    evidence: dict[str, int | float | str] = {"epsilon": place[-1], "fp16_smallest": FP16_TINY}
    if smallest is not None:
        evidence["smallest"] = smallest
    return [Hazard("epsilon", "vanishing-epsilon", *place, evidence, wording, names={"fp16_normal": FP16_NORMAL})]


def _vanishing(place: _Place, rounding: Rounding) -> Hazard:
    severity: Severity = "warning" if rounding.vanished > _MOSTLY_VANISHING_SHARE * rounding.size else "info"
    names = {"vanished": rounding.vanished, "size": rounding.size}
    return Hazard("vanishing", "vanishing-epsilon", *place, {}, "weights", severity=severity, names=names)


def _overflow(
    facts: Facts, place: _Place, wording: str, readers: Sequence[Node], names: Mapping[str, object] | None = None
) -> Hazard:
    """A finite constant beyond FP16, which is held as FP16's largest finite value.

    A limit, and a mask on the way to a softmax or the like, mean the same so. Anything else is changed by it.
    """
    evidence = {"absmax": place[-1], "fp16_max": FP16_MAX, "held_as": FP16_MAX}
    severity: Severity = "warning"
    row = "overflow"
    if readers and all(makes_limit(facts.model, node) for node in readers):
        severity = "info"
        if any(node.op_type not in BOUNDS | {"Where"} for node in readers):
            row = "mask"
        else:
            wording += " limit"
    return Hazard("overflow", row, *place, evidence, wording, severity=severity, names=names or {})


def _guards_division(facts: Facts, node: Node) -> bool:
    """Whether a node adds a constant to, or takes its maximum with, what is divided by later: an epsilon."""
    if node.op_type not in GUARDS | {"Sub"}:
        return False

    def divides(reader: Node, tensor: str) -> bool:
        if reader.op_type == "Div":
            return facts.root(reader.inputs[1]) == facts.root(tensor)
        if reader.op_type == "Pow":
            return (facts.number(reader.inputs[1]) or 0.0) < 0
        return reader.op_type in _UNDEFINED_AT_ZERO

    return _reaches(facts, node, divides, _BEFORE_DIVISION)


def _reaches_root(facts: Facts, node: Node) -> bool:
    """Whether a square root is taken of what a node guards, so that the guard is the root of the constant."""

    def takes_root(reader: Node, _: str) -> bool:
        return reader.op_type == "Sqrt" or (
            reader.op_type == "Pow" and abs(facts.number(reader.inputs[1]) or 0.0) == 0.5
        )

    return _reaches(facts, node, takes_root, _BEFORE_DIVISION)


def _reaches(facts: Facts, node: Node, is_wanted: Callable[[Node, str], bool], between: frozenset[str]) -> bool:
    """Whether a node's result comes to a wanted reader through operators that are all in ``between``."""
    seen: set[int] = set()
    stack = [node.outputs[0]]
    for _ in range(_MAX_STEPS):  # values, not readers: every layer of a decoder may read one mask
        if not stack:
            break
        tensor = stack.pop()
        for reader in facts.readers(tensor):
            if is_wanted(reader, tensor):
                return True
            if reader.op_type in between and reader.index not in seen and reader.outputs:
                seen.add(reader.index)
                stack.append(reader.outputs[0])
    return False


def fill_hazards(types: ValueTypes) -> list[Hazard]:
    """ConstantOfShape with a value beyond FP16: a mask that is filled at run time."""
    hazards = []
    for node in types.model.nodes:
        group = group_of(types, node)
        if node.op_type != "ConstantOfShape" or group is None:
            continue
        value = abs(float(fill_value(node.proto).reshape(-1)[0]))
        if math.isfinite(value) and value > FP16_MAX:
            place = group.id, node.name, node.outputs[0], value
            hazards.append(_overflow(types.facts, place, "filled", types.facts.readers(node.outputs[0])))
    return hazards
