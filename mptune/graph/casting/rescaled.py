"""Constants beyond a reduced precision, rescaled so that it holds them while their nodes compute the same function.

A BatchNormalization's variances and scales: with ``variance' = s**2 - epsilon`` and ``scale' = s * scale /
sqrt(variance + epsilon)``, ``s`` a power of two for each channel. And two constant factors, one after the other: a
power of two moves from one to the other, and the value between them is that much smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx.numpy_helper

from mptune.graph.facts import Facts, facts_of, float_attribute
from mptune.graph.loading.model import Model, Node
from mptune.graph.loading.tensors import Initializer
from mptune.graph.plan import Precision

_LARGEST_SHIFT = 7
"""Most that ``s`` may be, as a power of two: its square is a variance."""

_FACTORS = ("Mul", "Div")


@dataclass(frozen=True)
class Rescaled:
    """What is rescaled for one precision.

    Attributes:
        constants: name -> the constant in place of it.
        values: value -> the factor by which it is smaller.
    """

    constants: Mapping[str, Initializer] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)


def rescale(model: Model, group_of: Sequence[int], precision: Precision) -> Rescaled:
    """Rescale what ``precision`` does not hold; ``group_of`` has the position of each node's group, [nodes]."""
    outputs = {output.name for output in model.outputs}
    own = {  # constants that a single node reads
        name: constant
        for name, constant in model.initializers.items()
        if not constant.overridable and name not in outputs and len(model.consumers.get(name, ())) == 1
    }
    constants: dict[str, Initializer] = {}
    values: dict[str, float] = {}
    for node in model.nodes:
        if not node.is_standard or group_of[node.index] < 0:
            continue
        if node.op_type == "BatchNormalization":
            constants |= _batch_norm(node, own, precision)
        elif node.op_type in _FACTORS:
            reader = facts_of(model).only_reader(node)
            is_next = reader is not None and reader.op_type in _FACTORS and reader.is_standard
            if reader is None or not is_next or node.outputs[0] not in reader.inputs:
                continue
            if group_of[reader.index] == group_of[node.index]:
                moved, factor = _moved(facts_of(model), node, reader, own, precision)
                if moved and not moved.keys() & constants.keys():
                    constants |= moved
                    values[node.outputs[0]] = factor
    return Rescaled(constants, values)


def _beyond(constant: Initializer, precision: Precision) -> bool:
    """Whether a finite value of a constant is beyond the largest value."""
    values = constant.numpy()
    return bool(np.isfinite(values).all() and np.abs(values).max(initial=0.0) > precision.largest)


def _with_values(constant: Initializer, values: np.ndarray) -> Initializer:
    """Under a name of its own, since a weight bank has the model's constant under its name."""
    tensor = onnx.numpy_helper.from_array(values.astype(np.float32), constant.name)
    return replace(constant, name=f"{constant.name} (rescaled)", proto=tensor)


def _batch_norm(node: Node, own: Mapping[str, Initializer], precision: Precision) -> dict[str, Initializer]:
    """The scales and variances of a norm that fit, by name; none where they fit as they are, or none do."""
    scale, variance = own.get(node.inputs[1]), own.get(node.inputs[4])
    if scale is None or variance is None or not (_beyond(scale, precision) or _beyond(variance, precision)):
        return {}
    epsilon = float_attribute(node, "epsilon", 1e-5)
    total = variance.numpy().astype(np.float64) + epsilon
    if not (total > 0).all() or not 0 <= epsilon < 0.5:
        return {}
    factors = scale.numpy() / np.sqrt(total)
    magnitudes = np.where(factors == 0, 1.0, np.abs(factors))
    powers = 2.0 ** np.clip(np.floor(-np.log2(magnitudes)), 0, _LARGEST_SHIFT)
    rescaled = _with_values(scale, factors * powers), _with_values(variance, powers**2 - epsilon)
    if any(_beyond(constant, precision) for constant in rescaled):
        return {}
    return dict(zip((scale.name, variance.name), rescaled, strict=True))


def _moved(
    facts: Facts, node: Node, reader: Node, own: Mapping[str, Initializer], precision: Precision
) -> tuple[dict[str, Initializer], float]:
    """The constant factors of a node and its reader that fit, and the factor by which the value between is smaller."""
    between = reader.inputs.index(node.outputs[0])
    varying = next((slot for slot in (0, 1) if not facts.is_static(node.inputs[slot])), None)
    if varying is None or len({*node.inputs}) < 2 or len({*reader.inputs}) < 2:
        return {}, 1.0
    names = node.inputs[1 - varying], reader.inputs[1 - between]
    constants = [own[name] for name in names if name in own]
    beyond = [_beyond(constant, precision) for constant in constants]
    if len(constants) < 2 or not any(beyond):
        return {}, 1.0
    # The power of two by which each constant is multiplied: that of the shift, or its reciprocal.
    signs = (-1 if node.op_type == "Mul" or varying == 1 else 1), (1 if reader.op_type == "Mul" else -1)
    least, most, aims = -math.inf, math.inf, []
    for constant, sign, is_beyond in zip(constants, signs, beyond, strict=True):
        magnitudes = np.abs(constant.numpy().astype(np.float64))
        if not np.isfinite(magnitudes).all() or not magnitudes.any():
            return {}, 1.0
        low, high = (math.log2(end) for end in (magnitudes[magnitudes > 0].min(), magnitudes.max()))
        ends = min(math.log2(precision.smallest_normal) - low, 0.0), math.log2(precision.largest) - high
        least, most = max(least, min(sign * e for e in ends)), min(most, max(sign * e for e in ends))
        aims += [-sign * high] if is_beyond else []
    least, most = math.ceil(least), math.floor(most)
    if least > most:
        return {}, 1.0
    shift = min(max(round(aims[0]), least), most)
    rescaled = {
        constant.name: _with_values(constant, constant.numpy() * 2.0 ** (sign * shift))
        for constant, sign in zip(constants, signs, strict=True)
    }
    return rescaled, 2.0**shift
