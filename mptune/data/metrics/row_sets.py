"""Outputs whose rows are selected by values, compared as sets of rows: detections, queries, selected points.

Rounding moves rows, so they are paired before they are compared. Outputs that the same nodes select, and that have the
same number of rows in every sample of the reference, are one set (boxes, scores and classes). In a pair, whole numbers
(classes, positions, indices of a batch) are equal, and other columns are near. A row without a partner is foreign.

Where values decide how many rows there are, a foreign row is compared with zeros, weighed by its score where the rows
have scores: a box just above the threshold counts by what it says. TopK always selects as many, and which of two alike
comes last says little: there foreign rows are left out, and their share is a statistic of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mptune.data.metrics.parts import Arrays, Floats, OutputParts

if TYPE_CHECKING:
    from mptune.graph.facts import DependentOutput

Dependent: TypeAlias = "Sequence[DependentOutput]"
_MOST_COLUMNS = 256  # by which rows are told apart: masks and features have thousands, of which every so many is taken


class AlignedRows(NamedTuple):
    """One output of one sample, its rows and the reference's brought together.

    Pairs come first, then rows that only the reference has, then rows that only the output has, beside zeros. What TopK
    selects keeps the reference's shape and order; in foreign rows the reference is NaN, and they do not count.
    """

    output: np.ndarray
    reference: np.ndarray
    pairs: int | None  # None of what TopK selects
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
class RowSet:
    """Outputs that are selected together: row k of one belongs to row k of the others.

    Columns are those of all outputs side by side, behind the one of ``RowOutput.rows`` with the set.
    """

    outputs: tuple[RowOutput, ...]
    is_selection: bool  # by TopK: always as many rows
    starts: tuple[int, ...]  # first column of each output, and the number of all
    keys: tuple[int, ...]  # columns of whole numbers, which must be equal in a pair
    floats: tuple[int, ...]  # columns that are compared by distance
    scale: Floats  # of each of these: standard deviation in the reference
    score: int | None  # column of scores from 0 to 1

    @classmethod
    def find(cls, outputs: Sequence[RowOutput], reference: Sequence[Arrays], *, is_selection: bool = False) -> RowSet:
        """A set of outputs, with what their columns are by all of their rows in the reference."""
        rows = np.concatenate([_columns_of(outputs, sample) for sample in reference])
        low, high = rows.min(axis=0, initial=math.inf), rows.max(axis=0, initial=-math.inf)
        is_whole = (rows == np.round(rows)).all(axis=0)
        sizes = [output.rows(np.asarray(reference[0][output.name])).shape[1] - 1 for output in outputs]
        starts = tuple(itertools.accumulate(sizes, initial=1))
        has_numbers = any(output.is_number for output in outputs)
        keys, floats, scores = [0], list[int](), list[tuple[bool, int]]()
        for output, span in zip(outputs, itertools.starmap(range, itertools.pairwise(starts)), strict=True):
            for k in span:
                # Whole numbers are classes or the like; zeros or ones alone may be scores.
                if not output.is_number or (is_whole[k] and (high[k] > 1 or low[k] != high[k])):
                    keys += [k] if k - span.start not in output.index_columns or not has_numbers else []
                    continue
                floats.append(k)
                if low[k] >= 0 and high[k] <= 1 and not is_whole[k]:
                    scores.append((len(span) == 1, k))
        floats = floats[:: 1 + len(floats) // _MOST_COLUMNS]
        values = rows[:, floats] if len(rows) else np.ones((1, len(floats)))
        deviation, rms = values.std(axis=0), np.sqrt((values**2).mean(axis=0))
        scale = np.where(deviation > 1e-9 * rms, deviation, rms)
        scale = np.where((scale > 0) & np.isfinite(scale), scale, 1.0)
        score = max(scores)[1] if scores else None
        return cls(tuple(outputs), is_selection, starts, tuple(keys), tuple(floats), scale, score)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs."""
        return tuple(output.name for output in self.outputs)

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
        """Pair the rows of one sample.

        Outputs that do not have the same number of rows here, whatever the reference has, are paired each for itself.
        """
        if self.is_selection and all(np.shape(got[name]) == np.shape(wanted[name]) for name in self.names):
            pairs, share = pair_selection(self.form(wanted, parts), got, wanted)
            return {name: AlignedRows(*pair, None, share) for name, pair in pairs.items()}
        if len({len(output.rows(np.asarray(got[output.name]))) for output in self.outputs}) > 1:
            alone = [RowSet.find([output], [wanted]).align(got, wanted, parts) for output in self.outputs]
            return {name: rows for each in alone for name, rows in each.items()}
        mine, its = _columns_of(self.outputs, got), _columns_of(self.outputs, wanted)
        a, b = paired_rows(mine, its, self.keys, self.floats, self.scale)
        lost, added = its[np.setdiff1d(np.arange(len(its)), b)], mine[np.setdiff1d(np.arange(len(mine)), a)]
        aligned, share = {}, (len(lost) + len(added)) / max(1, len(mine) + len(its))
        scores = (np.ones((len(rows), 1)) if self.score is None else rows[:, [self.score]] for rows in (lost, added))
        weights = [np.clip(np.nan_to_num(score, nan=1.0), 0.0, 1.0) for score in scores]
        for output, (start, end) in zip(self.outputs, itertools.pairwise(self.starts), strict=True):
            left, right, before, behind = (
                rows[:, start:end] if output.is_number else np.ones((len(rows), 1)) for rows in (mine, its, lost, added)
            )
            if self.score is None or (start, end) != (self.score, self.score + 1):  # scores are their own weight
                before, behind = before * weights[0], behind * weights[1]
            together = np.concatenate([left[a], np.zeros_like(before), behind])
            expected = np.concatenate([right[b], before, np.zeros_like(behind)])
            aligned[output.name] = AlignedRows(together, expected, len(a), share)
        return aligned


def _columns_of(outputs: Sequence[RowOutput], sample: Arrays) -> Floats:
    """The rows of all outputs side by side, behind their set."""
    every = [output.rows(np.asarray(sample[output.name])) for output in outputs]
    return np.concatenate([every[0], *(rows[:, 1:] for rows in every[1:])], axis=1)


# ``infer.py --check`` has the source of the next three: they need NumPy alone.
def nearest_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rows that are each other's nearest, then those of the rest, and so on, shape (2, pairs)."""
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2.0 * a @ b.T
    costs = np.maximum(squares, 0.0) / max(1, a.shape[1])
    # Of many rows that are as near as rounding tells, each has its own neighbour then, not all of them the first.
    costs += 1e-12 * np.abs(np.subtract.outer(np.arange(len(a)), np.arange(len(b))))
    same = np.flatnonzero((a[: len(b)] == b[: len(a)]).all(axis=1))
    costs[same, same] = -1.0  # before others that are as near as rounding tells
    costs[costs > 0.5**2] = np.inf  # in standard deviations of each column: further ones are no partners
    pairs, rows = [np.zeros((2, 0), np.intp)], np.arange(len(a))
    while costs.size:
        nearest = costs.argmin(axis=1)
        mutual = rows[(costs.argmin(axis=0)[nearest] == rows) & np.isfinite(costs[rows, nearest])]
        if not mutual.size:
            break
        pairs.append(np.stack([mutual, nearest[mutual]]))
        costs[mutual], costs[:, nearest[mutual]] = np.inf, np.inf
    return np.concatenate(pairs, axis=1)


def paired_rows(
    mine: np.ndarray, its: np.ndarray, keys: Sequence[int], floats: Sequence[int], scale: np.ndarray
) -> np.ndarray:
    """Which row is which row of the reference, shape (2, pairs)."""
    a, b = (np.nan_to_num(rows[:, list(floats)] / scale, nan=1e9, posinf=1e9, neginf=-1e9) for rows in (mine, its))
    # Rows of both sides with the same whole numbers: a dictionary, as there may be as many kinds as rows.
    members: dict[bytes, tuple[list[int], list[int]]] = {}
    for side, rows in enumerate((mine, its)):
        for k, key in enumerate(np.ascontiguousarray(rows[:, list(keys)] + 0.0)):  # -0.0 is 0.0
            members.setdefault(key.tobytes(), ([], []))[side].append(k)
    pairs = [np.zeros((2, 0), np.intp)]
    for first, second in members.values():
        together = np.tile(np.arange(min(len(first), len(second))), (2, 1))
        if len(floats) and len(first) * len(second) <= 4_000_000:  # costs, 32 MiB; more rows are taken in their order
            together = nearest_pairs(a[first], b[second])
        pairs.append(np.stack([np.array(first, np.intp)[together[0]], np.array(second, np.intp)[together[1]]]))
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
    count = int(np.prod(sizes))
    sets = np.repeat(np.arange(count // max(1, sizes[axis])), sizes[axis])
    mine, its = ([np.asarray(side[n], np.float64).reshape(count, -1) for n in names] for side in (got, wanted))
    ours, theirs = (np.column_stack([sets, *side]) for side in (mine, its))
    first, second = paired_rows(ours, theirs, form["keys"], form["floats"], np.array(form["scale"]))
    partner, rows = np.arange(count), np.arange(count)
    foreign = ~np.isin(rows, second)
    partner[second], partner[foreign] = first, np.setdiff1d(rows, first)
    for k, output in enumerate(form["outputs"]):
        apart = (mine[k][partner] - its[k]).reshape(count, *output["shape"])
        foreign |= (np.sqrt((apart**2).mean(axis=(1, 3))) > 0.1 * np.array(output["scales"])).any(axis=1)
    foreign &= np.isfinite(ours[partner]).all(axis=1)
    share = float(foreign.mean())
    foreign &= share <= 0.5
    pairs = {}
    for k, name in enumerate(names):
        kind = wanted[name].dtype if wanted[name].dtype.kind == "f" else np.float64
        sides = mine[k][partner], np.where(foreign[:, None], np.nan, its[k])
        ordered, counted = (side.astype(kind).reshape(wanted[name].shape) for side in sides)
        pairs[name] = ordered, counted
    return pairs, share


def aligned_rows(
    row_sets: Sequence[RowSet], got: Arrays, wanted: Arrays, parts: Mapping[str, OutputParts]
) -> dict[str, AlignedRows]:
    """The outputs of one sample that are compared as rows, paired; those of other shapes beside their rows are not."""
    aligned: dict[str, AlignedRows] = {}
    for rows in row_sets:
        if all(o.fits(np.shape(got[o.name]), np.shape(wanted[o.name])) for o in rows.outputs):
            aligned.update(rows.align(got, wanted, parts))
    return aligned


def in_order_of(
    row_sets: Sequence[RowSet], got: Arrays, wanted: Arrays, parts: Mapping[str, OutputParts]
) -> dict[str, np.ndarray]:
    """One sample with what TopK selects in the order of the reference, whose foreign rows take their place."""
    aligned = aligned_rows([rows for rows in row_sets if rows.is_selection], got, wanted, parts)
    hidden = {name: np.isnan(rows.reference) & ~np.isnan(wanted[name]) for name, rows in aligned.items()}
    return {**got, **{name: np.where(hidden[name], wanted[name], rows.output) for name, rows in aligned.items()}}


def row_axes(outputs: Dependent) -> dict[str, int]:
    """Name -> axis of the rows, of what TopK selects."""
    return {output.name: output.axis for output in outputs if output.is_selection and output.axis is not None}


def find_row_sets(dependent: Dependent, reference: Sequence[Arrays]) -> tuple[RowSet, ...]:
    """The sets of rows among the outputs of a model, and what their columns are on the reference."""
    members: dict[tuple[bool, tuple[str, ...], object], list[RowOutput]] = {}
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
        described = RowOutput(output.name, axis, output.is_indices, arrays[0].dtype.kind == "f", output.index_columns)
        members.setdefault((output.is_selection, output.nodes, counts), []).append(described)
    return tuple(RowSet.find(each, reference, is_selection=key[0]) for key, each in members.items())
