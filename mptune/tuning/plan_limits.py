"""Which plans keep to limits, and the error that the sampler minimises, which follows from tolerances.

Limits are on errors, on metrics' own values (``--limit "map>=0.41"``), on time and on memory.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mptune.choice import Choice, ChoiceLimits
from mptune.data.metrics.accuracy import FOREIGN, OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES, belongs_to, part_statistic
from mptune.data.metrics.table import METRICS, undirected
from mptune.errors import SettingsError
from mptune.finding import OutputColumns
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning.dominance import REFERENCE_ERROR
from mptune.tuning.evaluation import Evaluation

_LIMIT = re.compile(r"\s*(.+?)\s*([<>])=?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class MetricLimit(NamedTuple):
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
        name, sign, bound = match.groups()
        metric = next((metric for metric in (*metrics, FOREIGN) if name in (metric, undirected(metric))), None)
        if metric is None:
            close = difflib.get_close_matches(name, [*metrics, *METRICS], 1)
            hint = f"did you mean {close[0]}?" if close and name not in METRICS else f"give --metric {name}, too"
            raise SettingsError(f"{text}: the metrics are {', '.join(metrics)}", hint, setting="limits")
        return cls(metric, sign == ">", float(bound))

    def excess(self, evaluation: Evaluation) -> float:
        """How far beyond the limit a plan's own value is, as a ratio: at most 1 holds, infinite is not known."""
        ratios = []
        for value in evaluation.values_of(self.metric)[: 1 if evaluation.held_out is None else 2]:
            value = 0.0 if value is None and self.metric == FOREIGN else value  # no output is a set of rows
            if value is not None and (value >= self.bound if self.at_least else value <= self.bound):
                ratios.append(1.0)
            else:  # never 1.0 by rounding, which would hold
                ratio = abs(value / self.bound) if value is not None and value * self.bound > 0 else math.inf
                ratios.append(max(ratio, 1.0 / ratio, math.nextafter(1.0, 2.0)))
        return max(ratios)


class PlanLimits:
    """What a plan must keep to, on the search samples and on the held-out ones.

    Attributes:
        default_error: the metric's default limit, where it holds; ``max_error`` is the same then.
        is_error_limited: some limit is about an error or a metric's value, so that the fastest plan is wanted.
        wants_knee: the knee of what meets the limits is wanted.
        sole_limit: on the objective's error, where the fastest plan within it is the choice and nothing else is taken.
    """

    def __init__(self, asked: ChoiceLimits, metrics: Sequence[str]) -> None:
        """Those that are asked for; ``metrics`` are the objective, then the others that are taken.

        The objective's default limit holds unless there is a limit on it, or one on latency, or the knee is asked for.
        """
        self._max_latency_ms, self._max_memory_bytes = asked.max_latency_ms, asked.max_memory_bytes
        self.tolerances = tuple(map(Tolerance.parse, asked.tolerance))
        self._of_metrics = [MetricLimit.parse(text, metrics) for text in asked.limits]
        on_objective = asked.max_error is not None or any(limit.metric == metrics[0] for limit in self._of_metrics)
        has_default = not (on_objective or asked.max_latency_ms is not None or asked.knee) and metrics[0] in METRICS
        self.default_error = METRICS[metrics[0]].default_limit if has_default else None
        self.max_error = self.default_error if asked.max_error is None else asked.max_error
        others = bool(asked.limits or asked.tolerance) and asked.max_latency_ms is None
        self.is_error_limited = on_objective or self.default_error is not None or others
        self.wants_knee = asked.knee or not (self.is_error_limited or asked.max_latency_ms is not None)
        others = len(metrics) > 1 or bool(self.tolerances or self._of_metrics or asked.max_memory_bytes)
        self.sole_limit = None if others or self.wants_knee else self.max_error

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> PlanLimits:
        """Those of a search."""
        return cls(Choice.from_settings(settings), (settings.metric, *settings.reported_metrics))

    def max_error_of(self, metric: str) -> float | None:
        """The smallest upper limit on a metric that is a distance, the objective; None where there is none."""
        bounds = [limit.bound for limit in self._of_metrics if limit.metric == metric and not limit.at_least]
        return min([*bounds, *filter(None, [self.max_error])], default=None)

    def excess(self, evaluation: Evaluation, latency_ms: float | None = None) -> float:
        """The largest ratio of a figure to its limit: at most 1 meets all. Infinite where a figure is not known.

        ``latency_ms`` stands for the median, where it is given.
        """
        ratios = [1.0, *(limit.excess(evaluation) for limit in self._of_metrics)]
        ratios += [excess(evaluation, tolerance) for tolerance in self.tolerances]
        if self.max_error is not None:
            error, limit = rest_error(evaluation, self.tolerances), self.max_error
            ratios.append(error / limit if limit > 0 else 1.0 if error <= limit else math.inf)
        if self._max_latency_ms is not None:
            ms = evaluation.latency.median_ms if latency_ms is None else latency_ms
            ratios.append(ms / self._max_latency_ms)
        if self._max_memory_bytes is not None:
            memory = evaluation.memory
            ratios.append(math.inf if memory is None else memory.total_bytes / self._max_memory_bytes)
        return math.inf if any(map(math.isnan, ratios)) else max(ratios)


def aimed_error(settings: SearchSettings) -> float | None:
    """The limit on the objective that a search aims at; None where there is none, or its errors do not add in squares.

    The default limit where no other is given.
    """
    limits = PlanLimits.from_settings(settings)
    return limits.max_error_of(settings.metric) if settings.metric in ADD_IN_SQUARES else None


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


def is_covered(part: OutputColumns, tolerances: Sequence[Tolerance]) -> bool:
    """Whether tolerances are about all of an output, or of a part of it."""
    mine = [tolerance.columns for tolerance in tolerances if tolerance.output == part.name]
    limited = {column for columns in mine for column in columns or ()}
    return None in mine or (part.columns is not None and limited.issuperset(part.columns))


def largest_error(error: OutputError, tolerance: Tolerance, metric: str) -> float:
    """The largest error of what a tolerance is about; NaN where it was not taken."""
    if tolerance.output == FOREIGN and FOREIGN not in error.per_output:
        return error.value(FOREIGN) if error.has(FOREIGN) else 0.0
    statistic, statistics = "max_abs" if tolerance.is_absolute else metric, error.per_output.get(tolerance.output, {})
    if tolerance.columns is None:
        if tolerance.is_absolute:
            return max(statistics.get(statistic, (math.nan,)))
        of_output = OutputError({tolerance.output: statistics})
        return of_output.value(metric) if of_output.has(metric) else math.nan
    values, every = [], error.columns.get(tolerance.output, {}).get(statistic, ())
    for column in tolerance.columns:
        of_part = statistics.get(part_statistic(range(column, column + 1)))
        if of_part is not None and statistic == "worst_part":
            values.append(sum(of_part) / len(of_part))
        else:
            values.append(every[column] if column < len(every) else math.nan)
    return math.nan if any(map(math.isnan, values)) else max(values)


def check_asked(asked: Choice, metrics: Sequence[str], outputs: Collection[str]) -> tuple[Tolerance, ...]:
    """Check that limits, and outputs that are ignored, mean something for a model; gives the tolerances.

    ``metrics`` are the objective, then the others that are taken.
    """
    metric, tolerances = metrics[0], PlanLimits(asked, metrics).tolerances
    limited = [tolerance.output for tolerance in tolerances]
    for setting, name in [*(("tolerance", name) for name in limited), *(("ignore", name) for name in asked.ignore)]:
        if name not in outputs and (setting, name) != ("tolerance", FOREIGN):
            hint = f"its outputs are {', '.join(list(outputs)[:8])}"
            raise SettingsError(f"names {name!r}, which is no output of the model", hint, setting=setting)
        if setting == "ignore" and name in limited:
            raise SettingsError(f"names {name!r}, which has a tolerance", "give one of them", setting=setting)
    if outputs and set(asked.ignore) >= set(outputs):
        raise SettingsError("names every output: nothing is left to compare", "leave one output", setting="ignore")
    of_outputs = metric in METRICS and METRICS[metric].kind == "element"
    for tolerance in tolerances:
        is_kept = of_outputs and (tolerance.columns is None or metric in (*ADD_IN_SQUARES, "max_abs"))
        if not (tolerance.is_absolute or is_kept or tolerance.output == FOREIGN):
            text = f"{tolerance}: {metric} is not kept for {'single columns' if of_outputs else 'single outputs'}"
            raise SettingsError(text, "write abs:X, the largest absolute error", setting="tolerance")
    return tolerances


def check_tolerances(
    tolerances: Sequence[Tolerance], ignored: Sequence[str], outputs: Collection[str]
) -> tuple[Tolerance, ...]:
    """``check_asked``, where the parts of outputs are compared and no plan is chosen."""
    asked = Choice(tolerance=tuple(map(str, tolerances)), ignore=tuple(ignored))
    return check_asked(asked, ("worst_part",), outputs)


def check_columns(tolerances: Sequence[Tolerance], error: OutputError) -> None:
    """Check by the error of any plan that the outputs have the columns that tolerances name."""
    for tolerance in tolerances:
        name = tolerance.output
        count = len(error.columns[name]["max_abs"]) if name in error.columns else 0
        if tolerance.columns is not None and max(tolerance.columns) >= count:
            text = f"{tolerance}: output {name!r} has no column {max(tolerance.columns)}"
            hint = f"it has {count} columns with errors of their own; --tolerance {name}=X limits the whole output"
            raise SettingsError(text, hint, setting="tolerance")


# The error that the sampler minimises, one number for a plan, or for a group alone. Without tolerances it is the
# metric's own. With them, what a tolerance is about is stated as a share of its limit: at the limit it is what the
# search aims at, or REFERENCE_ERROR. What no tolerance is about stays as it is, and the largest decides. All other
# limits filter and choose, and steer nothing. ``law`` is the statistic that adds in squares.


def part_errors(error: OutputError, law: str, settings: SearchSettings) -> dict[str, float]:
    """The error of each part of the outputs as the search weighs it, outputs that are ignored left out.

    Where the statistic sees all outputs at once it is one part.
    """
    counted, judged = error.without(settings.ignore), []
    parts = counted.by_part(law)
    errors = {} if parts else {law: counted.value(law)}
    for tolerance in settings.tolerance:
        unit = _unit(law, settings)
        covered = {} if tolerance.is_absolute else {p: e for p, e in parts.items() if is_covered(p, [tolerance])}
        values = {f"{tolerance} {part}": value for part, value in covered.items()}
        if not values and not math.isnan(value := largest_error(counted, tolerance, law)):
            values = {str(tolerance): value}
        errors.update({name: value * unit / tolerance.limit for name, value in values.items()})
        judged += [tolerance] * bool(values)
    return errors | {str(part): value for part, value in parts.items() if not judged or not is_covered(part, judged)}


def searched_error(
    error: OutputError, law: str, settings: SearchSettings, of_parts: Mapping[str, float] | None = None
) -> float:
    """The number that the sampler minimises; ``inf`` where an output that counts is not finite.

    ``of_parts`` are its ``part_errors``, where the caller has them.
    """
    errors = (part_errors(error, law, settings) if of_parts is None else of_parts).values()
    is_finite = error.without(settings.ignore).non_finite == 0 and all(map(math.isfinite, errors))
    return max(errors) if is_finite else math.inf


def _unit(law: str, settings: SearchSettings) -> float:
    """What an error is stated as that reaches its tolerance."""
    if law not in ADD_IN_SQUARES:
        return max(tolerance.limit for tolerance in settings.tolerance)
    return aimed_error(settings) or REFERENCE_ERROR


def searched_as(law: str, settings: SearchSettings) -> str:
    """Names the number, so that a search with other tolerances does not take its emulated errors for its own."""
    limits = (*sorted(map(str, settings.tolerance)), f"{_unit(law, settings):g}") if settings.tolerance else ()
    return "; ".join((law, *limits, *(f"without {o}" for o in sorted(settings.ignore))))


def stored(error: OutputError, law: str, settings: SearchSettings) -> OutputError:
    """What is stored of an emulated error: all that the number is made of, whatever the limits are."""
    wanted = {
        output: {s: v for s, v in by.items() if s in ("non_finite", "max_abs", FOREIGN) or belongs_to(s, law)}
        for output, by in error.per_output.items()
    }
    limited = {tolerance.output for tolerance in settings.tolerance if tolerance.columns is not None}
    return OutputError(wanted, {output: errors for output, errors in error.columns.items() if output in limited})


def suffices(error: OutputError, law: str, settings: SearchSettings) -> bool:
    """Whether what was ``stored``, perhaps under other tolerances, has what these need."""
    return error.non_finite > 0 or not any(math.isnan(largest_error(error, t, law)) for t in settings.tolerance)
