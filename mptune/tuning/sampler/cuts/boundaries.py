"""Boundaries: tensors that groups share, and how often each is cast under a plan.

A plan is a row of booleans: a column for each reduced precision that a group may have, at most one of them True; a
group without any is FP32. A tensor is cast once for each type, other than its producer's, that it is read in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.graph.precision import Precision
from mptune.tuning.sampler.plan_rows import Bools, Columns

Counts = NDArray[np.uint8]
"""How often boundaries are cast, shape (n_boundaries, n_plans)."""

End = tuple[int, ...] | str
"""What makes or reads a tensor: the columns of a group, or the precision that it has under every plan."""


@dataclass(frozen=True)
class Boundary:
    """One tensor between groups.

    Attributes:
        producer: what computes it.
        readers: each once.
    """

    producer: End
    readers: tuple[End, ...]

    @classmethod
    def among(cls, columns: Iterable[int], *fixed: str) -> Boundary:
        """Of groups with one reduced precision, and of what has these under every plan; any of them may compute it."""
        ends: tuple[End, ...] = (*((column,) for column in columns), *fixed)
        return cls(ends[0], ends[1:])

    def to_json(self) -> list[End]:
        """Producer and readers."""
        return [self.producer, *self.readers]

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> Boundary:
        """Inverse of ``to_json``."""
        producer, *readers = (end if isinstance(end, str) else tuple(map(int, end)) for end in document)
        return cls(producer, tuple(readers))

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """The groups among producer and readers, by their columns."""
        return tuple(end for end in (self.producer, *self.readers) if not isinstance(end, str))

    @property
    def members(self) -> tuple[int, ...]:
        """The columns of all of its groups."""
        return tuple(dict.fromkeys(column for end in self.ends for column in end))

    @property
    def fixed(self) -> tuple[str, ...]:
        """The precisions that some of its ends have under every plan."""
        return tuple(end for end in (self.producer, *self.readers) if isinstance(end, str))

    def moved(self, places: Sequence[int]) -> Boundary:
        """With other columns: ``places`` has the new one of each, -1 where it goes."""

        def move(end: End) -> End:
            return end if isinstance(end, str) else tuple(places[c] for c in end if places[c] >= 0)

        return Boundary(move(self.producer), tuple(dict.fromkeys(map(move, self.readers))))


class Storage:
    """Numbers for the types that precisions are stored in: 0 is FP32's."""

    def __init__(self, precisions: Iterable[str]) -> None:
        """Number those of some precisions."""
        stored = {name: Precision.named(name).stored for name in (Precision.FP32, *precisions)}
        types = list(dict.fromkeys(stored.values()))
        self.numbers = {name: types.index(row) for name, row in stored.items()}
        self.count = len(types)


class Crossings:
    """How often each boundary is cast, for many plans at a time."""

    def __init__(self, columns: Columns, boundaries: Sequence[Boundary]) -> None:
        """Sort the boundaries by their number of readers, so that those alike are one array operation."""
        precisions = columns.precisions
        ends = list(dict.fromkeys(end for each in boundaries for end in (each.producer, *each.readers)))
        position = {end: index for index, end in enumerate(ends)}
        storage = Storage((*precisions, *(end for end in ends if isinstance(end, str))))
        self._count, self._types = len(boundaries), storage.count
        # Behind the columns there is a row that is True, for what is fixed, and one that is False.
        of_ends = [(len(precisions),) if isinstance(end, str) else end for end in ends]
        width = max(map(len, of_ends), default=0)
        rows = [(*own, *(len(precisions) + 1,) * (width - len(own))) for own in of_ends]
        self._columns = np.array(rows, dtype=np.int64).reshape(len(ends), width).T  # (width, n_ends)
        of_column = np.array([*(storage.numbers[name] for name in precisions), 0, 0], dtype=np.uint8)
        self._type_of: NDArray[np.uint8] = of_column[self._columns]
        for index, end in enumerate(ends):
            if isinstance(end, str):
                self._type_of[:1, index] = storage.numbers[end]
        by_readers: dict[int, list[int]] = {}
        for index, boundary in enumerate(boundaries):
            by_readers.setdefault(len(boundary.readers), []).append(index)
        self._shapes = [
            (
                rows,
                np.array([position[boundaries[row].producer] for row in rows]),
                np.array([[position[end] for end in boundaries[row].readers] for row in rows], dtype=np.int64).T,
            )
            for rows in by_readers.values()
        ]

    def of(self, columns: Bools) -> Counts:
        """How often each boundary is cast in each plan.

        Args:
            columns: shape (n_columns, n_plans); C-contiguous is fastest.

        Returns:
            Shape (n_boundaries, n_plans).
        """
        n_plans = columns.shape[1]
        counts = np.zeros((self._count, n_plans), dtype=np.uint8)
        padded = np.vstack([columns, np.ones((1, n_plans), dtype=bool), np.zeros((1, n_plans), dtype=bool)])
        types = np.zeros((self._columns.shape[1], n_plans), dtype=np.uint8)  # (n_ends, n_plans)
        for rows, numbers in zip(self._columns, self._type_of, strict=True):
            types += padded[rows] * numbers[:, None]
        for shape, producers, readers in self._shapes:
            made = types[producers]  # (n_boundaries of this shape, n_plans)
            if len(readers) == 1:
                counts[shape] = types[readers[0]] != made
                continue
            for number in range(self._types):
                wanted = np.zeros(made.shape, dtype=bool)
                for reader in readers:
                    wanted |= types[reader] == number
                counts[shape] += wanted & (made != number)
        return counts
