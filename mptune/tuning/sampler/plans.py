"""Plans as rows of booleans, a column for each free group; their texts and keys; the boundaries that they cross.

False is FP32. A boundary is a tensor that groups share: it is cast once for each type, other than its producer's, that
it is read in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mptune.graph.precision import Precision

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

    def of(self, columns: Bools) -> NDArray[np.uint8]:
        """How often each boundary is cast in each plan, shape (n_boundaries, n_plans).

        ``columns`` are the plans, shape (n_groups, n_plans); C-contiguous is fastest.
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
