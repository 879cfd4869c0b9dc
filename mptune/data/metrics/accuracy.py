"""The error of one plan: every statistic of every output on every sample, what they come to, and how exactly.

Differences of FP32 and FP16 values are computed in float32, where each is exact to 2^-24 of itself, others in float64;
all sums are float64. They are taken over the elements at which the reference is finite. NaN and Inf of a candidate are
counted (``non_finite``) and stay in the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from mptune.data.metrics.parts import (
    MOST_COLUMNS,
    WORST_PART,
    Arrays,
    OutputParts,
    as_columns,
    belongs_to,
    chunks,
    columns_of_part,
    find_parts,
    part_statistic,
)
from mptune.data.metrics.row_sets import AlignedRows, RowSet, aligned_rows
from mptune.data.metrics.table import METRICS, STATISTICS, TaskMetric, number_of, unknown_metric
from mptune.errors import DataError
from mptune.finding import OutputColumns
from mptune.json_form import JsonForm

ALL_OUTPUTS = "*"  # the output name under which task metrics stand: they see all outputs of a sample at once
FOREIGN = "foreign_rows"  # share of rows without a partner in outputs that are compared as sets of rows
MANY_FOREIGN = 0.05  # a larger share of what TopK selects is warned of
UNMATCHED = "unmatched_rows"  # rows without a partner in an output that is compared as a set of rows
MATCHED = "matched_relative_l2"  # ``relative_l2`` of the rows that have one
RELATIVE_FLOOR = 2.0**-14  # smallest denominator of ``max_rel``: FP16 has no relative precision below
LEAST_ERROR = 1e-12  # smaller errors count as this one, so that their logarithm exists
_SUMMED = tuple(name for name, metric in METRICS.items() if metric.is_summed)


@dataclass(frozen=True)
class OutputError(JsonForm):
    """The error of one plan against the reference.

    ``per_output`` is output -> statistic -> one value per sample. Metrics that see all outputs at once stand under
    ``"*"``. An output with several parts has ``worst_part[COLUMNS]`` for each of them.
    """

    per_output: Mapping[str, Mapping[str, tuple[float, ...]]]
    # Output -> statistic -> the error of each column, where it has columns: ``worst_part`` (root mean square of the
    # difference over the column's scale) and ``relative_l2`` are means over the samples, ``max_abs`` is the largest.
    columns: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict, compare=False)

    def value(self, metric: str) -> float:
        """The mean over the samples (sum for ``non_finite``), then the worst over the outputs; NaN and Inf stay."""
        return _worst([_over_samples(metric, values) for values in self.by_sample(metric)], metric)

    def by_sample(self, metric: str) -> list[tuple[float, ...]]:
        """The value on each sample, of every output or part that the metric is the worst of."""
        every = [each for by_name in self.per_output.values() for each in by_name.items()]
        if not self.has(metric):
            raise unknown_metric(metric, sorted({name for name, _ in every}))
        return [values for name, values in every if belongs_to(name, metric)]

    def has(self, metric: str) -> bool:
        """Whether the statistic was computed."""
        return any(belongs_to(name, metric) for by_name in self.per_output.values() for name in by_name)

    def by_part(self, metric: str) -> dict[OutputColumns, float]:
        """The value of each output, or part of it, over all samples; empty where the metric sees all at once."""
        return {
            OutputColumns(output, columns_of_part(statistic)): _over_samples(metric, values)
            for output, statistics in self.per_output.items()
            for statistic, values in statistics.items()
            if belongs_to(statistic, metric) and output != ALL_OUTPUTS
        }

    def deciding_part(self, metric: str) -> OutputColumns | None:
        """The output, or the part of it, whose value is that of the metric; None where it sees all outputs at once."""
        values = self.by_part(metric)
        worst = _worst(list(values.values()), metric) if values else 0.0
        return next((part for part, value in values.items() if value == worst or math.isnan(value)), None)

    @functools.cached_property
    def sample_count(self) -> int:
        """How many samples every statistic was computed on."""
        return min(len(values) for statistics in self.per_output.values() for values in statistics.values())

    @property
    def non_finite(self) -> int:
        """How many values are NaN or Inf where the reference is finite, over all outputs and samples."""
        return self._count("non_finite")

    @property
    def unmatched_rows(self) -> int:
        """How many rows have no partner, over all outputs and samples."""
        return self._count(UNMATCHED)

    @property
    def foreign_selections(self) -> tuple[float, list[str]]:
        """The largest share of foreign rows in an output that TopK selects, and the outputs that have it."""
        selected = {o: by[FOREIGN] for o, by in self.per_output.items() if FOREIGN in by and UNMATCHED not in by}
        shares = {output: sum(values) / len(values) for output, values in selected.items()}
        largest = max(shares.values(), default=0.0)
        return largest, [output for output, share in shares.items() if share == largest]

    def _count(self, statistic: str) -> int:
        return int(sum(sum(by_name.get(statistic, ())) for by_name in self.per_output.values()))

    @property
    def of_pairs(self) -> OutputError:
        """The same without rows that have no partner, where outputs are compared as sets of rows."""
        per_output = {o: {**s, "relative_l2": s[MATCHED]} if MATCHED in s else s for o, s in self.per_output.items()}
        return replace(self, per_output=per_output)

    def with_samples_of(self, other: OutputError) -> OutputError:
        """The error over the samples of both, of the statistics that both hold."""
        share = self.sample_count / (self.sample_count + other.sample_count)

        def joined(statistic: str, mine: Sequence[float], its: Sequence[float]) -> tuple[float, ...]:
            values = zip(mine, its, strict=True)
            return tuple(max(a, b) if statistic == "max_abs" else share * a + (1.0 - share) * b for a, b in values)

        every = ((o, mine, other.columns[o]) for o, mine in self.columns.items() if o in other.columns)
        columns = {o: {s: joined(s, mine[s], its[s]) for s in mine} for o, mine, its in every}
        pairs = ((o, mine, other.per_output[o]) for o, mine in self.per_output.items() if o in other.per_output)
        return OutputError({o: {s: (*mine[s], *its[s]) for s in mine if s in its} for o, mine, its in pairs}, columns)

    def with_metrics(self, values: Mapping[str, tuple[float, ...]]) -> OutputError:
        """With metrics that see all outputs at once, by name one value per sample."""
        every = {**self.per_output.get(ALL_OUTPUTS, {}), **values}
        return replace(self, per_output={**self.per_output, ALL_OUTPUTS: every}) if values else self

    def of_first(self, count: int) -> OutputError:
        """The error on the first ``count`` samples, or on all where there are fewer."""
        every = self.per_output.items()
        return OutputError({o: {s: values[:count] for s, values in statistics.items()} for o, statistics in every})

    def without(self, outputs: Collection[str]) -> OutputError:
        """The same without these outputs; the statistics of all outputs together stay."""
        per_output = {name: by_name for name, by_name in self.per_output.items() if name not in outputs}
        return OutputError(per_output, {name: errors for name, errors in self.columns.items() if name not in outputs})

    def summary(self) -> dict[str, dict[str, float]]:
        """Output -> statistic -> value over all samples, as in front.json."""
        figures: dict[str, dict[str, float]] = {}
        for output, statistics in self.per_output.items():
            figures[output] = {name: _over_samples(name, values) for name, values in statistics.items()}
            parts = [value for name, value in figures[output].items() if belongs_to(name, WORST_PART)]
            if parts:
                figures[output].setdefault(WORST_PART, _worst(parts, WORST_PART))
        return figures


def _over_samples(metric: str, values: Sequence[float]) -> float:
    total = float(sum(values))  # not math.fsum: it raises for inf - inf, which is NaN here
    return total if metric in _SUMMED else total / len(values)


def _worst(values: Sequence[float], metric: str) -> float:
    worst = np.min if metric in STATISTICS and METRICS[metric].larger_is_better else np.max
    return float(worst(values))  # NaN where one is


def is_compared_by_ratio(metric: str) -> bool:
    """Whether two errors are compared by their ratio: they are never negative, and spread as they grow."""
    return metric in METRICS and METRICS[metric].kind != "set" and not METRICS[metric].larger_is_better


@functools.lru_cache(maxsize=1024)
def t_quantile(level: float, degrees: float) -> float:
    """The value that Student's t stays below with probability ``level``; any degrees of freedom above 0."""
    from scipy.special import stdtrit  # Slow to import.

    return float(stdtrit(degrees, level))


def error_interval(error: OutputError, metric: str) -> tuple[float, float] | None:
    """The 95 % interval of an error, by the jackknife (Miller, Biometrika 61, 1974) and Student's t.

    Leaving out one sample at a time gives pseudo-values, whose standard error is that of the error. Errors spread in
    proportion to their size, so those of ``METRICS`` are resampled as logarithms: their interval is a factor. None
    where there is a single sample, a value is not finite, or all samples have one value of a metric over the whole set.
    """
    is_ratio, value = is_compared_by_ratio(metric), error.value(metric)
    every = np.array(error.by_sample(metric))  # (outputs or parts, samples)
    samples = every.shape[1]
    if samples < 2 or not math.isfinite(value):
        return None
    without = every.sum(axis=1, keepdims=True) - every  # totals of all samples but one
    values = (without if metric in _SUMMED else without / (samples - 1)).max(axis=0)
    if is_ratio:
        values = np.log(np.maximum(values, LEAST_ERROR))
    elif (values == values[0]).all():
        return None
    pseudo = (samples - 1) * (values.mean() - values)
    half = t_quantile(0.975, samples - 1) * float(np.std(pseudo, ddof=1)) / math.sqrt(samples)
    return (value * math.exp(-half), value * math.exp(half)) if is_ratio else (value - half, value + half)


class Reference:
    """The reference of every sample, the sums over it, and its parts: found from these samples where not given."""

    def __init__(self, samples: Sequence[Arrays], parts: Mapping[str, OutputParts] | None = None) -> None:
        self.samples = samples
        self.parts = find_parts(samples) if parts is None else parts
        self.sums: dict[tuple[str, int | None], np.ndarray] = {}  # by output and sample, as ``_differences`` has them


def compare_outputs(
    outputs: Sequence[Arrays],
    reference: Reference,
    extra: Mapping[str, TaskMetric] | None = None,
    row_sets: Sequence[RowSet] = (),
    *,
    start: int = 0,
    objective_only: bool = False,
    threads: int = 1,
) -> OutputError:
    """Compute every statistic of every output on every sample; outputs that the reference lacks are ignored.

    An output of another shape has no statistics but ``non_finite``: a metric of the user's may know what to do with it.
    Outputs of ``row_sets`` have ``FOREIGN``, those of as many rows as values select ``UNMATCHED`` and ``MATCHED``.
    ``extra`` are metrics of single samples; they stand under output ``"*"``, and are called in this thread alone.

    ``start`` is the number of the first sample; ``threads`` samples are compared at a time. ``objective_only`` computes
    ``worst_part``, ``relative_l2``, ``non_finite`` and ``extra`` alone, in a quarter of the time, of proposed plans.
    """

    def of_sample(number: int, got: Arrays) -> dict[str, tuple[dict[str, float], np.ndarray | None]]:
        """Output -> its statistics and the errors of its columns."""
        wanted = reference.samples[number]
        for name in wanted.keys() - got.keys():
            raise DataError(f"sample {number} has no output {name!r}", f"it has {', '.join(map(repr, got)) or 'none'}")
        aligned, by_output = aligned_rows(row_sets, got, wanted, reference.parts), {}
        for name in wanted:
            columns, rows = None, aligned.get(name)
            if rows is not None and rows.pairs is not None:
                statistics = _of_rows(rows, rows.pairs, objective_only=objective_only)
            elif np.shape(got[name]) != np.shape(wanted[name]):
                statistics = dict.fromkeys(STATISTICS, math.nan)
                statistics["non_finite"] = float(np.count_nonzero(~np.isfinite(got[name])))
            else:
                arrays = map(np.asarray, (got[name], wanted[name]) if rows is None else (rows.output, rows.reference))
                kept = number if rows is None else None  # else it differs which rows count
                statistics, columns = _of_array(name, reference, kept, *arrays, objective_only=objective_only)
            by_output[name] = statistics if rows is None else {**statistics, FOREIGN: rows.foreign}, columns
        return by_output

    numbers = range(start, start + len(outputs))
    with ThreadPoolExecutor(threads) as pool:
        every = list((map if threads == 1 else pool.map)(of_sample, numbers, outputs))
    for number, got, by_output in zip(numbers, outputs, every, strict=True):
        pair, where = (got, reference.samples[number]), f" on sample {number}"
        if extra:
            by_output[ALL_OUTPUTS] = {name: number_of(name, each, pair, where) for name, each in extra.items()}, None
    per_output, columns_of = {}, {}
    for name in every[0] if every else ():
        statistics, columns = zip(*(by_output[name] for by_output in every), strict=True)
        # Statistics that an output has on some samples only, as its shape was another one on the rest, are left out.
        shared = [each for each in statistics[0] if all(each in by_name for by_name in statistics)]
        per_output[name] = {each: tuple(by_name[each] for by_name in statistics) for each in shared}
        if all(each is not None for each in columns):
            normalised, relative, largest = np.stack(columns, axis=1)
            figures = {WORST_PART: normalised.mean(axis=0), "relative_l2": relative.mean(axis=0)}
            figures["max_abs"] = largest.max(axis=0)
            # Four digits are enough to choose by, and a study keeps them of every plan.
            columns_of[name] = {s: tuple(float(f"{v:.4g}") for v in values) for s, values in figures.items()}
    return OutputError(per_output, columns_of)


def _of_array(
    name: str, reference: Reference, number: int | None, got: np.ndarray, wanted: np.ndarray, *, objective_only: bool
) -> tuple[dict[str, float], np.ndarray | None]:
    """The statistics of one output of one sample; the errors of its columns, if it has any, shape (3, columns)."""
    if any(array.dtype.kind in "OSUcMm" for array in (got, wanted)):
        raise DataError(f"output {name!r} has type {got.dtype}, not a real number", "leave it out of the model")
    parts = reference.parts.get(name)
    has_columns = parts is not None and parts.fits(wanted.shape)
    ours, theirs = (as_columns(array, parts.axis if parts and has_columns else None) for array in (got, wanted))
    statistics, figures = _differences(ours, theirs, reference.sums.get((name, number)), objective_only=objective_only)
    squares, wanted_squares, counts, largest = figures
    reference.sums |= {} if number is None else {(name, number): figures[1:3]}
    if parts is None:
        return {**statistics, WORST_PART: statistics["relative_l2"]}, None
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        if has_columns and parts.is_split:
            starts = [columns.start for columns in parts.ranges]
            scaled, count = (np.add.reduceat(each, starts) for each in (squares / parts.divisors**2, counts))
            errors = np.sqrt(scaled / np.maximum(count, 1))
            statistics.update(zip(map(part_statistic, parts.ranges), map(float, errors), strict=True))
        else:
            statistics[WORST_PART] = math.sqrt(squares.sum() / max(counts.sum(), 1)) / (parts.whole or 1.0)
        if not has_columns or objective_only or len(squares) > MOST_COLUMNS:
            return statistics, None
        normalised = np.sqrt(squares / np.maximum(counts, 1)) / parts.divisors
        relative = np.where(squares == 0, 0.0, np.sqrt(squares) / np.sqrt(wanted_squares))
    return statistics, np.array([normalised, relative, largest])


def _of_rows(rows: AlignedRows, matched: int, *, objective_only: bool) -> dict[str, float]:
    """The statistics of an output whose rows were paired; rows where the reference has none: 1 in ``relative_l2``."""
    sides, unmatched = (rows.output, rows.reference), len(rows.output) - matched
    statistics, _ = _differences(*(as_columns(side, None) for side in sides), objective_only=objective_only)
    if not rows.reference.any() and math.isinf(statistics["relative_l2"]) and not statistics["non_finite"]:
        statistics["relative_l2"] = 1.0 if unmatched else math.inf
    pairs, _ = _differences(*(as_columns(side[:matched], None) for side in sides), objective_only=True)
    statistics |= {UNMATCHED: float(unmatched), MATCHED: pairs["relative_l2"]}
    return {**statistics, WORST_PART: statistics["relative_l2"]}


def _differences(
    got: np.ndarray, wanted: np.ndarray, sums: np.ndarray | None = None, *, objective_only: bool, is_wide: bool = False
) -> tuple[dict[str, float], np.ndarray]:
    """Compare arrays of the shape (before, columns, behind), a chunk at a time. ``is_wide`` asks for float64.

    The statistics of all elements; and of each column, shape (4, columns): the sum of the squared differences, the sum
    of the squares of the reference, how many of its values are finite (``sums``: these two, where known), and the
    largest absolute difference, 0 where only the objective is computed.
    """
    is_wide = is_wide or any(array.dtype not in (np.float32, np.float16) for array in (got, wanted))
    width = np.float64 if is_wide else np.float32
    of_columns = np.zeros((4, wanted.shape[1]))
    of_columns[1:3] = 0.0 if sums is None else sums
    squares, wanted_squares, counts, largest = of_columns
    is_finite = sums is not None and counts.sum() == wanted.size
    max_rel, filled, every = 0.0, 0, np.empty(0 if objective_only else wanted.size, width)
    with np.errstate(all="ignore"):  # NaN and Inf are results here
        for ours, theirs in chunks(got, wanted):
            expected = theirs.astype(width, copy=False)
            apart = ours.astype(width, copy=False) - expected
            finite = np.array(True) if is_finite else np.isfinite(expected)
            is_whole = bool(finite.all())
            if not is_whole:
                apart[~finite], expected = 0.0, np.where(finite, expected, width(0.0))
            for total, values in ((squares, apart), (wanted_squares, expected))[: 2 if sums is None else 1]:
                wide = values.astype(np.float64, copy=False)
                total += np.einsum("bca,bca->c", wide, wide)
            if sums is None:
                counts += finite.shape[0] * finite.shape[2] if is_whole else np.count_nonzero(finite, axis=(0, 2))
            if objective_only:
                continue
            np.abs(apart, out=apart)
            np.maximum(largest, apart.max(axis=(0, 2)), out=largest)
            relative = apart / np.maximum(np.abs(expected), width(RELATIVE_FLOOR))
            if not is_whole:
                apart, relative = apart[finite], relative[finite]
            every[filled : filled + apart.size] = apart.reshape(-1)
            filled += apart.size
            max_rel = float(np.maximum(max_rel, relative.max(initial=0.0)))  # it keeps NaN, max() may not
        total, wanted_total, non_finite, every = squares.sum(), wanted_squares.sum(), 0, every[:filled]
        if not math.isfinite(total):
            if not is_wide:  # two large values may differ by more than float32 can hold
                return _differences(got, wanted, sums, objective_only=objective_only, is_wide=True)
            non_finite = int(np.count_nonzero(np.isfinite(wanted) & ~np.isfinite(got)))
        if wanted_total:
            relative_l2 = math.sqrt(total) / math.sqrt(wanted_total)
        else:  # equal outputs have no error, others an infinite one
            relative_l2 = float(total) * math.inf if total else 0.0
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
    return {**statistics, "non_finite": float(non_finite)}, of_columns
