"""Boundaries: tensors that groups share, and how often each is cast under a plan.

A plan is a row of booleans, one for each free group; False is FP32. A tensor is cast once for each type, other than its
producer's, that it is read in.
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

End = int | str
"""What makes or reads a tensor: the column of a free group, or the precision that it has under every plan."""


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
        """Of free groups, and of what has these precisions under every plan; any of them may compute it."""
        ends: tuple[End, ...] = (*columns, *fixed)
        return cls(ends[0], ends[1:])

    def to_json(self) -> list[End]:
        """Producer and readers."""
        return [self.producer, *self.readers]

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> Boundary:
        """Inverse of ``to_json``."""
        producer, *readers = (end if isinstance(end, str) else int(end) for end in document)
        return cls(producer, tuple(readers))

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

    def of(self, columns: Bools) -> Counts:
        """How often each boundary is cast in each plan.

        Args:
            columns: shape (n_groups, n_plans); C-contiguous is fastest.

        Returns:
            Shape (n_boundaries, n_plans).
        """
        n_plans = columns.shape[1]
        fixed = np.broadcast_to(self._fixed[:, None], (len(self._fixed), n_plans))
        types = np.vstack([columns * self._reduced[:, None], fixed])
        counts = np.zeros((self._count, n_plans), dtype=np.uint8)
        for shape, producers, readers in self._shapes:
            made = types[producers]  # (n_boundaries of this shape, n_plans)
            if len(readers) == 1:
                counts[shape] = types[readers[0]] != made
                continue
            for number in range(self._n_types):
                wanted = np.zeros(made.shape, dtype=bool)
                for reader in readers:
                    wanted |= types[reader] == number
                counts[shape] += wanted & (made != number)
        return counts
