"""Outputs whose number of rows depends on values, compared as sets of rows: detections, selected points.

A score that falls below a threshold takes a row away, and every row behind it moves up: compared by position, the error
would be that of other rows. So rows are paired first. Outputs that the same nodes select, and that have the same number
of rows in every sample of the reference, are rows of one set (boxes, scores and classes). In a pair, whole numbers
(classes, positions, indices of a batch) are equal, boxes overlap, and other columns are near. A row without a partner
is compared with zeros, weighed by its score where the rows have scores: a box just above the threshold counts by what
it says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.whole_set import intersection_over_union

if TYPE_CHECKING:
    from mptune.graph.facts import DependentOutput

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LEAST_IOU = 0.5  # intersection over union from which two boxes are the same, as in PASCAL VOC and COCO's AP50
# Rows further apart, root mean square over the columns in standard deviations of each, are different rows; nearer than
# the second, they are the same, boxes without an area included.
MOST_DISTANCE, SAME_DISTANCE = 1.0, 0.05
_MOST_PAIRS = 4_000_000  # costs that are held at a time, 32 MiB; more rows are paired by a tree of nearest neighbours
_TREE_ROUNDS = 20
_OTHER_COLUMNS = 0.1  # weight of a row's other columns beside intersection over union, which is at most 1
_MOST_COLUMNS = 64  # of an output, by which rows are distinguished; masks and features have thousands


class _Rows(NamedTuple):
    """Rows as they are compared."""

    keys: Floats  # the set, and whole numbers, which are equal in a pair, shape (rows, keys)
    floats: Floats  # other columns in units of their standard deviation, shape (rows, columns)
    boxes: Floats  # corners (x1, y1, x2, y2), shape (rows, 4); no columns where the rows have no boxes


@dataclass(frozen=True, eq=False)
class RowOutput:
    """An output of a set of rows, and what its columns are."""

    name: str
    axis: int  # of the rows
    is_indices: bool  # it is what NonZero returns: a column is a row, of all leading axes together
    is_number: bool  # it holds floats; else its statistics count rows that are there
    keys: tuple[int, ...] = ()  # columns of whole numbers, which must be equal in a pair
    boxes: int | None = None  # first of four columns that are corners
    score: int | None = None  # column of scores from 0 to 1
    floats: tuple[int, ...] = ()  # columns that are compared by distance
    scale: Floats = field(default_factory=lambda: np.ones(0))  # of each of these: standard deviation in the reference

    def fits(self, mine: tuple[int, ...], its: tuple[int, ...]) -> bool:
        """Whether two shapes differ in the number of rows at most."""
        return len(mine) == len(its) and all(
            k == self.axis or x == y for k, (x, y) in enumerate(zip(mine, its, strict=True))
        )

    def rows(self, array: np.ndarray) -> tuple[Floats, Floats]:
        """The rows, shape (rows, columns), and the set that each is in: axes before that of the rows hold sets."""
        axis = self.axis
        if self.is_indices:
            array, axis = np.moveaxis(array, axis, 0), 0
        count, sets, columns = array.shape[axis], math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
        return array.reshape(sets * count, columns).astype(np.float64), np.repeat(np.arange(float(sets)), count)


@dataclass(frozen=True, eq=False)
class AlignedRows:
    """One output of one sample, its rows and the reference's brought together.

    Pairs come first, then rows that only the reference has, then rows that only the output has, beside zeros.
    """

    output: Floats
    reference: Floats
    pairs: int
    unmatched: int


@dataclass(frozen=True, eq=False)
class RowSet:
    """Outputs that are selected together: row k of one belongs to row k of the others."""

    outputs: tuple[RowOutput, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs."""
        return tuple(output.name for output in self.outputs)

    def align(self, got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> dict[str, AlignedRows]:
        """Pair the rows of one sample.

        Outputs that do not have the same number of rows here, whatever the reference has, are paired each for itself.
        """
        sides = [{o.name: o.rows(side[o.name]) for o in self.outputs} for side in (got, wanted)]
        if len({len(rows) for rows, _ in sides[0].values()}) > 1:
            alone = [RowSet((output,)).align(got, wanted) for output in self.outputs]
            return {name: rows for each in alone for name, rows in each.items()}
        mine, its = ({name: rows for name, (rows, _) in side.items()} for side in sides)
        first, second = (self._rows(mine, sides[0][self.names[0]][1]), self._rows(its, sides[1][self.names[0]][1]))
        a, b = _pair(first, second)
        lost = np.setdiff1d(np.arange(len(second.keys)), b)
        added = np.setdiff1d(np.arange(len(first.keys)), a)
        lost_weight, added_weight = self._weights(its)[lost, None], self._weights(mine)[added, None]
        aligned = {}
        for output in self.outputs:
            left, right = mine[output.name], its[output.name]
            if not output.is_number:
                left, right = np.ones((len(left), 1)), np.ones((len(right), 1))
            before, behind = right[lost], left[added]
            if output.score is None or output.boxes is not None:  # scores alone are their own weight
                before, behind = before * lost_weight, behind * added_weight
            aligned[output.name] = AlignedRows(
                np.concatenate([left[a], np.zeros_like(before), behind]),
                np.concatenate([right[b], before, np.zeros_like(behind)]),
                len(a),
                len(lost) + len(added),
            )
        return aligned

    def _weights(self, values: Mapping[str, Floats]) -> Floats:
        """The scores of the rows, 1 where they have none."""
        output = next((output for output in self.outputs if output.score is not None), None)
        if output is None:
            return np.ones(len(values[self.names[0]]))
        scores = values[output.name][:, output.score]
        return np.where(np.isfinite(scores), np.clip(scores, 0.0, 1.0), 1.0)

    def _rows(self, values: Mapping[str, Floats], set_of: Floats) -> _Rows:
        """NaN and Inf become a number that is far from everything: such rows find no partner."""
        far = 1e9
        keys = [values[o.name][:, list(o.keys)] for o in self.outputs]
        floats = [values[o.name][:, list(o.floats)] / o.scale for o in self.outputs]
        boxes = [values[o.name][:, o.boxes : o.boxes + 4] for o in self.outputs if o.boxes is not None]
        finite = (
            np.clip(np.nan_to_num(array, nan=far, posinf=far, neginf=-far), -far, far)
            for array in (np.concatenate(floats, axis=1), boxes[0] if boxes else np.zeros((len(set_of), 0)))
        )
        return _Rows(np.column_stack([set_of, *keys]) + 0.0, *finite)  # -0.0 is 0.0


def aligned_rows(
    row_sets: Sequence[RowSet], got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]
) -> dict[str, AlignedRows]:
    """The outputs of one sample that are compared as rows, paired; those of other shapes beside their rows are not."""
    aligned: dict[str, AlignedRows] = {}
    for rows in row_sets:
        if all(o.fits(np.shape(got[o.name]), np.shape(wanted[o.name])) for o in rows.outputs):
            aligned.update(rows.align(got, wanted))
    return aligned


def find_row_sets(
    dependent: Sequence[DependentOutput], reference: Sequence[Mapping[str, np.ndarray]]
) -> tuple[RowSet, ...]:
    """The sets of rows among the outputs of a model, and what their columns are on the reference."""
    members: dict[tuple[object, ...], list[tuple[DependentOutput, RowOutput, Floats]]] = {}
    for output in dependent:
        arrays = [np.asarray(sample[output.name]) for sample in reference if output.name in sample]
        if len(arrays) != len(reference) or len({array.ndim for array in arrays}) != 1 or not arrays[0].ndim:
            continue
        if any(array.dtype.kind not in "fiub" for array in arrays):
            continue
        axis = output.axis
        if axis is None or axis >= arrays[0].ndim:
            axis = next((k for k in range(arrays[0].ndim) if len({array.shape[k] for array in arrays}) > 1), 0)
        described = RowOutput(output.name, axis, output.is_indices, arrays[0].dtype.kind == "f")
        rows = np.concatenate([described.rows(array)[0] for array in arrays])
        if described.is_number and 4 <= rows.shape[1] <= _MOST_COLUMNS:
            described = replace(described, boxes=_boxes(rows))
        counts = tuple((*(() if output.is_indices else a.shape[:axis]), a.shape[axis]) for a in arrays)
        members.setdefault((output.nodes, counts), []).append((output, described, rows))
    return tuple(RowSet(tuple(_with_columns(each, together) for each in together)) for together in members.values())


def _with_columns(
    member: tuple[DependentOutput, RowOutput, Floats], together: Sequence[tuple[DependentOutput, RowOutput, Floats]]
) -> RowOutput:
    """An output with what its columns are, by all of its rows over the samples; ``together`` are those of its set."""
    dependent, output, rows = member
    if not output.is_number:
        ignored = dependent.index_columns if any(other.is_number for _, other, _ in together) else ()
        return replace(output, keys=tuple(k for k in range(rows.shape[1]) if k not in ignored))
    has_boxes = any(other.boxes is not None for _, other, _ in together)
    columns = range(min(rows.shape[1], _MOST_COLUMNS))
    others = [k for k in columns if output.boxes is None or not output.boxes <= k < output.boxes + 4]
    keys: tuple[int, ...] = ()
    score = None
    if len(rows):
        low, high, is_whole = rows.min(axis=0), rows.max(axis=0), (rows == np.round(rows)).all(axis=0)
        # Whole numbers beside boxes are classes or the like; zeros or ones alone may be scores.
        keys = tuple(k for k in others if has_boxes and is_whole[k] and (high[k] > 1 or low[k] != high[k]))
        if rows.shape[1] == 1 or output.boxes is not None:
            score = next((k for k in others if low[k] >= 0 and high[k] <= 1 and not is_whole[k]), None)
    floats = tuple(k for k in columns if k not in keys)
    scale = np.ones(len(floats))
    if len(rows):
        values = rows[:, list(floats)]
        deviation, rms = values.std(axis=0), np.sqrt((values**2).mean(axis=0))
        scale = np.where(deviation > 1e-9 * rms, deviation, rms)
        scale = np.where((scale > 0) & np.isfinite(scale), scale, 1.0)
    return replace(output, keys=keys, score=score, floats=floats, scale=scale)


def _boxes(rows: Floats) -> int | None:
    """The first of four columns that hold two corners each, the upper left one first."""
    if not len(rows):
        return None
    whole = (rows == np.round(rows)).all(axis=0)  # classes and batches, not corners
    for start in sorted(range(rows.shape[1] - 3), key=lambda k: (whole[k : k + 4].sum(), k)):
        sizes = rows[:, start + 2 : start + 4] - rows[:, start : start + 2]
        if (sizes >= 0).all() and (sizes > 0).all(axis=1).mean() > 0.5:
            return start
    return None


def _pair(mine: _Rows, its: _Rows) -> tuple[Indices, Indices]:
    """Which row is which row of the reference."""
    if len(mine.keys) == len(its.keys) and np.array_equal(mine.keys, its.keys):
        apart = np.sqrt(np.mean((mine.floats - its.floats) ** 2, axis=1)) if mine.floats.size else np.zeros(1)
        if (apart <= SAME_DISTANCE).all():
            return np.arange(len(mine.keys)), np.arange(len(its.keys))
    # Rows of both sides with the same whole numbers: a dictionary, as there may be as many kinds as rows.
    members: dict[bytes, tuple[list[int], list[int]]] = {}
    for side, rows in enumerate((mine, its)):
        for k, key in enumerate(np.ascontiguousarray(rows.keys)):
            members.setdefault(key.tobytes(), ([], []))[side].append(k)
    pairs = [np.zeros((2, 0), np.intp)]
    for left, right in members.values():
        if not left or not right:
            continue
        a, b = np.array(left, np.intp), np.array(right, np.intp)
        first, second = (_Rows(*(part[k] for part in rows)) for rows, k in ((mine, a), (its, b)))
        if not mine.floats.shape[1] and not mine.boxes.shape[1]:
            rows_of_pairs = np.tile(np.arange(min(len(a), len(b))), (2, 1))
        elif len(a) * len(b) <= _MOST_PAIRS:
            rows_of_pairs = _assign(first, second)
        else:
            rows_of_pairs = _by_tree(first.floats, second.floats)
        pairs.append(np.stack([a[rows_of_pairs[0]], b[rows_of_pairs[1]]]))
    joined = np.concatenate(pairs, axis=1)
    return joined[0], joined[1]


def _assign(mine: _Rows, its: _Rows) -> Indices:
    """The pairs of the least total cost, shape (2, pairs), without those of different rows."""
    from scipy.optimize import linear_sum_assignment  # Slow to import, and few models need it.

    squares = np.zeros((len(mine.keys), len(its.keys)))
    for k in range(mine.floats.shape[1]):
        squares += np.subtract.outer(mine.floats[:, k], its.floats[:, k]) ** 2
    apart = np.sqrt(squares / max(1, mine.floats.shape[1]))
    costs, possible = apart, apart <= MOST_DISTANCE
    if mine.boxes.shape[1]:
        overlap = intersection_over_union(mine.boxes, its.boxes)
        costs = 1.0 - overlap + _OTHER_COLUMNS * np.minimum(apart, 1.0)
        # Boxes without an area overlap nothing, themselves included.
        costs = np.where(apart <= SAME_DISTANCE, np.minimum(costs, apart), costs)
        possible = (overlap >= LEAST_IOU) | (apart <= SAME_DISTANCE)
    a, b = linear_sum_assignment(np.where(possible, costs, 1e6))  # it needs finite costs
    return np.stack([a, b])[:, possible[a, b]]


def _by_tree(mine: Floats, its: Floats) -> Indices:
    """Nearest neighbours of each other, round by round, among what is left, shape (2, pairs).

    For more rows than costs can be held of.
    """
    from scipy.spatial import cKDTree  # Slow to import, and few models need it.

    rows, others = np.arange(len(mine)), np.arange(len(its))
    pairs = [np.zeros((2, 0), np.intp)]
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
        pairs.append(np.stack([rows[mutual], others[nearest[mutual]]]))
        others, rows = np.delete(others, nearest[mutual]), np.delete(rows, mutual)
    return np.concatenate(pairs, axis=1)
