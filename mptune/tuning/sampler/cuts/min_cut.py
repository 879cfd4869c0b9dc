"""Minimum cuts: the plan that minimises unary terms plus what its Casts cost, by alpha expansions.

From all-FP32, an expansion lets every group keep its precision or take one precision, the same for all; the best one is
an exact minimum s-t cut (Boykov, Veksler and Zabih, Fast approximate energy minimization via graph cuts, PAMI 23(11),
2001, Section 5). The cost of a boundary is that of each type that one of its readers has and its producer has not.
Under an expansion each such term is one minus a product of "keeps", or one less a product of "takes", times the
producer's choice: submodular (Kolmogorov and Zabih, PAMI 26(2), 2004, Theorem 4.1), so that an auxiliary node for each
type represents it (Kohli, Ladicky and Torr, IJCV 82, 2009). With one reduced precision the first expansion is the
optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.graph.precision import PRECISIONS, Precision
from mptune.tuning.sampler.cuts.boundaries import Boundary, Storage
from mptune.tuning.sampler.plan_rows import Bools, Columns, Floats

_ROUNDS = 2
"""Rounds of expansions of all labels, at most: later ones hardly change a plan."""

_SOURCE = -1
"""Where an arc begins at the source."""

_INFINITE = 2**30
_TOTAL = 2**29
"""Capacities are int32, and the flows of a batch are summed in one int32: so much may they be together."""

Labels = NDArray[np.uint8]


class CutSolver:
    """Solves many problems of one structure at a time. Made once for the columns of a search.

    A label is a precision: 0 is FP32.
    """

    def __init__(self, columns: Columns, boundaries: Sequence[Boundary]) -> None:
        """Lay out the graph."""
        groups, precisions = columns.groups, columns.precisions
        fixed = [name for boundary in boundaries for name in boundary.fixed]
        names = [Precision.FP32, *(p for p in PRECISIONS if p is not Precision.FP32 and p in {*precisions, *fixed})]
        storage = Storage(names)
        self._type_of = np.array([storage.numbers[name] for name in names], dtype=np.uint8)  # (n_labels,)
        self._n_types = storage.count
        self._taken_labels = [label for label, name in enumerate(names) if name in precisions]
        position = {group: index for index, group in enumerate(dict.fromkeys(groups))}
        self._n_columns, self._n_groups = len(groups), len(position)
        self._column = np.full((self._n_groups, len(names)), self._n_columns)  # (n_groups, n_labels)
        node: dict[int | str, int] = {name: self._n_groups + label for label, name in enumerate(names)}
        for column, (group, name) in enumerate(zip(groups, precisions, strict=True)):
            self._column[position[group], names.index(Precision.named(name))] = column
            node[column] = position[group]
        # What has one precision under every plan is a node that no expansion changes.
        self._fixed = np.arange(len(names), dtype=np.uint8)
        nodes = [
            [node[end if isinstance(end, str) else end[0]] for end in (each.producer, *each.readers)]
            for each in boundaries
        ]
        self._producers = np.array([ends[0] for ends in nodes], dtype=np.int64)  # (n_boundaries,)
        readers = [(tensor, end) for tensor, ends in enumerate(nodes) for end in ends[1:]]
        self._tensors, self._readers = np.array(readers, dtype=np.int64).reshape(-1, 2).T
        self._network = self._laid_out(self._n_groups + len(names))

    def _laid_out(self, n_nodes: int) -> _FlowNetworks:
        """The network of an expansion; ``_capacities`` follows its arcs."""
        producers, tensors, readers = (each.tolist() for each in (self._producers, self._tensors, self._readers))
        count, arcs = len(producers), []
        for kept in range(self._n_types - 1):
            first = n_nodes + kept * count
            arcs += [(_SOURCE, first + t) for t in range(count)]
            arcs += [(producers[t], first + t) for t in range(count)]
            arcs += [(first + t, reader) for t, reader in zip(tensors, readers, strict=True)]
        first = n_nodes + (self._n_types - 1) * count
        arcs += [(reader, first + t) for t, reader in zip(tensors, readers, strict=True)]
        arcs += [(first + t, producers[t]) for t in range(count)]
        return _FlowNetworks(n_nodes, n_nodes + self._n_types * count, arcs)

    def solve(self, unary: Floats, costs: Floats) -> Bools:
        """A plan for each problem that no expansion makes better.

        Args:
            unary: what a column adds to the objective where it is True, shape (n_problems, n_columns).
            costs: of one Cast of each boundary, >= 0, shape (n_problems, n_boundaries).

        Returns:
            Shape (n_problems, n_columns), at most one column of a group True; of equally good plans of one reduced
            precision the one with the fewest groups in it. Exact up to the rounding of capacities to integers, ``1e-6``
            of a problem's largest terms or better.
        """
        labels: Labels = np.zeros((len(unary), self._n_groups), dtype=np.uint8)
        if not labels.size:
            return np.zeros(unary.shape, dtype=bool)
        padded = np.hstack([unary, np.full((len(unary), 1), np.inf)])
        of_label = padded[:, self._column]  # (n_problems, n_groups, n_labels); infinite where a group has not the label
        of_label[:, :, 0] = 0.0
        is_open = np.ones(len(labels), dtype=bool)
        for number in range(_ROUNDS):
            before = labels.copy()
            for label in self._taken_labels if number == 0 else (0, *self._taken_labels):
                still = np.flatnonzero(is_open)
                if len(still):
                    labels[still] = self._expanded(labels[still], label, of_label[still], costs[still])
            # After the first round only those with several reduced labels are no exact optimum.
            is_open &= (labels != before).any(axis=1) & (labels > self._taken_labels[0]).any(axis=1)
        columns = np.zeros((len(labels), self._n_columns + 1), dtype=bool)
        for label in self._taken_labels:
            columns[:, self._column[:, label]] |= labels == label  # those without it write into the last column
        return columns[:, :-1]

    def _expanded(self, labels: Labels, label: int, of_label: Floats, costs: Floats) -> Labels:
        """The best expansion of one label, of each problem."""
        count = len(labels)
        now = np.take_along_axis(of_label, labels[:, :, None].astype(np.int64), axis=2)[:, :, 0]
        unary = np.where(labels == label, 0.0, of_label[:, :, label] - now)
        rewards, capacities = self._capacities(labels, label, costs)
        rewards[:, : self._n_groups] += np.maximum(-unary, 0.0)
        # A term is capped at the sum of all that favours the label: one huge term must not round the others to zero.
        limit = rewards.sum(axis=1, keepdims=True) + costs.sum(axis=1, keepdims=True)
        penalties = np.full(rewards.shape, np.inf)
        penalties[:, : self._n_groups] = np.minimum(np.maximum(unary, 0.0), limit)
        limit[limit < 1e-200] = 1.0
        scale = _TOTAL / count / limit

        def as_integers(part: Floats) -> NDArray[np.int64]:
            integers: NDArray[np.int64] = np.rint(np.minimum(part * scale, _INFINITE)).astype(np.int64)
            return integers

        takes = self._network.source_sides(*map(as_integers, (rewards, penalties, capacities)))
        return np.where(takes[:, : self._n_groups], np.uint8(label), labels)

    def _capacities(self, labels: Labels, label: int, costs: Floats) -> tuple[Floats, Floats]:
        """What takes the label for a boundary's sake, and the capacities of the arcs, for the nodes and arcs."""
        types = self._type_of[np.hstack([labels, np.tile(self._fixed, (len(labels), 1))])]  # (n_problems, n_nodes)
        own = self._type_of[label]
        rewards = np.zeros(types.shape)
        made, read = types[:, self._producers], types[:, self._readers]
        arcs = []
        for kept in (number for number in range(self._n_types) if number != own):
            is_made = made == kept
            arcs += [np.where(is_made, 0.0, costs), np.where(is_made, costs, 0.0), np.where(read == kept, np.inf, 0.0)]
        has_reader = np.zeros(costs.shape, dtype=bool)
        rows, ends = np.nonzero(read == own)
        has_reader[rows, self._tensors[ends]] = True
        makes = made == own
        arcs += [np.full(read.shape, np.inf), np.where(makes | has_reader, 0.0, costs)]
        # Several tensors may have one producer.
        producers = np.arange(len(rewards))[:, None], self._producers[None, :]
        np.add.at(rewards, producers, np.where(has_reader & ~makes, costs, 0.0))
        return rewards, np.hstack(arcs)


class _FlowNetworks:
    """Networks of the same nodes and arcs; the first nodes have an arc from the source, and one to the sink, each."""

    def __init__(self, n_ends: int, n_nodes: int, arcs: Sequence[tuple[int, int]]) -> None:
        """Lay out the graph: its first ``n_ends`` nodes, all nodes without source and sink, and the other arcs."""
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
        starts = np.where(self._from == _SOURCE, source, self._from + offsets).ravel()
        rows = np.concatenate([np.full(len(ends), source), ends, starts])
        columns = np.concatenate([ends, np.full(len(ends), sink), (self._to + offsets).ravel()])
        # Parallel arcs (several boundaries between the same groups) are merged.
        key = rows * (sink + 1) + columns
        unique, inverse = np.unique(key, return_inverse=True)
        pointers = np.searchsorted(unique // (sink + 1), np.arange(sink + 2))
        return source, sink, inverse, (unique % (sink + 1)).astype(np.int32), pointers.astype(np.int32)

    def source_sides(
        self, from_source: NDArray[np.int64], to_sink: NDArray[np.int64], capacities: NDArray[np.int64]
    ) -> Bools:
        """Which nodes are on the source's side of each network's minimum cut, the smallest such set.

        Capacities have shape (n_networks, n_ends), and those of the other arcs (n_networks, n_arcs).
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(from_source)
        source, sink, inverse, columns, pointers = self._layout(count)
        merged = np.zeros(len(columns), dtype=np.int64)
        np.add.at(merged, inverse, np.concatenate([from_source.ravel(), to_sink.ravel(), capacities.ravel()]))
        merged = np.minimum(merged, _INFINITE).astype(np.int32)
        graph = csr_array((merged, columns, pointers), shape=(sink + 1, sink + 1))
        residual = graph - maximum_flow(graph, source, sink).flow  # >= 0
        residual.eliminate_zeros()
        reached = np.zeros(sink + 1, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        sides: Bools = reached[: count * self._n_nodes].reshape(count, self._n_nodes)
        return sides
