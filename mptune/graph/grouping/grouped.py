"""A model with its layer groups, and plans that name nodes instead of groups."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from mptune.errors import PlanError
from mptune.graph.facts import node_rule
from mptune.graph.grouping.groups import LayerGroup, find_units
from mptune.graph.grouping.patterns import QUANTISED, Pattern
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
    explicit, warnings = _explicit(model, wanted, unit_of, source)
    chosen: list[Precision] = []
    nodes = {node.name: node for node in model.nodes}
    for k, (group, pattern) in enumerate(units):
        precision, warning = _of_unit(group, pattern, explicit)
        if warning:
            warnings.append(warning)
        if precision is None:
            viewed = _viewed(model, nodes, unit_of, group)
            precision = chosen[viewed] if viewed is not None and viewed < k else Precision.FP32
        chosen.append(precision)
    groups = tuple(group for group, _ in units)
    plan = PrecisionPlan(model.sha256, {g.id: p for g, p in zip(groups, chosen, strict=True)})
    return NodesPlan(groups, plan, tuple(warnings))


def _explicit(
    model: Model, wanted: Mapping[str, Precision], unit_of: Mapping[str, int], source: str
) -> tuple[dict[str, Precision], list[str]]:
    """Node name -> the precision that is asked for; and warnings about keys without effect."""
    explicit: dict[str, Precision] = {}
    warnings = []
    for key, precision in wanted.items():
        matching = _matching(model.nodes, key)
        if not matching:
            close = difflib.get_close_matches(key, [node.name for node in model.nodes], 1)
            hint = f"did you mean {close[0]!r}?" if close else "`mptune inspect MODEL --json` lists the nodes"
            raise PlanError(f"{source}: {key!r} names no node of {model.path}", hint)
        explicit.update((node.name, precision) for node in matching if node.name in unit_of)
        if precision is not Precision.FP32 and not any(node.name in unit_of for node in matching):
            reason = node_rule(model, matching[0]).fixed or "it computes nothing in FP32"
            warnings.append(f"{key!r} names only nodes that cannot be {precision.name}: {reason}")
    return explicit, warnings


def _matching(nodes: Sequence[Node], key: str) -> list[Node]:
    """The nodes that a key names: by exact name first, since names may hold brackets."""
    exact = [node for node in nodes if node.name == key]
    if exact:
        return exact
    prefix, _, rest = key.partition(":")
    if prefix == "op":
        return [node for node in nodes if node.op_type == rest]
    return [node for node in nodes if fnmatchcase(node.name, key)]


def _of_unit(
    group: LayerGroup, pattern: Pattern | None, explicit: Mapping[str, Precision]
) -> tuple[Precision | None, str]:
    """The precision of a group, None where no key matches it; and a warning where the plan would split it."""
    asked = [explicit.get(name) for name in group.nodes]
    stated = {precision for precision in asked if precision is not None}
    if not stated:
        return None, ""
    reduced = [precision.name for precision in asked if precision not in (None, Precision.FP32)]
    if group.kind == QUANTISED:
        warning = (
            f"{group.name} stays in FP32 although the plan asks for {reduced[0]}: {group.pinned}" if reduced else ""
        )
        return Precision.FP32, warning
    follows = pattern is not None and pattern.kind in ("conv", "matmul")
    if len(stated) == 1 and (follows or None not in asked or stated == {Precision.FP32}):
        return stated.pop(), ""
    what = pattern.name if pattern is not None else group.kind
    warning = (
        f"{group.name} ({what}) is indivisible, and the plan has {len(reduced)} of its {len(group.nodes)} nodes in"
        f" {' or '.join(dict.fromkeys(reduced))}:"
        " it is FP32 as a whole"
    )
    return Precision.FP32, warning


def _viewed(model: Model, nodes: Mapping[str, Node], unit_of: Mapping[str, int], group: LayerGroup) -> int | None:
    """The position of the group that computes the input of a view; None where the group is no view."""
    node = nodes[group.nodes[0]]
    if len(group.nodes) > 1 or node.op_type not in MOVEMENT or not node.inputs:
        return None
    producer = model.producer.get(node.inputs[0])
    return None if producer is None else unit_of.get(model.nodes[producer].name)
