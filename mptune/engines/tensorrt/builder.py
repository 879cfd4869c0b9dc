"""Builds engines from typed ONNX models, with caches that the processes of a run share under a lock."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from mptune.engines.base import EngineError, FailureKind, Progress
from mptune.engines.jobs.samples import Feed
from mptune.engines.tensorrt.library import (
    AHEAD_OF_TIME,
    Kind,
    Library,
    ParserComplaint,
    build_failure,
    collector_paused,
    made,
    open_log,
    parser_failure,
    skipped_tactics,
)
from mptune.errors import SettingsError
from mptune.files import whole_file
from mptune.settings import ShapeRange, TensorRtSettings

_LOCK_TIMEOUT_S = 60.0


class TimingCache:
    """A timing cache in a file. The lock is held to read and to write, not while an engine is built.

    A file that cannot be used (damaged, or of another version or GPU) is replaced by a fresh one, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = filelock.FileLock(path.with_name(path.name + ".lock"), timeout=_LOCK_TIMEOUT_S)
        self._seen = b""
        self._attached: Any = None

    def attach(self, config: Any, log: Any) -> list[str]:
        """Load the file into a builder's configuration."""
        try:
            self._seen = self._read()
        except (OSError, filelock.Timeout) as error:
            return [f"no timing cache ({error}): builds take longer; make {self._path} readable"]
        warned = len(log.warnings)
        timing_cache = config.create_timing_cache(self._seen)
        damaged = any("timing cache" in text.lower() for text in log.warnings[warned:])
        problem = "is damaged" if damaged or timing_cache is None else ""
        if not problem and not config.set_timing_cache(timing_cache, ignore_mismatch=False):
            problem = "was written by another version of TensorRT or on another GPU"
        self._attached = timing_cache  # The configuration does not own it.
        if not problem:
            return []
        self._attached = config.create_timing_cache(b"")
        config.set_timing_cache(self._attached, ignore_mismatch=False)
        return [f"the timing cache {problem}: it was replaced by an empty one, nothing is to be done ({self._path})"]

    def save(self, config: Any) -> list[str]:
        """Write the cache, merged with what other processes have written meanwhile."""
        timing_cache = config.get_timing_cache()
        if timing_cache is None:
            return []
        try:
            with self._lock:
                written = self._path.read_bytes() if self._path.exists() else b""
                if written != self._seen:
                    timing_cache.combine(config.create_timing_cache(written), ignore_mismatch=False)
                with whole_file(self._path) as partial:
                    partial.write_bytes(bytes(memoryview(timing_cache.serialize())))
        except (OSError, filelock.Timeout) as error:
            return [f"the timing cache could not be written ({error}): later builds take longer; free some space"]
        return []

    def _read(self) -> bytes:
        with self._lock:
            return self._path.read_bytes() if self._path.exists() else b""


class RuntimeCache:
    """The kernels that TensorRT-RTX has compiled for this GPU, for all engines of a run.

    Several sessions are open at a time, each with a cache of its own that began with what the file held then; the
    largest is kept. Where writing fails, kernels are compiled again.
    """

    def __init__(self, path: Path, runtime_config: Any) -> None:
        """Load the file into the configuration of a new context."""
        self._path = path
        self._lock = filelock.FileLock(path.with_name(path.name + ".lock"), timeout=_LOCK_TIMEOUT_S)
        self._runtime_cache: Any = runtime_config.create_runtime_cache()
        self._rejected = b""
        with contextlib.suppress(OSError, filelock.Timeout), self._lock:
            written = self._read()
            if written and not self._runtime_cache.deserialize(written):  # of another GPU or version
                self._rejected = written
        runtime_config.set_runtime_cache(self._runtime_cache)

    def save(self) -> None:
        """Write the kernels."""
        with contextlib.suppress(OSError, filelock.Timeout), self._lock:
            kernels, written = bytes(memoryview(self._runtime_cache.serialize())), self._read()
            if written == self._rejected or len(kernels) > len(written):
                with whole_file(self._path) as partial:
                    partial.write_bytes(kernels)

    def close(self) -> None:
        """Write the kernels and let go of the cache."""
        self.save()
        self._runtime_cache = None

    def _read(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""


_MIB = 1 << 20
AVERAGED_TIMINGS = 8
"""Timings of a tactic that are averaged: trtexec's (``defaultAvgTiming``, sampleOptions.h); Python's default is 1."""
_REPORT_EVERY_S = 0.25


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
    plugins: tuple[Path, ...] = ()
    """Libraries with plugins of the user's."""


@dataclass(frozen=True)
class BuiltEngine:
    """A serialised engine."""

    memory: Any
    """TensorRT's ``IHostMemory``; it has the buffer protocol."""
    warnings: tuple[str, ...] = ()


class BuildObjects(list[Any]):
    """TensorRT's objects of one build: they live until ``close``, since a crash as they are freed costs the result."""

    def close(self) -> None:
        """Free them in reverse order, an object before what it was made with."""
        with collector_paused():
            while self:
                self.pop()


@collector_paused()
def build_engine(
    library: Library,
    model: Path,
    options: BuildOptions,
    samples: Sequence[Feed],
    *,
    timeout_s: float = math.inf,
    report: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    objects: BuildObjects | None = None,
) -> BuiltEngine:
    """Parse a typed model as a strongly typed network and build it.

    The engine takes the shapes of all samples and is tuned for those of the first. After ``timeout_s`` TensorRT is
    asked to stop; it checks between steps only, so that the caller needs a deadline of its own.
    """
    trt = library.trt
    log = open_log(trt)
    objects = BuildObjects() if objects is None else objects
    shared = None if options.timing_cache is None or library.is_rtx else TimingCache(options.timing_cache)
    builder, network, _ = parse_network(library, model, log, objects)
    _check_inputs(network, samples)
    config = builder.create_builder_config()
    objects.append(config)
    _configure(library, config, options)
    profile = builder.create_optimization_profile()
    objects.append(profile)
    if _fill_profile(network, profile, samples, options.shapes) and config.add_optimization_profile(profile) < 0:
        raise build_failure(log.errors, log.warnings, "TensorRT refuses the optimization profile")
    warnings = [] if shared is None else shared.attach(config, log)
    objects.append(shared)
    monitor = _monitor_class(trt)(clock() + timeout_s, report, clock)
    config.progress_monitor = monitor
    objects.append(monitor)
    memory = builder.build_serialized_network(network, config)
    objects.append(memory)
    if monitor.cancelled:
        raise EngineError(FailureKind.TIMEOUT, f"no engine after {timeout_s:g} s: the build was cancelled")
    if memory is None or not memory.nbytes:
        raise build_failure(log.errors, log.warnings)
    if shared is not None:
        warnings += shared.save(config)
    return BuiltEngine(memory, (*library.warnings, *warnings, *skipped_tactics(log.warnings)))


@collector_paused()
def parse_network(library: Library, model: Path, log: Any, objects: BuildObjects | None = None) -> tuple[Any, Any, Any]:
    """Parse a typed model as a strongly typed network: builder, network, and the parser, which holds its weights.

    ``objects`` keeps what TensorRT made, also where this raises.
    """
    trt = library.trt
    objects = BuildObjects() if objects is None else objects
    builder = made(lambda: trt.Builder(log), log)
    objects += [log, builder]
    # TensorRT 11 has no other networks: it accepts the flag and ignores it.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    objects += [network, parser]
    if not parser.parse_from_file(str(model)):
        raise parser_failure([_complaint(parser.get_error(k)) for k in range(parser.num_errors)], log.errors)
    return builder, network, parser


def _complaint(parser_error: Any) -> ParserComplaint:
    import onnx

    # Of an attribute that it does not support it names no node, but its function is called by the operator.
    importer = str(parser_error.func() or "").removeprefix("import")
    return ParserComplaint(
        code=parser_error.code().name,
        words=parser_error.desc() or "",
        node=parser_error.node_name() or "",
        operator=parser_error.node_operator() or (importer if onnx.defs.has(importer) else ""),
    )


def _check_inputs(network: Any, samples: Sequence[Feed]) -> None:
    """Raise where an input of the network is none of the model: the parser renames one that is an output, too."""
    for position in range(network.num_inputs):
        name = network.get_input(position).name
        if any(name not in feed for feed in samples):
            raise EngineError(
                FailureKind.UNSUPPORTED,
                f"TensorRT calls an input {name!r}, which the model has not: one that is an output, too, is renamed."
                " Take it off the model's outputs",
            )


@collector_paused()
def engine_faults(library: Library, data: Any, objects: BuildObjects | None = None) -> tuple[str, ...]:
    """Faults of an engine file by TensorRT-RTX's check of its header, as names of ``EngineInvalidityDiagnostics``."""
    trt = library.trt
    log = open_log(trt)
    runtime = made(lambda: trt.Runtime(log), log)
    (BuildObjects() if objects is None else objects).extend((log, runtime))
    _, diagnostics = runtime.get_engine_validity(data)
    faults = trt.EngineInvalidityDiagnostics
    return tuple(fault.name for fault in (faults.MALFORMED_ENGINE, faults.VERSION_MISMATCH) if diagnostics & int(fault))


def _configure(library: Library, config: Any, options: BuildOptions) -> None:
    trt, settings = library.trt, options.settings
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # Otherwise the inspector gives no types.
    config.builder_optimization_level = settings.optimization_level
    config.avg_timing_iterations = AVERAGED_TIMINGS
    if settings.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_mb * _MIB)
    if library.is_rtx and options.capabilities:
        config.num_compute_capabilities = len(options.capabilities)
        for position, capability in enumerate(options.capabilities):
            name = AHEAD_OF_TIME.get(capability)
            wanted = None if name is None else getattr(trt.ComputeCapability, name, None)
            if wanted is None or not config.set_compute_capability(wanted, position):
                number = ".".join(map(str, capability))
                raise EngineError(
                    FailureKind.UNSUPPORTED,
                    f"TensorRT-RTX {library.version} builds no engines for compute capability {number}",
                )


def _fill_profile(network: Any, profile: Any, samples: Sequence[Feed], shapes: Sequence[ShapeRange]) -> bool:
    """Set the shapes of dynamic inputs and the values of those that are shapes; whether there is one, so a profile."""
    wanted = {given.name: given for given in shapes}
    needed = False
    dynamic: dict[str, tuple[int, ...]] = {}
    for position in range(network.num_inputs):
        tensor = network.get_input(position)
        name, declared = tensor.name, tuple(tensor.shape)
        if tensor.is_shape_tensor:
            _set_values(profile, name, [np.asarray(sample[name]).ravel() for sample in samples])
            needed = True
        if -1 in declared:
            dynamic[name] = declared
            observed = _shapes_of(name, samples)
            chosen = _checked(wanted[name], declared, observed) if name in wanted else observed
            profile.set_shape(name, chosen.smallest, chosen.usual, chosen.largest)
            needed = True
    unknown = sorted(set(wanted) - set(dynamic))
    if unknown:
        names = ", ".join(f"{name} ({_text(shape)})" for name, shape in dynamic.items()) or "none"
        raise SettingsError(
            f"names {unknown[0]!r}, which is no dynamic input", f"dynamic inputs: {names}", setting="shapes"
        )
    return needed


def _set_values(profile: Any, name: str, values: Sequence[np.ndarray]) -> None:
    """Set the range of values of an input that is a shape."""
    kind = values[0].dtype
    if kind.kind not in "iu":
        raise EngineError(
            FailureKind.UNSUPPORTED,
            f"input {name!r} decides a shape and is of type {kind}: TensorRT takes INT32 and INT64 there, so cast it in"
            " the model",
        )
    ranges = [tuple(int(value) for value in row) for row in _range_of(values)]
    largest = max((abs(value) for row in ranges for value in row), default=0)
    try:
        profile.set_shape_input(name, *ranges)
    except (TypeError, OverflowError) as error:  # before 10.11 pyCore.cpp takes 32 bits
        raise EngineError(
            FailureKind.UNSUPPORTED,
            f"input {name!r} decides a shape and holds {largest}, and this TensorRT takes INT32 there: give values"
            f" of at most {np.iinfo(np.int32).max}",
        ) from error


def _shapes_of(name: str, samples: Sequence[Feed]) -> ShapeRange:
    shapes = [np.array(sample[name].shape) for sample in samples]
    smallest, usual, largest = (tuple(int(size) for size in shape) for shape in _range_of(shapes))
    return ShapeRange(name, smallest, usual, largest)


def _range_of(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Smallest, first and largest, element by element."""
    stacked = np.stack(arrays)
    return stacked.min(axis=0), stacked[0], stacked.max(axis=0)


def _checked(wanted: ShapeRange, declared: tuple[int, ...], observed: ShapeRange) -> ShapeRange:
    """The user's range, checked against the model and the data."""
    bounds = list(zip(wanted.smallest, wanted.largest, strict=True))
    if len(bounds) != len(declared) or any(
        size != -1 and (low, high) != (size, size) for (low, high), size in zip(bounds, declared, strict=True)
    ):
        raise SettingsError(
            f"{wanted.name}: {_text(wanted.largest)} does not fit the input's shape {_text(declared)}",
            "give every dimension, the fixed ones as they are",
            setting="shapes",
        )
    for shape in (observed.smallest, observed.largest):
        if any(not low <= size <= high for (low, high), size in zip(bounds, shape, strict=True)):
            raise SettingsError(
                f"{wanted.name}: the data hold the shape {_text(shape)}, which is out of range",
                "widen the range, or give data of the shapes that you will deploy",
                setting="shapes",
            )
    return wanted


def _text(shape: Sequence[int]) -> str:
    return "x".join("?" if size < 0 else str(size) for size in shape)


@cache
def _monitor_class(trt: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Reports the two outermost phases and stops the build at the deadline.

        TensorRT calls it from several threads; they share single assignments only.
        """

        def __init__(
            self, deadline: float, report: Callable[[Progress], None] | None, clock: Callable[[], float]
        ) -> None:
            super().__init__()
            self.cancelled = False
            self._deadline = deadline
            self._report = report
            self._clock = clock
            self._steps: dict[str, int] = {}
            self._outer: set[str] = set()
            self._reported = -math.inf

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._outer.add(phase_name)
            if parent_phase is None or parent_phase in self._outer:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            now = self._clock()
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
