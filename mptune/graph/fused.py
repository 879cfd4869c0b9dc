"""Nodes that an engine computes as one operator, with FP32 inside: norms above all that are written out in the model.

ONNX Runtime's kernel for such a norm takes the statistics in FP32 whatever the type of what it reads, and rounds once,
at its end. Which nodes these are the engine says (``mptune.engines.ort.fusions``). It holds in FP16: the same nodes in
BF16 are not always fused, so each of their steps is rounded there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mptune.graph.facts import facts_of
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm

FUSED_IN = Precision.FP16
"""The precision that an engine is asked about."""


@dataclass(frozen=True)
class FusedNodes(JsonForm):
    """What one operator of the engine computes.

    Attributes:
        nodes: names of the nodes, all of one group, in topological order; the last one computes the result.
    """

    nodes: tuple[str, ...]


def of_model(model: Model, fused: Iterable[FusedNodes]) -> tuple[FusedNodes, ...]:
    """Those whose nodes the model has: what a run stored may be another version's."""
    names = {node.name for node in model.nodes}
    return tuple(operator for operator in fused if operator.nodes and names.issuperset(operator.nodes))


def steps_inside(fused: Iterable[FusedNodes]) -> frozenset[str]:
    """The names of the nodes whose results stay inside, in FP32."""
    return frozenset(name for operator in fused for name in operator.nodes[:-1])


def values_inside(model: Model, fused: Iterable[FusedNodes]) -> frozenset[str]:
    """The values that FP16 does not hold: results of the steps inside, and their constants of one element.

    A constant that another node reads is not among them.
    """
    names, facts = steps_inside(fused), facts_of(model)
    inside = [node for node in model.nodes if node.name in names]
    scalars = {i for node in inside for i in node.inputs if i and facts.is_scalar(i)}
    constants = {name for name in scalars if all(reader.name in names for reader in facts.readers(name))}
    return frozenset(constants.union(out for node in inside for out in node.outputs if out))
