"""All nodes of each operator: how many, with a precision or without one, and what they compute."""

from __future__ import annotations

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.loading.value_dependent import shape_facts
from mptune.graph.op_rules import node_rule
from mptune.inspection.record import OperatorSummary
from mptune.targets.costs import VIEWS, is_folded
from mptune.targets.flops import ShapeTable, node_flops


def summarise_operators(grouped: GroupedModel, shapes: ShapeTable) -> tuple[OperatorSummary, ...]:
    """The operators of a model, by FLOPs, the most first; a ``Constant`` computes nothing and is none of them."""
    model = grouped.model
    folded = shape_facts(model).folded
    found: dict[str, OperatorSummary] = {}
    for node in model.nodes:
        if node.op_type == "Constant" and node.is_standard:
            continue
        name = node.op_type if node.is_standard else f"{node.domain}.{node.op_type}"
        before = found.get(name, OperatorSummary(name, 0, 0, 0.0, ""))
        fixed = before.fixed or ("" if node.name in grouped.owners else node_rule(model, node).fixed or "")
        is_free = node.has_subgraph or node.op_type in VIEWS or is_folded(node, folded)
        flops = 0.0 if is_free else node_flops(node, shapes)[0]
        here = node.name in grouped.owners
        found[name] = OperatorSummary(name, before.count + 1, before.grouped + here, before.flops + flops, fixed)
    return tuple(sorted(found.values(), key=lambda o: (-o.flops, -o.count, o.name)))
