"""How far outputs lie from the reference: every named statistic, per output and per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mptune.data.metrics.parts import WORST_PART, ColumnErrors, belongs_to, columns_of_part
from mptune.data.metrics.table import METRICS, unknown_metric
from mptune.finding import OutputColumns
from mptune.json_form import decode_float, encode_float

TaskMetric = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], float]
"""``function(outputs, reference) -> float`` for one sample, arrays by output name; the lower, the better."""

ALL_OUTPUTS = "*"  # the output name under which task metrics stand: they see all outputs of a sample at once
UNMATCHED = "unmatched_rows"  # rows without a partner in an output that is compared as a set of rows
MATCHED = "matched_relative_l2"  # ``relative_l2`` of the rows that have one
_COLUMNS = "columns"  # beside the statistics of an output, in JSON: the errors of its columns


@dataclass(frozen=True)
class OutputError:
    """The error of one plan against the reference.

    Attributes:
        per_output: output -> statistic -> one value per sample. Metrics that see all outputs at once stand under
            ``"*"``. An output with several parts has ``worst_part[COLUMNS]`` for each of them.
        columns: output -> the errors of its columns over all samples, where it has columns.
    """

    per_output: Mapping[str, Mapping[str, tuple[float, ...]]]
    columns: Mapping[str, ColumnErrors] = field(default_factory=dict, compare=False)

    def value(self, metric: str) -> float:
        """The mean over the samples (sum for ``non_finite``), then the worst over the outputs; NaN and Inf stay."""
        return _worst([_over_samples(metric, values) for values in self._values(metric)], metric)

    def values_without_one(self, metric: str) -> tuple[float, ...]:
        """``value`` over all samples but one, for each sample in turn; empty for a single sample."""
        every = self._values(metric)
        totals, samples = [float(sum(values)) for values in every], len(every[0])
        count = 1 if _is_summed(metric) else samples - 1
        return tuple(
            _worst([(total - values[k]) / count for total, values in zip(totals, every, strict=True)], metric)
            for k in range(samples if samples > 1 else 0)
        )

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

    def _values(self, metric: str) -> list[tuple[float, ...]]:
        """Those of everything that the metric is the worst of."""
        every = [(name, values) for by_name in self.per_output.values() for name, values in by_name.items()]
        values = [values for name, values in every if belongs_to(name, metric)]
        if not values:
            raise unknown_metric(metric, sorted({name for name, _ in every}))
        return values

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
        return OutputError(per_output, self.columns)

    def with_samples_of(self, other: OutputError) -> OutputError:
        """The error over the samples of both, of the statistics that both hold."""
        per_output = {
            output: {name: (*values, *its[name]) for name, values in mine.items() if name in its}
            for output, mine in self.per_output.items()
            if (its := other.per_output.get(output)) is not None
        }
        return OutputError(per_output)

    def beside(self, other: OutputError | None) -> OutputError:
        """With the statistics of another error of the same samples, too."""
        if other is None:
            return self
        outputs = dict.fromkeys((*self.per_output, *other.per_output))
        per_output = {o: {**self.per_output.get(o, {}), **other.per_output.get(o, {})} for o in outputs}
        return replace(self, per_output=per_output)

    def of_first(self, count: int) -> OutputError:
        """The error on the first ``count`` samples, or on all where there are fewer."""
        return OutputError(
            {o: {s: values[:count] for s, values in statistics.items()} for o, statistics in self.per_output.items()}
        )

    def without(self, outputs: Collection[str]) -> OutputError:
        """The same without these outputs; the statistics of all outputs together stay."""
        if not outputs:
            return self
        per_output = {name: statistics for name, statistics in self.per_output.items() if name not in outputs}
        return OutputError(per_output, {name: errors for name, errors in self.columns.items() if name not in outputs})

    def summary(self) -> dict[str, dict[str, float]]:
        """Output -> statistic -> value over all samples, as in front.json."""
        figures = {
            output: {name: _over_samples(name, values) for name, values in statistics.items()}
            for output, statistics in self.per_output.items()
        }
        for statistics in figures.values():
            parts = [value for name, value in statistics.items() if belongs_to(name, WORST_PART)]
            if parts:
                statistics.setdefault(WORST_PART, _worst(parts, WORST_PART))
        return figures

    def to_json(self) -> dict[str, Any]:
        """JSON types; non-finite numbers as strings (``mptune.json_form``)."""
        document: dict[str, dict[str, Any]] = {
            output: {name: [encode_float(v) for v in values] for name, values in statistics.items()}
            for output, statistics in self.per_output.items()
        }
        for output, errors in self.columns.items():
            document[output][_COLUMNS] = errors.to_json()
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Mapping[str, Any]]) -> OutputError:
        """Inverse of ``to_json``; ValueError where it holds something else."""
        per_output = {
            output: {name: _decoded(values) for name, values in statistics.items() if name != _COLUMNS}
            for output, statistics in document.items()
        }
        if not all(math.isfinite(count) for by in per_output.values() for count in by.get("non_finite", ())):
            raise ValueError("a count that is not finite")
        columns = {o: ColumnErrors.from_json(by[_COLUMNS]) for o, by in document.items() if _COLUMNS in by}
        return cls(per_output, columns)


def _decoded(values: Sequence[float | str]) -> tuple[float, ...]:
    # Most are floats already; a study of thousands of trials is read at each start.
    return tuple([value if type(value) is float else decode_float(value) for value in values])


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
