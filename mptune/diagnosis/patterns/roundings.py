"""Whether a difference is what a rounding makes (TF32, FP16, BF16), in units of the reference's spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

FP32_ROUNDING = 1e-5
"""Relative to the root mean square: what another order of FP32 additions changes at most."""

_UNKNOWN_ROUNDING = 1e-2
"""Where the emulation in FP16 is not finite."""

_MOST_ROUNDING = 0.3
"""An FP16 error above this, in standard deviations, is too large to tell a rounding from anything else."""

CLEAR = 0.1
"""A pattern explains a difference where it leaves at most this share of it."""


@dataclass(frozen=True)
class Compared:
    """Rows of an output, rows of its reference, and the sizes of roundings, all divided by the columns' spread.

    Attributes:
        got: (rows, ...), float64; values that are not finite are 0.
        scale: what both were divided by; broadcasts.
        exact: largest root mean square per row that FP32 rounding makes.
        half: the same of FP16, as emulated, doubled.
        half_most: largest absolute difference of one value that FP16 rounding makes, doubled.
    """

    got: np.ndarray
    wanted: np.ndarray
    scale: np.ndarray
    exact: float
    half: float
    half_most: float

    @classmethod
    def of_rows(cls, got: np.ndarray, wanted: np.ndarray, emulated: np.ndarray | None) -> Compared:
        """Take rows of an output, of its reference, and of the emulation in FP16 of the reference."""
        scale = column_scale(wanted)
        a, b = _finite(got) / scale, _finite(wanted) / scale
        size = float(np.sqrt(np.mean(b**2))) if b.size else 0.0
        half = half_most = _UNKNOWN_ROUNDING
        if emulated is not None and np.isfinite(emulated).all():
            difference = np.abs(np.asarray(emulated, np.float64) / scale - b)
            half = 2 * float(row_rms(difference).max(initial=0))
            half_most = 2 * float(difference.max(initial=0))
        exact = FP32_ROUNDING * max(size, 1e-30)
        return cls(a, b, scale, exact, max(min(half, _MOST_ROUNDING), exact), max(min(half_most, 1.0), exact))

    def of_one_precision(self) -> Compared:
        """Without FP16's roundings: both are of one model in one precision."""
        return replace(self, half=self.exact, half_most=self.exact)

    @property
    def distances(self) -> np.ndarray:
        """Root mean square difference of each row, (rows,)."""
        return row_rms(self.got - self.wanted)

    @property
    def distance(self) -> float:
        """Root mean square difference of all rows."""
        return rms(self.got - self.wanted)

    def explains(self, pattern: np.ndarray) -> bool:
        """Whether ``got`` is ``pattern`` (in the same units), up to FP16's rounding, and far nearer than the reference.

        ``pattern`` has the shape of ``got``.
        """
        rest = rms(self.got - pattern)
        return self.distance > self.exact and rest <= max(self.half, self.exact) and rest <= CLEAR * self.distance


def rms(values: np.ndarray) -> float:
    """Root mean square; 0 of nothing."""
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def row_rms(values: np.ndarray) -> np.ndarray:
    """Root mean square of each row, (rows,)."""
    sizes: np.ndarray = np.sqrt(np.mean(values.reshape(len(values), -1) ** 2, axis=1))
    return sizes


def column_axis(shape: Sequence[int]) -> int | None:
    """The axis of columns (channels): 1 from rank 4 on, else the last; None where rows are single values."""
    if len(shape) < 2:
        return None
    return 1 if len(shape) >= 4 else len(shape) - 1


def column_scale(wanted: np.ndarray) -> np.ndarray:
    """Standard deviation of each column; its root mean square, else 1, where that is 0. Broadcasts to ``wanted``."""
    values = _finite(wanted)
    axis = column_axis(values.shape)
    others = tuple(k for k in range(values.ndim) if k != axis)
    spread = values.std(axis=others, keepdims=True)
    size = np.sqrt(np.mean(values**2, axis=others, keepdims=True))
    # A column that is constant but for rounding has no spread of its own.
    is_flat = spread <= 1e-6 * size
    scale: np.ndarray = np.where(is_flat, np.where(size > 0, size, 1.0), spread)
    return scale


def _finite(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=0.0, neginf=0.0)


Cause = Literal["tf32-reference", "tf32-candidate", "fp16", "bf16"]

_LEFT = 0.6
"""Share of a difference that may be left by its cause: two engines add up in other orders."""

_CLEARER = 0.7
"""TF32 and FP16 both keep 11 bits, so TF32 has to leave at most this much of what FP16 leaves."""


@dataclass(frozen=True)
class Explanation:
    """A cause of a difference.

    Attributes:
        left: share of the difference (root mean square) that is left when the cause's is taken off.
        size: root mean square of what the cause makes, over that of the difference.
    """

    cause: Cause
    left: float
    size: float

    @property
    def is_tf32(self) -> bool:
        """Whether it is TF32, on either side."""
        return self.cause.startswith("tf32")


def explain(difference: np.ndarray, made: Sequence[tuple[Cause, np.ndarray]], *, is_half: bool) -> Explanation | None:
    """The cause that leaves least of a difference, where it leaves little.

    ``difference`` is output minus reference, ``made`` what each cause changes there, both in units of the columns'
    spread. ``is_half``: every value of the output is an FP16 number, so its last operation was no TF32 one.
    """
    size = float(np.linalg.norm(difference))
    if size == 0 or not np.isfinite(size):
        return None
    causes = [_explained(cause, difference, changed, size) for cause, changed in made]
    halves = [each for each in causes if not each.is_tf32]
    products = [each for each in causes if each.is_tf32 and not (is_half and each.cause == "tf32-candidate")]
    half = min(halves, key=lambda each: each.left, default=None)
    best = min(products, key=lambda each: each.left, default=None)
    if best is not None and best.left <= _LEFT and (half is None or best.left <= _CLEARER * half.left):
        return best
    return half if half is not None and half.left <= _LEFT else None


def is_half_precise(values: np.ndarray) -> bool:
    """Whether every value is an FP16 number, and not just a few whole ones."""
    if values.dtype == np.float16:
        return True
    if values.dtype.kind != "f":
        return False
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(values.dtype) == values).all() and len(np.unique(values)) > 4)


def _explained(cause: Cause, difference: np.ndarray, made: np.ndarray, size: float) -> Explanation:
    if not np.isfinite(made).all():
        return Explanation(cause, float("inf"), float("inf"))
    return Explanation(cause, float(np.linalg.norm(difference - made)) / size, float(np.linalg.norm(made)) / size)
