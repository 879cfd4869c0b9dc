"""The jobs that open a candidate, take its error, and time it in turn with the FP32 baseline, which stays open."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mptune.data.samples import outputs_of
from mptune.engines.base import Engine, EngineSession, Measurement, Stage
from mptune.engines.cuda import runtime as cuda
from mptune.engines.environment import process_warnings, read_gpus, state_warnings
from mptune.engines.jobs.samples import Scoring, cached_samples, file_identity
from mptune.engines.timing.latency import Latency, Repetitions, Stopwatch, calibrate, monotonic_ms, time_in_turn
from mptune.engines.timing.spread import Enough, SessionTiming
from mptune.processes.child import WorkerState
from mptune.settings import LatencySettings
from mptune.targets.detect import Throttling, read_power_mode, read_throttling, throttling_warnings
from mptune.targets.target import EngineMemory

STATE_AGE_S = 10.0
"""The state of the GPUs is read once in this time: nvidia-smi takes 77 ms on an H200, as long as a timing."""


def gpu_warnings(state: WorkerState) -> tuple[str, ...]:
    """Warnings about throttling, clocks that fell since the first reading, and other processes."""

    def read() -> tuple[str, ...]:
        gpus = read_gpus()
        first = state.cached("first state of the gpus", "", lambda: {gpu.index: gpu for gpu in gpus})
        states = [text for gpu in gpus for text in state_warnings(gpu, first.get(gpu.index))]
        return (*states, *process_warnings())

    return state.cached("state of the gpus", int(time.monotonic() / STATE_AGE_S), read)


@dataclass(frozen=True)
class Baseline:
    """The session of the baseline that stays open in a worker."""

    session: EngineSession
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Of this session, unique: what was timed beside it shares what is particular to it."""

    def close(self) -> None:
        self.session.close()

    def beside(self, latencies: Sequence[Latency]) -> tuple[Latency, Latency]:
        """The latencies of the baseline and of a candidate, timed in turn: the latter knows this session."""
        before, latency = latencies
        timing = SessionTiming.of_values(self.name, latency.raw_ms, before.raw_ms)
        return before, replace(latency, session=timing)


@dataclass(frozen=True)
class MeasureResult:
    """The result of ``MeasureJob``."""

    measurement: Measurement  # not corrected for drift; ``build_s`` is the time to open the engine
    baseline: Latency
    repetitions: Repetitions
    objective: float = math.nan
    """The error by the metric of the search, without outputs that are ignored; NaN where there is none."""


@dataclass(frozen=True)
class MeasureJob:
    """Open a candidate, compute its outputs, and time it in turn with the FP32 baseline."""

    engine: Engine
    baseline: Engine
    scoring: Scoring
    timing_samples: Path
    """File whose first sample is timed: the same in every job, so that latencies compare whatever samples the error is
    taken on."""
    on_gpu: bool = False
    latency: LatencySettings = field(default_factory=LatencySettings)
    repetitions: Repetitions | None = None  # as frozen earlier; None calibrates them on the baseline
    enough: Enough = Enough()  # noqa: RUF009  it is frozen
    ignored: tuple[str, ...] = ()

    def run(self, state: WorkerState) -> MeasureResult:
        baseline = self.open_baseline(state)
        started = time.perf_counter()
        candidate = state.transient(self.engine.open)
        build_s = time.perf_counter() - started
        state.enter(Stage.RUN)
        outputs = outputs_of(candidate.run, self.scoring.feeds(state), self.scoring.rollout)
        error = self.scoring.error(state, outputs)
        counted, metric = error.without(self.ignored), self.scoring.metric
        enough = replace(self.enough, error=counted.value(metric) if counted.has(metric) else math.nan)

        state.enter(Stage.TIME)
        before = read_throttling() if self.on_gpu else None
        watches, repetitions = self.stopwatches(state, candidate, baseline)
        latencies = time_in_turn(watches, repetitions, self.latency, is_enough=enough.is_reached)
        baseline_latency, latency = baseline.beside(latencies)
        now = None if before is None else read_throttling()  # of a Jetson, right after the timing
        warnings = [*candidate.warnings, *baseline.session.warnings, *(gpu_warnings(state) if self.on_gpu else ())]
        if now is not None and before is not None:
            first: Throttling = state.cached("first jetson state", "", lambda: now)
            warnings += throttling_warnings(now, before, first)
        mode = read_power_mode() if self.on_gpu else None
        context_bytes = candidate.context_bytes
        measurement = Measurement(
            latency,
            baseline_latency,
            1.0,
            error,
            "measured",
            build_s,
            warnings=tuple(dict.fromkeys(warnings)),
            memory=None if context_bytes is None else EngineMemory(None, context_bytes, None, "measured"),
            # The multiprocessors are those that CUDA reports, where it does.
            power_mode=None if mode is None else replace(mode, sm_count=cuda.multiprocessors() or mode.sm_count),
        )
        return MeasureResult(measurement, baseline_latency, repetitions, enough.error)

    def open_baseline(self, state: WorkerState) -> Baseline:
        key = (*file_identity(self.baseline.path), self.baseline)
        return state.cached("baseline", key, lambda: Baseline(self.baseline.open()))

    def stopwatches(
        self, state: WorkerState, candidate: EngineSession, baseline: Baseline
    ) -> tuple[list[Stopwatch], Repetitions]:
        """Those of the baseline and of a candidate; and how often each runs, calibrated on the baseline."""
        feed = cached_samples(state, self.timing_samples)[0]
        watches = [session.stopwatch(feed) for session in (baseline.session, candidate)]
        return watches, self.repetitions or calibrate(watches[0].run_once, monotonic_ms, self.latency)


@dataclass(frozen=True)
class ReopenJob:
    """Open a candidate anew, again and again, and time each session in turn with the baseline's."""

    measure: MeasureJob
    count: int

    def run(self, state: WorkerState) -> tuple[SessionTiming, ...]:
        baseline = self.measure.open_baseline(state)
        timings = []
        for _ in range(self.count):
            state.enter(Stage.BUILD)
            candidate = state.transient(self.measure.engine.open)
            state.enter(Stage.TIME)
            watches, repetitions = self.measure.stopwatches(state, candidate, baseline)
            is_enough = self.measure.enough.is_reached
            latencies = time_in_turn(watches, repetitions, self.measure.latency, is_enough=is_enough)
            _, latency = baseline.beside(latencies)
            assert latency.session is not None
            timings.append(latency.session)
        return tuple(timings)
