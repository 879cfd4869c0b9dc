"""What an output is of its reference where that is plain: a function of it, its columns put together otherwise.

Applications do such things behind a model: a softmax or sigmoid, corners instead of centre and size, scores times
objectness, boxes in another unit, INT8 outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mptune.diagnosis.patterns.bounds import LEFT, bounded, gives, step_of
from mptune.diagnosis.patterns.neighbours import blended, in_blocks, in_order
from mptune.diagnosis.patterns.orders import permutation

_MOST_COLUMNS = 128
_MOST_AXES = 5
_SUM_OF_WEIGHTS = 1e-3
_MOST_MIXED = 16
"""Of more columns, none is looked for as a sum of others."""
_ROWS_FOR_COLUMN = 8
"""So many values of a column are needed for each number that is fitted."""
_NAMED = 4
_WITH_A_UNIT = frozenset({"the square", "the square root", "the reciprocal", "the natural logarithm"})
"""Functions that come with a unit or a base: a depth is a constant times the reciprocal of a disparity."""
_MOST_SORTED = 512
"""Entries along an axis up to which other orders of them are looked for, sample by sample."""
_FARTHEST = 8
"""Entries that an output is moved by at most."""


def function_of(got: np.ndarray, wanted: np.ndarray) -> str:
    """Which function of the reference an output is, in words; "" where it is none of the usual ones.

    Args:
        got: rows of the output, (rows, ...), float64, finite.
        wanted: the same of the reference.
    """
    with np.errstate(all="ignore"):
        for words, function in _functions(wanted.ndim):
            made = function(wanted)
            if gives(made, got, wanted):
                return f"it is {words} of the reference"
            if words in _WITH_A_UNIT and (factor := _factor(made, got, wanted)):
                return f"it is {factor:.4g} times {words} of the reference"
        for axis in range(1, wanted.ndim):
            by = _moved(got, wanted, axis)
            if by:
                return f"it is the reference moved by {by} along axis {axis}"
        for axis in range(1, wanted.ndim):
            if _is_in_other_orders(got, wanted, axis):
                return (
                    f"its entries along axis {axis} are the reference's in another order, and not the same order in"
                    " every sample: as where near ties are sorted"
                )
        for look in (in_order, _reshaped, blended, in_blocks):
            if said := look(got, wanted):
                return said
        for axis in range(1, wanted.ndim):
            if factor := _sharpened(got, wanted, axis):
                return f"it is the reference's softmax along axis {axis} with its logits times {factor:.4g}"
    return bounded(got, wanted)


def columns_of_columns(got: np.ndarray, wanted: np.ndarray, axis: int) -> str:
    """What the columns that differ are of the reference's columns, in words; "" where that is nothing plain.

    Args:
        got: rows of the output, float64, finite.
        wanted: the same of the reference.
        axis: along which the columns lie.
    """
    count = wanted.shape[axis]
    if not 2 <= count <= _MOST_COLUMNS:
        return ""
    a, b = (np.moveaxis(each, axis, 0).reshape(count, -1) for each in (got, wanted))
    size = np.sqrt(np.mean(b**2, axis=1)) + 1e-30
    off = [k for k in range(count) if np.sqrt(np.mean((a[k] - b[k]) ** 2)) > 1e-4 * size[k]]
    said: dict[int, str] = {}
    for column in off:
        words = _line(a[column], b[column]) or _product(a[column], b, column) or _mix(a[column], b, column)
        if not words and (step := step_of(a[column], b[column])):
            words = f"the reference rounded to multiples of {step:.4g}"
        if not words:
            return ""
        said[column] = words
    alike: dict[str, list[int]] = {}
    for column, words in said.items():
        alike.setdefault(words, []).append(column)
    parts = [
        f"column{'s' * (len(columns) > 1)} {_few(columns)} {'are' if len(columns) > 1 else 'is'} {words}"
        for words, columns in itertools.islice(alike.items(), _NAMED)
    ]
    return "; ".join(parts) + ("; ..." if len(alike) > _NAMED else "")


def _functions(rank: int) -> list[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    found: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
        ("the sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("the logit", lambda x: np.log(x / (1 - x))),
        ("the hyperbolic tangent", np.tanh),
        ("the exponential", np.exp),
        ("the natural logarithm", np.log),
        ("the square", lambda x: x * x),
        ("the square root", np.sqrt),
        ("the reciprocal", lambda x: 1 / x),
        ("the magnitude", np.abs),
        ("the positive part (Relu)", lambda x: np.maximum(x, 0.0)),
        ("what a limit to 0..1 leaves", lambda x: np.clip(x, 0.0, 1.0)),
    ]
    for axis in range(1, rank):
        found.append((f"the softmax along axis {axis}", partial(_softmax, axis=axis)))
        found.append((f"the logarithm of the softmax along axis {axis}", partial(_log_softmax, axis=axis)))
        found.append((f"the unit vectors along axis {axis}", partial(_unit_vectors, axis=axis)))
    return found


def _factor(made: np.ndarray, got: np.ndarray, wanted: np.ndarray) -> float:
    """The factor that makes one of two outputs the other; 0 where none does."""
    square = float((made * made).sum())
    factor = float((made * got).sum()) / square if np.isfinite(square) and square > 0 else 0.0
    return factor if factor and gives(factor * made, got, wanted) else 0.0


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    found: np.ndarray = e / e.sum(axis=axis, keepdims=True)
    return found


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    found: np.ndarray = np.log(_softmax(x, axis))
    return found


def _unit_vectors(x: np.ndarray, axis: int) -> np.ndarray:
    found: np.ndarray = x / np.linalg.norm(x, axis=axis, keepdims=True)
    return found


def _reshaped(got: np.ndarray, wanted: np.ndarray) -> str:
    """Whether a transposed output was read as if it were not."""
    if not 2 <= wanted.ndim <= _MOST_AXES:
        return ""
    for axes in itertools.permutations(range(wanted.ndim)):  # those that leave the rows where they are come first
        moved = wanted.transpose(axes)
        if moved.shape != wanted.shape and gives(moved.reshape(wanted.shape), got, wanted):
            order, rows = ", ".join(map(str, axes)), "" if axes[0] == 0 else " (axis 0: the rows of the recording)"
            where = f"({order}), reshaped where it should be transposed{rows}"
            return f"it is the reference with its axes in the order {where}"
    return ""


def _sharpened(got: np.ndarray, wanted: np.ndarray, axis: int) -> float:
    """The factor of the logits of a softmax that has another temperature; 0 where it is none."""
    for rows in (got, wanted):
        if rows.min() <= 0 or np.abs(rows.sum(axis=axis) - 1).max() > _SUM_OF_WEIGHTS:
            return 0.0
    a, b = (np.log(rows) - np.log(rows).mean(axis=axis, keepdims=True) for rows in (got, wanted))
    factor = float((a * b).sum() / max(float((b * b).sum()), 1e-30))
    return factor if gives(_softmax(factor * np.log(wanted), axis), got, wanted) else 0.0


def _moved(got: np.ndarray, wanted: np.ndarray, axis: int) -> int:
    """By how many entries an output is moved along an axis; 0 where it is not. What has no counterpart is left out."""
    count = wanted.shape[axis]
    for by in (sign * step for step in range(1, min(_FARTHEST, count // 4) + 1) for sign in (1, -1)):
        here, there = np.arange(max(0, by), count + min(0, by)), np.arange(max(0, -by), count + min(0, -by))
        a, b, own = (np.take(each, at, axis) for each, at in ((got, here), (wanted, there), (wanted, here)))
        if np.linalg.norm(a - own) > 0 and gives(b, a, own):
            return by
    return 0


def _is_in_other_orders(got: np.ndarray, wanted: np.ndarray, axis: int) -> bool:
    """Whether each sample has the reference's entries in an order of its own. Entries of one value prove nothing."""
    count = wanted.shape[axis]
    if not 2 <= count <= _MOST_SORTED or wanted[0].size < 2 * count:
        return False
    rest = apart = 0.0
    for a, b in zip(got, wanted, strict=True):
        order = permutation(a, b, axis - 1)
        undone = b if order is None else np.take(b, order, axis - 1)
        rest, apart = rest + float(((a - undone) ** 2).sum()), apart + float(((a - b) ** 2).sum())
        if rest > LEFT**2 * max(apart, float((wanted**2).sum())):
            return False
    return rest <= LEFT**2 * apart


def _line(a: np.ndarray, b: np.ndarray) -> str:
    """The reference times a factor, plus an offset."""
    if np.ptp(a) == 0:
        return f"{a[0]:.4g} everywhere"
    if len(a) < 2 * _ROWS_FOR_COLUMN or np.ptp(b) == 0:
        return ""
    factor, offset = np.polyfit(b, a, 1)
    if np.linalg.norm(a - factor * b - offset) > min(LEFT * np.linalg.norm(a - b), LEFT * np.linalg.norm(a - a.mean())):
        return ""
    has_factor, has_offset = abs(factor - 1) > 1e-3, abs(offset) > 1e-3 * float(np.abs(a).max())
    shown = f"{factor:.4g}" if abs(factor - 1) < 0.01 else f"{factor:.3g}"
    times = f"{shown} times the reference" if has_factor else "the reference"
    return times + (f" {'plus' if offset > 0 else 'minus'} {abs(offset):.4g}" if has_offset else "")


def _product(a: np.ndarray, b: np.ndarray, column: int) -> str:
    """The reference times another of its columns."""
    for other in range(len(b)):
        made = b[column] * b[other]
        rest = np.linalg.norm(a - made)
        if rest <= LEFT * np.linalg.norm(a - b[column]) and rest <= LEFT * np.linalg.norm(a):
            return f"the reference times its column {other}"
    return ""


def _mix(a: np.ndarray, b: np.ndarray, column: int) -> str:
    """A sum of at most two of the reference's columns, each with a factor, its own among them."""
    if len(b) > _MOST_MIXED or len(a) < _ROWS_FOR_COLUMN * len(b):
        return ""
    for other in range(len(b)):
        if other == column:
            continue
        pair = np.stack([b[column], b[other]], axis=1)
        factors = np.linalg.lstsq(pair, a, rcond=None)[0]
        rest = np.linalg.norm(a - pair @ factors)
        if rest <= LEFT * np.linalg.norm(a - b[column]) and rest <= LEFT * np.linalg.norm(a - a.mean()):
            own = "the reference" if abs(factors[0] - 1) < 1e-2 else f"{factors[0]:.3g} times the reference"
            times = "" if abs(abs(factors[1]) - 1) < 1e-2 else f"{abs(factors[1]):.3g} times "
            return f"{own} {'plus' if factors[1] > 0 else 'minus'} {times}its column {other}"
    return ""


def _few(columns: Sequence[int]) -> str:
    if len(columns) > 2 and columns[-1] - columns[0] == len(columns) - 1:
        return f"{columns[0]} to {columns[-1]}"
    return ", ".join(map(str, columns[:8])) + (", ..." if len(columns) > 8 else "")
