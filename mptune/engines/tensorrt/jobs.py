"""The jobs of TensorRT in the worker: load, parse, build, profile, and run an engine file."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.engines.cuda import runtime as cuda
from mptune.engines.jobs.samples import cached_samples
from mptune.engines.tensorrt.builder import BuildObjects, BuildOptions, build_engine, parse_network
from mptune.engines.tensorrt.failures import construct
from mptune.engines.tensorrt.layers import LayerTime, layer_times, profiler_class, read_layers
from mptune.engines.tensorrt.library import Kind, install_line, load_library, open_log
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.files import whole_file
from mptune.processes.child import WorkerState
from mptune.targets.detect import detect_gpus

PROFILED_RUNS, UNTIMED_RUNS = 20, 5
"""Executions that a profile averages over, without the longest; warm-up executions before these."""
_OPEN_SESSIONS = ("baseline", "switched 0")
"""What stays open in the worker from job to job and holds memory of the device."""


@dataclass(frozen=True)
class LibraryReport:
    """The result of ``LibraryJob``."""

    version: str
    warnings: tuple[str, ...] = ()
    cuda_obstacle: str | None = None  # why no GPU can be used, and the command that cures it, where one does


@dataclass(frozen=True)
class LibraryJob:
    """Check that a library loads, in a supported version, and makes a builder; one of TensorRT needs a GPU for it."""

    kind: Kind

    def run(self, state: WorkerState) -> LibraryReport:
        library = load_library(self.kind)
        obstacle = cuda.unavailable_reason()
        if obstacle is None or library.is_rtx:
            log = open_log(library.trt)
            try:
                construct(lambda: library.trt.Builder(log), log)
            except EngineError as error:
                if library.is_rtx:
                    raise
                cure = f": {install_line(self.kind, detect_gpus())}" if error.kind is FailureKind.DRIVER else ""
                obstacle = f"it makes no builder ({error.message}){cure}"
        return LibraryReport(library.version, library.warnings, obstacle)


@dataclass(frozen=True)
class ParseJob:
    """Parse a model with TensorRT or TensorRT-RTX."""

    kind: Kind
    model: Path
    plugins: tuple[Path, ...] = ()

    def run(self, state: WorkerState) -> None:
        """Raises EngineError: the parser does not take it."""
        parse_network(load_library(self.kind, self.plugins), self.model, state.transient(BuildObjects))


@dataclass(frozen=True)
class BuildJob:
    """Build the engine of a typed model and write it to a file, whole or not at all."""

    model: Path
    engine_path: Path
    options: BuildOptions
    samples: tuple[Path, ...]
    """Files of samples whose shapes the engine must take; it is tuned for the first sample of the first."""
    timeout_s: float
    alone: bool = False
    """Close the sessions that stay open in the worker before the build. Where CPU and GPU share their memory, TensorRT
    would skip tactics in some builds and not in others, by what is open."""

    def run(self, state: WorkerState) -> tuple[float, tuple[str, ...]]:
        """Returns the seconds that it took, and warnings."""
        for slot in _OPEN_SESSIONS if self.alone else ():
            state.drop(slot)
        library = load_library(self.options.kind, self.options.plugins)
        samples = [sample for path in self.samples for sample in cached_samples(state, path)]
        objects = state.transient(BuildObjects)  # Freed once the answer is sent.
        started, limit_s = time.perf_counter(), self.timeout_s
        engine, warnings = build_engine(
            library, self.model, self.options, samples, timeout_s=limit_s, report=state.report, objects=objects
        )
        build_s = time.perf_counter() - started
        with whole_file(self.engine_path) as partial_path:
            partial_path.write_bytes(engine)
        return build_s, warnings


@dataclass(frozen=True)
class TensorRtEngine:
    """An engine file. Implements ``Engine``."""

    path: Path
    options: EngineOptions

    def open(self) -> TensorRtSession:
        return TensorRtSession(self.path, self.options)


@dataclass(frozen=True)
class EngineProfileJob:
    """Take the layer times of an engine file in a session of its own, since the one that is timed has a CUDA graph."""

    built: TensorRtEngine
    samples: Path

    def run(self, state: WorkerState) -> tuple[LayerTime, ...]:
        feed = cached_samples(state, self.samples)[0]
        options = replace(self.built.options, cuda_graph=False)
        session = state.transient(partial(TensorRtSession, self.built.path, options))
        state.enter(Stage.TIME)
        profiler = profiler_class(session.library.trt)()
        session.attach(profiler)
        watch = session.stopwatch(feed)
        for _ in range(UNTIMED_RUNS):
            watch.run_once()
        for _ in range(PROFILED_RUNS):
            profiler.start_execution()
            watch.run_once()
        return layer_times(profiler.executions, read_layers(session.information()))
