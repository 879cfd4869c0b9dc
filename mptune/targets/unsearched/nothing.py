"""Whether a model holds anything whose precision can be chosen."""

from __future__ import annotations

from mptune.finding import Finding, FindingOrigin, Where
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import ANCHOR_KINDS
from mptune.graph.grouping.patterns import QUANTISED
from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import all_graphs
from mptune.graph.op_rules import is_quantised
from mptune.targets.unsearched import NOTHING


def nothing_to_tune(grouped: GroupedModel, origin: FindingOrigin) -> tuple[Finding, ...]:
    """The finding that a model has no group to tune, or none with a layer, and why; none where it has one."""
    nodes = grouped.model.nodes
    free = [group for group in grouped.groups if group.pinned is None]
    loops = [node for node in nodes if node.has_subgraph and _has_layer(node)]
    kind = ""
    if loops and not any(op in ANCHOR_KINDS for group in free for op in group.ops):
        kind = "subgraphs"
    elif free:
        return ()
    elif any(group.kind == QUANTISED for group in grouped.groups) or any(map(is_quantised, nodes)):
        kind = "quantised"
    return (
        Finding.of(
            NOTHING,
            origin,
            Where(nodes=tuple(node.name for node in loops) if kind == "subgraphs" else ()),
            {"free_groups": len(free)},
            kind=kind,
            operators=" and ".join(dict.fromkeys(node.op_type for node in loops)),
        ),
    )


def _has_layer(node: Node) -> bool:
    """Whether a graph inside a node holds an operator that would start a group."""
    graphs = (g for a in node.proto.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs))
    return any(inner.op_type in ANCHOR_KINDS for graph in graphs for each in all_graphs(graph) for inner in each.node)
