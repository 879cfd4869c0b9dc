"""Minimum cuts: the plan that minimises unary terms plus boundary costs, exactly, for any graph of boundaries.

``sum(unary[i] for FP16 groups i) + sum(cost[b] for crossed boundaries b)`` with costs >= 0 is submodular, so that its
minimum is a minimum s-t cut (Kolmogorov and Zabih, PAMI 26(2), 2004, Theorem 4.1 for pairs). A boundary of more than
two groups becomes pairs with two auxiliary nodes (Kohli, Ladicky and Torr, IJCV 82, 2009). FP16 groups are on the
source's side of the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.cuts.boundaries import Boundary
from mptune.tuning.sampler.plan_rows import Bools, Floats

_INFINITE = 2**30
_TOTAL = 2**29  # capacities are int32, and the flows of a batch are summed in one int32


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
        self._from = np.array([a for a, _, _ in arcs], dtype=np.int64)
        self._to = np.array([b for _, b, _ in arcs], dtype=np.int64)
        self._kind = np.array([k for _, _, k in arcs], dtype=np.int64)
        self._layout = lru_cache(maxsize=4)(self._lay_out)

    def _arcs(self, index: int, boundary: Boundary) -> list[tuple[int, int, int]]:
        members = boundary.members
        if not members or (boundary.fp32 and boundary.fp16):
            return []  # Never crossed, or always: nothing to decide.
        if boundary.fp32 and len(members) == 1:
            return [(members[0], -2, index)]
        if boundary.fp16 and len(members) == 1:
            return [(-1, members[0], index)]
        if len(members) == 2 and not (boundary.fp32 or boundary.fp16):
            return [(members[0], members[1], index), (members[1], members[0], index)]
        if len(members) == 1:
            return []
        some_fp16, some_fp32 = -2, -2
        arcs = []
        if not boundary.fp16:
            some_fp16, self._nodes = self._nodes, self._nodes + 1
            arcs += [(m, some_fp16, -1) for m in members]
        if not boundary.fp32:
            some_fp32, self._nodes = self._nodes, self._nodes + 1
            arcs += [(some_fp32, m, -1) for m in members]
        return [*arcs, (-1 if boundary.fp16 else some_fp16, -2 if boundary.fp32 else some_fp32, index)]

    def _lay_out(self, count: int) -> tuple[Any, ...]:
        """Row and column of every arc of ``count`` problems side by side, and the order in which CSR wants them."""
        source, sink = count * self._nodes, count * self._nodes + 1
        offsets = np.arange(count)[:, None] * self._nodes
        groups = (offsets + np.arange(self._n_groups)).ravel()

        def placed(ends: NDArray[np.int64]) -> NDArray[np.int64]:
            where = ends[None, :] + offsets
            where[:, ends == -1] = source
            where[:, ends == -2] = sink
            return where.ravel()

        rows = np.concatenate([np.full(len(groups), source), groups, placed(self._from)])
        columns = np.concatenate([groups, np.full(len(groups), sink), placed(self._to)])
        # Parallel arcs (several boundaries between the same groups) are merged.
        key = rows * (sink + 1) + columns
        unique, inverse = np.unique(key, return_inverse=True)
        pointers = np.searchsorted(unique // (sink + 1), np.arange(sink + 2))
        return source, sink, inverse, (unique % (sink + 1)).astype(np.int32), pointers.astype(np.int32)

    def solve(self, unary: Floats, costs: Floats) -> Bools:
        """The optimal plan of each problem.

        Args:
            unary: what a group adds to the objective when it is FP16, shape (n_problems, n_groups).
            costs: of crossing each boundary, >= 0, shape (n_problems, n_boundaries).

        Returns:
            Shape (n_problems, n_groups), True is FP16; of equally good plans the one with the fewest FP16 groups. Exact
            up to the rounding of capacities to integers, ``1e-6`` of a problem's largest terms or better.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(unary)
        if not count or not self._n_groups:
            return np.zeros((count, self._n_groups), dtype=bool)
        source, sink, inverse, columns, pointers = self._layout(count)
        # A term is capped at the sum of all that favours FP16: one huge term must not round the others to zero.
        rewards = np.maximum(-unary, 0.0)
        limit = rewards.sum(axis=1, keepdims=True) + costs.sum(axis=1, keepdims=True)
        penalties = np.minimum(np.maximum(unary, 0.0), limit)
        limit[limit < 1e-200] = 1.0
        scale = _TOTAL / count / limit
        from_source, to_sink, shared = (np.rint(part * scale).astype(np.int64) for part in (rewards, penalties, costs))
        arcs = np.where(self._kind < 0, _INFINITE, shared[:, self._kind] if self._n_boundaries else 0)
        capacities = np.zeros(len(columns), dtype=np.int64)
        np.add.at(capacities, inverse, np.concatenate([from_source.ravel(), to_sink.ravel(), arcs.ravel()]))
        capacities = np.minimum(capacities, _INFINITE).astype(np.int32)
        graph = csr_array((capacities, columns, pointers), shape=(sink + 1, sink + 1))
        residual = graph - maximum_flow(graph, source, sink).flow  # >= 0
        residual.eliminate_zeros()
        reached = np.zeros(sink + 1, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        plans: Bools = reached[: count * self._nodes].reshape(count, self._nodes)[:, : self._n_groups]
        return plans
