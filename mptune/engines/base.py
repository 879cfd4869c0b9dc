"""What the engine layer gives the layers above: failures, measurements, and the toolchain's protocol.

A job that fails gives a ``Failure``, never a sentinel number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.environment import Environment
from mptune.engines.jobs.reference_report import ReferenceReport as ReferenceReport
from mptune.engines.timing.latency import Latency, LatencySource, Stopwatch
from mptune.engines.timing.spread import SessionTiming
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import JsonForm
from mptune.processes.failure import EngineError as EngineError
from mptune.processes.failure import Failure as Failure
from mptune.processes.failure import FailureKind as FailureKind
from mptune.processes.failure import Progress as Progress
from mptune.processes.failure import Stage as Stage
from mptune.targets.detect import PowerMode
from mptune.targets.target import EngineMemory

if TYPE_CHECKING:
    from mptune.graph.fused import FusedNodes
    from mptune.graph.hazards.seen import TensorRange
    from mptune.targets.roofline import LatencyTerms

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


@runtime_checkable
class DescribesLayers(Protocol):
    """What a session may have: facts about the engine that is loaded."""

    @property
    def context_bytes(self) -> int | None:
        """Memory of the device that the execution context takes; None where it is not known."""
        ...

    def information(self) -> str:
        """The layers as TensorRT's inspector describes them, JSON."""
        ...


class ReferenceRuns(Protocol):
    """Runs of the untouched model in FP32 without TF32."""

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """Compute the reference outputs of a set of samples and write them to the workspace."""
        ...

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        """Run the model over the search samples and reduce each float tensor to its range; ``stage`` gets the progress.

        A large model is observed in parts.
        """
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


class Predictor(Protocol):
    """What is predicted of plans without building them: emulated errors, and the roofline's latencies."""

    @property
    def emulated_samples(self) -> EmulatedSamples:
        """The first few search samples, on which ``emulate`` takes errors; known once they are written."""
        ...

    @property
    def unshared(self) -> Failure | None:
        """Why plans are emulated in a session each, which takes longer; None where they may share one."""
        ...

    @property
    def emulation_holds(self) -> bool:
        """Whether engines round every value that a plan puts in FP16, so that emulated errors predict theirs."""
        ...

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        """Emulated errors of plans on ``emulated_samples``, or on one part of them; no engine is built."""
        ...

    def latency_terms(self) -> LatencyTerms | Failure:
        """The roofline's terms for the target: a prior where latency is measured, else latency is computed from it."""
        ...


class Toolchain(Protocol):
    """Builds, runs and times engines for one target. Lives in the parent process.

    Every method that builds or runs anything does so in a worker process under a deadline; a plan that fails comes
    back as a ``Failure``. Methods may be called in any order. ``TimesLayers``, ``Reopens``, ``NamesKernels`` and
    ``ReportsProgress`` are what it may have besides.
    """

    name: str
    device: str
    latency_source: LatencySource
    error_source: ErrorSource

    @property
    def reference_model(self) -> ReferenceRuns:
        """The untouched model."""
        ...

    @property
    def predictor(self) -> Predictor:
        """What is predicted of plans that are not built."""
        ...

    def environment(self) -> Environment:
        """Versions, driver, clocks and warnings."""
        ...

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """Build, run and time one plan.

        With ``profile`` the layer groups are timed, too, where it ``TimesLayers``. A profile that fails is a warning of
        the measurement, not a failure.
        """
        ...

    def restart(self) -> None:
        """End the worker process; the next job starts a new one."""
        ...

    def close(self) -> None:
        """End the worker. Idempotent."""
        ...


@runtime_checkable
class TimesLayers(Protocol):
    """What a toolchain, or a backend's builder, may have: the time of each layer."""

    @property
    def profiling(self) -> Profiling:
        """``along``: the engine of any plan that is timed; ``none``: no profiler is usable, or it has failed."""
        ...


@runtime_checkable
class Reopens(Protocol):
    """What a toolchain may have: sessions of one plan differ, which no single one shows."""

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        """Open the engine of a plan that was evaluated anew, this many times, and time each session.

        Empty where latency is predicted.
        """
        ...


@runtime_checkable
class NamesKernels(Protocol):
    """What a toolchain, or a backend's builder, may have: what its engines run in another way than a plan says."""

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """The nodes that another execution provider runs in a reduced precision than in FP32, or none in BF16."""
        ...

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """The nodes that the engine computes as one, with FP32 inside, wherever they are FP16, such as norms."""
        ...


@runtime_checkable
class ReportsProgress(Protocol):
    """What a toolchain may have: the progress of long builds."""

    def listen(self, callback: Callable[[Progress], None]) -> None:
        """Call this with the progress: while ``evaluate`` waits for the build, and in its thread."""
        ...
