"""Errors and the metrics' own values as texts, and limits on the latter, as ``--limit "map>=0.41"``.

Both on the search samples and on the held-out ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.metrics.sets.whole_set import own_value
from mptune.data.metrics.trusted_scripts import undirected
from mptune.errors import SettingsError
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.fronts.tolerances import is_larger_in_search

_HINT = "write NAME>=X or NAME<=X with a metric that --metric names, such as map>=0.41"
_FORM = re.compile(r"\s*(?P<name>.+?)\s*(?P<sign>>=|<=|>|<)\s*(?P<value>[-+0-9.eE]+)\s*")


@dataclass(frozen=True)
class MetricLimit:
    """One limit.

    Attributes:
        text: as it was given.
        metric: name of the metric.
        at_least: the value is a lower bound, else an upper one.
        bound: in the metric's own unit.
    """

    text: str
    metric: str
    at_least: bool
    bound: float

    @classmethod
    def parse(cls, text: str, metrics: Sequence[str]) -> MetricLimit:
        """Read a limit on one of the metrics that are taken; ``:max`` of a script's function may be left out.

        Raises:
            SettingsError: it is none, or names another metric.
        """
        match = _FORM.fullmatch(text)
        try:
            bound = float(match["value"]) if match else 0.0
        except ValueError:
            match = None
        if match is None:
            raise SettingsError(f"--limit {text} is not understood", _HINT)
        names = {**{undirected(metric): metric for metric in metrics}, **{metric: metric for metric in metrics}}
        name = names.get(match["name"])
        if name is None:
            taken = ", ".join(metrics)
            raise SettingsError(f"--limit {text}: the metrics are {taken}", f"give --metric {match['name']}, too")
        return cls(text.strip(), name, match["sign"].startswith(">"), bound)

    def is_met(self, evaluation: Evaluation) -> bool:
        """Whether a plan's own value is within the limit on all samples it has met; False where it is not known."""
        return all(self._meets(value) for value in self._values(evaluation))

    def excess(self, evaluation: Evaluation) -> tuple[float, float]:
        """How far beyond the limit a plan's value is: the ratio of both, infinite where there is none; the difference.

        At most (1, 0) is within.
        """
        values = self._values(evaluation)
        return max((self._excess(value) for value in values), default=(1.0, 0.0))

    def _values(self, evaluation: Evaluation) -> tuple[float | None, ...]:
        return metric_values(evaluation, self.metric)[: 1 if evaluation.held_out is None else 2]

    def _meets(self, value: float | None) -> bool:
        return value is not None and (value >= self.bound if self.at_least else value <= self.bound)

    def _excess(self, value: float | None) -> tuple[float, float]:
        if self._meets(value):
            return 1.0, 0.0
        if value is None or not math.isfinite(value):
            return math.inf, math.inf
        small, large = sorted((abs(value), abs(self.bound)))
        return large / small if value * self.bound > 0 else math.inf, abs(value - self.bound)


def metric_values(evaluation: Evaluation, metric: str) -> tuple[float | None, float | None]:
    """The metric's own value on the search samples and on the held-out ones; None where it was not taken."""
    return _value(evaluation.error, metric), _value(evaluation.held_out, metric)


def shown_metrics(evaluations: Iterable[Evaluation], reported: Sequence[str]) -> dict[str, str]:
    """Short name -> metric: those reported, and the objective where its own value is not its error.

    Args:
        evaluations: that are shown.
        reported: beside the objective.
    """
    every = list(evaluations)
    own = (e.metric for e in every if metric_values(e, e.metric)[0] != e.error_value and e.has_own_value)
    taken = [m for m in dict.fromkeys((*own, *reported)) if any(metric_values(e, m) != (None, None) for e in every)]
    names = [undirected(metric).rpartition(":")[2] for metric in taken]
    return {name if names.count(name) == 1 else metric: metric for name, metric in zip(names, taken, strict=True)}


def _value(error: OutputError | None, metric: str) -> float | None:
    if error is None:
        return None
    if own_value(metric) in error.per_output.get(ALL_OUTPUTS, {}):
        return error.value(own_value(metric))
    if error.has(metric):
        return error.value(metric)
    return None


def check_metric_limits(texts: Sequence[str], metrics: Sequence[str]) -> tuple[MetricLimit, ...]:
    """Read all limits.

    Raises:
        SettingsError: as ``MetricLimit.parse``.
    """
    return tuple(MetricLimit.parse(text, metrics) for text in texts)


def format_error(value: float | None) -> str:
    """An error to two significant digits; ``-`` where it was not taken."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 0.1 or abs(value) >= 1000 else f"{value:.3g}"


def format_value(value: float | None) -> str:
    """A metric's own value, such as an accuracy; ``-`` where it was not taken."""
    return "-" if value is None else f"{value:.4g}"


def error_text(evaluation: Evaluation) -> str:
    """The error that choices go by; where that of the search samples is larger beyond noise, both."""
    held_out = format_error(evaluation.judged_error)
    if not is_larger_in_search(evaluation):
        return held_out
    return f"{held_out} on held-out samples, {format_error(evaluation.error_value)} on the search samples"


def error_cell(evaluation: Evaluation) -> str:
    """The same for tables: the error of the search samples in brackets."""
    held_out = format_error(evaluation.judged_error)
    return f"{held_out} ({format_error(evaluation.error_value)})" if is_larger_in_search(evaluation) else held_out


def metric_cell(evaluation: Evaluation, metric: str) -> str:
    """A metric's own value on the held-out samples, in brackets that on the search samples where it is another."""
    searched, held_out = map(format_value, metric_values(evaluation, metric))
    if evaluation.held_out is None:
        return searched
    return held_out if held_out == searched else f"{held_out} ({searched})"
