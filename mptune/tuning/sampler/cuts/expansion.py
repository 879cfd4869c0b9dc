"""Plans of three precisions that minimise unary terms plus what their Casts cost, by alpha expansions.

An expansion lets every group keep its label or take one label, the same for all; the best one is an exact minimum cut
(Boykov, Veksler and Zabih, Fast approximate energy minimization via graph cuts, PAMI 23(11), 2001). The cost of a
tensor is that of each label that one of its readers has and its producer has not. Under an expansion each such term is
one minus a product of "keeps", or one less a product of "takes", times the producer's choice: submodular, so that an
auxiliary node for each label represents it. From all-FP32 the first expansion, of FP16, is the exact cut of two labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.cuts.casts import BF16, FIXED, FP16, FP32, LABELS, Casts, End
from mptune.tuning.sampler.cuts.flow import INFINITE, SOURCE, TOTAL, FlowNetworks
from mptune.tuning.sampler.plan_rows import Bools, Floats

_ROUNDS = 2
"""Rounds of expansions of all labels, at most: later ones hardly change a plan."""

Labels = NDArray[np.uint8]


class ExpansionSolver:
    """Solves many problems of one structure at a time. Made once for the columns of a search."""

    def __init__(self, ends: Sequence[End], tensors: Sequence[Casts]) -> None:
        """Lay out the graphs.

        Args:
            ends: the columns of each group.
            tensors: between the groups.
        """
        self._ends = list(ends)
        self._nodes = [*ends, *FIXED]  # those of one label under every plan are nodes that no expansion changes
        node = {end: index for index, end in enumerate(self._nodes)}
        self._n_columns = max((c for end in ends for c in end), default=-1) + 1
        single = [t for t, one in enumerate(tensors) if len(one.readers) == 1]
        self._single = np.array(single, dtype=np.int64)
        self._makers = np.array([node[tensors[t].producer] for t in single], dtype=np.int64)
        self._takers = np.array([node[tensors[t].readers[0]] for t in single], dtype=np.int64)
        several = [t for t, one in enumerate(tensors) if len(one.readers) > 1]
        self._several = np.array(several, dtype=np.int64)
        self._producers = np.array([node[tensors[t].producer] for t in several], dtype=np.int64)
        pairs = [(index, node[end]) for index, t in enumerate(several) for end in tensors[t].readers]
        self._tensors, self._readers = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self._network = self._laid_out()

    def _laid_out(self) -> FlowNetworks:
        """The network of an expansion; ``_capacities`` follows its arcs."""
        count, start = len(self._several), len(self._nodes)
        producers, tensors, readers = (one.tolist() for one in (self._producers, self._tensors, self._readers))
        arcs = list(zip(self._makers.tolist(), self._takers.tolist(), strict=True))
        arcs += [(taker, maker) for maker, taker in arcs]
        for kept in range(2):  # the two other labels
            first = start + kept * count
            arcs += [(SOURCE, first + t) for t in range(count)]
            arcs += [(producers[t], first + t) for t in range(count)]
            arcs += [(first + t, reader) for t, reader in zip(tensors, readers, strict=True)]
        first = start + 2 * count
        arcs += [(reader, first + t) for t, reader in zip(tensors, readers, strict=True)]
        arcs += [(first + t, producers[t]) for t in range(count)]
        return FlowNetworks(start, start + 3 * count, arcs)

    def solve(self, unary: Floats, costs: Floats) -> Bools:
        """A plan for each problem that no expansion makes better.

        Args:
            unary: what a column adds to the objective where it is True, shape (n_problems, n_columns).
            costs: of one Cast of each tensor, >= 0, shape (n_problems, n_tensors).

        Returns:
            Shape (n_problems, n_columns), at most one column of a group True.
        """
        of_label = self._by_label(unary)  # (n_problems, n_groups, n_labels)
        labels = np.zeros(of_label.shape[:2], dtype=np.uint8)
        is_open = np.ones(len(labels), dtype=bool)
        for number in range(_ROUNDS):
            before = labels.copy()
            for label in (FP16, BF16) if number == 0 else (FP32, FP16, BF16):
                some = np.flatnonzero(is_open)
                labels[some] = self._expanded(labels[some], label, of_label[some], costs[some])
            # After the first round only those with both reduced labels are no exact optimum of two.
            is_open &= (labels != before).any(axis=1) & (labels == BF16).any(axis=1)
            if not is_open.any():
                break
        return self._columns_of(labels)

    def _by_label(self, unary: Floats) -> Floats:
        """What each group adds in each label, infinite where it cannot have it."""
        padded = np.hstack([unary, np.full((len(unary), 1), np.inf)])
        fp16, bf16 = np.array(self._ends, dtype=np.int64).reshape(-1, 2).T
        return np.stack([np.zeros((len(unary), len(self._ends))), padded[:, fp16], padded[:, bf16]], axis=2)

    def _columns_of(self, labels: Labels) -> Bools:
        columns = np.zeros((len(labels), self._n_columns + 1), dtype=bool)
        for label, ends in ((FP16, [a for a, _ in self._ends]), (BF16, [b for _, b in self._ends])):
            columns[:, ends] |= labels == label  # those that cannot have it write into the last column
        return columns[:, :-1]

    def _expanded(self, labels: Labels, label: int, of_label: Floats, costs: Floats) -> Labels:
        """The best expansion of one label, of each problem."""
        count = len(labels)
        if not count:
            return labels
        now = np.take_along_axis(of_label, labels[:, :, None].astype(np.int64), axis=2)[:, :, 0]
        gained = np.where(labels == label, 0.0, of_label[:, :, label] - now)
        fixed = np.full((count, len(FIXED)), np.inf)
        unary = np.hstack([gained, fixed])
        rewards, capacities = self._capacities(labels, label, costs)
        rewards += np.maximum(-unary, 0.0)
        limit = rewards.sum(axis=1, keepdims=True) + costs.sum(axis=1, keepdims=True)
        penalties = np.minimum(np.maximum(unary, 0.0), limit)
        penalties[:, len(self._ends) :] = np.inf
        limit[limit < 1e-200] = 1.0
        scale = TOTAL / count / limit

        def as_integers(part: Floats) -> NDArray[np.int64]:
            integers: NDArray[np.int64] = np.rint(np.minimum(part * scale, INFINITE)).astype(np.int64)
            return integers

        takes = self._network.source_sides(as_integers(rewards), as_integers(penalties), as_integers(capacities))
        return np.where(takes[:, : len(self._ends)], np.uint8(label), labels)

    def _capacities(self, labels: Labels, label: int, costs: Floats) -> tuple[Floats, Floats]:
        """What takes the label for a tensor's sake, and the arcs' capacities, for the nodes and arcs of the network."""
        count = len(labels)
        all_labels = np.hstack([labels, np.tile(np.array(LABELS, dtype=np.uint8), (count, 1))])
        rewards = np.zeros((count, len(self._nodes)))
        # One reader: a Cast where the two differ (Potts).
        once = costs[:, self._single]
        made, read = all_labels[:, self._makers], all_labels[:, self._takers]
        reads, makes = read == label, made == label
        arcs = [np.where((made == read) & ~reads, once, 0.0), np.where(reads | makes, 0.0, once)]
        _add(rewards, self._takers, np.where((made != read) & ~reads, once, 0.0))
        _add(rewards, self._makers, np.where(reads & ~makes, once, 0.0))
        # Several: a Cast for each label that is read, other than the producer's.
        once = costs[:, self._several]
        made, read = all_labels[:, self._producers], all_labels[:, self._readers]
        for kept in (one for one in LABELS if one != label):
            is_made = made == kept
            arcs += [np.where(is_made, 0.0, once), np.where(is_made, once, 0.0), np.where(read == kept, np.inf, 0.0)]
        has_reader = np.zeros(once.shape, dtype=bool)
        rows, ones = np.nonzero(read == label)
        has_reader[rows, self._tensors[ones]] = True
        makes = made == label
        arcs += [np.full(read.shape, np.inf), np.where(makes | has_reader, 0.0, once)]
        _add(rewards, self._producers, np.where(has_reader & ~makes, once, 0.0))
        return rewards, np.hstack(arcs)


def _add(rewards: Floats, nodes: NDArray[np.int64], values: Floats) -> None:
    """Add values of columns, shape (n_problems, n_columns), to those of their nodes, which may repeat."""
    np.add.at(rewards, (np.arange(len(rewards))[:, None], nodes[None, :]), values)
