"""Outputs, columns or rows in another order or form, and rows that are another row's result (stale), or part of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from mptune.diagnosis.rows import CLEAR, Compared, rms, row_rms
from mptune.diagnosis.sides import Side, arrays_of
from mptune.finding import Finding, OutputColumns, Where
from mptune.findings.wording import listed

_MOST_ORDERED = 2048  # entries along an axis up to which another order of them is looked for
_SAMPLED = 4096  # values of each entry, or row, that are compared first
_MOST_ROWS = 3000  # above this, a row is compared only with those that usual lags give
_LEAST_EXPLAINED = 0.8  # share of the rows that differ that has to be explained
_FEWEST_OF_ONE = 3  # rows that are equal to one row: a batch, or a buffer, that holds one row alone
_FEW_VALUES = 16  # rows with fewer values equal others by chance: only near ones are looked at
_FEWEST_TORN = 8
"""Values of either part of a torn row, where they are equal as far as FP16 goes: fewer are equal by chance."""
_LISTED = 8  # entries that the evidence lists


def _corners(boxes: np.ndarray, before: float) -> np.ndarray:
    """Boxes from a point and a size, of which a share lies before the point, shape (..., 4)."""
    near = boxes[..., :2] - before * boxes[..., 2:]
    return np.concatenate([near, near + boxes[..., 2:]], axis=-1)


# What the entries along an axis are before and after a change, and that change: of boxes, four entries, or of scores.
_FORMS: Mapping[tuple[str, str], Callable[[np.ndarray], np.ndarray]] = {
    ("boxes as centre and size", "boxes as corners"): partial(_corners, before=0.5),
    ("boxes as a corner and size", "boxes as two corners"): partial(_corners, before=0.0),
    ("values before a softmax", "values after a softmax"): lambda x: np.exp(x - np.logaddexp.reduce(x, -1)[..., None]),
    ("values before a sigmoid", "values after a sigmoid"): lambda x: 1 / (1 + np.exp(-x)),
}


def other_order(side: Side) -> Finding | None:
    """``outputs-permuted``: an output is another one, or has another order along an axis."""
    difference = side.difference
    if difference is None:
        return None
    got = arrays_of(side.sides.candidate, side.name)
    for other in side.sides.outputs:
        compared = None if other.name == side.name else replace(other, got=got).compared
        if compared is not None and compared.distance <= min(compared.half, CLEAR * difference.distance):
            evidence: dict[str, int | float | str] = {"kind": "outputs", "error": side.error, "output": other.name}
            return side.finding("outputs-permuted", evidence, name=side.name, other=other.name)
    for axis in (*range(1, difference.got.ndim), 0):
        order = find_order(difference, axis)
        if order is not None:
            moved = tuple(entry for entry, source in enumerate(order) if entry != source)
            outputs = (OutputColumns(side.name, moved if axis else None),)
            where = Where(outputs=outputs, samples=() if axis else side.samples_of(moved))
            evidence = {"kind": "columns" if axis else "rows", "error": side.error, "moved": len(moved), "axis": axis}
            evidence["order"] = listed(order, _LISTED)
            shown = listed([f"{entry} is the reference's {order[entry]}" for entry in moved], 3)
            return side.finding("outputs-permuted", evidence, where, entries=len(order), shown=shown)
    return None


@np.errstate(all="ignore")  # of what is in no other form
def other_form(side: Side) -> Finding | None:
    """``outputs-permuted`` of boxes, and ``attribute-differs`` of scores, that one side gives in another form."""
    difference = side.difference
    if difference is None:
        return None
    runs = (side.sides.candidate, side.sides.reference, side.sides.emulated)
    arrays = [np.asarray(side.rows(run), np.float64) for run in runs]
    arrays[2] = arrays[2] if arrays[2].shape == arrays[1].shape else np.full_like(arrays[1], np.nan)
    worst = int(row_rms(difference.got - difference.wanted).argmax())
    for axis in range(1, difference.got.ndim):
        along = [np.moveaxis(array, axis, -1) for array in arrays]
        off = np.flatnonzero(row_rms(np.moveaxis(difference.got - difference.wanted, axis, 0)) > difference.half)
        for (before, after), change in _FORMS.items() if len(off) else ():
            is_of_boxes, first = before.startswith("boxes"), int(off[0])
            count = 4 if is_of_boxes else int(off[-1]) - first + 1
            starts = range(max(int(off[-1]) + 1 - count, 0), min(first, along[0].shape[-1] - count) + 1)
            sides = ((before, after), (0,)), ((after, before), (1, 2))  # what the candidate and the reference hold
            for start, (words, changed) in itertools.product(starts, sides):
                columns = range(start, start + count)
                for rows in (slice(worst, worst + 1), slice(None)):  # one row says cheaply that it is none
                    part = [array[rows].copy() for array in along]
                    distance = rms(part[0] - part[1])
                    for k in changed:
                        part[k][..., columns] = change(part[k][..., columns])
                    if not rms(part[0] - part[1]) <= CLEAR * distance:
                        break
                else:
                    again = Compared.of_rows(*part)
                    if again.distance > again.half or not np.ptp(part[changed[0]][..., columns]):  # a constant fits all
                        continue
                    output = OutputColumns(side.name, tuple(columns) if len(columns) < along[0].shape[-1] else None)
                    evidence: dict[str, int | float | str] = {"kind": "form", "error": side.error, "axis": axis}
                    evidence |= {"entries": f"{start}:{start + count}", "left": again.distance}
                    code = "outputs-permuted" if is_of_boxes else "attribute-differs"
                    return side.finding(code, evidence, Where(outputs=(output,)), form=words[0], other=words[1])
    return None


def find_order(compared: Compared, axis: int) -> list[int] | None:
    """The entry of the reference that each entry along an axis is, where that undoes the difference; else None."""
    got, wanted, count = compared.got * compared.scale, compared.wanted * compared.scale, compared.got.shape[axis]
    if not 2 <= count <= _MOST_ORDERED:
        return None
    from scipy.optimize import linear_sum_assignment

    cost = _distances(*(np.moveaxis(each, axis, 0).reshape(count, -1) for each in (got, wanted)))
    cost[np.arange(count), np.arange(count)] *= 1 - 1e-9  # among equals each stays where it is
    order = linear_sum_assignment(cost)[1]
    left = rms(compared.got - np.take(wanted, order, axis) / compared.scale)
    if (order == np.arange(count)).all() or left > min(compared.half, CLEAR * compared.distance):
        return None
    return list(map(int, order))


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances between the rows of two matrices, (rows of a, rows of b), at least 0.

    Of long rows at most ``_SAMPLED`` values count, the same ones each time, drawn without order.
    """
    if a.shape[1] > _SAMPLED:
        sampled = np.random.default_rng(0).choice(a.shape[1], _SAMPLED, replace=False)
        a, b = a[:, sampled], b[:, sampled]
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * (a @ b.T)
    return np.asarray(np.maximum(squares, 0.0))


class Stale(NamedTuple):
    """Rows of an output that are another row's result."""

    source: dict[int, int]  # row -> the row of the reference that it, or its other part, equals; in their order
    torn: tuple[int, ...]  # those that are part this and part another row
    lag: int  # most frequent distance to the source; 1 is the row before


def stale_rows(side: Side) -> Finding | None:
    """``stale-rows`` and ``torn-rows``; not of two models, which ran here."""
    if side.difference is None or side.sides.origin == "model":
        return None
    stale = find_stale(side.difference, side.sides.batch)
    return None if stale is None else stale_finding(side, stale)


def stale_finding(side: Side, stale: Stale) -> Finding:
    """The finding for one output."""
    rows = stale.torn or tuple(stale.source)
    example = next((row for row in rows if row - stale.source[row] == stale.lag), rows[0])
    count = len(side.rows(side.sides.reference))
    evidence = {"share": len(stale.source) / count, "rows": len(stale.source), "torn": len(stale.torn)}
    evidence |= {"lag": stale.lag, "row": example, "source_row": stale.source[example], "error": side.error}
    where = Where(outputs=(OutputColumns(side.name),), samples=side.samples_of(tuple(stale.source)))
    return side.finding("torn-rows" if stale.torn else "stale-rows", evidence, where, of_rows=count)


def find_stale(compared: Compared, batch: int) -> Stale | None:
    """Find stale and torn rows; None where these do not explain the difference."""
    own, rows = row_rms(compared.got - compared.wanted), len(compared.got)
    a, b = compared.got.reshape(rows, -1), compared.wanted.reshape(rows, -1)
    lags = dict.fromkeys((1, batch, 2, 2 * batch, -1))
    for level in dict.fromkeys((compared.exact, compared.half)):  # rows that FP16 alone explains need no other cause
        off = [int(row) for row in np.flatnonzero(own > level)]
        gaps = _distances(a[off], b) if rows <= _MOST_ROWS else np.zeros((len(off), 0))
        source, torn = dict[int, int](), list[int]()
        for row, gap in zip(off, gaps, strict=True):
            before = [row - lag for lag in lags if 0 <= row - lag < rows]
            nearest = [int(k) for k in np.argsort(gap)[:2] if k != row]
            # A difference that FP16 could make needs an exact match: small rows lie near others by chance.
            least = min(compared.half if own[row] > compared.half else compared.exact, CLEAR * own[row])
            other = next((k for k in (*before, *nearest) if rms(a[row] - b[k]) <= least), None)
            if other is None:
                other = next((k for k in before if _is_torn(compared, a[row], b[row], b[k])), None)
                torn += [] if other is None else [row]
            if other is not None:
                source[row] = other
        # The first batch has no predecessor, so its stale content is unknown.
        expected = [row for row in off if row >= batch or row in source]
        if not source or len(source) < _LEAST_EXPLAINED * len(expected):
            continue
        lag, times = Counter(row - other for row, other in source.items()).most_common(1)[0]
        is_one_row = len(off) >= _FEWEST_OF_ONE and float(np.ptp(a, axis=0).max(initial=0.0)) <= compared.exact
        is_by_chance = 2 * times < len(source) and len(set(source.values())) < len(source)
        if a.shape[1] >= _FEW_VALUES or is_one_row or not is_by_chance:
            return Stale(source, tuple(torn), lag)
    return None


def _is_torn(compared: Compared, row: np.ndarray, own: np.ndarray, other: np.ndarray) -> bool:
    """Whether a part of a row is its own result, and the rest that of another row."""
    exact = 10 * compared.exact
    for level, fewest in ((exact, 1), (max(4 * compared.half, exact), _FEWEST_TORN)):
        is_own, is_other = np.abs(row - own) <= level, np.abs(row - other) <= level
        parts = int((is_own & ~is_other).sum()), int((is_other & ~is_own).sum())
        neither = int((~is_own & ~is_other).sum())
        if min(parts) >= max(fewest, row.size // 200) and neither <= row.size // 1000:
            return True
    return False
