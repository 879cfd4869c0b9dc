"""Outputs as rows: those of a run's samples and of recordings, in one layout, and which rounding a difference has.

A rounding (TF32, FP16, BF16) is made out in units of the reference's spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from mptune.data.recorded import recorded_runs
from mptune.errors import DataError

FP32_ROUNDING = 1e-5  # relative to the root mean square: what another order of FP32 additions changes at most
CLEAR = 0.1  # A pattern explains a difference where it leaves at most this share of it
_UNKNOWN_ROUNDING = 1e-2  # where the emulation in FP16 is not finite
_MOST_ROUNDING = 0.3  # in standard deviations: a larger error of FP16 could be anything else, too
_LEFT = 0.6  # share of a difference that may be left by its cause: two engines add up in other orders
_CLEARER = 0.7  # TF32 and FP16 both keep 11 bits, so TF32 has to leave at most this much of what FP16 leaves

Cause = Literal["tf32-reference", "tf32-candidate", "fp16", "bf16"]
_UNNAMED = "arr_0"  # what NumPy calls an array that is saved without a name
_AS_IS = "record the output itself, axes as the model has them, all rows along axis 0 in the order of the data"


@dataclass(frozen=True)
class Layout:
    """How the arrays of one output, one for each sample, lie in one array."""

    shapes: tuple[tuple[int, ...], ...]  # of each sample
    stacked: bool  # samples have no axis of rows: one is added

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray], feeds: Sequence[Mapping[str, np.ndarray]]) -> Layout:
        """The layout of an output: rows along axis 0 where it has as many as the inputs of each sample."""
        shapes = tuple(array.shape for array in arrays)
        rows = [{value.shape[0] for value in feed.values() if value.ndim} for feed in feeds]
        along = all(shape and shape[0] in sizes for shape, sizes in zip(shapes, rows, strict=True))
        return cls(shapes, not along and len(set(shapes)) == 1)

    @property
    def is_regular(self) -> bool:
        """Whether rows have one shape."""
        return len({shape if self.stacked else shape[1:] for shape in self.shapes}) == 1

    @property
    def ends(self) -> np.ndarray:
        """Number of rows up to and with each sample."""
        return np.cumsum([1 if self.stacked else shape[0] for shape in self.shapes])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what ``rows`` gives."""
        return (int(self.ends[-1]), *(self.shapes[0] if self.stacked else self.shapes[0][1:]))

    def rows(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """All samples in one array, rows first."""
        return np.stack(arrays) if self.stacked else np.concatenate(arrays)

    def fit(self, array: np.ndarray) -> np.ndarray | None:
        """A recorded array in this layout; None where it has another shape, apart from axes of size 1 and flat rows."""
        if not self.is_regular:
            return None
        wanted = self.shape
        is_flat = array.shape[:1] == wanted[:1] and array.ndim == 2 and array.size == math.prod(wanted)
        is_same = [size for size in array.shape if size != 1] == [size for size in wanted if size != 1]
        return array.reshape(wanted) if is_flat or is_same else None


def read_recording(path: Path, layouts: Mapping[str, Layout]) -> tuple[Mapping[str, np.ndarray], ...]:
    """Outputs that were recorded (``recorded_runs``), cut into samples; rows in the order of the data.

    Raises DataError where an output is missing, or has a shape that fits no output.
    """
    runs = recorded_runs(path)
    if len(layouts) == 1 and all(list(run) in ([""], [_UNNAMED]) for run in runs):
        runs = [dict.fromkeys(layouts, *run.values()) for run in runs]
    cut: dict[str, list[np.ndarray]] = {}
    for name, layout in layouts.items():
        arrays = [run[name] for run in runs if name in run]
        if len(arrays) < max(len(runs), 1):
            hint = f"write one array per output by its name: np.savez('outputs.npz', **{{{name!r}: ...}})"
            hint += f", or leave it out of the comparison: --ignore {name}"
            names = ", ".join(map(repr, runs[0] if runs else ())) or "none"
            raise DataError(f"{path} has no output {name!r}: it holds {names}", hint)
        if any(array.dtype.kind not in "fiub" for array in arrays):
            raise DataError(f"{path}: {name!r} is of type {arrays[0].dtype}, not numeric", "save numbers")
        try:
            whole = arrays[0] if len(arrays) == 1 else layout.rows(arrays)
        except ValueError:
            raise DataError(f"{path}: the shapes of output {name!r} differ from run to run", _AS_IS) from None
        fitted = layout.fit(whole)
        if fitted is None:
            text = f"{path}: output {name!r} has shape {list(whole.shape)}, the data give {list(layout.shape)}"
            raise DataError(text, _AS_IS)
        cut[name] = list(fitted) if layout.stacked else np.split(fitted, layout.ends[:-1])
    count = len(next(iter(layouts.values())).shapes)
    return tuple({name: parts[k] for name, parts in cut.items()} for k in range(count))


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
        """Take rows of an output, of its reference, and of the emulation in FP16 of the reference.

        Columns (channels) lie on axis 1 from rank 4 on, else on the last; single values are one column. Each is divided
        by its standard deviation; by its root mean square, else 1, where that is 0.
        """
        got, wanted = (np.nan_to_num(np.asarray(a, np.float64), nan=0.0, posinf=0.0, neginf=0.0) for a in (got, wanted))
        axis = None if wanted.ndim < 2 else 1 if wanted.ndim >= 4 else wanted.ndim - 1
        others = tuple(k for k in range(wanted.ndim) if k != axis)
        spread = wanted.std(axis=others, keepdims=True)
        size = np.sqrt(np.mean(wanted**2, axis=others, keepdims=True))
        # A column that is constant but for rounding has no spread of its own.
        scale = np.where(spread <= 1e-6 * size, np.where(size > 0, size, 1.0), spread)
        a, b = got / scale, wanted / scale
        half, exact = _UNKNOWN_ROUNDING, FP32_ROUNDING * max(rms(b), 1e-30)
        if emulated.shape == wanted.shape and np.isfinite(emulated).all():
            half = 2 * float(row_rms(np.asarray(emulated, np.float64) / scale - b).max(initial=0))
        return cls(a, b, scale, exact, max(min(half, _MOST_ROUNDING), exact))

    @property
    def distance(self) -> float:
        """Root mean square difference of all rows."""
        return rms(self.got - self.wanted)


def rms(values: np.ndarray) -> float:
    """Root mean square; 0 of nothing."""
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def row_rms(values: np.ndarray) -> np.ndarray:
    """Root mean square of each row, (rows,)."""
    return np.asarray(np.sqrt(np.mean(values.reshape(len(values), -1) ** 2, axis=1)))


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
    half = tf32 = Explanation("fp16", math.inf, 0.0)  # what leaves least, of either kind
    for cause, change in changes:
        each = Explanation(cause, *(float(np.linalg.norm(a)) / size for a in (difference - change, change)))
        if cause.startswith("tf32"):
            tf32 = min(tf32, each, key=lambda e: e.left)
        else:
            half = min(half, each, key=lambda e: e.left)
    likely = tf32 if tf32.left <= _CLEARER * half.left else half
    return likely if likely.left <= _LEFT else None
