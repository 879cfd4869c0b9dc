"""What differs between two constants beyond a rounding to FP16 or BF16, and how converters limit constants."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from mptune.diagnosis.patterns.bounds import FEW_BITS, is_rounded, step_of
from mptune.graph.bfloat16 import from_bfloat16, to_bfloat16
from mptune.graph.plan import LARGEST, REDUCED, Precision
from mptune.graph.writing.weights import round_values

_FEWEST = 8
"""Of fewer values, what they are of others is chance."""
_SAME = 1e-6
_NAMED = 4
_MOST_AXES = 4
_LEVELS = 127
"""Of INT8, above zero."""
_NEARLY_ZERO = 2.0**-23
"""Converters hold smaller values away from zero, at the smallest numbers of FP16."""
CONVERTERS_LIMIT = 1e4
"""``max_finite_val`` of onnxconverter-common's ``convert_float_to_float16``, unless it is given (1.16)."""


@dataclass(frozen=True, eq=False)
class ConstantDifference:
    """Two constants that differ.

    Attributes:
        text: what differs, from left to right.
        values: the left constant with the right one's values where the two differ; None where shapes or types do.
        limit: magnitude that every large value which differs is held at in one of the two; None where there is none.
        largest: largest magnitude of what is held at it, in the other.
        change: root mean square difference by that of the larger constant; infinite where it is not known.
    """

    text: str
    values: np.ndarray | None = None
    limit: float | None = None
    largest: float = 0.0
    change: float = math.inf


def constant_difference(a: np.ndarray, b: np.ndarray) -> ConstantDifference | None:
    """What differs between two constants; None where one is the other, or the other rounded to FP16 or BF16.

    What is beyond these may have become infinite, or the largest finite value (``round_values``).

    Args:
        a: values, of any shape and type.
        b: values.
    """
    a, b = (each.astype(np.float32) if each.dtype.name == "bfloat16" else each for each in (a, b))  # of ml_dtypes
    if a.shape != b.shape:
        return ConstantDifference(f"shape {list(a.shape)} in one model and {list(b.shape)} in the other")
    if a.dtype.kind not in "fiub" or b.dtype.kind not in "fiub":
        return None if np.array_equal(a, b) else ConstantDifference("other values")
    differs = _differing(a, b)
    count = int(differs.sum())
    if not count:
        return None
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - y)[differs]
        share = float(np.linalg.norm(apart) / max(np.linalg.norm(x), np.linalg.norm(y)))
    largest = float(apart[np.isfinite(apart)].max(initial=0.0))
    text = f"{count} of {a.size} values differ, by up to {largest:.3g}"
    if lost := int((~np.isfinite(y) & np.isfinite(x)).sum()):
        text += f", and {lost} are NaN or Inf in the candidate"
        if lost == count:
            text = f"{count} of {a.size} values are NaN or Inf in the candidate"
    elif what := what_it_is(y, x):
        text += f": {what}"
    elif not y[differs].any() and count >= _FEWEST:
        text += ": these are zero in the candidate"
    text += _entries(differs)
    limit, most = None, 0.0
    large = differs & (np.fmax(np.abs(x), np.abs(y)) > _NEARLY_ZERO)
    for held, other, where in ((y, x, "the candidate"), (x, y, "the reference")):
        if limit is None and large.any() and (limit := _limit(held[large], other[large], held)) is not None:
            most = float(np.abs(other[large]).max())
            text += f": {where} holds at ±{limit:g} what reaches {most:.3g} in the other"
    change = share if math.isfinite(share) else math.inf
    return ConstantDifference(text, np.where(differs, b, a).astype(a.dtype), limit, most, change)


def _entries(differs: np.ndarray) -> str:
    """The few entries of an axis that hold all values which differ, in words; "" where they are spread."""
    for axis in range(differs.ndim):
        entries = np.flatnonzero(differs.any(axis=tuple(k for k in range(differs.ndim) if k != axis)))
        if differs.shape[axis] > len(entries) and len(entries) <= min(_NAMED, differs.shape[axis] // 4):
            shown = ", ".join(map(str, entries))
            return f", all in entr{'ies' if len(entries) > 1 else 'y'} {shown} of axis {axis}"
    return ""


def what_it_is(got: np.ndarray, wanted: np.ndarray) -> str:
    """What a constant of the candidate is of the reference's, in words; "" where that is nothing plain.

    Args:
        got: of the candidate, float64.
        wanted: of the reference, the same shape.
    """
    if got.size < _FEWEST or not np.isfinite(got).all() or not np.isfinite(wanted).all() or not np.ptp(wanted):
        return ""
    if not got.any():
        return "it is zero throughout in the candidate"
    factor = float((got * wanted).sum() / (wanted**2).sum())
    if np.linalg.norm(got - factor * wanted) <= _SAME * np.linalg.norm(got):
        return f"it is {factor:.4g} times the reference's"
    for axis in range(got.ndim):
        if np.array_equal(got, np.flip(wanted, axis)):
            return f"it has the entries of axis {axis} in reverse order"
    for axes in itertools.permutations(range(got.ndim)) if 2 <= got.ndim <= _MOST_AXES else ():
        moved = wanted.transpose(axes)
        if axes != tuple(range(got.ndim)) and np.array_equal(moved.reshape(wanted.shape), got):
            return f"it is the reference's with its axes in the order ({', '.join(map(str, axes))})"
    rows = [(a.ravel(), b.ravel()) for a, b in zip(got, wanted, strict=True)] if got.ndim > 1 else []
    if step_of(got, wanted) or _has_steps(got, wanted):
        return "it is the reference's rounded to steps, as to INT8"
    if len(rows) > 1 and all(a.size >= _FEWEST and _has_steps(a, b) for a, b in rows):
        return "it is the reference's, each entry of axis 0 rounded to steps of its own, as to INT8"
    for name, bits in FEW_BITS:
        if is_rounded(got, wanted, bits):
            return f"it is the reference's rounded to {name}"
    return ""


def _has_steps(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether values are multiples of a 127th of the largest, each next to the reference's."""
    step = float(np.abs(got).max()) / _LEVELS
    counts = got / (step or 1.0)
    return bool((np.abs(counts - np.round(counts)) < 1e-3).all() and (np.abs(got - wanted) <= 0.51 * step).all())


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which values differ, shape of both, by the one rounding that explains most of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        same = [_equal(a, b)]
        if np.float16 in (a.dtype, b.dtype):
            same.append(_equal(a.astype(np.float16), b.astype(np.float16)))
        if a.dtype.kind == "f":
            rounded = (a.astype(np.float16), from_bfloat16(to_bfloat16(a.astype(np.float32))), *_held(a))
            same += [_equal(each, b) for each in rounded]
        if b.dtype.kind == "f":
            same += [_equal(each, a) for each in _held(b)]
    differs: np.ndarray = ~max(same, key=np.count_nonzero)
    return differs


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Value by value; NaN is NaN."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    result: np.ndarray = (x == y) | (np.isnan(x) & np.isnan(y))
    return result


def _limit(held: np.ndarray, other: np.ndarray, every: np.ndarray) -> float | None:
    """The magnitude that values are held at; None where they are not, or one value alone may have been changed.

    Args:
        held: values of one constant that differ, float64 (count,).
        other: those of the other constant.
        every: all values of the first constant.
    """
    limit = float(np.abs(held[0]))
    is_known = limit == CONVERTERS_LIMIT or len(np.unique(np.abs(other))) > 1
    is_held = (
        0.0 < limit < np.inf
        and bool((np.abs(held) == limit).all())
        and bool((np.sign(held) == np.sign(other)).all())
        and bool((np.abs(other) > limit).all())
        and bool((np.abs(every) <= limit).all())
    )
    return limit if is_held and is_known else None


def is_same_number(a: float, b: float) -> bool:
    """Whether two attributes are the same; one that is the largest of a reduced precision may hold what is beyond."""
    if any(LARGEST[precision] in (abs(a), abs(b)) for precision in REDUCED):
        return constant_difference(np.float32(a), np.float32(b)) is None
    return a == b


def _held(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Values as each reduced precision holds them."""
    wide = values.astype(np.float32)
    return round_values(wide, Precision.FP16), from_bfloat16(round_values(wide, Precision.BF16))
