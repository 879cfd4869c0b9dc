"""Samples, reference outputs, metrics and rollouts in the worker: read once, then kept from job to job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mptune.data.archive import labels_beside, read_samples
from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.comparing import Reference, compare_outputs
from mptune.data.metrics.parts import ADD_IN_SQUARES, load_parts, parts_path
from mptune.data.metrics.row_sets import RowSet, find_row_sets
from mptune.data.metrics.table import Metric
from mptune.data.metrics.tasks import (
    CALLABLE,
    METRIC_TIMEOUT_S,
    is_own,
    number_of,
    resolve_metric,
    sample_functions,
    takes_whole_set,
)
from mptune.data.metrics.whole_set import SampleSetArrays, errors_of, set_values
from mptune.data.rollout import Rollout
from mptune.data.run_outputs import save_sketches, sketch_outputs
from mptune.engines.base import EngineError, FailureKind
from mptune.graph.facts import DependentOutput
from mptune.processes.child import WorkerState
from mptune.settings import SearchSettings

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Scoring:
    """What is taken of outputs beside the objective."""

    reported: tuple[str, ...] = ()
    rollout: Rollout | None = None
    callable_takes_set: bool = False
    timeout_s: float = METRIC_TIMEOUT_S
    sketches: Path | None = None
    """File to write what the outputs look like to (``mptune.data.run_outputs``)."""

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
class MetricQuestion:
    """Asks the parent process for the value of the caller's metric: of one sample, or of a whole set.

    A function of the calling program cannot come into the worker, so its arguments go to it.
    """

    arguments: tuple[Any, ...]

    def answer(self, metric: str, function: Any) -> float:
        """Compute it; in the parent."""
        return number_of(metric, function, self.arguments)


def set_errors(
    state: WorkerState, metrics: Sequence[Metric], scoring: Scoring, outputs: Sequence[Arrays], reference: Path
) -> dict[str, tuple[float, ...]]:
    """The errors of all metrics over the whole set, by the statistic's name.

    Samples and labels lie beside the file of the reference outputs.
    """
    samples = reference.with_name(reference.name.replace("_reference", ""))
    labels = labels_beside(samples)
    errors: dict[str, tuple[float, ...]] = {}
    for metric in metrics:
        if metric.kind != "set":
            continue
        data = SampleSetArrays(
            outputs,
            cached_reference(state, reference),
            _inputs(state, samples, scoring.rollout),
            cached_samples(state, labels) if labels.is_file() else [{} for _ in outputs],
        )
        call = partial(_value, metric)
        wanted: Sequence[float] = ()
        if metric.larger_is_better:
            key = (*file_identity(reference), metric.name)
            make_values = partial(set_values, metric, data.of_reference(), call)
            wanted = state.cached(f"{metric.name} of {reference}", key, make_values)
        errors.update(errors_of(metric, data, call, wanted))
    return errors


def _inputs(state: WorkerState, path: Path, rollout: Rollout | None) -> Sequence[Arrays]:
    """The feed of every sample; of a sequence that of its last step."""
    samples = cached_samples(state, path)
    if rollout is None:
        return samples
    return [samples[end - 1] for end in range(rollout.steps, len(samples) + 1, rollout.steps)]


def _value(metric: Metric, data: SampleSetArrays) -> float:
    function = metric.load()
    if metric.name.startswith(CALLABLE):  # it goes to the parent as it is
        return float(function(data))
    return number_of(metric.name, function, data.arguments())


def file_identity(path: Path) -> tuple[str, int, int]:
    """A key that changes when the file is written again."""
    facts = path.stat()
    return str(path), facts.st_mtime_ns, facts.st_size


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
    scoring: Scoring = Scoring(),
    *,
    is_proposal: bool = False,
) -> OutputError:
    """The error of outputs against the reference, on consecutive samples of a set.

    Outputs whose shape depends on values are compared as sets of rows, as are others that have another number of rows
    than the reference. A metric of the user's gets the outputs as they are, whatever their shapes.

    Metrics over the whole set are taken of whole sets only. With ``is_proposal`` there is only what a plan needs
    that is to be proposed: the statistic that orders plans (``mptune.data.metrics.tasks.law_metric``).
    """
    references = cached_reference(state, reference)
    wanted = references[start : start + len(outputs)]
    samples = reference.with_name(reference.name.replace("_reference", ""))
    has_labels = labels_beside(samples).is_file()
    metrics = [_metric(state, spec, scoring, has_labels=has_labels) for spec in (metric, *scoring.reported)]
    extra = {name: function for each in metrics for name, function in sample_functions(each).items()}
    identity = (*file_identity(reference), dependent)
    row_sets = state.cached(f"rows {reference}", identity, partial(find_row_sets, dependent, references))
    names = {name for rows in row_sets for name in rows.names}
    changed = _changed_rows(outputs, wanted, names)
    row_sets = (*row_sets, *find_row_sets(changed, references))
    any_shape = all(is_own(each.name) or each.name == "map" for each in metrics)
    if not any_shape:
        _check_shapes(outputs, wanted, row_sets, takes_rows=not extra)
    objective_only = is_proposal and (metric in ADD_IN_SQUARES or metrics[0].kind != "element")
    if is_proposal:
        is_law = not metrics[0].larger_is_better
        extra = {name: function for name, function in extra.items() if name == metric and is_law}
    compared = _compared(state, reference)
    error = compare_outputs(
        outputs, compared, extra, row_sets, start=start, any_shape=any_shape, objective_only=objective_only
    )
    if is_proposal or len(outputs) < len(references):
        return error
    if scoring.sketches is not None:
        sketches = sketch_outputs(outputs, wanted, error, metric, compared.parts, row_sets)
        save_sketches(scoring.sketches, metric, len(outputs), sketches)
    return error.with_metrics(set_errors(state, metrics, scoring, outputs, reference))


def _metric(state: WorkerState, spec: str, scoring: Scoring, *, has_labels: bool) -> Metric:
    if not spec.startswith(CALLABLE):
        make = partial(resolve_metric, spec, has_labels=has_labels, timeout_s=scoring.timeout_s)
        resolved: Metric = state.cached(f"metric {spec}", (spec, has_labels), make)
        return resolved
    if scoring.callable_takes_set:
        return Metric(spec, "set", lambda data: float(state.ask(MetricQuestion(tuple(data.arguments())))))
    return Metric(spec, "sample", lambda *arguments: float(state.ask(MetricQuestion(arguments))))


def cached_reference(state: WorkerState, reference: Path) -> Sequence[Outputs]:
    """The reference outputs in a file, one entry per sample, or per sequence of them."""
    references: Sequence[Outputs] = state.cached(
        f"reference {reference}", file_identity(reference), partial(read_samples, reference)
    )
    return references


def _compared(state: WorkerState, reference: Path) -> Reference:
    """The reference with its sums, and the parts that were found with it: found here where none is written."""
    path = parts_path(reference)
    identity = (*file_identity(reference), *(file_identity(path) if path.is_file() else ()))
    compared: Reference = state.cached(
        f"compared {reference}", identity, lambda: Reference(cached_reference(state, reference), load_parts(path))
    )
    return compared


def batch_sizes(shapes: Sequence[Mapping[str, Sequence[int]]], outputs: int) -> tuple[frozenset[int], ...]:
    """What may be the batch of each output: the first dimensions of the inputs of its sample, or of its sequence."""
    firsts = shapes[:: max(1, len(shapes) // outputs)][:outputs]
    return tuple(frozenset(shape[0] for shape in sample.values() if shape) for sample in firsts)


def _changed_rows(
    outputs: Sequence[Outputs], wanted: Sequence[Outputs], names: Collection[str]
) -> tuple[DependentOutput, ...]:
    """Outputs that have another number of rows than the reference although nothing in the model tells."""
    changed: dict[str, DependentOutput] = {}
    for got, expected in zip(outputs, wanted, strict=True):
        for name, array in expected.items():
            if name in names or name not in got or got[name].ndim != array.ndim:
                continue
            axes = [k for k, (x, y) in enumerate(zip(got[name].shape, array.shape, strict=True)) if x != y]
            if len(axes) == 1:
                changed.setdefault(name, DependentOutput(name, axes[0], (name,)))
    return tuple(changed.values())


def _check_shapes(
    outputs: Sequence[Outputs], wanted: Sequence[Outputs], row_sets: Sequence[RowSet], *, takes_rows: bool
) -> None:
    """Check that outputs can be compared with the reference.

    An ``EngineError`` says that they cannot: the plan has failed, as a detector keeps another number of boxes.
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
