"""What the engine layer gives the layers above: failures, measurements, and the toolchain's protocol.

A job that fails gives a ``Failure``, never a sentinel number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.jobs.reference_report import ReferenceReport as ReferenceReport
from mptune.engines.timing.latency import Latency, Stopwatch
from mptune.json_form import JsonForm
from mptune.processes.failure import EngineError as EngineError
from mptune.processes.failure import Failure as Failure
from mptune.processes.failure import FailureKind as FailureKind
from mptune.processes.failure import Progress as Progress
from mptune.processes.failure import Stage as Stage
from mptune.targets.detect import PowerMode
from mptune.targets.target import EngineMemory

ErrorSource = Literal["measured", "emulated"]
"""``measured``: outputs of the target's own engine. ``emulated``: FP32 arithmetic with FP16 rounding inserted."""
SampleSet = Literal["search", "held_out"]
SKETCHES = "outputs"
"""Folder in the run's data directory: a file for each plan that was run on the held-out samples."""
Profiling = Literal["none", "along"]


@dataclass(frozen=True)
class MissingKernel(JsonForm):
    """A node that leaves its execution provider once it is FP16, or BF16."""

    node: str
    op_type: str
    """With the domain where that is not ONNX's own."""
    wanted: str
    actual: str
    """The provider that runs it in FP16 or BF16; "" where none does."""
    reason: str = ""
    """What was seen, where the providers were not asked."""


@dataclass(frozen=True)
class Measurement:
    """The result of evaluating one plan."""

    latency: Latency
    """Of the plan's engine. Where measured, scaled by the drift of the FP32 baseline since it was first measured
    (``drift``), so that figures taken hours apart can be compared."""
    baseline: Latency | None
    """The FP32 baseline measured in the same minutes, not scaled; None where latency is predicted."""
    drift: float
    """First baseline median / this baseline median; ``latency`` is already multiplied by it."""
    error: OutputError
    error_source: ErrorSource
    build_s: float
    engine_path: Path | None = None
    warnings: tuple[str, ...] = ()
    group_times_ms: Mapping[str, float] | None = None
    """Group id -> time by the engine's own profiler, scaled as ``latency``; None where no profile was taken. Their sum
    is not the latency: profiling has a cost. Groups that no layer computes are left out."""
    memory: EngineMemory | None = None
    power_mode: PowerMode | None = None
    """That it was timed in; None where it was not timed on a Jetson."""

    def with_drift(self, drift: float) -> Measurement:
        """The same measurement with its times scaled by another drift."""
        factor, times = drift / self.drift, self.group_times_ms
        return replace(
            self,
            latency=self.latency.scaled(factor),
            drift=drift,
            group_times_ms=None if times is None else {group: ms * factor for group, ms in times.items()},
        )


class EngineSession(Protocol):
    """A loaded engine, inside the worker. Closing it frees what it holds on the device.

    ``run`` and the stopwatch are synchronous for the caller: when they return, the device has finished. What goes wrong
    is raised as ``EngineError`` (or a bare ``MemoryError``). ``close`` is idempotent.
    """

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the session could not use, one line each, ending with what to do."""
        ...

    @property
    def context_bytes(self) -> int | None:
        """Memory of the device that its execution context takes; None where it is not known."""
        ...

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute all outputs, by name, on the host."""
        ...

    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        """Copy the inputs to the device, to time the engine alone. Valid until the session gets other feeds."""
        ...

    def close(self) -> None:
        """Free the engine."""
        ...


class Engine(Protocol):
    """What a backend built of a plan's typed model: a frozen dataclass that crosses to the worker and is opened there.

    A session that is open stays open while its engine compares equal and its file is not written anew.
    """

    @property
    def path(self) -> Path:
        """Its file, or the typed model itself."""
        ...

    def open(self) -> EngineSession:
        """Load it; in the worker."""
        ...


@dataclass(frozen=True)
class EmulatedSamples:
    """The samples of an emulated error."""

    parts: tuple[range, ...]
    """Their numbers in the search samples, from 0 on, in consecutive parts, none empty."""
    per_plan: int | None
    """Samples that the evaluation of one plan runs: what is emulated between plans is measured by it. None where
    everything is best taken at once: opening sessions is what takes the time, or all is quick."""

    @property
    def count(self) -> int:
        """Of all parts together."""
        return self.parts[-1].stop


def in_parts(count: int) -> tuple[range, ...]:
    """The first ``count`` samples in parts that double what is known: 1, 1, 2, 4, ..."""
    ends = [0, 1]
    while ends[-1] < count:
        ends.append(min(2 * ends[-1], count))
    return tuple(range(start, end) for start, end in pairwise(ends))
