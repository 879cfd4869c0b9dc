"""Sensitivity: the output error of each free group alone in FP16, by emulation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure
from mptune.engines.failures import machine_error
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.files import read_json
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import JsonForm
from mptune.tuning.listener import Listener
from mptune.tuning.steps.attempts import TRIES, run_job

SENSITIVITY_JSON = "sensitivity.json"
"""Name of the file in the run's data directory."""


@dataclass(frozen=True)
class Sensitivity(JsonForm):
    """One-group errors.

    Attributes:
        metric: the statistic.
        errors: group id -> error with that group alone in FP16; ``inf`` where it is not finite. Groups whose error has
            not been taken are missing.
        output_errors: group id -> the statistics behind its error, by sample.
        doubts: group id -> standard deviation of the logarithm of its error, against the error on all samples; missing
            where all were taken.
    """

    metric: str
    errors: Mapping[str, float]
    output_errors: Mapping[str, OutputError] = field(default_factory=dict)
    doubts: Mapping[str, float] = field(default_factory=dict)

    def ignoring(self, outputs: Collection[str]) -> Sensitivity:
        """The same without some outputs of the model."""
        counted = {group: error.without(outputs) for group, error in self.output_errors.items()}
        errors = {**self.errors, **{g: error_value(e, self.metric) for g, e in counted.items()}}
        return replace(self, errors=errors, output_errors=counted)

    @classmethod
    def load(cls, path: Path, metric: str) -> Sensitivity:
        """What a search has left for explanations; empty where there is nothing of this metric that can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            read = cls.from_json(read_json(path))
            if read.metric == metric:
                return read
        return cls(metric, {})


def error_value(error: OutputError, metric: str) -> float:
    """The statistic of an error; ``inf`` where an output is not finite."""
    value = error.value(metric)
    return value if error.non_finite == 0 and math.isfinite(value) else math.inf


def emulate_outputs(
    toolchain: Toolchain, plans: Sequence[PrecisionPlan], listener: Listener, part: range | None = None
) -> list[OutputError | None]:
    """Emulate plans in one job, or one by one where that fails; None for a plan that fails alone.

    Raises:
        RunError: the machine fails.
    """
    of_part = () if part is None else (part,)
    errors: list[OutputError | None] = []
    for batch in (plans, *([plan] for plan in plans if len(plans) > 1)):
        what = f"emulating {'plans' if len(batch) > 1 else f'plan {batch[0].fingerprint}'}"
        result = run_job(partial(toolchain.emulate, batch, *of_part), toolchain, listener, what)
        if not isinstance(result, Failure):
            errors += result
        elif result.is_machine_fault:
            raise machine_error(result, TRIES)
        elif len(batch) == 1:
            errors.append(None)
        if len(errors) == len(plans):
            break
    return errors
