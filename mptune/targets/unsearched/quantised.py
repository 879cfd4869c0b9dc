"""The finding that a model holds quantised parts, and how much of it they are."""

from __future__ import annotations

from collections.abc import Mapping

from mptune.finding import CODES, Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.quantised import QUANTISED
from mptune.targets.costs import group_costs, ungrouped_cost
from mptune.targets.flops import Shape


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
    if not parts:
        return ()
    costs = group_costs(grouped, shapes)
    flops = sum(costs[group.id].flops for group in parts)
    total = sum(cost.flops for cost in costs.values()) + ungrouped_cost(grouped, shapes).flops
    share = flops / total if total else 0.0
    nodes = tuple(name for group in parts for name in group.nodes)
    rest = len(grouped.groups) - len(parts)
    what = "1 quantised part stays" if len(parts) == 1 else f"{len(parts)} quantised parts stay"
    return (
        Finding(
            code="quantised-parts",
            severity=CODES["quantised-parts"].severity,
            origin=origin,
            where=Where(nodes=nodes, groups=tuple(group.id for group in parts)),
            evidence={"parts": len(parts), "nodes": len(nodes), "flops_share": share, "other_groups": rest},
            text=f"{what} as the model has {'it' if len(parts) == 1 else 'them'}: {len(nodes)} nodes,"
            f" {share:.0%} of the FLOPs; of the other {rest} groups, those that are not pinned are searched",
            cure="to search these parts, too, give the model from before its quantisation",
        ),
    )
