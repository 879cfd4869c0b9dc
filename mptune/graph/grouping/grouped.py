"""A model with its layer groups: what precision plans are plans of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan


@dataclass(frozen=True, eq=False)
class GroupedModel:
    """A model and its layer groups, which always go together.

    Attributes:
        model: the model.
        groups: all of its groups, in topological order.
    """

    model: Model
    groups: tuple[LayerGroup, ...]

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """Node name -> id of its group; nodes without a precision are not in it."""
        return {node: group.id for group in self.groups for node in group.nodes}

    def uniform(self, precision: Precision) -> PrecisionPlan:
        """The plan that gives every group the same precision."""
        return PrecisionPlan.uniform(self.model.sha256, (group.id for group in self.groups), precision)
