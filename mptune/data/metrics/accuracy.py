"""How far outputs lie from the reference: every named statistic, per output and per sample.

Statistics are computed in float64 over the elements at which the reference is finite. NaN and Inf of a candidate are
counted (``non_finite``) and stay in the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mptune.data.metrics.calling import number_of
from mptune.data.metrics.elementwise import statistics_of
from mptune.data.metrics.parts import (
    WORST_PART,
    ColumnErrors,
    ErrorsByPart,
    OutputParts,
    belongs_to,
    columns_of_part,
    find_parts,
)
from mptune.data.metrics.row_sets import AlignedRows, RowSet, aligned_rows
from mptune.data.metrics.table import METRICS, STATISTICS
from mptune.errors import DataError, SettingsError
from mptune.finding import OutputColumns
from mptune.json_form import decode_float, encode_float

TaskMetric = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], float]
"""``function(outputs, reference) -> float`` for one sample, arrays by output name; the lower, the better."""

ALL_OUTPUTS = "*"
"""The output name under which task metrics stand: they see all outputs of a sample at once."""

UNMATCHED = "unmatched_rows"
"""Rows without a partner in an output that is compared as a set of rows."""

MATCHED = "matched_relative_l2"
"""``relative_l2`` of the rows that have one."""


_COLUMNS = "columns"
"""Beside the statistics of an output, in JSON: the errors of its columns."""


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
        """The mean over the samples (sum for ``non_finite``), then the worst over the outputs; NaN and Inf are kept."""
        return _worst([_over_samples(metric, values) for values in self._of(metric)], metric)

    def values_without_one(self, metric: str) -> tuple[float, ...]:
        """``value`` over all samples but one, for each sample in turn; empty for a single sample."""
        values_of_each = self._of(metric)
        totals = [float(sum(values)) for values in values_of_each]
        rest = len(values_of_each[0]) - 1
        count = 1 if _is_summed(metric) else rest
        return tuple(
            _worst([(total - values[k]) / count for total, values in zip(totals, values_of_each, strict=True)], metric)
            for k in range(rest + 1 if rest else 0)
        )

    def with_samples_of(self, other: OutputError) -> OutputError:
        """One error over the samples of both, of the statistics that both hold."""
        return OutputError(
            {
                output: {
                    s: (*values, *other.per_output[output][s])
                    for s, values in statistics.items()
                    if s in other.per_output[output]
                }
                for output, statistics in self.per_output.items()
                if output in other.per_output
            }
        )

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

    @property
    def sample_count(self) -> int:
        """How many samples every statistic was taken on."""
        return min(len(values) for statistics in self.per_output.values() for values in statistics.values())

    def _of(self, metric: str) -> list[tuple[float, ...]]:
        values = [values for _, _, values in self._named(metric)]
        if not values:
            names = sorted({name for statistics in self.per_output.values() for name in statistics})
            raise unknown_metric(metric, names)
        return values

    def _named(self, metric: str) -> list[tuple[str, str, tuple[float, ...]]]:
        """Output, statistic and values of everything that the metric is the worst of."""
        return [
            (output, statistic, values)
            for output, statistics in self.per_output.items()
            for statistic, values in statistics.items()
            if belongs_to(statistic, metric)
        ]

    def has(self, metric: str) -> bool:
        """Whether the statistic was taken."""
        return bool(self._named(metric))

    def by_part(self, metric: str) -> dict[OutputColumns, float]:
        """The value of each output, or part of it, over all samples; empty where the metric sees all at once."""
        return {
            OutputColumns(output, columns_of_part(statistic)): _over_samples(metric, values)
            for output, statistic, values in self._named(metric)
            if output != ALL_OUTPUTS
        }

    def deciding_part(self, metric: str) -> OutputColumns | None:
        """The output, or the part of it, whose value is that of the metric; None where it sees all outputs at once."""
        values = self.by_part(metric)
        worst = _worst(list(values.values()), metric) if values else 0.0
        return next((part for part, v in values.items() if v == worst or math.isnan(v)), None)

    def without(self, outputs: Collection[str]) -> OutputError:
        """The same without some outputs; the statistics of all outputs together stay."""
        if not outputs:
            return self
        kept = {name: statistics for name, statistics in self.per_output.items() if name not in outputs}
        return OutputError(kept, {name: errors for name, errors in self.columns.items() if name not in outputs})

    @property
    def of_pairs(self) -> OutputError:
        """The same without rows that have no partner, where outputs are compared as sets of rows."""
        per_output = {o: {**s, "relative_l2": s[MATCHED]} if MATCHED in s else s for o, s in self.per_output.items()}
        return OutputError(per_output, self.columns)

    @property
    def unmatched_rows(self) -> int:
        """How many rows have no partner, over all outputs and samples."""
        return int(sum(sum(statistics.get(UNMATCHED, ())) for statistics in self.per_output.values()))

    @property
    def non_finite(self) -> int:
        """How many values are NaN or Inf where the reference is finite, over all outputs and samples."""
        return int(sum(sum(statistics.get("non_finite", ())) for statistics in self.per_output.values()))

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
    """Numbers of JSON; most are floats, which need nothing."""
    return tuple([value if type(value) is float else decode_float(value) for value in values])


def unknown_metric(metric: str, names: Sequence[str]) -> SettingsError:
    """The error for a metric that does not exist, with close matches."""
    candidates = tuple(dict.fromkeys(names))
    within = [name for name in candidates if len(metric) > 1 and metric.lower() in name]
    close = within[:3] or difflib.get_close_matches(metric, candidates, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(candidates)}"
    return SettingsError(f"unknown metric {metric!r}", f"{hint}; your own: script.py:function")


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


def compare_outputs(
    outputs: Sequence[Mapping[str, np.ndarray]],
    reference: Sequence[Mapping[str, np.ndarray]],
    extra: Mapping[str, TaskMetric] | None = None,
    row_sets: Sequence[RowSet] = (),
    *,
    any_shape: bool = False,
    parts: Mapping[str, OutputParts] | None = None,
) -> OutputError:
    """Take every statistic of every output on every sample; outputs that the reference lacks are ignored.

    Metrics of single samples (``extra``) stand under output ``"*"``. Of outputs that are compared as ``row_sets``,
    ``UNMATCHED`` and ``MATCHED`` are taken, too. With ``any_shape`` outputs of another shape have no statistics but
    ``non_finite``, instead of an error: a metric of the user's may know what to do with them. Without ``parts`` they
    are found from the reference, as if its samples were all that there are.
    """
    if len(outputs) != len(reference) or not reference:
        raise DataError(
            f"{len(outputs)} samples cannot be compared with {len(reference)} reference samples",
            "compute both from the same calibration data, at least one sample",
        )
    parts = find_parts(reference) if parts is None else parts
    by_part = {name: ErrorsByPart(parts[name]) for name in reference[0] if name in parts}
    values_of: dict[str, dict[str, list[float]]] = {}
    for number, (got, wanted) in enumerate(zip(outputs, reference, strict=True)):
        missing = next((name for name in wanted if name not in got), None)
        if missing is not None:
            raise DataError(
                f"sample {number} has no output {missing!r}", f"it has {', '.join(map(repr, got)) or 'none'}"
            )
        aligned = aligned_rows(row_sets, got, wanted)
        for name, expected in wanted.items():
            if name in aligned:
                statistics = _row_statistics(name, aligned[name], number)
                by_part.pop(name, None)
            elif any_shape and np.shape(got[name]) != np.shape(expected):
                statistics = dict.fromkeys(STATISTICS, math.nan)
                statistics["non_finite"] = float(np.count_nonzero(~np.isfinite(got[name])))
                by_part.pop(name, None)
            else:
                statistics = statistics_of(name, np.asarray(got[name]), np.asarray(expected), number)
                if name in by_part:
                    statistics.update(by_part[name].take(np.asarray(got[name]), np.asarray(expected)))
                else:
                    statistics[WORST_PART] = statistics["relative_l2"]
            for statistic, value in statistics.items():
                values_of.setdefault(name, {}).setdefault(statistic, []).append(value)
        for metric, function in (extra or {}).items():
            value = number_of(metric, function, (got, wanted), f" on sample {number}")
            values_of.setdefault(ALL_OUTPUTS, {}).setdefault(metric, []).append(value)
    per_output = {o: {s: tuple(values) for s, values in _of_every_sample(by).items()} for o, by in values_of.items()}
    columns = {name: errors for name, taker in by_part.items() if (errors := taker.columns) is not None}
    return OutputError(per_output, columns)


def _of_every_sample(statistics: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Without parts that not every sample has: an output whose rows were compared as sets on some of them."""
    count = max(map(len, statistics.values()))
    whole = {name: values for name, values in statistics.items() if len(values) == count}
    if not any(belongs_to(name, WORST_PART) for name in whole) and "relative_l2" in whole:
        whole[WORST_PART] = whole["relative_l2"]
    return whole


def _row_statistics(name: str, rows: AlignedRows, number: int) -> dict[str, float]:
    """The statistics of an output whose rows were paired; rows where the reference has none: 1 in ``relative_l2``."""
    whole = statistics_of(name, rows.output, rows.reference, number)
    pairs = statistics_of(name, rows.output[: rows.pairs], rows.reference[: rows.pairs], number)
    if not rows.reference.any() and rows.unmatched and math.isinf(whole["relative_l2"]) and not whole["non_finite"]:
        whole["relative_l2"] = 1.0
    matched = {UNMATCHED: float(rows.unmatched), MATCHED: pairs["relative_l2"]}
    return {**whole, WORST_PART: whole["relative_l2"], **matched}
