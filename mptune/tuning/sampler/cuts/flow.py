"""Minimum s-t cuts of many networks of one structure at a time, by maximum flow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.plan_rows import Bools

SOURCE, SINK = -1, -2
"""Where an arc begins at the source, or ends at the sink."""

INFINITE = 2**30
TOTAL = 2**29
"""Capacities are int32, and the flows of a batch are summed in one int32: so much may they be together."""


class FlowNetworks:
    """Networks of the same nodes and arcs; the first nodes have an arc from the source, and one to the sink, each."""

    def __init__(self, n_ends: int, n_nodes: int, arcs: Sequence[tuple[int, int]]) -> None:
        """Lay out the graph.

        Args:
            n_ends: so many of the nodes, the first ones, have arcs from the source and to the sink.
            n_nodes: how many nodes there are, without source and sink.
            arcs: the other arcs: from which node, or ``SOURCE``, to which node, or ``SINK``.
        """
        self._n_ends = n_ends
        self._n_nodes = n_nodes
        self._from = np.array([a for a, _ in arcs], dtype=np.int64)
        self._to = np.array([b for _, b in arcs], dtype=np.int64)
        self._layout = lru_cache(maxsize=4)(self._lay_out)

    def _lay_out(self, count: int) -> tuple[Any, ...]:
        """Row and column of every arc of ``count`` problems side by side, and the order in which CSR wants them."""
        source, sink = count * self._n_nodes, count * self._n_nodes + 1
        offsets = np.arange(count)[:, None] * self._n_nodes
        ends = (offsets + np.arange(self._n_ends)).ravel()

        def placed(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
            where = nodes[None, :] + offsets
            where[:, nodes == SOURCE] = source
            where[:, nodes == SINK] = sink
            return where.ravel()

        rows = np.concatenate([np.full(len(ends), source), ends, placed(self._from)])
        columns = np.concatenate([ends, np.full(len(ends), sink), placed(self._to)])
        # Parallel arcs (several boundaries between the same groups) are merged.
        key = rows * (sink + 1) + columns
        unique, inverse = np.unique(key, return_inverse=True)
        pointers = np.searchsorted(unique // (sink + 1), np.arange(sink + 2))
        return source, sink, inverse, (unique % (sink + 1)).astype(np.int32), pointers.astype(np.int32)

    def source_sides(
        self, from_source: NDArray[np.int64], to_sink: NDArray[np.int64], capacities: NDArray[np.int64]
    ) -> Bools:
        """Which nodes are on the source's side of each network's minimum cut, the smallest such set.

        Args:
            from_source: shape (n_networks, n_ends).
            to_sink: the same shape.
            capacities: of the other arcs, shape (n_networks, n_arcs).

        Returns:
            Shape (n_networks, n_nodes).
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(from_source)
        source, sink, inverse, columns, pointers = self._layout(count)
        merged = np.zeros(len(columns), dtype=np.int64)
        np.add.at(merged, inverse, np.concatenate([from_source.ravel(), to_sink.ravel(), capacities.ravel()]))
        merged = np.minimum(merged, INFINITE).astype(np.int32)
        graph = csr_array((merged, columns, pointers), shape=(sink + 1, sink + 1))
        residual = graph - maximum_flow(graph, source, sink).flow  # >= 0
        residual.eliminate_zeros()
        reached = np.zeros(sink + 1, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        sides: Bools = reached[: count * self._n_nodes].reshape(count, self._n_nodes)
        return sides
