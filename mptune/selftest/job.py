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
from mptune.engines.base import DescribesLayers, Engine, EngineSession, Stage
from mptune.engines.jobs.samples import cached_samples
from mptune.engines.timing.latency import Stopwatch
from mptune.engines.worker.child import WorkerState

SPAN_S = 0.06
"""How long the executions are together that both clocks time: long beside what a call costs."""
_SPANS = 3
_MOST_VALUES = 200


@dataclass(frozen=True)
class ClockReading:
    """The same executions by two clocks.

    Attributes:
        span_ratio: duration of many executions by the engine's clock, over that by the host's.
        value_ratio: latencies as a search takes them, added up, over the host's duration of taking them.
        executions: how many there were in a span.
    """

    span_ratio: float
    value_ratio: float
    latency_ms: float
    executions: int


@dataclass(frozen=True)
class EngineRun:
    """What ``RunEngineJob`` saw; the outputs are in its file."""

    open_s: float
    clock: ClockReading | None
    information: str
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
        information = session.information() if isinstance(session, DescribesLayers) else ""
        return EngineRun(open_s, clock, information, session.warnings)


def read_clocks(watch: Stopwatch) -> ClockReading:
    """Time executions by a stopwatch, and the calls by the host's clock."""
    for _ in range(3):
        watch.run_once()
    once_s = min(_seconds(watch.run_once) for _ in range(3))
    executions = max(3, round(SPAN_S / max(once_s, 1e-6)))
    spans = [_both(watch.span_ms, executions) for _ in range(_SPANS)]
    few = min(executions, _MOST_VALUES)
    values = [_both(watch.value_ms, few) for _ in range(_SPANS)]
    return ClockReading(
        float(np.median([device / host for device, host in spans])),
        float(np.median([device * few / host for device, host in values])),
        float(np.median([device for device, _ in values])),
        executions,
    )


def _both(time_ms: Callable[[int], float], executions: int) -> tuple[float, float]:
    """What a method of a stopwatch gives, and how many milliseconds its call takes on the host."""
    times_ms: list[float] = []
    host_s = _seconds(lambda: times_ms.append(time_ms(executions)))
    return times_ms[0], host_s * 1e3


def _seconds(call: Callable[[], object]) -> float:
    before = time.monotonic_ns()
    call()
    return (time.monotonic_ns() - before) / 1e9
