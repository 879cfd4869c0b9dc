"""Indivisible patterns, recognised by structure and not by names: nodes that must share a precision whatever the plan.

A decomposed norm split in two keeps ONNX Runtime's fusion from loading the model, a softmax apart from its scale
and mask overflows where neither does alone, and an activation apart from its convolution costs Casts for nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TypeGuard

from mptune.graph import ops
from mptune.graph.facts import Facts, casts_integers, facts_of, is_dequantised, node_rule
from mptune.graph.loading.model import Model, Node, once
from mptune.graph.loading.tensors import STANDARD_DOMAINS
from mptune.graph.ops import ARITHMETIC, BOUNDS, GLUE, GUARDS, MEANS, VIEWS

QUANTISED = "quantised"  # kind of pattern and of group
_MAX_STEPS = 64  # most nodes that a walk passes


@dataclass(frozen=True)
class Pattern:
    """Nodes that share a precision whatever the plan."""

    kind: str
    anchor: int  # index of the node that stands for it in the topological order
    nodes: tuple[int, ...]  # their indices, ascending
    name: str = ""  # of a norm, what it is
    squares: str = ""  # of a decomposed norm, the value that holds the squares (or their sum), which overflows first
    entry: str = ""  # of a decomposed activation, the value that it is computed from


@once
def find_patterns(model: Model) -> tuple[Pattern, ...]:
    """All patterns of several nodes and all quantised parts, without overlap, in topological order of their anchors.

    Where two would share a node, quantised parts win over norms, these over attention cores, these over activations,
    and these over layers (which take a whole activation in).
    """
    facts = facts_of(model)
    pattern_of: dict[int, Pattern] = {}

    def claim(pattern: Pattern | None) -> Pattern | None:
        """Take its nodes, and the aliases between them, unless one is taken; only a quantised part may be one node."""
        if pattern is None or not pattern_of.keys().isdisjoint(pattern.nodes):
            return None
        nodes = tuple(i for i in sorted(facts.with_aliases(pattern.nodes)) if i not in pattern_of)
        whole = replace(pattern, nodes=nodes)
        if len(nodes) > 1 or pattern.kind == QUANTISED:
            pattern_of.update(dict.fromkeys(nodes, whole))
        return whole

    cores = (find(facts, node) for find in (_norm, _attention) for node in model.nodes)
    for pattern in (*_quantised_parts(facts), *cores):
        claim(pattern)
    activations = {a.entry: a for node in model.nodes if (a := claim(activation(facts, node))) is not None}
    for node in model.nodes:
        layer = None if node.index in pattern_of else _layer(facts, node, pattern_of, activations)
        for index in () if layer is None else layer.nodes:  # an activation among them
            pattern_of.pop(index, None)
        claim(layer)
    return tuple(sorted({*pattern_of.values()}, key=lambda pattern: pattern.anchor))


def between(facts: Facts, start: str, end: str, operators: AbstractSet[str]) -> set[int] | None:
    """The nodes that compute ``end`` from ``start`` alone, by some operators.

    Single numbers, and static integers such as axes, may be read besides. None where anything else is, where another
    operator stands in between, or where there are very many nodes.
    """
    inside, waiting = set[int](), [facts.root(end)]
    while waiting:
        value = waiting.pop()
        is_fixed = facts.is_static(value) and (facts.is_scalar(value) or not facts.model.info(value).is_float32)
        if value == start or is_fixed:
            continue
        node = facts.producer(value)
        if node is None or node.op_type not in operators or len(inside) >= _MAX_STEPS:
            return None
        if node.index not in inside:
            inside.add(node.index)
            waiting += [facts.root(i) for i in node.inputs if i]
    return inside


# -- norms --------------------------------------------------------------------------------------------------------

_WITHOUT_AFFINE = frozenset({"InstanceNormalization", "MeanVarianceNormalization", "LpNormalization"})
"""Operators that exporters use for norms whose scale and shift follow as nodes of their own."""

_PASSED = GUARDS | VIEWS | MEANS | {"Div", "Mul"}  # what stands between a root and the squares under it
_STATISTICS = ARITHMETIC | GUARDS | VIEWS | MEANS | {"Pow", "ReduceSumSquare", "Sqrt", "ReduceL2"}
"""What computes the root of a variance, or of a mean of squares."""

_STEPS: Mapping[AbstractSet[str], tuple[str, AbstractSet[str]]] = {
    frozenset({"value"}): ("value", {"Sub"}),  # a second centring, for the numerator
    frozenset({"denominator"}): ("denominator", {"Reciprocal", "Div", "Mul", "Neg", "Pow"} | GUARDS | VIEWS),
    frozenset({"value", "denominator"}): ("normalised", {"Div", "Mul"}),
    frozenset({"normalised"}): ("normalised", {"Add", "Sub"}),  # the products of TensorFlow's form
}
"""What a node of a norm reads besides constants -> what it computes from that, and by which operators."""


def _norm(facts: Facts, root: Node) -> Pattern | None:
    """The norm whose square root (or L2 reduction, or norm operator without scale) is ``root``.

    Its statistics, the division by the root, the scale and the shift; None without a division.
    """
    if root.op_type in _WITHOUT_AFFINE:
        tail = _affine_tail(facts, root)
        nodes = tuple(sorted({root.index} | tail))
        return Pattern("norm", nodes[0], nodes, f"{root.op_type} with its scale and shift") if tail else None
    is_root = root.op_type == "Sqrt" or (root.op_type == "Pow" and facts.number(root.inputs[1]) in (0.5, -0.5))
    if not facts.varying(root) or not (is_root or root.op_type == "ReduceL2"):
        return None
    # Back over the epsilon, the division by the count, views and the mean, to what is squared.
    node, has_mean = (facts.producer(root.inputs[0]) if is_root else root), False
    while node is not None and not _squared(facts, node):
        varying = facts.varying(node)
        if len(varying) != 1 or node.op_type not in _PASSED:
            return None
        has_mean |= node.op_type in MEANS
        node = facts.producer(varying[0])
    if node is None or not (has_mean or node.op_type in ops.SUMMING):
        return None
    # What is squared is a value less its mean, or a value as it is.
    source = _squared(facts, node)
    name = "RMSNorm written out" if is_root else "L2 norm written out"
    kinds, centring, waiting = {source: "value"}, facts.producer(source), facts.readers(root.outputs[0])
    if is_root and centring is not None and centring.op_type == "Sub":
        whole, mean = (facts.root(i) for i in centring.inputs)
        means = between(facts, whole, mean, MEANS | {"Div", "Mul"}) or ()
        if any(facts.model.nodes[i].op_type in MEANS for i in means):
            name, source, waiting = "LayerNorm written out", whole, facts.readers(mean) + waiting
            kinds |= {whole: "value", mean: "value"}
    inside = between(facts, source, root.outputs[0], _STATISTICS)
    if inside is None:
        return None
    # On to the division by the root, the products and the shift that TensorFlow writes, and the scale and shift.
    kinds[root.outputs[0]], normalised = "denominator", list[Node]()
    while waiting:
        at = waiting.pop()
        operands = at.inputs[:1] if at.op_type in VIEWS else at.inputs  # a view's shape has no precision
        read = ["static" if facts.is_static(i) else kinds.get(facts.root(i), "other") for i in operands if i]
        kind, operators = _STEPS.get(frozenset(read) - {"static"}, ("", ()))
        is_shifted = kind != "denominator" and "static" in read[1:]  # by a constant that is no part of the division
        if at.op_type in operators and not is_shifted and at.index not in inside:
            inside.add(at.index)
            kinds[at.outputs[0]] = kind
            waiting += facts.readers(at.outputs[0])
            normalised += [at] if kind == "normalised" else []
    for last in normalised:
        if not any(reader.index in inside for reader in facts.readers(last.outputs[0])):
            inside |= _affine_tail(facts, last)
    return Pattern("norm", min(inside), tuple(sorted(inside)), name, node.outputs[0]) if normalised else None


def _squared(facts: Facts, node: Node) -> str:
    """The value whose squares, or their sum or its root, a node computes; "" where it does nothing like it."""
    is_square = node.op_type == "Pow" and facts.number(node.inputs[1]) == 2.0
    is_product = node.op_type == "Mul" and facts.root(node.inputs[0]) == facts.root(node.inputs[1])
    squares = is_square or is_product or node.op_type in ("ReduceSumSquare", "ReduceL2")
    return facts.root(node.inputs[0]) if squares else ""


def _affine_tail(facts: Facts, at: Node) -> set[int]:
    """The constant scale and shift after a norm, with the views on the way to them."""
    inside, passed, wanted = set[int](), set[int](), ["Mul", "Add"]
    while wanted and (reader := facts.only_reader(at)) is not None:
        passed.add(reader.index)
        if reader.op_type in wanted and facts.is_static(facts.other(reader, at.outputs[0])):
            inside |= passed
            wanted = wanted[wanted.index(reader.op_type) + 1 :]
        elif reader.op_type not in VIEWS:
            break
        at = reader
    return inside


# -- activations --------------------------------------------------------------------------------------------------

_CORES = frozenset({"Erf", "Tanh", "Sigmoid", "HardSigmoid", "Clip"})
"""The nonlinearities of GELU, its forms by tanh and sigmoid, SiLU, Mish and hard swish."""


def activation(facts: Facts, core: Node) -> Pattern | None:
    """The activation whose nonlinearity is ``core``: what it is computed from, times a function of that alone."""
    if core.op_type not in _CORES or len(facts.varying(core)) != 1:
        return None
    # Over sums and products with single numbers, to the product that it gates.
    at, gate, is_halved = core, facts.only_reader(core), False
    while gate is not None and gate.op_type in ARITHMETIC and facts.is_scalar(facts.other(gate, at.outputs[0])):
        is_halved |= gate.op_type in ("Mul", "Div")
        at, gate = gate, facts.only_reader(gate)
    other = "" if gate is None else facts.other(gate, at.outputs[0])
    if gate is None or gate.op_type != "Mul" or not other:
        return None
    # It gates x itself, or x scaled by a number. And x * clip(x) is no activation that has a name.
    operators = ARITHMETIC | {"Pow", "Softplus", core.op_type}
    entry, scale = facts.root(other), facts.producer(other)
    inside = between(facts, entry, gate.outputs[0], operators)
    is_scaled = inside is None and scale is not None and scale.op_type in ("Mul", "Div")
    if is_scaled and scale is not None and len(facts.varying(scale)) == 1 and facts.only_reader(scale) is gate:
        entry = facts.root(facts.varying(scale)[0])
        inside = between(facts, entry, gate.outputs[0], operators)
    if inside is None or (core.op_type == "Clip" and facts.root(facts.varying(core)[0]) == entry):
        return None
    last = facts.only_reader(gate)
    if not is_halved and not is_scaled and core.op_type != "Sigmoid" and last is not None:
        scales = last.op_type in ("Mul", "Div") and facts.is_scalar(facts.other(last, gate.outputs[0]))
        inside.update([last.index] if scales else ())
    return Pattern("activation", min(inside), tuple(sorted(inside)), entry=entry)


# -- layers: a convolution or product with its bias, batch norm and activation ------------------------------------

_MAX_PER_CHANNEL = 4  # the most nodes of a decomposed batch norm: minus mean, divided by deviation, scaled, shifted


def _layer(facts: Facts, start: Node, claimed: Container[int], activations: Mapping[str, Pattern]) -> Pattern | None:
    """The layer that begins at a convolution or product; None where nothing is fused onto it.

    ``activations`` are the decomposed ones, by the value that they are computed from.
    """
    is_conv, is_product = start.op_type in ops.CONVOLUTIONS, start.op_type in ops.MATRIX_PRODUCTS
    if not is_conv and not (is_product and any(facts.is_static(i) for i in start.inputs[:2])):
        return None
    inside, at, budget = {start.index}, start, _MAX_PER_CHANNEL if is_conv else 1
    while True:
        result = at.outputs[0]
        activation, reader = activations.get(result), facts.only_reader(at)
        if activation is not None and all(r.index in activation.nodes for r in facts.readers(result)):
            inside.update(() if facts.is_output(result) else activation.nodes)
        if reader is None or reader.index in claimed:
            break
        other = facts.other(reader, result)
        is_first = facts.root(reader.inputs[0]) == facts.root(result)
        is_vector = reader.op_type in (ARITHMETIC if is_conv else {"Add"}) and bool(other) and facts.is_vector(other)
        is_norm = reader.op_type == "BatchNormalization" and is_first
        is_step = is_norm or (budget > 0 and is_vector and (is_first or reader.op_type in ("Add", "Mul")))
        if is_step or (reader.op_type in ops.ACTIVATIONS and len(facts.varying(reader)) == 1):
            inside.add(reader.index)
        if not is_step:
            break
        budget = 0 if is_norm else budget - 1
        at = reader
    kind = "conv" if is_conv else "matmul"
    return Pattern(kind, start.index, tuple(sorted(inside))) if len(inside) > 1 else None


# -- attention cores ----------------------------------------------------------------------------------------------

_SCORE_OPS = ARITHMETIC | BOUNDS | GLUE | {"Where", "Tanh"}
"""What stands between the score product and the softmax: scale, mask, position bias, soft cap, views."""


def _attention(facts: Facts, node: Node) -> Pattern | None:
    """The attention core around a softmax, or the softmax with its scale where it is in none."""
    if node.op_type not in ops.SOFTMAX - {"LogSoftmax"}:
        return None
    # Back to the products of activations that the scores come from. The way through a mask or a position bias ends at
    # an input, a constant or a weighted layer and is left out: it may be FP32 where the core is FP16.
    products: dict[int, Node] = {}
    leads: dict[int, bool] = {}

    def visit(tensor: str) -> bool:
        maker = facts.producer(tensor)
        if maker is None or maker.index in leads:
            return maker is not None and leads[maker.index]
        leads[maker.index] = False
        if maker.op_type in ops.MATRIX_PRODUCTS and not any(facts.is_static(i) for i in maker.inputs[:2]):
            products[maker.index] = maker
            leads[maker.index] = True
        elif maker.op_type in _SCORE_OPS and len(leads) <= _MAX_STEPS:
            for operand in facts.varying(maker):  # all of them: scores may be a sum of two products
                leads[maker.index] |= facts.model.info(operand).is_float32 and visit(operand)
        return leads[maker.index]

    visit(node.inputs[0])
    inside = {node.index, *(i for i, is_on_way in leads.items() if is_on_way)}
    # On to the product with the values. Weights that also leave the model, or are averaged for it, are read by other
    # nodes as well: these stay outside. A softmax guarded against rows without any key (IsNaN, Where) is passed.
    paths: list[tuple[Node, set[int]]] = [(node, set())] if products else []
    for at, passed in paths:  # grows
        readers = facts.readers(at.outputs[0]) if len(paths) <= _MAX_STEPS else []
        guards = {reader.index for reader in readers if reader.op_type == "IsNaN"}
        for reader in readers:
            if reader.op_type in ops.MATRIX_PRODUCTS:
                inside |= passed | {reader.index}
                # torch scales queries and keys by the square root before their product.
                makers = (facts.producer(operand) for product in products.values() for operand in product.inputs)
                inside.update(maker.index for maker in makers if maker is not None and _is_scaling(facts, maker))
                return Pattern("attention", node.index, tuple(sorted(inside)))
            if reader.op_type in GLUE or (reader.op_type == "Where" and guards):
                paths.append((reader, passed | guards | {reader.index}))
    inside -= products.keys()
    scaling = None if products else facts.producer(node.inputs[0])
    while scaling is not None and _is_scaling(facts, scaling):
        inside.add(scaling.index)
        varying = [i for i in facts.varying(scaling) if not facts.is_single(i)]
        scaling = facts.producer(varying[0]) if len(varying) == 1 else None
    return Pattern("softmax", node.index, tuple(sorted(inside)))


def _is_scaling(facts: Facts, node: Node) -> bool:
    """Whether a node multiplies or divides by a single number, constant or computed from shapes."""
    return node.op_type in ("Mul", "Div") and any(facts.is_scalar(i) or facts.is_single(i) for i in node.inputs)


# -- quantised parts ----------------------------------------------------------------------------------------------

_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool"})


def _quantised_parts(facts: Facts) -> list[Pattern]:
    """The quantised parts of a model.

    A part holds products whose both operands are dequantised, with the bias, batch norm and activation that are fused
    onto them, and every other node that computes from dequantised values alone and whose result is quantised again:
    directly, or through further nodes that only move, pool or combine values element by element. Where activations are
    quantised as they come (dynamic quantisation), what makes FP32 of a product's INT32 sums, past FP16's range, is a
    part: the Cast, the product with the scale, and the scale's own.
    """
    model, nodes, inside = facts.model, facts.model.nodes, set[int]()

    def maker(tensor: str) -> Node | None:
        """The node that computes a value, static or not."""
        index = model.producer.get(facts.root(tensor))
        return None if index is None else nodes[index]

    products, fed = set[int](), set[int]()
    for node in nodes:
        if casts_integers(model, node) and _is(maker(node.inputs[0]), *ops.INTEGER_PRODUCTS):  # dynamic quantisation
            scaled = [reader for reader in facts.readers(node.outputs[0]) if _is(reader, "Mul")]
            inside.update(member.index for member in (node, *scaled))
            for scale in (maker(factor) for product in scaled for factor in product.inputs):
                if _is(scale, "Mul") and any(_is(maker(i), "DynamicQuantizeLinear") for i in scale.inputs):
                    inside.add(scale.index)
        # The products, and what computes from dequantised values alone, constants aside.
        values = [name for name in facts.varying(node) if model.info(name).is_float32] if node.is_standard else []
        makers = [maker(name) for name in values if not is_dequantised(model, name)]
        joins = not makers or node.op_type in _POOLS or ops.anchor_kind(node.op_type) is None
        is_fed = bool(values) and joins and all(source is not None and source.index in fed for source in makers)
        rule = node_rule(model, node)
        fed.update([node.index] if is_fed and rule.inputs and rule.outputs else [])
        if values and node.op_type in ops.PRODUCTS and all(is_dequantised(model, i) for i in node.inputs[:2]):
            products.add(node.index)
            fed.add(node.index)
    # Of that, back from what is quantised again.
    waiting = [node.inputs[0] for node in nodes if _is(node, "QuantizeLinear")]
    waiting += [name for index in inside | products for name in nodes[index].inputs]
    inside |= products
    while waiting:
        source = model.producer.get(waiting.pop(), -1)
        if source in fed and source not in inside:
            inside.add(source)
            waiting += nodes[source].inputs
    layers = [_layer(facts, nodes[index], (), {}) for index in products]
    inside.update(index for layer in layers if layer is not None for index in layer.nodes)
    # What is connected is one part.
    part_of: dict[int, frozenset[int]] = {}
    for index in sorted(inside):
        sources = [model.producer.get(facts.root(name), -1) for name in nodes[index].inputs]
        part = frozenset({index}).union(*(part_of.get(source, ()) for source in sources))
        part_of.update(dict.fromkeys(part, part))
    parts = sorted({*part_of.values()}, key=min)
    return [Pattern(QUANTISED, min(part & products or part), tuple(sorted(part))) for part in parts]


def _is(node: Node | None, *op_types: str) -> TypeGuard[Node]:
    return node is not None and node.op_type in op_types and node.domain in STANDARD_DOMAINS | {"com.microsoft"}
