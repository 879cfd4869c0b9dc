"""Comparing outputs with the reference, output by output and sample by sample.

Differences of FP32 and FP16 values are computed in float32, where each is exact to 2^-24 of itself, others in float64;
all sums are float64. They are taken over the elements at which the reference is finite. NaN and Inf of a candidate are
counted (``non_finite``) and stay in the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import ALL_OUTPUTS, MATCHED, UNMATCHED, ColumnErrors, OutputError, TaskMetric
from mptune.data.metrics.parts import (
    MOST_COLUMNS,
    WORST_PART,
    Floats,
    OutputParts,
    as_columns,
    chunks,
    find_parts,
    part_statistic,
)
from mptune.data.metrics.row_sets import AlignedRows, RowSet, aligned_rows
from mptune.data.metrics.table import STATISTICS, number_of
from mptune.errors import DataError

# Smallest denominator of ``max_rel``: the smallest normal FP16 number, below which FP16 has no relative precision.
RELATIVE_FLOOR = 2.0**-14

Arrays = Mapping[str, np.ndarray]


class _Sums(NamedTuple):
    """Of one output of one sample of the reference."""

    squares: Floats  # sum of the squares of the finite values, shape (columns,)
    counts: NDArray[np.int64]  # of finite values, shape (columns,)
    finite: NDArray[np.bool_] | None  # which values are, shape (before, columns, behind); None where all are


class Reference:
    """The reference of every sample, with its parts and the sums over it, which are computed once.

    Without ``parts`` they are found from these samples, as if they were all that there are.
    """

    def __init__(self, samples: Sequence[Arrays], parts: Mapping[str, OutputParts] | None = None) -> None:
        self.samples = samples
        self.parts = find_parts(samples) if parts is None else parts
        self.sums: dict[tuple[str, int], _Sums] = {}  # by output and sample


def compare_outputs(
    outputs: Sequence[Arrays],
    reference: Reference | Sequence[Arrays],
    extra: Mapping[str, TaskMetric] | None = None,
    row_sets: Sequence[RowSet] = (),
    *,
    parts: Mapping[str, OutputParts] | None = None,
    start: int = 0,
    any_shape: bool = False,
    objective_only: bool = False,
) -> OutputError:
    """Compute every statistic of every output on every sample; outputs that the reference lacks are ignored.

    Args:
        reference: a ``Reference`` where several are compared with it; ``parts`` are for another one.
        extra: metrics of single samples; they stand under output ``"*"``.
        row_sets: their outputs have ``UNMATCHED`` and ``MATCHED``, too.
        start: number of the first sample; outputs are of consecutive ones.
        any_shape: outputs of another shape have no statistics but ``non_finite``, instead of an error: a metric of the
            user's may know what to do with them.
        objective_only: compute ``worst_part``, ``relative_l2``, ``non_finite`` and ``extra`` alone, in a quarter of the
            time. For plans that are only to be proposed.
    """
    if isinstance(reference, Reference):
        samples = reference.samples[start : start + len(outputs)]
    else:
        samples, reference = reference, Reference(reference, parts)
    if len(outputs) != len(samples) or not outputs:
        text = f"{len(outputs)} samples cannot be compared with {len(samples)} reference samples"
        raise DataError(text, "compute both from the same calibration data, at least one sample")
    values: dict[str, dict[str, list[float]]] = {}  # output -> statistic -> a value for each sample
    by_column: dict[str, list[Floats]] = {}  # output -> the errors of its columns on each sample
    for number, (got, wanted) in enumerate(zip(outputs, samples, strict=True), start):
        for name in wanted.keys() - got.keys():
            raise DataError(f"sample {number} has no output {name!r}", f"it has {', '.join(map(repr, got)) or 'none'}")
        aligned = aligned_rows(row_sets, got, wanted)
        for name in wanted:
            if name in aligned:
                statistics = _of_rows(aligned[name], objective_only=objective_only)
            elif any_shape and np.shape(got[name]) != np.shape(wanted[name]):
                statistics = dict.fromkeys(STATISTICS, math.nan)
                statistics["non_finite"] = float(np.count_nonzero(~np.isfinite(got[name])))
            else:
                array = np.asarray(got[name])
                statistics, columns = _of_array(array, reference, name, number, objective_only=objective_only)
                if columns is not None:
                    by_column.setdefault(name, []).append(columns)
            for statistic, value in statistics.items():
                values.setdefault(name, {}).setdefault(statistic, []).append(value)
        for metric, function in (extra or {}).items():
            value = number_of(metric, function, (got, wanted), f" on sample {number}")
            values.setdefault(ALL_OUTPUTS, {}).setdefault(metric, []).append(value)
    # Statistics that an output has on some samples only, as its shape was another one on the rest, are left out.
    per_output = {
        output: {name: tuple(each) for name, each in by_name.items() if len(each) == len(outputs)}
        for output, by_name in values.items()
    }
    columns_of = {}
    for name, each in by_column.items():
        if len(each) == len(outputs):
            normalised, relative, largest = np.stack(each, axis=1)
            figures = normalised.mean(axis=0), relative.mean(axis=0), largest.max(axis=0)
            # Four digits are enough to choose by, and a study keeps them of every plan.
            columns_of[name] = ColumnErrors(*(tuple(float(f"{v:.4g}") for v in figure) for figure in figures))
    return OutputError(per_output, columns_of)


def _of_array(
    got: np.ndarray, reference: Reference, name: str, number: int, *, objective_only: bool
) -> tuple[dict[str, float], Floats | None]:
    """The statistics of one output of one sample; the errors of its columns, if it has any, shape (3, columns)."""
    wanted = np.asarray(reference.samples[number][name])
    if got.shape != wanted.shape:
        text = f"output {name!r} has shape {got.shape} on sample {number}, the reference has {wanted.shape}"
        hint = "rows that NMS or NonZero select are compared as sets; other shapes need your own script.py:function"
        raise DataError(text, hint)
    if any(array.dtype.kind in "OSUcMm" for array in (got, wanted)):
        raise DataError(f"output {name!r} has type {got.dtype}, not a real number", "leave it out of the model")
    parts = reference.parts.get(name)
    has_columns = parts is not None and parts.fits(wanted.shape)
    ours, theirs = (as_columns(array, parts.axis if parts and has_columns else None) for array in (got, wanted))
    sums = reference.sums[name, number] = reference.sums.get((name, number)) or _sums_of(theirs)
    statistics, squares, largest = _differences(ours, theirs, sums, objective_only=objective_only)
    if parts is None:
        return {**statistics, WORST_PART: statistics["relative_l2"]}, None
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        if has_columns and parts.is_split:
            starts = [columns.start for columns in parts.ranges]
            scaled, count = (np.add.reduceat(each, starts) for each in (squares / parts.divisors**2, sums.counts))
            errors = np.sqrt(scaled / np.maximum(count, 1))
            statistics.update(zip(map(part_statistic, parts.ranges), map(float, errors), strict=True))
        else:
            statistics[WORST_PART] = math.sqrt(squares.sum() / max(sums.counts.sum(), 1)) / parts.divisor
        if not has_columns or objective_only or len(squares) > MOST_COLUMNS:
            return statistics, None
        normalised = np.sqrt(squares / np.maximum(sums.counts, 1)) / parts.divisors
        relative = np.where(squares == 0, 0.0, np.sqrt(squares) / np.sqrt(sums.squares))
    return statistics, np.array([normalised, relative, largest])


def _of_rows(rows: AlignedRows, *, objective_only: bool) -> dict[str, float]:
    """The statistics of an output whose rows were paired; rows where the reference has none: 1 in ``relative_l2``."""
    got, wanted = as_columns(rows.output, None), as_columns(rows.reference, None)
    statistics, _, _ = _differences(got, wanted, _sums_of(wanted), objective_only=objective_only)
    if not rows.reference.any() and math.isinf(statistics["relative_l2"]) and not statistics["non_finite"]:
        statistics["relative_l2"] = 1.0 if rows.unmatched else math.inf
    got, wanted = (as_columns(array[: rows.pairs], None) for array in (rows.output, rows.reference))
    pairs, _, _ = _differences(got, wanted, _sums_of(wanted), objective_only=True)
    statistics |= {UNMATCHED: float(rows.unmatched), MATCHED: pairs["relative_l2"]}
    return {**statistics, WORST_PART: statistics["relative_l2"]}


def _sums_of(wanted: np.ndarray) -> _Sums:
    """``wanted`` has the shape (before, columns, behind)."""
    finite = np.isfinite(wanted)
    squares = np.zeros(wanted.shape[1])
    for values, is_finite in chunks(wanted, finite):
        wide = np.where(is_finite, values, 0).astype(np.float64)
        squares += np.einsum("bca,bca->c", wide, wide)
    return _Sums(squares, np.count_nonzero(finite, axis=(0, 2)), None if finite.all() else finite)


def _differences(
    got: np.ndarray, wanted: np.ndarray, sums: _Sums, *, objective_only: bool, is_wide: bool = False
) -> tuple[dict[str, float], Floats, Floats]:
    """Compare arrays of the shape (before, columns, behind), a chunk at a time. ``is_wide`` asks for float64.

    Returns:
        The statistics of all elements; the sum of the squared differences of each column; the largest absolute
        difference of each column, 0 where only the objective is computed.
    """
    is_wide = is_wide or any(array.dtype not in (np.float32, np.float16) for array in (got, wanted))
    width = np.float64 if is_wide else np.float32
    squares, largest = np.zeros(wanted.shape[1]), np.zeros(wanted.shape[1])
    every = np.empty(0 if objective_only else int(sums.counts.sum()), width)
    max_rel, filled, finite = 0.0, 0, sums.finite
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        for ours, theirs, is_finite in chunks(got, wanted, wanted if finite is None else finite):
            expected = theirs.astype(width, copy=False)
            apart = ours.astype(width, copy=False) - expected
            if finite is not None:
                apart[~is_finite] = 0.0
            wide = apart.astype(np.float64, copy=False)
            squares += np.einsum("bca,bca->c", wide, wide)
            if objective_only:
                continue
            np.abs(apart, out=apart)
            largest = np.maximum(largest, apart.max(axis=(0, 2)))
            relative = apart / np.maximum(np.abs(expected), width(RELATIVE_FLOOR))
            if finite is not None:
                apart, relative = apart[is_finite], relative[is_finite]
            every[filled : filled + apart.size] = apart.reshape(-1)
            filled += apart.size
            max_rel = float(np.maximum(max_rel, relative.max(initial=0.0)))  # it keeps NaN, max() may not
        total, wanted_total, non_finite = float(squares.sum()), float(sums.squares.sum()), 0
        if not math.isfinite(total):
            if not is_wide:  # two large values may differ by more than float32 can hold
                return _differences(got, wanted, sums, objective_only=objective_only, is_wide=True)
            non_finite = int(np.count_nonzero(~np.isfinite(got if finite is None else got[finite])))
        if wanted_total:
            relative_l2 = math.sqrt(total) / math.sqrt(wanted_total)
        else:  # equal outputs have no error, others an infinite one
            relative_l2 = total * math.inf if total else 0.0
        statistics = {"relative_l2": relative_l2}
        if not objective_only:
            # Of median and 99th percentile one place after another: NumPy takes five times as long for all at once.
            first, at, last = 0, [0.0, 0.0, 0.0], every.size - 1
            for k, place in enumerate((last // 2, every.size // 2, last - int((1 - 99 / 100) * every.size))):
                if every.size:
                    every[first:].partition(place - first)
                    at[k], first = float(every[place]), place
            statistics |= {
                "max_abs": float(every.max(initial=0.0)),
                "mean_abs": float(every.sum(dtype=np.float64)) / max(every.size, 1),
                "median_abs": (at[0] + at[1]) / 2,
                "p99_abs": at[2],
                "max_rel": max_rel,
                "sqnr_db": -20 * math.log10(relative_l2) if relative_l2 else math.inf,
            }
    return {**statistics, "non_finite": float(non_finite)}, squares, largest
