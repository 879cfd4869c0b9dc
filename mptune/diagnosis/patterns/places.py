"""Where in an output a difference lies that nothing explains: a few entries of one axis, such as one channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MOST_SHARE = 0.9
"""Of the squared difference, that the entries have together."""
_FEW = 0.25
"""Of the entries of an axis, that they are at most."""
_NAMED = 8


def where_it_lies(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """The fewest entries of one axis that have most of the difference, in words; "" where it lies everywhere.

    Args:
        got: of each sample.
        wanted: of each sample, the same shapes but for the samples'; others are passed over. Axis 0 is not looked at.
    """
    squares: dict[int, np.ndarray] = {}
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape or a.ndim < 2 or b.dtype.kind not in "fiub":
            return ""
        apart = (a.astype(np.float64) - b.astype(np.float64)) ** 2
        apart = np.where(np.isfinite(apart), apart, 0.0)
        for axis in range(1, a.ndim):
            here = apart.sum(axis=tuple(k for k in range(a.ndim) if k != axis))
            before = squares.get(axis, np.zeros_like(here))
            if before.shape != here.shape:
                return ""
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
    if best is None:
        return ""
    _, axis, entries, share = best
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    names = ", ".join(map(str, entries[:_NAMED])) + more
    what = f"index {names}" if len(entries) == 1 else f"indices {names}"
    return (
        f"{100 * share:.0f} % of the squared difference lies at {what} of axis {axis}, which has {len(squares[axis])}"
    )
