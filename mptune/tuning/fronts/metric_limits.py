"""Limits on the metrics' own values, as ``--limit "map>=0.41"``: held-out where the plan met those samples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.metrics.sets.whole_set import own_value
from mptune.data.metrics.trusted_scripts import undirected
from mptune.errors import SettingsError
from mptune.tuning.evaluation import Evaluation

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
        """Whether a plan's own value of the metric is within the limit; False where it is not known."""
        value = metric_value(evaluation, self.metric)
        if value is None:
            return False
        return value >= self.bound if self.at_least else value <= self.bound

    def excess(self, evaluation: Evaluation) -> tuple[float, float]:
        """How far beyond the limit a plan's value is: the ratio of both, infinite where there is none; the difference.

        At most (1, 0) is within.
        """
        if self.is_met(evaluation):
            return 1.0, 0.0
        value = metric_value(evaluation, self.metric)
        if value is None or not math.isfinite(value):
            return math.inf, math.inf
        small, large = sorted((abs(value), abs(self.bound)))
        return large / small if value * self.bound > 0 else math.inf, abs(value - self.bound)


def metric_value(evaluation: Evaluation, metric: str) -> float | None:
    """The metric's own value: held-out, else of the search samples; None where it was not taken."""
    errors = (evaluation.held_out, evaluation.error)
    return next((v for e in errors if e is not None and (v := _value(e, metric)) is not None), None)


def _value(error: OutputError, metric: str) -> float | None:
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
