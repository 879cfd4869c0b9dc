"""Nodes whose values leave FP16's range, set apart from their groups: the rest of these may then be FP16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from mptune.graph.grouping.groups import LayerGroup, find_units, structural_hash
from mptune.graph.loading.model import Model
from mptune.graph.ops import HEAVY, operator

KIND = "range"
"""Of the groups of nodes that are set apart."""
SUFFIX = "-fp32"
"""Ends their ids."""
_REASON = "its values exceed FP16's 65504 on the calibration data"


def find_apart(model: Model, groups: Sequence[LayerGroup], beyond: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """The nodes to set apart: those that hold values beyond FP16, with the indivisible patterns around them.

    Of groups in which a heavy operator is left: elsewhere the Casts would cost more than they free.

    Args:
        beyond: group id -> the nodes of the group that compute or read such values.
    """
    around = {name: unit.nodes for unit, _ in find_units(model) for name in unit.nodes}
    kinds = {node.name: operator(node.op_type).kind for node in model.nodes}
    names: list[str] = []
    for group in groups:
        apart = {name for node in beyond.get(group.id, ()) for name in around[node]}
        if any(kinds[name] in HEAVY for name in group.nodes if name not in apart):
            names += [name for name in group.nodes if name in apart]
    return tuple(names)


def set_apart(model: Model, groups: Sequence[LayerGroup], names: Collection[str]) -> tuple[LayerGroup, ...]:
    """The groups, with nodes of them in groups of their own that are FP32 under any plan."""
    nodes = {node.name: node for node in model.nodes}

    def part(group: LayerGroup, members: tuple[str, ...]) -> LayerGroup:
        own = [nodes[name] for name in members]
        ops = dict(Counter(node.op_type for node in own))
        return replace(group, nodes=members, ops=ops, pattern=structural_hash(model, own))

    def parts(group: LayerGroup) -> Iterator[LayerGroup]:
        apart = tuple(name for name in group.nodes if name in names)
        if not apart:
            yield group
            return
        yield part(group, tuple(name for name in group.nodes if name not in names))
        fp32 = replace(group, id=group.id + SUFFIX, name=f"{group.name} in FP32", kind=KIND, pinned=_REASON)
        yield part(fp32, apart)

    return tuple(part for group in groups for part in parts(group))
