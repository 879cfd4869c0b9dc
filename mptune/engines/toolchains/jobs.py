"""The jobs that run the untouched model and emulations of plans over samples, by ONNX Runtime in FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mptune.data.archive import save_samples
from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.parts import PARTS_JSON, cover_held_out, find_parts, load_parts, parts_path, save_parts
from mptune.data.samples import Rollout, outputs_of
from mptune.engines.base import EngineError, ReferenceReport, Stage
from mptune.engines.environment import usable_cores
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import PROVIDERS, Provider, SessionOptions, SideBySide
from mptune.engines.outputs import value_error
from mptune.engines.samples import Feed, Scoring, batch_sizes, cached_samples, file_identity
from mptune.engines.toolchains.rows import check_rows, first_other, sorted_rows
from mptune.graph.hazards.hazard import NodeFacts, TensorRange
from mptune.graph.hazards.probes import facts_on, range_of
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision
from mptune.graph.writing.variants import ObservedPart
from mptune.processes.child import WorkerState

FEW, CLEARLY = 2, 1.8
"""Samples, and how many times the limit an error on them is that is beyond it on all, where samples differ by .4 of it.
They show of most plans that these cannot be chosen."""
_ON, _OFF = np.array(True), np.array(False)
"""Values of a switch; always the same arrays, so that a switch that stays as it was is not sent to the device again."""


@dataclass(frozen=True)
class ReferenceJob:
    """Run the untouched model over samples in FP32 without TF32; its outputs go to a file, their parts beside it."""

    model: Path
    samples: Path
    outputs: Path
    provider: Provider
    dependent: frozenset[str] = frozenset()  # outputs whose shape depends on values
    rollout: Rollout | None = None
    is_held_out: bool = False
    """The parts are those of the search samples, with which the optimisations of ONNX Runtime were looked at, too."""
    run_bytes: int | None = None  # memory that one run takes about, bytes
    row_axes: Mapping[str, int] = field(default_factory=dict)  # of outputs whose rows a TopK selects

    def run(self, state: WorkerState) -> ReferenceReport:
        samples = cached_samples(state, self.samples)
        side_by_side = SideBySide.for_runs(len(samples) if self.rollout is None else 1, self.run_bytes)
        options = SessionOptions(self.provider, threads=side_by_side.threads)
        session = state.transient(partial(open_session, self.model, options))
        state.enter(Stage.RUN)
        outputs = outputs_of(session.run, samples, self.rollout, side_by_side.run)
        again = outputs_of(session.run, samples[: 1 if self.rollout is None else self.rollout.steps], self.rollout)[0]
        rows = check_rows(session, samples, self.dependent, outputs[0], self.run_bytes, self.row_axes)
        save_samples(self.outputs, outputs)
        session.close()

        # What is a part is decided by what the search saw, for held-out samples, too.
        searched = load_parts(self.outputs.with_name(PARTS_JSON)) if self.is_held_out else None
        if searched is not None:
            parts = cover_held_out(searched, outputs)
        else:
            shapes = [{name: array.shape for name, array in sample.items()} for sample in samples]
            parts = find_parts(outputs, batch_sizes(shapes, len(outputs)), self.row_axes)
        save_parts(parts_path(self.outputs), parts)

        is_compared = self.rollout is None and not self.is_held_out
        return ReferenceReport(
            provider=PROVIDERS[self.provider],
            outputs={
                name: _facts(samples, [values[name] for values in outputs], is_selected=name in self.dependent)
                for name in outputs[0]
            },
            repeat_error=max(value_error(again[name], outputs[0][name]) for name in again),
            rows=rows,
            optimisation_error=self._optimisation_error(state, samples[0], outputs[0]) if is_compared else {},
        )

    def _optimisation_error(
        self, state: WorkerState, sample: Feed, outputs: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Outputs whose shape differs are left out, as what selects values may select others."""
        options = SessionOptions(self.provider, "values")
        try:
            plain = state.transient(partial(open_session, self.model, options)).run(sample)
        except EngineError:  # some kernels exist for what the optimiser writes only
            return {}
        plain, outputs = (sorted_rows(dict(each), self.row_axes) for each in (plain, outputs))
        floats = {n: v for n, v in outputs.items() if n not in self.dependent and np.issubdtype(v.dtype, np.floating)}
        return {n: value_error(v, plain[n]) for n, v in floats.items() if v.shape == plain[n].shape}


def _facts(feeds: Sequence[Feed], values: Sequence[np.ndarray], *, is_selected: bool) -> dict[str, float]:
    """What ``ReferenceReport.outputs`` says of one output over all samples.

    Whole numbers of rows that were selected are classes and positions, where 0 is as good as any: no share of zeros.
    """
    count = sum(array.size for array in values)
    finite = [np.abs(array[np.isfinite(array)].astype(np.float64)) for array in values]
    zeros = float(sum(int((array == 0).sum()) for array in finite))
    facts = {
        "size": float(count),
        "non_finite": float(count - sum(array.size for array in finite)),
        "zero_fraction": 0.0 if is_selected and values[0].dtype.kind in "iub" else zeros / max(1, count),
        "absmax": max((float(array.max(initial=0.0)) for array in finite), default=0.0),
    }
    if facts["non_finite"]:
        bad = [k for k, array in enumerate(values) if not np.isfinite(array).all()]
        facts["bad_sample"] = float(bad[0] * (len(feeds) // len(values)))  # in a rollout, where the sequence begins
        facts["bad_samples"], facts["samples"] = float(len(bad)), float(len(values))
    # A sequence of a rollout has no other to differ from: outputs are fewer than samples then.
    elif count and not is_selected and values[0].dtype.kind == "f" and len(values) == len(feeds):
        is_same = all(np.array_equal(array, values[0]) for array in values[1:])
        if is_same and first_other(feeds) is not None:
            facts["constant"] = 1.0
    return facts


@dataclass(frozen=True)
class ObserveJob:
    """Run a model whose outputs are those of one part over the samples, and reduce them to ranges and facts."""

    model: Path
    part: ObservedPart
    samples: Path
    provider: Provider
    precisions: tuple[str, ...] = DEFAULT_PRECISIONS
    run_bytes: int | None = None
    most_samples: int | None = None

    def run(self, state: WorkerState) -> dict[str, TensorRange]:
        """Value -> its range over the first ``most_samples``; None takes all."""
        samples = cached_samples(state, self.samples)[: self.most_samples]
        side_by_side = SideBySide.for_runs(len(samples), self.run_bytes)
        options = SessionOptions(self.provider, "values", threads=side_by_side.threads)
        try:
            session = state.transient(partial(open_session, self.model, options))
        except EngineError:  # some kernels exist for what the optimiser writes only
            session = state.transient(partial(open_session, self.model, replace(options, preset="reference")))
        reduced = [row for row in map(Precision.named, self.precisions) if row is not Precision.FP32]
        asked = [(probed, row) for row in reduced if row.stored is row for probed in self.part.nodes]

        def observe(sample: Feed) -> list[Any]:
            values = session.run(sample, is_transient=True)
            ranges = [partial(range_of, values[tensor], axes) for tensor, axes in self.part.rows.items()]
            facts = [partial(facts_on, probed, values, precision) for probed, precision in asked]
            return SideBySide(max(1, usable_cores() // side_by_side.count)).run([*ranges, *facts])

        state.enter(Stage.RUN)
        every = side_by_side.run([partial(observe, sample) for sample in samples])
        by_value = list(zip(*every, strict=True))
        probes: dict[str, list[NodeFacts]] = {}
        for (probed, precision), on_samples in zip(asked, by_value[len(self.part.rows) :], strict=True):
            names = dict.fromkeys(name for facts in on_samples for name in facts)  # an empty value has none
            facts = {name: tuple(numbers.get(name, 0.0) for numbers in on_samples) for name in names}
            probes.setdefault(probed.key, []).append(NodeFacts(probed.node.name, facts, precision))
        return {
            tensor: TensorRange.over_samples(each, probes.get(tensor, ()))
            for tensor, each in zip(self.part.rows, by_value, strict=False)
        }


@dataclass(frozen=True)
class ErrorsJob:
    """Run models over the same samples, one after another, and compare each with the reference."""

    purpose: ClassVar[str] = "emulate"

    models: tuple[Path | None, ...]
    """The models; None stands for the untouched one, whose outputs are the reference: nothing is run."""
    scoring: Scoring
    provider: Provider = "cpu"
    run_bytes: int | None = None
    """Memory that one run takes about on a CPU, bytes; None where runs go one by one."""
    limit: float = math.inf  # on the error; a model that is beyond it on the first ``FEW`` samples runs on no others

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        return tuple(self._error(state, model) for model in self.models)

    def _error(self, state: WorkerState, model: Path | None) -> OutputError:
        scoring, samples = self.scoring, self.scoring.feeds(state)
        if model is None:
            return scoring.error(state, scoring.wanted(state))
        # A step of a rollout waits for the last one.
        side_by_side = SideBySide.for_runs(len(samples) if scoring.rollout is None else 1, self.run_bytes)
        options = SessionOptions(self.provider, threads=side_by_side.threads)
        state.enter(Stage.BUILD)
        session = state.transient(partial(open_session, model, options))
        state.enter(Stage.RUN)
        outputs: list[dict[str, np.ndarray]] = []
        if self.limit < math.inf and len(samples) > FEW:
            outputs += outputs_of(session.run, samples[:FEW], None, side_by_side.run)
            error = replace(scoring, part=range(FEW)).error(state, outputs)
            if not error.value(scoring.metric) <= CLEARLY * self.limit:  # nor NaN
                return error
        outputs += outputs_of(session.run, samples[len(outputs) :], scoring.rollout, side_by_side.run)
        return scoring.error(state, outputs)


@dataclass(frozen=True)
class SwitchedErrorsJob:
    """Run a switched emulation (``mptune.graph.writing.emulate``) over the samples once for each plan."""

    purpose: ClassVar[str] = "emulate"

    model: Path
    plans: tuple[frozenset[str], ...]  # the switches that are on
    switches: tuple[str, ...]
    scoring: Scoring
    provider: Provider = "cpu"
    run_bytes: int | None = None
    slot: str | None = "switched"
    """Under which the session stays open in the worker for later jobs; another of the same slot closes it. None closes
    it with this job."""
    given: Path | None = None  # the model that computes what ``model`` is given beside the samples

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        scoring = self.scoring
        samples = scoring.feeds(state)
        if self.given is not None:
            # Computed once for all stretches of the model, and kept for one part of the samples.
            what = (*file_identity(self.given), *file_identity(scoring.samples), scoring.part)
            given: list[dict[str, np.ndarray]] = state.cached("given values", what, partial(self._values, state))
            samples = [{**sample, **values} for sample, values in zip(samples, given, strict=True)]
        side_by_side = SideBySide.for_runs(len(samples) * len(self.plans), self.run_bytes)
        options = SessionOptions(self.provider, "emulation", threads=side_by_side.threads)
        opened = partial(open_session, self.model, options)
        key = (*file_identity(self.model), self.provider)
        session = state.transient(opened) if self.slot is None else state.cached(self.slot, key, opened)
        wanted = session.inputs.keys() - set(self.switches)
        feeds = [{name: value for name, value in sample.items() if name in wanted} for sample in samples]
        state.enter(Stage.RUN)
        runs = [
            [{**feed, **{name: _ON if name in on else _OFF for name in self.switches}} for feed in feeds]
            for on in self.plans
        ]
        if self.provider != "cpu":
            scores: list[Future[OutputError]] = []
            with ThreadPoolExecutor(1) as pool:  # The outputs of a plan are compared while the device runs the next.
                for plan in runs:
                    outputs = [session.replay(feed) for feed in plan]
                    wait(scores[-1:])
                    scores.append(pool.submit(scoring.error, state, outputs))
            return tuple(score.result() for score in scores)
        calls = [partial(session.run, feed) for plan in runs for feed in plan]
        calls[-1] = partial(calls[-1], gives_back=True)
        threads = session.options.threads  # of the session that was open already, perhaps
        at_once = SideBySide() if threads is None else SideBySide.for_runs(len(calls), self.run_bytes, threads)
        # Outputs that a stretch does not change are those of the reference.
        reference, every = scoring.wanted(state), at_once.run(calls)
        outputs = [{**reference[number % len(feeds)], **values} for number, values in enumerate(every)]
        starts = range(0, len(outputs), len(feeds))
        return tuple(scoring.error(state, outputs[start : start + len(feeds)]) for start in starts)

    def _values(self, state: WorkerState) -> list[dict[str, np.ndarray]]:
        """What the model is given on each of the samples."""
        assert self.given is not None
        session = state.transient(partial(open_session, self.given, SessionOptions(self.provider)))
        return [session.run(sample) for sample in self.scoring.feeds(state)]
