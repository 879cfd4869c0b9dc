"""Outputs whose number of rows depends on values, compared as sets of rows: detections, selected points.

A score that falls below a threshold takes a row away, and every row behind it moves up: compared by position, the error
would be that of other rows. So rows are paired first. Outputs that the same nodes select, and that have the same number
of rows in every sample of the reference, are rows of one set (boxes, scores and classes). In a pair,
whole numbers (classes, positions, indices of a batch) are equal, boxes overlap, and other columns are near
(``mptune.data.metrics.row_sets``). A row without a partner is compared with zeros, weighed by its score where the rows
have scores: a box just above the threshold counts by what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.whole_set import intersection_over_union

if TYPE_CHECKING:
    from mptune.graph.facts import DependentOutput

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

_FORBIDDEN = 1e6
"""Cost of a pair of different rows, as the assignment needs finite ones."""

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
    for keys, members_of in ((mine, rows), (its, others)):
        for k, key in enumerate(np.ascontiguousarray(keys + 0.0)):  # -0.0 is 0.0
            members_of.setdefault(key.tobytes(), []).append(k)
    for key, members in rows.items():
        if key in others:
            yield np.array(members, dtype=np.intp), np.array(others[key], dtype=np.intp)


def pair(mine: Columns, its: Columns) -> tuple[Indices, Indices]:
    """Pairs among rows with the same whole numbers."""
    if not len(mine.keys) or not len(its.keys) or (mine.boxes is None and mine.floats.shape[1] == 0):
        every = np.arange(min(len(mine.keys), len(its.keys)), dtype=np.intp)
        return every, every
    if len(mine.keys) * len(its.keys) <= _MOST_PAIRS:
        return _assign(_costs(mine, its))
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
    """The pairs of the least total cost, without those of infinite cost."""
    from scipy.optimize import linear_sum_assignment  # Slow to import, and few models need it.

    possible = np.isfinite(costs)
    a, b = linear_sum_assignment(np.where(possible, costs, _FORBIDDEN))
    allowed = possible[a, b]
    return a[allowed], b[allowed]


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


_MOST_COLUMNS = 64
"""Rows are distinguished by the first columns of each output; masks and features have thousands."""


@dataclass(frozen=True, eq=False)
class RowOutput:
    """An output of a set of rows, and what its columns are."""

    name: str
    axis: int
    """Of the rows."""
    is_indices: bool
    """It is what NonZero returns: a column is a row, of all leading axes together."""
    is_number: bool
    """It holds floats; else its statistics count rows that are there."""
    keys: tuple[int, ...] = ()
    """Columns of whole numbers, which must be equal in a pair."""
    boxes: int | None = None
    """First of four columns that are corners."""
    score: int | None = None
    """Column of scores from 0 to 1."""
    floats: tuple[int, ...] = ()
    """Columns that are compared by distance."""
    scale: Floats = field(default_factory=lambda: np.ones(0))
    """Standard deviation of each of these over all samples of the reference, shape (len(floats),)."""

    def fits(self, mine: tuple[int, ...], its: tuple[int, ...]) -> bool:
        """Whether two shapes differ in the number of rows at most."""
        return len(mine) == len(its) and all(
            x == y for k, (x, y) in enumerate(zip(mine, its, strict=True)) if k != self.axis
        )

    def blocks(self, array: np.ndarray) -> Floats:
        """The output as sets of rows, shape (sets, rows, columns): axes before that of the rows hold sets."""
        if self.is_indices:
            return np.moveaxis(array, self.axis, 0).reshape(1, array.shape[self.axis], -1).astype(np.float64)
        lead = int(np.prod(array.shape[: self.axis], dtype=np.int64))
        rest = int(np.prod(array.shape[self.axis + 1 :], dtype=np.int64))
        return array.reshape(lead, array.shape[self.axis], rest).astype(np.float64)


@dataclass(frozen=True, eq=False)
class AlignedRows:
    """One output of one sample, its rows and the reference's brought together.

    Attributes:
        output: pairs first, then rows that only the reference has (zeros here), then rows that only the output has.
        reference: the same rows of the reference, zeros in the last part.
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
        ours = {o.name: o.blocks(got[o.name]) for o in self.outputs}
        theirs = {o.name: o.blocks(wanted[o.name]) for o in self.outputs}
        if len({array.shape[:2] for array in ours.values()}) > 1:
            alone = [RowSet((output,)).align(got, wanted) for output in self.outputs]
            return {name: rows for each in alone for name, rows in each.items()}
        blocks = next(iter(theirs.values())).shape[0]
        parts = [
            self._align_block({n: a[k] for n, a in ours.items()}, {n: a[k] for n, a in theirs.items()})
            for k in range(blocks)
        ]
        return {name: _joined([part[name] for part in parts]) for name in self.names}

    def _align_block(self, ours: Mapping[str, Floats], theirs: Mapping[str, Floats]) -> dict[str, AlignedRows]:
        a, b = self._pairs(ours, theirs)
        count, wanted = len(next(iter(ours.values()))), len(next(iter(theirs.values())))
        lost = np.setdiff1d(np.arange(wanted), b)
        added = np.setdiff1d(np.arange(count), a)
        lost_weight, added_weight = self._weights(theirs)[lost, None], self._weights(ours)[added, None]
        aligned = {}
        for output in self.outputs:
            mine, its = ours[output.name], theirs[output.name]
            if not output.is_number:
                mine, its = np.ones((count, 1)), np.ones((wanted, 1))
            weighs = output.score is None or output.boxes is not None
            before = its[lost] * (lost_weight if weighs else 1.0)
            behind = mine[added] * (added_weight if weighs else 1.0)
            aligned[output.name] = AlignedRows(
                np.concatenate([mine[a], np.zeros_like(before), behind]),
                np.concatenate([its[b], before, np.zeros_like(behind)]),
                len(a),
                len(lost) + len(added),
            )
        return aligned

    def _weights(self, values: Mapping[str, Floats]) -> Floats:
        """The scores of the rows, 1 where they have none."""
        for output in self.outputs:
            if output.score is not None:
                scores = values[output.name][:, output.score]
                weights: Floats = np.where(np.isfinite(scores), np.clip(scores, 0.0, 1.0), 1.0)
                return weights
        return np.ones(len(next(iter(values.values()))))

    def _pairs(self, ours: Mapping[str, Floats], theirs: Mapping[str, Floats]) -> tuple[Indices, Indices]:
        mine, its = self._columns(ours), self._columns(theirs)
        if len(mine.keys) == len(its.keys) and np.array_equal(mine.keys, its.keys):
            apart = np.sqrt(np.mean((mine.floats - its.floats) ** 2, axis=1)) if mine.floats.size else np.zeros(1)
            if not len(mine.keys) or (apart <= SAME_DISTANCE).all():
                every = np.arange(len(mine.keys), dtype=np.intp)
                return every, every
        a: list[Indices] = []
        b: list[Indices] = []
        for rows, others in same_keys(mine.keys, its.keys):
            left, right = pair(mine.take(rows), its.take(others))
            a.append(rows[left])
            b.append(others[right])
        empty = np.zeros(0, dtype=np.intp)
        return np.concatenate([empty, *a]), np.concatenate([empty, *b])

    def _columns(self, values: Mapping[str, Floats]) -> Columns:
        keys = [values[o.name][:, list(o.keys)] for o in self.outputs]
        floats = [values[o.name][:, list(o.floats)] / o.scale for o in self.outputs]
        boxed = next((o for o in self.outputs if o.boxes is not None), None)
        boxes = None
        if boxed is not None and boxed.boxes is not None:
            boxes = finite(values[boxed.name][:, boxed.boxes : boxed.boxes + 4])
        return Columns(np.concatenate(keys, axis=1), finite(np.concatenate(floats, axis=1)), boxes)


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
    members: dict[tuple[object, ...], list[tuple[DependentOutput, int]]] = {}
    for output in dependent:
        arrays = [np.asarray(sample[output.name]) for sample in reference if output.name in sample]
        if len(arrays) != len(reference) or len({array.ndim for array in arrays}) != 1 or not arrays[0].ndim:
            continue
        if any(array.dtype.kind not in "fiub" for array in arrays):
            continue
        axis = _axis(output, arrays)
        counts = tuple((*(() if output.is_indices else a.shape[:axis]), a.shape[axis]) for a in arrays)
        members.setdefault((output.nodes, counts), []).append((output, axis))
    return tuple(_row_set(outputs, reference) for outputs in members.values())


def _axis(output: DependentOutput, arrays: Sequence[np.ndarray]) -> int:
    if output.axis is not None and output.axis < arrays[0].ndim:
        return output.axis
    return next((k for k in range(arrays[0].ndim) if len({array.shape[k] for array in arrays}) > 1), 0)


def _row_set(outputs: Sequence[tuple[DependentOutput, int]], reference: Sequence[Mapping[str, np.ndarray]]) -> RowSet:
    """The columns of each output, by all of its rows over the samples of the reference."""
    members = []
    for dependent, axis in outputs:
        arrays = [np.asarray(sample[dependent.name]) for sample in reference]
        output = RowOutput(dependent.name, axis, dependent.is_indices, arrays[0].dtype.kind == "f")
        blocks = [output.blocks(array) for array in arrays]
        rows = np.concatenate([block.reshape(-1, block.shape[-1]) for block in blocks])
        if output.is_number and 4 <= rows.shape[1] <= _MOST_COLUMNS:
            output = replace(output, boxes=_boxes(rows))
        members.append((dependent, output, rows))
    has_floats = any(output.is_number for _, output, _ in members)
    has_boxes = any(output.boxes is not None for _, output, _ in members)

    def with_columns(dependent: DependentOutput, output: RowOutput, rows: Floats) -> RowOutput:
        if not output.is_number:
            ignored = dependent.index_columns if has_floats else ()
            return replace(output, keys=tuple(k for k in range(rows.shape[1]) if k not in ignored))
        shown = range(min(rows.shape[1], _MOST_COLUMNS))
        others = [k for k in shown if output.boxes is None or not output.boxes <= k < output.boxes + 4]
        keys = tuple(k for k in others if has_boxes and _is_class(rows[:, k]))
        floats = tuple(k for k in shown if k not in keys)
        may_score = rows.shape[1] == 1 or output.boxes is not None
        score = next((k for k in others if may_score and _is_score(rows[:, k])), None)
        return replace(output, keys=keys, score=score, floats=floats, scale=_scale(rows[:, list(floats)]))

    return RowSet(tuple(with_columns(*member) for member in members))


def _is_class(values: Floats) -> bool:
    """Whether a column beside boxes holds classes or the like; zeros or ones alone may be scores."""
    if not len(values) or not _is_whole(values):
        return False
    return bool(values.max() > 1 or values.min() != values.max())


def _is_whole(values: Floats) -> bool:
    return bool((values == np.round(values)).all())


def _boxes(rows: Floats) -> int | None:
    """The first of four columns that hold two corners each, the upper left one first."""
    if not len(rows):
        return None
    starts = range(rows.shape[1] - 3)
    whole = {k for k in range(rows.shape[1]) if _is_whole(rows[:, k])}  # classes and batches, not corners
    for start in sorted(starts, key=lambda k: (sum(c in whole for c in range(k, k + 4)), k)):
        sizes = rows[:, start + 2 : start + 4] - rows[:, start : start + 2]
        if (sizes >= 0).all() and (sizes > 0).all(axis=1).mean() > 0.5:
            return start
    return None


def _is_score(values: Floats) -> bool:
    return bool(len(values)) and bool(((values >= 0) & (values <= 1)).all()) and bool((values % 1 != 0).any())


def _scale(values: Floats) -> Floats:
    if not len(values):
        return np.ones(values.shape[1])
    scale: Floats = values.std(axis=0)
    rms = np.sqrt((values**2).mean(axis=0))
    scale = np.where(scale > 1e-9 * rms, scale, rms)
    return np.where((scale > 0) & np.isfinite(scale), scale, 1.0)


def _joined(parts: Sequence[AlignedRows]) -> AlignedRows:
    """Several sets of one output as one; pairs stay in front."""
    if len(parts) == 1:
        return parts[0]
    if not parts:  # a batch of no samples
        return AlignedRows(np.zeros((0, 1)), np.zeros((0, 1)), 0, 0)
    pieces = [(p.output[: p.pairs], p.reference[: p.pairs]) for p in parts]
    pieces += [(p.output[p.pairs :], p.reference[p.pairs :]) for p in parts]
    return AlignedRows(
        np.concatenate([mine for mine, _ in pieces]),
        np.concatenate([its for _, its in pieces]),
        sum(p.pairs for p in parts),
        sum(p.unmatched for p in parts),
    )
