"""The jobs that load TensorRT, parse, and build engines of typed ONNX models, with a timing cache that a run shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import filelock
import numpy as np

from mptune.engines.base import EngineError, FailureKind, Progress
from mptune.engines.ort.cuda_session import PROBE_TIMEOUT_S
from mptune.engines.samples import Feed, cached_samples
from mptune.engines.tensorrt import library as tensorrt
from mptune.engines.tensorrt.library import Kind, Library, collector_paused
from mptune.errors import SettingsError
from mptune.files import whole_file
from mptune.processes.child import WorkerState
from mptune.processes.parent import run_once
from mptune.settings import ShapeRange, TensorRtSettings

_LOCK_TIMEOUT_S = 60.0
_LOCK_ERRORS = (OSError, filelock.Timeout)
_REPORT_EVERY_S = 0.25
_OPEN_SESSIONS = ("baseline", "switched 0")
"""What stays open in the worker from job to job and holds memory of the device."""
AVERAGED_TIMINGS = 8
"""Timings of a tactic that are averaged: trtexec's (``defaultAvgTiming``, sampleOptions.h); Python's default is 1."""


class BuildObjects(list[Any]):
    """TensorRT's objects of one build: they live until ``close``, since a crash as they are freed costs the result."""

    def close(self) -> None:
        with collector_paused():
            while self:
                self.pop()


@contextmanager
def _locked(path: Path) -> Iterator[bytes]:
    """Hold the lock of a file that the processes of a run share, to read and to write; yields what it holds."""
    with filelock.FileLock(path.with_name(path.name + ".lock"), timeout=_LOCK_TIMEOUT_S):
        yield path.read_bytes() if path.exists() else b""


def attach_timing_cache(path: Path, config: Any, objects: BuildObjects) -> None:
    """Load the run's timing cache; an empty one where the file is damaged, or of another version or GPU."""
    content = b""
    with suppress(*_LOCK_ERRORS), _locked(path) as written:
        content = written
    for serialized in (content, b""):
        timing_cache = config.create_timing_cache(serialized)
        objects.append(timing_cache)  # The configuration does not own it.
        if timing_cache is not None and config.set_timing_cache(timing_cache, ignore_mismatch=False):
            return


def save_timing_cache(path: Path, config: Any) -> None:
    """Write the timing cache, merged with what other processes have written meanwhile; where that works."""
    timing_cache = config.get_timing_cache()
    with suppress(*_LOCK_ERRORS), _locked(path) as content:
        written = config.create_timing_cache(content) if content and timing_cache is not None else None
        if written is not None:
            timing_cache.combine(written, ignore_mismatch=False)
        if timing_cache is not None:
            with whole_file(path) as partial:
                partial.write_bytes(bytes(memoryview(timing_cache.serialize())))


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built."""

    kind: Kind
    tf32: bool = False
    capabilities: tuple[tuple[int, int], ...] = ()
    """Compute capabilities that TensorRT-RTX builds for; TensorRT always builds for the GPU here."""
    shapes: tuple[ShapeRange, ...] = ()
    settings: TensorRtSettings = field(default_factory=TensorRtSettings)
    timing_cache: Path | None = None
    plugins: tuple[Path, ...] = ()  # libraries with plugins of the user's


@collector_paused()
def build_engine(
    library: Library,
    model: Path,
    options: BuildOptions,
    samples: Sequence[Feed],
    *,
    timeout_s: float = math.inf,
    report: Callable[[Progress], None] | None = None,
    objects: BuildObjects | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Parse a typed model as a strongly typed network and build it.

    The engine takes the shapes of all samples and is tuned for those of the first. After ``timeout_s`` TensorRT is
    asked to stop; it checks between steps only, so that the caller needs a deadline of its own. Returns the engine
    (TensorRT's ``IHostMemory``, which has the buffer protocol), and warnings.
    """
    objects = BuildObjects() if objects is None else objects
    builder, network, _ = parse_network(library, model, objects)
    log = objects[0]
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    objects += [config, profile]
    _configure(library, config, options)
    if _fill_profile(network, profile, samples, options.shapes) and config.add_optimization_profile(profile) < 0:
        raise tensorrt.build_failure(log, "TensorRT refuses the optimization profile")
    # TensorRT-RTX times nothing, and its timing cache would need a GPU.
    cache_file = None if library.is_rtx else options.timing_cache
    if cache_file is not None:
        attach_timing_cache(cache_file, config, objects)
    monitor = _monitor_class(library.trt)(monotonic() + timeout_s, report)
    config.progress_monitor = monitor
    memory = builder.build_serialized_network(network, config)
    objects += [monitor, memory]
    if monitor.cancelled:
        raise EngineError(FailureKind.TIMEOUT, f"no engine after {timeout_s:g} s: the build was cancelled")
    if memory is None or not memory.nbytes:
        raise tensorrt.build_failure(log)
    if cache_file is not None:
        save_timing_cache(cache_file, config)
    return memory, (*library.warnings, *tensorrt.skipped_tactics(log.warnings))


@collector_paused()
def parse_network(library: Library, model: Path, objects: BuildObjects | None = None) -> tuple[Any, Any, Any]:
    """Parse a typed model: builder, network, and parser, which holds its weights; ``objects`` has the log first."""
    import onnx

    trt = library.trt
    objects = BuildObjects() if objects is None else objects
    log = tensorrt.open_log(trt)
    builder = tensorrt.construct(lambda: trt.Builder(log), log)
    objects += [log, builder]
    # TensorRT 11 has no other networks: it accepts the flag and ignores it.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    objects += [network, parser]
    if not parser.parse_from_file(str(model)):
        complaints = []
        for position in range(parser.num_errors):
            parser_error = parser.get_error(position)
            # Of an attribute that it does not support it names no node, but its function is called by the operator.
            importer = str(parser_error.func() or "").removeprefix("import")
            operator = parser_error.node_operator() or (importer if onnx.defs.has(importer) else "")
            words, node = parser_error.desc() or "", parser_error.node_name() or ""
            complaints.append((parser_error.code().name, words, node, operator))
        raise tensorrt.parser_failure(complaints, log)
    return builder, network, parser


def _configure(library: Library, config: Any, options: BuildOptions) -> None:
    trt, settings = library.trt, options.settings
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # Otherwise the inspector gives no types.
    config.builder_optimization_level = settings.optimization_level
    config.avg_timing_iterations = AVERAGED_TIMINGS
    if settings.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_mb << 20)
    if library.is_rtx and options.capabilities:
        config.num_compute_capabilities = len(options.capabilities)
        for position, capability in enumerate(options.capabilities):
            value = getattr(trt.ComputeCapability, tensorrt.AHEAD_OF_TIME.get(capability, ""), None)
            if value is None or not config.set_compute_capability(value, position):
                number = ".".join(map(str, capability))
                message = f"TensorRT-RTX {library.version} builds no engines for compute capability {number}"
                raise EngineError(FailureKind.UNSUPPORTED, message)


def _fill_profile(network: Any, profile: Any, samples: Sequence[Feed], shapes: Sequence[ShapeRange]) -> bool:
    """Set the shapes of dynamic inputs, and the values of inputs that are shapes; returns whether there are any.

    Smallest and largest are those of all samples, the usual one is the first sample's; the user's shapes go before.
    """
    given = {shape.name: shape for shape in shapes}
    dynamic: dict[str, str] = {}
    has_values = False
    for position in range(network.num_inputs):
        tensor = network.get_input(position)
        name, declared = tensor.name, tuple(tensor.shape)
        if any(name not in sample for sample in samples):
            message = (
                f"TensorRT calls an input {name!r}, which the model does not have: remove it from the model's outputs"
            )
            raise EngineError(FailureKind.UNSUPPORTED, message)
        arrays = [np.asarray(sample[name]) for sample in samples]
        if tensor.is_shape_tensor:
            values = [array.ravel() for array in arrays]
            try:  # Floats raise a TypeError; so do large numbers before 10.11, whose pyCore.cpp takes 32 bits.
                if values[0].dtype.kind not in "iu":
                    raise TypeError
                usual, smallest, largest = _range(values)
                profile.set_shape_input(name, smallest, usual, largest)
            except (TypeError, OverflowError) as error:
                most = max(abs(value).max(initial=0) for value in values)
                message = (
                    f"input {name!r} decides a shape and holds {most} ({values[0].dtype}): TensorRT takes whole"
                    f" numbers there, before 10.11 of at most {np.iinfo(np.int32).max}"
                )
                raise EngineError(FailureKind.UNSUPPORTED, message) from error
            has_values = True
        if -1 not in declared:
            continue
        dynamic[name] = _text(declared)
        usual, smallest, largest = _range([np.array(array.shape) for array in arrays])
        if name in given:
            shape = given[name]
            bounds = list(zip(shape.smallest, shape.largest, strict=True))
            pairs = zip(declared, bounds, strict=False)
            if len(bounds) != len(declared) or any(size != -1 and pair != (size, size) for size, pair in pairs):
                message = f"{name}: {_text(shape.largest)} does not fit the input's shape {dynamic[name]}"
                raise SettingsError(message, "give every dimension, the fixed ones as they are", setting="shapes")
            if any(
                low < least or most > high for low, most, (least, high) in zip(smallest, largest, bounds, strict=True)
            ):
                held = f"{name}: the data hold shapes from {_text(smallest)} to {_text(largest)}"
                hint = "widen the range, or give data of the shapes that you will deploy"
                raise SettingsError(f"{held}, which is out of range", hint, setting="shapes")
            smallest, usual, largest = shape.smallest, shape.usual, shape.largest
        profile.set_shape(name, smallest, usual, largest)
    unknown = sorted(set(given) - set(dynamic))
    if unknown:
        names = ", ".join(f"{name} ({shape})" for name, shape in dynamic.items()) or "none"
        message = f"names {unknown[0]!r}, which is no dynamic input"
        raise SettingsError(message, f"dynamic inputs: {names}", setting="shapes")
    return has_values or bool(dynamic)


def _range(arrays: Sequence[np.ndarray]) -> tuple[tuple[int, ...], ...]:
    """First, smallest and largest of integer arrays, element by element."""
    stacked = np.stack(arrays)
    return tuple(tuple(map(int, row)) for row in (stacked[0], stacked.min(axis=0), stacked.max(axis=0)))


def _text(shape: Sequence[int]) -> str:
    return "x".join("?" if size < 0 else str(size) for size in shape)


@cache
def _monitor_class(trt: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Reports the two outermost phases and stops the build at the deadline; called from several threads."""

        def __init__(self, deadline: float, report: Callable[[Progress], None] | None) -> None:
            super().__init__()
            self.cancelled = False
            self._deadline = deadline
            self._report = report
            self._steps: dict[str, int] = {}
            self._outermost: set[str] = set()
            self._reported = -math.inf

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._outermost.add(phase_name)
            if parent_phase is None or parent_phase in self._outermost:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            now = monotonic()
            if now >= self._deadline:
                self.cancelled = True
                return False
            steps = self._steps.get(phase_name)
            if self._report is not None and steps and now - self._reported >= _REPORT_EVERY_S:
                self._reported = now
                self._report(Progress(phase_name, step + 1, steps))
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor


@dataclass(frozen=True)
class ParseJob:
    """Parse a model with TensorRT or TensorRT-RTX."""

    kind: Kind
    model: Path
    plugins: tuple[Path, ...] = ()

    def run(self, state: WorkerState) -> None:
        """Raises EngineError: the parser does not take it."""
        parse_network(tensorrt.load_library(self.kind, self.plugins), self.model, state.transient(BuildObjects))


def parser_complaint(kind: Kind, model: Path, plugins: tuple[Path, ...]) -> str | None:
    """Why the parser does not take a model, by a worker of its own; None where it does."""
    return run_once(ParseJob(kind, model, plugins), PROBE_TIMEOUT_S)


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
        library = tensorrt.load_library(self.options.kind, self.options.plugins)
        samples = [sample for path in self.samples for sample in cached_samples(state, path)]
        objects = state.transient(BuildObjects)  # Freed once the answer is sent.
        started = perf_counter()
        engine, warnings = build_engine(
            library, self.model, self.options, samples, timeout_s=self.timeout_s, report=state.report, objects=objects
        )
        build_s = perf_counter() - started
        with whole_file(self.engine_path) as partial_path:
            partial_path.write_bytes(engine)
        return build_s, warnings
