"""Jobs on the untouched model: the reference outputs, the observed ranges."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.archive import read_samples, save_samples
from mptune.data.metrics.parts import OutputParts, cover_held_out, find_parts, load_parts, save_parts
from mptune.data.rollout import Rollout, outputs_of
from mptune.engines.base import EngineError, ReferenceReport, Stage
from mptune.engines.jobs.outputs import value_error
from mptune.engines.jobs.reference_report import ObservedRanges, TensorRange
from mptune.engines.jobs.rows import check_rows, first_other
from mptune.engines.jobs.samples import Feed, batch_sizes, cached_samples
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import PROVIDERS, OrtSession, Provider, SessionOptions
from mptune.engines.ort.side_by_side import SideBySide
from mptune.graph.hazards.hazard import FP16_MAX
from mptune.graph.hazards.probes import Probe
from mptune.graph.hazards.seen import MaskedRows, ProbeRecord
from mptune.graph.loading.shapes import Units
from mptune.graph.writing.observe import Tap
from mptune.processes.child import WorkerState


@dataclass(frozen=True)
class ReferenceJob:
    """Run the untouched model over a set of samples in FP32 without TF32 and write the outputs to a file."""

    model: Path
    samples: Path
    outputs: Path
    provider: Provider
    dependent: frozenset[str] = frozenset()
    unoptimised: bool = False
    rollout: Rollout | None = None
    parts: Path | None = None
    """File to write the parts of the outputs to; None writes none."""
    searched_parts: Path | None = None
    """The parts found on the search samples, for held-out samples; None finds them here."""
    units: Mapping[str, Units] = field(default_factory=dict)
    run_bytes: int | None = None
    observed: Mapping[str, Mapping[str, float]] | None = None
    """What an observing model saw of the outputs on all samples: only the first sample is run then."""
    plain: Path | None = None
    """File with the outputs of the model without optimisations on the first sample; None runs it."""

    def run(self, state: WorkerState) -> ReferenceReport:
        every = cached_samples(state, self.samples)
        samples = every if self.observed is None else every[:1]
        side_by_side = SideBySide()
        if self.provider == "cpu" and self.rollout is None:
            side_by_side = SideBySide.of(len(samples), self.run_bytes)
        threads, arena = side_by_side.threads, self.observed is None
        options = SessionOptions(self.provider, threads=threads, arena=arena)
        session = state.transient(partial(open_session, self.model, options))
        state.enter(Stage.RUN)
        outputs = outputs_of(session.run, samples, self.rollout, side_by_side.run)
        again = outputs_of(session.run, samples[: 1 if self.rollout is None else self.rollout.steps], self.rollout)[0]
        rows = check_rows(session, every, self.dependent, outputs[0], self.run_bytes)
        save_samples(self.outputs, outputs)
        session.close()
        if self.parts is not None:
            save_parts(self.parts, self._parts_of(samples, outputs))
        return ReferenceReport(
            provider=PROVIDERS[self.provider],
            outputs=_facts_of(samples, outputs, self.dependent) if self.observed is None else self.observed,
            repeat_error=max(value_error(again[name], outputs[0][name]) for name in again),
            rows=rows,
            optimisation_error=self._optimisation_error(state, samples[0], outputs[0])
            if self.unoptimised and self.rollout is None
            else {},
        )

    def _parts_of(self, samples: Sequence[Feed], outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, OutputParts]:
        searched = None if self.searched_parts is None else load_parts(self.searched_parts)
        if searched is not None:
            return cover_held_out(searched, outputs)
        shapes = [{name: array.shape for name, array in sample.items()} for sample in samples]
        return find_parts(outputs, batch_sizes(shapes, len(outputs)), self.units)

    def _optimisation_error(
        self, state: WorkerState, sample: Feed, outputs: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Outputs whose shape differs are left out, as what selects values may select others."""
        options = SessionOptions(self.provider, "values")
        try:
            if self.plain is not None:
                (plain,) = read_samples(self.plain)
            else:
                plain = state.transient(partial(open_session, self.model, options)).run(sample)
        except EngineError:  # some kernels exist for what the optimiser writes only
            return {}
        return {
            name: value_error(values, plain[name])
            for name, values in outputs.items()
            if name not in self.dependent
            and np.issubdtype(values.dtype, np.floating)
            and values.shape == plain[name].shape
        }


@dataclass(frozen=True)
class ObserveJob:
    """Run an observing model (``mptune.graph.writing.observe``) over the samples and reduce its outputs to ranges."""

    model: Path
    taps: tuple[Tap, ...]
    samples: Path
    provider: Provider
    run_bytes: int | None = None
    outputs: frozenset[str] = frozenset()
    """The model's own outputs, of which the report says what ``ReferenceReport.outputs`` would."""
    dependent: frozenset[str] = frozenset()
    first: Path | None = None
    """File to write the outputs on the first sample to."""

    def run(self, state: WorkerState) -> ObservedRanges:
        samples = cached_samples(state, self.samples)
        is_cpu = self.provider == "cpu"
        side_by_side = SideBySide.of(len(samples), self.run_bytes) if is_cpu else SideBySide()
        session = self._open(state, side_by_side.threads)
        ranges: dict[str, TensorRange] = {}
        doubtful: dict[str, None] = {}
        answers = [_Answer(probe) for tap in self.taps for probe in tap.probes]
        state.enter(Stage.RUN)
        runs = [partial(session.run, sample) for sample in samples]
        every = side_by_side.run(runs)
        for index, values in enumerate(every):
            for tap in self.taps:
                before = ranges.get(tap.tensor)
                lowest, highest = float(values[tap.lowest]), float(values[tap.highest])
                if tap.total and not math.isfinite(values[tap.total]):
                    doubtful[tap.tensor] = None
                absmax = max(highest, -lowest, 0.0)  # of no values at all the largest is -infinity
                is_largest = before is None or absmax > before.absmax
                ranges[tap.tensor] = TensorRange(
                    absmax=max(absmax, before.absmax if before else 0.0),
                    shape=before.shape if before else tuple(int(dim) for dim in values[tap.shape]),
                    non_finite=(int(values[tap.non_finite]) if tap.non_finite else 0)
                    + (before.non_finite if before else 0),
                    masked=_masked(int(values[tap.masked]) if tap.masked else 0, index, before),
                    lowest=min(lowest, before.lowest) if before else lowest,
                    highest=max(highest, before.highest) if before else highest,
                    sample=index if is_largest or before is None else before.sample,
                    beyond=(absmax > FP16_MAX) + (before.beyond if before else 0),
                    samples=len(samples),
                )
            for answer in answers:
                answer.add(values)
        for answer in answers:
            seen = ranges[answer.probe.key]
            ranges[answer.probe.key] = replace(seen, records=(*seen.records, answer.record()))
        outputs = [{name: values[name] for name in self.outputs} for values in every]
        if self.first is not None:
            save_samples(self.first, outputs[:1])
        return ObservedRanges(ranges, tuple(doubtful), _facts_of(samples, outputs, self.dependent))

    def _open(self, state: WorkerState, threads: int | None) -> OrtSession:
        options = SessionOptions(self.provider, "values", threads=threads)
        try:
            return state.transient(partial(open_session, self.model, options))
        except EngineError:  # some kernels exist for what the optimiser writes only
            return state.transient(partial(open_session, self.model, replace(options, preset="reference")))


class _Answer:
    """What one probe has answered so far."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._scalars: dict[str, list[float]] = {fact: [] for fact in probe.outputs}
        self._sums: dict[str, np.ndarray] = {}
        self._count = 0

    def add(self, values: Mapping[str, np.ndarray]) -> None:
        """Take the answers on one more sample."""
        self._count += 1
        for fact, name in self.probe.outputs.items():
            self._scalars[fact].append(float(values[name]))
        for fact, name in self.probe.vectors.items():
            self._sums[fact] = self._sums.get(fact, 0.0) + np.asarray(values[name], np.float64)

    def record(self) -> ProbeRecord:
        """All answers."""
        scalars = {fact: tuple(answers) for fact, answers in self._scalars.items()}
        vectors = {fact: tuple((total / self._count).tolist()) for fact, total in self._sums.items()}
        return ProbeRecord(self.probe.kind, self.probe.node, scalars, vectors, self.probe.precision)


def _masked(rows: int, sample: int, before: TensorRange | None) -> MaskedRows | None:
    """The masked rows up to and with one sample."""
    masked = before.masked if before else None
    if masked is not None:
        return MaskedRows(masked.rows + rows, masked.sample, masked.samples + bool(rows))
    return MaskedRows(rows, sample) if rows else None


def _facts_of(
    feeds: Sequence[Feed], outputs: Sequence[Mapping[str, np.ndarray]], dependent: Collection[str]
) -> dict[str, dict[str, float]]:
    """``ReferenceReport.outputs``."""
    return {
        name: _facts(feeds, [values[name] for values in outputs], is_selected=name in dependent) for name in outputs[0]
    }


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
    elif count and not is_selected and values[0].dtype.kind == "f" and _is_constant(feeds, values):
        facts["constant"] = 1.0
    return facts


def _is_constant(feeds: Sequence[Feed], values: Sequence[np.ndarray]) -> bool:
    """Whether an output is the same on all samples although these are not: one that differs is enough to tell.

    False in a rollout, whose outputs are those of sequences: a single sequence would always be the same.
    """
    if len(values) != len(feeds):
        return False
    same = all(np.array_equal(array, values[0]) for array in values[1:])
    return same and first_other(feeds) is not None
