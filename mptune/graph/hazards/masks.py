"""Masks and limits: constants beyond a precision's range that mean the same at its largest value.

A limit clips values. A mask is a large constant or input that is chosen, or added, on the way to a softmax. One walk
back from the softmaxes says which values come to one (``comes_to_softmax``) and which nodes make a limit or a mask of
what they read (``makes_limit``); the rest follows from these, and from how large constants are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import numpy_helper

from mptune.finding import Finding, FindingOrigin, Where
from mptune.graph.casting.value_types import ValueTypes
from mptune.graph.facts import Facts, attribute, facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.hazards.hazard import FP16_MAX, group_of
from mptune.graph.hazards.seen import Seen
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import fill_value
from mptune.graph.ops import ADDS, BOUNDS, COPIES, MOVEMENT, SHAPE_OF, SOFTMAX
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import chunks, largest_magnitude

ANSWERS_INFINITY = SOFTMAX | {"Exp", "ArgMax", "TopK", "ReduceMax", "Max", "Sigmoid"}
"""What -inf is an answer to, so that an added mask may become one."""

_PASSES = MOVEMENT | COPIES | {"Trilu"}
"""What masks pass on their way: they choose, move and repeat."""

_BEFORE_MASKED = _PASSES | ADDS | {"Where"}

_ASSEMBLES = _BEFORE_MASKED | {"Max", "Min", "Mul"}
"""What masks are assembled with. A Mul by a large constant makes one, and is not right itself: 0 * -inf is NaN."""

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

MASK_INPUTS: Mapping[tuple[str, str], int] = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 5,
    ("com.microsoft", "MultiHeadAttention"): 5,
    ("com.microsoft", "GroupQueryAttention"): 10,
}
"""(domain, operator) -> the input that is added to the scores inside the operator."""


def mask_input(node: Node) -> str:
    """What an attention operator adds to its scores; "" where a node is none, or has no mask."""
    slot = MASK_INPUTS.get(("" if node.is_standard else node.domain, node.op_type))
    return "" if slot is None or len(node.inputs) <= slot else node.inputs[slot]


@dataclass(frozen=True)
class _Paths:
    """What the walk back from the softmaxes gives.

    Attributes:
        to_softmax: values that come to a softmax or the like, through what masks pass only.
        limiting: indices of the nodes that make a limit or a mask of what they read.
    """

    to_softmax: frozenset[str]
    limiting: frozenset[int]


@once
def _paths(model: Model) -> _Paths:
    facts = facts_of(model)
    to_softmax, to_sum, limiting = set[str](), set[str](), set[int]()
    for node in reversed(model.nodes):  # what reads a node's results is done
        readers = [(out, reader) for out in node.outputs if out for reader in facts.readers(out)]
        for out, reader in readers:
            passes = reader.op_type in _BEFORE_MASKED and not to_softmax.isdisjoint(reader.outputs)
            if passes or reader.op_type in ANSWERS_INFINITY or mask_input(reader) == out:
                to_softmax.add(out)
            if reader.op_type in ADDS or (reader.op_type in _PASSES and not to_sum.isdisjoint(reader.outputs)):
                to_sum.add(out)
        is_masked = bool(node.outputs) and node.outputs[0] in to_softmax
        if node.op_type in _PASSES - BOUNDS - ANSWERS_INFINITY:
            limits = bool(readers) and all(reader.index in limiting for _, reader in readers)
        elif node.op_type == "Mul":  # makes a mask where the product is added
            limits = is_masked and node.outputs[0] in to_sum
        else:
            limits = node.op_type in BOUNDS | ANSWERS_INFINITY or (node.op_type in ADDS | {"Where"} and is_masked)
        if limits:
            limiting.add(node.index)
    return _Paths(frozenset(to_softmax), frozenset(limiting))


def comes_to_softmax(model: Model, node: Node) -> bool:
    """Whether a node's result comes to a softmax or the like, through what masks pass only."""
    return node.outputs[0] in _paths(model).to_softmax


def makes_limit(model: Model, node: Node) -> bool:
    """Whether a node makes a limit or a mask of a constant: clips at it, chooses or adds it before a softmax.

    So does one that multiplies it, where the product is added.
    """
    return node.index in _paths(model).limiting


def is_limit(model: Model, tensor: str) -> bool:
    """Whether all that read a constant make limits or masks of it."""
    readers = facts_of(model).readers(tensor)
    return bool(readers) and all(makes_limit(model, node) for node in readers)


# -- what is held at the largest value of a precision ---------------------------------------------------------------


def is_held(model: Model, value: str, precision: Precision) -> bool:
    """Whether a value that is computed in FP32 is limited to a precision's range before it is cast to it."""
    return _masks(model).get(value, 0.0) > precision.largest or comes_from_beyond(model, value, precision)


@once
def _masks(model: Model) -> Mapping[str, float]:
    """FP32 values that bring masks to a softmax -> the largest magnitude of the constants that these are made of.

    Values with an infinite constant in them are left out: infinities stay.
    """
    magnitudes: dict[str, float] = {}
    constants: dict[str, float] = {}
    for node in model.nodes:
        is_filled = node.op_type == "ConstantOfShape"
        if not (is_filled or node.op_type in SELECTS | ADDS | {"Mul"}) or not node.is_standard:
            continue
        if not model.info(node.outputs[0]).is_float32:
            continue
        made_of = [magnitudes[name] for name in node.inputs if name in magnitudes]
        if is_filled:
            made_of = [largest_magnitude(fill_value(node.proto))] if is_limit(model, node.outputs[0]) else []
        elif node.op_type not in BOUNDS:  # the bounds of these are none that values have
            for name in node.inputs:
                if name in model.initializers and name not in constants:
                    constant = model.initializers[name]
                    is_mask = constant.dtype == "float" and not constant.overridable and is_limit(model, name)
                    constants[name] = max(map(largest_magnitude, chunks(constant)), default=0.0) if is_mask else 0.0
            made_of += [constants[name] for name in node.inputs if name in constants]
        magnitude = max(made_of, default=0.0)
        if magnitude > Precision.FP16.largest:
            magnitudes.update(dict.fromkeys(node.outputs, magnitude))
    to_softmax, nodes = _paths(model).to_softmax, model.nodes
    return {
        name: magnitude
        for name, magnitude in magnitudes.items()
        if math.isfinite(magnitude) and nodes[model.producer[name]].outputs[0] in to_softmax
    }


def comes_from_beyond(model: Model, value: str, precision: Precision) -> bool:
    """Whether an FP32 value is computed from constants alone, among them finite ones beyond a precision, none infinite.

    It is a constant to whoever reads it, and is held as one: beyond the range as the largest finite value.
    """
    index = model.producer.get(value)
    if index is None or index not in facts_of(model).folded_nodes or not model.info(value).is_float32:
        return False
    return precision.largest < _largest_by_node(model)[index] < math.inf


@once
def _largest_by_node(model: Model) -> dict[int, float]:
    """Node that is folded -> the largest magnitude of the FP32 constants that it computes from."""
    largest: dict[int, float] = {}
    for index in sorted(facts_of(model).folded_nodes):
        node = model.nodes[index]
        inputs = [] if node.op_type in SHAPE_OF else [n for n in node.inputs if n and model.info(n).is_float32]
        constants = [model.initializers[name] for name in inputs if name in model.initializers]
        values = [part for constant in constants for part in chunks(constant)]
        values += [numpy_helper.to_array(a.t) for a in node.proto.attribute if a.HasField("t")]
        magnitudes = [largest_magnitude(part) for part in values if part.dtype.kind == "f"]
        magnitudes += [largest[model.producer[name]] for name in inputs if name not in model.initializers]
        largest[index] = max(magnitudes, default=0.0)
    return largest


# -- what was observed ----------------------------------------------------------------------------------------------


class MaskValues:
    """Which values beyond FP16 are masks: their large elements come from large constants or inputs alone.

    Args of ``__init__``: the facts of the model, and the largest finite magnitude that was observed of each value.
    """

    def __init__(self, facts: Facts, ranges: Mapping[str, float]) -> None:
        self._model = model = facts.model
        self._assembled: set[str] = set()

        def is_large(name: str) -> bool:
            constant = model.initializers.get(name)
            if constant is None:
                return ranges.get(name, 0.0) > Precision.FP16.largest
            is_float = constant.dtype == "float" and constant.nbytes > 0
            return is_float and bool(abs(constant.numpy()).max() > Precision.FP16.largest)

        for node in model.nodes:
            is_mask = node.op_type == "ConstantOfShape"
            if node.op_type in _ASSEMBLES and node.is_standard and any(map(is_large, node.outputs)):
                large = [name for name in node.inputs if name and is_large(name)]
                is_mask = bool(large) and all(map(self._is_mask, large))
            self._assembled.update(node.outputs if is_mask else ())

    def _is_mask(self, tensor: str) -> bool:
        is_given = tensor in self._model.initializers or tensor not in self._model.producer
        return is_given or tensor in self._assembled

    def may_be_infinite(self, node: Node, tensor: str) -> bool:
        """Whether a node that reads or computes ``tensor`` stays right where its values beyond FP16 are infinite."""
        if not self._is_mask(tensor):
            return False
        if node.op_type in ANSWERS_INFINITY:
            return True
        return node.op_type in _ASSEMBLES - {"Mul"} and comes_to_softmax(self._model, node)

    def is_made_into_one(self, node: Node, tensor: str) -> bool:
        """Whether a product makes a mask of ``tensor``, or reads one: not right with infinities, as 0 * inf is NaN."""
        return node.op_type == "Mul" and self._is_mask(tensor) and comes_to_softmax(self._model, node)


Bound = tuple[float, frozenset[str]]
"""A magnitude that a value does not exceed; and the constants beyond the precision that it comes from, with what is
folded into one."""


def held_bounds(types: ValueTypes, ranges: Mapping[str, float], precision: Precision) -> Mapping[str, Bound]:
    """Values beyond a precision because of constants beyond it -> their bound where it holds these constants.

    ``ranges``: the largest finite magnitude that was observed of each value.
    """
    model, largest, bounds = types.model, precision.largest, dict[str, Bound]()

    def held(name: str, values: np.ndarray) -> Bound:
        magnitudes = np.abs(values.astype(np.float64, copy=False))
        absmax = float(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0))
        return min(largest, absmax), frozenset((name,) if absmax > largest else ())

    def read(name: str) -> Bound:
        constant = model.initializers.get(name)
        if constant is not None and name not in bounds:
            bounds[name] = (math.inf, frozenset()) if constant.overridable else held(name, constant.numpy())
        return bounds.get(name) or (ranges.get(name, math.inf), frozenset())

    for node in model.nodes:
        rule, has_group = types.rules[node.index], group_of(types, node) is not None
        for out in node.outputs:
            observed = ranges.get(out, math.inf)
            if observed <= largest or out in model.initializers or not model.info(out).is_float32:
                continue
            bound: Bound = math.inf, frozenset()
            if not has_group and node.index in types.facts.folded_nodes:
                bound = largest, frozenset((out,) if comes_from_beyond(model, out, precision) else ())
            elif has_group and rule.outputs and node.op_type == "ConstantOfShape":
                bound = held(out, fill_value(node.proto))
            elif has_group and rule.outputs:
                parts = [read(node.inputs[slot]) for slot in rule.inputs]
                sources = frozenset[str]().union(*(part[1] for part in parts))
                magnitudes = [part[0] for part in parts]
                if node.op_type in SELECTS:
                    bound = max(magnitudes, default=math.inf), sources
                elif node.op_type in ADDS:
                    bound = sum(magnitudes), sources
                elif node.op_type == "Mul":
                    bound = 0.0 if 0.0 in magnitudes else math.prod(magnitudes), sources
            if bound[1]:
                bounds[out] = min(observed, bound[0]), bound[1]
    return bounds


# -- rows that are masked whole ----------------------------------------------------------------------------------------


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
    grouped: GroupedModel, seen: Seen, origin: FindingOrigin, reference_findings: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """A finding for each value that had rows masked whole.

    ``reference_findings``: of the same model in FP32, where the softmax may be NaN already.
    """
    broken = {
        node for finding in reference_findings if finding.code == "reference-not-finite" for node in finding.where.nodes
    }
    model, owners = grouped.model, grouped.owners
    findings = []
    for tensor, values in seen.ranges.items():
        masked = values.masked
        if masked is None:
            continue
        readers = [model.nodes[i] for i in model.consumers.get(tensor, ())]
        nodes = [n for n in readers if n.op_type in SOFTMAX | {"Sub"} or (n.domain, n.op_type) in MASK_INPUTS]
        groups = tuple(dict.fromkeys(owners[node.name] for node in nodes if node.name in owners))
        sample = seen.sample(masked.sample)
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
