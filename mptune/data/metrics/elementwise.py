"""The statistics of one output of one sample, element by element, in float64.

They are taken over the elements at which the reference is finite. NaN and Inf of a candidate are counted and stay in
the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mptune.errors import DataError

RELATIVE_FLOOR = 2.0**-14
"""Smallest denominator of ``max_rel``: the smallest normal FP16 number, below which FP16 has no relative precision."""

_CHUNK = 1 << 20
"""Elements that are widened to float64 at a time."""


@dataclass
class _Sums:
    """Running sums over the elements at which the reference is finite."""

    reference_squared: float = 0.0
    output_squared: float = 0.0
    difference_squared: float = 0.0
    absolute: float = 0.0
    max_rel: float = 0.0
    non_finite: int = 0


def statistics_of(name: str, output: np.ndarray, reference: np.ndarray, number: int) -> dict[str, float]:
    """All statistics of one output of one sample. Peak memory: 8 bytes per element beside the two arrays."""
    if output.shape != reference.shape:
        raise DataError(
            f"output {name!r} has shape {output.shape} on sample {number}, the reference has {reference.shape}",
            "rows that NMS or NonZero select are compared as sets; other shapes need your own script.py:function",
        )
    for array in (output, reference):
        if array.dtype.kind in "OSUcMm":
            raise DataError(f"output {name!r} has type {array.dtype}, not a real number", "leave it out of the model")
    sums = _Sums()
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        differences = _accumulate(output.reshape(-1), reference.reshape(-1), sums)
        return _finish(differences, sums)


def _accumulate(output: np.ndarray, reference: np.ndarray, sums: _Sums) -> np.ndarray:
    """Add everything up chunk by chunk; returns the absolute differences."""
    differences = np.empty(reference.size, np.float64)
    filled = 0
    for start in range(0, reference.size, _CHUNK):
        wanted = reference[start : start + _CHUNK].astype(np.float64)
        got = output[start : start + _CHUNK].astype(np.float64)
        finite = np.isfinite(wanted)
        if not finite.all():
            wanted, got = wanted[finite], got[finite]
        absolute = differences[filled : filled + wanted.size]
        np.abs(got - wanted, out=absolute)
        filled += wanted.size
        sums.non_finite += int(np.count_nonzero(~np.isfinite(got)))
        sums.reference_squared += float(wanted @ wanted)
        sums.output_squared += float(got @ got)
        sums.difference_squared += float(absolute @ absolute)
        sums.absolute += float(absolute.sum())
        relative = (absolute / np.maximum(np.abs(wanted), RELATIVE_FLOOR)).max(initial=0.0)
        sums.max_rel = float(np.maximum(sums.max_rel, relative))  # np.maximum keeps NaN, max() may not
    return differences[:filled]


def _finish(differences: np.ndarray, sums: _Sums) -> dict[str, float]:
    count = differences.size
    median = p99 = 0.0
    max_abs = float(differences.max(initial=0.0))
    if count:
        low, high, top = (count - 1) // 2, count // 2, count - 1 - int((1 - 99 / 100) * count)
        differences.partition(sorted({low, high, top}))
        median = float((differences[low] + differences[high]) / 2)
        p99 = float(differences[top])
    reference, output, error = sums.reference_squared, sums.output_squared, sums.difference_squared
    return {
        "relative_l2": _ratio(math.sqrt(error), math.sqrt(reference)),
        "max_abs": max_abs,
        "mean_abs": sums.absolute / count if count else 0.0,
        "median_abs": median,
        "p99_abs": p99,
        "max_rel": sums.max_rel,
        "cosine_distance": _cosine_distance(reference, output, error),
        "sqnr_db": _sqnr_db(reference, error),
        "non_finite": float(sums.non_finite),
    }


def _ratio(error: float, reference: float) -> float:
    if reference == 0:
        return error if error == 0 or math.isnan(error) else math.inf
    return error / reference


def _cosine_distance(reference: float, output: float, error: float) -> float:
    """From squared norms: 1 - cos = (|d|^2 - (|r| - |y|)^2) / (2 |r| |y|), which keeps its digits near 0."""
    if not math.isfinite(output):
        return math.nan
    if reference == 0 or output == 0:
        return 0.0 if reference == output else 1.0
    r, y = math.sqrt(reference), math.sqrt(output)
    return min(max((error - (r - y) ** 2) / (2 * r * y), 0.0), 2.0)


def _sqnr_db(reference: float, error: float) -> float:
    if math.isnan(error):
        return math.nan
    if error == 0:
        return math.inf
    if reference == 0 or math.isinf(error):
        return -math.inf
    return 10 * math.log10(reference / error)
