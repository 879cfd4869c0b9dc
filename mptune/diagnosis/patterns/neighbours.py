"""An output whose values are its reference's neighbours: blended, repeated in blocks, in order, or their places."""

from __future__ import annotations

import numpy as np

from mptune.diagnosis.patterns.bounds import LEFT, gives

_FEWEST = 8
"""Entries of an axis whose neighbours are blended, at least."""
_BLOCKS = (2, 4)
_SAME = 1e-5


def blended(got: np.ndarray, wanted: np.ndarray) -> str:
    """With which weights neighbours along an axis are blended, in words; "" where none are.

    Args:
        got: rows of the output, (rows, ...), float64, finite.
        wanted: the same of the reference.
    """
    for axis in range(1, wanted.ndim):
        count = wanted.shape[axis]
        if count < _FEWEST:
            continue
        parts = [np.take(wanted, np.arange(1, count - 1) + by, axis).ravel() for by in (-1, 0, 1)]
        inner = np.take(got, np.arange(1, count - 1), axis).ravel()
        weights = np.linalg.lstsq(np.stack(parts, axis=1), inner, rcond=None)[0]
        made = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        if not gives(np.asarray(made), inner, parts[1]) or np.abs(weights[[0, 2]]).max() <= LEFT:
            continue
        if abs(weights.sum() - 1) > LEFT:
            continue
        shown = ", ".join(f"{weight:.2g}" for weight in weights)
        moved = weights[0] - weights[2]
        sides = float(min(abs(weights[0]), abs(weights[2])))
        what = f"moved by {moved:.2g} along axis {axis}" if sides <= LEFT else f"filtered along axis {axis}"
        return f"it is the reference {what}: each value is its neighbours' and its own with weights {shown}"
    return ""


def in_blocks(got: np.ndarray, wanted: np.ndarray) -> str:
    """Whether an output repeats its values in blocks where its reference does not, in words; "" where it does not."""
    if wanted.ndim < 3:
        return ""
    for size in _BLOCKS[::-1]:
        axes = [axis for axis in range(wanted.ndim - 2, wanted.ndim) if _is_in_blocks(got, axis, size)]
        axes = [axis for axis in axes if not _is_in_blocks(wanted, axis, size)]
        if axes:
            along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes[0]} and {axes[1]}"
            return f"its values are the same in blocks of {size} along {along}: as where a smaller output is repeated"
    return ""


def in_order(got: np.ndarray, wanted: np.ndarray) -> str:
    """Whether an output holds its reference's entries by size, or the place of the largest, in words; "" else."""
    for axis in range(1, wanted.ndim):
        if wanted.shape[axis] < 3:
            continue
        ascending = np.sort(wanted, axis=axis)
        for order, values in (("descending", np.flip(ascending, axis)), ("ascending", ascending)):
            if gives(values, got, wanted):
                return f"it is the reference's entries along axis {axis} in {order} order"
        for what, places in (("largest", wanted.argmax(axis)), ("least", wanted.argmin(axis))):
            whole = np.broadcast_to(np.expand_dims(places, axis), wanted.shape)
            if np.array_equal(got, whole) and np.ptp(whole):
                return f"it is the place of the reference's {what} entry along axis {axis}"
    return ""


def _is_in_blocks(values: np.ndarray, axis: int, size: int) -> bool:
    count = values.shape[axis]
    if count % size or count < 2 * size:
        return False
    first = np.take(values, np.arange(count) - np.arange(count) % size, axis)
    return float(np.abs(values - first).max()) <= _SAME * float(np.abs(values).max() or 1.0)
