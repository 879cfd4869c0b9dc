"""What jobs compute beside the objective: reported metrics, metrics over the whole set of samples, and rollouts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import read_outputs, read_samples, save_outputs
from mptune.data.labels import labels_beside
from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError
from mptune.data.metrics.calling import number_of
from mptune.data.metrics.guarded import METRIC_TIMEOUT_S
from mptune.data.metrics.sets.whole_set import SampleSetArrays, errors_of, set_values, takes_whole_set
from mptune.data.metrics.table import Metric
from mptune.data.rollout import Rollout
from mptune.engines.worker.child import WorkerState
from mptune.settings import SearchSettings

Arrays = Mapping[str, np.ndarray]

_NAMES = "outputs, references, inputs, labels"


@dataclass(frozen=True)
class Scoring:
    """See the module.

    Attributes:
        rollout: outputs that are fed back; None where there are none.
        timeout_s: one call of a metric may take this many seconds.
        sketches: file to write what the outputs look like to (``mptune.data.sketches.taking``); None writes none.
    """

    reported: tuple[str, ...] = ()
    rollout: Rollout | None = None
    callable_takes_set: bool = False
    timeout_s: float = METRIC_TIMEOUT_S
    sketches: Path | None = None

    @classmethod
    def of(cls, settings: SearchSettings, sketches: Path | None = None) -> Scoring:
        """That of a search."""
        function = settings.metric_function
        return cls(
            settings.reported_metrics,
            settings.rollout,
            function is not None and takes_whole_set(function),
            settings.worker.metric_timeout_s,
            sketches,
        )


@dataclass(frozen=True)
class SetQuestion:
    """Asks the parent process for the value of the caller's metric over a whole set."""

    folder: Path

    def answer(self, metric: str, function: Any) -> float:
        """Compute it; in the parent.

        Raises:
            DataError: the function raised, or returned no number.
        """
        parts = (read_outputs(self.folder / f"{k}.npz") for k in range(4))
        return number_of(metric, function, SampleSetArrays(*parts).arguments(), "", _NAMES)


def set_errors(
    state: WorkerState, metrics: Sequence[Metric], scoring: Scoring, outputs: Sequence[Arrays], reference: Path
) -> OutputError | None:
    """The errors of all metrics over the whole set, under ``"*"``; None where no metric is one.

    Args:
        reference: file of its reference outputs; samples and labels lie beside it.

    Raises:
        DataError: a metric failed.
    """
    samples = reference.with_name(reference.name.replace("_reference", ""))
    labels = labels_beside(samples)
    found: dict[str, tuple[float, ...]] = {}
    for metric in metrics:
        if metric.kind != "set":
            continue
        data = SampleSetArrays(
            outputs,
            state.cached(f"reference {reference}", file_identity(reference), partial(read_outputs, reference)),
            _inputs(state, samples, scoring.rollout),
            state.cached(f"labels {labels}", file_identity(labels), partial(read_samples, labels))
            if labels.is_file()
            else [{} for _ in outputs],
        )
        call = partial(_value, metric)
        wanted: Sequence[float] = ()
        if metric.larger_is_better:
            key = (*file_identity(reference), metric.name)
            make_values = partial(set_values, metric, data.of_reference(), call)
            wanted = state.cached(f"{metric.name} of {reference}", key, make_values)
        found.update(errors_of(metric, data, call, wanted))
    return OutputError({ALL_OUTPUTS: found}) if found else None


def _inputs(state: WorkerState, path: Path, rollout: Rollout | None) -> Sequence[Arrays]:
    """The feed of every sample; of a sequence that of its last step."""
    samples: Sequence[Arrays] = state.cached(f"samples {path}", file_identity(path), partial(read_samples, path))
    if rollout is None:
        return samples
    return [samples[end - 1] for end in range(rollout.steps, len(samples) + 1, rollout.steps)]


def _value(metric: Metric, data: SampleSetArrays) -> float:
    function = metric.load()
    if isinstance(function, partial):  # the caller's: it goes to the parent as it is
        return float(function(data))
    return number_of(metric.name, function, data.arguments(), "", _NAMES)


def ask_caller(state: WorkerState, data: SampleSetArrays) -> float:
    """The value of the calling program's metric over a whole set, which only the parent process can compute."""
    with tempfile.TemporaryDirectory(prefix="mptune-metric-") as folder:
        for k, part in enumerate(data.parts):
            save_outputs(Path(folder) / f"{k}.npz", part)
        return float(state.ask(SetQuestion(Path(folder))))


def file_identity(path: Path) -> tuple[str, int, int]:
    """A key that changes when the file is written again."""
    facts = path.stat()
    return str(path), facts.st_mtime_ns, facts.st_size
