"""Outputs whose number of rows depends on values, compared as sets of rows: detections, selected points.

A score that falls below a threshold takes a row away, and every row behind it moves up: so rows are paired before they
are compared. Outputs that the same nodes select, and that have the same number of rows in every sample of the
reference, are one set (boxes, scores and classes). In a pair, whole numbers (classes, positions, indices of a batch)
are equal, boxes overlap, and other columns are near. A row without a partner is compared with zeros, weighed by its
score where the rows have scores: a box just above the threshold counts by what it says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.whole_set import intersection_over_union

if TYPE_CHECKING:
    from mptune.graph.facts import DependentOutput

Arrays = Mapping[str, np.ndarray]
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

LEAST_IOU = 0.5  # intersection over union from which two boxes are the same, as in PASCAL VOC and COCO's AP50
# Rows further apart, root mean square over the columns in standard deviations of each, are different rows; nearer than
# the second, they are the same, boxes without an area included.
MOST_DISTANCE, SAME_DISTANCE = 1.0, 0.05
_MOST_PAIRS = 4_000_000  # costs that are held at a time, 32 MiB; more rows are compared in their order
_OTHER_COLUMNS = 0.1  # weight of a row's other columns beside intersection over union, which is at most 1
_MOST_COLUMNS = 64  # of an output, by which rows are distinguished; masks and features have thousands
_FAR = 1e9  # stands for NaN and Inf: such rows have no partner


class AlignedRows(NamedTuple):
    """One output of one sample, its rows and the reference's brought together.

    Pairs come first, then rows that only the reference has, then rows that only the output has, beside zeros.
    """

    output: Floats
    reference: Floats
    pairs: int


@dataclass(frozen=True)
class RowOutput:
    """An output of a set of rows."""

    name: str
    axis: int  # of the rows
    is_indices: bool  # it is what NonZero returns: a column is a row, of all leading axes together
    is_number: bool  # it holds floats; else its statistics count rows that are there
    index_columns: tuple[int, ...] = ()  # positions in another value, which need not agree

    def fits(self, mine: tuple[int, ...], its: tuple[int, ...]) -> bool:
        """Whether two shapes differ in the number of rows at most."""
        return len(mine) == len(its) and all(k == self.axis or mine[k] == its[k] for k in range(len(mine)))

    def rows(self, array: np.ndarray) -> Floats:
        """The rows, behind a column with the set that each is in: axes before that of the rows hold sets."""
        axis = self.axis
        if self.is_indices:
            array, axis = np.moveaxis(array, axis, 0), 0
        count, sets, columns = array.shape[axis], math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
        return np.column_stack([np.repeat(np.arange(float(sets)), count), array.reshape(sets * count, columns)])


@dataclass(frozen=True, eq=False)
class RowSet:
    """Outputs that are selected together: row k of one belongs to row k of the others.

    Columns are those of all outputs side by side, behind the one of ``RowOutput.rows`` with the set.
    """

    outputs: tuple[RowOutput, ...]
    starts: tuple[int, ...]  # first column of each output, and the number of all
    keys: tuple[int, ...]  # columns of whole numbers, which must be equal in a pair
    floats: tuple[int, ...]  # columns that are compared by distance
    scale: Floats  # of each of these: standard deviation in the reference
    boxes: int | None  # first of four columns that are corners (x1, y1, x2, y2)
    score: int | None  # column of scores from 0 to 1

    @classmethod
    def find(cls, outputs: Sequence[RowOutput], reference: Sequence[Arrays]) -> RowSet:
        """A set of outputs, with what their columns are by all of their rows in the reference."""
        rows = np.concatenate([_columns_of(outputs, sample) for sample in reference])
        low, high = rows.min(axis=0, initial=math.inf), rows.max(axis=0, initial=-math.inf)
        is_whole = (rows == np.round(rows)).all(axis=0)
        sizes = [output.rows(np.asarray(reference[0][output.name])).shape[1] - 1 for output in outputs]
        starts = tuple(itertools.accumulate(sizes, initial=1))
        spans = {output: range(*ends) for output, ends in zip(outputs, itertools.pairwise(starts), strict=True)}
        numbers = {output: span[:_MOST_COLUMNS] for output, span in spans.items() if output.is_number}
        boxes = next(filter(None, (_boxes(rows, span) for span in numbers.values())), None)
        corners = range(boxes, boxes + 4) if boxes is not None else range(0)
        keys, floats = [0], list[int]()
        score = None
        for output, span in spans.items():
            if output not in numbers:
                keys += [k for k in span if not numbers or k - span.start not in output.index_columns]
                continue
            for k in numbers[output]:
                # Whole numbers beside boxes are classes or the like; zeros or ones alone may be scores.
                is_key = k not in corners and corners and is_whole[k] and (high[k] > 1 or low[k] != high[k])
                (keys if is_key else floats).append(k)
                may_score = len(span) == 1 or (corners.start in span and k not in corners)
                if score is None and may_score and low[k] >= 0 and high[k] <= 1 and not is_whole[k]:
                    score = k
        values = rows[:, floats] if len(rows) else np.ones((1, len(floats)))
        deviation, rms = values.std(axis=0), np.sqrt((values**2).mean(axis=0))
        scale = np.where(deviation > 1e-9 * rms, deviation, rms)
        scale = np.where((scale > 0) & np.isfinite(scale), scale, 1.0)
        return cls(tuple(outputs), starts, tuple(keys), tuple(floats), scale, boxes, score)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs."""
        return tuple(output.name for output in self.outputs)

    def align(self, got: Arrays, wanted: Arrays) -> dict[str, AlignedRows]:
        """Pair the rows of one sample.

        Outputs that do not have the same number of rows here, whatever the reference has, are paired each for itself.
        """
        if len({len(output.rows(np.asarray(got[output.name]))) for output in self.outputs}) > 1:
            alone = [RowSet.find([output], [wanted]).align(got, wanted) for output in self.outputs]
            return {name: rows for each in alone for name, rows in each.items()}
        mine, its = _columns_of(self.outputs, got), _columns_of(self.outputs, wanted)
        a, b = self._pair(mine, its)
        lost, added = its[np.setdiff1d(np.arange(len(its)), b)], mine[np.setdiff1d(np.arange(len(mine)), a)]
        aligned = {}
        for output, (start, end) in zip(self.outputs, itertools.pairwise(self.starts), strict=True):
            left, right, before, behind = (
                rows[:, start:end] if output.is_number else np.ones((len(rows), 1)) for rows in (mine, its, lost, added)
            )
            if self.score is not None and (start, end) != (self.score, self.score + 1):  # scores are their own weight
                before, behind = (
                    rows * np.clip(np.nan_to_num(whole[:, [self.score]], nan=1.0), 0.0, 1.0)
                    for rows, whole in ((before, lost), (behind, added))
                )
            together = np.concatenate([left[a], np.zeros_like(before), behind])
            expected = np.concatenate([right[b], before, np.zeros_like(behind)])
            aligned[output.name] = AlignedRows(together, expected, len(a))
        return aligned

    def _pair(self, mine: Floats, its: Floats) -> Indices:
        """Which row is which row of the reference, shape (2, pairs)."""
        keys, its_keys = (rows[:, self.keys] + 0.0 for rows in (mine, its))  # -0.0 is 0.0
        corners = range(0) if self.boxes is None else range(self.boxes, self.boxes + 4)
        values = *(rows[:, self.floats] / self.scale for rows in (mine, its)), mine[:, corners], its[:, corners]
        floats, its_floats, boxes, its_boxes = (
            np.clip(np.nan_to_num(each, nan=_FAR, posinf=_FAR, neginf=-_FAR), -_FAR, _FAR) for each in values
        )
        if np.array_equal(keys, its_keys):
            apart = ((floats - its_floats) ** 2).sum(axis=1)
            if (apart <= SAME_DISTANCE**2 * len(self.floats)).all():
                return np.tile(np.arange(len(mine)), (2, 1))
        # Rows of both sides with the same whole numbers: a dictionary, as there may be as many kinds as rows.
        members: dict[bytes, tuple[list[int], list[int]]] = {}
        for side, rows in enumerate((keys, its_keys)):
            for k, key in enumerate(np.ascontiguousarray(rows)):
                members.setdefault(key.tobytes(), ([], []))[side].append(k)
        pairs = [np.zeros((2, 0), np.intp)]
        for a, b in members.values():
            together = np.tile(np.arange(min(len(a), len(b))), (2, 1))
            if self.floats and len(a) * len(b) <= _MOST_PAIRS:
                together = _assign(floats[a], its_floats[b], boxes[a], its_boxes[b])
            pairs.append(np.stack([np.array(a, np.intp)[together[0]], np.array(b, np.intp)[together[1]]]))
        return np.concatenate(pairs, axis=1)


def _columns_of(outputs: Sequence[RowOutput], sample: Arrays) -> Floats:
    """The rows of all outputs side by side, behind their set."""
    every = [output.rows(np.asarray(sample[output.name])) for output in outputs]
    return np.concatenate([every[0], *(rows[:, 1:] for rows in every[1:])], axis=1)


def _boxes(rows: Floats, span: range) -> int | None:
    """The first of four columns that hold two corners each, the upper left one first."""
    whole = (rows == np.round(rows)).all(axis=0)  # classes and batches, not corners
    for start in sorted(span[:-3], key=lambda k: (whole[k : k + 4].sum(), k)):
        sizes = rows[:, start + 2 : start + 4] - rows[:, start : start + 2]
        if len(rows) and (sizes >= 0).all() and (sizes > 0).all(axis=1).mean() > 0.5:
            return start
    return None


def _assign(floats: Floats, its_floats: Floats, boxes: Floats, its_boxes: Floats) -> Indices:
    """The pairs of the least total cost, shape (2, pairs), without those of different rows."""
    from scipy.optimize import linear_sum_assignment  # Slow to import, and few models need it.

    squares = np.zeros((len(floats), len(its_floats)))
    for mine, its in zip(floats.T, its_floats.T, strict=True):
        squares += np.subtract.outer(mine, its) ** 2
    costs = apart = np.sqrt(squares / max(1, floats.shape[1]))
    possible = apart <= MOST_DISTANCE
    if boxes.shape[1]:
        overlap = intersection_over_union(boxes, its_boxes)
        costs = 1.0 - overlap + _OTHER_COLUMNS * np.minimum(apart, 1.0)
        # Boxes without an area overlap nothing, themselves included.
        costs = np.where(apart <= SAME_DISTANCE, np.minimum(costs, apart), costs)
        possible = (overlap >= LEAST_IOU) | (apart <= SAME_DISTANCE)
    a, b = linear_sum_assignment(np.where(possible, costs, 1e6))  # it needs finite costs
    return np.stack([a, b])[:, possible[a, b]]


def aligned_rows(row_sets: Sequence[RowSet], got: Arrays, wanted: Arrays) -> dict[str, AlignedRows]:
    """The outputs of one sample that are compared as rows, paired; those of other shapes beside their rows are not."""
    aligned: dict[str, AlignedRows] = {}
    for rows in row_sets:
        if all(o.fits(np.shape(got[o.name]), np.shape(wanted[o.name])) for o in rows.outputs):
            aligned.update(rows.align(got, wanted))
    return aligned


def find_row_sets(dependent: Sequence[DependentOutput], reference: Sequence[Arrays]) -> tuple[RowSet, ...]:
    """The sets of rows among the outputs of a model, and what their columns are on the reference."""
    members: dict[tuple[object, ...], list[RowOutput]] = {}
    for output in dependent:
        arrays = [np.asarray(sample[output.name]) for sample in reference if output.name in sample]
        rank = arrays[0].ndim if arrays else 0
        is_odd = any(array.ndim != rank or array.dtype.kind not in "fiub" for array in arrays)
        if not rank or is_odd or len(arrays) != len(reference):
            continue
        axis = output.axis
        if axis is None or axis >= rank:
            axis = next((k for k in range(rank) if len({array.shape[k] for array in arrays}) > 1), 0)
        counts = tuple((*(() if output.is_indices else a.shape[:axis]), a.shape[axis]) for a in arrays)
        is_number = arrays[0].dtype.kind == "f"
        described = RowOutput(output.name, axis, output.is_indices, is_number, output.index_columns)
        members.setdefault((output.nodes, counts), []).append(described)
    return tuple(RowSet.find(together, reference) for together in members.values())
