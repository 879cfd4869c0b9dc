"""Samples, reference outputs and the scoring of outputs in the worker: files are read once, then kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mptune.data.archive import labels_beside, read_samples
from mptune.data.metrics import table
from mptune.data.metrics.accuracy import OutputError, Reference, compare_outputs
from mptune.data.metrics.parts import ADD_IN_SQUARES, load_parts, parts_path
from mptune.data.metrics.row_sets import find_row_sets
from mptune.data.metrics.table import CALLABLE, Metric, sample_functions
from mptune.data.metrics.whole_set import set_values
from mptune.data.run_outputs import sketch_outputs, write_outputs
from mptune.data.samples import Rollout
from mptune.data.scripts import resolve_metric
from mptune.engines.base import EngineError, FailureKind, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.ort.session import SideBySide
from mptune.errors import DataError
from mptune.graph.facts import DependentOutput
from mptune.graph.plan import PrecisionPlan
from mptune.processes.child import WorkerState

Feed = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


def file_identity(path: Path) -> tuple[str, int, int]:
    """A key that changes when the file is written again."""
    facts = path.stat()
    return str(path), facts.st_mtime_ns, facts.st_size


def cached_samples(state: WorkerState, path: Path) -> tuple[dict[str, np.ndarray], ...]:
    """The arrays in a file, one dictionary for each sample, or for each sequence of them; read once per worker."""
    return state.cached(f"samples {path}", file_identity(path), partial(read_samples, path))


def batch_sizes(shapes: Sequence[Mapping[str, Sequence[int]]], outputs: int) -> tuple[frozenset[int], ...]:
    """What may be the batch of each output: the first dimensions of the inputs of its sample, or of its sequence."""
    firsts = shapes[:: max(1, len(shapes) // outputs)][:outputs]
    return tuple(frozenset(shape[0] for shape in sample.values() if shape) for sample in firsts)


@dataclass(frozen=True)
class Scoring:
    """The samples that a job runs on, and how their outputs are scored."""

    samples: Path  # labels lie beside this file
    reference: Path  # file of the reference outputs; their parts lie beside it
    metric: str = "relative_l2"
    dependent: tuple[DependentOutput, ...] = ()
    """Outputs whose rows depend on values: they are compared as sets of rows."""
    part: range | None = None
    """Numbers of the samples to take, consecutive (in a rollout each is a sequence's); None takes all."""
    is_proposal: bool = False
    """The plan is only to be proposed: only what orders plans is computed (``law_metric``)."""
    rollout: Rollout | None = None
    reported: tuple[str, ...] = ()  # other metrics
    callable_takes_set: bool = False
    """The metric is a function of the calling program, which takes the whole set at once."""
    timeout_s: float = table.METRIC_TIMEOUT_S  # for one call of a script's metric
    sketches: Path | None = None  # file to write what the outputs look like to (``mptune.data.run_outputs``)

    @classmethod
    def in_run(
        cls,
        context: RunContext,
        which: SampleSet,
        plan: PrecisionPlan | None = None,
        *,
        part: range | None = None,
        is_proposal: bool = False,
    ) -> Scoring:
        """That of a search; with a plan, what its held-out outputs look like is written."""
        settings = context.settings
        function = settings.metric_function
        return cls(
            context.samples(which),
            context.reference(which),
            settings.metric,
            context.row_outputs,
            part,
            is_proposal,
            settings.rollout,
            settings.reported_metrics,
            function is not None and table.takes_whole_set(function),
            settings.worker.metric_timeout_s,
            None if plan is None else context.sketches(plan, which),
        )

    def feeds(self, state: WorkerState) -> Sequence[Feed]:
        every: Sequence[Feed] = cached_samples(state, self.samples)
        if self.part is None:
            return every
        steps = 1 if self.rollout is None else self.rollout.steps
        return every[self.part.start * steps : self.part.stop * steps]

    def wanted(self, state: WorkerState) -> Sequence[Outputs]:
        every: Sequence[Outputs] = cached_samples(state, self.reference)
        return every if self.part is None else every[self.part.start : self.part.stop]

    def error(self, state: WorkerState, outputs: Sequence[Outputs]) -> OutputError:
        """The error of the outputs on these samples; metrics over the whole set are taken of whole sets only.

        Outputs with another number of rows than the reference are compared as sets of rows. A metric of the user's gets
        the outputs as they are, whatever their shapes.
        """
        references, wanted = cached_samples(state, self.reference), self.wanted(state)
        # An FP16 interface: sums of a user's metric would be FP16, too.
        wide = {np.dtype(np.float16): np.float32}
        outputs = [{n: a.astype(wide.get(a.dtype, a.dtype), copy=False) for n, a in each.items()} for each in outputs]
        labels = labels_beside(self.samples)
        metrics = [self._metric(state, spec, has_labels=labels.is_file()) for spec in (self.metric, *self.reported)]
        functions = {name: function for each in metrics for name, function in sample_functions(each).items()}
        key = (*file_identity(self.reference), self.dependent)
        row_sets = state.cached(f"rows {self.reference}", key, lambda: find_row_sets(self.dependent, references))
        # Outputs that have another number of rows than the reference although nothing in the model says so.
        changed: dict[str, DependentOutput] = {}
        in_sets = {name for rows in row_sets for name in rows.names}
        for got, expected in zip(outputs, wanted, strict=True):
            for name, array in expected.items():
                if name in in_sets or name not in got or got[name].ndim != array.ndim:
                    continue
                axes = [k for k, (x, y) in enumerate(zip(got[name].shape, array.shape, strict=True)) if x != y]
                if len(axes) == 1:
                    changed.setdefault(name, DependentOutput(name, axes[0], (name,)))
        row_sets = (*row_sets, *find_row_sets(tuple(changed.values()), references))

        any_shape = all(each.name not in table.METRICS or each.name.startswith("map") for each in metrics)
        rows = {} if functions else {output.name: output for each in row_sets for output in each.outputs}
        for number, (got, expected) in enumerate(zip(outputs, wanted, strict=True)):
            for name, array in expected.items():
                if any_shape or name not in got or got[name].shape == array.shape:
                    continue
                if name not in rows or not rows[name].fits(got[name].shape, array.shape):
                    # The plan has failed, as where a detector keeps another number of boxes.
                    text = f"output {name!r} has shape {got[name].shape} on sample {number}, the reference has"
                    raise EngineError(FailureKind.ERROR, f"{text} {array.shape}")

        objective_only = self.is_proposal and (self.metric in ADD_IN_SQUARES or metrics[0].kind != "element")
        if self.is_proposal:
            is_law = not metrics[0].larger_is_better
            functions = {name: each for name, each in functions.items() if name == self.metric and is_law}
        path = parts_path(self.reference)
        key = (*file_identity(self.reference), *(file_identity(path) if path.is_file() else ()))
        reference = state.cached(f"parts {self.reference}", key, lambda: Reference(references, load_parts(path)))
        start = 0 if self.part is None else self.part.start
        # The differences of one sample take as much memory as its outputs, those against the values as much again.
        sample_bytes = 2 * max(sum(array.nbytes for array in each.values()) for each in wanted)
        threads = SideBySide.for_runs(len(outputs), sample_bytes).count
        error = compare_outputs(
            outputs, reference, functions, row_sets, start=start, objective_only=objective_only, threads=threads
        )
        if self.is_proposal or len(outputs) < len(references):
            return error
        if self.sketches is not None:
            sketches = sketch_outputs(outputs, wanted, error, self.metric, reference.parts, row_sets)
            write_outputs(self.sketches, {"metric": self.metric, "samples": len(outputs), "outputs": sketches})
        return error.with_metrics(self._set_errors(state, metrics, outputs, labels))

    def _set_errors(
        self, state: WorkerState, metrics: Sequence[Metric], outputs: Sequence[Outputs], labels: Path
    ) -> dict[str, tuple[float, ...]]:
        """The errors of all metrics over the whole set, by the statistic's name."""
        errors: dict[str, tuple[float, ...]] = {}
        for metric in metrics:
            if metric.kind != "set":
                continue
            feeds: Sequence[Feed] = cached_samples(state, self.samples)
            if self.rollout is not None:  # of a sequence that of its last step
                feeds = [feeds[end - 1] for end in range(self.rollout.steps, len(feeds) + 1, self.rollout.steps)]
            references = cached_samples(state, self.reference)
            rest = references, feeds, cached_samples(state, labels) if labels.is_file() else [{} for _ in outputs]

            def call(arguments: Sequence[Feed], metric: Metric = metric) -> float:
                function = metric.load()
                # A function of the calling program gets the arrays as they are, in the parent.
                is_here = not metric.name.startswith(CALLABLE)
                return table.number_of(metric.name, function, arguments) if is_here else float(function(*arguments))

            values = set_values(metric, (outputs, *rest), call)
            errors |= {metric.name: values, table.own_value(metric.name): values}
            if metric.larger_is_better:
                key = (*file_identity(self.reference), metric.name)
                make = partial(set_values, metric, (references, *rest), call)
                wanted: Sequence[float] = state.cached(f"{metric.name} of {self.reference}", key, make)
                own = sum(wanted) / len(wanted)
                if metric.name in table.METRICS and not labels.is_file() and abs(own - 1.0) > 1e-9:
                    text = f"{metric.name} of the reference against itself is {own:.3g}, not 1"
                    forms = "--metric map:xyxy where boxes are corners, map:cxcywh where centre and size; or "
                    raise DataError(text, (forms if metric.name.startswith("map") else "") + "give --labels")
                errors[metric.name] = tuple(ideal - value for ideal, value in zip(wanted, values, strict=True))
        return errors

    def _metric(self, state: WorkerState, spec: str, *, has_labels: bool) -> Metric:
        """One of the calling program cannot come into the worker, so its arguments go to the parent as a question."""
        if not spec.startswith(CALLABLE):
            make = partial(resolve_metric, spec, has_labels=has_labels, timeout_s=self.timeout_s)
            resolved: Metric = state.cached(f"metric {spec}", (spec, has_labels), make)
            return resolved
        kind: Literal["set", "sample"] = "set" if self.callable_takes_set else "sample"
        return Metric(spec, kind, lambda *arguments: float(state.ask(arguments)))
