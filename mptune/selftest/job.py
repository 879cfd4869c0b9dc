"""The job of the self-test: open an engine as a search opens it, run it three times, and hold its clock to the host's.

The host's clock is read here by itself: a mistake in the one that latencies are taken with would not show otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mptune.data.archive import save_outputs
from mptune.engines.base import Engine, EngineSession, Stage
from mptune.engines.jobs.samples import cached_samples
from mptune.engines.timing.latency import Stopwatch
from mptune.processes.child import WorkerState

SPAN_S = 0.06
"""How long the executions are together that both clocks time: long beside what a call costs."""
_SPANS = 3
_MOST_VALUES = 200


@dataclass(frozen=True)
class ClockReading:
    """The same executions by two clocks.

    Attributes:
        span_ratio: duration of many executions by the engine's clock, over that by the host's.
        latency_ms: as a search takes it.
        executions: how many there were in a span.
    """

    span_ratio: float
    latency_ms: float
    executions: int


@dataclass(frozen=True)
class EngineRun:
    """What ``RunEngineJob`` saw; the outputs are in its file."""

    open_s: float
    clock: ClockReading | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class RunEngineJob:
    """Open an engine and run it: on the first sample, on the second, and on the first again.

    Attributes:
        timed: compare the clocks, too, between the second run and the third.
    """

    engine: Engine
    samples: Path
    outputs: Path
    timed: bool

    def run(self, state: WorkerState) -> EngineRun:
        """Run it three times on two samples; compare the clocks if ``timed``."""
        started = time.monotonic()
        session: EngineSession = state.transient(self.engine.open)
        open_s = time.monotonic() - started
        state.enter(Stage.RUN)
        first, second = cached_samples(state, self.samples)[:2]
        outputs = [session.run(first), session.run(second)]
        clock = None
        if self.timed:
            state.enter(Stage.TIME)
            clock = read_clocks(session.stopwatch(first))
            state.enter(Stage.RUN)
        outputs.append(session.run(first))
        save_outputs(self.outputs, outputs)
        return EngineRun(open_s, clock, session.warnings)


def read_clocks(watch: Stopwatch) -> ClockReading:
    """Time executions by a stopwatch, and the calls by the host's clock."""
    for _ in range(3):
        watch.run_once()
    once_s = min(_seconds(watch.run_once) for _ in range(3))
    executions = max(3, round(SPAN_S / max(once_s, 1e-6)))
    spans_ms: list[float] = []
    host_s = [_seconds(lambda: spans_ms.append(watch.span_ms(executions))) for _ in range(_SPANS)]
    ratio = float(np.median([span_ms / (1e3 * seconds) for span_ms, seconds in zip(spans_ms, host_s, strict=True)]))
    return ClockReading(ratio, watch.value_ms(min(executions, _MOST_VALUES)), executions)


def _seconds(call: Callable[[], object]) -> float:
    before = time.monotonic_ns()
    call()
    return (time.monotonic_ns() - before) / 1e9
