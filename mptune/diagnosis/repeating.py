"""The same model on the same samples again, alone and in several threads at the same time, against isolated runs."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from mptune.diagnosis.causes.order import stale_finding
from mptune.diagnosis.comparison import finding
from mptune.diagnosis.engines import EngineRunner
from mptune.diagnosis.patterns.orders import find_stale
from mptune.diagnosis.runner import Outputs, Runner
from mptune.diagnosis.sides import Sides
from mptune.finding import Finding, OutputColumns

_MOST_THREADS = 8
_ROUNDS = 4
"""Times that all samples are run under stress, where no number is given."""

ROUNDING = 1e-5
"""Relative L2 between runs that the order of FP32 additions can make."""


def repetition_findings(sides: Sides, runner: Runner | EngineRunner, repeat: int, *, stress: bool) -> list[Finding]:
    """Findings of runs that differ from isolated ones; none where they agree within FP32 rounding.

    ``runner`` is of the candidate where that is a model or an engine, else of the model.
    """
    threads = max(2, min(_MOST_THREADS, os.cpu_count() or 2))
    ways = [(repeat, 1, "one after another")] if repeat > 1 else []
    ways += [(max(repeat, _ROUNDS), threads, f"in {threads} threads at once")] if stress else []
    for times, at_once, how in ways:
        error, worst = runner.repeated(times, at_once)
        if error > ROUNDING and worst is not None:
            return [_differing(sides, runner, error, worst, times, how)]
    return []


def _differing(
    sides: Sides, runner: Runner | EngineRunner, error: float, worst: Outputs, times: int, how: str
) -> Finding:
    """What the worst repetition is: stale or torn rows of the isolated runs, or other values."""
    isolated = runner.exact
    if all(name in isolated[0] for name in sides.layouts):
        again = replace(sides, reference=isolated, candidate=worst, candidate_name=f"{runner.name} {how}")
        for name in sides.layouts:
            side = again.output(name)
            compared = side.compared
            # Both ran in the same precision: what a row has of another run it has exactly.
            stale = None if compared is None else find_stale(compared.of_one_precision(), sides.batch)
            if stale is not None:
                return stale_finding(side, stale)
    names = [name for name in isolated[0] if _differs(isolated, worst, name)]
    return finding(
        "not-deterministic",
        "runs",
        tuple(OutputColumns(name) for name in names),
        {"relative_l2": error, "runs": times, "mode": how},
        runner=runner.name,
    )


def _differs(a: Outputs, b: Outputs, name: str) -> bool:
    pairs = [(np.asarray(x[name]), np.asarray(y[name])) for x, y in zip(a, b, strict=True)]
    return not all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)
