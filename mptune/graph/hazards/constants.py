"""Hazards of constants: weights, masks, scales and epsilons that overflow or vanish when they are rounded to FP16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.grouping.attention import GLUE
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.hazards.hazard import FP16_MAX, FP16_NORMAL, FP16_TINY, Hazard, group_of, readers_in_fp16
from mptune.graph.hazards.masked_rows import mask_input
from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import fill_value
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import Rounding, rounding_of

_VANISHING_SHARE = 0.01
_MOSTLY_VANISHING_SHARE = 0.5
LIMITS = frozenset({"Clip", "Min", "Max"})
"""A constant beyond any value is a bound to these."""
_SUMS = frozenset({"Add", "Sub"})
_MAKE_MASKS = _SUMS | {"Where", "Mul"}
ANSWERS_INFINITY = frozenset({"Softmax", "LogSoftmax", "Exp", "ArgMax", "TopK", "ReduceMax", "Max", "Sigmoid"})
"""What -inf is an answer to, so that an added mask may become one."""
_VIEWS = GLUE | {"Slice", "Tile", "Concat", "Gather", "Trilu", "Split"}
"""What masks pass on their way: they choose, move and repeat."""
_BEFORE_MASKED = _VIEWS | {"Add", "Sub", "Where"}
_GUARDS = frozenset({"Add", "Max", "Clip", "Sub"})
_BEFORE_DIVISION = frozenset({"Sqrt", "Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Mul"})
_UNDEFINED_AT_ZERO = frozenset({"Reciprocal", "Log"})
_MAX_STEPS = 32
LIMIT_CURE = "a limit may stay infinite, but a row that is masked everywhere gives NaN: use -1e4 for masks"
_MASK_CURE = "nothing: it masks as well, unless a row is masked whole"
BEYOND_CURE = (
    "a search measures what that does; without one (apply) the group is kept in FP32; scale the value at export to"
    " free it"
)


@dataclass(frozen=True)
class _Place:
    """Where a constant is used: the arguments of ``Hazard`` from ``group`` to ``value``."""

    group: str
    node: str
    tensor: str
    value: float

    @property
    def arguments(self) -> tuple[str, str, str, float]:
        return self.group, self.node, self.tensor, self.value


def constant_hazards(
    types: ValueTypes,
    look: Lookup,
    roundings: Mapping[str, Rounding],
    smallest: Mapping[str, float],
) -> list[Hazard]:
    """Weights and constants that overflow or vanish: one hazard per group that reads them.

    ``smallest`` maps a node that guards a division to the smallest magnitude that it was seen to guard on data.
    """
    hazards: list[Hazard] = []
    for name in sorted(types.convertible_constants()):
        rounding = roundings.get(name) or rounding_of(types.model.initializers[name], Precision.FP16)
        hazards += _of_constant(types, look, name, rounding, smallest)
    return hazards


def _of_constant(
    types: ValueTypes, look: Lookup, name: str, rounding: Rounding, smallest: Mapping[str, float]
) -> list[Hazard]:
    hazards = []
    seen = set[tuple[str, bool]]()
    for node in readers_in_fp16(types, name):
        group = group_of(types, node)
        if group is None:
            continue
        is_limit = bool(rounding.overflowed) and _is_limit(look, node)
        if (group.id, is_limit) in seen:
            continue
        seen.add((group.id, is_limit))
        place = _Place(group.id, node.name, name, rounding.absmax)
        if rounding.overflowed:
            hazards.append(_overflow(look, place, _overflow_reason(rounding), [node]))
        elif rounding.size == 1 and rounding.absmax < FP16_NORMAL and _guards_division(look, node):
            hazards += _epsilon(place, smallest.get(node.name), is_direct=not _reaches_root(look, node))
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
    vanishes = place.value <= FP16_TINY / 2
    if vanishes:
        is_harmless = smallest is not None and smallest >= FP16_NORMAL
        reason = f"the constant {place.value:g} is zero in FP16, so nothing keeps what it guards from zero any more"
    else:
        is_harmless = not is_direct or smallest is None or smallest > place.value or place.value * FP16_MAX >= 1
        reason = f"the constant {place.value:g} is below FP16's smallest normal value, {FP16_NORMAL:g}"
    if is_harmless:
        return []
    evidence: dict[str, int | float | str] = {"epsilon": place.value, "fp16_smallest": FP16_TINY}
    if smallest is not None:
        evidence["smallest"] = smallest
        reason += f"; what it guards came down to {smallest:.2g} on the calibration data"
    cure = "keep the group in FP32, or export with an epsilon of 1e-5 or more"
    if not vanishes:
        cure = "keep the group in FP32, or export with an epsilon of 1e-4 or more"
    return [Hazard("warning", "epsilon", *place.arguments, reason, cure, "vanishing-epsilon", evidence)]


def _vanishing(place: _Place, rounding: Rounding) -> Hazard:
    return Hazard(
        "warning" if rounding.vanished > _MOSTLY_VANISHING_SHARE * rounding.size else "info",
        "vanishing",
        *place.arguments,
        f"{rounding.vanished} of {rounding.size} values are too small for FP16 and become zero",
        "harmless where the error says so; otherwise keep the group in FP32",
    )


def _overflow(look: Lookup, place: _Place, reason: str, readers: Sequence[Node]) -> Hazard:
    """A finite constant beyond FP16, which is held as FP16's largest finite value.

    A limit, and a mask on the way to a softmax or the like, mean the same so. Anything else is changed by it.
    """
    evidence = {"absmax": place.value, "fp16_max": FP16_MAX, "held_as": FP16_MAX}
    if readers and all(_is_limit(look, node) for node in readers):
        is_mask = any(node.op_type not in LIMITS | {"Where"} for node in readers)
        code = "mask" if is_mask else None
        reason += "; a tool that does not limit constants makes it infinite"
        return Hazard("info", "overflow", *place.arguments, reason, _MASK_CURE, code, evidence)
    return Hazard("warning", "overflow", *place.arguments, reason, BEYOND_CURE, "overflow", evidence)


def _overflow_reason(rounding: Rounding) -> str:
    if rounding.size == 1:
        return f"{rounding.absmax:.4g} exceeds FP16's {FP16_MAX:g} and is held as {FP16_MAX:g} there"
    return (
        f"{rounding.overflowed} of {rounding.size} values exceed FP16's {FP16_MAX:g} and are held as {FP16_MAX:g}"
        f" there, the largest is {rounding.absmax:.4g}"
    )


def is_limit(look: Lookup, tensor: str) -> bool:
    """Whether all that read a constant make limits or masks of it."""
    readers = look.readers(tensor)
    return bool(readers) and all(_is_limit(look, node) for node in readers)


def _is_limit(look: Lookup, node: Node, depth: int = _MAX_STEPS) -> bool:
    """Whether a node makes a limit or a mask of a constant: clips at it, chooses or adds it before a softmax.

    So does one that multiplies it, where the product is added.
    """
    if node.op_type in LIMITS | ANSWERS_INFINITY:
        return True
    if node.op_type in _VIEWS and depth > 0:
        readers = [reader for output in node.outputs for reader in look.readers(output)]
        return bool(readers) and all(_is_limit(look, reader, depth - 1) for reader in readers)
    if node.op_type == "Mul" and not _reaches(look, node, lambda reader, _: reader.op_type in _SUMS, _VIEWS):
        return False
    return node.op_type in _MAKE_MASKS and comes_to_softmax(look, node)


def _guards_division(look: Lookup, node: Node) -> bool:
    """Whether a node adds a constant to, or takes its maximum with, what is divided by later: an epsilon."""
    if node.op_type not in _GUARDS:
        return False

    def divides(reader: Node, tensor: str) -> bool:
        if reader.op_type == "Div":
            return look.root(reader.inputs[1]) == look.root(tensor)
        if reader.op_type == "Pow":
            return (look.number(reader.inputs[1]) or 0.0) < 0
        return reader.op_type in _UNDEFINED_AT_ZERO

    return _reaches(look, node, divides, _BEFORE_DIVISION)


def _reaches_root(look: Lookup, node: Node) -> bool:
    """Whether a square root is taken of what a node guards, so that the guard is the root of the constant."""

    def takes_root(reader: Node, _: str) -> bool:
        return reader.op_type == "Sqrt" or (
            reader.op_type == "Pow" and abs(look.number(reader.inputs[1]) or 0.0) == 0.5
        )

    return _reaches(look, node, takes_root, _BEFORE_DIVISION)


def guarded_by_constant(look: Lookup, node: Node) -> str:
    """The value that a node guards against a division by zero with a constant below FP16's smallest normal; "" if none.

    The constant is the epsilon of ``x / (y + eps)``, of ``x / max(y, eps)`` and the like.
    """
    varying = look.varying(node)
    if node.op_type not in _GUARDS or len(varying) != 1:
        return ""
    constants = [abs(look.number(i) or 0.0) for i in node.inputs if i and look.is_static(i)]
    is_small = any(0 < value < FP16_NORMAL for value in constants)
    return varying[0] if is_small and _guards_division(look, node) else ""


def comes_to_softmax(look: Lookup, node: Node) -> bool:
    """Whether a node's result comes to a softmax or the like, through what masks pass only."""

    def masks(reader: Node, tensor: str) -> bool:
        return reader.op_type in ANSWERS_INFINITY or mask_input(reader) == tensor

    return _reaches(look, node, masks, _BEFORE_MASKED)


def _reaches(look: Lookup, node: Node, is_wanted: Callable[[Node, str], bool], between: frozenset[str]) -> bool:
    """Whether a node's result comes to a wanted reader through operators that are all in ``between``."""
    seen: set[int] = set()
    stack = [node.outputs[0]]
    for _ in range(_MAX_STEPS):  # values, not readers: every layer of a decoder may read one mask
        if not stack:
            break
        tensor = stack.pop()
        for reader in look.readers(tensor):
            if is_wanted(reader, tensor):
                return True
            if reader.op_type in between and reader.index not in seen and reader.outputs:
                seen.add(reader.index)
                stack.append(reader.outputs[0])
    return False


def fill_hazards(types: ValueTypes, look: Lookup) -> list[Hazard]:
    """ConstantOfShape with a value beyond FP16: a mask that is filled at run time."""
    hazards = []
    for node in types.model.nodes:
        group = group_of(types, node)
        if node.op_type != "ConstantOfShape" or group is None:
            continue
        value = abs(float(fill_value(node.proto).reshape(-1)[0]))
        if math.isfinite(value) and value > FP16_MAX:
            readers = look.readers(node.outputs[0])
            place = _Place(group.id, node.name, node.outputs[0], value)
            reason = f"filled with {value:g}, which exceeds FP16's {FP16_MAX:g} and is held as {FP16_MAX:g} there"
            hazards.append(_overflow(look, place, reason, readers))
    return hazards
