"""Decomposed self-gated activations: GELU (erf and tanh), SiLU, Mish, hard swish.

All are ``x * f(x)``, where f is a nonlinearity between scalings and shifts. Hendrycks and Gimpel, arXiv 1606.08415
(GELU); Elfwing et al., arXiv 1702.03118 (SiLU); Misra, arXiv 1908.08681 (Mish); Howard et al., arXiv 1905.02244.
"""

from __future__ import annotations

from dataclasses import dataclass

from mptune.graph.grouping.lookup import Lookup
from mptune.graph.loading.model import Node

_NAMES = {
    "Erf": "GELU written out",
    "Tanh": "GELU (tanh) written out",
    "Sigmoid": "SiLU written out",
    "HardSigmoid": "hard swish written out",
    "Clip": "hard swish written out",
}
_LINEAR = frozenset({"Mul", "Div", "Add", "Sub"})
_MAX_STEPS = 6


@dataclass(frozen=True)
class Activation:
    """A decomposed activation.

    Attributes:
        entry: the value that it is computed from.
    """

    name: str
    nodes: frozenset[int]
    entry: str


def find_activation(look: Lookup, core: Node) -> Activation | None:
    """The activation whose nonlinearity is ``core``."""
    name = _NAMES.get(core.op_type)
    if name is None or len(look.varying(core)) != 1:
        return None
    sources = _sources(look, core)
    if core.op_type == "Clip":  # x * clip(x) is no activation that has a name; x * clip(x + 3, 0, 6) is
        sources = {tensor: nodes for tensor, nodes in sources.items() if nodes}
    inside, at, halved = {core.index}, core, False
    for _ in range(_MAX_STEPS):
        reader = look.only_reader(at)
        if reader is None or reader.op_type not in _LINEAR:
            return None
        other = look.other(reader, at.outputs[0])
        if look.is_scalar(other):
            halved |= reader.op_type in ("Mul", "Div")
            inside.add(reader.index)
            at = reader
            continue
        gate = _gate(look, reader, other, sources)
        if gate is None:
            return None
        entry, scaled = gate
        inside |= sources[entry] | scaled | {reader.index}
        if "Softplus" in {look.model.nodes[i].op_type for i in inside}:
            name = "Mish written out"
        last = look.only_reader(reader)
        if not halved and not scaled and core.op_type != "Sigmoid" and last is not None and _scales(look, last, reader):
            inside.add(last.index)
        return Activation(name, frozenset(inside), entry)
    return None


def _scales(look: Lookup, node: Node, scaled: Node) -> bool:
    return node.op_type in ("Mul", "Div") and look.is_scalar(look.other(node, scaled.outputs[0]))


def _gate(
    look: Lookup, node: Node, other: str, sources: dict[str, frozenset[int]]
) -> tuple[str, frozenset[int]] | None:
    """What a product gates: x itself, or x scaled; with the node that scales it."""
    if node.op_type != "Mul" or not other:
        return None
    if look.root(other) in sources:
        return look.root(other), frozenset()
    maker = look.producer(other)
    if maker is None or maker.op_type not in ("Mul", "Div") or len(look.varying(maker)) != 1:
        return None
    source = look.root(look.varying(maker)[0])
    if source not in sources or look.only_reader(maker) is not node:
        return None
    return source, frozenset({maker.index})


def _sources(look: Lookup, core: Node) -> dict[str, frozenset[int]]:
    """Every value that the nonlinearity may be a function of alone -> the nodes between it and the nonlinearity."""
    tensor = look.root(look.varying(core)[0])
    sources = {tensor: frozenset[int]()}
    passed: set[int] = set()
    for _ in range(_MAX_STEPS):
        node = look.producer(tensor)
        if node is None:
            break
        varying = look.varying(node)
        if len(varying) == 1 and (node.op_type == "Softplus" or _is_linear(look, node)):
            passed.add(node.index)
            tensor = look.root(varying[0])
            sources[tensor] = frozenset(passed)
        elif len(varying) == 2 and node.op_type in ("Add", "Mul"):
            passed.add(node.index)
            for x, rest in ((varying[0], varying[1]), (varying[1], varying[0])):
                polynomial = _polynomial(look, rest, look.root(x))
                if polynomial is not None:
                    sources[look.root(x)] = frozenset(passed | polynomial)
            break
        else:
            break
    return sources


def _is_linear(look: Lookup, node: Node) -> bool:
    return node.op_type in _LINEAR and any(look.is_scalar(i) for i in node.inputs)


def _polynomial(look: Lookup, tensor: str, x: str) -> frozenset[int] | None:
    """The nodes of a polynomial in x alone; None where the value is something else."""
    inside: set[int] = set()
    stack = [look.root(tensor)]
    while stack:
        at = stack.pop()
        if at == x or look.is_scalar(at):
            continue
        node = look.producer(at)
        if node is None or node.op_type not in _LINEAR | {"Pow"} or len(inside) >= _MAX_STEPS:
            return None
        inside.add(node.index)
        stack += [look.root(i) for i in node.inputs]
    return frozenset(inside)
