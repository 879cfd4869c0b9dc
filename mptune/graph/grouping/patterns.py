"""Indivisible patterns, found by structure and not by names: nodes that must share a precision whatever the plan.

A decomposed norm split in two keeps ONNX Runtime's fusion from loading the model, a softmax apart from its scale
and mask overflows where neither does alone, and an activation apart from its convolution costs Casts for nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from mptune.graph.facts import Facts, facts_of
from mptune.graph.grouping.norms import Pattern, find_activation, find_norm
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import STANDARD_DOMAINS
from mptune.graph.op_rules import casts_integers, is_dequantised, node_rule
from mptune.graph.ops import (
    ACTIVATIONS,
    ARITHMETIC,
    BOUNDS,
    CONVOLUTIONS,
    GLUE,
    INTEGER_PRODUCTS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    SOFTMAX,
    anchor_kind,
)

_MAX_PER_CHANNEL = 4
"""The most nodes of a decomposed batch norm: minus mean, divided by deviation, scaled, shifted."""


def find_layer(
    facts: Facts, start: Node, claimed: Container[int], activations: Mapping[str, Pattern]
) -> Pattern | None:
    """The layer that begins at a convolution or product; None where nothing is fused onto it.

    ``activations`` are the decomposed ones, by the value that they are computed from.
    """
    is_conv = start.op_type in CONVOLUTIONS
    if not is_conv and (start.op_type not in MATRIX_PRODUCTS or not any(facts.is_static(i) for i in start.inputs[:2])):
        return None
    inside, at, parts = {start.index}, start, dict[str, None]()
    budget = _MAX_PER_CHANNEL if is_conv else 1
    while True:
        result = at.outputs[0]
        activation = activations.get(facts.root(result))
        if activation is not None and not facts.is_output(result):
            if all(r.index in activation.nodes for r in facts.readers(result)):
                inside.update(activation.nodes)
                parts["activation"] = None
            break
        reader = facts.only_reader(at)
        if reader is None or reader.index in claimed:
            break
        if reader.op_type == "BatchNormalization" and facts.root(reader.inputs[0]) == facts.root(result):
            parts["batch norm"] = None
            budget = 0
        elif budget and _is_per_channel(facts, reader, result, is_conv):
            parts["scale and shift" if is_conv and reader.op_type != "Add" else "bias"] = None
            budget -= 1
        elif reader.op_type in ACTIVATIONS and len(facts.varying(reader)) == 1:
            inside.add(reader.index)
            parts["activation"] = None
            break
        else:
            break
        inside.add(reader.index)
        at = reader
    if len(inside) == 1:
        return None
    kind, what = ("conv", "convolution") if is_conv else ("matmul", "matrix product")
    return Pattern(kind, start.index, tuple(sorted(inside)), f"{what} with its {' and '.join(parts)}")


def _is_per_channel(facts: Facts, node: Node, tensor: str, is_conv: bool) -> bool:
    other = facts.other(node, tensor)
    if node.op_type not in (ARITHMETIC if is_conv else {"Add"}) or not other or not facts.is_vector(other):
        return False
    return node.op_type in ("Add", "Mul") or facts.root(node.inputs[0]) == facts.root(tensor)


_SCORE_OPS = ARITHMETIC | BOUNDS | {"Where", "Tanh"}
"""What stands between the score product and the softmax: scale, mask, position bias, soft cap."""

_MAX_STEPS = 64


def find_attention(facts: Facts, node: Node) -> Pattern | None:
    """The attention core (or the softmax with its scale) around a softmax, seen from Softmax or Exp."""
    softmax = _softmax(facts, node)
    if softmax is None:
        return None
    nodes, entry, result = softmax
    products, before = _scores(facts, entry)
    values = _values(facts, result) if products else None
    if values is not None:
        scales = {
            maker.index
            for product in products
            for operand in product.inputs  # torch scales queries and keys by the square root before their product
            if (maker := facts.producer(operand)) is not None and _is_scaling(facts, maker)
        }
        inside = nodes | before | values | scales | {p.index for p in products}
        return Pattern("attention", node.index, tuple(sorted(inside)), "attention core")
    inside = nodes | (before if products else _scales(facts, entry))
    return Pattern("softmax", node.index, tuple(sorted(inside)), "softmax with its scale and mask")


def _softmax(facts: Facts, node: Node) -> tuple[set[int], str, Node] | None:
    """The nodes of a softmax, one operator or written out, what it reads, and the node that gives its result."""
    if node.op_type in SOFTMAX - {"LogSoftmax"}:
        return {node.index}, node.inputs[0], node
    if node.op_type != "Exp" or not facts.varying(node):
        return None
    exponentials = node.outputs[0]
    total = next((r for r in facts.readers(exponentials) if r.op_type == "ReduceSum"), None)
    if total is None:
        return None
    inside, sums = {node.index, total.index}, {total.outputs[0]}
    for reader in facts.readers(total.outputs[0]):  # an epsilon, or a reciprocal in place of the division
        if reader.op_type in ("Add", "Max", "Clip", "Reciprocal") and len(facts.varying(reader)) == 1:
            inside.add(reader.index)
            sums.add(reader.outputs[0])
    divide = next(
        (
            r
            for r in facts.readers(exponentials)
            if r.op_type in ("Div", "Mul") and facts.root(facts.other(r, exponentials)) in sums
        ),
        None,
    )
    if divide is None:
        return None
    entry = node.inputs[0]
    shift = facts.producer(entry)
    if shift is not None and shift.op_type == "Sub":
        largest = facts.producer(shift.inputs[1])
        if largest is not None and largest.op_type == "ReduceMax":
            inside |= {shift.index, largest.index}
            entry = shift.inputs[0]
    return inside | {divide.index}, entry, divide


def _scores(facts: Facts, entry: str) -> tuple[list[Node], frozenset[int]]:
    """The products of activations that the scores come from, and what stands between them and the softmax.

    The way through a mask or a position bias ends at an input, a constant or a weighted layer and is left out: it
    may be FP32 where the core is FP16.
    """
    products: dict[int, Node] = {}
    leads: dict[int, bool] = {}

    def visit(tensor: str) -> bool:
        node = facts.producer(tensor)
        if node is None:
            return False
        if node.index in leads:
            return leads[node.index]
        leads_to_product = False
        if node.op_type in MATRIX_PRODUCTS:
            leads_to_product = not any(facts.is_static(i) for i in node.inputs[:2])
            if leads_to_product:
                products[node.index] = node
        elif node.op_type in _SCORE_OPS | GLUE and len(leads) < _MAX_STEPS:
            leads[node.index] = False
            for operand in facts.varying(node):  # all of them: scores may be a sum of two products
                leads_to_product |= facts.model.info(operand).is_float32 and visit(operand)
        leads[node.index] = leads_to_product
        return leads_to_product

    visit(entry)
    return list(products.values()), frozenset(i for i, on_the_way in leads.items() if on_the_way and i not in products)


def _values(facts: Facts, exit_: Node) -> frozenset[int] | None:
    """The product with the values and the nodes on the way to it; None where there is none.

    Weights that also leave the model, or are averaged for it, are read by other nodes as well: these stay outside.
    A softmax guarded against rows without any key (IsNaN, Where) is seen through.
    """
    paths: list[tuple[Node, frozenset[int]]] = [(exit_, frozenset())]
    steps = 0
    while paths and steps < _MAX_STEPS:
        at, passed = paths.pop(0)
        steps += 1
        readers = facts.readers(at.outputs[0])
        guards = {r.index for r in readers if r.op_type == "IsNaN"}
        for reader in readers:
            if reader.op_type in MATRIX_PRODUCTS:
                return passed | {reader.index}
            if reader.op_type in GLUE:
                paths.append((reader, passed | {reader.index}))
            elif reader.op_type == "Where" and guards:
                paths.append((reader, passed | guards | {reader.index}))
    return None


def _scales(facts: Facts, entry: str) -> frozenset[int]:
    """The scales right before a softmax."""
    inside: set[int] = set()
    node = facts.producer(entry)
    while node is not None and _is_scaling(facts, node):
        inside.add(node.index)
        varying = [i for i in facts.varying(node) if not facts.is_single(i)]
        node = facts.producer(varying[0]) if len(varying) == 1 else None
    return frozenset(inside)


def _is_scaling(facts: Facts, node: Node) -> bool:
    """Whether a node multiplies or divides by a single number, constant or computed from shapes."""
    return node.op_type in ("Mul", "Div") and any(facts.is_scalar(i) or facts.is_single(i) for i in node.inputs)


QUANTISED = "quantised"
"""Kind of pattern and of group."""

KEPT_QUANTISED = "quantised: engines run it in INT8, and a Cast beside it would keep them from fusing it"

_DOMAINS = STANDARD_DOMAINS | {"com.microsoft"}

_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool"})


def find_quantised(facts: Facts) -> tuple[Pattern, ...]:
    """The quantised parts of a model.

    A part holds products whose both operands are dequantised, with the bias, batch norm and activation that are fused
    onto them, and every other node that computes from dequantised values alone and whose result is quantised again:
    directly, or through further nodes that only move, pool or combine values element by element. Where activations are
    quantised as they come (dynamic quantisation), what makes FP32 of a product's INT32 sums is a part: the Cast, the
    product with the scale, and the scale's own. The sums are past FP16's range before the scale.
    """
    search = _Quantised(facts)
    return search.parts() if search.has_any else ()


def _is(node: Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and node.domain in _DOMAINS


class _Quantised:
    """The nodes that belong to quantised parts."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._nodes = facts.model.nodes
        self._rescaled = {index for node in self._nodes for index in self._rescaling(node)}
        self.has_any = bool(self._rescaled) or any(_is(node, "DequantizeLinear") for node in self._nodes)
        self._cores = {n.index for n in self._nodes if self.has_any and self._is_core(n)}
        self._fed: set[int] = set()
        for node in self._nodes if self.has_any else ():
            if self._is_fed(node):
                self._fed.add(node.index)

    def parts(self) -> tuple[Pattern, ...]:
        """See ``find_quantised``."""
        kept = set(self._rescaled)
        for node in reversed(self._nodes):
            if node.index in self._cores or (node.index in self._fed and self._is_quantised_again(node, kept)):
                kept.add(node.index)
        for index in sorted(self._cores):
            layer = find_layer(self._facts, self._nodes[index], (), {})
            kept.update(() if layer is None else layer.nodes)
        parts: dict[int, set[int]] = {}
        part_of: dict[int, int] = {}
        for index in sorted(kept):
            before = {part_of[p] for i in self._nodes[index].inputs if (p := self._producer_index(i)) in part_of}
            part = min(before, default=index)
            members = parts.setdefault(part, set())
            members.add(index)
            for other in before - {part}:
                members |= parts.pop(other)
            part_of.update(dict.fromkeys(members, part))
        return tuple(
            Pattern(QUANTISED, min(part & self._cores or part), tuple(sorted(part)), "quantised part")
            for part in parts.values()
        )

    def _producer_index(self, tensor: str) -> int:
        """The node that computes a value, static or not; -1 where none does."""
        return self._facts.model.producer.get(self._facts.root(tensor), -1)

    def _is_core(self, node: Node) -> bool:
        return (
            node.op_type in PRODUCTS
            and node.is_standard
            and bool(self._facts.varying(node))
            and all(is_dequantised(self._facts.model, operand) for operand in node.inputs[:2])
        )

    def _rescaling(self, node: Node) -> set[int]:
        """The nodes that make FP32 of the sums of an integer product; none where the node is no Cast of such sums."""
        sums = self._producer_index(node.inputs[0]) if casts_integers(self._facts.model, node) else -1
        if sums < 0 or self._nodes[sums].op_type not in INTEGER_PRODUCTS or not self._nodes[sums].is_standard:
            return set()
        products = [r for r in self._facts.readers(node.outputs[0]) if r.op_type == "Mul" and r.is_standard]
        scales = {self._producer_index(operand) for product in products for operand in product.inputs}
        of_scales = {i for i in scales if i >= 0 and self._nodes[i].op_type == "Mul" and self._reads_dynamic_scale(i)}
        return {node.index, *(product.index for product in products), *of_scales}

    def _reads_dynamic_scale(self, index: int) -> bool:
        makers = (self._producer_index(operand) for operand in self._nodes[index].inputs)
        return any(_is(self._nodes[maker], "DynamicQuantizeLinear") for maker in makers if maker >= 0)

    def _is_fed(self, node: Node) -> bool:
        """Whether a node computes from dequantised values alone, constants aside."""
        if not node.is_standard or node.op_type == "Constant" or node.has_subgraph:
            return False
        values = [i for i in self._facts.varying(node) if self._facts.model.info(i).is_float32]
        joins = node.op_type in _POOLS or anchor_kind(node.op_type) is None
        if not values or not all(
            is_dequantised(self._facts.model, i) or (joins and self._producer_index(i) in self._fed | self._cores)
            for i in values
        ):
            return False
        rule = node_rule(self._facts.model, node)
        return bool(rule.inputs and rule.outputs)

    def _is_quantised_again(self, node: Node, kept: set[int]) -> bool:
        for tensor in node.outputs:
            for reader in self._facts.readers(tensor) if tensor else ():
                if reader.index in kept:
                    return True
                if _is(reader, "QuantizeLinear") and self._facts.root(reader.inputs[0]) == self._facts.root(tensor):
                    return True
        return False


@once
def find_patterns(model: Model) -> tuple[Pattern, ...]:
    """All patterns of several nodes and all quantised parts, without overlap, in topological order of their anchors.

    Where two would share a node, quantised parts win over norms, these over attention cores, these over activations,
    and these over layers (which take a whole activation in).
    """
    facts = facts_of(model)
    claims = _Claims(facts)
    for part in find_quantised(facts):
        claims.add(part)
    for find in (find_norm, find_attention):
        for node in model.nodes:
            claims.add(find(facts, node))
    activations: dict[str, Pattern] = {}
    for node in model.nodes:
        activation = find_activation(facts, node)
        if activation is not None and claims.are_free(activation.nodes):
            claims.add(activation)
            activations[activation.entry] = activation
    in_activations = frozenset(i for a in activations.values() for i in a.nodes)
    for node in model.nodes:
        layer = None
        if node.index not in claims.pattern_of:
            layer = find_layer(facts, node, claims.pattern_of, activations)
        if layer is not None:
            claims.release(in_activations.intersection(layer.nodes))
            claims.add(layer)
    return tuple(sorted({*claims.pattern_of.values()}, key=lambda pattern: pattern.anchor))


class _Claims:
    """The patterns found so far, and the nodes that belong to them."""

    def __init__(self, facts: Facts) -> None:
        self.pattern_of: dict[int, Pattern] = {}
        self._facts = facts

    def are_free(self, nodes: Iterable[int]) -> bool:
        return self.pattern_of.keys().isdisjoint(nodes)

    def add(self, pattern: Pattern | None) -> None:
        """Take its nodes, and the aliases between them, unless one is taken; only a quantised part may be one node."""
        if pattern is None or not self.are_free(pattern.nodes):
            return
        whole = tuple(i for i in sorted(self._facts.with_aliases(pattern.nodes)) if i not in self.pattern_of)
        if len(whole) > 1 or pattern.kind == QUANTISED:
            self.pattern_of.update(dict.fromkeys(whole, replace(pattern, nodes=whole)))

    def release(self, nodes: frozenset[int]) -> None:
        """Give up the patterns that hold any of the nodes: a larger one takes them over."""
        for pattern in {self.pattern_of[i] for i in nodes if i in self.pattern_of}:
            for index in pattern.nodes:
                del self.pattern_of[index]
