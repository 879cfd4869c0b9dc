"""The statistics of one output of one sample, element by element, in float64.

They are taken over the elements at which the reference is finite. NaN and Inf of a candidate are counted and stay in
the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import math

import numpy as np

from mptune.errors import DataError

RELATIVE_FLOOR = 2.0**-14
"""Smallest denominator of ``max_rel``: the smallest normal FP16 number, below which FP16 has no relative precision."""

_CHUNK = 1 << 20
"""Elements that are widened to float64 at a time."""


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
    wanted_squares = squares = absolute_sum = max_rel = 0.0
    non_finite = filled = 0
    differences = np.empty(reference.size, np.float64)
    flat_output, flat_reference = output.reshape(-1), reference.reshape(-1)
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        for start in range(0, reference.size, _CHUNK):
            wanted = flat_reference[start : start + _CHUNK].astype(np.float64)
            got = flat_output[start : start + _CHUNK].astype(np.float64)
            finite = np.isfinite(wanted)
            if not finite.all():
                wanted, got = wanted[finite], got[finite]
            absolute = differences[filled : filled + wanted.size]
            np.abs(got - wanted, out=absolute)
            filled += wanted.size
            non_finite += int(np.count_nonzero(~np.isfinite(got)))
            wanted_squares += float(wanted @ wanted)
            squares += float(absolute @ absolute)
            absolute_sum += float(absolute.sum())
            relative = (absolute / np.maximum(np.abs(wanted), RELATIVE_FLOOR)).max(initial=0.0)
            max_rel = float(np.maximum(max_rel, relative))  # np.maximum keeps NaN, max() may not
        differences = differences[:filled]
        max_abs = float(differences.max(initial=0.0))
        median, p99 = _median_and_p99(differences)
    return {
        "relative_l2": _ratio(math.sqrt(squares), math.sqrt(wanted_squares)),
        "max_abs": max_abs,
        "mean_abs": absolute_sum / filled if filled else 0.0,
        "median_abs": median,
        "p99_abs": p99,
        "max_rel": max_rel,
        "sqnr_db": _sqnr_db(wanted_squares, squares),
        "non_finite": float(non_finite),
    }


def _median_and_p99(differences: np.ndarray) -> tuple[float, float]:
    """Of absolute differences, which are brought into another order."""
    count = differences.size
    if not count:
        return 0.0, 0.0
    low, high, top = (count - 1) // 2, count // 2, count - 1 - int((1 - 99 / 100) * count)
    differences.partition(sorted({low, high, top}))
    return float((differences[low] + differences[high]) / 2), float(differences[top])


def _ratio(error: float, reference: float) -> float:
    if reference == 0:
        return error if error == 0 or math.isnan(error) else math.inf
    return error / reference


def _sqnr_db(reference: float, error: float) -> float:
    if math.isnan(error):
        return math.nan
    if error == 0:
        return math.inf
    if reference == 0 or math.isinf(error):
        return -math.inf
    return 10 * math.log10(reference / error)
