"""What toolchains share: reference outputs, ranges, emulated errors, timers; and the toolchain that predicts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import (
    ErrorSource,
    Failure,
    FailureKind,
    Measurement,
    MissingKernel,
    Profiling,
    Progress,
    ReferenceReport,
    SampleSet,
    Stage,
)
from mptune.engines.emulated_samples import EmulatedSamples
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.jobs.layer_times import LayerTime, with_group_times
from mptune.engines.jobs.measure import MeasureResult
from mptune.engines.jobs.reference_report import TensorRange
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.store import refused_in_bf16
from mptune.engines.timing.latency import DRIFT_TEXT, Latency, LatencySource, Repetitions, TimingRecord
from mptune.engines.timing.spread import SessionTiming, Standings
from mptune.engines.toolchains.emulation import Emulation
from mptune.engines.toolchains.reference import ReferenceModel, worker_environment
from mptune.engines.worker.child import Job
from mptune.engines.worker.parent import Worker
from mptune.engines.workload import Workload
from mptune.errors import MptuneError
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import LatencySettings, SearchSettings
from mptune.targets.engine_memory import EngineMemory
from mptune.targets.memory import plan_memory

if TYPE_CHECKING:
    from mptune.targets.roofline import LatencyTerms
    from mptune.targets.target import Target

T = TypeVar("T")

ToolchainT = TypeVar("ToolchainT", bound="BaseToolchain")

_STARVED = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.CRASH, FailureKind.DEVICE_LOST})

"""What a job may end in for what runs beside it: then that is ended, and the job gets another try."""


class BaseToolchain(ABC):
    """What is the same whoever builds and times the engines. Implements ``Toolchain`` but for ``evaluate``.

    A toolchain is put together from parts: the worker, the reference model, the emulation; and, where it builds or
    times engines, an engine store, a timer and a profiler.
    """

    name: str
    latency_source: LatencySource
    error_source: ErrorSource
    _kind: Kind = "tensorrt"

    def __init__(
        self,
        target: Target,
        workload: Workload,
        settings: SearchSettings,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        device: str = "",
    ) -> None:
        """Make the toolchain; nothing starts before it is needed.

        Args:
            device: name of the GPU or CPU that is timed; the target's where none is.
        """
        self.device = device or target.title
        self.target = target
        self.workload = workload
        self.settings = settings
        self.provider = provider
        self._warnings = tuple(warnings)
        self._worker = self._new_worker()
        function = settings.metric_function
        if function is not None:
            self._worker.on_question = lambda question: question.answer(settings.metric, function)
        self._reference_model = ReferenceModel(
            workload,
            provider,
            self._call,
            settings.rollout,
            self._timeout_s,
            self._new_worker,
        )
        self._emulation: Emulation | None = None
        self._terms: LatencyTerms | None = None

    @abstractmethod
    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""

    @property
    def fuses(self) -> bool:
        """Whether the target's engine fuses nodes into one kernel.

        TensorRT does, ONNX Runtime's CUDA provider does not: there each node is a kernel, whose result is rounded and
        written to memory.
        """
        return True

    @property
    def profiling(self) -> Profiling:
        """See ``Toolchain``."""
        return "none"

    @property
    def unshared(self) -> Failure | None:
        """See ``Toolchain``."""
        return None if self._emulation is None else self._emulation.unshared

    @property
    def emulation_holds(self) -> bool:
        """See ``Toolchain``."""
        return True

    @property
    def emulation(self) -> Emulation:
        """Emulates plans; made when it is first needed."""
        if self._emulation is None:
            self._emulation = Emulation(
                self.workload,
                self._as_computed(),
                self.provider,
                self.settings,
                self._call,
                self._shapes,
                self._known_fusions(),
            )
        return self._emulation

    def environment(self) -> Environment:
        """See ``Toolchain``."""
        environment = describe_environment()
        if self.latency_source == "predicted":  # nothing is timed here: a busy or hot GPU disturbs nothing
            environment = replace(environment, warnings=())
        return environment.with_warnings(*self._warnings)

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """See ``Toolchain``."""
        return self._reference_model.reference(which)

    def observe(self) -> Mapping[str, TensorRange] | Failure:
        """See ``Toolchain``."""
        return self._reference_model.observe()

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        """See ``Toolchain``; a predicted latency has no sessions."""
        return ()

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``Toolchain``; by operator, as TensorRT's parser refuses them, on a device that is predicted, too."""
        return refused_in_bf16(self.workload.model, self._kind) if precision is Precision.BF16 else ()

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """See ``Toolchain``; what TensorRT fuses is known once it has built an engine, and differs by version."""
        return ()

    @property
    def emulated_samples(self) -> EmulatedSamples:
        """See ``Toolchain``."""
        return self.emulation.samples

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        """See ``Toolchain``."""
        return self.emulation.errors(plans, part=range(self.emulation.samples.count) if part is None else part)

    def latency_terms(self) -> LatencyTerms | Failure:
        """See ``Toolchain``."""
        from mptune.targets.roofline import FUSED, UNFUSED, roofline

        if self._terms is None:
            ranges = self.observe()
            if isinstance(ranges, Failure):
                return replace(ranges, stage=Stage.TIME)
            execution = replace(FUSED if self.fuses else UNFUSED, tf32=self.settings.tf32)
            self._terms = roofline(self.workload.grouped, self.target, self._shapes(), execution)
        return self._terms

    def listen(self, callback: Callable[[Progress], None]) -> None:
        """See ``Toolchain``."""
        self._worker.on_progress = callback

    def restart(self) -> None:
        """See ``Toolchain``."""
        self._worker.close()

    def close(self) -> None:
        """See ``Toolchain``."""
        self._reference_model.stop_observing()
        self._worker.close()
        if self._emulation is not None:
            self._emulation.close()

    def __enter__(self: ToolchainT) -> ToolchainT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, job: Job[T], /) -> T | Failure:
        """Run a job in the worker, within the time that a build and a measurement may take."""
        result = self._worker.call(job, self._timeout_s)
        if isinstance(result, Failure) and result.kind in _STARVED and self._reference_model.stop_observing():
            return self._worker.call(job, self._timeout_s)
        return result

    @property
    def _timeout_s(self) -> float:
        limits = self.settings.worker
        return limits.build_timeout_s + limits.measure_timeout_s

    def _new_worker(self) -> Worker:
        settings = self.settings
        return Worker(self.workload.workspace.logs_dir, settings.worker, worker_environment(tf32=settings.tf32))

    def _with_memory(self, plan: PrecisionPlan, measurement: Measurement | Failure) -> Measurement | Failure:
        """The measurement with what the plan's engine takes: as its own figures say, else predicted."""
        if isinstance(measurement, Failure):
            return measurement
        memory = plan_memory(self.workload.rewriter.types, plan, self._shapes())
        path, known = measurement.engine_path, measurement.memory
        if path is not None and path.exists():
            memory = replace(memory, engine_bytes=path.stat().st_size)
        if known is not None:
            memory = replace(memory, context_bytes=known.context_bytes, source=known.source)
        return replace(measurement, memory=memory)

    def _as_computed(self) -> GroupedModel:
        """The model and its groups, with a node for each step after which the target's engine rounds."""
        if self.fuses:
            return self.workload.grouped
        from mptune.graph.writing.rounding_steps import with_rounding_steps

        return with_rounding_steps(self.workload.grouped, self._known_fusions())

    def _known_fusions(self) -> tuple[FusedNodes, ...]:
        """None where the engine does not say: then each step is rounded."""
        found = self.fused_nodes()
        return () if isinstance(found, Failure) else found

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Concrete shapes of the FP32 values; empty where they cannot be observed."""
        ranges = self.observe()
        return {} if isinstance(ranges, Failure) else {tensor: found.shape for tensor, found in ranges.items()}


DRIFT_WARNING = 0.1

"""A baseline whose latency has changed by more than this share since its first timing is a warning."""


class Timer:
    """Makes latencies that were taken hours apart comparable.

    The repetitions are calibrated once per device and then frozen, resumed runs included; each latency is scaled by the
    drift of the FP32 baseline that is timed in turn with it.
    """

    def __init__(self, data_dir: Path, engine: str, device: str, settings: LatencySettings) -> None:
        """Read nothing yet.

        Args:
            settings: a record that was taken with others does not count.
        """
        name = re.sub(r"[^a-z0-9]+", "-", f"{engine} {device}".lower()).strip("-")
        self._path = data_dir / f"timing-{name}.json"
        self._settings = settings
        self._record: TimingRecord | None = None
        self.standings = Standings()
        """What was timed in this process, which tells how exact the next timing has to be."""

    def corrected(self, plan: PrecisionPlan, result: MeasureResult | Failure) -> Measurement | Failure:
        """The measurement of a plan, corrected for drift; the first one freezes the repetitions."""
        if isinstance(result, Failure):
            return result
        if result.latency.session is not None:
            self.standings.add(plan.fingerprint, [result.latency.session], result.objective)
        if self._record is None:
            self._record = TimingRecord(result.repetitions, result.baseline.median_ms)
            self._record.write(self._path, self._settings)
        drift = self._record.baseline_ms / result.baseline.median_ms
        warnings = result.warnings
        if abs(drift - 1.0) > DRIFT_WARNING:
            text = (
                f"{DRIFT_TEXT} {1 / drift:.2f} times as long as when it was first measured; latencies are"
                " corrected for it, but less exact: lock the clocks and close other programs"
            )
            warnings = (*warnings, text)
        bytes_ = result.context_bytes
        context = None if bytes_ is None else EngineMemory(None, bytes_, None, "measured")
        return Measurement(
            latency=result.latency.scaled(drift),
            baseline=result.baseline,
            drift=drift,
            error=result.error,
            error_source="measured",
            build_s=result.build_s,
            warnings=warnings,
            memory=context,
        )

    def with_reopened(
        self, plan: PrecisionPlan, timings: tuple[SessionTiming, ...] | Failure
    ) -> tuple[SessionTiming, ...] | Failure:
        """Sessions of a plan that were opened anew, as they are; they tell how far sessions differ."""
        if not isinstance(timings, Failure):
            self.standings.add(plan.fingerprint, timings)
        return timings

    @property
    def repetitions(self) -> Repetitions | None:
        """The frozen repetitions; None before the first timing."""
        self._record = self._record or TimingRecord.read(self._path, self._settings)
        return None if self._record is None else self._record.repetitions


class Profiler:
    """Adds group times to measurements. After one failure it profiles no more: each try may cost the worker."""

    def __init__(self, grouped: GroupedModel) -> None:
        self.failed = False
        self._grouped = grouped

    def profile(
        self, measurement: Measurement, layer_times: Callable[[], tuple[LayerTime, ...] | Failure]
    ) -> Measurement:
        """The measurement with the time of each group; where profiling fails, with a warning instead."""
        try:
            layers = layer_times()
        except (MptuneError, OSError) as error:
            message = error.message if isinstance(error, MptuneError) else str(error)
            layers = Failure(Stage.TIME, FailureKind.ERROR, message)
        self.failed = self.failed or isinstance(layers, Failure)
        return with_group_times(measurement, layers, self._grouped)


class PredictedToolchain(BaseToolchain):
    """Predicts latency by the target's roofline and emulates FP16 rounding: needs no device of that kind."""

    name = "emulation"
    latency_source: LatencySource = "predicted"
    error_source: ErrorSource = "emulated"

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        return self._with_memory(plan, predict(self, plan, which))


def predict(toolchain: BaseToolchain, plan: PrecisionPlan, which: SampleSet) -> Measurement | Failure:
    """The roofline's latency of a plan, and its emulated error on a set of samples."""
    terms = toolchain.latency_terms()
    if isinstance(terms, Failure):
        return terms
    errors = toolchain.emulation.errors([plan], which)
    if isinstance(errors, Failure):
        return errors
    return Measurement(
        latency=Latency.predicted(terms.predict(plan)),
        baseline=None,
        drift=1.0,
        error=errors[0],
        error_source="emulated",
        build_s=0.0,
    )
