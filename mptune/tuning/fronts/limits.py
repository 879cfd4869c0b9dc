"""Which plans keep to limits: on errors, on metrics' own values (``--limit "map>=0.41"``), on time and memory."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mptune.choice import Choice, ChoiceLimits
from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES, part_statistic
from mptune.data.metrics.table import METRICS, own_value, undirected
from mptune.errors import SettingsError
from mptune.finding import OutputColumns
from mptune.settings import Tolerance
from mptune.tuning.evaluation import Evaluation

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LIMIT = re.compile(rf"\s*(?P<name>.+?)\s*(?P<sign>>=|<=|>|<)\s*(?P<bound>{_NUMBER})\s*")


@dataclass(frozen=True)
class MetricLimit:
    """A limit on a metric's own value, such as ``map>=0.41``: a lower bound where ``at_least``."""

    metric: str
    at_least: bool
    bound: float

    @classmethod
    def parse(cls, text: str, metrics: Sequence[str]) -> MetricLimit:
        """Read a limit on one of the metrics that are taken; ``:max`` of a script's function may be left out."""
        match = _LIMIT.fullmatch(text)
        if match is None:
            hint = "write NAME>=X or NAME<=X with a metric that --metric names, such as map>=0.41"
            raise SettingsError(f"{text} is not understood", hint, setting="limits")
        name = match["name"]
        metric = next((metric for metric in metrics if name in (metric, undirected(metric))), None)
        if metric is None:
            close = difflib.get_close_matches(name, [*metrics, *METRICS], 1)
            hint = f"did you mean {close[0]}?" if close and name not in METRICS else f"give --metric {name}, too"
            raise SettingsError(f"{text}: the metrics are {', '.join(metrics)}", hint, setting="limits")
        return cls(metric, match["sign"].startswith(">"), float(match["bound"]))

    def excess(self, evaluation: Evaluation) -> float:
        """How far beyond the limit a plan's own value is, as a ratio: at most 1 holds, infinite is not known."""
        ratios = []
        for value in metric_values(evaluation, self.metric)[: 1 if evaluation.held_out is None else 2]:
            if value is not None and (value >= self.bound if self.at_least else value <= self.bound):
                ratios.append(1.0)
            elif value is None or not value * self.bound > 0:
                ratios.append(math.inf)
            else:  # never 1.0 by rounding, which would hold
                ratio = abs(value / self.bound)
                ratios.append(max(ratio, 1.0 / ratio, math.nextafter(1.0, 2.0)))
        return max(ratios)


@dataclass(frozen=True)
class PlanLimits:
    """What a plan must keep to, on the search samples and on the held-out ones.

    Attributes:
        default_error: the metric's default limit, where it holds; ``max_error`` is the same then.
        is_error_limited: some limit is about an error or a metric's value, so that the fastest plan is wanted.
        wants_knee: the knee of what meets the limits is wanted.
    """

    asked: ChoiceLimits
    tolerances: tuple[Tolerance, ...]
    of_metrics: tuple[MetricLimit, ...]
    max_error: float | None
    default_error: float | None
    is_error_limited: bool
    wants_knee: bool

    @classmethod
    def of(cls, asked: ChoiceLimits, metrics: Sequence[str]) -> PlanLimits:
        """Those that are asked for; ``metrics`` are the objective, then the others that are taken.

        The objective's default limit holds unless there is a limit on it, or one on latency, or the knee is asked for.
        """
        of_metrics = tuple(MetricLimit.parse(text, metrics) for text in asked.limits)
        on_objective = asked.max_error is not None or any(limit.metric == metrics[0] for limit in of_metrics)
        is_replaced = on_objective or asked.max_latency_ms is not None or asked.knee
        default = None if is_replaced or metrics[0] not in METRICS else METRICS[metrics[0]].default_limit
        others = bool(of_metrics or asked.tolerance) and asked.max_latency_ms is None
        is_error_limited = on_objective or default is not None or others
        return cls(
            asked,
            tuple(map(Tolerance.parse, asked.tolerance)),
            of_metrics,
            max_error=default if asked.max_error is None else asked.max_error,
            default_error=default,
            is_error_limited=is_error_limited,
            wants_knee=asked.knee or not (is_error_limited or asked.max_latency_ms is not None),
        )

    def excess(self, evaluation: Evaluation, latency_ms: float | None = None) -> float:
        """The largest ratio of a figure to its limit: at most 1 meets all. Infinite where a figure is not known.

        ``latency_ms`` stands for the median, where it is given.
        """
        ratios = [1.0, *(limit.excess(evaluation) for limit in self.of_metrics)]
        ratios += [excess(evaluation, tolerance) for tolerance in self.tolerances]
        if self.max_error is not None:
            error, limit = rest_error(evaluation, self.tolerances), self.max_error
            ratios.append(error / limit if limit > 0 else 1.0 if error <= limit else math.inf)
        if self.asked.max_latency_ms is not None:
            ms = evaluation.latency.median_ms if latency_ms is None else latency_ms
            ratios.append(ms / self.asked.max_latency_ms)
        if self.asked.max_memory_bytes is not None:
            memory = evaluation.memory
            ratios.append(math.inf if memory is None else memory.total_bytes / self.asked.max_memory_bytes)
        return math.inf if any(map(math.isnan, ratios)) else max(ratios)


def excess(evaluation: Evaluation, tolerance: Tolerance) -> float:
    """The error that a tolerance is about over its limit, on the search samples and the held-out ones: at most 1 holds.

    Where it is not known, because no errors by column were kept, it is infinite.
    """
    errors = filter(None, (evaluation.error, evaluation.held_out))
    ratios = [largest_error(error, tolerance, evaluation.metric) / tolerance.limit for error in errors]
    return math.inf if any(map(math.isnan, ratios)) else max(ratios)


def feasible(evaluations: Sequence[Evaluation], tolerances: Sequence[Tolerance]) -> tuple[Evaluation, ...]:
    """The evaluations within all tolerances; all of them where none is."""
    within = tuple(e for e in evaluations if all(excess(e, tolerance) <= 1.0 for tolerance in tolerances))
    return within or tuple(evaluations)


def rest_error(evaluation: Evaluation, tolerances: Sequence[Tolerance] = ()) -> float:
    """The error of what no tolerance is about, the larger of search and held-out samples: ``--max-error`` limits it."""
    errors = filter(None, (evaluation.counted, evaluation.counted_held_out)) if tolerances else ()
    by_part = [error.by_part(evaluation.metric) for error in errors]
    values = [v for parts in by_part for part, v in parts.items() if not is_covered(part, tolerances)]
    if not any(by_part):  # the evaluation keeps these, which thousands of plans are asked for
        values = [evaluation.error_value, evaluation.judged_error]
    return max(values, key=lambda value: (math.isnan(value), value), default=0.0)


def is_larger_in_search(evaluation: Evaluation) -> bool:
    """Whether the error of the search samples is more than twice the held-out one: these lack what makes it."""
    held_out = evaluation.held_out_value
    return held_out is not None and evaluation.error_value > held_out + abs(held_out)


def is_covered(part: OutputColumns, tolerances: Sequence[Tolerance]) -> bool:
    """Whether tolerances are about all of an output, or of a part of it."""
    mine = [tolerance.columns for tolerance in tolerances if tolerance.output == part.name]
    limited = {column for columns in mine for column in columns or ()}
    return None in mine or (part.columns is not None and limited.issuperset(part.columns))


def largest_error(error: OutputError, tolerance: Tolerance, metric: str) -> float:
    """The largest error of what a tolerance is about; NaN where it was not taken."""
    statistics = error.per_output.get(tolerance.output, {})
    if tolerance.columns is None:
        if tolerance.is_absolute:
            return max(statistics.get("max_abs", (math.nan,)))
        of_output = OutputError({tolerance.output: statistics})
        return of_output.value(metric) if of_output.has(metric) else math.nan
    statistic, values = "max_abs" if tolerance.is_absolute else metric, []
    every = getattr(error.columns.get(tolerance.output), statistic, ())
    for column in tolerance.columns:
        of_part = statistics.get(part_statistic(range(column, column + 1)))
        if of_part is not None and statistic == "worst_part":
            values.append(sum(of_part) / len(of_part))
        else:
            values.append(every[column] if column < len(every) else math.nan)
    return math.nan if any(map(math.isnan, values)) else max(values)


def check_asked(
    asked: Choice, metrics: Sequence[str], outputs: Collection[str], error: OutputError | None = None
) -> tuple[Tolerance, ...]:
    """Check that limits, and outputs that are ignored, mean something for a model; gives the tolerances.

    ``metrics`` are the objective, then the others that are taken; columns are checked by the error of any plan.
    """
    metric, tolerances = metrics[0], PlanLimits.of(asked, metrics).tolerances
    limited = [tolerance.output for tolerance in tolerances]
    for setting, name in [*(("tolerance", name) for name in limited), *(("ignore", name) for name in asked.ignore)]:
        if name not in outputs:
            close = difflib.get_close_matches(name, outputs, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"its outputs are {', '.join(list(outputs)[:8])}"
            raise SettingsError(f"names {name!r}, which is no output of the model", hint, setting=setting)
        if setting == "ignore" and name in limited:
            raise SettingsError(f"names {name!r}, which has a tolerance", "give one of them", setting=setting)
    if outputs and set(asked.ignore) >= set(outputs):
        raise SettingsError("names every output: nothing is left to compare", "leave one output", setting="ignore")
    of_outputs = metric in METRICS and METRICS[metric].kind == "element"
    for tolerance in tolerances:
        is_kept = of_outputs and (tolerance.columns is None or metric in (*ADD_IN_SQUARES, "max_abs"))
        if not (tolerance.is_absolute or is_kept):
            text = f"{tolerance}: {metric} is not kept for {'single columns' if of_outputs else 'single outputs'}"
            raise SettingsError(text, "write abs:X, the largest absolute error", setting="tolerance")
    if error is not None:
        check_columns(tolerances, error)
    return tolerances


def check_columns(tolerances: Sequence[Tolerance], error: OutputError) -> None:
    """Check by the error of any plan that the outputs have the columns that tolerances name."""
    for tolerance in tolerances:
        name = tolerance.output
        count = len(error.columns[name].max_abs) if name in error.columns else 0
        if tolerance.columns is not None and max(tolerance.columns) >= count:
            text = f"{tolerance}: output {name!r} has no column {max(tolerance.columns)}"
            hint = f"it has {count} columns with errors of their own; --tolerance {name}=X limits the whole output"
            raise SettingsError(text, hint, setting="tolerance")


def metric_values(evaluation: Evaluation, metric: str) -> tuple[float | None, float | None]:
    """The metric's own value on the search samples and on the held-out ones; None where it was not taken."""

    def value(error: OutputError | None) -> float | None:
        if error is None:
            return None
        if own_value(metric) in error.per_output.get(ALL_OUTPUTS, {}):
            return error.value(own_value(metric))
        return error.value(metric) if error.has(metric) else None

    return value(evaluation.error), value(evaluation.held_out)
