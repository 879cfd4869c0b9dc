"""Whether a difference is what a rounding makes: TF32 on one side or the other, FP16 or BF16, by size and pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Cause = Literal["tf32-reference", "tf32-candidate", "fp16", "bf16"]

_LEFT = 0.6
"""Share of a difference that may be left by its cause: two engines add up in other orders."""
_CLEARER = 0.7
"""TF32 and FP16 both keep 11 bits, so TF32 has to leave at most this much of what FP16 leaves."""


@dataclass(frozen=True)
class Explanation:
    """A cause of a difference.

    Attributes:
        cause: what makes it.
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


def explain(
    difference: np.ndarray,
    tf32: Sequence[np.ndarray],
    fp16: Sequence[np.ndarray],
    *,
    is_half: bool,
    bf16: Sequence[np.ndarray] = (),
) -> Explanation | None:
    """The cause that leaves least of a difference, where it leaves little.

    Args:
        difference: output minus reference, in units of the columns' spread.
        tf32: what TF32 changes in the outputs of the model, one array for each way to round, in the same units.
        fp16: what FP16 changes, likewise.
        is_half: every value of the output is an FP16 number, so its last operation was no TF32 one.
        bf16: what plans with BF16 change, likewise.
    """
    size = _norm(difference)
    if size == 0 or not np.isfinite(size):
        return None
    halves = [_explained("fp16", difference, each, size) for each in fp16]
    halves += [_explained("bf16", difference, each, size) for each in bf16]
    best_half = min(halves, key=lambda each: each.left, default=None)
    products = [_explained("tf32-candidate", difference, each, size) for each in tf32]
    products += [_explained("tf32-reference", difference, -each, size) for each in tf32]
    if is_half:
        products = [each for each in products if each.cause == "tf32-reference"]
    best = min(products, key=lambda each: each.left, default=None)
    if best is not None and best.left <= _LEFT and (best_half is None or best.left <= _CLEARER * best_half.left):
        return best
    return best_half if best_half is not None and best_half.left <= _LEFT else None


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
    return Explanation(cause, _norm(difference - made) / size, _norm(made) / size)


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt((np.asarray(values, np.float64) ** 2).sum()))
