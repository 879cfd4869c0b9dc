"""The error that plans are searched by: the metric's, or, under tolerances, each part over what it may be.

Without tolerances it is the metric's own. With them, the error of what a tolerance is about is divided by its limit,
and that of the rest by ``--max-error``, where one is given; the largest decides. So it is at most ``unit`` where all
limits hold, and the sampler, which takes plans past ``REFERENCE_ERROR`` for worthless, looks for those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import ADD_IN_SQUARES, belongs_to, columns_of_part, part_statistic
from mptune.finding import OutputColumns
from mptune.settings import SearchSettings, Tolerance
from mptune.tuning.fronts.hypervolume import REFERENCE_ERROR
from mptune.tuning.fronts.limits import is_covered, largest_error
from mptune.tuning.sampler.trials import Judge

_OF_COLUMNS = "of columns"
"""Statistic of what some columns have together, where no part is one of them; each sample has the figure of all."""


@dataclass(frozen=True)
class SearchedError:
    """How errors are judged by the sampler: by a statistic that adds in squares.

    ``max_error`` limits what no tolerance is about, and means nothing without tolerances.
    """

    metric: str
    tolerances: tuple[Tolerance, ...] = ()
    max_error: float | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def of_settings(cls, settings: SearchSettings, law: str) -> SearchedError:
        """That of a search whose errors are modelled by the statistic ``law``."""
        ignored = tuple(sorted(settings.ignore))
        if not settings.tolerance:
            return cls(law, ignored=ignored)
        return cls(law, settings.tolerance, settings.max_error, ignored)

    @property
    def unit(self) -> float:
        """What the error is where a limit is just met."""
        if self.metric in ADD_IN_SQUARES:
            return REFERENCE_ERROR
        return max(tolerance.limit for tolerance in self.tolerances)

    @property
    def key(self) -> str:
        """Tells errors that were judged in one way from those that were judged in another."""
        text = f"{self.metric} without {self.ignored}" if self.ignored else self.metric
        if not self.tolerances:
            return text
        rest = "" if self.max_error is None else f", {self.max_error!r} of the rest"
        return f"{text} under {', '.join(sorted(map(str, self.tolerances)))}{rest}"

    @property
    def kept_key(self) -> str:
        """Tells what is ``kept`` of errors from what is kept for other tolerances; limits do not matter to it."""
        places = sorted({f"{_place(tolerance)} {_statistic(tolerance)}" for tolerance in self._kept})
        return f"{self.metric} with {', '.join(places)}" if places else self.metric

    def kept(self, error: OutputError) -> OutputError:
        """The statistics that the error is made of, and the count of non-finite values: what is worth a place."""
        wanted = {
            output: {s: v for s, v in by.items() if s == "non_finite" or belongs_to(s, self.metric)}
            for output, by in error.per_output.items()
        }
        for tolerance in self._kept:
            values = self._values(error, tolerance)
            if values:
                wanted.setdefault(_place(tolerance), {})[_statistic(tolerance)] = values
        return OutputError(wanted)

    def is_kept(self, error: OutputError) -> bool:
        """Whether an error that was kept has what the tolerances need; one that is not finite needs nothing."""
        return error.non_finite > 0 or all(
            _statistic(tolerance) in error.per_output.get(_place(tolerance), {}) for tolerance in self._kept
        )

    def of(self, error: OutputError) -> OutputError:
        """The error whose ``value(metric)`` is the one that is searched by; of a kept one, too."""
        counted = error.without(self.ignored)
        if not self.tolerances:
            return counted
        scaled = {tolerance: self._scaled(counted, tolerance) for tolerance in self.tolerances}
        # Columns are not kept of every output.
        judgeable = [tolerance for tolerance, values in scaled.items() if values]
        rest = 1.0 if self.max_error is None else self.unit / self.max_error
        judged: dict[str, dict[str, tuple[float, ...]]] = {}
        for output, statistics in counted.per_output.items():
            for statistic, values in statistics.items():
                part = OutputColumns(output, columns_of_part(statistic))
                if statistic == "non_finite":
                    judged.setdefault(output, {})[statistic] = values
                elif belongs_to(statistic, self.metric) and not is_covered(part, judgeable):
                    judged.setdefault(output, {})[statistic] = tuple(value * rest for value in values)
        judged.update({str(tolerance): scaled[tolerance] for tolerance in judgeable})
        return OutputError(judged)

    def value(self, error: OutputError) -> float:
        """The error, ``inf`` where it is not finite."""
        judged = self.of(error)
        value = judged.value(self.metric)
        return value if judged.non_finite == 0 and math.isfinite(value) else math.inf

    def judge(self, error_of: Callable[[FrozenTrial], OutputError]) -> Judge | None:
        """What gives the sampler the errors of trials; None without tolerances: then those of the study."""
        return Judge(self.key, lambda trial: self.value(error_of(trial))) if self.tolerances else None

    @property
    def _kept(self) -> list[Tolerance]:
        """The tolerances that the metric's own statistics may not hold."""
        return [tolerance for tolerance in self.tolerances if tolerance.is_absolute or tolerance.columns is not None]

    def _scaled(self, error: OutputError, tolerance: Tolerance) -> dict[str, tuple[float, ...]]:
        """Statistics of the metric that are ``unit`` at the limit; empty where the error is not known."""
        factor = self.unit / tolerance.limit
        statistics = error.per_output.get(tolerance.output, {})
        own = {}
        if not tolerance.is_absolute:
            if tolerance.columns is None:
                own = {s: values for s, values in statistics.items() if belongs_to(s, self.metric)}
            else:
                parts = (part_statistic(range(column, column + 1)) for column in tolerance.columns)
                own = {s: statistics[s] for s in parts if s in statistics and belongs_to(s, self.metric)}
                own = own if len(own) == len(tolerance.columns) else {}
        if not own and (values := self._values(error, tolerance)):
            own = {self.metric: values}
        return {statistic: tuple(value * factor for value in values) for statistic, values in own.items()}

    def _values(self, error: OutputError, tolerance: Tolerance) -> tuple[float, ...]:
        """What a tolerance is about, for each sample; empty where it is not known."""
        kept = error.per_output.get(_place(tolerance), {}).get(_statistic(tolerance))
        if kept is not None and _statistic(tolerance) == _OF_COLUMNS:
            return (max(kept),) * len(kept) if tolerance.is_absolute else kept
        value = largest_error(error, tolerance, self.metric)
        return () if math.isnan(value) else (value,) * error.sample_count


def _place(tolerance: Tolerance) -> str:
    """The name under which ``kept`` keeps what a tolerance is about."""
    if tolerance.columns is None:
        return tolerance.output
    unit = "absolute" if tolerance.is_absolute else "relative"
    return f"{OutputColumns(tolerance.output, tolerance.columns)} {unit}"


def _statistic(tolerance: Tolerance) -> str:
    return "max_abs" if tolerance.columns is None else _OF_COLUMNS
