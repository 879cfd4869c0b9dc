"""Where in an output a difference lies that nothing explains: a few entries of one axis, such as one channel.

What is there in the reference's place is said where that is plain: one value everywhere, the reference times a factor
or plus an offset, NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mptune.diagnosis.patterns.across import common_difference, own_factor, same_in_all
from mptune.diagnosis.patterns.bounds import LEFT
from mptune.diagnosis.patterns.in_time import along_samples
from mptune.diagnosis.patterns.relations import columns_of_columns, function_of

_MOST_SHARE = 0.9
"""Of the squared difference, that the entries have together."""
_FEW = 0.25
"""Of the entries of an axis, that they are at most."""
_NAMED = 8
_FEWEST = 8
"""Of fewer values, a factor or an offset is chance."""


def where_it_lies(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """The fewest entries of one axis that have most of the difference, in words; "" where it lies everywhere.

    Args:
        got: of each sample.
        wanted: of each sample, the same shapes but for the samples'; others are passed over. Axis 0 is not looked at.
    """
    best = _located(got, wanted)
    if best is None:
        return ""
    axis, entries, share, size = best
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    names = ", ".join(map(str, entries[:_NAMED])) + more
    what = f"index {names}" if len(entries) == 1 else f"indices {names}"
    return f"{100 * share:.0f} % of the squared difference lies at {what} of axis {axis}, which has {size}"


def what_is_there(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """What an output holds where its difference lies, in words; "" where that is nothing plain.

    Args:
        got: of each sample.
        wanted: of each sample.
    """
    if any(a.shape != b.shape or b.dtype.kind not in "fiu" for a, b in zip(got, wanted, strict=True)):
        return ""
    lost = [int((~np.isfinite(a) & np.isfinite(b)).sum()) for a, b in zip(got, wanted, strict=True)]
    if any(lost):
        whole = [k for k, (count, b) in enumerate(zip(lost, wanted, strict=True)) if count and count == b.size]
        rest = sum(lost) - sum(lost[k] for k in whole)
        samples = ", ".join(map(str, whole[:_NAMED])) + (", ..." if len(whole) > _NAMED else "")
        all_of = f", all values of sample{'s' * (len(whole) > 1)} {samples}" if whole and not rest else ""
        return f"{sum(lost)} values are NaN or Inf{all_of}"
    best, ours, theirs = _located(got, wanted), got, wanted
    if best is not None:
        axis, entries = best[:2]
        ours, theirs = ([np.take(each, entries, axis=axis) for each in side] for side in (got, wanted))
    a, b = (np.concatenate([each.astype(np.float64).ravel() for each in side]) for side in (ours, theirs))
    known = np.isfinite(b)
    return (
        _relation(a[known], b[known])
        or _of_samples(same_in_all, got, wanted)
        or _of_rows(got, wanted)
        or _of_samples(common_difference, got, wanted)
        or _of_samples(own_factor, got, wanted)
    )


def how_it_goes_on(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """How a difference lies along the samples, in words; "" where that is nothing plain.

    Args:
        got: of each sample.
        wanted: of each sample.
    """
    if any(a.shape != b.shape or b.dtype.kind not in "fiu" for a, b in zip(got, wanted, strict=True)):
        return ""
    a, b = ([np.asarray(each, np.float64) for each in side] for side in (got, wanted))
    return along_samples(a, b) if _is_finite(a) and _is_finite(b) else ""


def _is_finite(arrays: Sequence[np.ndarray]) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _of_samples(
    look: Callable[[np.ndarray, np.ndarray], str], got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]
) -> str:
    """What all samples have in common."""
    if len({each.shape for each in wanted}) > 1 or not _is_finite(got) or not _is_finite(wanted):
        return ""
    return look(*(np.stack([np.asarray(each, np.float64) for each in side]) for side in (got, wanted)))


def _of_rows(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """What whole samples, or their columns, are of the reference."""
    a, b = ([np.asarray(each, np.float64) for each in side] for side in (got, wanted))
    if not _is_finite(a) or not _is_finite(b) or all(map(np.array_equal, a, b)):
        return ""
    if sum(each.size for each in b) < _FEWEST:
        return ""
    if len({each.shape[1:] for each in b}) == 1 and b[0].ndim:
        rows, exact = np.concatenate(a), np.concatenate(b)
        found = function_of(rows, exact)
        if not found and exact.ndim > 1:
            axis = 1 if exact.ndim != 3 or exact.shape[1] < exact.shape[2] else 2
            found = columns_of_columns(rows, exact, axis)
        return found
    return ""


def _relation(a: np.ndarray, b: np.ndarray) -> str:
    apart = float(np.linalg.norm(a - b))
    if a.size < _FEWEST or not apart:
        return ""
    if np.ptp(a) == 0:
        return f"it is {a[0]:g} everywhere" if np.ptp(b) > 0 else ""
    factor = float(a @ b / (b @ b)) if (b @ b) > 0 else 1.0
    if np.linalg.norm(a - factor * b) <= LEFT * min(apart, float(np.linalg.norm(a))):
        return f"it is {factor:.4g} times the reference"
    offset = float(np.mean(a - b))
    if np.linalg.norm(a - b - offset) <= LEFT * min(apart, float(np.linalg.norm(a - a.mean()))):
        return f"it is the reference {'plus' if offset > 0 else 'minus'} {abs(offset):.4g}"
    return ""


def _located(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> tuple[int, list[int], float, int] | None:
    """The axis, its entries that have most of the difference, their share, and how many it has; None: everywhere."""
    squares: dict[int, np.ndarray] = {}
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape or a.ndim < 2 or b.dtype.kind not in "fiub":
            return None
        apart = (a.astype(np.float64) - b.astype(np.float64)) ** 2
        apart = np.where(np.isfinite(apart), apart, 0.0)
        for axis in range(1, a.ndim):
            here = apart.sum(axis=tuple(k for k in range(a.ndim) if k != axis))
            before = squares.get(axis, np.zeros_like(here))
            if before.shape != here.shape:
                return None
            squares[axis] = before + here
    best: tuple[float, int, list[int], float] | None = None
    for axis, of_entries in squares.items():
        total, count = float(of_entries.sum()), len(of_entries)
        if not total or count < 3:
            continue
        order = np.argsort(-of_entries, kind="stable")
        needed = int(np.searchsorted(np.cumsum(of_entries[order]), _MOST_SHARE * total)) + 1
        if needed <= max(1, int(_FEW * count)) and (best is None or needed / count < best[0]):
            entries = sorted(int(k) for k in order[:needed])
            best = needed / count, axis, entries, float(of_entries[order[:needed]].sum()) / total
    return None if best is None else (*best[1:], len(squares[best[1]]))
