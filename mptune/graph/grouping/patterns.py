"""Indivisible patterns, found by structure and not by names: nodes that must share a precision whatever the plan.

A decomposed norm split in two keeps ONNX Runtime's fusion from loading the model, a softmax apart from its scale
and mask overflows where neither does alone, and an activation apart from its convolution costs Casts for nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from mptune.graph.facts import Facts, casts_integers, facts_of, is_dequantised, node_rule
from mptune.graph.grouping.norms import Pattern, find_activation, find_norm
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import STANDARD_DOMAINS
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
    model, nodes = facts.model, facts.model.nodes
    rescaling = {index for node in nodes for index in _rescaling(facts, node)}
    if not rescaling and not any(_is(node, "DequantizeLinear") for node in nodes):
        return ()

    def is_dequantised_product(node: Node) -> bool:
        is_product = node.is_standard and node.op_type in PRODUCTS and bool(facts.varying(node))
        return is_product and all(is_dequantised(model, operand) for operand in node.inputs[:2])

    cores = {node.index for node in nodes if is_dequantised_product(node)}
    # What computes from dequantised values alone, constants aside.
    fed: set[int] = set()
    for node in nodes:
        values = [name for name in facts.varying(node) if model.info(name).is_float32] if node.is_standard else []
        joins = node.op_type in _POOLS or anchor_kind(node.op_type) is None
        makers = [_maker(facts, name) for name in values if not is_dequantised(model, name)]
        if values and all(joins and (maker in fed or maker in cores) for maker in makers):
            rule = node_rule(model, node)
            fed.update([node.index] if rule.inputs and rule.outputs else [])
    # Of that, what is quantised again, from the last node to the first.
    inside = set(rescaling)
    for node in reversed(nodes):
        readers = [(name, reader) for name in node.outputs if name for reader in facts.readers(name)]
        if node.index in cores or (
            node.index in fed and any(r.index in inside or _quantises(facts, r, name) for name, r in readers)
        ):
            inside.add(node.index)
    for index in sorted(cores):
        layer = find_layer(facts, nodes[index], (), {})
        inside.update(() if layer is None else layer.nodes)
    # What is connected is one part.
    parts: dict[int, set[int]] = {}
    part_of: dict[int, int] = {}
    for index in sorted(inside):
        joined = {part_of[maker] for name in nodes[index].inputs if (maker := _maker(facts, name)) in part_of}
        part = min(joined, default=index)
        members = parts.setdefault(part, set())
        members.add(index)
        for other in joined - {part}:
            members |= parts.pop(other)
        part_of.update(dict.fromkeys(members, part))
    return tuple(
        Pattern(QUANTISED, min(part & cores or part), tuple(sorted(part)), "quantised part") for part in parts.values()
    )


def _is(node: Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and node.domain in _DOMAINS


def _maker(facts: Facts, tensor: str) -> int:
    """The node that computes a value, static or not; -1 where none does."""
    return facts.model.producer.get(facts.root(tensor), -1)


def _quantises(facts: Facts, reader: Node, tensor: str) -> bool:
    return _is(reader, "QuantizeLinear") and facts.root(reader.inputs[0]) == facts.root(tensor)


def _rescaling(facts: Facts, node: Node) -> set[int]:
    """The nodes that make FP32 of the sums of an integer product; none where the node is no Cast of such sums."""
    nodes = facts.model.nodes
    sums = _maker(facts, node.inputs[0]) if casts_integers(facts.model, node) else -1
    if sums < 0 or nodes[sums].op_type not in INTEGER_PRODUCTS or not nodes[sums].is_standard:
        return set()
    products = [r for r in facts.readers(node.outputs[0]) if r.op_type == "Mul" and r.is_standard]
    inside = {node.index, *(product.index for product in products)}
    for scale in {_maker(facts, operand) for product in products for operand in product.inputs} - {-1}:
        makers = [_maker(facts, operand) for operand in nodes[scale].inputs]
        if nodes[scale].op_type == "Mul" and any(_is(nodes[m], "DynamicQuantizeLinear") for m in makers if m >= 0):
            inside.add(scale)
    return inside


@once
def find_patterns(model: Model) -> tuple[Pattern, ...]:
    """All patterns of several nodes and all quantised parts, without overlap, in topological order of their anchors.

    Where two would share a node, quantised parts win over norms, these over attention cores, these over activations,
    and these over layers (which take a whole activation in).
    """
    facts = facts_of(model)
    pattern_of: dict[int, Pattern] = {}

    def claim(pattern: Pattern | None) -> bool:
        """Take its nodes, and the aliases between them, unless one is taken; only a quantised part may be one node."""
        if pattern is None or not pattern_of.keys().isdisjoint(pattern.nodes):
            return False
        whole = tuple(i for i in sorted(facts.with_aliases(pattern.nodes)) if i not in pattern_of)
        if len(whole) > 1 or pattern.kind == QUANTISED:
            pattern_of.update(dict.fromkeys(whole, replace(pattern, nodes=whole)))
        return True

    for part in find_quantised(facts):
        claim(part)
    for find in (find_norm, find_attention):
        for node in model.nodes:
            claim(find(facts, node))
    activations: dict[str, Pattern] = {}
    for node in model.nodes:
        activation = find_activation(facts, node)
        if activation is not None and claim(activation):
            activations[activation.entry] = activation
    in_activations = frozenset(i for a in activations.values() for i in a.nodes)
    for node in model.nodes:
        layer = None if node.index in pattern_of else find_layer(facts, node, pattern_of, activations)
        if layer is None:
            continue
        for smaller in {pattern_of[i] for i in in_activations.intersection(layer.nodes) if i in pattern_of}:
            for index in smaller.nodes:
                del pattern_of[index]
        claim(layer)
    return tuple(sorted({*pattern_of.values()}, key=lambda pattern: pattern.anchor))
