"""Where a difference lies that nothing explains (entries of an axis, samples), and what plainly stands there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEFT = 0.02
"""Share of the difference that a factor or an offset leaves at most."""
_MOST_SHARE = 0.9
"""Share of the squared difference that the named entries have together."""
_FEW = 0.25
"""Share of an axis up to which entries are few."""
_NAMED = 8
_FEWEST = 8
"""Of fewer values, a factor or an offset is chance."""

Arrays = Sequence[np.ndarray]
"""One array per sample."""


def where_it_lies(got: Arrays, wanted: Arrays) -> str:
    """The fewest entries of one axis that have most of the difference, in words; "" where it lies everywhere."""
    best = _located(got, wanted)
    if best is None:
        return ""
    axis, entries, share, size = best
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    names = ", ".join(map(str, entries[:_NAMED])) + more
    what = f"index {names}" if len(entries) == 1 else f"indices {names}"
    return f"{100 * share:.0f} % of the squared difference lies at {what} of axis {axis}, which has {size}"


def what_is_there(got: Arrays, wanted: Arrays) -> str:
    """What an output holds where its difference lies, in words; "" where that is nothing plain."""
    if any(a.shape != b.shape or b.dtype.kind not in "fiu" for a, b in zip(got, wanted, strict=True)):
        return ""
    lost = sum(int((~np.isfinite(a) & np.isfinite(b)).sum()) for a, b in zip(got, wanted, strict=True))
    if lost:
        return f"{lost} values are NaN or Inf"
    best, ours, theirs = _located(got, wanted), got, wanted
    if best is not None:
        axis, entries = best[:2]
        ours, theirs = ([np.take(each, entries, axis=axis) for each in side] for side in (got, wanted))
    a, b = (np.concatenate([each.astype(np.float64).ravel() for each in side]) for side in (ours, theirs))
    is_finite = np.isfinite(b)
    return _relation(a[is_finite], b[is_finite])


def which_samples(samples: Sequence[int]) -> str:
    """Samples by index, in words: ``sample 3``, ``samples 3, 7`` or ``samples 10 to 14``."""
    count = len(samples)
    if count == 1:
        return f"sample {samples[0]}"
    if count > 2 and samples[-1] - samples[0] == count - 1:
        return f"samples {samples[0]} to {samples[-1]}"
    return f"samples {', '.join(map(str, samples[:_NAMED]))}{', ...' * (count > _NAMED)}"


def _relation(a: np.ndarray, b: np.ndarray) -> str:
    apart = float(np.linalg.norm(a - b))
    if a.size < _FEWEST or not apart:
        return ""
    if np.ptp(a) == 0:
        return f"it is {a[0]:g} everywhere" if np.ptp(b) > 0 else ""
    factor = float(a @ b / (b @ b)) if (b @ b) > 0 else 1.0
    if np.linalg.norm(a - factor * b) <= _LEFT * min(apart, float(np.linalg.norm(a))):
        return f"it is {factor:.4g} times the reference"
    offset = float(np.mean(a - b))
    if np.linalg.norm(a - b - offset) <= _LEFT * min(apart, float(np.linalg.norm(a - a.mean()))):
        return f"it is the reference {'plus' if offset > 0 else 'minus'} {abs(offset):.4g}"
    return ""


def _located(got: Arrays, wanted: Arrays) -> tuple[int, list[int], float, int] | None:
    """The axis, its entries that have most of the difference, their share, and how many it has; None: everywhere.

    Axis 0 is not looked at.
    """
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
