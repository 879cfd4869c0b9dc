"""Outputs whose rows are selected by values, compared as sets of rows: detections, queries, selected points.

Rounding moves rows, so they are paired before they are compared. Outputs that the same nodes select, and that have the
same number of rows in every sample of the reference, are one set (boxes, scores and classes). In a pair, whole numbers
(classes, positions, indices of a batch) are equal, boxes overlap, and other columns are near. A row without a partner
is foreign.

Where values decide how many rows there are (``RowSet``), a foreign row is compared with zeros, weighed by its score
where the rows have scores: a box just above the threshold counts by what it says. TopK always selects as many
(``Selection``), and which of two alike comes last says little: there foreign rows are left out and counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.parts import OutputParts
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
_SEVERAL_COLUMNS = 256  # of a selection, by which rows are distinguished: every so many of more
_MOST_COLUMNS = 64  # of an output, by which rows are distinguished; masks and features have thousands
_FAR = 1e9  # stands for NaN and Inf: such rows have no partner


class AlignedRows(NamedTuple):
    """One output of one sample, its rows and the reference's brought together.

    Pairs come first, then rows that only the reference has, then rows that only the output has, beside zeros. A
    selection keeps the reference's shape and order; in foreign rows the reference is NaN, and they do not count.
    """

    output: np.ndarray
    reference: np.ndarray
    pairs: int | None  # None of a selection
    foreign: float  # share of the rows of both sides


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
class _Together:
    """Outputs that are selected together: row k of one belongs to row k of the others."""

    outputs: tuple[RowOutput, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs."""
        return tuple(output.name for output in self.outputs)


@dataclass(frozen=True, eq=False)
class RowSet(_Together):
    """Outputs of as many rows as values select.

    Columns are those of all outputs side by side, behind the one of ``RowOutput.rows`` with the set.
    """

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
        return cls(tuple(outputs), starts, tuple(keys), tuple(floats), _scales(rows[:, floats]), boxes, score)

    def align(self, got: Arrays, wanted: Arrays, parts: Mapping[str, OutputParts]) -> dict[str, AlignedRows]:
        """Pair the rows of one sample.

        Outputs that do not have the same number of rows here, whatever the reference has, are paired each for itself.
        """
        if len({len(output.rows(np.asarray(got[output.name]))) for output in self.outputs}) > 1:
            alone = [RowSet.find([output], [wanted]).align(got, wanted, parts) for output in self.outputs]
            return {name: rows for each in alone for name, rows in each.items()}
        mine, its = _columns_of(self.outputs, got), _columns_of(self.outputs, wanted)
        a, b = self._pair(mine, its)
        lost, added = its[np.setdiff1d(np.arange(len(its)), b)], mine[np.setdiff1d(np.arange(len(mine)), a)]
        aligned, share = {}, (len(lost) + len(added)) / max(1, len(mine) + len(its))
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
            aligned[output.name] = AlignedRows(together, expected, len(a), share)
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
                together = nearest_pairs(_costs(floats[a], its_floats[b], boxes[a], its_boxes[b]))
            pairs.append(np.stack([np.array(a, np.intp)[together[0]], np.array(b, np.intp)[together[1]]]))
        return np.concatenate(pairs, axis=1)


def _columns_of(outputs: Sequence[RowOutput], sample: Arrays) -> Floats:
    """The rows of all outputs side by side, behind their set."""
    every = [output.rows(np.asarray(sample[output.name])) for output in outputs]
    return np.concatenate([every[0], *(rows[:, 1:] for rows in every[1:])], axis=1)


def _scales(rows: Floats) -> Floats:
    """Of each column: its standard deviation, else root mean square, else 1."""
    values = rows if len(rows) else np.ones((1, rows.shape[1]))
    deviation, rms = values.std(axis=0), np.sqrt((values**2).mean(axis=0))
    scale = np.where(deviation > 1e-9 * rms, deviation, rms)
    return np.where((scale > 0) & np.isfinite(scale), scale, 1.0)


def _boxes(rows: Floats, span: range) -> int | None:
    """The first of four columns that hold two corners each, the upper left one first."""
    whole = (rows == np.round(rows)).all(axis=0)  # classes and batches, not corners
    for start in sorted(span[:-3], key=lambda k: (whole[k : k + 4].sum(), k)):
        sizes = rows[:, start + 2 : start + 4] - rows[:, start : start + 2]
        if len(rows) and (sizes >= 0).all() and (sizes > 0).all(axis=1).mean() > 0.5:
            return start
    return None


def _costs(floats: Floats, its_floats: Floats, boxes: Floats, its_boxes: Floats) -> Floats:
    """How unlike rows are, shape (rows, rows of the reference); inf between different ones."""
    apart = distances(floats, its_floats)
    if not boxes.shape[1]:
        return np.where(apart <= MOST_DISTANCE, apart, np.inf)
    overlap = intersection_over_union(boxes, its_boxes)
    costs = 1.0 - overlap + _OTHER_COLUMNS * np.minimum(apart, 1.0)
    # Boxes without an area overlap nothing, themselves included.
    costs = np.where(apart <= SAME_DISTANCE, np.minimum(costs, apart), costs)
    return np.where((overlap >= LEAST_IOU) | (apart <= SAME_DISTANCE), costs, np.inf)


@dataclass(frozen=True, eq=False)
class Selection(_Together):
    """Outputs of the rows that one TopK selects. Columns are those of all outputs side by side."""

    keys: tuple[int, ...]  # columns of whole numbers, which must be equal in a pair
    floats: tuple[int, ...]  # columns that are compared by distance
    scale: Floats  # of each of these

    @classmethod
    def find(cls, outputs: Sequence[RowOutput], reference: Sequence[Arrays]) -> Selection:
        """Outputs, with what their columns are by all of their rows in the reference."""
        rows = np.concatenate([_columns_of(outputs, sample)[:, 1:] for sample in reference])
        is_key = (rows == np.round(rows)).all(axis=0) & (rows.max(axis=0, initial=0.0) > 1)
        floats = np.flatnonzero(~is_key)
        floats = floats[:: 1 + len(floats) // _SEVERAL_COLUMNS]
        keys = tuple(np.flatnonzero(is_key).tolist())
        return cls(tuple(outputs), keys, tuple(floats.tolist()), _scales(rows[:, floats]))

    def form(self, wanted: Arrays, parts: Mapping[str, OutputParts]) -> dict[str, Any]:
        """What ``pair_selection`` takes, JSON; ``shape`` is that of a row: before, columns that are parts, behind."""
        outputs = []
        for name, axis in ((output.name, output.axis) for output in self.outputs):
            part, shape = parts.get(name), np.shape(wanted[name])
            at, scales = axis, [math.inf if part is None else part.whole or 1.0]
            if part is not None and part.is_split and part.axis is not None:
                at, scales = part.axis, part.divisors.tolist()
            inner = math.prod(shape[axis + 1 : at]), len(scales), math.prod(shape[at + 1 :])
            outputs.append({"name": name, "axis": axis, "shape": inner, "scales": scales})
        return {"outputs": outputs, "keys": self.keys, "floats": self.floats, "scale": self.scale.tolist()}

    def align(self, got: Arrays, wanted: Arrays, parts: Mapping[str, OutputParts]) -> dict[str, AlignedRows]:
        """Pair the rows of one sample."""
        pairs, share = pair_selection(self.form(wanted, parts), got, wanted)
        return {name: AlignedRows(*pair, None, share) for name, pair in pairs.items()}


# ``infer.py`` has the source of the next three, which need NumPy alone.
def distances(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Root mean square over the columns between all rows of two arrays, shape (rows, others)."""
    squares = (rows**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2.0 * rows @ others.T
    return np.asarray(np.sqrt(np.maximum(squares, 0.0) / max(1, rows.shape[1])))


def nearest_pairs(costs: np.ndarray) -> np.ndarray:
    """Rows that are each other's nearest, then those of the rest, and so on, shape (2, pairs); inf: never."""
    pairs, rows = [np.zeros((2, 0), np.intp)], np.arange(len(costs))
    while costs.size:
        nearest = costs.argmin(axis=1)
        mutual = rows[(costs.argmin(axis=0)[nearest] == rows) & np.isfinite(costs[rows, nearest])]
        if not mutual.size:
            break
        pairs.append(np.stack([mutual, nearest[mutual]]))
        costs[mutual], costs[:, nearest[mutual]] = np.inf, np.inf
    return np.concatenate(pairs, axis=1)


def pair_selection(
    form: Mapping[str, Any], got: Arrays, wanted: Arrays
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], float]:
    """Pair the rows that TopK selects: name -> output and reference, and the share of foreign rows.

    A row is foreign without a partner, or where that is further away than a tenth of some part's scale; the reference
    is NaN there. NaN of the output counts, and all rows do where more than half are foreign: the plan is wrong there.
    """
    names, axis = [output["name"] for output in form["outputs"]], form["outputs"][0]["axis"]
    sizes = wanted[names[0]].shape[: axis + 1]
    number, count = sizes[axis], int(np.prod(sizes))
    mine, its = ([np.asarray(side[name], np.float64).reshape(count, -1) for name in names] for side in (got, wanted))
    ours, theirs = np.concatenate(mine, axis=1), np.concatenate(its, axis=1)
    a, b = (np.nan_to_num(rows[:, form["floats"]] / form["scale"], nan=1e9) for rows in (ours, theirs))
    partner, foreign = np.arange(count), np.zeros(count, bool)
    for start in range(0, count if number <= 2000 else 0, number):  # the rows of one image; more keep their order
        rows = slice(start, start + number)
        costs = distances(a[rows], b[rows])
        equal = np.flatnonzero((a[rows] == b[rows]).all(axis=1))
        costs[equal, equal] = -1.0  # before others that are as near as rounding tells
        costs[costs > 1.0] = np.inf
        for key in form["keys"]:
            costs[np.not_equal.outer(ours[rows, key], theirs[rows, key])] = np.inf
        first, second = nearest_pairs(costs)
        left = start + np.setdiff1d(np.arange(number), second)
        foreign[left] = True
        partner[start + second], partner[left] = start + first, start + np.setdiff1d(np.arange(number), first)
    for k, output in enumerate(form["outputs"]):
        apart = (mine[k][partner] - its[k]).reshape(count, *output["shape"])
        foreign |= (np.sqrt((apart**2).mean(axis=(1, 3))) > 0.1 * np.array(output["scales"])).any(axis=1)
    foreign &= np.isfinite(ours[partner]).all(axis=1)
    share = float(foreign.mean())
    pairs = {}
    for k, name in enumerate(names):
        kind = wanted[name].dtype if wanted[name].dtype.kind == "f" else np.float64
        expected = np.where((foreign & (share <= 0.5))[:, None], np.nan, its[k])
        ordered, counted = (rows.astype(kind).reshape(wanted[name].shape) for rows in (mine[k][partner], expected))
        pairs[name] = ordered, counted
    return pairs, share


AnyRows: TypeAlias = RowSet | Selection


def aligned_rows(
    row_sets: Sequence[AnyRows], got: Arrays, wanted: Arrays, parts: Mapping[str, OutputParts]
) -> dict[str, AlignedRows]:
    """The outputs of one sample that are compared as rows, paired; those of other shapes beside their rows are not."""
    aligned: dict[str, AlignedRows] = {}
    for rows in row_sets:
        shapes = [(o, np.shape(got[o.name]), np.shape(wanted[o.name])) for o in rows.outputs]
        is_same = all(mine == its and math.prod(its) for _, mine, its in shapes)
        if is_same if isinstance(rows, Selection) else all(o.fits(mine, its) for o, mine, its in shapes):
            aligned.update(rows.align(got, wanted, parts))
    return aligned


def in_order_of(
    row_sets: Sequence[AnyRows], got: Arrays, wanted: Arrays, parts: Mapping[str, OutputParts]
) -> dict[str, np.ndarray]:
    """One sample with what TopK selects in the order of the reference, whose foreign rows take their place."""
    aligned = aligned_rows([rows for rows in row_sets if isinstance(rows, Selection)], got, wanted, parts)
    counts = {name: ~np.isnan(rows.reference) | np.isnan(wanted[name]) for name, rows in aligned.items()}
    return {**got, **{name: np.where(counts[name], rows.output, wanted[name]) for name, rows in aligned.items()}}


def row_axes(outputs: Sequence[DependentOutput]) -> dict[str, int]:
    """Name -> axis of the rows, of what TopK selects."""
    return {output.name: output.axis for output in outputs if output.is_selection and output.axis is not None}


def find_row_sets(dependent: Sequence[DependentOutput], reference: Sequence[Arrays]) -> tuple[AnyRows, ...]:
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
        members.setdefault((output.nodes, counts, output.is_selection), []).append(described)
    return tuple(
        (Selection if is_selection else RowSet).find(o, reference) for (_, _, is_selection), o in members.items()
    )
