"""Plans as rows of booleans, a column for each free group; their texts, and their keys."""

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
    """What the columns of rows stand for: a free group is FP32 where its column is False.

    Attributes:
        groups: ids of the free groups.
        precisions: of each group where its column is True.
    """

    groups: tuple[str, ...]
    precisions: tuple[str, ...]

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


def unique_plans(plans: Sequence[Bools], n_groups: int) -> Bools:
    """Plans of several sources, each once, in the order of their first occurrence."""
    rows = np.concatenate([np.asarray(p, dtype=bool).reshape(-1, n_groups) for p in plans])
    kept: Bools = rows[np.sort(np.unique(plan_keys(rows), return_index=True)[1])]
    return kept


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
