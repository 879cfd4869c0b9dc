"""Indivisible patterns, found by structure and not by names: nodes that must share a precision whatever the plan.

A decomposed norm split in two keeps ONNX Runtime's fusion from loading the model, a softmax apart from its scale
and mask overflows where neither does alone, and an activation apart from its convolution costs Casts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mptune.graph.grouping.activations import Activation, find_activation
from mptune.graph.grouping.attention import find_attention
from mptune.graph.grouping.layers import find_layer
from mptune.graph.grouping.lookup import Lookup
from mptune.graph.grouping.norms import find_norm
from mptune.graph.grouping.quantised import QUANTISED, find_quantised
from mptune.graph.loading.model import Model


@dataclass(frozen=True)
class Pattern:
    """One indivisible pattern.

    Attributes:
        anchor: index of the node that names it and stands for it in the topological order.
        squares: of a decomposed norm, the value that holds the squares; else "".
    """

    kind: str
    anchor: int
    nodes: tuple[int, ...]
    name: str
    squares: str = ""


def find_patterns(model: Model, look: Lookup | None = None) -> tuple[Pattern, ...]:
    """All patterns of several nodes and all quantised parts, without overlap, in topological order of their anchors.

    Where two would share a node, quantised parts win over norms, these over attention cores, these over activations,
    and these over layers (which take a whole activation in).
    """
    look = look or Lookup(model)
    claims = _Claims(look)
    for anchor, nodes in find_quantised(look):
        claims.add(QUANTISED, anchor, nodes, "quantised part", least=1)
    for node in model.nodes:
        norm = find_norm(look, node)
        if norm is not None:
            claims.add("norm", min(norm.nodes), norm.nodes, norm.name, norm.squares)
    for node in model.nodes:
        core = find_attention(look, node)
        if core is not None:
            claims.add(core.kind, core.anchor, core.nodes, core.name)
    activations: dict[str, Activation] = {}
    for node in model.nodes:
        activation = find_activation(look, node)
        if activation is not None and claims.are_free(activation.nodes):
            claims.add("activation", min(activation.nodes), activation.nodes, activation.name)
            activations[activation.entry] = activation
    in_activations = frozenset(i for a in activations.values() for i in a.nodes)
    for node in model.nodes:
        if node.index not in claims.taken:
            layer = find_layer(look, node, claims.taken, activations)
            if layer is not None:
                claims.release(layer.nodes & in_activations)
                claims.add(layer.kind, node.index, layer.nodes, layer.name)
    return tuple(sorted(claims.patterns, key=lambda pattern: pattern.anchor))


class _Claims:
    """The patterns found so far, and the nodes that belong to them."""

    def __init__(self, look: Lookup) -> None:
        self.taken: dict[int, Pattern] = {}
        self._look = look

    @property
    def patterns(self) -> set[Pattern]:
        return set(self.taken.values())

    def are_free(self, nodes: frozenset[int]) -> bool:
        return self.taken.keys().isdisjoint(nodes)

    def add(self, kind: str, anchor: int, nodes: frozenset[int], name: str, squares: str = "", least: int = 2) -> None:
        """Take the nodes, and the aliases between them, unless one is taken already or they are less than ``least``."""
        if not self.are_free(nodes):
            return
        whole = [i for i in sorted(self._look.with_aliases(nodes)) if i not in self.taken]
        if len(whole) >= least:
            pattern = Pattern(kind, anchor, tuple(whole), name, squares)
            self.taken.update(dict.fromkeys(whole, pattern))

    def release(self, nodes: frozenset[int]) -> None:
        """Give up the patterns that hold any of the nodes: a larger one takes them over."""
        for pattern in {self.taken[i] for i in nodes if i in self.taken}:
            for index in pattern.nodes:
                del self.taken[index]
