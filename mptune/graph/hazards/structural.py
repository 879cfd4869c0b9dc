"""Hazards that the graph alone shows: norms written out, epsilons in attributes, broadcasts, large INT64 constants."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.lookup import Lookup, attribute, reduced_axes
from mptune.graph.grouping.patterns import Pattern
from mptune.graph.hazards.hazard import FP16_NORMAL, FP16_TINY, Hazard
from mptune.graph.loading.model import Model, Node
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
    """The operator that a norm which was written out could be: the opset that has it, and what it does better."""

    opset: int
    cure: str


_OPERATORS: Mapping[str, _NormOperator] = {
    "LayerNorm written out": _NormOperator(17, "at opset 17 or newer: LayerNormalization keeps its statistics in FP32"),
    "RMSNorm written out": _NormOperator(23, "at opset 23 or newer: RMSNormalization keeps its statistics in FP32"),
}
"""By the pattern's name. An L2 norm is no normalisation that has an operator with statistics in FP32."""

_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where"})
_INT32 = np.iinfo(np.int32)
_STARTS_AND_ENDS = slice(1, 3)
"""The inputs of a Slice that say where it starts and ends. Past the end of an axis all values mean the same, so one
that INT32 cannot hold means the same clamped: exporters write INT64_MAX for "to the end", and its negative for "to the
beginning" of a reversed axis."""
_PUTS_TOGETHER = frozenset({"Unsqueeze", "Squeeze", "Concat", "Cast", "Reshape"})
"""What exporters put between such an end and its Slice."""


def norm_hazards(
    types: ValueTypes, look: Lookup, patterns: tuple[Pattern, ...], ranges: Mapping[str, float]
) -> list[Hazard]:
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
        observed = "" if seen is None else f"; the largest square was {seen:.4g} on the calibration data"
        operator = _operator(look, pattern)
        cure = "keep the norm whole in FP32" + (f", or export {operator.cure}" if operator else "")
        evidence: dict[str, float] = {"opset": types.model.opset}
        if operator is not None:
            evidence["operator_opset"] = operator.opset
        if seen is not None:
            evidence["largest_square"] = seen
        hazards.append(
            Hazard(
                "warning" if seen is None else "info",
                "norm",
                types.groups[group].id,
                node.name,
                pattern.squares,
                SQUARE_LIMIT if seen is None else seen,
                f"{pattern.name}: squares of values from {SQUARE_LIMIT:g} on leave FP16's range{observed}",
                cure,
                "norm-written-out" if operator else None,
                evidence,
            )
        )
    return hazards


def _operator(look: Lookup, pattern: Pattern) -> _NormOperator | None:
    """The operator that a norm could be at a newer operator set; None where there is none, or it is there already.

    A norm of one position has its mean over the channels, the last axis or axis 1. A root mean square over several
    axes is the energy of an image, one without an epsilon or of a sum is a length.
    """
    operator = _OPERATORS.get(pattern.name)
    squares = look.producer(pattern.squares)
    if operator is None or squares is None or look.model.opset >= operator.opset:
        return None
    means = [node for node in look.readers(pattern.squares) if node.op_type in ("ReduceMean", "ReduceSum")]
    if len(means) != 1:
        return None
    rank = len(look.model.info(means[0].inputs[0]).shape or ())
    axes = reduced_axes(look.model, means[0], rank)
    if pattern.name == "LayerNorm written out":
        is_per_channel = rank > 3 and axes == tuple(range(2, rank))  # InstanceNormalization has always been there
        return None if is_per_channel or not axes else operator
    members = [look.model.nodes[index] for index in pattern.nodes]
    is_mean = means[0].op_type == "ReduceMean" or any(
        look.producer(node.inputs[0]) is means[0] and look.is_scalar(node.inputs[1])
        for node in members
        if node.op_type in ("Div", "Mul")
    )
    has_epsilon = any(
        node.op_type in ("Add", "Max", "Clip") and any(i and look.is_scalar(i) for i in node.inputs) for node in members
    )
    return operator if is_mean and has_epsilon and len(axes) == 1 and axes[0] in (1, rank - 1) else None


def epsilon_hazards(types: ValueTypes, smallest: Mapping[str, float]) -> list[Hazard]:
    """Epsilons in the attributes of norm operators that are zero in FP16, where a variance may come down to zero.

    Args:
        smallest: name of a node -> its smallest variance on data, where it was seen.
    """
    hazards = []
    for node in types.model.nodes:
        default = _EPSILON_DEFAULTS.get(node.op_type)
        group = types.group_of[node.index]
        if default is None or group < 0 or not node.is_standard:
            continue
        stated = attribute(node, "epsilon")
        epsilon = float(stated) if isinstance(stated, float) else default
        variance = smallest.get(node.name)
        if 0 < epsilon <= FP16_TINY / 2 and (variance is None or variance < FP16_NORMAL):
            hazards.append(
                Hazard(
                    "warning",
                    "epsilon",
                    types.groups[group].id,
                    node.name,
                    node.inputs[0],
                    epsilon,
                    f"the epsilon {epsilon:g} of {node.op_type} is zero in FP16, so nothing guards the division",
                    "keep the group in FP32, or export with an epsilon of 1e-5 or more",
                    None if _has_safe_variance(types.model, node) else "vanishing-epsilon",
                    {
                        "epsilon": epsilon,
                        "fp16_smallest": FP16_TINY,
                        **({} if variance is None else {"smallest": variance}),
                    },
                )
            )
    return hazards


def _has_safe_variance(model: Model, node: Node) -> bool:
    """Whether a BatchNormalization's stored variances are so far from zero that its epsilon does not matter."""
    variance = model.initializers.get(node.inputs[4]) if node.op_type == "BatchNormalization" else None
    return variance is not None and variance.nbytes > 0 and float(variance.numpy().min()) > FP16_NORMAL


def broadcast_hazards(types: ValueTypes, look: Lookup) -> list[Hazard]:
    """Broadcasts of computed values in a model whose batch is fixed at 1, of the kinds that ``_stretched`` names.

    TensorRT has been seen to give wrong values there, where the same model with a dynamic batch is right.
    """
    model = types.model
    if not any(info.shape and info.shape[0] == 1 for info in model.inputs):
        return []
    planes = {tuple(info.shape[2:]) for info in model.inputs if info.shape and len(info.shape) == 4}
    hazards = []
    for node in model.nodes:
        if node.op_type not in _ELEMENTWISE or not node.is_standard or not node.outputs:
            continue
        operands = [i for i in node.inputs if i and not look.is_static(i)]
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
        text = " with ".join(str(list(shape or ())) for shape in shapes)
        hazards.append(
            Hazard(
                "warning",
                "broadcast",
                types.groups[group].id if group >= 0 else None,
                node.name,
                node.outputs[0],
                float(math.prod(int(dim) for dim in result or () if isinstance(dim, int))),
                f"{node.op_type} stretches {text}, all computed, to {list(result or ())}: with a batch fixed at 1,"
                " TensorRT has been seen to get such broadcasts wrong",
                "put an Expand before it, or export with a dynamic batch",
                "broadcast",
                {"batch": 1, "operands": text, "result": str(list(result or ()))},
            )
        )
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


def int64_hazards(model: Model, look: Lookup) -> list[Hazard]:
    """INT64 constants that INT32 cannot hold, which TensorRT before 10 clamps (its parser's own warning)."""
    hazards = []
    for name, constant in model.initializers.items():
        if constant.dtype != "int64" or constant.nbytes == 0:
            continue
        ends = [(int(part.max(initial=0)), int(part.min(initial=0))) for part in chunks(constant)]
        largest = _beyond_int32(max(high for high, _ in ends), min(low for _, low in ends))
        if largest is None:
            continue
        readers = look.readers(name)
        if _bounds_slices(look, name):
            continue
        node: Node | None = readers[0] if readers else None
        hazards.append(
            Hazard(
                "warning",
                "int64",
                None,
                None if node is None else node.name,
                name,
                float(largest),
                f"the INT64 constant holds {largest}, which INT32 cannot: TensorRT before 10 clamps it",
                "build with TensorRT 10 or newer, or export with indices below 2147483648",
                "int64-range",
                {"value": largest, "int32_max": int(_INT32.max)},
            )
        )
    return hazards


def _bounds_slices(look: Lookup, name: str) -> bool:
    """Whether a value is only a start or an end of Slices, directly or through operators that assemble them."""
    seen: set[str] = set()
    stack = [name]
    while stack:
        at = stack.pop()
        seen.add(at)
        readers = look.readers(at)
        if not readers or look.is_output(at):
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
