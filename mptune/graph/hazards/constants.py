"""Hazards of constants: weights, masks, scales and epsilons that overflow or vanish in FP16; rows masked whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mptune.finding import Finding, FindingOrigin, Where
from mptune.findings.wording import Severity
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.facts import Facts, attribute, facts_of
from mptune.graph.folded import comes_from_beyond
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.hazard import FP16_MAX, FP16_NORMAL, FP16_TINY, Hazard, group_of, readers_in_fp16
from mptune.graph.hazards.seen import MaskedRows, SeenValue
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import fill_value
from mptune.graph.ops import ADDS, BOUNDS, COPIES, GUARDS, MOVEMENT, SOFTMAX
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import Rounding, chunks, largest_magnitude, rounding_of

_MASK_INPUTS: Mapping[tuple[str, str], int] = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 5,
    ("com.microsoft", "MultiHeadAttention"): 5,
    ("com.microsoft", "GroupQueryAttention"): 10,
}

"""(domain, operator) -> the input that is added to the scores inside the operator."""


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


def mask_input(node: Node) -> str:
    """What an attention operator adds to its scores; "" where a node is none, or has no mask."""
    slot = _MASK_INPUTS.get(("" if node.is_standard else node.domain, node.op_type))
    return "" if slot is None or len(node.inputs) <= slot else node.inputs[slot]


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
        nodes = [n for n in readers if n.op_type in SOFTMAX | {"Sub"} or (n.domain, n.op_type) in _MASK_INPUTS]
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

_MAKE_MASKS = ADDS | {"Where", "Mul"}
ANSWERS_INFINITY = SOFTMAX | {"Exp", "ArgMax", "TopK", "ReduceMax", "Max", "Sigmoid"}
"""What -inf is an answer to, so that an added mask may become one."""

_VIEWS = MOVEMENT | COPIES | {"Trilu"}
"""What masks pass on their way: they choose, move and repeat."""

_BEFORE_MASKED = _VIEWS | ADDS | {"Where"}
_BEFORE_DIVISION = frozenset({"Sqrt", "Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Mul"})

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
        is_limit = bool(rounding.overflowed) and _is_limit(facts, node)
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
    if readers and all(_is_limit(facts, node) for node in readers):
        severity = "info"
        if any(node.op_type not in BOUNDS | {"Where"} for node in readers):
            row = "mask"
        else:
            wording += " limit"
    return Hazard("overflow", row, *place, evidence, wording, severity=severity, names=names or {})


def is_limit(facts: Facts, tensor: str) -> bool:
    """Whether all that read a constant make limits or masks of it."""
    readers = facts.readers(tensor)
    return bool(readers) and all(_is_limit(facts, node) for node in readers)


def _is_limit(facts: Facts, node: Node, depth: int = _MAX_STEPS) -> bool:
    """Whether a node makes a limit or a mask of a constant: clips at it, chooses or adds it before a softmax.

    So does one that multiplies it, where the product is added.
    """
    if node.op_type in BOUNDS | ANSWERS_INFINITY:
        return True
    if node.op_type in _VIEWS and depth > 0:
        readers = [reader for output in node.outputs for reader in facts.readers(output)]
        return bool(readers) and all(_is_limit(facts, reader, depth - 1) for reader in readers)
    if node.op_type == "Mul" and not _reaches(facts, node, lambda reader, _: reader.op_type in ADDS, _VIEWS):
        return False
    return node.op_type in _MAKE_MASKS and comes_to_softmax(facts, node)


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


def comes_to_softmax(facts: Facts, node: Node) -> bool:
    """Whether a node's result comes to a softmax or the like, through what masks pass only."""

    def masks(reader: Node, tensor: str) -> bool:
        return reader.op_type in ANSWERS_INFINITY or mask_input(reader) == tensor

    return _reaches(facts, node, masks, _BEFORE_MASKED)


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


_CARRIES = _VIEWS | ADDS | {"Where", "Max", "Min", "Mul"}
"""What masks are assembled with. A Mul by a large constant makes one, and is not right itself: 0 * -inf is NaN."""


class MaskValues:
    """Which values beyond FP16 are masks, added or chosen on the way to a softmax.

    Args of ``__init__``: the model's values, and the largest finite magnitude of each that was observed.
    """

    def __init__(self, facts: Facts, ranges: Mapping[str, float]) -> None:
        self._facts = facts
        self._ranges = ranges
        self._is_made_of_masks: dict[str, bool] = {}

    def may_be_infinite(self, node: Node, tensor: str) -> bool:
        """Whether a node that reads or computes ``tensor`` stays right where its values beyond FP16 are infinite."""
        if not self._is_mask(tensor):
            return False
        if node.op_type in ANSWERS_INFINITY:
            return True
        return node.op_type in _CARRIES - {"Mul"} and comes_to_softmax(self._facts, node)

    def is_made_into_one(self, node: Node, tensor: str) -> bool:
        """Whether a product makes a mask of ``tensor``, or reads one: not right with infinities, as 0 * inf is NaN."""
        return node.op_type == "Mul" and self._is_mask(tensor) and comes_to_softmax(self._facts, node)

    def _is_mask(self, tensor: str) -> bool:
        """Whether large values of ``tensor`` come from large constants or inputs, and not from what is computed."""
        if tensor not in self._is_made_of_masks:
            self._is_made_of_masks[tensor] = self._comes_from_masks(tensor)
        return self._is_made_of_masks[tensor]

    def _comes_from_masks(self, tensor: str) -> bool:
        model = self._facts.model
        index = model.producer.get(tensor)
        if tensor in model.initializers or index is None or model.nodes[index].op_type == "ConstantOfShape":
            return True
        node = model.nodes[index]
        if node.op_type not in _CARRIES or not node.is_standard:
            return False
        large = [i for i in node.inputs if i and self._is_large(i)]
        return bool(large) and all(self._is_mask(i) for i in large)

    def _is_large(self, tensor: str) -> bool:
        constant = self._facts.model.initializers.get(tensor)
        if constant is None:
            return self._ranges.get(tensor, 0.0) > FP16_MAX
        if constant.dtype != "float" or constant.nbytes == 0:
            return False
        return bool(abs(constant.numpy()).max() > FP16_MAX)


SELECTS = (
    COPIES
    | BOUNDS
    | frozenset(
        [
            "Dropout",
            "Abs",
            "Neg",
            "Pad",
            "ReduceMax",
            "ReduceMin",
            "Relu",
            "ScatterElements",
            "ScatterND",
            "Trilu",
            "Where",
        ]
    )
)
"""Operators whose results have no larger magnitude than the largest of their inputs."""

_MAX_DEPTH = 64

_NONE = frozenset[str]()


class SaturatedRanges:
    """The largest magnitudes that values have in a precision because constants beyond it are held in it."""

    def __init__(self, types: ValueTypes, ranges: Mapping[str, float], precision: Precision) -> None:
        self._types = types
        self._ranges = ranges
        self._precision = precision
        self._largest, self._overflows_at = precision.largest, precision.overflows_at
        self._bounds: dict[str, tuple[float, frozenset[str]]] = {}

    def fits(self, tensor: str) -> bool:
        """Whether a value stays finite where the precision holds the constants that it comes from."""
        return self.bound(tensor) < self._overflows_at

    def bound(self, tensor: str) -> float:
        """A magnitude that the value does not exceed; infinite where it is not known."""
        return self._look_up(tensor, _MAX_DEPTH)[0]

    def sources(self, tensor: str) -> frozenset[str]:
        """The values beyond the precision that it comes from: constants, and what is folded into one."""
        return self._look_up(tensor, _MAX_DEPTH)[1]

    def _look_up(self, tensor: str, depth: int) -> tuple[float, frozenset[str]]:
        if tensor not in self._bounds:
            self._bounds[tensor] = self._bounded(tensor, depth)
        return self._bounds[tensor]

    def _bounded(self, tensor: str, depth: int) -> tuple[float, frozenset[str]]:
        model = self._types.model
        constant = model.initializers.get(tensor)
        if constant is not None:
            return (math.inf, _NONE) if constant.overridable else self._held(tensor, constant.numpy())
        observed = self._ranges.get(tensor, math.inf)
        index = model.producer.get(tensor)
        if observed <= self._largest or index is None or depth == 0:
            return observed, _NONE
        if index in self._types.facts.folded_nodes and group_of(self._types, model.nodes[index]) is None:
            is_held = comes_from_beyond(model, tensor, self._precision)
            return (min(observed, self._largest), frozenset((tensor,))) if is_held else (observed, _NONE)
        bound, sources = self._computed(model.nodes[index], depth - 1)
        return (min(observed, bound), sources) if sources else (observed, _NONE)

    def _held(self, name: str, values: np.ndarray) -> tuple[float, frozenset[str]]:
        magnitudes = np.abs(values.astype(np.float64, copy=False))
        absmax = float(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0))
        return min(self._largest, absmax), frozenset((name,)) if absmax > self._largest else _NONE

    def _computed(self, node: Node, depth: int) -> tuple[float, frozenset[str]]:
        """By what a node reads, where it runs in the precision."""
        if group_of(self._types, node) is None or not self._types.rules[node.index].outputs:
            return math.inf, _NONE
        if node.op_type == "ConstantOfShape":
            return self._held(node.outputs[0], fill_value(node.proto))
        followed = self._types.rules[node.index].inputs
        read = [self._look_up(node.inputs[slot], depth) for slot in followed]
        sources = frozenset[str]().union(*(values for _, values in read))
        bounds = [bound for bound, _ in read]
        if node.op_type in SELECTS:
            return max(bounds, default=math.inf), sources
        if node.op_type in ADDS:
            return sum(bounds), sources
        if node.op_type == "Mul":
            return 0.0 if 0.0 in bounds else math.prod(bounds), sources
        return math.inf, _NONE


_CARRY = SELECTS | ADDS | {"Mul"}


def is_held(model: Model, value: str, precision: Precision) -> bool:
    """Whether a value that is computed in FP32 is limited to a precision's range before it is cast to it."""
    return _masks(model).get(value, 0.0) > precision.largest or comes_from_beyond(model, value, precision)


@once
def _masks(model: Model) -> Mapping[str, float]:
    """FP32 values that bring masks to a softmax -> the largest magnitude of the constants that these are made of.

    Values with an infinite constant in them are left out: infinities stay.
    """
    facts, largest = facts_of(model), dict[str, float]()
    magnitudes: dict[str, float] = {}
    for node in model.nodes:
        if node.op_type not in _CARRY and node.op_type != "ConstantOfShape":
            continue
        if not node.is_standard or not model.info(node.outputs[0]).is_float32:
            continue
        made_of = [magnitudes[name] for name in node.inputs if name in magnitudes]
        if node.op_type == "ConstantOfShape":
            made_of = [_filled(facts, node)]
        elif node.op_type not in BOUNDS:  # the bounds of these are none that values have
            for name in node.inputs:
                if name in model.initializers and name not in largest:
                    largest[name] = _largest_of(facts, name)
            made_of += [largest[name] for name in node.inputs if name in largest]
        magnitude = max(made_of, default=0.0)
        if magnitude > Precision.FP16.largest:
            magnitudes.update(dict.fromkeys(node.outputs, magnitude))
    return {
        name: magnitude
        for name, magnitude in magnitudes.items()
        if math.isfinite(magnitude) and comes_to_softmax(facts, model.nodes[model.producer[name]])
    }


def _filled(facts: Facts, node: Node) -> float:
    return largest_magnitude(fill_value(node.proto)) if is_limit(facts, node.outputs[0]) else 0.0


def _largest_of(facts: Facts, name: str) -> float:
    constant = facts.model.initializers[name]
    if constant.dtype != "float" or constant.overridable or not is_limit(facts, name):
        return 0.0
    return max(map(largest_magnitude, chunks(constant)), default=0.0)
