"""Which rows of two sets are the same row: boxes by overlap, other rows by distance, whole numbers by equality.

* Whole numbers must be equal for two rows to be a pair.
* Boxes ``(x1, y1, x2, y2)`` are pairs by intersection over union, at least ``LEAST_IOU``; the rest of the row decides
  between equals.
* Other rows are pairs by the distance of their columns, each in its own standard deviation, at most ``MOST_DISTANCE``.

Pairs are nearest neighbours of each other first. What is left over is assigned with the least total cost (Crouse, IEEE
Transactions on Aerospace and Electronic Systems 52(4), 2016, as SciPy has it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.sets.boxes import intersection_over_union

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LEAST_IOU = 0.5
"""Intersection over union from which two boxes are the same: the threshold of PASCAL VOC and of COCO's AP50."""

MOST_DISTANCE = 1.0
"""Rows further apart, root mean square over the columns in standard deviations of each, are different rows."""

SAME_DISTANCE = 0.05
"""Rows nearer than this are the same, boxes without an area included. Where all rows are in their order, it holds."""

_MOST_PAIRS = 4_000_000
"""Costs that are held at a time, 32 MiB; more rows are paired by a tree of nearest neighbours."""

_TREE_ROUNDS = 20
_OTHER_COLUMNS = 0.1
"""Weight of a row's other columns beside intersection over union, which is at most 1."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows as they are compared.

    Attributes:
        keys: whole numbers, which are equal in a pair, shape (rows, keys).
        floats: other columns in units of their standard deviation, shape (rows, columns).
        boxes: corners (x1, y1, x2, y2), shape (rows, 4); None where the rows have no boxes.
    """

    keys: Floats
    floats: Floats
    boxes: Floats | None

    def take(self, rows: Indices) -> Columns:
        """Some of the rows."""
        return Columns(self.keys[rows], self.floats[rows], None if self.boxes is None else self.boxes[rows])


def same_keys(mine: Floats, its: Floats) -> Iterator[tuple[Indices, Indices]]:
    """The rows of both sides that have the same whole numbers."""
    if mine.shape[1] == 0:
        yield np.arange(len(mine), dtype=np.intp), np.arange(len(its), dtype=np.intp)
        return
    rows: dict[bytes, list[int]] = {}
    others: dict[bytes, list[int]] = {}
    for keys, found in ((mine, rows), (its, others)):
        for k, key in enumerate(np.ascontiguousarray(keys + 0.0)):  # -0.0 is 0.0
            found.setdefault(key.tobytes(), []).append(k)
    for key, members in rows.items():
        if key in others:
            yield np.array(members, dtype=np.intp), np.array(others[key], dtype=np.intp)


def pair(mine: Columns, its: Columns) -> tuple[Indices, Indices]:
    """Pairs among rows with the same whole numbers."""
    if not len(mine.keys) or not len(its.keys) or (mine.boxes is None and mine.floats.shape[1] == 0):
        every = np.arange(min(len(mine.keys), len(its.keys)), dtype=np.intp)
        return every, every
    if len(mine.keys) * len(its.keys) <= _MOST_PAIRS:
        costs = _costs(mine, its)
        return _assign(costs)
    return _by_tree(mine.floats, its.floats)


def _costs(mine: Columns, its: Columns) -> Floats:
    """What a pair costs, shape (rows, rows of the reference); infinite where rows are different ones."""
    width = max(1, mine.floats.shape[1])
    squares = np.zeros((len(mine.keys), len(its.keys)))
    for k in range(mine.floats.shape[1]):
        squares += np.subtract.outer(mine.floats[:, k], its.floats[:, k]) ** 2
    apart = np.sqrt(squares / width)
    if mine.boxes is None or its.boxes is None:
        return np.where(apart <= MOST_DISTANCE, apart, np.inf)
    overlap = intersection_over_union(mine.boxes, its.boxes)
    costs = 1.0 - overlap + _OTHER_COLUMNS * np.minimum(apart, 1.0)
    # Boxes without an area overlap nothing, themselves included.
    costs = np.where(apart <= SAME_DISTANCE, np.minimum(costs, apart), costs)
    return np.where((overlap >= LEAST_IOU) | (apart <= SAME_DISTANCE), costs, np.inf)


def _assign(costs: Floats) -> tuple[Indices, Indices]:
    """Nearest neighbours of each other first, then the rest with the least total cost."""
    nearest, back = costs.argmin(axis=1), costs.argmin(axis=0)
    rows = np.arange(len(costs))
    mutual = (back[nearest] == rows) & np.isfinite(costs[rows, nearest])
    a, b = rows[mutual], nearest[mutual]
    left, right = rows[~mutual], np.setdiff1d(np.arange(costs.shape[1]), b)
    rest = costs[np.ix_(left, right)]
    possible = np.isfinite(rest)
    left, right = left[possible.any(axis=1)], right[possible.any(axis=0)]
    rest = costs[np.ix_(left, right)]
    if rest.size:
        from scipy.optimize import linear_sum_assignment  # Slow to import, and few models need it.

        forbidden = 1e6
        i, j = linear_sum_assignment(np.where(np.isfinite(rest), rest, forbidden))
        allowed = np.isfinite(rest[i, j])
        a, b = np.concatenate([a, left[i[allowed]]]), np.concatenate([b, right[j[allowed]]])
    return a, b


def _by_tree(mine: Floats, its: Floats) -> tuple[Indices, Indices]:
    """Nearest neighbours of each other, round by round, among what is left: for more rows than costs can be held of."""
    from scipy.spatial import cKDTree  # Slow to import, and few models need it.

    rows, others = np.arange(len(mine)), np.arange(len(its))
    a: list[Indices] = []
    b: list[Indices] = []
    limit = MOST_DISTANCE * np.sqrt(mine.shape[1])
    for _ in range(_TREE_ROUNDS):
        if not len(rows) or not len(others):
            break
        distance, nearest = cKDTree(its[others]).query(mine[rows], distance_upper_bound=limit)
        _, back = cKDTree(mine[rows]).query(its[others])
        near = np.flatnonzero(np.isfinite(distance))
        mutual = near[back[nearest[near]] == near]
        if not len(mutual):
            break
        a.append(rows[mutual])
        b.append(others[nearest[mutual]])
        others = np.delete(others, nearest[mutual])
        rows = np.delete(rows, mutual)
    empty = np.zeros(0, dtype=np.intp)
    return np.concatenate([empty, *a]), np.concatenate([empty, *b])


def finite(values: Floats) -> Floats:
    """NaN and Inf as a number that is far from everything: such rows find no partner."""
    far = 1e9
    return np.clip(np.nan_to_num(values, nan=far, posinf=far, neginf=-far), -far, far)
