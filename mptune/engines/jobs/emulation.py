"""Jobs that run emulations of plans over samples and compare their outputs with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.rollout import outputs_of
from mptune.engines.base import Stage
from mptune.engines.jobs.samples import (
    Feed,
    Outputs,
    Scoring,
    cached_reference,
    cached_samples,
    file_identity,
    output_error,
)
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import OrtSession, Provider, SessionOptions
from mptune.engines.ort.side_by_side import SideBySide
from mptune.graph.facts import DependentOutput
from mptune.processes.child import WorkerState

_ON, _OFF = np.array(True), np.array(False)
"""Values of a switch; always the same arrays, so that a switch that stays as it was is not sent to the device again."""


@dataclass(frozen=True)
class Comparison:
    """The samples that emulations run on, and what their outputs are compared with."""

    samples: Path
    reference: Path
    provider: Provider
    metric: str = "relative_l2"
    part: range | None = None
    """Numbers of the samples to take, consecutive (in a rollout each is a sequence's); None takes all."""
    dependent: tuple[DependentOutput, ...] = ()
    """Outputs whose shape depends on values."""
    scoring: Scoring = Scoring()  # noqa: RUF009  it is frozen
    run_bytes: int | None = None
    """Memory that one run takes about, bytes; None where that is not known, and runs go one by one."""
    is_proposal: bool = False
    """Errors are of plans that are only to be proposed: only what orders them is computed."""

    @property
    def start(self) -> int:
        """The first sample's number."""
        return 0 if self.part is None else self.part.start

    def error(self, state: WorkerState, outputs: Sequence[Outputs]) -> OutputError:
        """The error of the outputs on these samples."""
        return output_error(
            state,
            outputs,
            self.reference,
            self.metric,
            self.dependent,
            self.start,
            self.scoring,
            is_proposal=self.is_proposal,
        )

    def side_by_side(self, runs: int) -> SideBySide:
        """How many of the runs go at a time; a step of a rollout waits for the last one."""
        is_apart = self.provider == "cpu" and self.scoring.rollout is None
        return SideBySide.of(runs, self.run_bytes) if is_apart else SideBySide()


@dataclass(frozen=True)
class ErrorsJob:
    """Run models over the same samples, one after another, and compare each with the reference."""

    models: tuple[Path | None, ...]
    """The models; None stands for the untouched one, whose outputs are the reference: nothing is run."""
    comparison: Comparison

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        rollout, part = self.comparison.scoring.rollout, self.comparison.part
        samples: Sequence[Feed] = cached_samples(state, self.comparison.samples)
        if part is not None:
            steps = 1 if rollout is None else rollout.steps
            samples = samples[part.start * steps : part.stop * steps]
        return tuple(self._error(state, model, samples) for model in self.models)

    def _error(self, state: WorkerState, model: Path | None, samples: Sequence[Feed]) -> OutputError:
        part = self.comparison.part
        if model is None:
            same = cached_reference(state, self.comparison.reference)
            return self.comparison.error(state, same if part is None else same[part.start : part.stop])
        state.enter(Stage.BUILD)
        side_by_side = self.comparison.side_by_side(len(samples))
        options = SessionOptions(self.comparison.provider, timing=False, threads=side_by_side.threads)
        session = state.transient(partial(open_session, model, options))
        state.enter(Stage.RUN)
        return self.comparison.error(
            state, outputs_of(session.run, samples, self.comparison.scoring.rollout, side_by_side.run)
        )


@dataclass(frozen=True)
class SwitchedErrorsJob:
    """Run a switched emulation (``mptune.graph.writing.switched``) over the samples once for each plan."""

    model: Path
    head: Path | None
    """The FP32 model that computes the values that ``model`` starts from; None where it starts with the inputs."""
    plans: tuple[frozenset[str], ...]
    switches: tuple[str, ...]
    comparison: Comparison
    slot: str | None = "switched"
    """Under which the session stays open in the worker for later jobs; another of the same slot closes it. None closes
    it at once."""

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        try:
            return self._errors(state, self.slot or "switched")
        finally:
            if self.slot is None:
                state.drop("switched")

    def _errors(self, state: WorkerState, slot: str) -> tuple[OutputError, ...]:
        every = cached_samples(state, self.comparison.samples)
        part = range(len(every)) if self.comparison.part is None else self.comparison.part
        samples: Sequence[Feed] = every[part.start : part.stop]
        if self.head is not None:
            key = (*file_identity(self.head), *file_identity(self.comparison.samples), self.comparison.provider)
            at_waists: dict[int, Outputs] = state.cached("waists", key, dict)
            new = [number for number in part if number not in at_waists]
            if new:
                values = self._at_waists(self.head, [every[number] for number in new])
                at_waists.update(zip(new, values, strict=True))
            samples = [{**every[number], **at_waists[number]} for number in part]
        side_by_side = self.comparison.side_by_side(len(samples) * len(self.plans))
        opened = (*file_identity(self.model), self.comparison.provider)
        session = state.cached(slot, opened, partial(self._open, self.model, side_by_side))
        wanted = session.inputs.keys() - set(self.switches)
        feeds = [{name: value for name, value in sample.items() if name in wanted} for sample in samples]
        state.enter(Stage.RUN)
        threads = session.options.threads
        if self.comparison.provider != "cpu":
            replayed = ([session.replay(run) for run in self._runs(feeds, on)] for on in self.plans)
            return tuple(self.comparison.error(state, outputs) for outputs in replayed)
        runs = [partial(session.run, run) for on in self.plans for run in self._runs(feeds, on)]
        runs[-1] = partial(runs[-1], gives_back=True)
        at_once = SideBySide() if threads is None else SideBySide.of(len(runs), self.comparison.run_bytes, threads)
        outputs = at_once.run(runs)
        starts = range(0, len(outputs), len(feeds))
        return tuple(self.comparison.error(state, outputs[start : start + len(feeds)]) for start in starts)

    def _runs(self, feeds: Sequence[Feed], on: frozenset[str]) -> list[Feed]:
        switches = {name: _ON if name in on else _OFF for name in self.switches}
        return [{**feed, **switches} for feed in feeds]

    def _open(self, model: Path, side_by_side: SideBySide) -> OrtSession:
        # A switched model has several times as many nodes: to plan which of them share buffers would take longest. And
        # its epsilons are switched, too.
        is_cuda = self.comparison.provider == "cuda"
        options = SessionOptions(
            self.comparison.provider,
            timing=is_cuda,
            reuses_buffers=not is_cuda,
            fuses_norms=False,
            threads=side_by_side.threads,
        )
        return open_session(model, options)

    def _at_waists(self, head: Path, samples: Sequence[Feed]) -> tuple[Outputs, ...]:
        side_by_side = self.comparison.side_by_side(len(samples))
        session = self._open(head, side_by_side)
        try:
            names = session.inputs.keys()
            feeds = [{name: value for name, value in sample.items() if name in names} for sample in samples]
            return tuple(side_by_side.run([partial(session.run, feed) for feed in feeds]))
        finally:
            session.close()
