"""Masks and limits: constants beyond a precision's range that mean the same at its largest value.

A limit clips values. A mask is a large constant or input that is chosen, or added, on the way to a softmax. One walk
back from the softmaxes says what comes to one, and which nodes make a limit or a mask of what they read; one walk on,
how large the constants are that values are made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mptune.graph.facts import attribute, facts_of
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import fill_value
from mptune.graph.ops import ADDS, BOUNDS, COPIES, MOVEMENT, SOFTMAX
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import chunks

_ANSWERS_INFINITY = SOFTMAX | {"Exp", "ArgMax", "TopK", "ReduceMax", "Max", "Sigmoid"}
"""What -inf is an answer to, so that an added mask may become one."""
_PASSES = MOVEMENT | COPIES | {"Trilu"}  # what masks pass on their way: they choose, move and repeat
_BEFORE_MASKED = _PASSES | ADDS | {"Where"}
_PICKS = {"ScatterElements", "ScatterND", "Trilu", "Where"}
_ASSEMBLES = COPIES | BOUNDS | ADDS | _PICKS | {"Mul", "Dropout", "Abs", "Neg", "Pad", "ReduceMax", "ReduceMin", "Relu"}
"""What masks are made with: sums, a Mul by a large constant, and what gives none larger than the largest it reads."""
_MASK_INPUTS = {("", "Attention"): 3, ("com.microsoft", "MultiHeadAttention"): 5}
"""(domain, operator) -> the input that is added to the scores inside the operator."""


@dataclass(frozen=True)
class Masks:
    """The masks and limits of a model."""

    before_softmax: frozenset[str]  # values that come to a softmax or the like, through what masks pass only
    # Indices of nodes that make a limit or a mask of a constant: they clip at it, choose or add it before a softmax,
    # or multiply it where the product is added.
    limiting: frozenset[int]
    # FP32 values that are masks, or bring them to a softmax -> the largest magnitude of the constants in them. Those
    # with an infinite constant are left out: infinities stay.
    magnitudes: Mapping[str, float]


@once
def masks_of(model: Model) -> Masks:
    """The masks of a model; made once."""
    facts = facts_of(model)
    to_softmax, to_sum, limiting = set[str](), set[str](), set[int]()
    for node in reversed(model.nodes):  # what reads a node's results is done
        readers = [(out, reader) for out in node.outputs if out for reader in facts.readers(out)]
        for out, reader in readers:
            passes = reader.op_type in _BEFORE_MASKED and not to_softmax.isdisjoint(reader.outputs)
            if passes or reader.op_type in _ANSWERS_INFINITY or mask_input(reader) == out:
                to_softmax.add(out)
            if reader.op_type in ADDS or (reader.op_type in _PASSES and not to_sum.isdisjoint(reader.outputs)):
                to_sum.add(out)
        is_masked = bool(node.outputs) and node.outputs[0] in to_softmax
        if node.op_type in _PASSES:
            limits = bool(readers) and all(reader.index in limiting for _, reader in readers)
        elif node.op_type == "Mul":
            limits = is_masked and node.outputs[0] in to_sum
        else:
            limits = node.op_type in BOUNDS | _ANSWERS_INFINITY or (node.op_type in ADDS | {"Where"} and is_masked)
        limiting.update([node.index] if limits else ())

    def is_limit(value: str) -> bool:
        readers = facts.readers(value)
        return bool(readers) and all(reader.index in limiting for reader in readers)

    magnitudes = dict[str, float]()
    for node in model.nodes:
        out = node.outputs[0] if node.outputs else ""
        if not node.is_standard or not model.info(out).is_float32:
            continue
        sizes = [magnitudes[name] for name in node.inputs if name in magnitudes]
        if node.op_type == "ConstantOfShape":
            sizes = [float(np.abs(fill_value(node.proto)).max())] if is_limit(out) else []
        elif node.op_type not in _ASSEMBLES:
            continue
        for name in node.inputs if node.op_type not in BOUNDS else ():  # no value has the bounds that limit it
            constant = model.initializers.get(name)
            if constant is not None and constant.dtype == "float" and not constant.overridable and is_limit(name):
                sizes += [float(np.max(np.abs(part), initial=0.0)) for part in chunks(constant)]
        if max(sizes, default=0.0) > Precision.FP16.largest:
            magnitudes.update(dict.fromkeys(node.outputs, max(sizes)))
    finite = {name: size for name, size in magnitudes.items() if math.isfinite(size)}
    held = {name: size for name, size in finite.items() if name in to_softmax or is_limit(name)}
    return Masks(frozenset(to_softmax), frozenset(limiting), held)


def mask_input(node: Node) -> str:
    """What an attention operator adds to its scores; "" where a node is none, or has no mask."""
    slot = _MASK_INPUTS.get(("" if node.is_standard else node.domain, node.op_type))
    return "" if slot is None or len(node.inputs) <= slot else node.inputs[slot]


def stays_right(model: Model, node: Node) -> bool:
    """Whether a node stays right where a mask that it reads or computes is infinite; a Mul is not: 0 * -inf is NaN."""
    passes = node.op_type in _BEFORE_MASKED | {"Min"} and node.outputs[0] in masks_of(model).before_softmax
    return passes or node.op_type in _ANSWERS_INFINITY


def is_held(model: Model, value: str, precision: Precision) -> bool:
    """Whether a value that is computed in FP32 is limited to a precision's range before it is cast to it."""
    return masks_of(model).magnitudes.get(value, 0.0) > precision.largest


def softmax_rows(model: Model) -> dict[str, tuple[int, ...]]:
    """FP32 values that a softmax is taken of, or that are added to its scores -> the axes of a row, ascending."""
    facts, rows = facts_of(model), dict[str, tuple[int, ...]]()
    for node in model.nodes:
        tensor, axis = mask_input(node), -1
        if node.op_type in SOFTMAX and node.is_standard:
            tensor, axis = node.inputs[0], attribute(node, "axis", -1)
        if tensor and model.info(tensor).is_float32 and not facts.is_static(tensor):
            rows.setdefault(tensor, (axis,))
    return rows
