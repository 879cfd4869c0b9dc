"""Indivisible patterns, found by structure: nodes that must share a precision whatever the plan.

A decomposed norm split in two keeps ONNX Runtime's fusion from loading the model, and a softmax apart from its scale
and mask overflows where neither does alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from mptune.graph.model import Model, Node

_GLUE = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Identity", "Dropout", "Cast", "Expand", "Flatten"})
_SCORE_OPS = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Identity", "Cast", "Clip", "Tanh", "Max"})
"""What stands between the score product and the softmax: scale, mask, soft cap."""
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
_SEARCH_LIMIT = 64


@dataclass(frozen=True)
class Pattern:
    """One indivisible pattern.

    Attributes:
        kind: ``norm``, ``attention`` or ``softmax``.
        anchor: index of the node that names it and stands for it in the topological order.
        nodes: indices of all its nodes, ascending.
    """

    kind: str
    anchor: int
    nodes: tuple[int, ...]


def find_patterns(model: Model) -> tuple[Pattern, ...]:
    """All patterns, without overlap; where two would share a node, the earlier kind (norm, then attention) wins."""
    found: list[Pattern] = []
    taken: set[int] = set()
    for finder in (_decomposed_norm, _attention):
        for node in model.nodes:
            pattern = finder(model, node)
            if pattern is not None and taken.isdisjoint(pattern.nodes):
                taken.update(pattern.nodes)
                found.append(pattern)
    return tuple(found)


def _producer(model: Model, tensor: str) -> Node | None:
    index = model.producer.get(tensor)
    if index is None or tensor in model.initializers:
        return None
    return model.nodes[index]


def _readers(model: Model, node: Node) -> Iterator[Node]:
    for out in node.outputs:
        for index in model.consumers.get(out, ()):
            yield model.nodes[index]


def _is_constant(model: Model, tensor: str, below: int | None = None) -> bool:
    """Whether a tensor is a constant, at most ``below`` values if given."""
    constant = model.initializers.get(tensor)
    return constant is not None and (below is None or int(np.prod(constant.shape, dtype=np.int64)) <= below)


def _other_input(node: Node, tensor: str) -> str:
    """The other operand of a binary node ("" where there is none)."""
    rest = list(node.inputs)
    rest.remove(tensor)
    return rest[0] if len(rest) == 1 else ""


def _decomposed_norm(model: Model, root: Node) -> Pattern | None:
    """LayerNorm or RMSNorm written out, seen from its Sqrt: mean of squares (+ eps) -> Sqrt -> divide -> scale, shift.

    Zhang and Sennrich, arXiv 1910.07467 (RMSNorm); Ba et al., arXiv 1607.06450 (LayerNorm).
    """
    if root.op_type != "Sqrt":
        return None
    inside = {root.index}
    value = root.inputs[0]
    add = _producer(model, value)
    if add is not None and add.op_type in ("Add", "Max", "Clip"):
        inside.add(add.index)
        value = next((i for i in add.inputs if i and not _is_constant(model, i)), "")
    mean = _producer(model, value)
    if mean is None or mean.op_type not in ("ReduceMean", "ReduceSum"):
        return None
    square = _producer(model, mean.inputs[0])
    if square is None or not _is_square(model, square):
        return None
    inside |= {mean.index, square.index}
    centred = square.inputs[0]
    subtract = _producer(model, centred)
    if subtract is not None and subtract.op_type == "Sub":
        first_mean = _producer(model, subtract.inputs[1])
        if first_mean is not None and first_mean.op_type == "ReduceMean" and first_mean.inputs[0] == subtract.inputs[0]:
            inside |= {subtract.index, first_mean.index}
    inside |= _normalising_tail(model, root, centred)
    return Pattern("norm", min(inside), tuple(sorted(inside)))


def _is_square(model: Model, node: Node) -> bool:
    if node.op_type == "Mul":
        return node.inputs[0] == node.inputs[1]
    if node.op_type != "Pow" or not _is_constant(model, node.inputs[1], 1):
        return False
    return float(model.initializers[node.inputs[1]].numpy().reshape(-1)[0]) == 2.0


def _normalising_tail(model: Model, root: Node, centred: str) -> set[int]:
    """The division by the root, and the constant scale and shift after it."""
    inside: set[int] = set()
    heads = []
    for reader in _readers(model, root):
        if reader.op_type == "Reciprocal" or (reader.op_type == "Div" and _is_constant(model, reader.inputs[0], 1)):
            inside.add(reader.index)
            heads += [r for r in _readers(model, reader) if r.op_type == "Mul" and centred in r.inputs]
        elif reader.op_type == "Div" and reader.inputs[0] == centred:
            heads.append(reader)
    for head in heads:
        inside.add(head.index)
        at = head
        for wanted in ("Mul", "Add"):
            following = [r for r in _readers(model, at) if r.op_type == wanted]
            if len(following) == 1 and any(_is_constant(model, i) for i in following[0].inputs):
                at = following[0]
                inside.add(at.index)
    return inside


def _attention(model: Model, softmax: Node) -> Pattern | None:
    """The softmax with its scale and mask, and the two products of an attention core where they are there.

    Vaswani et al., arXiv 1706.03762, equation 1.
    """
    if softmax.op_type != "Softmax":
        return None
    score, before = _walk_back(model, softmax)
    value, after = _walk_forward(model, softmax)
    if score is None or value is None:
        scales = takewhile(lambda n: n.op_type in ("Mul", "Div") and _is_scaling(model, n), before)
        return Pattern("softmax", softmax.index, tuple(sorted({softmax.index, *(n.index for n in scales)})))
    inside = {softmax.index, score.index, value.index, *(n.index for n in (*before, *after))}
    for operand in score.inputs:  # torch scales queries and keys by the square root before their product
        scale = _producer(model, operand)
        if scale is not None and scale.op_type in ("Mul", "Div") and _is_scaling(model, scale):
            inside.add(scale.index)
    return Pattern("attention", softmax.index, tuple(sorted(inside)))


def _walk_back(model: Model, softmax: Node) -> tuple[Node | None, list[Node]]:
    """The product that made the scores, and the scale, mask and views between it and the softmax."""

    def step(node: Node) -> Node | None:
        candidates = [_producer(model, i) for i in node.inputs if i and model.info(i).is_float32]
        ranked = [c for c in candidates if c is not None and _leads_to_product(model, c)]
        return ranked[0] if len(ranked) == 1 else None

    return _walk(step(softmax), step, _SCORE_OPS | _GLUE)


def _leads_to_product(model: Model, node: Node) -> bool:
    """Whether the scores come through here, not the mask: some product lies behind, through element-wise nodes."""
    stack = [node]
    seen: set[int] = set()
    while stack:
        at = stack.pop()
        if at.op_type in _PRODUCTS:
            return True
        if at.index in seen or len(seen) > _SEARCH_LIMIT or at.op_type not in _SCORE_OPS | _GLUE:
            continue
        seen.add(at.index)
        stack += [p for i in at.inputs if (p := _producer(model, i)) is not None]
    return False


def _walk_forward(model: Model, softmax: Node) -> tuple[Node | None, list[Node]]:
    """The product with the values, and the views between the softmax and it."""

    def step(node: Node) -> Node | None:
        following = [r for r in _readers(model, node) if r.op_type not in ("Shape", "Size")]
        return following[0] if len(following) == 1 else None

    return _walk(step(softmax), step, _GLUE)


def _walk(
    at: Node | None, step: Callable[[Node], Node | None], through: frozenset[str]
) -> tuple[Node | None, list[Node]]:
    """Step until a product is reached; return it (None where the way ends before) and the nodes passed."""
    passed: list[Node] = []
    while at is not None and at.op_type not in _PRODUCTS:
        if at.op_type not in through:
            return None, passed
        passed.append(at)
        at = step(at)
    return at, passed


def _is_scaling(model: Model, node: Node) -> bool:
    """Whether one operand is a single value, constant or computed from shapes."""
    for tensor in node.inputs:
        shape = model.info(tensor).shape
        if _is_constant(model, tensor, 1) or (shape is not None and all(dim == 1 for dim in shape)):
            return True
    return False
