"""Casts of a tensor where groups have more than two precisions to choose from.

A plan is a row of booleans with a column for each reduced precision that a group may have, at most one of them True; a
group without any is FP32. A tensor is cast once for each precision, other than its producer's, that it is read in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.tuning.sampler.plan_rows import Bools

FP32, FP16, BF16 = LABELS = (0, 1, 2)

End = tuple[int, int]
"""What makes or reads a tensor: its columns for FP16 and BF16; ``NEVER`` where it cannot be that, ``ALWAYS`` where it
is that under every plan."""

NEVER, ALWAYS = -1, -2

FIXED: tuple[End, End, End] = ((NEVER, NEVER), (ALWAYS, NEVER), (NEVER, ALWAYS))
"""Ends of one precision under every plan, by their label."""


@dataclass(frozen=True)
class Casts:
    """One tensor.

    Attributes:
        producer: what computes it.
        readers: each once.
    """

    producer: End
    readers: tuple[End, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The columns of all of its ends."""
        return tuple(dict.fromkeys(c for end in (self.producer, *self.readers) for c in end if c >= 0))

    def moved(self, places: Sequence[int]) -> Casts:
        """With other columns: ``places`` has the new one of each, or ``NEVER``."""

        def move(end: End) -> End:
            fp16, bf16 = (places[column] if column >= 0 else column for column in end)
            return fp16, bf16

        return Casts(move(self.producer), tuple(dict.fromkeys(map(move, self.readers))))


def labels_of(columns: Bools, ends: Sequence[End]) -> NDArray[np.uint8]:
    """The label of each end in each plan, shape (n_ends, n_plans).

    Args:
        columns: shape (n_columns, n_plans).
        ends: whose labels.
    """
    n_plans = columns.shape[1]
    padded = np.vstack([columns, np.ones((1, n_plans), dtype=bool), np.zeros((1, n_plans), dtype=bool)])
    fp16, bf16 = np.array(ends, dtype=np.int64).reshape(-1, 2).T  # ALWAYS and NEVER are the last two rows
    labels: NDArray[np.uint8] = padded[fp16] * np.uint8(FP16) + padded[bf16] * np.uint8(BF16)
    return labels


class CastCounts:
    """How often each tensor is cast, for many plans at a time."""

    def __init__(self, tensors: Sequence[Casts]) -> None:
        """Sort the tensors by their number of readers."""
        self._ends = list(dict.fromkeys(end for one in tensors for end in (one.producer, *one.readers)))
        position = {end: index for index, end in enumerate(self._ends)}
        self._count = len(tensors)
        by_readers: dict[int, list[int]] = {}
        for index, one in enumerate(tensors):
            by_readers.setdefault(len(one.readers), []).append(index)
        self._shapes = [
            (
                rows,
                np.array([position[tensors[row].producer] for row in rows]),
                np.array([[position[end] for end in tensors[row].readers] for row in rows], dtype=np.int64).T,
            )
            for rows in by_readers.values()
        ]

    def of(self, columns: Bools) -> NDArray[np.uint8]:
        """How often each tensor is cast in each plan.

        Args:
            columns: shape (n_columns, n_plans).

        Returns:
            Shape (n_tensors, n_plans).
        """
        counts = np.zeros((self._count, columns.shape[1]), dtype=np.uint8)
        labels = labels_of(columns, self._ends)
        for rows, producers, readers in self._shapes:
            made = labels[producers]
            if len(readers) == 1:
                counts[rows] = labels[readers[0]] != made
                continue
            for label in LABELS:
                wanted = np.zeros(made.shape, dtype=bool)
                for reader in readers:
                    wanted |= labels[reader] == label
                counts[rows] += wanted & (made != label)
        return counts
