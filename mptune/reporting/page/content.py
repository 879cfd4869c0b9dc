"""What a page shows, as records; ``document`` turns them into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mptune.data.run_outputs import RunOutputs
from mptune.engines.environment import Environment
from mptune.graph.grouping.groups import LayerGroup
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.fronts.progress import Progress

if TYPE_CHECKING:
    from mptune.tuning.runs.confirmation import Confirmation


@dataclass(frozen=True)
class PageContent:
    """Everything that report.html is made of.

    Evaluations are of every plan of the search, groups in the model's order. Without an environment its section is
    omitted; a search's own page has no confirmation.
    """

    front: Front
    evaluations: Sequence[Evaluation]
    groups: Sequence[LayerGroup]
    environment: Environment | None = None
    progress: Progress = field(default_factory=Progress)
    confirmation: Confirmation | None = None
    outputs: RunOutputs | None = None
