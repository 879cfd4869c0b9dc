"""Samples, reference outputs and the metric in the worker: read once, then kept from job to job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.calibration import read_outputs, read_samples
from mptune.data.metrics.accuracy import OutputError, compare_outputs
from mptune.data.metrics.tasks import resolve_metric
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.worker.child import WorkerState

Feed = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


def cached_samples(state: WorkerState, path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """The samples in a file, read once per worker."""
    return state.cached(f"samples {path}", file_identity(path), partial(read_samples, path))


def output_error(state: WorkerState, outputs: Sequence[Outputs], reference: Path, metric: str) -> OutputError:
    """Hold the outputs on the first samples against the reference.

    Args:
        state: keeps what is read.
        outputs: of each sample.
        reference: file of reference outputs on the same samples; there may be more of them.
        metric: the objective, so that task metrics are taken too.

    Raises:
        EngineError: an output has another shape than the reference.
    """
    known = state.cached(f"reference {reference}", file_identity(reference), partial(read_outputs, reference))
    wanted = known[: len(outputs)]
    _, extra = state.cached("metric", metric, partial(resolve_metric, metric))
    for got, expected in zip(outputs, wanted, strict=True):
        for name, array in expected.items():
            # The plan's doing (a detector keeps another number of boxes), so no error of the user's.
            if name in got and got[name].shape != array.shape:
                text = f"output {name!r} has shape {got[name].shape}, the reference has {array.shape}"
                raise EngineError(FailureKind.ERROR, text)
    return compare_outputs(outputs, wanted, extra)


def file_identity(path: Path) -> tuple[str, int, int]:
    """Changes when the file is written anew."""
    facts = path.stat()
    return str(path), facts.st_mtime_ns, facts.st_size
