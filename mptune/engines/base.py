"""What the engine layer gives the layers above. A job that fails gives a ``Failure``, never a sentinel number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.latency import Latency, Stopwatch
from mptune.json_form import JsonForm
from mptune.processes.child import (
    EngineError as EngineError,
    Failure as Failure,
    FailureKind as FailureKind,
    Progress as Progress,
    Stage as Stage,
)
from mptune.targets.detect import PowerMode
from mptune.targets.target import EngineMemory

ErrorSource = Literal["measured", "emulated"]
"""``measured``: outputs of the target's own engine. ``emulated``: FP32 arithmetic with FP16 rounding inserted."""
SampleSet = Literal["search", "held_out"]
SKETCHES = "outputs"
"""Folder in the run's data directory: a file for each plan that was run on the held-out samples."""
Profiling = Literal["none", "along"]
DRIFT_TEXT = "the FP32 baseline takes"  # how the warning of a measurement begins whose baseline has drifted


@dataclass(frozen=True)
class MissingKernel(JsonForm):
    """A node that leaves its execution provider once it is FP16, or BF16."""

    node: str
    op_type: str  # with the domain where that is not ONNX's own
    wanted: str
    actual: str  # the provider that runs it in FP16 or BF16; "" where none does
    reason: str = ""  # what was seen, where the providers were not asked


@dataclass(frozen=True)
class Measurement:
    """The result of evaluating one plan."""

    latency: Latency
    """Of the plan's engine. Where measured, scaled by the drift of the FP32 baseline since it was first measured
    (``drift``), so that figures taken hours apart can be compared."""
    baseline: Latency | None
    """The FP32 baseline measured in the same minutes, not scaled; None where latency is predicted."""
    drift: float  # first baseline median / this baseline median; ``latency`` is already multiplied by it
    error: OutputError
    error_source: ErrorSource
    build_s: float
    engine_path: Path | None = None
    warnings: tuple[str, ...] = ()
    group_times_ms: Mapping[str, float] | None = None
    """Group id -> time by the engine's own profiler, scaled as ``latency``; None where no profile was taken. Their sum
    is not the latency: profiling has a cost. Groups that no layer computes are left out."""
    memory: EngineMemory | None = None
    power_mode: PowerMode | None = None  # that it was timed in; None where it was not timed on a Jetson

    def with_drift(self, drift: float) -> Measurement:
        """The same measurement with its times scaled by another drift."""
        factor, times = drift / self.drift, self.group_times_ms
        return replace(
            self,
            latency=self.latency.scaled(factor),
            drift=drift,
            group_times_ms=None if times is None else {group: ms * factor for group, ms in times.items()},
        )


@dataclass(frozen=True)
class Place:
    """Where in the model something goes wrong; ``node`` is "" where a value that is fed is wrong already."""

    node: str
    op_type: str
    tensor: str
    value: float | str  # what stands there, such as ``nan`` or the relative L2 of two runs
    sample: int | None = None

    @property
    def shown(self) -> str:
        """Operator and name, as texts name a node."""
        return f"{self.op_type} {self.node!r}" if self.node else f"input {self.tensor!r}"


@dataclass(frozen=True)
class RowReport:
    """What a batch of rows showed."""

    rows: int = 0
    mixed: Mapping[str, float] = field(default_factory=dict)
    """Output -> largest relative L2 between a row alone and the same row among different rows; where the batch is
    fixed, between a row among copies of itself and the same row among different ones."""
    mixed_row: int = 0
    is_fixed: bool = False
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Output -> its shape for ``rows`` rows, where it does not have as many rows although it is declared to."""
    declared: Mapping[str, str] = field(default_factory=dict)
    """Output -> its declared shape, of those in ``lost``."""
    failure: str = ""  # the error where a dynamic batch fails with ``rows`` rows
    ran: int = 0  # how many rows the samples have, with which it does not fail; 0 where nothing failed

    @property
    def failed_node(self) -> str:
        """The node that ONNX Runtime's message names; "" where it names none."""
        match = re.search(r"Name:'([^']+)'", self.failure)
        return match.group(1) if match else ""

    @property
    def worst_mixed(self) -> tuple[str, float]:
        """The output whose rows depend most on the others, and by how much; ("", 0.0) where none was compared."""
        # NaN, as of a batch whose rows are not finite, counts as the worst.
        return max(self.mixed.items(), key=lambda item: (item[1] != item[1], item[1]), default=("", 0.0))


@dataclass(frozen=True)
class ReferenceReport:
    """What the reference runs showed, for the checks before the search."""

    provider: str  # ONNX Runtime's execution provider, such as ``CUDAExecutionProvider``; TF32 is always off
    outputs: Mapping[str, Mapping[str, float]]
    """Output name -> {"size", "non_finite", "zero_fraction", "absmax"} over all samples; and where it applies
    {"bad_sample"}, the first that is not finite, {"bad_samples"}, how many of {"samples"} are not, {"constant"}, 1
    where samples differ and the output does not."""
    repeat_error: float  # largest relative L2 between two runs on the same sample, over outputs
    rows: RowReport = RowReport()
    places: Mapping[tuple[str, str], Place] = field(default_factory=dict)
    """(finding's code, output) -> the node to blame."""
    optimisation_error: Mapping[str, float] = field(default_factory=dict)
    """Floating-point output name -> relative L2 between ONNX Runtime with and without graph optimisations on the first
    sample; empty where that was not taken."""


class EngineSession(Protocol):
    """A loaded engine, inside the worker. Closing it frees what it holds on the device.

    ``run`` and the stopwatch are synchronous for the caller: when they return, the device has finished. What goes wrong
    is raised as ``EngineError`` (or a bare ``MemoryError``). ``close`` is idempotent.
    """

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the session could not use, one line each, ending with what to do."""

    @property
    def context_bytes(self) -> int | None:
        """Memory of the device that its execution context takes; None where it is not known."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute all outputs, by name, on the host."""

    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        """Copy the inputs to the device, to time the engine alone. Valid until the session gets other feeds."""

    def close(self) -> None:
        """Free the engine."""


class Engine(Protocol):
    """What a backend built of a plan's typed model: a frozen dataclass that crosses to the worker and is opened there.

    A session that is open stays open while its engine compares equal and its file is not written anew.
    """

    @property
    def path(self) -> Path:
        """Its file, or the typed model itself."""

    def open(self) -> EngineSession:
        """Load it; in the worker."""


@dataclass(frozen=True)
class EmulatedSamples:
    """The samples of an emulated error."""

    parts: tuple[range, ...]  # their numbers in the search samples, from 0 on, in consecutive parts, none empty
    per_plan: int | None
    """Samples that the evaluation of one plan runs: what is emulated between plans is measured by it. None where
    everything is best taken at once: opening sessions is what takes the time, or all is quick."""

    @property
    def count(self) -> int:
        return self.parts[-1].stop


def in_parts(count: int) -> tuple[range, ...]:
    """The first ``count`` samples in parts that double what is known: 1, 1, 2, 4, ..."""
    ends = [0, 1]
    while ends[-1] < count:
        ends.append(min(2 * ends[-1], count))
    return tuple(range(start, end) for start, end in pairwise(ends))
