"""Samples, reference outputs and the metric in the worker: read once, then kept from job to job."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.archive import read_outputs, read_sample_shapes, read_samples, save_outputs
from mptune.data.labels import labels_beside
from mptune.data.metrics.accuracy import OutputError, TaskMetric, compare_outputs
from mptune.data.metrics.calling import call_metric
from mptune.data.metrics.guarded import metric_limit
from mptune.data.metrics.kept_parts import load_parts, parts_beside
from mptune.data.metrics.parts import OutputParts, find_parts
from mptune.data.metrics.row_sets import RowSet, find_row_sets
from mptune.data.metrics.table import Metric
from mptune.data.metrics.tasks import CALLABLE, is_own, resolve_metric, sample_functions
from mptune.data.sketches.taking import save_sketches, sketch_outputs
from mptune.engines.base import EngineError, FailureKind
from mptune.engines.jobs.scoring import Scoring, ask_caller, file_identity, set_errors
from mptune.engines.worker.child import WorkerState
from mptune.graph.loading.value_dependent import DependentOutput

Feed = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


def cached_samples(state: WorkerState, path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """The samples in a file, read once per worker."""
    return state.cached(f"samples {path}", file_identity(path), partial(read_samples, path))


def output_error(
    state: WorkerState,
    outputs: Sequence[Outputs],
    reference: Path,
    metric: str,
    dependent: tuple[DependentOutput, ...] = (),
    start: int = 0,
    scoring: Scoring = Scoring(),  # noqa: B008  it is frozen
) -> OutputError:
    """The error of outputs against the reference, on consecutive samples of a set.

    Outputs whose shape depends on values are compared as sets of rows, as are others that have another number of rows
    than the reference. A metric of the user's gets the outputs as they are, whatever their shapes.

    Args:
        dependent: outputs whose shape depends on values.
        scoring: what is taken beside the objective. Metrics over the whole set are taken of whole sets only.

    Raises:
        DataError: a metric failed.
        EngineError: an output has another shape than the reference, and not only another number of rows.
    """
    references = cached_reference(state, reference)
    wanted = references[start : start + len(outputs)]
    samples = reference.with_name(reference.name.replace("_reference", ""))
    has_labels = labels_beside(samples).is_file()
    metrics = [_metric(state, spec, scoring, has_labels=has_labels) for spec in (metric, *scoring.reported)]
    extra = {name: function for one in metrics for name, function in sample_functions(one).items()}
    identity = (*file_identity(reference), dependent)
    row_sets = state.cached(f"rows {reference}", identity, partial(find_row_sets, dependent, references))
    names = {name for rows in row_sets for name in rows.names}
    changed = _changed_rows(outputs, wanted, names)
    row_sets = (*row_sets, *find_row_sets(changed, references))
    any_shape = all(is_own(one.name) or one.name == "map" for one in metrics)
    if not any_shape:
        _check_shapes(outputs, wanted, row_sets, takes_rows=not extra)
    parts = cached_parts(state, reference)
    with metric_limit(scoring.timeout_s):
        error = compare_outputs(outputs, wanted, extra, row_sets, any_shape=any_shape, parts=parts)
        if len(outputs) < len(references):
            return error
        if scoring.sketches is not None:
            sketches = sketch_outputs(outputs, wanted, error, metric, parts, row_sets)
            save_sketches(scoring.sketches, metric, len(outputs), sketches)
        return error.beside(set_errors(state, metrics, scoring, outputs, reference))


def _metric(state: WorkerState, spec: str, scoring: Scoring, *, has_labels: bool) -> Metric:
    if not spec.startswith(CALLABLE):
        make = partial(resolve_metric, spec, has_labels=has_labels)
        found: Metric = state.cached(f"metric {spec}", (spec, has_labels), make)
        return found
    if scoring.callable_takes_set:
        return Metric(spec, "set", partial(ask_caller, state))
    return Metric(spec, "sample", partial(_value_by_caller, state))


def cached_reference(state: WorkerState, reference: Path) -> Sequence[Outputs]:
    """The reference outputs in a file, one entry per sample, or per sequence of them."""
    found: Sequence[Outputs] = state.cached(
        f"reference {reference}", file_identity(reference), partial(read_outputs, reference)
    )
    return found


def cached_parts(state: WorkerState, reference: Path) -> dict[str, OutputParts]:
    """The parts of the outputs that were found when the reference was taken.

    A run of an old version kept none at all: they are found from the search's reference now.
    """

    def load(path: Path) -> dict[str, OutputParts] | None:
        if not path.is_file():
            return None
        found: dict[str, OutputParts] | None = state.cached(
            f"parts {path}", file_identity(path), partial(load_parts, path)
        )
        return found

    known = parts_beside(reference, load)
    if known is not None:
        return known
    searched = reference.with_name(reference.name.replace("held_out", "search"))
    searched = searched if searched.is_file() else reference
    samples = searched.with_name(searched.name.replace("_reference", ""))
    inputs = samples if samples != searched and samples.is_file() else None
    key = (*file_identity(searched), inputs)
    return state.cached(f"found parts {searched}", key, partial(_found_parts, searched, inputs))


def _found_parts(reference: Path, samples: Path | None) -> dict[str, OutputParts]:
    outputs = read_outputs(reference)
    batches = None if samples is None else batch_sizes(read_sample_shapes(samples), len(outputs))
    return find_parts(outputs, batches)


def batch_sizes(shapes: Sequence[Mapping[str, Sequence[int]]], outputs: int) -> tuple[frozenset[int], ...]:
    """What may be the batch of each output: the first dimensions of the inputs of its sample.

    Args:
        outputs: how many there are: fewer where each is that of a sequence of samples, which have one batch.
    """
    firsts = shapes[:: max(1, len(shapes) // outputs)][:outputs]
    return tuple(frozenset(shape[0] for shape in sample.values() if shape) for sample in firsts)


def _changed_rows(
    outputs: Sequence[Outputs], wanted: Sequence[Outputs], known: Collection[str]
) -> tuple[DependentOutput, ...]:
    """Outputs that have another number of rows than the reference although nothing in the model tells."""
    found: dict[str, DependentOutput] = {}
    for got, expected in zip(outputs, wanted, strict=True):
        for name, array in expected.items():
            if name in known or name not in got or got[name].ndim != array.ndim:
                continue
            axes = [k for k, (x, y) in enumerate(zip(got[name].shape, array.shape, strict=True)) if x != y]
            if len(axes) == 1:
                found.setdefault(name, DependentOutput(name, axes[0], (name,)))
    return tuple(found.values())


def _check_shapes(
    outputs: Sequence[Outputs], wanted: Sequence[Outputs], row_sets: Sequence[RowSet], *, takes_rows: bool
) -> None:
    """Check that outputs can be compared with the reference.

    Raises:
        EngineError: they cannot. It is caused by the plan (a detector keeps another number of boxes), so it is the
            plan that fails.
    """
    rows = {output.name: output for each in row_sets for output in each.outputs}
    for number, (got, expected) in enumerate(zip(outputs, wanted, strict=True)):
        for name, array in expected.items():
            if name not in got or got[name].shape == array.shape:
                continue
            if not (takes_rows and name in rows and rows[name].fits(got[name].shape, array.shape)):
                text = (
                    f"output {name!r} has shape {got[name].shape} on sample {number}, the reference has {array.shape}"
                )
                raise EngineError(FailureKind.ERROR, text)


@dataclass(frozen=True)
class MetricQuestion:
    """Asks the parent process for the value of the caller's metric on one sample."""

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
