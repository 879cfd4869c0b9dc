"""What the evaluation of the chosen plan shows of its outputs and samples, as findings.

Each says what hides behind the one number that a plan is chosen by: a column that moves more than its tensor shows, one
sample that makes the error, held-out samples that differ, an engine that does not do what was emulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import belongs_to
from mptune.data.metrics.table import METRICS
from mptune.finding import Finding, FindingOrigin, OutputColumns, Where
from mptune.findings.wording import listed
from mptune.tuning.evaluation import EMULATION_FACTOR, Evaluation

LEAST = 1e-2
"""Errors of a column below this share of its own standard deviation are no finding, whatever its tensor shows."""

LEAST_HIDDEN = 5e-2
"""From this share on, an error is large enough to be called hidden; untrained networks reach 2 % without harm."""

HIDDEN = 10.0
"""How much larger a column's error is than the relative L2 error of its output, to be hidden by it."""

TINY = 2.0**-14
"""The smallest normal FP16 number: an absolute error below it comes from values near zero."""

FAR_ABOVE = 10.0
"""How much larger the worst sample's error is than the median of the others, to decide alone."""

HELD_OUT_FACTOR = 5.0
"""How much larger the held-out error is than that of the search samples, to differ."""

_OPERATORS = 6
"""Operators that are named, at most."""

_LEAST_SAMPLES = 4
"""With fewer samples none stands out."""

_LEAST_ERROR = 1e-3
"""Relative errors below this are what FP16 gives anyway: no single sample, and no held-out one, is a worry."""


@dataclass(frozen=True)
class SampleIndices:
    """Index in the user's data of each search sample and of each held-out one; empty where not known."""

    search: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()


def plan_findings(
    chosen: Evaluation, indices: SampleIndices, origin: FindingOrigin = "search", run: str = "RUN"
) -> tuple[Finding, ...]:
    """The findings about one plan; ``run`` is the run directory in command lines."""
    maker = _Maker(chosen, indices, origin, run)
    return (*maker.columns(), *maker.one_sample(), *maker.held_out(), *maker.emulation())


@dataclass(frozen=True)
class _Maker:
    chosen: Evaluation
    indices: SampleIndices
    origin: FindingOrigin
    run: str

    def columns(self) -> list[Finding]:
        """Columns that move more than their output shows, and errors near zero."""
        findings = []
        error = self.chosen.counted_held_out or self.chosen.counted
        for name, by_column in error.columns.items():
            statistics = error.per_output.get(name, {})
            if "relative_l2" not in statistics or len(by_column.max_abs) < 2:
                continue
            whole = float(np.mean(statistics["relative_l2"]))
            moved = np.array(by_column.worst_part)
            apart = np.array(by_column.max_abs)
            large = np.isfinite(moved) & (moved >= LEAST) & (moved >= HIDDEN * whole)
            hidden, small = large & (apart >= TINY) & (moved >= LEAST_HIDDEN), large & (apart < TINY)
            for code, which in (("column-hidden", hidden), ("near-zero", small)):
                if which.any():
                    columns = tuple(int(c) for c in np.flatnonzero(which))
                    worst = max(columns, key=lambda c: moved[c])
                    numbers = {
                        "column": worst,
                        "column_error": float(moved[worst]),
                        "output_relative_l2": whole,
                        "max_abs": float(apart[worst]),
                    }
                    part = OutputColumns(name, (worst,))
                    metric = "" if self.chosen.metric == "worst_part" else "worst_part"
                    place = Where(outputs=(OutputColumns(name, columns),))
                    findings.append(self._finding(code, place, numbers, part=part, better_metric=metric))
        return findings

    def one_sample(self) -> list[Finding]:
        """One sample, by its index in the data, whose error is far above the rest."""
        if not self._is_ratio:
            return []
        samples: list[tuple[float, int, float]] = []
        sets = [(self.chosen.counted, self.indices.search)]
        if self.chosen.counted_held_out is not None:
            sets.append((self.chosen.counted_held_out, self.indices.held_out))
        for error, indices in sets:
            values = _by_sample(error, self.chosen.metric)
            if len(values) < _LEAST_SAMPLES or not np.isfinite(values).all():
                continue
            worst = int(values.argmax())
            rest = float(np.median(np.delete(values, worst)))
            if values[worst] >= max(FAR_ABOVE * rest, _LEAST_ERROR):
                index = indices[worst] if worst < len(indices) else worst
                samples.append((float(values[worst]), index, rest))
        if not samples:
            return []
        value, index, rest = max(samples)
        numbers = {"error": value, "median_of_others": rest}
        return [self._finding("one-sample-decides", Where(samples=(index,)), numbers)]

    def held_out(self) -> list[Finding]:
        """A held-out error far above that of the search samples."""
        seen, held_out = self.chosen.error_value, self.chosen.held_out_value
        if not self._is_ratio or held_out is None or not math.isfinite(held_out):
            return []
        where, least = Where(samples=self.indices.held_out), self.chosen.held_out_least
        numbers = {"held_out": held_out, "search": seen}
        if least is not None and held_out > max(EMULATION_FACTOR * least, _LEAST_ERROR):
            return [self._finding("held-out-differs", where, {**numbers, "held_out_least": least}, "unsteady")]
        if held_out < max(HELD_OUT_FACTOR * seen, _LEAST_ERROR):
            return []
        return [self._finding("held-out-differs", where, numbers)]

    def emulation(self) -> list[Finding]:
        """Measured and emulated errors that disagree."""
        if not self.chosen.disagrees or self.chosen.emulated is None:
            return []
        numbers = {"measured": self.chosen.error_value, "emulated": self.chosen.emulated}
        operators = listed(self.chosen.operators, _OPERATORS)
        return [self._finding("emulation-differs", Where(), numbers, factor=EMULATION_FACTOR, operators=operators)]

    @property
    def _is_ratio(self) -> bool:
        """Whether the metric is one of the named errors: the user's own may have any scale."""
        metric = METRICS.get(self.chosen.metric)
        return metric is not None and metric.kind == "element" and not metric.is_summed

    def _finding(self, code: str, where: Where, numbers: Mapping[str, float], kind: str = "", **names: Any) -> Finding:
        names |= {"plan": self.chosen.plan.fingerprint, "run": self.run}
        return Finding.of(code, self.origin, where, numbers, kind=kind, **names)


def _by_sample(error: OutputError, metric: str) -> NDArray[np.float64]:
    """The error of each sample alone, the worst over the outputs and their parts, shape (samples,)."""
    every = [v for by in error.per_output.values() for statistic, v in by.items() if belongs_to(statistic, metric)]
    worst: NDArray[np.float64] = np.array(every, dtype=np.float64).max(axis=0)
    return worst
