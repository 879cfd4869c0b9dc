"""Plans as rows of booleans (True is FP16, or what else a group is if not FP32), their texts, and their keys.

The sampler's mathematics is binary: a minimum cut is exact for two labels only. A plan with any other precision has no
row (``to_row``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mptune.graph.plan import Precision

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

PRECISIONS = (str(Precision.FP32), str(Precision.FP16))
"""Choices of a group's parameter; the position is the boolean of a row."""

_MULTIPLIER, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)  # 2^64 / golden ratio: Fibonacci hashing


_IS_FP16 = {precision: bool(position) for position, precision in enumerate(PRECISIONS)}


def to_row(choices: Mapping[str, str], groups: Sequence[str], reduced: Sequence[str] = ()) -> list[bool] | None:
    """The precisions of these groups as booleans; None where one is missing, or neither of the group's two.

    Args:
        choices: group -> precision.
        groups: in the order of the row; one that may have both reduced precisions stands there twice.
        reduced: what each is where it is not FP32; empty where all are FP16.
    """
    if reduced and len(set(groups)) < len(groups):
        names: dict[str, set[str]] = {}
        for group, name in zip(groups, reduced, strict=True):
            names.setdefault(group, {PRECISIONS[0]}).add(name)
        if any(choices.get(group, "") not in of for group, of in names.items()):
            return None
        return [choices[group] == name for group, name in zip(groups, reduced, strict=True)]
    if any(name != PRECISIONS[1] for name in reduced):
        two = ({PRECISIONS[0]: False, name: True} for name in reduced)
        row = [of.get(choices.get(group, "")) for group, of in zip(groups, two, strict=True)]
    else:
        row = [_IS_FP16.get(choices.get(group, "")) for group in groups]
    return None if None in row else [bool(is_reduced) for is_reduced in row]


def choices_of(row: Sequence[bool] | Bools, groups: Sequence[str], reduced: Sequence[str] = ()) -> dict[str, str]:
    """Group -> precision of a row; arguments as ``to_row`` takes them."""
    names = reduced or (PRECISIONS[1],) * len(groups)
    choices = dict.fromkeys(groups, PRECISIONS[0])
    choices.update({g: name for g, name, is_reduced in zip(groups, names, row, strict=True) if is_reduced})
    return choices


def to_bits(plan: Bools) -> str:
    """A row as text, such as ``"0110"`` with 1 for FP16."""
    return (np.asarray(plan, dtype=np.uint8) + ord("0")).tobytes().decode("ascii")


def from_bits(texts: Sequence[str]) -> Bools:
    """The rows of such texts, shape (n_plans, n_groups)."""
    rows: Bools = np.frombuffer("".join(texts).encode("ascii"), dtype=np.uint8).reshape(len(texts), -1) == ord("1")
    return rows


def unique_plans(plans: Sequence[Bools], n_groups: int) -> Bools:
    """Plans of several sources, each once, in the order of their first occurrence."""
    rows = np.concatenate([np.asarray(p, dtype=bool).reshape(-1, n_groups) for p in plans])
    kept: Bools = rows[np.sort(np.unique(plan_keys(rows), return_index=True)[1])]
    return kept


def plan_keys(plans: Bools) -> NDArray[np.uint64]:
    """A number for each row: up to 64 groups the plan itself, of more its hash.

    Args:
        plans: shape (n_plans, n_groups).

    Returns:
        Shape (n_plans,).
    """
    packed = np.packbits(plans, axis=1)
    padded = np.zeros((len(packed), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    words = padded.view(np.uint64)  # (n_plans, n_words)
    mixed: NDArray[np.uint64] = np.zeros(len(plans), dtype=np.uint64)
    for word in words.T:
        mixed = (mixed ^ (mixed >> _SHIFT)) * _MULTIPLIER ^ word
    return mixed
