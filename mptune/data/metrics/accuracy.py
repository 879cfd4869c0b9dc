"""The error of one plan: every statistic of every output on every sample, what they come to, and how exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mptune.data.metrics.parts import WORST_PART, belongs_to, columns_of_part
from mptune.data.metrics.table import METRICS, unknown_metric
from mptune.finding import OutputColumns
from mptune.json_form import JsonForm

TaskMetric = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], float]
"""``function(outputs, reference) -> float`` for one sample, arrays by output name; the lower, the better."""

ALL_OUTPUTS = "*"  # the output name under which task metrics stand: they see all outputs of a sample at once
UNMATCHED = "unmatched_rows"  # rows without a partner in an output that is compared as a set of rows
MATCHED = "matched_relative_l2"  # ``relative_l2`` of the rows that have one
LEAST_ERROR = 1e-12  # smaller errors count as this one, so that their logarithm exists


@dataclass(frozen=True)
class ColumnErrors:
    """The error of each column of one output under one plan, over all samples: one value per column in each."""

    worst_part: tuple[float, ...]  # root mean square of the difference over the column's scale, mean over the samples
    relative_l2: tuple[float, ...]  # of the column alone, mean over the samples
    max_abs: tuple[float, ...]  # the largest on any sample


@dataclass(frozen=True)
class OutputError(JsonForm):
    """The error of one plan against the reference.

    Attributes:
        per_output: output -> statistic -> one value per sample. Metrics that see all outputs at once stand under
            ``"*"``. An output with several parts has ``worst_part[COLUMNS]`` for each of them.
        columns: output -> the errors of its columns over all samples, where it has columns.
    """

    per_output: Mapping[str, Mapping[str, tuple[float, ...]]]
    columns: Mapping[str, ColumnErrors] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not all(math.isfinite(count) for by in self.per_output.values() for count in by.get("non_finite", ())):
            raise ValueError("a count that is not finite")  # of a damaged record

    def value(self, metric: str) -> float:
        """The mean over the samples (sum for ``non_finite``), then the worst over the outputs; NaN and Inf stay."""
        return _worst([_over_samples(metric, values) for values in self._samples_of(metric)], metric)

    def values_without_one(self, metric: str) -> np.ndarray:
        """``value`` over all samples but one, for each sample in turn; empty for a single sample."""
        every = np.array(self._samples_of(metric))  # (outputs or parts, samples)
        samples = every.shape[1]
        with np.errstate(invalid="ignore"):  # inf - inf is NaN here
            totals = every.sum(axis=1, keepdims=True) - every
        values: np.ndarray = (totals if _is_summed(metric) else totals / max(samples - 1, 1)).max(axis=0)
        return values if samples > 1 else values[:0]

    def _samples_of(self, metric: str) -> list[tuple[float, ...]]:
        """The value on each sample, of every output or part that the metric is the worst of."""
        every = [(name, values) for by_name in self.per_output.values() for name, values in by_name.items()]
        values = [values for name, values in every if belongs_to(name, metric)]
        if not values:
            raise unknown_metric(metric, sorted({name for name, _ in every}))
        return values

    def has(self, metric: str) -> bool:
        """Whether the statistic was computed."""
        return any(belongs_to(name, metric) for statistics in self.per_output.values() for name in statistics)

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

    @property
    def sample_count(self) -> int:
        """How many samples every statistic was computed on."""
        return min(len(values) for statistics in self.per_output.values() for values in statistics.values())

    @property
    def non_finite(self) -> int:
        """How many values are NaN or Inf where the reference is finite, over all outputs and samples."""
        return int(sum(sum(statistics.get("non_finite", ())) for statistics in self.per_output.values()))

    @property
    def unmatched_rows(self) -> int:
        """How many rows have no partner, over all outputs and samples."""
        return int(sum(sum(statistics.get(UNMATCHED, ())) for statistics in self.per_output.values()))

    @property
    def of_pairs(self) -> OutputError:
        """The same without rows that have no partner, where outputs are compared as sets of rows."""
        per_output = {o: {**s, "relative_l2": s[MATCHED]} if MATCHED in s else s for o, s in self.per_output.items()}
        return replace(self, per_output=per_output)

    def with_samples_of(self, other: OutputError) -> OutputError:
        """The error over the samples of both, of the statistics that both hold."""
        pairs = ((o, mine, other.per_output[o]) for o, mine in self.per_output.items() if o in other.per_output)
        share = self.sample_count / (self.sample_count + other.sample_count)
        columns = {}
        for output, errors in self.columns.items():
            others = other.columns.get(output)
            if others is None or len(errors.max_abs) != len(others.max_abs):
                continue
            worst, relative = (
                tuple(share * a + (1.0 - share) * b for a, b in zip(x, y, strict=True))
                for x, y in ((errors.worst_part, others.worst_part), (errors.relative_l2, others.relative_l2))
            )
            columns[output] = ColumnErrors(worst, relative, tuple(map(max, errors.max_abs, others.max_abs)))
        return OutputError({o: {s: (*mine[s], *its[s]) for s in mine if s in its} for o, mine, its in pairs}, columns)

    def with_metrics(self, values: Mapping[str, tuple[float, ...]]) -> OutputError:
        """With metrics that see all outputs at once, by name one value per sample."""
        every = {**self.per_output.get(ALL_OUTPUTS, {}), **values}
        return replace(self, per_output={**self.per_output, ALL_OUTPUTS: every} if every else self.per_output)

    def of_first(self, count: int) -> OutputError:
        """The error on the first ``count`` samples, or on all where there are fewer."""
        every = self.per_output.items()
        return OutputError({o: {s: values[:count] for s, values in statistics.items()} for o, statistics in every})

    def without(self, outputs: Collection[str]) -> OutputError:
        """The same without these outputs; the statistics of all outputs together stay."""
        if not outputs:
            return self
        per_output = {name: statistics for name, statistics in self.per_output.items() if name not in outputs}
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
    return total if _is_summed(metric) else total / len(values)


def _is_summed(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].is_summed


def _worst(values: Sequence[float], metric: str) -> float:
    if any(math.isnan(v) for v in values):
        return math.nan
    row = METRICS.get(metric)
    return min(values) if row is not None and row.kind == "element" and row.larger_is_better else max(values)


def is_compared_by_ratio(metric: str) -> bool:
    """Whether errors of this metric are compared by their ratio, not their difference."""
    return metric in METRICS and METRICS[metric].is_ratio


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
    values = np.array([value, *error.values_without_one(metric)])
    if len(values) < 2 or not np.isfinite(values).all() or (not is_ratio and (values[1:] == values[1]).all()):
        return None
    if is_ratio:
        values = np.log(np.maximum(values, LEAST_ERROR))
    samples = len(values) - 1
    pseudo = values[0] + (samples - 1) * (values[1:].mean() - values[1:])
    half = t_quantile(0.975, samples - 1) * float(np.std(pseudo, ddof=1)) / math.sqrt(samples)
    return (value * math.exp(-half), value * math.exp(half)) if is_ratio else (value - half, value + half)
