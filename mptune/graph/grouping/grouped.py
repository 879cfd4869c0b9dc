"""A model with its layer groups, and plans that name nodes instead of groups."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from mptune.errors import PlanError
from mptune.graph.facts import node_rule
from mptune.graph.grouping.groups import LayerGroup, find_units
from mptune.graph.grouping.patterns import QUANTISED
from mptune.graph.loading.model import Model, Node
from mptune.graph.ops import MOVEMENT
from mptune.graph.plan import Precision, PrecisionPlan


@dataclass(frozen=True, eq=False)
class GroupedModel:
    """A model and its layer groups, which always go together.

    ``written_from`` is the model whose nodes were written out as steps in this one; its constants are rescaled.
    """

    model: Model
    groups: tuple[LayerGroup, ...]
    written_from: GroupedModel | None = None

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """Node name -> id of its group; nodes without a precision are not in it."""
        return {node: group.id for group in self.groups for node in group.nodes}

    def in_one_group(self, nodes: Iterable[Node]) -> bool:
        """Whether all of these nodes (at least one) belong to the same group: then no plan puts a Cast between them."""
        groups = {self.owners.get(node.name) for node in nodes}
        return len(groups) == 1 and None not in groups

    def uniform(self, precision: Precision) -> PrecisionPlan:
        """The plan that gives every group the same precision."""
        return PrecisionPlan.uniform(self.model.sha256, (group.id for group in self.groups), precision)


@dataclass(frozen=True)
class NodesPlan:
    """A plan by nodes, as a plan of groups."""

    groups: tuple[LayerGroup, ...]
    plan: PrecisionPlan
    warnings: tuple[str, ...]


def plan_of_nodes(model: Model, wanted: Mapping[str, Precision], source: str = "the plan") -> NodesPlan:
    """Turn precisions of nodes into precisions of indivisible groups.

    A key is a node's name, a glob on names, or ``op:Softmax``; where several keys match a node, the last one counts.
    Nodes that no key matches are FP32, except that a view takes the precision of its input, and a bias, batch norm or
    activation that of its convolution or product. A pattern that would be split is FP32 as a whole.
    """
    units = find_units(model)
    unit_of = {name: k for k, (group, _) in enumerate(units) for name in group.nodes}
    nodes = {node.name: node for node in model.nodes}
    explicit: dict[str, Precision] = {}
    warnings = []
    for key, precision in wanted.items():
        prefix, _, op_type = key.partition(":")
        names = [n for n, node in nodes.items() if (node.op_type == op_type if prefix == "op" else fnmatchcase(n, key))]
        names = [key] if key in nodes else names  # names may hold brackets
        if not names:
            close = difflib.get_close_matches(key, nodes, 1)
            hint = f"did you mean {close[0]!r}?" if close else "`mptune inspect MODEL --json` lists the nodes"
            raise PlanError(f"{source}: {key!r} names no node of {model.path}", hint)
        explicit.update((name, precision) for name in names if name in unit_of)
        if precision is not Precision.FP32 and unit_of.keys().isdisjoint(names):
            reason = node_rule(model, nodes[names[0]]).fixed or "it computes nothing in FP32"
            warnings.append(f"{key!r} names only nodes that cannot be {precision.name}: {reason}")
    chosen: dict[str, Precision] = {}  # by node
    precisions: dict[str, Precision] = {}  # by group
    for group, pattern in units:
        asked = [explicit.get(name) for name in group.nodes]
        stated = {precision for precision in asked if precision is not None}
        reduced = [precision.name for precision in asked if precision not in (None, Precision.FP32)]
        first, precision = nodes[group.nodes[0]], Precision.FP32
        is_layer = pattern is not None and pattern.kind in ("conv", "matmul")
        if not stated and len(group.nodes) == 1 and first.op_type in MOVEMENT and first.inputs:
            maker = model.producer.get(first.inputs[0], -1)
            precision = chosen.get(model.nodes[maker].name, precision) if maker >= 0 else precision
        elif group.kind == QUANTISED and reduced:
            asks = f"{group.name} stays in FP32 although the plan asks for"
            warnings.append(f"{asks} {reduced[0]}: {group.pinned}")
        elif len(stated) == 1 and (is_layer or None not in asked or not reduced):
            (precision,) = stated
        elif stated:
            what = pattern.name if pattern is not None else group.kind
            warnings.append(
                f"{group.name} ({what}) is indivisible, and the plan has {len(reduced)} of its {len(group.nodes)} nodes"
                f" in {' or '.join(dict.fromkeys(reduced))}: it is FP32 as a whole"
            )
        precisions[group.id] = precision
        chosen.update(dict.fromkeys(group.nodes, precision))
    return NodesPlan(tuple(group for group, _ in units), PrecisionPlan(model.sha256, precisions), tuple(warnings))
