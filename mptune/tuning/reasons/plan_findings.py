"""What the evaluation of the chosen plan shows of its outputs and samples, as findings.

Each says what hides behind the one number that a plan is chosen by: a column that moves more than its tensor shows, one
sample that makes the error, held-out samples that differ, an engine that does not do what was emulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mptune.data.metrics.parts import belongs_to
from mptune.data.metrics.table import METRICS
from mptune.data.samples import split_indices
from mptune.finding import Finding, FindingOrigin, OutputColumns, Where
from mptune.run_json import RunFile
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
_LEAST_SAMPLES = 4
"""With fewer samples none stands out."""
_LEAST_ERROR = 1e-3
"""Relative errors below this are what FP16 gives anyway: no single sample, and no held-out one, is a worry."""


class SampleIndices(NamedTuple):
    """Index in the user's data of each search sample and of each held-out one; empty where not known."""

    search: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()


def sample_indices(file: RunFile) -> SampleIndices:
    """Those of a run; of sequences where each begins."""
    fixed = file.fixed_settings
    if file.data is None:
        return SampleIndices()
    steps = (fixed.steps or file.data.samples) if fixed.feedback else 1
    split = split_indices(file.data.samples // steps, fixed.seed, fixed.held_out_fraction, fixed.max_search_samples)
    return SampleIndices(*(tuple(steps * k for k in part) for part in split))


def plan_findings(
    chosen: Evaluation, indices: SampleIndices, origin: FindingOrigin = "search", run: str = "RUN"
) -> tuple[Finding, ...]:
    """The findings about one plan; ``run`` is the run directory in command lines."""
    findings: list[Finding] = []

    def add(code: str, where: Where, numbers: Mapping[str, float], **names: Any) -> None:
        names |= {"plan": chosen.plan.fingerprint, "run": run}
        findings.append(Finding.of(code, origin, where, numbers, **names))

    # Columns that move more than their output shows, and errors near zero.
    error = chosen.counted_held_out or chosen.counted
    for name, by_column in error.columns.items():
        statistics = error.per_output.get(name, {})
        if "relative_l2" not in statistics or len(by_column.max_abs) < 2:
            continue
        whole, apart = float(np.mean(statistics["relative_l2"])), np.array(by_column.max_abs)
        moved = np.array(by_column.worst_part)
        large = np.isfinite(moved) & (moved >= LEAST) & (moved >= HIDDEN * whole)
        hidden, small = large & (apart >= TINY) & (moved >= LEAST_HIDDEN), large & (apart < TINY)
        for code, columns in (("column-hidden", np.flatnonzero(hidden)), ("near-zero", np.flatnonzero(small))):
            if len(columns):
                worst = int(columns[moved[columns].argmax()])
                sizes = {"column_error": float(moved[worst]), "output_relative_l2": whole}
                numbers = {"column": worst, **sizes, "max_abs": float(apart[worst])}
                place = Where(outputs=(OutputColumns(name, tuple(map(int, columns))),))
                better = "" if chosen.metric == "worst_part" else "worst_part"
                add(code, place, numbers, part=OutputColumns(name, (worst,)), better_metric=better)

    # One sample that makes the error, and held-out samples that differ. The user's own metric may have any scale: only
    # of the named errors it is known what is large.
    metric, held_out = METRICS.get(chosen.metric), chosen.held_out_value
    if metric is not None and metric.kind == "element" and not metric.is_summed:
        decisive: list[tuple[float, int, float]] = []
        for each, index_of in ((chosen.counted, indices.search), (chosen.counted_held_out, indices.held_out)):
            # The error of each sample alone: the worst over the outputs and their parts, shape (n_samples,).
            parts = [] if each is None else [part for by in each.per_output.values() for part in by.items()]
            rows = [values for name, values in parts if belongs_to(name, chosen.metric)]
            values = np.array(rows, dtype=np.float64).max(axis=0) if rows else np.empty(0)
            if len(values) >= _LEAST_SAMPLES and np.isfinite(values).all():
                worst = int(values.argmax())
                rest = float(np.median(np.delete(values, worst)))
                if values[worst] >= max(FAR_ABOVE * rest, _LEAST_ERROR):
                    decisive.append((float(values[worst]), index_of[worst] if worst < len(index_of) else worst, rest))
        if decisive:
            value, index, rest = max(decisive)
            add("one-sample-decides", Where(samples=(index,)), {"error": value, "median_of_others": rest})
        least = max(HELD_OUT_FACTOR * chosen.error_value, _LEAST_ERROR)
        if held_out is not None and least <= held_out < math.inf:
            numbers = {"held_out": held_out, "search": chosen.error_value}
            add("held-out-differs", Where(samples=indices.held_out), numbers)

    if chosen.disagrees and chosen.emulated is not None:
        numbers = {"measured": chosen.error_value, "emulated": chosen.emulated}
        add("emulation-differs", Where(), numbers, factor=EMULATION_FACTOR)
    return tuple(findings)
