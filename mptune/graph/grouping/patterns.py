"""Indivisible patterns, recognised by structure and not by names: nodes that must share a precision whatever the plan.

A decomposed norm split in two keeps ONNX Runtime's fusion from loading the model, a softmax apart from its scale
and mask overflows where neither does alone, and an activation apart from its convolution costs Casts for nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from mptune.graph.facts import Facts, casts_integers, facts_of, is_dequantised, node_rule
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import STANDARD_DOMAINS
from mptune.graph.ops import (
    ACTIVATIONS,
    ARITHMETIC,
    BOUNDS,
    CONVOLUTIONS,
    GLUE,
    GUARDS,
    INTEGER_PRODUCTS,
    MATRIX_PRODUCTS,
    MEANS,
    PRODUCTS,
    SOFTMAX,
    VIEWS,
    anchor_kind,
)

QUANTISED = "quantised"
"""Kind of pattern and of group."""

_MAX_STEPS = 64
"""Most nodes that a walk passes."""


@dataclass(frozen=True)
class Pattern:
    """Nodes that share a precision whatever the plan.

    Attributes:
        anchor: index of the node that names it and stands for it in the topological order.
        nodes: their indices, ascending.
        squares: of a decomposed norm, the value that holds the squares (or their sum), which overflows first; else "".
        entry: of a decomposed activation, the value that it is computed from; else "".
    """

    kind: str
    anchor: int
    nodes: tuple[int, ...]
    name: str
    squares: str = ""
    entry: str = ""


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

    for part in _quantised_parts(facts):
        claim(part)
    for find in (_norm, _attention):
        for node in model.nodes:
            claim(find(facts, node))
    activations: dict[str, Pattern] = {}
    for node in model.nodes:
        activation = _activation(facts, node)
        if activation is not None and claim(activation):
            activations[activation.entry] = activation
    in_activations = frozenset(i for a in activations.values() for i in a.nodes)
    for node in model.nodes:
        layer = None if node.index in pattern_of else _layer(facts, node, pattern_of, activations)
        if layer is None:
            continue
        for smaller in {pattern_of[i] for i in in_activations.intersection(layer.nodes) if i in pattern_of}:
            for index in smaller.nodes:
                del pattern_of[index]
        claim(layer)
    return tuple(sorted({*pattern_of.values()}, key=lambda pattern: pattern.anchor))


def between(facts: Facts, start: str, end: str, operators: AbstractSet[str], most: int = _MAX_STEPS) -> set[int] | None:
    """The nodes that compute ``end`` from ``start`` alone, by some operators.

    Single numbers, and static integers such as axes, may be read besides. None where anything else is, where another
    operator stands in between, or where there are more than ``most`` nodes.
    """
    inside, waiting = set[int](), [facts.root(end)]
    while waiting:
        value = waiting.pop()
        is_fixed = facts.is_static(value) and (facts.is_scalar(value) or not facts.model.info(value).is_float32)
        if value == start or is_fixed:
            continue
        node = facts.producer(value)
        if node is None or node.op_type not in operators or len(inside) >= most:
            return None
        if node.index not in inside:
            inside.add(node.index)
            waiting += [facts.root(i) for i in node.inputs if i]
    return inside


# -- norms --------------------------------------------------------------------------------------------------------

_WITHOUT_AFFINE = frozenset({"InstanceNormalization", "MeanVarianceNormalization", "LpNormalization"})
"""Operators that exporters use for norms whose scale and shift follow as nodes of their own."""

_MAX_VIEWS = 3

_PASSED = GUARDS | VIEWS | {"Div", "Mul"}
"""What stands between a root and the mean under it."""

_STATISTICS = ARITHMETIC | GUARDS | VIEWS | MEANS | {"Pow", "ReduceSumSquare", "Sqrt"}
"""What computes the root of a variance, or of a mean of squares."""


def _norm(facts: Facts, root: Node) -> Pattern | None:
    """The norm whose square root (or L2 reduction, or norm operator without scale) is ``root``."""
    if root.op_type in _WITHOUT_AFFINE:
        tail = _affine_tail(facts, root)
        nodes = tuple(sorted({root.index} | tail))
        return Pattern("norm", nodes[0], nodes, f"{root.op_type} with its scale and shift") if tail else None
    is_root = root.op_type == "Sqrt" or (root.op_type == "Pow" and facts.number(root.inputs[1]) in (0.5, -0.5))
    if not facts.varying(root) or not (is_root or root.op_type == "ReduceL2"):
        return None
    if root.op_type == "ReduceL2":
        return _around(facts, root, {root.index}, [root.inputs[0]], "L2 norm written out", root.outputs[0])
    # Back over the epsilon, the division by the count, views and the mean, to what is squared.
    value, mean, has_mean = root.inputs[0], "", False
    while True:
        node = facts.producer(value)
        squared = _squared(facts, node)
        if node is None or squared:
            break
        varying = facts.varying(node)
        if node.op_type == "Sub" and len(varying) == 2 and not mean:  # the mean of squares less the squared mean
            mean = _squared(facts, facts.producer(varying[1]))
            if not mean:
                return None
        elif len(varying) != 1 or not (node.op_type in MEANS or (node.op_type in _PASSED and len(node.inputs) > 1)):
            return None
        has_mean |= node.op_type in MEANS
        value = varying[0]
    if node is None or not (has_mean or node.op_type == "ReduceSumSquare"):
        return None
    source, difference, centring = squared, mean, facts.producer(squared)
    if not difference and centring is not None and centring.op_type == "Sub":
        source, mean = (facts.root(i) for i in centring.inputs)
    means = between(facts, source, mean, MEANS | {"Div", "Mul"}) if mean else None
    if not any(facts.model.nodes[i].op_type in MEANS for i in means or ()):
        if difference:
            return None
        source, mean = squared, ""
    inside = between(facts, source, root.outputs[0], _STATISTICS)
    if inside is None:
        return None
    if not mean:
        return _around(facts, root, inside, [squared], "RMSNorm written out", node.outputs[0])
    family = [squared, source, mean]
    for reader in facts.readers(mean):  # TensorFlow centres a second time for the numerator
        if reader.op_type == "Sub" and facts.root(reader.inputs[0]) == source:
            inside.add(reader.index)
            family.append(reader.outputs[0])
    return _around(facts, root, inside, family, "LayerNorm written out", node.outputs[0])


def _squared(facts: Facts, node: Node | None) -> str:
    """What a node squares; "" where it does not."""
    if node is None or not node.inputs:
        return ""
    is_square = node.op_type == "Mul" and facts.root(node.inputs[0]) == facts.root(node.inputs[1])
    is_square |= node.op_type == "Pow" and facts.number(node.inputs[1]) == 2.0
    return facts.root(node.inputs[0]) if is_square or node.op_type == "ReduceSumSquare" else ""


def _around(facts: Facts, root: Node, inside: set[int], family: list[str], name: str, squares: str) -> Pattern | None:
    """The norm around the nodes up to its root: the division by it, the scale and the shift; None without a division.

    Args:
        family: the value that is normalised, under each of its forms: as it is, centred, its mean.
        squares: see ``Pattern``.
    """
    kinds = dict.fromkeys(family, "value") | {root.outputs[0]: "denominator"}
    waiting = facts.readers(root.outputs[0])
    while waiting:
        node = waiting.pop()
        kind = "" if node.index in inside or not node.outputs else _kind_of_result(facts, node, kinds)
        if kind:
            inside.add(node.index)
            kinds[node.outputs[0]] = kind
            waiting += facts.readers(node.outputs[0])
    normalised = sorted(value for value, kind in kinds.items() if kind == "normalised")
    for value in normalised:
        maker = facts.producer(value)
        if maker is not None and not any(r.index in inside for r in facts.readers(value)):
            inside |= _affine_tail(facts, maker)
    return Pattern("norm", min(inside), tuple(sorted(inside)), name, squares) if normalised else None


def _kind_of_result(facts: Facts, node: Node, kinds: Mapping[str, str]) -> str:
    """What a node computes from these kinds of values: another denominator, the normalised value, "" for neither."""
    roots = [facts.root(i) for i in node.inputs if i]
    if node.op_type in VIEWS:  # the shape of an Expand is computed too, and has no precision
        roots = [r for r in roots if r in kinds or facts.is_static(r) or facts.model.info(r).is_float32]
    read = ["static" if facts.is_static(r) else kinds.get(r, "other") for r in roots]
    kinds_read = {*read} - {"static"}
    if kinds_read == {"normalised"}:  # the products of TensorFlow's form are added, and its shift comes first
        closes = node.op_type in ("Add", "Sub") and ("static" not in read or read[0] == "static")
        return "normalised" if closes else ""
    if kinds_read == {"denominator", "value"}:
        return "normalised" if node.op_type in ("Div", "Mul") else ""
    passes = {"Reciprocal", "Div", "Mul", "Neg", "Pow", *GUARDS, *VIEWS}
    return "denominator" if kinds_read == {"denominator"} and node.op_type in passes else ""


def _affine_tail(facts: Facts, at: Node) -> set[int]:
    """The constant scale and shift after a norm, with the views on the way to them."""
    inside, views = set[int](), set[int]()
    wanted = ["Mul", "Add"]
    while wanted:
        reader = facts.only_reader(at)
        if reader is None or reader.index in inside:
            break
        if reader.op_type in VIEWS and len(views) < _MAX_VIEWS and facts.root(reader.inputs[0]) == at.outputs[0]:
            views.add(reader.index)
        elif reader.op_type in wanted and facts.is_static(facts.other(reader, at.outputs[0])):
            inside |= views | {reader.index}
            views = set()
            wanted = wanted[wanted.index(reader.op_type) + 1 :]
        else:
            break
        at = reader
    return inside


# -- activations --------------------------------------------------------------------------------------------------

_ACTIVATION_NAMES = {
    "Erf": "GELU written out",
    "Tanh": "GELU (tanh) written out",
    "Sigmoid": "SiLU written out",
    "HardSigmoid": "hard swish written out",
    "Clip": "hard swish written out",
}

_MAX_ACTIVATION_STEPS = 12


def _activation(facts: Facts, core: Node) -> Pattern | None:
    """The activation whose nonlinearity is ``core``: what it is computed from, times a function of that alone."""
    name = _ACTIVATION_NAMES.get(core.op_type)
    if name is None or len(facts.varying(core)) != 1:
        return None
    # Over sums and products with single numbers, to the product that it gates.
    inside, at, is_halved = {core.index}, core, False
    while (gate := facts.only_reader(at)) is not None and gate.op_type in ARITHMETIC and len(inside) <= 6:
        other = facts.other(gate, at.outputs[0])
        if not facts.is_scalar(other):
            break
        is_halved |= gate.op_type in ("Mul", "Div")
        inside.add(gate.index)
        at = gate
    else:
        return None
    if gate.op_type != "Mul" or not other:
        return None
    # It gates x itself, or x scaled by a number.
    operators, argument = ARITHMETIC | {"Pow", "Softplus"}, facts.varying(core)[0]
    entry, scale = facts.root(other), facts.producer(other)
    before = between(facts, entry, argument, operators, _MAX_ACTIVATION_STEPS)
    is_scaled = before is None and scale is not None and scale.op_type in ("Mul", "Div")
    if is_scaled and scale is not None and len(facts.varying(scale)) == 1 and facts.only_reader(scale) is gate:
        entry = facts.root(facts.varying(scale)[0])
        before = between(facts, entry, argument, operators, _MAX_ACTIVATION_STEPS)
        inside.add(scale.index)
    # x * clip(x) is no activation that has a name; x * clip(x + 3, 0, 6) is.
    if before is None or (core.op_type == "Clip" and not before):
        return None
    inside |= before | {gate.index}
    if "Softplus" in {facts.model.nodes[i].op_type for i in inside}:
        name = "Mish written out"
    last = facts.only_reader(gate)
    if not is_halved and not is_scaled and core.op_type != "Sigmoid" and last is not None:
        scales = last.op_type in ("Mul", "Div") and facts.is_scalar(facts.other(last, gate.outputs[0]))
        inside.update([last.index] if scales else ())
    return Pattern("activation", min(inside), tuple(sorted(inside)), name, entry=entry)


# -- layers: a convolution or product with its bias, batch norm and activation ------------------------------------

_MAX_PER_CHANNEL = 4
"""The most nodes of a decomposed batch norm: minus mean, divided by deviation, scaled, shifted."""


def _layer(facts: Facts, start: Node, claimed: Container[int], activations: Mapping[str, Pattern]) -> Pattern | None:
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
        other = facts.other(reader, result)
        is_first = facts.root(reader.inputs[0]) == facts.root(result)
        is_vector = reader.op_type in (ARITHMETIC if is_conv else {"Add"}) and bool(other) and facts.is_vector(other)
        if reader.op_type == "BatchNormalization" and is_first:
            parts["batch norm"] = None
            budget = 0
        elif budget and is_vector and (is_first or reader.op_type in ("Add", "Mul")):
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


# -- attention cores ----------------------------------------------------------------------------------------------

_SCORE_OPS = ARITHMETIC | BOUNDS | GLUE | {"Where", "Tanh"}
"""What stands between the score product and the softmax: scale, mask, position bias, soft cap, views."""

_SUMS = frozenset({"ReduceSum", "Add", "Max", "Clip", "Reciprocal"})
"""What computes the denominator of a softmax: an epsilon, and a reciprocal in place of the division."""


def _attention(facts: Facts, node: Node) -> Pattern | None:
    """The attention core (or the softmax with its scale) around a softmax, seen from Softmax or Exp."""
    softmax = _softmax(facts, node)
    if softmax is None:
        return None
    inside, entry, result = softmax
    products, before = _scores(facts, entry)
    values = _values(facts, result) if products else None
    if values is None:
        at = facts.producer(entry)
        while not products and at is not None and _is_scaling(facts, at):
            before.add(at.index)
            varying = [i for i in facts.varying(at) if not facts.is_single(i)]
            at = facts.producer(varying[0]) if len(varying) == 1 else None
        return Pattern("softmax", node.index, tuple(sorted(inside | before)), "softmax with its scale and mask")
    for product in products:
        before.add(product.index)
        for operand in product.inputs:  # torch scales queries and keys by the square root before their product
            maker = facts.producer(operand)
            before.update([maker.index] if maker is not None and _is_scaling(facts, maker) else ())
    return Pattern("attention", node.index, tuple(sorted(inside | before | values)), "attention core")


def _softmax(facts: Facts, node: Node) -> tuple[set[int], str, Node] | None:
    """The nodes of a softmax, one operator or written out, what it reads, and the node that gives its result."""
    if node.op_type in SOFTMAX - {"LogSoftmax"}:
        return {node.index}, node.inputs[0], node
    if node.op_type != "Exp" or not facts.varying(node):
        return None
    exponentials, entry, shift = node.outputs[0], node.inputs[0], facts.producer(node.inputs[0])
    if shift is not None and shift.op_type == "Sub":  # the largest value is subtracted
        entry = (
            shift.inputs[0] if between(facts, facts.root(shift.inputs[0]), shift.inputs[1], {"ReduceMax"}) else entry
        )
    for division in facts.readers(exponentials):
        other = facts.other(division, exponentials)
        total = between(facts, exponentials, other, _SUMS) if other and division.op_type in ("Div", "Mul") else None
        if any(facts.model.nodes[i].op_type == "ReduceSum" for i in total or ()):
            inside = between(
                facts, facts.root(entry), division.outputs[0], _SUMS | {"Sub", "ReduceMax", "Exp", "Div", "Mul"}
            )
            return (inside, entry, division) if inside else None
    return None


def _scores(facts: Facts, entry: str) -> tuple[list[Node], set[int]]:
    """The products of activations that the scores come from, and what stands between them and the softmax.

    The way through a mask or a position bias ends at an input, a constant or a weighted layer and is left out: it
    may be FP32 where the core is FP16.
    """
    products: dict[int, Node] = {}
    leads: dict[int, bool] = {}

    def visit(tensor: str) -> bool:
        node = facts.producer(tensor)
        if node is None or node.index in leads:
            return node is not None and leads[node.index]
        leads[node.index] = False
        if node.op_type in MATRIX_PRODUCTS and not any(facts.is_static(i) for i in node.inputs[:2]):
            products[node.index] = node
            leads[node.index] = True
        elif node.op_type in _SCORE_OPS and len(leads) <= _MAX_STEPS:
            for operand in facts.varying(node):  # all of them: scores may be a sum of two products
                leads[node.index] |= facts.model.info(operand).is_float32 and visit(operand)
        return leads[node.index]

    visit(entry)
    return list(products.values()), {i for i, is_on_way in leads.items() if is_on_way and i not in products}


def _values(facts: Facts, result: Node) -> set[int] | None:
    """The product with the values and the nodes on the way to it; None where there is none.

    Weights that also leave the model, or are averaged for it, are read by other nodes as well: these stay outside.
    A softmax guarded against rows without any key (IsNaN, Where) is seen through.
    """
    paths: list[tuple[Node, set[int]]] = [(result, set())]
    for at, passed in paths:  # grows
        readers = facts.readers(at.outputs[0]) if len(paths) <= _MAX_STEPS else []
        guards = {r.index for r in readers if r.op_type == "IsNaN"}
        for reader in readers:
            if reader.op_type in MATRIX_PRODUCTS:
                return passed | {reader.index}
            if reader.op_type in GLUE:
                paths.append((reader, passed | {reader.index}))
            elif reader.op_type == "Where" and guards:
                paths.append((reader, passed | guards | {reader.index}))
    return None


def _is_scaling(facts: Facts, node: Node) -> bool:
    """Whether a node multiplies or divides by a single number, constant or computed from shapes."""
    return node.op_type in ("Mul", "Div") and any(facts.is_scalar(i) or facts.is_single(i) for i in node.inputs)


# -- quantised parts ----------------------------------------------------------------------------------------------

_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool"})


def _quantised_parts(facts: Facts) -> tuple[Pattern, ...]:
    """The quantised parts of a model.

    A part holds products whose both operands are dequantised, with the bias, batch norm and activation that are fused
    onto them, and every other node that computes from dequantised values alone and whose result is quantised again:
    directly, or through further nodes that only move, pool or combine values element by element. Where activations are
    quantised as they come (dynamic quantisation), what makes FP32 of a product's INT32 sums is a part: the Cast, the
    product with the scale, and the scale's own. The sums are past FP16's range before the scale.
    """
    model, nodes = facts.model, facts.model.nodes
    inside = {index for node in nodes for index in _rescaling(facts, node)}
    if not inside and not any(_is(node, "DequantizeLinear") for node in nodes):
        return ()
    # The products, and what computes from dequantised values alone, constants aside.
    products, fed = set[int](), set[int]()
    for node in nodes:
        values = [name for name in facts.varying(node) if model.info(name).is_float32] if node.is_standard else []
        is_product = node.is_standard and node.op_type in PRODUCTS and bool(facts.varying(node))
        if is_product and all(is_dequantised(model, operand) for operand in node.inputs[:2]):
            products.add(node.index)
        makers = [_maker(facts, name) for name in values if not is_dequantised(model, name)]
        joins = node.op_type in _POOLS or anchor_kind(node.op_type) is None
        if values and all(joins and (maker in fed or maker in products) for maker in makers):
            rule = node_rule(model, node)
            fed.update([node.index] if rule.inputs and rule.outputs else [])
    # Of that, what is quantised again, from the last node to the first.
    for node in reversed(nodes):
        readers = [(name, reader) for name in node.outputs if name for reader in facts.readers(name)]
        ends = any(
            r.index in inside or (_is(r, "QuantizeLinear") and facts.root(r.inputs[0]) == facts.root(name))
            for name, r in readers
        )
        if node.index in products or (node.index in fed and ends):
            inside.add(node.index)
    for index in sorted(products):
        layer = _layer(facts, nodes[index], (), {})
        inside.update(() if layer is None else layer.nodes)
    # What is connected is one part.
    parts: dict[int, set[int]] = {}
    part_of: dict[int, int] = {}
    for index in sorted(inside):
        joined = {part_of[maker] for name in nodes[index].inputs if (maker := _maker(facts, name)) in part_of}
        members = {index}.union(*(parts.pop(part) for part in joined))
        first = min(joined, default=index)
        parts[first] = members
        part_of.update(dict.fromkeys(members, first))
    return tuple(
        Pattern(QUANTISED, min(part & products or part), tuple(sorted(part)), "quantised part")
        for part in parts.values()
    )


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


def _is(node: Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in STANDARD_DOMAINS | {"com.microsoft"}


def _maker(facts: Facts, tensor: str) -> int:
    """The node that computes a value, static or not; -1 where none does."""
    return facts.model.producer.get(facts.root(tensor), -1)
