"""Whether a model holds anything whose precision can be chosen."""

from __future__ import annotations

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.op_kinds import ANCHOR_KINDS
from mptune.graph.grouping.patterns import QUANTISED
from mptune.graph.loading.model import Node
from mptune.graph.loading.tensors import all_graphs
from mptune.graph.op_rules import is_quantised
from mptune.targets.unsearched import NOTHING


def nothing_to_tune(grouped: GroupedModel) -> tuple[str, ...]:
    """The warning that a model has no group to tune, or none with a layer, and why; none where it has one."""
    nodes = grouped.model.nodes
    free = [group for group in grouped.groups if group.pinned is None]
    loops = [node for node in nodes if node.has_subgraph and _has_layer(node)]
    if loops and not any(op in ANCHOR_KINDS for group in free for op in group.ops):
        operators = " and ".join(dict.fromkeys(node.op_type for node in loops))
        rest = f" but {len(free)} group{'s' * (len(free) > 1)} outside them" if free else ""
        return (f"the network lies in {operators} nodes; {NOTHING}{rest}",)
    if free:
        return ()
    if any(group.kind == QUANTISED for group in grouped.groups) or any(map(is_quantised, nodes)):
        return (f"the network is quantised already; {NOTHING}",)
    return (f"no layer group can have another precision; {NOTHING}",)


def _has_layer(node: Node) -> bool:
    """Whether a graph inside a node holds an operator that would start a group."""
    graphs = (g for a in node.proto.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs))
    return any(inner.op_type in ANCHOR_KINDS for graph in graphs for each in all_graphs(graph) for inner in each.node)
