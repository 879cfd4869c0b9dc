"""Comparing outputs with the reference, output by output and sample by sample.

Differences of FP32 and FP16 values are computed in float32, where each is exact to 2^-24 of itself, others in float64;
all sums are float64. They are taken over the elements at which the reference is finite. NaN and Inf of a candidate are
counted (``non_finite``) and stay in the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import ALL_OUTPUTS, MATCHED, UNMATCHED, OutputError, TaskMetric
from mptune.data.metrics.calling import number_of
from mptune.data.metrics.parts import (
    MOST_COLUMNS,
    WORST_PART,
    ColumnErrors,
    Floats,
    OutputParts,
    as_columns,
    belongs_to,
    chunks,
    find_parts,
    part_statistic,
)
from mptune.data.metrics.row_sets import AlignedRows, RowSet, aligned_rows
from mptune.data.metrics.table import STATISTICS
from mptune.errors import DataError

RELATIVE_FLOOR = 2.0**-14
"""Smallest denominator of ``max_rel``: the smallest normal FP16 number, below which FP16 has no relative precision."""

Arrays = Mapping[str, np.ndarray]


def compare_outputs(
    outputs: Sequence[Arrays],
    reference: Sequence[Arrays],
    extra: Mapping[str, TaskMetric] | None = None,
    row_sets: Sequence[RowSet] = (),
    *,
    any_shape: bool = False,
    parts: Mapping[str, OutputParts] | None = None,
) -> OutputError:
    """``Reference.compare`` for outputs that are compared once, on all samples of the reference."""
    if len(outputs) != len(reference) or not reference:
        raise DataError(
            f"{len(outputs)} samples cannot be compared with {len(reference)} reference samples",
            "compute both from the same calibration data, at least one sample",
        )
    return Reference(reference, parts).compare(outputs, extra, row_sets, any_shape=any_shape)


@dataclass(frozen=True, eq=False)
class _ReferenceSums:
    """Of one output of one sample, by column.

    Attributes:
        squares: sum of the squares of the finite values, shape (columns,).
        count: of finite values, shape (columns,).
        finite: which values are; None where all are.
    """

    squares: Floats
    count: NDArray[np.int64]
    finite: NDArray[np.bool_] | None

    @classmethod
    def of(cls, wanted: np.ndarray) -> _ReferenceSums:
        """``wanted`` has the shape (before, columns, behind)."""
        finite = np.isfinite(wanted)
        squares = np.zeros(wanted.shape[1])
        for values, is_finite in chunks(wanted, finite):
            wide = np.where(is_finite, values, 0).astype(np.float64)
            squares += np.einsum("bca,bca->c", wide, wide)
        return cls(squares, np.count_nonzero(finite, axis=(0, 2)), None if finite.all() else finite)


class Reference:
    """What outputs are compared with: the reference's samples, with the sums over them, which are computed once.

    Without ``parts`` they are found from these samples, as if they were all that there are.
    """

    def __init__(self, samples: Sequence[Arrays], parts: Mapping[str, OutputParts] | None = None) -> None:
        self.samples = samples
        self.parts = find_parts(samples) if parts is None else parts
        self._sums: dict[tuple[str, int], _ReferenceSums] = {}

    def compare(
        self,
        outputs: Sequence[Arrays],
        extra: Mapping[str, TaskMetric] | None = None,
        row_sets: Sequence[RowSet] = (),
        *,
        start: int = 0,
        any_shape: bool = False,
        objective_only: bool = False,
    ) -> OutputError:
        """Compute every statistic of every output on every sample; outputs that the reference lacks are ignored.

        Metrics of single samples (``extra``) stand under output ``"*"``. Of outputs that are compared as ``row_sets``,
        ``UNMATCHED`` and ``MATCHED`` are computed, too.

        Args:
            start: the first sample's number; outputs are of consecutive ones.
            any_shape: outputs of another shape have no statistics but ``non_finite``, instead of an error: a metric of
                the user's may know what to do with them.
            objective_only: compute ``worst_part``, ``relative_l2``, ``non_finite`` and ``extra`` alone, which takes a
                tenth of the time. For plans that are only to be proposed.
        """
        values: dict[str, dict[str, list[float]]] = {}
        by_column: dict[str, list[Floats | None]] = {}
        for number, got in enumerate(outputs, start):
            wanted = self.samples[number]
            missing = next((name for name in wanted if name not in got), None)
            if missing is not None:
                has = ", ".join(map(repr, got)) or "none"
                raise DataError(f"sample {number} has no output {missing!r}", f"it has {has}")
            aligned = aligned_rows(row_sets, got, wanted)
            for name in wanted:
                columns = None
                if name in aligned:
                    statistics = _of_rows(aligned[name], objective_only=objective_only)
                elif any_shape and np.shape(got[name]) != np.shape(wanted[name]):
                    statistics = dict.fromkeys(STATISTICS, math.nan)
                    statistics["non_finite"] = float(np.count_nonzero(~np.isfinite(got[name])))
                else:
                    statistics, columns = self._of_array(name, number, np.asarray(got[name]), objective_only)
                by_column.setdefault(name, []).append(columns)
                for statistic, value in statistics.items():
                    values.setdefault(name, {}).setdefault(statistic, []).append(value)
            for metric, function in (extra or {}).items():
                value = number_of(metric, function, (got, wanted), f" on sample {number}")
                values.setdefault(ALL_OUTPUTS, {}).setdefault(metric, []).append(value)
        # An output whose rows were compared as sets on some samples only has no parts on those.
        per_output = {
            output: {name: tuple(each) for name, each in statistics.items() if len(each) == len(outputs)}
            for output, statistics in values.items()
        }
        for by_name in per_output.values():
            if "relative_l2" in by_name and not any(belongs_to(each, WORST_PART) for each in by_name):
                by_name[WORST_PART] = by_name["relative_l2"]
        columns_of = {
            name: _column_errors([each for each in of_samples if each is not None])
            for name, of_samples in by_column.items()
            if not any(each is None for each in of_samples)
        }
        return OutputError(per_output, columns_of)

    def _of_array(
        self, name: str, number: int, got: np.ndarray, objective_only: bool
    ) -> tuple[dict[str, float], Floats | None]:
        """The statistics of one output of one sample; the errors of its columns, if it has any, shape (3, columns)."""
        wanted = np.asarray(self.samples[number][name])
        if got.shape != wanted.shape:
            raise DataError(
                f"output {name!r} has shape {got.shape} on sample {number}, the reference has {wanted.shape}",
                "rows that NMS or NonZero select are compared as sets; other shapes need your own script.py:function",
            )
        for array in (got, wanted):
            if array.dtype.kind in "OSUcMm":
                text = f"output {name!r} has type {array.dtype}, not a real number"
                raise DataError(text, "leave it out of the model")
        parts = self.parts.get(name)
        has_columns = parts is not None and parts.fits(wanted.shape)
        ours, theirs = (as_columns(array, parts.axis if parts and has_columns else None) for array in (got, wanted))
        if (name, number) not in self._sums:
            self._sums[name, number] = _ReferenceSums.of(theirs)
        sums = self._sums[name, number]
        statistics, squares, largest = _statistics(ours, theirs, sums, objective_only=objective_only)
        if parts is None:
            return {**statistics, WORST_PART: statistics["relative_l2"]}, None
        with np.errstate(all="ignore"):  # NaN and Inf are results here
            if has_columns and parts.is_split:
                scaled, count = squares / np.square(parts.divisors), sums.count
                for part in parts.ranges:
                    members = slice(part.start, part.stop)
                    mean = scaled[members].sum() / max(count[members].sum(), 1)
                    statistics[part_statistic(part)] = math.sqrt(mean)
            else:
                statistics[WORST_PART] = math.sqrt(squares.sum() / max(sums.count.sum(), 1)) / parts.divisor
            if not has_columns or objective_only or len(squares) > MOST_COLUMNS:
                return statistics, None
            scaled = np.sqrt(squares / np.maximum(sums.count, 1)) / parts.divisors
            relative = np.where(squares == 0, 0.0, np.sqrt(squares) / np.sqrt(sums.squares))
        return statistics, np.array([scaled, relative, largest])


def _statistics(
    got: np.ndarray,
    wanted: np.ndarray,
    sums: _ReferenceSums,
    *,
    objective_only: bool = False,
    width: type[np.floating[Any]] | None = None,
) -> tuple[dict[str, float], Floats, Floats]:
    """The statistics of one output of one sample, element by element, and two by column, shape (columns,).

    These are the sum of the squared differences, and the largest absolute difference, which is 0 with
    ``objective_only``. ``got`` and ``wanted`` have the shape (before, columns, behind). ``width`` is the type of the
    differences; None chooses it.
    """
    if width is None:
        is_narrow = all(array.dtype in (np.float32, np.float16) for array in (got, wanted))
        width = np.float32 if is_narrow else np.float64
    squares, largest = np.zeros(wanted.shape[1]), np.zeros(wanted.shape[1])
    every = np.empty(0 if objective_only else int(sums.count.sum()), width)
    max_rel, filled, finite = 0.0, 0, sums.finite
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        for mine, its, is_finite in chunks(got, wanted, wanted if finite is None else finite):
            its = its.astype(width, copy=False)
            apart = mine.astype(width, copy=False) - its
            if finite is not None:
                apart[~is_finite] = 0.0
            wide = apart.astype(np.float64, copy=False)
            squares += np.einsum("bca,bca->c", wide, wide)
            if objective_only:
                continue
            np.abs(apart, out=apart)
            largest = np.maximum(largest, apart.max(axis=(0, 2)))
            relative = apart / np.maximum(np.abs(its), width(RELATIVE_FLOOR))
            if finite is not None:
                apart, relative = apart[is_finite], relative[is_finite]
            every[filled : filled + apart.size] = apart.reshape(-1)
            filled += apart.size
            max_rel = float(np.maximum(max_rel, relative.max(initial=0.0)))  # it keeps NaN, max() may not
        total, non_finite = float(squares.sum()), 0
        if not math.isfinite(total):
            if width is np.float32:  # two large values may differ by more than float32 can hold
                return _statistics(got, wanted, sums, objective_only=objective_only, width=np.float64)
            non_finite = int(np.count_nonzero(~np.isfinite(got if finite is None else got[finite])))
        wanted_total = float(sums.squares.sum())
        statistics = {"relative_l2": _ratio(math.sqrt(total), math.sqrt(wanted_total))}
        if not objective_only:
            median, p99 = _median_and_p99(every)
            statistics |= {
                "max_abs": float(every.max(initial=0.0)),
                "mean_abs": float(every.sum(dtype=np.float64)) / max(every.size, 1),
                "median_abs": median,
                "p99_abs": p99,
                "max_rel": max_rel,
                "sqnr_db": _sqnr_db(wanted_total, total),
            }
    return {**statistics, "non_finite": float(non_finite)}, squares, largest


def _median_and_p99(values: np.ndarray) -> tuple[float, float]:
    """Of values, which are brought into another order."""
    count = values.size
    if not count:
        return 0.0, 0.0
    # One place after another: NumPy takes five times as long for several at once.
    start, at = 0, []
    for place in ((count - 1) // 2, count // 2, count - 1 - int((1 - 99 / 100) * count)):
        values[start:].partition(place - start)
        at.append(float(values[place]))
        start = place
    return (at[0] + at[1]) / 2, at[2]


def _of_rows(rows: AlignedRows, *, objective_only: bool) -> dict[str, float]:
    """The statistics of an output whose rows were paired; rows where the reference has none: 1 in ``relative_l2``."""
    ours, theirs = as_columns(rows.output, None), as_columns(rows.reference, None)
    statistics, _, _ = _statistics(ours, theirs, _ReferenceSums.of(theirs), objective_only=objective_only)
    ours, theirs = (as_columns(array[: rows.pairs], None) for array in (rows.output, rows.reference))
    pairs, _, _ = _statistics(ours, theirs, _ReferenceSums.of(theirs), objective_only=True)
    whole = statistics["relative_l2"]
    if not rows.reference.any() and rows.unmatched and math.isinf(whole) and not statistics["non_finite"]:
        statistics["relative_l2"] = 1.0
    matched = {UNMATCHED: float(rows.unmatched), MATCHED: pairs["relative_l2"]}
    return {**statistics, WORST_PART: statistics["relative_l2"], **matched}


def _column_errors(by_sample: Sequence[Floats]) -> ColumnErrors:
    """Of all samples, from those of each, shape (3, columns)."""
    normalised, relative, largest = np.stack(by_sample, axis=1)
    return ColumnErrors(
        *(tuple(each.tolist()) for each in (normalised.mean(axis=0), relative.mean(axis=0), largest.max(axis=0)))
    )


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
