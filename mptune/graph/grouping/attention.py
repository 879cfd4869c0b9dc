"""Attention cores and softmaxes: scores, scale, mask, softmax, product with the values.

A softmax in another precision than its scale and mask overflows where one precision for all does not. Vaswani et al.,
arXiv 1706.03762, equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Node

GLUE = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Flatten", "Cast", "Identity", "Dropout"})
"""Views that stand anywhere in an attention core."""
_SCORE_OPS = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Clip", "Tanh", "Max", "Min"})
"""What stands between the score product and the softmax: scale, mask, position bias, soft cap."""
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "FusedMatMul", "TransposeMatMul"})
_MAX_STEPS = 64


@dataclass(frozen=True)
class Core:
    """An attention core, or a softmax alone.

    Attributes:
        anchor: index of the softmax.
    """

    kind: str
    anchor: int
    nodes: frozenset[int]
    name: str


@dataclass(frozen=True)
class _Softmax:
    """A softmax, one operator or written out: its nodes, what it reads, and the node that gives its result."""

    nodes: frozenset[int]
    entry: str
    exit: Node


def find_attention(look: Lookup, node: Node) -> Core | None:
    """The attention core (or the softmax with its scale) around a softmax, seen from Softmax or Exp."""
    softmax = _softmax(look, node)
    if softmax is None:
        return None
    products, before = _scores(look, softmax.entry)
    values = _values(look, softmax.exit) if products else None
    if values is not None:
        scales = {
            maker.index
            for product in products
            for operand in product.inputs  # torch scales queries and keys by the square root before their product
            if (maker := look.producer(operand)) is not None and _is_scaling(look, maker)
        }
        inside = softmax.nodes | before | values | scales | {p.index for p in products}
        return Core("attention", node.index, frozenset(inside), "attention core")
    inside = softmax.nodes | (before if products else _scales(look, softmax.entry))
    return Core("softmax", node.index, frozenset(inside), "softmax with its scale and mask")


def _softmax(look: Lookup, node: Node) -> _Softmax | None:
    if node.op_type in ("Softmax", "BiasSoftmax"):
        return _Softmax(frozenset({node.index}), node.inputs[0], node)
    if node.op_type != "Exp" or not look.varying(node):
        return None
    exponentials = node.outputs[0]
    total = next((r for r in look.readers(exponentials) if r.op_type == "ReduceSum"), None)
    if total is None:
        return None
    inside, sums = {node.index, total.index}, {total.outputs[0]}
    for reader in look.readers(total.outputs[0]):  # an epsilon, or a reciprocal in place of the division
        if reader.op_type in ("Add", "Max", "Clip", "Reciprocal") and len(look.varying(reader)) == 1:
            inside.add(reader.index)
            sums.add(reader.outputs[0])
    divide = next(
        (
            r
            for r in look.readers(exponentials)
            if r.op_type in ("Div", "Mul") and look.root(look.other(r, exponentials)) in sums
        ),
        None,
    )
    if divide is None:
        return None
    entry = node.inputs[0]
    shift = look.producer(entry)
    if shift is not None and shift.op_type == "Sub":
        largest = look.producer(shift.inputs[1])
        if largest is not None and largest.op_type == "ReduceMax":
            inside |= {shift.index, largest.index}
            entry = shift.inputs[0]
    return _Softmax(frozenset(inside | {divide.index}), entry, divide)


def _scores(look: Lookup, entry: str) -> tuple[list[Node], frozenset[int]]:
    """The products of activations that the scores come from, and what stands between them and the softmax.

    The way through a mask or a position bias ends at an input, a constant or a weighted layer and is left out: it
    may be FP32 where the core is FP16.
    """
    products: dict[int, Node] = {}
    leads: dict[int, bool] = {}

    def visit(tensor: str) -> bool:
        node = look.producer(tensor)
        if node is None:
            return False
        if node.index in leads:
            return leads[node.index]
        leads_to_product = False
        if node.op_type in _PRODUCTS:
            leads_to_product = not any(look.is_static(i) for i in node.inputs[:2])
            if leads_to_product:
                products[node.index] = node
        elif node.op_type in _SCORE_OPS | GLUE and len(leads) < _MAX_STEPS:
            leads[node.index] = False
            for operand in look.varying(node):  # all of them: scores may be a sum of two products
                leads_to_product |= look.model.info(operand).is_float32 and visit(operand)
        leads[node.index] = leads_to_product
        return leads_to_product

    visit(entry)
    return list(products.values()), frozenset(i for i, on_the_way in leads.items() if on_the_way and i not in products)


def _values(look: Lookup, exit_: Node) -> frozenset[int] | None:
    """The product with the values and the nodes on the way to it; None where there is none.

    Weights that also leave the model, or are averaged for it, are read by other nodes as well: these stay outside.
    A softmax guarded against rows without any key (IsNaN, Where) is seen through.
    """
    paths: list[tuple[Node, frozenset[int]]] = [(exit_, frozenset())]
    steps = 0
    while paths and steps < _MAX_STEPS:
        at, passed = paths.pop(0)
        steps += 1
        readers = look.readers(at.outputs[0])
        guards = {r.index for r in readers if r.op_type == "IsNaN"}
        for reader in readers:
            if reader.op_type in _PRODUCTS:
                return passed | {reader.index}
            if reader.op_type in GLUE:
                paths.append((reader, passed | {reader.index}))
            elif reader.op_type == "Where" and guards:
                paths.append((reader, passed | guards | {reader.index}))
    return None


def _scales(look: Lookup, entry: str) -> frozenset[int]:
    """The scales right before a softmax."""
    inside: set[int] = set()
    node = look.producer(entry)
    while node is not None and _is_scaling(look, node):
        inside.add(node.index)
        varying = [i for i in look.varying(node) if not look.is_single(i)]
        node = look.producer(varying[0]) if len(varying) == 1 else None
    return frozenset(inside)


def _is_scaling(look: Lookup, node: Node) -> bool:
    """Whether a node multiplies or divides by a single number, constant or computed from shapes."""
    return node.op_type in ("Mul", "Div") and any(look.is_scalar(i) or look.is_single(i) for i in node.inputs)
