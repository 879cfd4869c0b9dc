"""Masks and limits: constants beyond a precision's range that mean the same at its largest value.

A limit clips values. A mask is a large constant or input that is chosen, or added, on the way to a softmax. One walk
back from the softmaxes says which values come to one (``comes_to_softmax``) and which nodes make a limit or a mask of
what they read (``makes_limit``); the rest follows from these, and from how large constants are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mptune.graph.facts import attribute, facts_of
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import fill_value
from mptune.graph.ops import ADDS, BOUNDS, COPIES, MOVEMENT, SOFTMAX
from mptune.graph.plan import Precision
from mptune.graph.writing.weights import chunks

_ANSWERS_INFINITY = SOFTMAX | {"Exp", "ArgMax", "TopK", "ReduceMax", "Max", "Sigmoid"}
"""What -inf is an answer to, so that an added mask may become one."""
_PASSES = MOVEMENT | COPIES | {"Trilu"}
"""What masks pass on their way: they choose, move and repeat."""
_BEFORE_MASKED = _PASSES | ADDS | {"Where"}
_ASSEMBLES = _BEFORE_MASKED | {"Max", "Min", "Mul"}
"""What masks are assembled with. A Mul by a large constant makes one, and is not right itself: 0 * -inf is NaN."""
_SELECTS = (COPIES | BOUNDS).union(
    ("Dropout", "Abs", "Neg", "Pad", "ReduceMax", "ReduceMin", "Relu", "ScatterElements", "ScatterND", "Trilu", "Where")
)
"""Operators whose results have no larger magnitude than the largest of their inputs."""
_MASK_INPUTS = {("", "Attention"): 3, ("com.microsoft", "MultiHeadAttention"): 5}
"""(domain, operator) -> the input that is added to the scores inside the operator."""


def mask_input(node: Node) -> str:
    """What an attention operator adds to its scores; "" where a node is none, or has no mask."""
    slot = _MASK_INPUTS.get(("" if node.is_standard else node.domain, node.op_type))
    return "" if slot is None or len(node.inputs) <= slot else node.inputs[slot]


@once
def _walk_back(model: Model) -> tuple[frozenset[str], frozenset[int]]:
    """The values that come to a softmax or the like, and the nodes that make a limit or a mask of what they read."""
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
        if node.op_type in _PASSES - BOUNDS - _ANSWERS_INFINITY:
            limits = bool(readers) and all(reader.index in limiting for _, reader in readers)
        elif node.op_type == "Mul":  # makes a mask where the product is added
            limits = is_masked and node.outputs[0] in to_sum
        else:
            limits = node.op_type in BOUNDS | _ANSWERS_INFINITY or (node.op_type in ADDS | {"Where"} and is_masked)
        limiting.update([node.index] if limits else ())
    return frozenset(to_softmax), frozenset(limiting)


def comes_to_softmax(model: Model, node: Node) -> bool:
    """Whether a node's result comes to a softmax or the like, through what masks pass only."""
    return node.outputs[0] in _walk_back(model)[0]


def makes_limit(model: Model, node: Node) -> bool:
    """Whether a node makes a limit or a mask of a constant: clips at it, chooses or adds it before a softmax.

    So does one that multiplies it, where the product is added.
    """
    return node.index in _walk_back(model)[1]


def stays_right(model: Model, node: Node) -> bool:
    """Whether a node stays right where a mask that it reads or computes is infinite."""
    return node.op_type in _ANSWERS_INFINITY or (node.op_type in _ASSEMBLES - {"Mul"} and comes_to_softmax(model, node))


def is_held(model: Model, value: str, precision: Precision) -> bool:
    """Whether a value that is computed in FP32 is limited to a precision's range before it is cast to it."""
    return _masks(model).get(value, 0.0) > precision.largest


@once
def _masks(model: Model) -> Mapping[str, float]:
    """FP32 values that are masks, or bring them to a softmax -> the largest magnitude of the constants in them.

    Values with an infinite constant in them are left out: infinities stay.
    """
    facts, magnitudes = facts_of(model), dict[str, float]()

    def is_limit(tensor: str) -> bool:
        readers = facts.readers(tensor)
        return bool(readers) and all(makes_limit(model, node) for node in readers)

    for node in model.nodes:
        if not node.is_standard or not node.outputs or not model.info(node.outputs[0]).is_float32:
            continue
        sizes = [magnitudes[name] for name in node.inputs if name in magnitudes]
        if node.op_type == "ConstantOfShape":
            sizes = [float(np.abs(fill_value(node.proto)).max())] if is_limit(node.outputs[0]) else []
        elif node.op_type not in _SELECTS | ADDS | {"Mul"}:
            continue
        for name in node.inputs if node.op_type not in BOUNDS else ():  # no value has the bounds that limit it
            constant = model.initializers.get(name)
            if constant is not None and constant.dtype == "float" and not constant.overridable and is_limit(name):
                sizes += [float(np.max(np.abs(part), initial=0.0)) for part in chunks(constant)]
        if max(sizes, default=0.0) > Precision.FP16.largest:
            magnitudes.update(dict.fromkeys(node.outputs, max(sizes)))
    finite = {name: model.nodes[model.producer[name]] for name, size in magnitudes.items() if math.isfinite(size)}
    return {n: magnitudes[n] for n, maker in finite.items() if comes_to_softmax(model, maker) or is_limit(n)}


# -- rows that are masked whole ---------------------------------------------------------------------------------------


def softmax_rows(model: Model) -> dict[str, tuple[int, ...]]:
    """FP32 values that a softmax is taken of, or that are added to its scores -> the axes of a row, ascending."""
    facts, rows = facts_of(model), dict[str, tuple[int, ...]]()
    for node in model.nodes:
        tensor, axis = mask_input(node), -1
        if node.op_type in SOFTMAX and node.is_standard:
            stated = attribute(node, "axis")
            tensor, axis = node.inputs[0], stated if isinstance(stated, int) else -1
        if tensor and model.info(tensor).is_float32 and not facts.is_static(tensor):
            rows.setdefault(tensor, (axis,))
    return rows
