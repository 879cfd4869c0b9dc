"""Jobs that run emulations of plans over samples and compare their outputs with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.data.samples import outputs_of
from mptune.engines.base import Stage
from mptune.engines.jobs.samples import Scoring, file_identity
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import Provider, SessionOptions, SideBySide
from mptune.processes.child import WorkerState

_ON, _OFF = np.array(True), np.array(False)
"""Values of a switch; always the same arrays, so that a switch that stays as it was is not sent to the device again."""


@dataclass(frozen=True)
class ErrorsJob:
    """Run models over the same samples, one after another, and compare each with the reference."""

    models: tuple[Path | None, ...]
    """The models; None stands for the untouched one, whose outputs are the reference: nothing is run."""
    scoring: Scoring
    provider: Provider = "cpu"
    run_bytes: int | None = None
    """Memory that one run takes about on a CPU, bytes; None where runs go one by one."""

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        scoring, samples = self.scoring, self.scoring.feeds(state)
        # A step of a rollout waits for the last one.
        side_by_side = SideBySide.for_runs(len(samples) if scoring.rollout is None else 1, self.run_bytes)
        options = SessionOptions(self.provider, threads=side_by_side.threads)
        errors = []
        for model in self.models:
            if model is None:
                outputs = scoring.wanted(state)
            else:
                state.enter(Stage.BUILD)
                session = state.transient(partial(open_session, model, options))
                state.enter(Stage.RUN)
                outputs = outputs_of(session.run, samples, scoring.rollout, side_by_side.run)
            errors.append(scoring.error(state, outputs))
        return tuple(errors)


@dataclass(frozen=True)
class SwitchedErrorsJob:
    """Run a switched emulation (``mptune.graph.writing.emulate``) over the samples once for each plan."""

    model: Path
    plans: tuple[frozenset[str], ...]  # the switches that are on
    switches: tuple[str, ...]
    scoring: Scoring
    provider: Provider = "cpu"
    run_bytes: int | None = None
    slot: str | None = "switched"
    """Under which the session stays open in the worker for later jobs; another of the same slot closes it. None closes
    it with this job."""

    def run(self, state: WorkerState) -> tuple[OutputError, ...]:
        scoring = self.scoring
        samples = scoring.feeds(state)
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
            return tuple(scoring.error(state, [session.replay(feed) for feed in plan]) for plan in runs)
        calls = [partial(session.run, feed) for plan in runs for feed in plan]
        calls[-1] = partial(calls[-1], gives_back=True)
        threads = session.options.threads  # of the session that was open already, perhaps
        at_once = SideBySide() if threads is None else SideBySide.for_runs(len(calls), self.run_bytes, threads)
        outputs = at_once.run(calls)
        starts = range(0, len(outputs), len(feeds))
        return tuple(scoring.error(state, outputs[start : start + len(feeds)]) for start in starts)
