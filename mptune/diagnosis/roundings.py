"""Whether a difference is what a rounding makes (TF32, FP16, BF16), in units of the reference's spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

FP32_ROUNDING = 1e-5  # relative to the root mean square: what another order of FP32 additions changes at most
CLEAR = 0.1  # A pattern explains a difference where it leaves at most this share of it
_UNKNOWN_ROUNDING = 1e-2  # where the emulation in FP16 is not finite
_MOST_ROUNDING = 0.3
"""An FP16 error above this, in standard deviations, is too large to tell a rounding from anything else."""
_LEFT = 0.6  # share of a difference that may be left by its cause: two engines add up in other orders
_CLEARER = 0.7  # TF32 and FP16 both keep 11 bits, so TF32 has to leave at most this much of what FP16 leaves

Cause = Literal["tf32-reference", "tf32-candidate", "fp16", "bf16"]


@dataclass(frozen=True)
class Compared:
    """Rows of an output, rows of its reference, and the sizes of roundings, all divided by the columns' spread."""

    got: np.ndarray  # (rows, ...), float64; values that are not finite are 0
    wanted: np.ndarray
    scale: np.ndarray  # what both were divided by; broadcasts
    exact: float  # largest root mean square per row that FP32 rounding makes
    half: float  # the same of FP16, as emulated, doubled

    @classmethod
    def of_rows(cls, got: np.ndarray, wanted: np.ndarray, emulated: np.ndarray) -> Compared:
        """Take rows of an output, of its reference, and of the emulation in FP16 of the reference."""
        scale = column_scale(wanted)
        a, b = _finite(got) / scale, _finite(wanted) / scale
        half, exact = _UNKNOWN_ROUNDING, FP32_ROUNDING * max(rms(b), 1e-30)
        if emulated.shape == wanted.shape and np.isfinite(emulated).all():
            half = 2 * float(row_rms(np.asarray(emulated, np.float64) / scale - b).max(initial=0))
        return cls(a, b, scale, exact, max(min(half, _MOST_ROUNDING), exact))

    @property
    def distances(self) -> np.ndarray:
        """Root mean square difference of each row, (rows,)."""
        return row_rms(self.got - self.wanted)

    @property
    def distance(self) -> float:
        """Root mean square difference of all rows."""
        return rms(self.got - self.wanted)


def rms(values: np.ndarray) -> float:
    """Root mean square; 0 of nothing."""
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def row_rms(values: np.ndarray) -> np.ndarray:
    """Root mean square of each row, (rows,)."""
    sizes: np.ndarray = np.sqrt(np.mean(values.reshape(len(values), -1) ** 2, axis=1))
    return sizes


def column_scale(wanted: np.ndarray) -> np.ndarray:
    """Standard deviation of each column; its root mean square, else 1, where that is 0. Broadcasts to ``wanted``.

    Columns (channels) lie on axis 1 from rank 4 on, else on the last; single values are one column.
    """
    values = _finite(wanted)
    axis = None if values.ndim < 2 else 1 if values.ndim >= 4 else values.ndim - 1
    others = tuple(k for k in range(values.ndim) if k != axis)
    spread = values.std(axis=others, keepdims=True)
    size = np.sqrt(np.mean(values**2, axis=others, keepdims=True))
    # A column that is constant but for rounding has no spread of its own.
    scale: np.ndarray = np.where(spread <= 1e-6 * size, np.where(size > 0, size, 1.0), spread)
    return scale


def _finite(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=0.0, neginf=0.0)


class Explanation(NamedTuple):
    """A cause of a difference."""

    cause: Cause
    left: float  # share of the difference (root mean square) that is left when the cause's is taken off
    size: float  # root mean square of what the cause makes, over that of the difference


def explain(difference: np.ndarray, changes: Sequence[tuple[Cause, np.ndarray]]) -> Explanation | None:
    """The cause that leaves least of a difference, where it leaves little.

    ``difference`` is output minus reference, ``changes`` what each cause makes of the reference, both in units of the
    columns' spread.
    """
    size = float(np.linalg.norm(difference))
    if size == 0 or not np.isfinite(size):
        return None
    causes = [
        Explanation(cause, float(np.linalg.norm(difference - change)) / size, float(np.linalg.norm(change)) / size)
        for cause, change in changes
        if np.isfinite(change).all()
    ]
    causes.sort(key=lambda each: each.left)
    half = next((each for each in causes if not each.cause.startswith("tf32")), None)
    tf32 = next((each for each in causes if each.cause.startswith("tf32")), None)
    if tf32 is not None and tf32.left <= _LEFT and (half is None or tf32.left <= _CLEARER * half.left):
        return tf32
    return half if half is not None and half.left <= _LEFT else None
