"""Hazards: places where FP16 cannot hold a value. Each names the place, the value, the reason and the cure.

Constants are rounded and compared (``constants``), values are judged by what was observed of them, and ``structural``
adds what the graph alone shows. Those of severity ``error`` pin their group to FP32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mptune.findings.numbers import in_samples
from mptune.findings.wording import Severity
from mptune.graph.casting.value_types import ValueTypes, value_types
from mptune.graph.facts import Facts, facts_of, float_attribute
from mptune.graph.fused import FusedNodes, steps_inside, values_inside
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_apart, set_apart
from mptune.graph.grouping.patterns import Pattern, find_patterns
from mptune.graph.hazards.constants import (
    constant_hazards,
    fill_hazards,
)
from mptune.graph.hazards.hazard import (
    BF16_MAX,
    FP16_MAX,
    FP16_NORMAL,
    FP16_TINY,
    Hazard,
    group_of,
    readers_in_fp16,
    worst_first,
)
from mptune.graph.hazards.masks import MaskValues, held_bounds, is_limit
from mptune.graph.hazards.on_data import fit_hazards, index_hazards, long_sum_hazards, on_data_hazards
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import Model, Node
from mptune.graph.ops import ELEMENTWISE, GUARDS, RESHAPES
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.weights import chunks

SQUARE_LIMIT = 256.0

"""Squares of larger values leave FP16's range: 256**2 = 65536."""

_EPSILON_DEFAULTS: Mapping[str, float] = {
    "InstanceNormalization": 1e-5,
    "GroupNormalization": 1e-5,
    "BatchNormalization": 1e-5,
}

"""Norm operators that compute in the type of their input (ONNX operator reference). LayerNormalization and
RMSNormalization do not: their stash_type keeps the statistics in FP32."""


@dataclass(frozen=True)
class _NormOperator:
    """The operator that a norm which was written out could be, and the opset that has it."""

    opset: int
    name: str


_OPERATORS: Mapping[str, _NormOperator] = {
    "LayerNorm written out": _NormOperator(17, "LayerNormalization"),
    "RMSNorm written out": _NormOperator(23, "RMSNormalization"),
}

"""By the pattern's name. An L2 norm is no normalisation that has an operator with statistics in FP32."""

_INT32 = np.iinfo(np.int32)

_STARTS_AND_ENDS = slice(1, 3)

"""The inputs of a Slice that say where it starts and ends. Past the end of an axis all values mean the same, so one
that INT32 cannot hold means the same clamped: exporters write INT64_MAX for "to the end", and its negative for "to the
beginning" of a reversed axis."""

_PUTS_TOGETHER = RESHAPES | {"Concat", "Cast"}

"""What exporters put between such an end and its Slice."""


def norm_hazards(types: ValueTypes, patterns: tuple[Pattern, ...], ranges: Mapping[str, float]) -> list[Hazard]:
    """Norms that were written out: their squares overflow in FP16 where an operator would keep them in FP32."""
    hazards = []
    for pattern in patterns:
        if not pattern.squares:
            continue
        node = types.model.nodes[types.model.producer[pattern.squares]]
        group = types.group_of[node.index]
        if group < 0:
            continue
        seen = ranges.get(pattern.squares)
        operator = _operator(types.facts, pattern)
        evidence: dict[str, float] = {"opset": types.model.opset}
        if operator is not None:
            evidence["operator_opset"] = operator.opset
        if seen is not None:
            evidence["largest_square"] = seen
        place = types.groups[group].id, node.name, pattern.squares, SQUARE_LIMIT if seen is None else seen
        name = None if operator is None else operator.name
        names = {"pattern": pattern.name, "square_limit": SQUARE_LIMIT, "operator": name}
        severity: Severity = "warning" if seen is None else "info"
        wording = "" if operator else "no operator"
        hazards.append(Hazard("norm", "norm-written-out", *place, evidence, wording, severity=severity, names=names))
    return hazards


def _operator(facts: Facts, pattern: Pattern) -> _NormOperator | None:
    """The operator that a norm could be at a newer operator set; None where there is none, or it is there already.

    A norm of one position has its mean over the channels, the last axis or axis 1. A root mean square over several
    axes is the energy of an image, one without an epsilon or of a sum is a length.
    """
    operator = _OPERATORS.get(pattern.name)
    squares = facts.producer(pattern.squares)
    if operator is None or squares is None or facts.model.opset >= operator.opset:
        return None
    means = [node for node in facts.readers(pattern.squares) if node.op_type in ("ReduceMean", "ReduceSum")]
    if len(means) != 1:
        return None
    rank = len(facts.model.info(means[0].inputs[0]).shape or ())
    axes = facts.reduced_axes(means[0])
    if pattern.name == "LayerNorm written out":
        is_per_channel = rank > 3 and axes == tuple(range(2, rank))  # InstanceNormalization has always been there
        return None if is_per_channel or not axes else operator
    members = [facts.model.nodes[index] for index in pattern.nodes]
    is_mean = means[0].op_type == "ReduceMean" or any(
        facts.producer(node.inputs[0]) is means[0] and facts.is_scalar(node.inputs[1])
        for node in members
        if node.op_type in ("Div", "Mul")
    )
    has_epsilon = any(node.op_type in GUARDS and any(i and facts.is_scalar(i) for i in node.inputs) for node in members)
    return operator if is_mean and has_epsilon and len(axes) == 1 and axes[0] in (1, rank - 1) else None


def epsilon_hazards(types: ValueTypes) -> list[Hazard]:
    """Epsilons in the attributes of norm operators that are zero in FP16, where a variance may come down to zero."""
    hazards = []
    for node in types.model.nodes:
        default = _EPSILON_DEFAULTS.get(node.op_type)
        group = types.group_of[node.index]
        if default is None or group < 0 or not node.is_standard:
            continue
        epsilon = float_attribute(node, "epsilon", default)
        if 0 < epsilon <= FP16_TINY / 2:
            place = types.groups[group].id, node.name, node.inputs[0], epsilon
            wording = "attribute of a safe variance" if _has_safe_variance(types.model, node) else "attribute"
            evidence = {"epsilon": epsilon, "fp16_smallest": FP16_TINY}
            names = {"operator": node.op_type}
            hazards.append(Hazard("epsilon", "vanishing-epsilon", *place, evidence, wording, names=names))
    return hazards


def _has_safe_variance(model: Model, node: Node) -> bool:
    """Whether a BatchNormalization's stored variances are so far from zero that its epsilon does not matter."""
    variance = model.initializers.get(node.inputs[4]) if node.op_type == "BatchNormalization" else None
    return variance is not None and variance.nbytes > 0 and float(variance.numpy().min()) > FP16_NORMAL


def broadcast_hazards(types: ValueTypes) -> list[Hazard]:
    """Broadcasts of computed values in a model whose batch is fixed at 1, of the kinds that ``_stretched`` names.

    TensorRT has been seen to give wrong values there, where the same model with a dynamic batch is right.
    """
    model = types.model
    if not any(info.shape and info.shape[0] == 1 for info in model.inputs):
        return []
    planes = {tuple(info.shape[2:]) for info in model.inputs if info.shape and len(info.shape) == 4}
    hazards = []
    for node in model.nodes:
        if node.op_type not in ELEMENTWISE or not node.is_standard or not node.outputs:
            continue
        operands = [i for i in node.inputs if i and not types.facts.is_static(i)]
        if len(operands) < 2 or not model.info(node.outputs[0]).is_float32:
            continue
        shapes = [model.info(i).shape for i in operands]
        result = model.info(node.outputs[0]).shape
        fixed_shapes = [s for s in (*shapes, result) if s is not None and all(isinstance(dim, int) for dim in s)]
        if len(fixed_shapes) != len(shapes) + 1 or not _stretched(
            [_ints(s) for s in fixed_shapes[:-1]], _ints(fixed_shapes[-1]), planes
        ):
            continue
        group = types.group_of[node.index]
        size = float(math.prod(_ints(result or ())))
        place = types.groups[group].id if group >= 0 else None, node.name, node.outputs[0], size
        text = " with ".join(str(list(shape or ())) for shape in shapes)
        evidence: dict[str, int | str] = {"batch": 1, "operands": text, "result": str(list(result or ()))}
        hazards.append(Hazard("broadcast", "broadcast", *place, evidence, names={"operator": node.op_type}))
    return hazards


def _ints(shape: Sequence[int | str | None]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if isinstance(dim, int))


def _stretched(operands: Sequence[tuple[int, ...]], result: tuple[int, ...], planes: Collection[object]) -> bool:
    """Whether operands stretch each other, one is stretched over more than one axis, or is a plane of a whole image.

    Gates, biases and scales of channels, tokens or whole tensors are stretched everywhere, and are right everywhere:
    what has one axis of its own at most, or the channels and no pixel. A one-channel plane counts where the image has
    the size of one that the model takes.
    """
    if not any(operand == result for operand in operands):
        return True
    for operand in operands:
        aligned = (1,) * (len(result) - len(operand)) + operand
        own = [axis for axis, size in enumerate(aligned) if size > 1]
        over = [axis for axis, size in enumerate(aligned) if size == 1 < result[axis]]
        if len(over) > 1 and len(own) > 1:
            return True
        if len(result) == 4 and over == [1] and own == [2, 3] and result[2:] in planes:
            return True
    return False


def int64_hazards(facts: Facts) -> list[Hazard]:
    """INT64 constants that INT32 cannot hold, which TensorRT before 10 clamps (its parser's own warning)."""
    hazards = []
    for name, constant in facts.model.initializers.items():
        if constant.dtype != "int64" or constant.nbytes == 0:
            continue
        ends = [(int(part.max(initial=0)), int(part.min(initial=0))) for part in chunks(constant)]
        largest = _beyond_int32(max(high for high, _ in ends), min(low for _, low in ends))
        if largest is None:
            continue
        if _bounds_slices(facts, name):
            continue
        reader = next((node.name for node in facts.readers(name)), None)
        evidence = {"value": largest, "int32_max": int(_INT32.max)}
        hazards.append(Hazard("int64", "int64-range", None, reader, name, float(largest), evidence))
    return hazards


def _bounds_slices(facts: Facts, name: str) -> bool:
    """Whether a value is only a start or an end of Slices, directly or through operators that assemble them."""
    seen: set[str] = set()
    stack = [name]
    while stack:
        at = stack.pop()
        seen.add(at)
        readers = facts.readers(at)
        if not readers or facts.is_output(at):
            return False
        for reader in readers:
            if reader.op_type in _PUTS_TOGETHER:
                stack += [out for out in reader.outputs if out and out not in seen]
            elif reader.op_type != "Slice" or reader.inputs.count(at) != reader.inputs[_STARTS_AND_ENDS].count(at):
                return False
    return True


def _beyond_int32(highest: int, lowest: int) -> int | None:
    """Which end lies beyond INT32; None where both fit."""
    if highest > _INT32.max:
        return highest
    return lowest if lowest < _INT32.min else None


__all__ = ["FP16_MAX", "Hazard", "find_hazards", "find_split", "over_threshold", "pinned_by_hazards"]

_FEW = 0.01
"""Share of vanishing values up to which a lost epsilon, which is named already, says it all."""

_HEADROOM = 2.0

"""Values seen within this factor of FP16's end: other data may well go beyond it."""


def find_hazards(
    grouped: GroupedModel,
    ranges: Mapping[str, float] | None = None,
    seen: Seen | None = None,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    fused: Sequence[FusedNodes] = (),
) -> tuple[Hazard, ...]:
    """All hazards of a model, those of the groups with the most severe ones first, in the order of the graph.

    What goes wrong first is what the rest comes from: the square of a norm before the mean of the squares.

    Args:
        ranges: value -> largest finite magnitude on the search samples, where they were observed.
        fused: nodes that the engine computes as one, with FP32 inside: what is wrong in FP16 there is no hazard.
    """
    model = grouped.model
    types, facts, patterns = value_types(grouped), facts_of(model), find_patterns(model)
    ranges, seen = ranges or {}, seen or Seen()
    hazards = constant_hazards(types, seen.values)
    hazards += epsilon_hazards(types)
    hazards += fill_hazards(types)
    masks = MaskValues(facts, ranges)
    in_fp16, in_bf16 = (held_bounds(types, ranges, precision) for precision in (Precision.FP16, Precision.BF16))
    smaller = types.rescaled(Precision.FP16).values
    for tensor, observed in ranges.items():
        absmax = observed / smaller.get(tensor, 1.0)
        bound, sources = in_fp16.get(tensor, (observed, frozenset()))
        is_held = absmax > FP16_MAX and bound < Precision.FP16.overflows_at
        if is_held and all(is_limit(model, constant) for constant in sources):
            continue  # these constants are hazards of their own
        largest = in_bf16.get(tensor, (observed,))[0] if absmax > BF16_MAX else absmax
        for hazard in _range_hazards(types, masks, tensor, absmax, largest, seen):
            hazards.append(_held(hazard) if is_held and hazard.severity == "error" else hazard)
    hazards += on_data_hazards(types, patterns, seen)
    hazards += long_sum_hazards(types, seen, precisions)
    hazards += index_hazards(types, ranges, seen, precisions)
    hazards += fit_hazards(types, seen)
    hazards += norm_hazards(types, patterns, ranges)
    hazards += broadcast_hazards(types)
    hazards += int64_hazards(facts)
    guarded = {hazard.group for hazard in hazards if hazard.kind == "epsilon"}
    # What is not zero before a lost epsilon vanishes by itself.
    hazards = [
        hazard
        for hazard in hazards
        if hazard.kind != "pole" or hazard.group not in guarded or float(hazard.evidence.get("zero_share", 0.0)) > _FEW
    ]
    hazards = _outside(hazards, facts, fused)
    groups = {group.id: position for position, group in enumerate(grouped.groups)}
    nodes = {node.name: node.index for node in model.nodes}

    def place(hazard: Hazard) -> tuple[int, bool, int, str, str]:
        group, node = groups.get(hazard.group or "", len(groups)), nodes.get(hazard.node or "", len(nodes))
        return group, hazard.kind == "norm", node, hazard.kind, hazard.tensor  # a norm's squares only may overflow

    return worst_first(sorted(hazards, key=place))


def find_split(
    grouped: GroupedModel,
    ranges: Mapping[str, float],
    seen: Seen,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    fused: Sequence[FusedNodes] = (),
) -> tuple[GroupedModel, tuple[Hazard, ...]]:
    """The groups, without the nodes that hold values beyond FP16 where the rest may then be FP16; and all hazards."""
    model, types = grouped.model, value_types(grouped)
    hazards = find_hazards(grouped, ranges, seen, precisions, fused)
    errors = [h for h in hazards if h.rules_out(Precision.FP16) and h.group is not None]
    others = {hazard.group for hazard in errors if hazard.kind != "range"}
    beyond: dict[str, list[str]] = {}
    for hazard in errors if Precision.FP16 in precisions else ():
        touching = _touching(types, hazard.tensor)
        names = [node.name for node in touching if grouped.owners.get(node.name) == hazard.group]
        if hazard.group is not None and hazard.group not in others:
            beyond.setdefault(hazard.group, []).extend(names)
    apart = find_apart(model, grouped.groups, beyond) if beyond else ()
    if not apart:
        return grouped, hazards
    split = GroupedModel(model, set_apart(model, grouped.groups, apart))
    kept = [replace(h, group=split.owners[h.node]) for h in errors if h.node is not None and h.node in apart]
    return split, worst_first((*kept, *find_hazards(split, ranges, seen, precisions, fused)))


def _outside(hazards: Sequence[Hazard], facts: Facts, fused: Sequence[FusedNodes]) -> list[Hazard]:
    """The hazards without those of what fused nodes keep in FP32: results of the steps inside, and their constants.

    What they read is not among these: that is FP16 where it is computed in FP16.
    """
    inside, steps = values_inside(facts.model, fused), steps_inside(fused)

    def is_inside(hazard: Hazard) -> bool:
        by_step = hazard.node in steps and (hazard.kind == "sum" or facts.is_scalar(hazard.tensor))
        return by_step or hazard.tensor in inside

    return [hazard for hazard in hazards if not is_inside(hazard)]


def _held(hazard: Hazard) -> Hazard:
    """A value beyond FP16 that is finite there, as constants are held as FP16's largest finite value."""
    evidence = {**hazard.evidence, "held_as": FP16_MAX}
    return replace(hazard, severity="warning", row="overflow", wording="held", evidence=evidence)


def _touching(types: ValueTypes, tensor: str) -> list[Node]:
    """The nodes that would compute a value in FP16, or read it in that."""
    model, readers = types.model, readers_in_fp16(types, tensor)
    if tensor in model.producer:
        producer = model.nodes[model.producer[tensor]]
        if tensor in {producer.outputs[o] for o in types.rules[producer.index].outputs}:
            return [producer, *readers]
    return readers


def _range_hazards(
    types: ValueTypes, masks: MaskValues, tensor: str, absmax: float, in_bf16: float, seen: Seen
) -> list[Hazard]:
    """Values that were seen near or beyond FP16's ends, for every group that would hold them in FP16.

    ``in_bf16`` is the magnitude where constants are held in BF16.
    """
    value = seen.values.get(tensor)
    about: dict[str, Any] = {}
    if value is not None:
        sample = seen.sample(value.sample)
        about["samples"] = (sample,)
        about["names"] = {"in_samples": in_samples(value.beyond, value.samples, sample)}
    severity: Severity = "error" if absmax > FP16_MAX else "warning"
    kind, row, wording = "range", "overflow", "seen"
    if FP16_MAX >= absmax > FP16_MAX / _HEADROOM:
        wording = "near"
    elif 0 < absmax <= FP16_NORMAL:
        kind, row = "underflow", "vanishing-values"
        wording = "underflow become zero" if absmax <= FP16_TINY / 2 else "underflow lose digits"
    elif absmax <= FP16_MAX:
        return []
    hazards, done = [], set()
    for node in _touching(types, tensor):
        group = group_of(types, node)
        is_mask = absmax > FP16_MAX and masks.may_be_infinite(node, tensor)
        if group is None or (group.id, is_mask) in done:
            continue
        done.add((group.id, is_mask))
        evidence: dict[str, int | float | str] = {"absmax": absmax, "fp16_max": FP16_MAX}
        if value is not None and value.beyond:
            evidence |= {"samples_beyond": value.beyond, "samples": value.samples}
        place = group.id, node.name, tensor, in_bf16
        is_product = absmax > FP16_MAX and masks.is_made_into_one(node, tensor)
        if is_mask:
            hazards.append(Hazard(kind, "overflow", *place, evidence, "mask", **about))
        else:
            code = "mask" if is_product else row
            hazards.append(Hazard(kind, code, *place, evidence, wording, severity=severity, **about))
    return hazards


def pinned_by_hazards(
    hazards: Sequence[Hazard], precision: Precision = Precision.FP16, *, is_measured: bool = False
) -> dict[str, str]:
    """Groups that a reduced precision cannot serve, each with the reason of its first hazard.

    Args:
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
    ids = set()
    for node, position in zip(grouped.model.nodes, types.group_of, strict=True):
        touched = [
            *(node.inputs[i] for i in types.rules[node.index].inputs),
            *(node.outputs[o] for o in types.rules[node.index].outputs),
        ]
        if position >= 0 and any(ranges.get(t, 0.0) > threshold for t in touched):
            ids.add(types.groups[position].id)
    return tuple(sorted(ids))
