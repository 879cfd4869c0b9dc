"""Minimum cuts: the best plan for a weighing of latency against error, exactly, for any graph of boundaries.

``sum(unary[i] for FP16 groups i) + sum(cost[b] for crossed boundaries b)`` with costs >= 0 is submodular, so that its
minimum is a minimum s-t cut (Kolmogorov and Zabih, PAMI 26(2), 2004): FP16 groups lie on the source's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_INFINITE = 2**30
_TOTAL = 2**29  # capacities are int32, and the flows of a batch add up in one figure


@dataclass(frozen=True)
class Tie:
    """A boundary as the cut sees it: it costs once, unless all that it ties together have the same precision.

    Attributes:
        members: positions of the groups, each once.
        fp32: something in FP32 under every plan is tied in as well.
        fp16: something in FP16 under every plan is tied in as well.
    """

    members: tuple[int, ...]
    fp32: bool = False
    fp16: bool = False

    def crossed(self, plans: Bools) -> Bools:
        """For each row of ``plans`` (plans x groups, True is FP16), whether the boundary is crossed."""
        part = plans[:, list(self.members)]
        crossed: Bools = np.logical_or(part.any(axis=1), self.fp16) & ~np.logical_and(part.all(axis=1), not self.fp32)
        return crossed


class Crossings:
    """Tells of many plans at a time which boundaries they cross."""

    def __init__(self, ties: Sequence[Tie]) -> None:
        """Sort the ties by shape, so that those of one shape are told together."""
        self._count = len(ties)
        shapes: dict[tuple[int, bool, bool], list[int]] = {}
        for index, tie in enumerate(ties):
            shapes.setdefault((len(tie.members), tie.fp32, tie.fp16), []).append(index)
        self._shapes = [
            (rows, np.array([ties[row].members for row in rows]).T, fp32, fp16)
            for (_, fp32, fp16), rows in shapes.items()
        ]

    def of(self, columns: Bools) -> Bools:
        """Ties x plans, for ``columns`` of groups x plans (True is FP16; contiguous rows are quick)."""
        crossed = np.empty((self._count, columns.shape[1]), dtype=bool)
        for rows, members, fp32, fp16 in self._shapes:
            some, every = columns[members[0]], columns[members[0]]
            for others in members[1:]:
                some, every = some | columns[others], every & columns[others]
            crossed[rows] = (True if fp16 else some) & (True if fp32 else ~every)
        return crossed


class CutSolver:
    """Solves many cuts of one structure at a time. Made once for a search space."""

    def __init__(self, groups: int, ties: Sequence[Tie]) -> None:
        """Lay out the graph.

        Args:
            groups: how many groups there are.
            ties: the boundaries.
        """
        self._groups = groups
        self._ties = len(ties)
        # Arcs of one problem as (from, to, what its capacity is: -1 infinite, else the tie); source -1, sink -2.
        arcs: list[tuple[int, int, int]] = []
        self._nodes = groups
        for index, tie in enumerate(ties):
            arcs += self._arcs(index, tie)
        self._from = np.array([a for a, _, _ in arcs], dtype=np.int64)
        self._to = np.array([b for _, b, _ in arcs], dtype=np.int64)
        self._kind = np.array([k for _, _, k in arcs], dtype=np.int64)
        self._layout = lru_cache(maxsize=4)(self._lay_out)

    def _arcs(self, index: int, tie: Tie) -> list[tuple[int, int, int]]:
        members = tie.members
        if not members or (tie.fp32 and tie.fp16):
            return []  # Never crossed, or always: nothing to decide.
        if tie.fp32 and len(members) == 1:
            return [(members[0], -2, index)]
        if tie.fp16 and len(members) == 1:
            return [(-1, members[0], index)]
        if len(members) == 2 and not (tie.fp32 or tie.fp16):
            return [(members[0], members[1], index), (members[1], members[0], index)]
        if len(members) == 1:
            return []
        some_fp16, some_fp32 = -2, -2
        arcs = []
        if not tie.fp16:
            some_fp16, self._nodes = self._nodes, self._nodes + 1
            arcs += [(m, some_fp16, -1) for m in members]
        if not tie.fp32:
            some_fp32, self._nodes = self._nodes, self._nodes + 1
            arcs += [(some_fp32, m, -1) for m in members]
        return [*arcs, (-1 if tie.fp16 else some_fp16, -2 if tie.fp32 else some_fp32, index)]

    def _lay_out(self, count: int) -> tuple[Any, ...]:
        """Row and column of every arc of ``count`` problems side by side, and the order in which CSR wants them."""
        source, sink = count * self._nodes, count * self._nodes + 1
        offsets = np.arange(count)[:, None] * self._nodes
        groups = (offsets + np.arange(self._groups)).ravel()

        def placed(ends: NDArray[np.int64]) -> NDArray[np.int64]:
            where = ends[None, :] + offsets
            where[:, ends == -1] = source
            where[:, ends == -2] = sink
            return where.ravel()

        rows = np.concatenate([np.full(len(groups), source), groups, placed(self._from)])
        columns = np.concatenate([groups, np.full(len(groups), sink), placed(self._to)])
        # Arcs that run in parallel (several ties between the same groups) are one.
        key = rows * (sink + 1) + columns
        unique, inverse = np.unique(key, return_inverse=True)
        pointers = np.searchsorted(unique // (sink + 1), np.arange(sink + 2))
        return source, sink, inverse, (unique % (sink + 1)).astype(np.int32), pointers.astype(np.int32)

    def solve(self, unary: Floats, costs: Floats) -> Bools:
        """The best plan of each problem.

        Args:
            unary: problems x groups, what a group adds to the objective when it is FP16; negative is good.
            costs: problems x ties, >= 0.

        Returns:
            Problems x groups, True is FP16; of equally good plans the one with the fewest FP16 groups. Exact up to the
            rounding of capacities to integers, ``1e-6`` of a problem's largest terms or better.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(unary)
        if not count or not self._groups:
            return np.zeros((count, self._groups), dtype=bool)
        source, sink, inverse, columns, pointers = self._layout(count)
        # What outweighs everything else is no more than that: one huge term must not round the others away.
        rewards = np.maximum(-unary, 0.0)
        limit = rewards.sum(axis=1, keepdims=True) + costs.sum(axis=1, keepdims=True)
        penalties = np.minimum(np.maximum(unary, 0.0), limit)
        limit[limit < 1e-200] = 1.0
        scale = _TOTAL / count / limit
        from_source, to_sink, shared = (np.rint(part * scale).astype(np.int64) for part in (rewards, penalties, costs))
        arcs = np.where(self._kind < 0, _INFINITE, shared[:, self._kind] if self._ties else 0)
        capacities = np.zeros(len(columns), dtype=np.int64)
        np.add.at(capacities, inverse, np.concatenate([from_source.ravel(), to_sink.ravel(), arcs.ravel()]))
        capacities = np.minimum(capacities, _INFINITE).astype(np.int32)
        graph = csr_array((capacities, columns, pointers), shape=(sink + 1, sink + 1))
        residual = graph - maximum_flow(graph, source, sink).flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = np.zeros(sink + 1, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        plans: Bools = reached[: count * self._nodes].reshape(count, self._nodes)[:, : self._groups]
        return plans
