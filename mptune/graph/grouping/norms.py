"""Decomposed norms (LayerNorm, RMSNorm, instance, group, L2) and gated activations (GELU, SiLU, Mish, hard swish)."""

from __future__ import annotations

from dataclasses import dataclass

from mptune.graph.facts import Facts
from mptune.graph.loading.model import Node
from mptune.graph.ops import ARITHMETIC, GUARDS, MEANS, VIEWS

_WITHOUT_AFFINE = frozenset({"InstanceNormalization", "MeanVarianceNormalization", "LpNormalization"})
"""Operators that exporters use for norms whose scale and shift follow as nodes of their own."""

_MAX_VIEWS = 3


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


def find_norm(facts: Facts, root: Node) -> Pattern | None:
    """The norm whose square root (or L2 reduction, or norm operator without scale) is ``root``."""
    if root.op_type in _WITHOUT_AFFINE:
        tail = affine_tail(facts, root)
        nodes = tuple(sorted({root.index} | tail))
        return Pattern("norm", nodes[0], nodes, f"{root.op_type} with its scale and shift") if tail else None
    if not facts.varying(root):
        return None
    if root.op_type == "ReduceL2":
        return _put_together(facts, root, {root.index}, [root.inputs[0]], "L2 norm written out", root.outputs[0])
    if root.op_type != "Sqrt" and not (root.op_type == "Pow" and facts.number(root.inputs[1]) in (0.5, -0.5)):
        return None
    inside, value = _guarded(facts, root)
    # The mean of squares: of the value itself, of the centred value, or less the squared mean.
    below = facts.producer(value)
    difference = below if below is not None and below.op_type == "Sub" else None
    mean_of_squares = _mean_of_squares(facts, value if difference is None else difference.inputs[0])
    if mean_of_squares is None:
        return None
    members, squared, squares = mean_of_squares
    inside |= members
    source, mean = squared, ""
    if difference is not None:
        square = facts.producer(difference.inputs[1])
        mean = _squared(facts, square)
        if square is None or not mean:
            return None
        inside |= {difference.index, square.index}
    else:
        centring = facts.producer(squared)
        if centring is not None and centring.op_type == "Sub":
            source, mean = facts.root(centring.inputs[0]), facts.root(centring.inputs[1])
    means = _mean_of(facts, mean, source) if mean else None
    if means is None:
        if difference is not None:
            return None
        return _put_together(facts, root, inside, [squared], "RMSNorm written out", squares)
    family = [squared, source, mean]
    for node in facts.readers(mean):  # TensorFlow centres a second time for the numerator
        if node.op_type == "Sub" and facts.root(node.inputs[0]) == source:
            inside.add(node.index)
            family.append(node.outputs[0])
    return _put_together(facts, root, inside | means, family, "LayerNorm written out", squares)


def _guarded(facts: Facts, root: Node) -> tuple[set[int], str]:
    """Step from the root back over eps and a division by the count: the nodes passed, and the value before them."""
    inside, value = {root.index}, root.inputs[0]
    for wanted in (GUARDS, frozenset({"Div", "Mul"}), VIEWS):
        node = facts.producer(value)
        if node is not None and node.op_type in wanted and len(facts.varying(node)) == 1 and len(node.inputs) > 1:
            inside.add(node.index)
            value = facts.varying(node)[0]
    return inside, value


def _squared(facts: Facts, node: Node | None) -> str:
    """What a node squares; "" where it does not."""
    if node is None:
        return ""
    if node.op_type == "Mul" and facts.root(node.inputs[0]) == facts.root(node.inputs[1]):
        return facts.root(node.inputs[0])
    if node.op_type == "Pow" and facts.number(node.inputs[1]) == 2.0:
        return facts.root(node.inputs[0])
    return ""


def _mean_of_squares(facts: Facts, value: str) -> tuple[set[int], str, str] | None:
    """The nodes of a mean (or sum) of squares, what is squared, and the value that holds the squares."""
    mean = facts.producer(value)
    if mean is None:
        return None
    if mean.op_type == "ReduceSumSquare":
        return {mean.index}, facts.root(mean.inputs[0]), mean.outputs[0]
    square = facts.producer(mean.inputs[0]) if mean.op_type in MEANS else None
    squared = _squared(facts, square)
    if square is None or not squared:
        return None
    return {mean.index, square.index}, squared, square.outputs[0]


def _mean_of(facts: Facts, tensor: str, source: str) -> set[int] | None:
    """The nodes that make ``tensor`` the mean of ``source``; None where it is not."""
    node = facts.producer(tensor)
    passed: set[int] = set()
    if node is not None and node.op_type in ("Div", "Mul") and len(facts.varying(node)) == 1:
        passed.add(node.index)
        node = facts.producer(facts.varying(node)[0])
    if node is None or node.op_type not in MEANS or facts.root(node.inputs[0]) != source:
        return None
    return passed | {node.index}


def _put_together(
    facts: Facts, root: Node, inside: set[int], family: list[str], name: str, squares: str
) -> Pattern | None:
    """Add the division by the root, the scale and the shift; None where nothing is divided.

    Args:
        root: computes the denominator.
        family: the value that is normalised, under each of its forms: as it is, centred, its mean.
        squares: see ``Pattern``.
    """
    inside = set(inside)
    denominators, normalised = {root.outputs[0]}, set[str]()
    pending = facts.readers(root.outputs[0])
    while pending:
        node = pending.pop()
        if node.index in inside or not node.outputs:
            continue
        state = _state(facts, node, denominators, normalised, family)
        if state is None:
            continue
        inside.add(node.index)
        (denominators if state == "denominator" else normalised).add(node.outputs[0])
        pending += facts.readers(node.outputs[0])
    if not normalised:
        return None
    for tensor in sorted(normalised):
        maker = facts.producer(tensor)
        if maker is not None and not any(r.index in inside for r in facts.readers(tensor)):
            inside |= affine_tail(facts, maker)
    return Pattern("norm", min(inside), tuple(sorted(inside)), name, squares)


def _state(facts: Facts, node: Node, denominators: set[str], normalised: set[str], family: list[str]) -> str | None:
    """What a reader computes from the denominator: another denominator, the normalised value, or None for neither."""
    operands = [facts.root(i) for i in node.inputs if i]
    kinds = [
        "static" if facts.is_static(t) else "out" if t in normalised else "den" if t in denominators
        else "x" if t in family else "?"
        for t in operands
    ]  # fmt: skip
    if "?" in kinds:
        # The shape input of an Expand is computed too, and has no precision.
        kinds = [k for k, t in zip(kinds, operands, strict=True) if k != "?" or facts.model.info(t).is_float32]
        if "?" in kinds or node.op_type not in VIEWS:
            return None
    if "out" in kinds:
        closes = node.op_type in ("Add", "Sub") and ("static" not in kinds or kinds[0] == "static")
        return "normalised" if closes and "x" not in kinds and "den" not in kinds else None
    if "den" not in kinds:
        return None
    if "x" in kinds:
        return "normalised" if node.op_type in ("Div", "Mul") else None
    allowed = {"Reciprocal", "Div", "Mul", "Neg", "Pow", *GUARDS, *VIEWS}
    return "denominator" if node.op_type in allowed else None


def affine_tail(facts: Facts, node: Node) -> set[int]:
    """The constant scale and shift after a norm, with the views on the way to them."""
    inside: set[int] = set()
    passed: set[int] = set()
    wanted = ["Mul", "Add"]
    at = node
    while wanted:
        reader = facts.only_reader(at)
        if reader is None or reader.index in inside:
            break
        if reader.op_type in VIEWS and len(passed) < _MAX_VIEWS and facts.root(reader.inputs[0]) == at.outputs[0]:
            passed.add(reader.index)
        elif reader.op_type in wanted and facts.is_static(facts.other(reader, at.outputs[0])):
            inside |= passed | {reader.index}
            passed = set()
            wanted = wanted[wanted.index(reader.op_type) + 1 :]
        else:
            break
        at = reader
    return inside


_NAMES = {
    "Erf": "GELU written out",
    "Tanh": "GELU (tanh) written out",
    "Sigmoid": "SiLU written out",
    "HardSigmoid": "hard swish written out",
    "Clip": "hard swish written out",
}

_MAX_STEPS = 6


def find_activation(facts: Facts, core: Node) -> Pattern | None:
    """The activation whose nonlinearity is ``core``."""
    name = _NAMES.get(core.op_type)
    if name is None or len(facts.varying(core)) != 1:
        return None
    sources = _sources(facts, core)
    if core.op_type == "Clip":  # x * clip(x) is no activation that has a name; x * clip(x + 3, 0, 6) is
        sources = {tensor: nodes for tensor, nodes in sources.items() if nodes}
    inside, at, halved = {core.index}, core, False
    for _ in range(_MAX_STEPS):
        reader = facts.only_reader(at)
        if reader is None or reader.op_type not in ARITHMETIC:
            return None
        other = facts.other(reader, at.outputs[0])
        if facts.is_scalar(other):
            halved |= reader.op_type in ("Mul", "Div")
            inside.add(reader.index)
            at = reader
            continue
        gate = _gate(facts, reader, other, sources)
        if gate is None:
            return None
        entry, scaled = gate
        inside |= sources[entry] | scaled | {reader.index}
        if "Softplus" in {facts.model.nodes[i].op_type for i in inside}:
            name = "Mish written out"
        last = facts.only_reader(reader)
        if not halved and not scaled and core.op_type != "Sigmoid" and last is not None:
            scales = last.op_type in ("Mul", "Div") and facts.is_scalar(facts.other(last, reader.outputs[0]))
            inside.update([last.index] if scales else ())
        return Pattern("activation", min(inside), tuple(sorted(inside)), name, entry=entry)
    return None


def _gate(
    facts: Facts, node: Node, other: str, sources: dict[str, frozenset[int]]
) -> tuple[str, frozenset[int]] | None:
    """What a product gates: x itself, or x scaled; with the node that scales it."""
    if node.op_type != "Mul" or not other:
        return None
    if facts.root(other) in sources:
        return facts.root(other), frozenset()
    maker = facts.producer(other)
    if maker is None or maker.op_type not in ("Mul", "Div") or len(facts.varying(maker)) != 1:
        return None
    source = facts.root(facts.varying(maker)[0])
    if source not in sources or facts.only_reader(maker) is not node:
        return None
    return source, frozenset({maker.index})


def _sources(facts: Facts, core: Node) -> dict[str, frozenset[int]]:
    """Every value that the nonlinearity may be a function of alone -> the nodes between it and the nonlinearity."""
    tensor = facts.root(facts.varying(core)[0])
    sources = {tensor: frozenset[int]()}
    passed: set[int] = set()
    for _ in range(_MAX_STEPS):
        node = facts.producer(tensor)
        if node is None:
            break
        varying = facts.varying(node)
        is_linear = node.op_type in ARITHMETIC and any(facts.is_scalar(i) for i in node.inputs)
        if len(varying) == 1 and (node.op_type == "Softplus" or is_linear):
            passed.add(node.index)
            tensor = facts.root(varying[0])
            sources[tensor] = frozenset(passed)
        elif len(varying) == 2 and node.op_type in ("Add", "Mul"):
            passed.add(node.index)
            for x, rest in ((varying[0], varying[1]), (varying[1], varying[0])):
                polynomial = _polynomial(facts, rest, facts.root(x))
                if polynomial is not None:
                    sources[facts.root(x)] = frozenset(passed | polynomial)
            break
        else:
            break
    return sources


def _polynomial(facts: Facts, tensor: str, x: str) -> frozenset[int] | None:
    """The nodes of a polynomial in x alone; None where the value is something else."""
    inside: set[int] = set()
    stack = [facts.root(tensor)]
    while stack:
        at = stack.pop()
        if at == x or facts.is_scalar(at):
            continue
        node = facts.producer(at)
        if node is None or node.op_type not in ARITHMETIC | {"Pow"} or len(inside) >= _MAX_STEPS:
            return None
        inside.add(node.index)
        stack += [facts.root(i) for i in node.inputs]
    return frozenset(inside)
