"""Outputs that are right in another order, or as another row of the reference (stale, torn)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.patterns.roundings import CLEAR, Compared, rms

_MAX_ORDERED = 2048
"""Entries along an axis up to which another order of them is looked for."""

_SAMPLED = 4096
"""Values of each entry, or row, that are compared first."""


@dataclass(frozen=True)
class Order:
    """The order of what an output has along an axis.

    Attributes:
        axis: 0 for rows.
        entries: entry k is the reference's entry ``entries[k]``.
        left: share of the difference that is left when the order is undone.
    """

    axis: int
    entries: tuple[int, ...]
    left: float


def find_order(compared: Compared, axes: Iterable[int]) -> Order | None:
    """The order along one of these axes that undoes the difference; None where none does."""
    got, wanted, scale = compared.got, compared.wanted, compared.scale
    for axis in axes:
        entries = _permutation(got * scale, wanted * scale, axis)
        if entries is None:
            continue
        pattern = np.take(wanted * scale, entries, axis) / scale
        if compared.explains(pattern):
            return Order(axis, entries, rms(got - pattern) / compared.distance)
    return None


def _permutation(got: np.ndarray, wanted: np.ndarray, axis: int) -> tuple[int, ...] | None:
    """The order along an axis that brings the reference nearest to the output; None where it is the order as it is.

    Entry k of the output is the reference's entry ``order[k]``.
    """
    count = got.shape[axis]
    if not 2 <= count <= _MAX_ORDERED:
        return None
    from scipy.optimize import linear_sum_assignment

    a = np.moveaxis(got, axis, 0).reshape(count, -1)
    b = np.moveaxis(wanted, axis, 0).reshape(count, -1)
    chosen = _spread_positions(a.shape[1])
    cost = _distances(a[:, chosen], b[:, chosen])
    # Among equals each stays where it is.
    cost[np.arange(count), np.arange(count)] *= 1 - 1e-9
    order = linear_sum_assignment(cost)[1]
    if (order == np.arange(count)).all():
        return None
    return tuple(int(k) for k in order)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances between the rows of two matrices, (rows of a, rows of b), at least 0."""
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * (a @ b.T)
    gaps: np.ndarray = np.maximum(squares, 0.0)
    return gaps


def _spread_positions(size: int) -> np.ndarray:
    """At most ``_SAMPLED`` positions of a row, the same ones each time, drawn without order."""
    if size <= _SAMPLED:
        return np.arange(size)
    return np.sort(np.random.default_rng(0).choice(size, _SAMPLED, replace=False))


_MAX_ROWS = 3000
"""Above so many rows a row is compared only with those that usual lags give."""

_MOST_OFF = 0.8
"""Share of the rows that differ that has to be explained."""

_FEWEST_OF_ONE = 3
"""So many rows are equal to one row: a batch, or a buffer, that holds one row alone."""

_FEW_VALUES = 16
"""Rows with fewer values equal others by chance: only near ones are looked at."""


_FEWEST_TORN = 8
"""Values of either part of a torn row, where they are equal as far as FP16 goes: fewer are equal by chance."""


@dataclass(frozen=True)
class Stale:
    """Rows of an output that are another row's result.

    Attributes:
        torn: rows that are part this and part another row; none where all are whole.
        source: row -> the row of the reference that it (or its other part) equals.
        share: of the rows of the output, those torn or whole.
        lag: most frequent distance to the source; 1 is the row before.
    """

    torn: tuple[int, ...]
    whole: tuple[int, ...]
    source: dict[int, int]
    off: int
    share: float
    lag: int

    @property
    def rows(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted((*self.torn, *self.whole)))

    @property
    def is_one_row(self) -> bool:
        """Whether all rows that differ are one row of the reference, and not few of them."""
        is_one = not self.torn and len(set(self.source.values())) == 1
        return is_one and len(self.whole) == self.off >= _FEWEST_OF_ONE

    @property
    def is_ahead(self) -> bool:
        """Whether rows are those of later samples, which no buffer held before: a sample was left out."""
        later = sum(other > row for row, other in self.source.items())
        return not self.torn and not self.is_one_row and later >= _MOST_OFF * len(self.source)

    @property
    def example(self) -> int:
        """A row that shows it: torn, where some are, and with the most frequent distance."""
        rows = self.torn or self.whole
        return next((row for row in rows if row - self.source[row] == self.lag), rows[0])

    @property
    def is_closed(self) -> bool:
        """Whether the rows are the same rows in another order, which is no sign of stale ones."""
        return not self.torn and sorted(self.source) == sorted(self.source.values())


def find_stale(compared: Compared, batch: int) -> Stale | None:
    """Find stale and torn rows; None where these do not explain the difference."""
    own = compared.distances
    if len(own) < 2:
        return None
    levels = dict.fromkeys((compared.exact, compared.half))  # rows that FP16 alone explains need no other cause
    return next((stale for each in levels if (stale := _find(compared, batch, own, each)) is not None), None)


def _find(compared: Compared, batch: int, own: np.ndarray, level: float) -> Stale | None:
    """As ``find_stale``, of the rows whose distance is above a level."""
    rows = len(own)
    off = np.flatnonzero(own > level)
    if not off.size:
        return None
    a, b = compared.got.reshape(rows, -1), compared.wanted.reshape(rows, -1)
    chosen = _spread_positions(a.shape[1])
    lags = tuple(dict.fromkeys((1, batch, 2, 2 * batch, -1)))
    source: dict[int, int] = {}
    whole: list[int] = []
    for start in range(0, len(off), 256):
        block = off[start : start + 256]
        for row, others in zip(block, _nearest(a, b, block, chosen, lags), strict=True):
            source_row = next((j for j in others if _equals(compared, a[row], b[j], own[row])), None)
            if source_row is not None:
                source[int(row)] = int(source_row)
                whole.append(int(row))
    torn = []
    for row in sorted(set(map(int, off)) - set(whole)):
        other = _torn_with(compared, a, b, row, lags)
        if other is not None:
            source[row] = other
            torn.append(row)
    # The first batch has no predecessor, so its stale content is unknown.
    expected = [row for row in map(int, off) if row >= batch or row in source]
    if not source or len(source) < _MOST_OFF * len(expected):
        return None
    lag = Counter(row - other for row, other in source.items()).most_common(1)[0]
    is_one_row = len(off) >= _FEWEST_OF_ONE and float(np.ptp(a, axis=0).max(initial=0.0)) <= compared.exact
    if (
        a.shape[1] < _FEW_VALUES
        and not is_one_row
        and lag[1] < 0.5 * len(source)
        and len(set(source.values())) < len(source)
    ):
        return None
    return Stale(tuple(torn), tuple(whole), source, len(off), len(source) / rows, int(lag[0]))


def _nearest(
    a: np.ndarray, b: np.ndarray, block: np.ndarray, chosen: np.ndarray, lags: tuple[int, ...]
) -> list[list[int]]:
    """For each row of a block, the rows of the reference that it may equal: those before it first, then the nearest."""
    rows = len(b)
    nearest = [[int(row) - lag for lag in lags if 0 <= row - lag < rows] for row in block]
    if rows <= _MAX_ROWS:
        gaps = _distances(a[block][:, chosen], b[:, chosen])
        gaps[np.arange(len(block)), block] = np.inf
        for candidates, nearest_row in zip(nearest, gaps.argmin(axis=1), strict=True):
            candidates.append(int(nearest_row))
    return nearest


def _equals(compared: Compared, row: np.ndarray, other: np.ndarray, own: float) -> bool:
    gap = float(np.sqrt(np.mean((row - other) ** 2)))
    # A difference that FP16 could make needs an exact match: small rows lie near others by chance.
    level = compared.half if own > compared.half else compared.exact
    return gap <= level and gap <= CLEAR * own


def _torn_with(compared: Compared, a: np.ndarray, b: np.ndarray, row: int, lags: tuple[int, ...]) -> int | None:
    """The row of the reference that the other part of a row equals."""
    size = a.shape[1]
    if size < 2:
        return None
    others = [row - lag for lag in lags if 0 <= row - lag < len(b)]
    exact = 10 * compared.exact
    for level in dict.fromkeys((exact, max(compared.half_most, exact))):
        for other in others:
            is_own = np.abs(a[row] - b[row]) <= level
            is_other = np.abs(a[row] - b[other]) <= level
            least = max(1 if level == exact else _FEWEST_TORN, size // 200)
            parts = int((is_own & ~is_other).sum()), int((is_other & ~is_own).sum())
            if min(parts) >= least and int((~is_own & ~is_other).sum()) <= size // 1000:
                return other
    return None


def shift_of(source: dict[int, int], rows: int) -> int | None:
    """The lag by which all rows are moved on, cyclically; None where there is no single one."""
    shifts = {(row - other) % rows for row, other in source.items()}
    return shifts.pop() if len(shifts) == 1 and len(source) == rows else None
