"""Which samples an emulated error is taken on, and in which parts they are best taken one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mptune.graph.grouping.grouped import GroupedModel
from mptune.targets.costs import Shape, group_costs

QUICK_S = 10.0
"""Where all one-group errors take no longer, they are taken at once: parts would cost more than they save."""
_FLOPS_PER_S, _S_PER_NODE = 1.5e10, 2e-5
"""Of one core."""


@dataclass(frozen=True)
class EmulatedSamples:
    """The samples of an emulated error."""

    parts: tuple[range, ...]
    """Their numbers in the search samples, from 0 on, in consecutive parts, none empty."""
    per_plan: int | None
    """Samples that the evaluation of one plan runs: what is emulated between plans is measured by it. None where
    everything is best taken at once: opening sessions is what takes the time, or all is quick."""

    @property
    def count(self) -> int:
        """Of all parts together."""
        return self.parts[-1].stop


def in_parts(count: int) -> tuple[range, ...]:
    """The first ``count`` samples in parts that double what is known: 1, 1, 2, 4, ..."""
    ends = [0, 1]
    while ends[-1] < count:
        ends.append(min(2 * ends[-1], count))
    return tuple(range(start, end) for start, end in pairwise(ends))


def one_group_errors_s(grouped: GroupedModel, shapes: Mapping[str, Shape], samples: int) -> float:
    """How long the one-group errors of all groups take about on one core of a CPU, in seconds.

    An estimate from the model alone, so that a search does the same on every machine, under any load, and when it is
    resumed. Emulating one group computes about half of the model, as it begins at a waist before the group.
    """
    flops = sum(cost.flops for cost in group_costs(grouped, shapes).values())
    seconds = flops / 2 / _FLOPS_PER_S + len(grouped.model.nodes) * _S_PER_NODE
    return len(grouped.groups) * samples * seconds
