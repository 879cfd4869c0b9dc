"""Samples, reference outputs and the metric in the worker: read once, then kept from job to job."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.calibration import read_outputs, read_samples, save_outputs
from mptune.data.metrics.accuracy import OutputError, TaskMetric, call_metric, compare_outputs
from mptune.data.metrics.tasks import CALLABLE, resolve_metric
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.worker.child import WorkerState

Feed = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


def cached_samples(state: WorkerState, path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """The samples in a file, read once per worker."""
    return state.cached(f"samples {path}", file_identity(path), partial(read_samples, path))


def output_error(state: WorkerState, outputs: Sequence[Outputs], reference: Path, metric: str) -> OutputError:
    """The error of outputs against the reference, on the first samples of a set.

    Args:
        state: caches what is read.
        outputs: of each sample.
        reference: file of reference outputs; of the same samples first, and perhaps of more.
        metric: the objective, so that task metrics are computed too.

    Raises:
        EngineError: an output has another shape than the reference.
    """
    references = state.cached(f"reference {reference}", file_identity(reference), partial(read_outputs, reference))
    wanted = references[: len(outputs)]
    function = partial(_value_by_caller, state) if metric.startswith(CALLABLE) else None
    _, extra = state.cached("metric", metric, partial(resolve_metric, metric, function))
    for got, expected in zip(outputs, wanted, strict=True):
        for name, array in expected.items():
            # Caused by the plan (a detector keeps another number of boxes), so it is the plan that fails.
            if name in got and got[name].shape != array.shape:
                text = f"output {name!r} has shape {got[name].shape}, the reference has {array.shape}"
                raise EngineError(FailureKind.ERROR, text)
    return compare_outputs(outputs, wanted, extra)


@dataclass(frozen=True)
class MetricQuestion:
    """Asks the parent process for the value of the caller's metric on one sample.

    Attributes:
        path: file with two feeds: the outputs and the reference.
    """

    path: Path

    def answer(self, metric: str, function: TaskMetric) -> float:
        """Compute it; in the parent.

        Raises:
            DataError: the function raised, or returned no number.
        """
        outputs, reference = read_outputs(self.path)
        return call_metric(metric, function, outputs, reference)


def _value_by_caller(state: WorkerState, outputs: Feed, reference: Feed) -> float:
    """A function of the calling program cannot come into the worker, so the outputs go to it, through a file."""
    with tempfile.TemporaryDirectory(prefix="mptune-metric-") as folder:
        path = Path(folder) / "outputs.npz"
        save_outputs(path, [outputs, reference])
        return float(state.ask(MetricQuestion(path)))


def file_identity(path: Path) -> tuple[str, int, int]:
    """A key that changes when the file is written again."""
    facts = path.stat()
    return str(path), facts.st_mtime_ns, facts.st_size
