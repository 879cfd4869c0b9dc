"""Minimum cuts: the plan that minimises unary terms plus what its Casts cost, exactly.

A group is on the source's side of the cut where it has its reduced precision. A Cast of a boundary costs where one of
its readers has a type and its producer has not: one minus a product of choices, times the producer's. Such terms are
submodular (Kolmogorov and Zabih, PAMI 26(2), 2004, Theorem 4.1), and an auxiliary node for each boundary and type
represents them (Kohli, Ladicky and Torr, IJCV 82, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.plans import Bools, Boundary, Columns, End, Floats, storage_types

_SOURCE, _SINK = -1, -2
"""Ends of arcs that are no nodes."""

_UNCUT = -1
"""In place of a boundary: the arc's capacity is infinite."""

_INFINITE = 2**30
_TOTAL = 2**29
"""Capacities are int32, and the flows of a batch are summed in one int32: at most this much together."""


class CutSolver:
    """Solves many problems of one structure at a time."""

    def __init__(self, columns: Columns, boundaries: Sequence[Boundary]) -> None:
        """Lay out the graph."""
        reduced, numbers = storage_types(columns, boundaries)
        self._n_groups = self._n_nodes = len(reduced)
        self._n_types = 1 + max(numbers.values())
        self._arcs: list[tuple[int, int, int]] = []  # from, to, the boundary whose cost is the capacity
        for index, boundary in enumerate(boundaries):
            for number in range(self._n_types):
                self._add_casts(boundary, index, number, reduced, numbers)
        arcs = np.array(self._arcs, dtype=np.int64).reshape(-1, 3)
        self._from, self._to, self._boundary = arcs.T

    def _add_casts(
        self, boundary: Boundary, index: int, number: int, reduced: NDArray[np.uint8], numbers: dict[str, int]
    ) -> None:
        """Add what the Cast of a boundary to one type costs, where a reader has the type and the producer has not."""
        to_fp32 = number == 0

        def has_type(end: End) -> bool | int:
            """Whether an end has the type under every plan, or none; else the group that decides."""
            if isinstance(end, str):
                return numbers[end] == number
            if to_fp32:
                return end if reduced[end] else True
            return end if reduced[end] == number else False

        producer, readers = has_type(boundary.producer), [has_type(end) for end in boundary.readers]
        choosing = [end for end in readers if not isinstance(end, bool)]
        is_always_read, is_fixed = any(end is True for end in readers), producer is False
        if producer is True or not (choosing or is_always_read):
            return
        if is_always_read:  # the producer alone decides
            if not is_fixed:
                self._arcs.append((producer, _SINK, index) if to_fp32 else (_SOURCE, producer, index))
            return
        # To FP32: the producer is reduced and a reader is not. To another type: a reader has it, the producer not.
        end = producer if not is_fixed else _SOURCE if to_fp32 else _SINK
        between = choosing[0]
        if len(choosing) > 1:
            between, self._n_nodes = self._n_nodes, self._n_nodes + 1
            self._arcs += [(between, r, _UNCUT) if to_fp32 else (r, between, _UNCUT) for r in choosing]
        self._arcs.append((end, between, index) if to_fp32 else (between, end, index))

    def solve(self, unary: Floats, costs: Floats) -> Bools:
        """The best plan of each problem, shape (n_problems, n_groups); of equally good ones that with fewest groups.

        ``unary``, shape (n_problems, n_groups), is what a group adds to the objective in its reduced precision;
        ``costs``, shape (n_problems, n_boundaries), are those of one Cast of each boundary, >= 0. Exact up to the
        rounding of capacities to integers, ``1e-6`` of a problem's largest terms or better.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(unary)
        if not unary.size:
            return np.zeros(unary.shape, dtype=bool)
        rewards = np.maximum(-unary, 0.0)
        # A term is capped at the sum of all that favours the group: one huge term must not round the others to zero.
        limit = rewards.sum(axis=1, keepdims=True) + self._n_types * costs.sum(axis=1, keepdims=True)
        penalties = np.minimum(np.maximum(unary, 0.0), limit)
        limit[limit < 1e-200] = 1.0
        padded = np.hstack([costs, np.full((count, 1), np.inf)])  # the last column is that of arcs that are never cut
        capacities = np.hstack([rewards, penalties, padded[:, self._boundary]]) * (_TOTAL / count / limit)
        integers = np.rint(np.minimum(capacities, _INFINITE)).astype(np.int64)  # (n_problems, n_arcs)
        # The problems side by side in one graph, its arcs in the order in which CSR wants them; parallel ones merged.
        source = count * self._n_nodes  # behind all nodes; the sink is behind it
        groups = np.arange(self._n_groups)
        starts = np.concatenate([np.full(self._n_groups, _SOURCE), groups, self._from])
        ends = np.concatenate([groups, np.full(self._n_groups, _SINK), self._to])
        offsets = np.arange(count)[:, None] * self._n_nodes
        rows = np.where(starts == _SOURCE, source, starts + offsets).ravel()
        columns = np.where(ends == _SINK, source + 1, ends + offsets).ravel()
        arcs, inverse = np.unique(rows * (source + 2) + columns, return_inverse=True)
        pointers = np.searchsorted(arcs // (source + 2), np.arange(source + 3)).astype(np.int32)
        merged = np.bincount(inverse, weights=integers.ravel(), minlength=len(arcs))
        merged = np.minimum(merged, _INFINITE).astype(np.int32)
        graph = csr_array((merged, (arcs % (source + 2)).astype(np.int32), pointers), shape=(source + 2, source + 2))
        residual = graph - maximum_flow(graph, source, source + 1).flow  # >= 0
        residual.eliminate_zeros()
        reached = np.zeros(source + 2, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        sides: Bools = reached[:source].reshape(count, self._n_nodes)[:, : self._n_groups]
        return sides
