"""Plans as rows of booleans, a column for each free group; the boundaries that they cross; minimum cuts over these.

False is FP32. A boundary is a tensor that groups share: it is cast once for each type, other than its producer's, that
it is read in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from mptune.graph.plan import Precision

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

PRECISIONS = (str(Precision.FP32), str(Precision.FP16))
"""Choices of a parameter where nothing else is known of its group."""

_MULTIPLIER, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)  # 2^64 / golden ratio: Fibonacci hashing


@dataclass(frozen=True)
class Columns:
    """What the columns of rows stand for: a free group is FP32 where its column is False."""

    groups: tuple[str, ...]
    precisions: tuple[str, ...]  # of each group where its column is True

    @classmethod
    def fp16(cls, groups: Iterable[str]) -> Columns:
        """Of groups that may be FP16."""
        names = tuple(groups)
        return cls(names, (PRECISIONS[1],) * len(names))

    @cached_property
    def options(self) -> dict[str, tuple[str, str]]:
        """Both precisions that each group may have, FP32 first."""
        return {group: (PRECISIONS[0], name) for group, name in zip(self.groups, self.precisions, strict=True)}

    def row(self, choices: Mapping[str, str]) -> list[bool] | None:
        """The precisions of the groups as booleans; None where a group's is missing, or none of its options."""
        if any(choices.get(group) not in options for group, options in self.options.items()):
            return None
        return [choices[group] == name for group, name in zip(self.groups, self.precisions, strict=True)]

    def choices(self, row: Bools) -> dict[str, str]:
        """Group -> precision of a row."""
        return {group: options[bool(bit)] for (group, options), bit in zip(self.options.items(), row, strict=True)}


def to_bits(plan: Bools) -> str:
    """A row as text, such as ``"0110"`` with 1 for FP16."""
    return (np.asarray(plan, dtype=np.uint8) + ord("0")).tobytes().decode("ascii")


def from_bits(texts: Sequence[str], n_groups: int) -> Bools:
    """The rows of such texts, shape (n_plans, n_groups)."""
    rows: Bools = np.frombuffer("".join(texts).encode(), dtype=np.uint8).reshape(len(texts), n_groups) == ord("1")
    return rows


def plan_keys(plans: Bools) -> NDArray[np.uint64]:
    """A number for each row, shape (n_plans,): up to 64 groups the plan itself, of more its hash."""
    packed = np.packbits(plans, axis=1)
    padded = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    words = padded.view(np.uint64)  # (n_plans, n_words)
    mixed: NDArray[np.uint64] = np.zeros(len(plans), dtype=np.uint64)
    for word in words.T:
        mixed = (mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER ^ word
    return mixed


End = int | str
"""What makes or reads a tensor: the column of a free group, or the precision that it has under every plan."""


@dataclass(frozen=True)
class Boundary:
    """One tensor between groups: what computes it, and what reads it, each once."""

    producer: End
    readers: tuple[End, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The columns of its free groups."""
        return tuple(end for end in (self.producer, *self.readers) if not isinstance(end, str))


def storage_types(columns: Columns, boundaries: Sequence[Boundary]) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """Numbers for the types that values are stored in, 0 for FP32: of each column, and of each fixed precision."""
    fixed = {end for each in boundaries for end in (each.producer, *each.readers) if isinstance(end, str)}
    stored = {name: Precision.named(name).stored for name in (str(Precision.FP32), *columns.precisions, *sorted(fixed))}
    types = list(dict.fromkeys(stored.values()))
    numbers = {name: types.index(row) for name, row in stored.items()}
    return np.array([numbers[name] for name in columns.precisions], dtype=np.uint8), numbers


class Crossings:
    """How often each boundary is cast, for many plans at a time."""

    def __init__(self, columns: Columns, boundaries: Sequence[Boundary]) -> None:
        """Sort the boundaries by their number of readers, so that those alike are one array operation."""
        self._reduced, numbers = storage_types(columns, boundaries)
        # Behind the rows of the groups there is one for each precision that something has under every plan.
        self._fixed = np.array(list(numbers.values()), dtype=np.uint8)
        row_of_fixed = {name: len(self._reduced) + row for row, name in enumerate(numbers)}
        self._count, self._n_types = len(boundaries), 1 + max(numbers.values())

        def row(end: End) -> int:
            return row_of_fixed[end] if isinstance(end, str) else end

        by_readers: dict[int, list[int]] = {}
        for index, boundary in enumerate(boundaries):
            by_readers.setdefault(len(boundary.readers), []).append(index)
        self._shapes = [
            (
                indices,
                np.array([row(boundaries[index].producer) for index in indices]),
                np.array([[row(end) for end in boundaries[index].readers] for index in indices], dtype=np.int64).T,
            )
            for indices in by_readers.values()
        ]

    def count(self, columns: Bools) -> NDArray[np.uint8]:
        """How often each boundary is cast in each plan, shape (n_boundaries, n_plans).

        ``columns`` are the plans, shape (n_groups, n_plans); C-contiguous is fastest.
        """
        n_plans = columns.shape[1]
        fixed = np.broadcast_to(self._fixed[:, None], (len(self._fixed), n_plans))
        types = np.vstack([columns * self._reduced[:, None], fixed])
        counts = np.zeros((self._count, n_plans), dtype=np.uint8)
        for shape, producers, readers in self._shapes:
            producer_types = types[producers]  # (n_boundaries of this shape, n_plans)
            if len(readers) == 1:
                counts[shape] = types[readers[0]] != producer_types
                continue
            for number in range(self._n_types):
                wanted = np.zeros(producer_types.shape, dtype=bool)
                for reader in readers:
                    wanted |= types[reader] == number
                counts[shape] += wanted & (producer_types != number)
        return counts


_SOURCE, _SINK = -1, -2
"""Ends of arcs that are no nodes."""

_UNCUT = -1
"""In place of a boundary: the arc's capacity is infinite."""

_INFINITE = 2**30
_TOTAL = 2**29
"""Capacities are int32, and the flows of a batch are summed in one int32: at most this much together."""


class CutSolver:
    """Minimum cuts: the plan that minimises unary terms plus what its Casts cost, exactly; many problems at a time.

    A group is on the source's side of the cut where it has its reduced precision. A Cast of a boundary costs where one
    of its readers has a type and its producer has not: one minus a product of choices, times the producer's. Such terms
    are submodular (Kolmogorov and Zabih, PAMI 26(2), 2004, Theorem 4.1), and an auxiliary node for each boundary and
    type represents them (Kohli, Ladicky and Torr, IJCV 82, 2009).
    """

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
        self._laid_out = cache(self._layout)

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
        source = count * self._n_nodes  # behind all nodes; the sink is behind it
        columns, pointers, inverse = self._laid_out(count)
        merged = np.bincount(inverse, weights=integers.ravel(), minlength=len(columns))
        merged = np.minimum(merged, _INFINITE).astype(np.int32)
        graph = csr_array((merged, columns, pointers), shape=(source + 2, source + 2))
        residual = graph - maximum_flow(graph, source, source + 1).flow  # >= 0
        residual.eliminate_zeros()
        reached = np.zeros(source + 2, dtype=bool)
        reached[breadth_first_order(residual, source, return_predecessors=False)] = True
        sides: Bools = reached[:source].reshape(count, self._n_nodes)[:, : self._n_groups]
        return sides

    def _layout(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """Problems side by side in one graph: columns and row pointers of its arcs in CSR, parallel ones merged, and
        the position there of each arc of each problem."""
        source, groups = count * self._n_nodes, np.arange(self._n_groups)
        starts = np.concatenate([np.full(self._n_groups, _SOURCE), groups, self._from])
        ends = np.concatenate([groups, np.full(self._n_groups, _SINK), self._to])
        offsets = np.arange(count)[:, None] * self._n_nodes
        rows = np.where(starts == _SOURCE, source, starts + offsets).ravel()
        columns = np.where(ends == _SINK, source + 1, ends + offsets).ravel()
        arcs, inverse = np.unique(rows * (source + 2) + columns, return_inverse=True)
        pointers = np.searchsorted(arcs // (source + 2), np.arange(source + 3)).astype(np.int32)
        return (arcs % (source + 2)).astype(np.int32), pointers, inverse
