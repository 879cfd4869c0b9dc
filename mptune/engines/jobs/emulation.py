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
from mptune.engines.worker.child import WorkerState
from mptune.graph.loading.value_dependent import DependentOutput

_ON, _OFF = np.array(True), np.array(False)
"""Values of a switch; always the same arrays, so that a switch that stays as it was is not sent to the device again."""


@dataclass(frozen=True)
class ErrorsJob:
    """Run models over the same samples, one after another, and compare each with the reference.

    Attributes:
        models: the models; None stands for the untouched one, whose outputs are the reference: nothing is run.
    """

    models: tuple[Path | None, ...]
    samples: Path
    reference: Path
    provider: Provider
    metric: str = "relative_l2"
    part: range | None = None
    dependent: tuple[DependentOutput, ...] = ()
    scoring: Scoring = Scoring()  # noqa: RUF009  it is frozen
    run_bytes: int | None = None

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        samples = _of_part(cached_samples(state, self.samples), self._steps_of_part)
        return tuple(self._error(state, model, samples) for model in self.models)

    def _error(self, state: WorkerState, model: Path | None, samples: Sequence[Feed]) -> OutputError:
        if model is None:
            same = cached_reference(state, self.reference)
            return self._compared(state, same if self.part is None else same[self.part.start : self.part.stop])
        state.enter(Stage.BUILD)
        is_apart = self.provider == "cpu" and self.scoring.rollout is None  # a step of a rollout waits for the last one
        side_by_side = SideBySide.of(len(samples), self.run_bytes) if is_apart else SideBySide()
        options = SessionOptions(self.provider, timing=False, threads=side_by_side.threads)
        session = state.transient(partial(open_session, model, options))
        state.enter(Stage.RUN)
        return self._compared(state, outputs_of(session.run, samples, self.scoring.rollout, side_by_side.run))

    def _compared(self, state: WorkerState, outputs: Sequence[Outputs]) -> OutputError:
        start = _start(self.part)
        return output_error(state, outputs, self.reference, self.metric, self.dependent, start, self.scoring)

    @property
    def _steps_of_part(self) -> range | None:
        """The samples of a part: in a rollout each of its numbers is a sequence's."""
        if self.part is None or self.scoring.rollout is None:
            return self.part
        steps = self.scoring.rollout.steps
        return range(self.part.start * steps, self.part.stop * steps)


@dataclass(frozen=True)
class SwitchedErrorsJob:
    """Run a switched emulation (``mptune.graph.writing.switched``) over the samples once for each plan.

    Attributes:
        head: the FP32 model that computes the values that ``model`` starts from; None where it starts with the inputs.
        slot: under which the session stays open in the worker for later jobs; another of the same slot closes it. None
            closes it at once.
    """

    model: Path
    head: Path | None
    plans: tuple[frozenset[str], ...]
    switches: tuple[str, ...]
    samples: Path
    reference: Path
    provider: Provider
    metric: str = "relative_l2"
    part: range | None = None
    dependent: tuple[DependentOutput, ...] = ()
    scoring: Scoring = Scoring()  # noqa: RUF009  it is frozen
    run_bytes: int | None = None
    slot: str | None = "switched"

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        try:
            return self._errors(state, self.slot or "switched")
        finally:
            if self.slot is None:
                state.drop("switched")

    def _errors(self, state: WorkerState, slot: str) -> tuple[OutputError, ...]:
        samples: Sequence[Feed] = cached_samples(state, self.samples)
        part = range(len(samples)) if self.part is None else self.part
        if self.head is not None:
            key = (*file_identity(self.head), *file_identity(self.samples), self.provider)
            known: dict[int, Outputs] = state.cached("waists", key, dict)
            new = [number for number in part if number not in known]
            if new:
                known.update(zip(new, self._at_waists(self.head, [samples[number] for number in new]), strict=True))
            samples = [{**samples[number], **known[number]} for number in part]
        else:
            samples = _of_part(samples, part)
        side_by_side = self._side_by_side(len(samples) * len(self.plans))
        opened = (*file_identity(self.model), self.provider)
        session = state.cached(slot, opened, partial(self._open, self.model, side_by_side))
        wanted = session.inputs.keys() - set(self.switches)
        feeds = [{name: value for name, value in sample.items() if name in wanted} for sample in samples]
        state.enter(Stage.RUN)
        threads = session.options.threads
        if threads is None:
            errors = (self._compare(state, [session.replay(run) for run in self._runs(feeds, on)]) for on in self.plans)
            return tuple(errors)
        runs = [partial(session.run, run) for on in self.plans for run in self._runs(feeds, on)]
        outputs = SideBySide.of(len(runs), self.run_bytes, threads).run(runs)
        starts = range(0, len(outputs), len(feeds))
        return tuple(self._compare(state, outputs[start : start + len(feeds)]) for start in starts)

    def _side_by_side(self, runs: int) -> SideBySide:
        return SideBySide.of(runs, self.run_bytes) if self.provider == "cpu" else SideBySide()

    def _runs(self, feeds: Sequence[Feed], on: frozenset[str]) -> list[Feed]:
        switches = {name: _ON if name in on else _OFF for name in self.switches}
        return [{**feed, **switches} for feed in feeds]

    def _compare(self, state: WorkerState, outputs: Sequence[Outputs]) -> OutputError:
        start = _start(self.part)
        return output_error(state, outputs, self.reference, self.metric, self.dependent, start, self.scoring)

    def _open(self, model: Path, side_by_side: SideBySide) -> OrtSession:
        # A switched model has several times as many nodes: to plan which of them share buffers would take longest. And
        # its epsilons are switched, too.
        is_cuda = self.provider == "cuda"
        options = SessionOptions(
            self.provider,
            timing=is_cuda,
            reuses_buffers=not is_cuda,
            fuses_norms=False,
            threads=side_by_side.threads,
        )
        return open_session(model, options)

    def _at_waists(self, head: Path, samples: Sequence[Feed]) -> tuple[Outputs, ...]:
        side_by_side = self._side_by_side(len(samples))
        session = self._open(head, side_by_side)
        try:
            names = session.inputs.keys()
            feeds = [{name: value for name, value in sample.items() if name in names} for sample in samples]
            return tuple(side_by_side.run([partial(session.run, feed) for feed in feeds]))
        finally:
            session.close()


def _of_part(samples: Sequence[Feed], part: range | None) -> Sequence[Feed]:
    return samples if part is None else samples[part.start : part.stop]


def _start(part: range | None) -> int:
    return 0 if part is None else part.start
