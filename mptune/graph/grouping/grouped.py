"""A model with its layer groups: what precision plans are plans of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.loading.model import Model, Node
from mptune.graph.plan import Precision, PrecisionPlan


@dataclass(frozen=True, eq=False)
class GroupedModel:
    """A model and its layer groups, which always go together."""

    model: Model
    groups: tuple[LayerGroup, ...]

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
