"""Minimum cuts: the plan that minimises unary terms plus boundary costs, exactly, for any graph of boundaries.

``sum(unary[i] for FP16 groups i) + sum(cost[b] for crossed boundaries b)`` with costs >= 0 is submodular, so that its
minimum is a minimum s-t cut (Kolmogorov and Zabih, PAMI 26(2), 2004, Theorem 4.1 for pairs). A boundary of more than
two groups becomes pairs with two auxiliary nodes (Kohli, Ladicky and Torr, IJCV 82, 2009). FP16 groups are on the
source's side of the cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.cuts.flow import INFINITE, SINK, SOURCE, TOTAL, FlowNetworks
from mptune.tuning.sampler.plan_rows import Bools, Floats


class CutSolver:
    """Solves many cuts of one structure at a time. Made once for a search space."""

    def __init__(self, n_groups: int, boundaries: Sequence[Boundary]) -> None:
        """Lay out the graph.

        Args:
            n_groups: how many groups there are.
            boundaries: the boundaries.
        """
        self._n_groups = n_groups
        self._n_boundaries = len(boundaries)
        # Arcs of one problem as (from, to, capacity: -1 for infinite, else the boundary's index); source -1, sink -2.
        arcs: list[tuple[int, int, int]] = []
        self._nodes = n_groups
        for index, boundary in enumerate(boundaries):
            arcs += self._arcs(index, boundary)
        self._kind = np.array([k for _, _, k in arcs], dtype=np.int64)
        self._networks = FlowNetworks(n_groups, self._nodes, [(a, b) for a, b, _ in arcs])

    def _arcs(self, index: int, boundary: Boundary) -> list[tuple[int, int, int]]:
        members = boundary.members
        if not members or (boundary.fp32 and boundary.fp16):
            return []  # Never crossed, or always: nothing to decide.
        if boundary.fp32 and len(members) == 1:
            return [(members[0], SINK, index)]
        if boundary.fp16 and len(members) == 1:
            return [(SOURCE, members[0], index)]
        if len(members) == 2 and not (boundary.fp32 or boundary.fp16):
            return [(members[0], members[1], index), (members[1], members[0], index)]
        if len(members) == 1:
            return []
        some_fp16, some_fp32 = SINK, SINK
        arcs = []
        if not boundary.fp16:
            some_fp16, self._nodes = self._nodes, self._nodes + 1
            arcs += [(m, some_fp16, -1) for m in members]
        if not boundary.fp32:
            some_fp32, self._nodes = self._nodes, self._nodes + 1
            arcs += [(some_fp32, m, -1) for m in members]
        return [*arcs, (SOURCE if boundary.fp16 else some_fp16, SINK if boundary.fp32 else some_fp32, index)]

    def solve(self, unary: Floats, costs: Floats) -> Bools:
        """The optimal plan of each problem.

        Args:
            unary: what a group adds to the objective when it is FP16, shape (n_problems, n_groups).
            costs: of crossing each boundary, >= 0, shape (n_problems, n_boundaries).

        Returns:
            Shape (n_problems, n_groups), True is FP16; of equally good plans the one with the fewest FP16 groups. Exact
            up to the rounding of capacities to integers, ``1e-6`` of a problem's largest terms or better.
        """
        count = len(unary)
        if not count or not self._n_groups:
            return np.zeros((count, self._n_groups), dtype=bool)
        # A term is capped at the sum of all that favours FP16: one huge term must not round the others to zero.
        rewards = np.maximum(-unary, 0.0)
        limit = rewards.sum(axis=1, keepdims=True) + costs.sum(axis=1, keepdims=True)
        penalties = np.minimum(np.maximum(unary, 0.0), limit)
        limit[limit < 1e-200] = 1.0
        scale = TOTAL / count / limit
        from_source, to_sink, shared = (np.rint(part * scale).astype(np.int64) for part in (rewards, penalties, costs))
        arcs = np.where(self._kind < 0, INFINITE, shared[:, self._kind] if self._n_boundaries else 0)
        plans: Bools = self._networks.source_sides(from_source, to_sink, arcs)[:, : self._n_groups]
        return plans
