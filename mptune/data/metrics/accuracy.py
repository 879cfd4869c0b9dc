"""How far outputs lie from the reference: every named statistic, per output and per sample.

Statistics are computed in float64 over the elements at which the reference is finite. NaN and Inf of a candidate are
counted (``non_finite``) and stay in the other statistics, which become NaN or Inf.
"""

from __future__ import annotations

import difflib
import itertools
import linecache
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mptune.data.numbers import decode_float, encode_float
from mptune.errors import DataError, SettingsError

TaskMetric = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], float]
"""``function(outputs, reference) -> float`` for one sample, arrays by output name; the lower, the better."""

ALL_OUTPUTS = "*"
"""The output name under which task metrics stand: they see all outputs of a sample at once."""

RELATIVE_FLOOR = 2.0**-14
"""Smallest denominator of ``max_rel``: the smallest normal FP16 number, below which FP16 has no relative precision."""

_CHUNK = 1 << 20
"""Elements that are widened to float64 at a time."""


@dataclass(frozen=True)
class Metric:
    """What a named statistic means.

    Attributes:
        name: as in ``--metric`` and front.json.
        description: one line.
        higher_is_worse: False only for ``sqnr_db``.
        over_samples: how the values of the samples become one.
        is_task: computed from all outputs of a sample together.
    """

    name: str
    description: str
    higher_is_worse: bool = True
    over_samples: Literal["mean", "sum"] = "mean"
    is_task: bool = False


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("relative_l2", "norm(y - y_ref) / norm(y_ref); 0 where both are all zero, inf where only y_ref is"),
        Metric("max_abs", "largest absolute difference"),
        Metric("mean_abs", "mean absolute difference"),
        Metric("median_abs", "median absolute difference"),
        Metric("p99_abs", "99th percentile of the absolute differences"),
        Metric("max_rel", f"largest abs(y - y_ref) / max(abs(y_ref), {RELATIVE_FLOOR:.2g})"),
        Metric("cosine_distance", "1 - cosine similarity; 0 where both are all zero, 1 where only one is"),
        Metric("sqnr_db", "signal to quantisation noise, 10 log10(sum y_ref^2 / sum (y - y_ref)^2)", False),
        Metric("non_finite", "values that are NaN or Inf where the reference is finite", over_samples="sum"),
        Metric("top1_disagreement", "classification: share of rows whose largest class differs", is_task=True),
        Metric("endpoint_error", "optical flow: mean distance of the flow vectors, in pixels", is_task=True),
    )
}


@dataclass(frozen=True)
class OutputError:
    """The error of one plan against the reference.

    Attributes:
        per_output: output name -> statistic -> one value per sample. Task metrics stand under ``"*"``.
    """

    per_output: Mapping[str, Mapping[str, tuple[float, ...]]]

    def value(self, metric: str) -> float:
        """The mean over the samples (sum for ``non_finite``), then the worst over the outputs; NaN and Inf are kept.

        Raises:
            SettingsError: no such statistic was taken.
        """
        return _worst([_over_samples(metric, values) for values in self._of(metric)], metric)

    def worst_sample(self, metric: str) -> tuple[int, float]:
        """Index of the worst sample and its value, the worst over the outputs; NaN is worse than anything.

        Raises:
            SettingsError: no such statistic was taken.
        """
        values = [_worst(list(row), metric) for row in zip(*self._of(metric), strict=True)]
        worst = _worst(values, metric)
        return next((k, v) for k, v in enumerate(values) if v == worst or math.isnan(v))

    def values_without_one(self, metric: str) -> tuple[float, ...]:
        """``value`` over all samples but one, for each sample in turn; empty for a single sample.

        Raises:
            SettingsError: no such statistic was taken.
        """
        taken = self._of(metric)
        totals = [float(sum(values)) for values in taken]
        rest = len(taken[0]) - 1
        count = 1 if _is_summed(metric) else rest
        return tuple(
            _worst([(total - values[k]) / count for total, values in zip(totals, taken, strict=True)], metric)
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

    def _of(self, metric: str) -> list[tuple[float, ...]]:
        values = [statistics[metric] for statistics in self.per_output.values() if metric in statistics]
        if not values:
            taken = sorted({name for statistics in self.per_output.values() for name in statistics})
            raise unknown_metric(metric, taken)
        return values

    @property
    def non_finite(self) -> int:
        """How many values are NaN or Inf where the reference is finite, over all outputs and samples."""
        return int(sum(sum(statistics.get("non_finite", ())) for statistics in self.per_output.values()))

    def summary(self) -> dict[str, dict[str, float]]:
        """Output -> statistic -> value over all samples, as in front.json."""
        return {
            output: {name: _over_samples(name, values) for name, values in statistics.items()}
            for output, statistics in self.per_output.items()
        }

    def to_json(self) -> dict[str, Any]:
        """JSON types; non-finite numbers as strings (``mptune.data.numbers``)."""
        return {
            output: {name: [encode_float(v) for v in values] for name, values in statistics.items()}
            for output, statistics in self.per_output.items()
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Mapping[str, Sequence[float | str]]]) -> OutputError:
        """Inverse of ``to_json``."""
        return cls(
            {
                output: {name: tuple(decode_float(v) for v in values) for name, values in statistics.items()}
                for output, statistics in document.items()
            }
        )


def unknown_metric(metric: str, names: Sequence[str]) -> SettingsError:
    """The error for a metric that does not exist, with close matches."""
    close = difflib.get_close_matches(metric, names, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
    return SettingsError(f"unknown metric {metric!r}", f"{hint}; your own: script.py:function")


def _over_samples(metric: str, values: Sequence[float]) -> float:
    total = float(sum(values))  # not math.fsum: it raises for inf - inf, which is NaN here
    return total if _is_summed(metric) else total / len(values)


def _is_summed(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].over_samples == "sum"


def _worst(values: Sequence[float], metric: str) -> float:
    if any(math.isnan(v) for v in values):
        return math.nan
    return max(values) if metric not in METRICS or METRICS[metric].higher_is_worse else min(values)


def compare_outputs(
    outputs: Sequence[Mapping[str, np.ndarray]],
    reference: Sequence[Mapping[str, np.ndarray]],
    extra: Mapping[str, TaskMetric] | None = None,
) -> OutputError:
    """Take every statistic of every output on every sample.

    Args:
        outputs: one dictionary per sample; outputs that the reference lacks are ignored.
        reference: the same samples in the same order.
        extra: task metrics by name (``mptune.data.metrics.tasks.resolve_metric``); their values stand under output
            ``"*"``.

    Raises:
        DataError: samples, outputs or shapes do not match, an output is not numeric, or a task metric failed.
    """
    if len(outputs) != len(reference) or not reference:
        raise DataError(
            f"{len(outputs)} samples cannot be compared with {len(reference)} reference samples",
            "compute both from the same calibration data, at least one sample",
        )
    found: dict[str, dict[str, list[float]]] = {}
    for number, (got, wanted) in enumerate(zip(outputs, reference, strict=True)):
        for name, expected in wanted.items():
            if name not in got:
                raise DataError(
                    f"sample {number} has no output {name!r}", f"it has {', '.join(map(repr, got)) or 'none'}"
                )
            statistics = _statistics(name, np.asarray(got[name]), np.asarray(expected), number)
            for statistic, value in statistics.items():
                found.setdefault(name, {}).setdefault(statistic, []).append(value)
        for metric, function in (extra or {}).items():
            value = call_metric(metric, function, got, wanted, f" on sample {number}")
            found.setdefault(ALL_OUTPUTS, {}).setdefault(metric, []).append(value)
    return OutputError({o: {s: tuple(values) for s, values in by.items()} for o, by in found.items()})


def call_metric(
    metric: str, function: TaskMetric, got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], where: str = ""
) -> float:
    """The value of a task metric on one sample; ``where`` says which sample, for the message.

    Raises:
        DataError: the function raised, or returned no number.
    """
    try:
        value: Any = function(got, wanted)
    except DataError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"metric {metric} failed{where}: {what}{_line_of(error, function)}", _CALLED) from error
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        shown = f"{value!r:.60}".replace("\n", " ")
        what = f"it returned {shown}, which is not one number{definition_of(function)}"
        raise DataError(f"metric {metric} failed{where}: {what}", _CALLED) from error


_CALLED = "it is called as function(outputs, reference) with arrays by output name, and returns one number"


def _line_of(error: BaseException, function: TaskMetric) -> str:
    """The line of the metric's own file at which the error came up; empty where it has none."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def definition_of(function: TaskMetric) -> str:
    """Where a metric is defined, file, line and its text, for messages; empty where that is not known."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    lines = (linecache.getline(code.co_filename, number).strip() for number in itertools.count(code.co_firstlineno))
    line = next(line for line in lines if not line.startswith("@"))
    return f" ({code.co_filename}:{code.co_firstlineno}: {line})"


@dataclass
class _Sums:
    """Running sums over the elements at which the reference is finite."""

    reference_squared: float = 0.0
    output_squared: float = 0.0
    difference_squared: float = 0.0
    absolute: float = 0.0
    max_rel: float = 0.0
    non_finite: int = 0


def _statistics(name: str, output: np.ndarray, reference: np.ndarray, number: int) -> dict[str, float]:
    """All statistics of one output of one sample. Peak memory: 8 bytes per element beside the two arrays."""
    if output.shape != reference.shape:
        raise DataError(
            f"output {name!r} has shape {output.shape} on sample {number}, the reference has {reference.shape}",
            "shapes that depend on values (NMS, TopK by score, NonZero) cannot be compared: cut the model before them",
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
