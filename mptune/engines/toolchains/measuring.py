"""Measuring plans: the jobs that open candidates and time them in turn with the FP32 baseline, which stays open.

Opening one takes long where a network has convolutions: cuDNN compiles kernels, 2 to 4 s for the depthwise ones of a
ConvNeXt in FP16, by one thread of a process. So candidates may be opened ahead, each in a process of its own, while
nothing is timed. And ``Timings``, in the parent: what was timed on this device before decides what the next timing has
to show.
"""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.data.metrics.accuracy import OutputError
from mptune.data.samples import outputs_of
from mptune.engines import cuda
from mptune.engines.base import DRIFT_TEXT, Engine, EngineSession, Failure, Measurement, SampleSet, Stage
from mptune.engines.context import RunContext
from mptune.engines.environment import GpuState, process_warnings, read_gpus, state_warnings
from mptune.engines.latency import Repetitions, calibrate, monotonic_ms, time_in_turn
from mptune.engines.ort.cuda_session import load_libraries as load_libraries
from mptune.engines.ort.session import OrtSession
from mptune.engines.samples import Scoring, cached_samples, file_identity
from mptune.engines.spread import Enough, SessionTiming, Standings
from mptune.files import READ_ERRORS, read_json, write_json
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import JsonForm
from mptune.processes.child import TRANSIENT, WorkerState
from mptune.settings import LatencySettings
from mptune.targets import detect, target

if TYPE_CHECKING:
    from mptune.engines.backend import Builder, Built

DRIFT_WARNING = 0.1
"""A baseline whose latency has changed by more than this share since its first timing is a warning."""
_AHEAD = "opened ahead"  # what a worker holds of a candidate whose timing comes later
STATE_AGE_S = 10.0
"""The state of the GPUs is read once in this time: nvidia-smi, asked three times, takes longer than a timing."""


class GpuWatch:
    """Warnings about throttling, clocks that fell since the first reading, and other processes."""

    def __init__(self) -> None:
        self._first: dict[int, GpuState] | None = None
        self._read_s, self._warnings = -math.inf, tuple[str, ...]()

    def warnings(self) -> tuple[str, ...]:
        """Those of now, or of ``STATE_AGE_S`` ago at most."""
        if (now_s := time.monotonic()) - self._read_s >= STATE_AGE_S:
            gpus = read_gpus()
            first = self._first = self._first or {gpu.index: gpu for gpu in gpus}
            states = [text for gpu in gpus for text in state_warnings(gpu, first.get(gpu.index))]
            self._read_s, self._warnings = now_s, (*states, *process_warnings())
        return self._warnings


@dataclass(frozen=True)
class Baseline:
    """The session of the baseline that stays open in a worker."""

    session: EngineSession
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Of this session, unique: what was timed beside it shares what is particular to it."""

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class Candidate:
    """A candidate that is open."""

    session: EngineSession
    build_s: float  # that opening it took
    error: OutputError  # of its outputs

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class MeasureResult:
    """The result of ``MeasureJob``."""

    measurement: Measurement  # not corrected for drift; ``build_s`` is the time to open the engine
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
        baseline = self._baseline(state)
        candidate: Candidate | None = state.take(_AHEAD, self._key)
        if candidate is None:
            candidate = self._open(state)
        else:
            state.transient(lambda: candidate)
        counted, metric = candidate.error.without(self.ignored), self.scoring.metric
        enough = replace(self.enough, error=counted.value(metric) if counted.has(metric) else math.nan)
        state.enter(Stage.TIME)
        feed = cached_samples(state, self.timing_samples)[0]
        watches = [session.stopwatch(feed) for session in (baseline.session, candidate.session)]
        repetitions = self.repetitions or calibrate(watches[0].run_once, monotonic_ms, self.latency)
        before = detect.read_throttling() if self.on_gpu else None
        of_baseline, latency = time_in_turn(watches, repetitions, self.latency, is_enough=enough.is_reached)
        timing = SessionTiming.of_values(baseline.name, latency.raw_ms, of_baseline.raw_ms)
        now = None if before is None else detect.read_throttling()  # of a Jetson, right after the timing
        warnings = [*candidate.session.warnings, *baseline.session.warnings]
        if now is not None and before is not None:
            first: detect.Throttling = state.cached("first jetson state", "", lambda: now)
            warnings += detect.throttling_warnings(now, before, first)
        mode = detect.read_power_mode() if self.on_gpu else None
        context_bytes = candidate.session.context_bytes
        measurement = Measurement(
            replace(latency, session=timing),
            of_baseline,
            1.0,
            candidate.error,
            "measured",
            candidate.build_s,
            warnings=tuple(dict.fromkeys(warnings)),
            memory=None if context_bytes is None else target.EngineMemory(None, context_bytes, None, "measured"),
            # The multiprocessors are those that CUDA reports, where it does.
            power_mode=None if mode is None else replace(mode, sm_count=cuda.multiprocessors() or mode.sm_count),
        )
        return MeasureResult(measurement, repetitions, enough.error)

    def open_baseline(self, state: WorkerState) -> None:
        """Open the baseline, and run it."""
        self._baseline(state).session.stopwatch(cached_samples(state, self.timing_samples)[0])

    def open_ahead(self, state: WorkerState) -> None:
        """Open baseline and candidate, and take the error: ``run`` finds them here, and has the timing left to do."""
        self.open_baseline(state)
        candidate = self._open(state)
        state.take(TRANSIENT, self._key)
        state.cached(_AHEAD, self._key, lambda: candidate)

    @property
    def _key(self) -> tuple[Engine, Scoring]:
        return self.engine, self.scoring

    def _baseline(self, state: WorkerState) -> Baseline:
        key = (*file_identity(self.baseline.path), self.baseline)
        return state.cached("baseline", key, lambda: Baseline(self.baseline.open()))

    def _open(self, state: WorkerState) -> Candidate:
        """Open the candidate, for this job alone, and take its error."""
        started = time.perf_counter()
        session = state.cached(TRANSIENT, self._key, self.engine.open)
        build_s = time.perf_counter() - started
        state.enter(Stage.RUN)
        # What is timed gives the outputs, too: the captured graph, where there is one.
        run = (lambda feeds: session.replay(feeds, is_once=True)) if isinstance(session, OrtSession) else session.run
        outputs = outputs_of(run, self.scoring.feeds(state), self.scoring.rollout)
        state.enter(Stage.COMPARE)
        return Candidate(session, build_s, self.scoring.error(state, outputs))


@dataclass(frozen=True)
class OpenAheadJob:
    """Do what a measurement can do while nothing is timed."""

    measuring: MeasureJob
    is_baseline: bool = False  # open that alone

    def run(self, state: WorkerState) -> None:
        (self.measuring.open_baseline if self.is_baseline else self.measuring.open_ahead)(state)


@dataclass(frozen=True)
class TimingRecord(JsonForm):
    """Repetitions and baseline latency of the first timing, and what it was taken with."""

    repetitions: Repetitions
    baseline_ms: float
    settings: LatencySettings

    @classmethod
    def read(cls, path: Path, settings: LatencySettings) -> TimingRecord | None:
        """The record of an earlier process; None where there is none or its latency settings were others."""
        try:
            record = cls.from_json(read_json(path))
        except READ_ERRORS:
            return None
        return record if record.settings == settings else None


class Timings:
    """Makes the jobs that time plans of one run on one device, and corrects what they measured for drift."""

    def __init__(self, context: RunContext, builder: Builder, path: Path, *, on_gpu: bool) -> None:
        """``path`` is the file of the first timing, which later processes of the run go on from."""
        self._context, self._builder, self._path, self._on_gpu = context, builder, path, on_gpu
        self._record: TimingRecord | None = None
        self.standings = Standings()  # What was timed in this process tells how exact the next timing has to be.
        self._gpus = GpuWatch() if on_gpu else None

    def job(self, built: Built, plan: PrecisionPlan, which: SampleSet) -> MeasureJob | Failure:
        """The job for an engine; a failure where the baseline has none."""
        context, settings = self._context, self._context.settings
        baseline = self._builder.build(context.grouped.uniform(Precision.FP32), baseline=True)
        if isinstance(baseline, Failure):
            return baseline
        self._record = self._record or TimingRecord.read(self._path, settings.latency)
        return MeasureJob(
            engine=built.engine,
            baseline=baseline.engine,
            scoring=Scoring.in_run(context, which, plan),
            timing_samples=context.samples("search"),
            on_gpu=self._on_gpu,
            latency=settings.latency,
            repetitions=None if self._record is None else self._record.repetitions,
            enough=self.standings.enough(plan.fingerprint),
            ignored=settings.ignore,
        )

    def corrected(self, result: MeasureResult) -> Measurement:
        """What was measured, in terms of the baseline's first latency on this device; that freezes the repetitions."""
        baseline = result.measurement.baseline
        assert baseline is not None
        if self._record is None:
            self._record = TimingRecord(result.repetitions, baseline.median_ms, self._context.settings.latency)
            write_json(self._path, self._record.to_json())
        drift = self._record.baseline_ms / baseline.median_ms
        measurement = result.measurement.with_drift(drift)
        if self._gpus is not None:
            measurement = replace(measurement, warnings=(*measurement.warnings, *self._gpus.warnings()))
        if abs(drift - 1.0) <= DRIFT_WARNING:
            return measurement
        text = (
            f"{DRIFT_TEXT} {1 / drift:.2f} times as long as when it was first measured; latencies are"
            " corrected for it, but less exact: lock the clocks and close other programs"
        )
        return replace(measurement, warnings=(*measurement.warnings, text))
