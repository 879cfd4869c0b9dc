"""The jobs of TensorRT and TensorRT-RTX in the worker: load the library, build an engine, measure one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mptune.data.archive import read_samples
from mptune.engines.base import EngineError, EngineSession, FailureKind
from mptune.engines.cuda import runtime as cuda
from mptune.engines.jobs.measure import MeasureJob
from mptune.engines.jobs.samples import Feed
from mptune.engines.tensorrt.builder import BuildObjects, BuildOptions, build_engine, engine_faults
from mptune.engines.tensorrt.inspect import read_layers, type_warnings
from mptune.engines.tensorrt.library import Kind, load_library
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.engines.worker.child import WorkerState
from mptune.files import whole_file
from mptune.graph.plan import Precision

_OPEN_SESSIONS = ("baseline", "switched", "waists")
"""What stays open in the worker from job to job and holds memory of the device."""

_SHAPE_VALUES = 64
"""An integer input of at most so many elements may be a shape; of all others only the shape is needed to build."""


@dataclass(frozen=True)
class LibraryReport:
    """The result of ``LibraryJob``.

    Attributes:
        cuda_obstacle: why no GPU can be used through cuda-python or the system's CUDA; None where one can.
        cuda_install: the command that removes the obstacle; empty where nothing that can be installed is missing.
    """

    version: str
    warnings: tuple[str, ...] = ()
    cuda_obstacle: str | None = None
    cuda_install: str = ""


@dataclass(frozen=True)
class LibraryJob:
    """Check that TensorRT or TensorRT-RTX loads and that its version is supported."""

    kind: Kind

    def run(self, state: WorkerState) -> LibraryReport:
        """See the class.

        Raises:
            EngineError: it does not.
        """
        library = load_library(self.kind)
        obstacle = cuda.unavailable_reason()
        install = "" if obstacle is None else cuda.missing_package()
        return LibraryReport(library.version, library.warnings, obstacle, install)


@dataclass(frozen=True)
class BuildResult:
    """The result of ``BuildJob``.

    Attributes:
        build_s: seconds to parse and build.
    """

    build_s: float
    nbytes: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildJob:
    """Build the engine of a typed model and write it to a file, whole or not at all.

    Attributes:
        samples: files of samples whose shapes the engine must take; it is tuned for the first sample of the first.
        alone: close the sessions that stay open in the worker before the build. Where CPU and GPU share their memory,
            TensorRT would skip tactics in some builds and not in others, by what is open.
    """

    model: Path
    engine_path: Path
    options: BuildOptions
    samples: tuple[Path, ...]
    timeout_s: float
    alone: bool = False

    def run(self, state: WorkerState) -> BuildResult:
        """See the class."""
        for slot in _OPEN_SESSIONS if self.alone else ():
            state.drop(slot)
        library = load_library(self.options.kind)
        outlines = state.cached("outlines", self.samples, lambda: _outlines(self.samples))
        objects = state.transient(BuildObjects)  # Freed once the answer is sent.
        started = time.perf_counter()
        built = build_engine(
            library,
            self.model,
            self.options,
            outlines,
            timeout_s=self.timeout_s,
            report=state.report,
            objects=objects,
        )
        build_s = time.perf_counter() - started
        faults = engine_faults(library, built.memory, objects) if library.is_rtx else ()
        if faults:
            raise EngineError(FailureKind.ERROR, f"TensorRT-RTX refuses the engine that it built: {', '.join(faults)}")
        with whole_file(self.engine_path) as partial:
            partial.write_bytes(built.memory)
        return BuildResult(build_s, built.memory.nbytes, built.warnings)


@dataclass(frozen=True)
class MeasureEngineJob(MeasureJob):
    """``MeasureJob`` on engine files: ``model`` and ``baseline`` are the engines of the plan and of the all-FP32 plan.

    TF32 was settled when they were built: the fields of ``MeasureJob`` about it are ignored.

    Attributes:
        kind: whose engines they are.
        runtime_cache: file in which TensorRT-RTX keeps compiled kernels; None for none.
    """

    kind: Kind = "tensorrt"
    nodes: Mapping[str, Precision] = field(default_factory=dict)
    runtime_cache: Path | None = None
    fp64_inputs: frozenset[str] = frozenset()

    def _open(self, model: Path, *, tf32: bool) -> EngineSession:
        return TensorRtSession(model, self._options())

    def _options(self) -> EngineOptions:
        return EngineOptions(self.kind, self.latency, self.runtime_cache, fp64_inputs=self.fp64_inputs)

    def _context_bytes(self, candidate: EngineSession) -> int | None:
        return candidate.context_bytes if isinstance(candidate, TensorRtSession) else None

    def _compare(self, candidate: EngineSession, baseline: EngineSession) -> tuple[str, ...]:
        if not (isinstance(candidate, TensorRtSession) and isinstance(baseline, TensorRtSession)):
            return ()
        return type_warnings(self.nodes, read_layers(candidate.information()), read_layers(baseline.information()))


def _outlines(paths: tuple[Path, ...]) -> tuple[Feed, ...]:
    """The samples' shapes as arrays that take no memory; an input that may be a shape keeps its values."""
    return tuple(
        {name: _outline(array) for name, array in sample.items()} for path in paths for sample in read_samples(path)
    )


def _outline(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind in "iu" and array.size <= _SHAPE_VALUES:
        return array
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)
