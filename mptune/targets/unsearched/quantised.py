"""The finding that a model holds quantised parts, and how much of it they are."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.finding import Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.patterns import INTEGER_PRODUCTS, QUANTISED
from mptune.graph.loading.model import Node
from mptune.graph.op_rules import is_quantised
from mptune.targets.costs import Shape, ShapeTable, group_costs, node_flops, ungrouped_cost

_ON_INTEGERS = INTEGER_PRODUCTS | {"QLinearConv", "QLinearMatMul"}


def quantised_findings(
    grouped: GroupedModel, shapes: Mapping[str, Shape], origin: FindingOrigin
) -> tuple[Finding, ...]:
    """The finding that quantised parts stay as they are; none where the model has none.

    Args:
        grouped: the model and its layer groups.
        shapes: as of ``group_costs``.
        origin: what looked.
    """
    parts = [group for group in grouped.groups if group.kind == QUANTISED]
    operators = [n for n in grouped.model.nodes if n.name not in grouped.owners and _computes_in_integers(n)]
    if not parts and not operators:
        return ()
    costs = group_costs(grouped, shapes)
    flops = sum(costs[group.id].flops for group in parts)
    total = sum(cost.flops for cost in costs.values()) + ungrouped_cost(grouped, shapes).flops
    table = ShapeTable(grouped.model, shapes)
    flops += sum(node_flops(node, table)[0] for node in operators)
    share = flops / total if total else 0.0
    nodes = tuple(name for group in parts for name in group.nodes)
    rest = len(grouped.groups) - len(parts)
    return (
        Finding.of(
            "quantised-parts",
            origin,
            Where(nodes=nodes or tuple(n.name for n in operators), groups=tuple(group.id for group in parts)),
            {
                "parts": len(parts),
                "nodes": len(nodes),
                "operators": len(operators),
                "flops_share": share,
                "other_groups": rest,
            },
            is_both=bool(parts and operators),
            together=len(parts) + len(operators),
            is_whole=not rest,
        ),
    )


def _computes_in_integers(node: Node) -> bool:
    """Whether an operator takes quantised values for its operands."""
    if node.op_type.endswith("QuantizeLinear") or node.op_type == "DequantizeLinear":
        return False
    return is_quantised(node) or (node.is_standard and node.op_type in _ON_INTEGERS)
