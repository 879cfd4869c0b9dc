"""What a toolchain works on: the model with its layer groups, its weight bank and the paths of the run's files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mptune.engines.base import Workspace
from mptune.graph.facts import DependentOutput, facts_of
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup
from mptune.graph.loading.model import Model
from mptune.graph.plan import DEFAULT_PRECISIONS

if TYPE_CHECKING:
    from mptune.graph.writing.rewrite import Rewriter
    from mptune.graph.writing.weights import WeightBank


@dataclass(frozen=True, eq=False)
class Workload:
    """The model that is tuned, and where its files lie."""

    grouped: GroupedModel
    workspace: Workspace
    precisions: tuple[str, ...] = DEFAULT_PRECISIONS

    @property
    def model(self) -> Model:
        """The user's model."""
        return self.grouped.model

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Its layer groups, in topological order."""
        return self.grouped.groups

    @cached_property
    def dependent_outputs(self) -> tuple[DependentOutput, ...]:
        """The model's outputs whose shape depends on values."""
        return facts_of(self.model).dependent_outputs

    @cached_property
    def bank(self) -> WeightBank:
        """Its weights in each of its precisions, written to the workspace when first asked for."""
        from mptune.graph.writing.weights import WeightBank

        return WeightBank.write(self.model, self.workspace.weights_dir, precisions=self.precisions)

    @cached_property
    def rewriter(self) -> Rewriter:
        """Writes the typed models of plans beside the weight bank; made when first asked for."""
        from mptune.graph.writing.rewrite import Rewriter

        return Rewriter(self.grouped, self.bank)
