"""The toolchains: one that measures with the engines of a backend, one that predicts; and their parts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.backends.backend import Backend, Bench, Builder, Built
from mptune.engines.base import (
    EmulatedSamples,
    ErrorSource,
    Failure,
    FailureKind,
    Measurement,
    MissingKernel,
    Profiling,
    Progress,
    SampleSet,
    Stage,
)
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.jobs.layer_times import EngineLayers, with_group_times
from mptune.engines.jobs.measure import MeasureJob, MeasureResult, ReopenJob
from mptune.engines.jobs.samples import Scoring
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.operators import refused_in_bf16
from mptune.engines.timing.latency import DRIFT_TEXT, Latency, LatencySource, Repetitions, TimingRecord
from mptune.engines.timing.spread import SessionTiming, Standings
from mptune.engines.toolchains.emulation import Emulation
from mptune.engines.toolchains.reference import ReferenceModel, worker_environment
from mptune.errors import MptuneError
from mptune.files import write_json
from mptune.graph.fused import FusedNodes
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.child import Job
from mptune.processes.parent import Worker
from mptune.settings import LatencySettings
from mptune.targets.costs import Shape
from mptune.targets.memory import plan_memory

if TYPE_CHECKING:
    from mptune.targets.detect import Gpu
    from mptune.targets.roofline import LatencyTerms
    from mptune.targets.target import Target

T = TypeVar("T")
ToolchainT = TypeVar("ToolchainT", bound="TargetToolchain")
_STARVED = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.CRASH, FailureKind.DEVICE_LOST})
"""What a job may end in for what runs beside it: then that is ended, and the job gets another try."""


class TargetPredictor:
    """Emulated errors and the roofline of one target. Implements ``Predictor``; nothing runs before it is needed."""

    def __init__(self, bench: Bench, reference: ReferenceModel, builder: Builder | None) -> None:
        """Where engines round, the builder says; without one, as TensorRT's do."""
        self._bench = bench
        self._reference = reference
        self._builder = builder
        self.fuses = builder is None or builder.fuses
        self.emulation_holds = builder is None or builder.emulation_holds
        self._terms: LatencyTerms | None = None

    @property
    def unshared(self) -> Failure | None:
        return self.emulation.unshared

    @cached_property
    def emulation(self) -> Emulation:
        """Emulates plans; made when it is first needed."""
        bench, fused = self._bench, self.fused_nodes()
        nodes = () if isinstance(fused, Failure) else fused  # where the engine does not say, each step is rounded
        grouped = bench.context.grouped
        if not self.fuses:
            from mptune.graph.writing.rounding_steps import with_rounding_steps

            grouped = with_rounding_steps(grouped, nodes, bench.context.precisions)
        return Emulation(bench.context, grouped, bench.provider, bench.call, bench.shapes, nodes)

    @property
    def emulated_samples(self) -> EmulatedSamples:
        return self.emulation.samples

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        return self.emulation.errors(plans, part=range(self.emulation.samples.count) if part is None else part)

    def latency_terms(self) -> LatencyTerms | Failure:
        from mptune.targets.roofline import roofline

        if self._terms is None:
            ranges = self._reference.observe()
            if isinstance(ranges, Failure):
                return replace(ranges, stage=Stage.TIME)
            bench = self._bench
            grouped, tf32 = bench.context.grouped, bench.context.settings.tf32
            self._terms = roofline(grouped, bench.target, bench.shapes(), tf32=tf32)
        return self._terms

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        return () if self._builder is None else self._builder.fused_nodes()

    def predict(self, plan: PrecisionPlan, which: SampleSet) -> Measurement | Failure:
        """The roofline's latency of a plan, and its emulated error on a set of samples."""
        terms = self.latency_terms()
        if isinstance(terms, Failure):
            return terms
        errors = self.emulation.errors([plan], which)
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

    def close(self) -> None:
        """Delete the models that were written."""
        if "emulation" in vars(self):
            self.emulation.close()


class TargetToolchain(ABC):
    """What is the same whether latency is measured or predicted. Implements ``Toolchain`` and all that it may have.

    It is put together from parts: the worker, the reference model, the predictor; and, where there is a backend, its
    builder.
    """

    latency_source: LatencySource
    error_source: ErrorSource

    def __init__(
        self,
        backend: Backend | None,
        target: Target,
        context: RunContext,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        gpu: Gpu | None = None,
        device: str = "",
    ) -> None:
        """Make the toolchain; nothing starts before it is needed.

        Args:
            backend: builds the engines; None where none are built.
            gpu: that engines are built for and timed on; None for the target's, which is not here, and for a CPU.
            device: name of the GPU or CPU that is timed; the target's where none is.
        """
        self.name = "emulation" if backend is None else backend.name
        self.device = device or target.title
        self.target = target
        self.context = context
        self.settings = settings = context.settings
        self.provider = provider
        self._warnings = tuple(warnings)
        self._worker = self._new_worker()
        function = settings.metric_function
        if function is not None:
            self._worker.on_question = lambda question: question.answer(settings.metric, function)
        self.reference_model = ReferenceModel(
            context, provider, self._call, settings.rollout, self._timeout_s, self._new_worker
        )
        folded = lambda: self.reference_model.folded_values  # noqa: E731
        bench = Bench(target, gpu, context, provider, self._worker, self._call, self._shapes, folded)
        self._bench = bench
        self.builder = None if backend is None else backend.builder(bench)
        self.predictor = TargetPredictor(bench, self.reference_model, self.builder)
        self._fp32 = context.grouped.uniform(Precision.FP32)
        self._timer = Timer(context.data_dir, self.name, self.device, settings.latency)

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``. An engine whose plan failed is faulty, unless the machine was at fault."""
        built = None if self.builder is None else self.builder.build(plan)
        if isinstance(built, Failure):
            return built
        result: Measurement | Failure | None = None
        try:
            result = self._measured(plan, which, profile, built)
        finally:
            if self.builder is not None:
                self.builder.release(plan, faulty=isinstance(result, Failure) and not result.is_machine_fault)
        if isinstance(result, Failure):
            return result
        if built is not None:
            result = replace(
                result,
                build_s=result.build_s if built.build_s is None else built.build_s,
                engine_path=built.engine.path if built.is_kept else None,
                warnings=tuple(dict.fromkeys((*built.warnings, *result.warnings))),
            )
        return self._with_memory(plan, result)

    @abstractmethod
    def _measured(
        self, plan: PrecisionPlan, which: SampleSet, profile: bool, built: Built | None
    ) -> Measurement | Failure:
        """Evaluate a plan with its engine, where there is a builder."""

    @property
    def profiling(self) -> Profiling:
        return "none"

    def environment(self) -> Environment:
        environment = describe_environment()
        if self.latency_source == "predicted":  # nothing is timed here: a busy or hot GPU disturbs nothing
            environment = replace(environment, warnings=())
        return environment.with_warnings(*self._warnings)

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        """See ``Reopens``; a predicted latency has no sessions."""
        return ()

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``NamesKernels``; without a backend as TensorRT's parser refuses them, for a device that is predicted."""
        if self.builder is None:
            return refused_in_bf16(self.context.model, "tensorrt") if precision is Precision.BF16 else ()
        return self.builder.missing_kernels(precision)

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        return self.predictor.fused_nodes()

    def listen(self, callback: Callable[[Progress], None]) -> None:
        self._worker.on_progress = callback

    def restart(self) -> None:
        self._worker.restart()

    def close(self) -> None:
        self.reference_model.stop_observing()
        self._worker.close()
        self.predictor.close()
        if self.builder is not None:
            self.builder.close()

    def __enter__(self: ToolchainT) -> ToolchainT:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, job: Job[T], /) -> T | Failure:
        """Run a job in the worker, within the time that a build and a measurement may take."""
        result = self._worker.call(job, self._timeout_s)
        if isinstance(result, Failure) and result.kind in _STARVED and self.reference_model.stop_observing():
            return self._worker.call(job, self._timeout_s)
        return result

    @property
    def _timeout_s(self) -> float:
        limits = self.settings.worker
        return limits.build_timeout_s + limits.measure_timeout_s

    def _new_worker(self) -> Worker:
        settings = self.settings
        return Worker(self.context.logs_dir, settings.worker, worker_environment(tf32=settings.tf32))

    def _with_memory(self, plan: PrecisionPlan, measurement: Measurement) -> Measurement:
        """The measurement with what the plan's engine takes: as its own figures say, else predicted."""
        memory = plan_memory(self.context.rewriter.types, plan, self._shapes())
        path, measured = measurement.engine_path, measurement.memory
        if path is not None and path.exists():
            memory = replace(memory, engine_bytes=path.stat().st_size)
        if measured is not None:
            memory = replace(memory, context_bytes=measured.context_bytes, source=measured.source)
        return replace(measurement, memory=memory)

    def _shapes(self) -> dict[str, Shape]:
        """Concrete shapes of the FP32 values; empty where they cannot be observed."""
        ranges = self.reference_model.observe()
        return {} if isinstance(ranges, Failure) else {tensor: seen.shape for tensor, seen in ranges.items()}


DRIFT_WARNING = 0.1
"""A baseline whose latency has changed by more than this share since its first timing is a warning."""


class Timer:
    """Makes latencies that were taken hours apart comparable.

    The repetitions are calibrated once per device and then frozen, resumed runs included; each latency is scaled by the
    drift of the FP32 baseline that is timed in turn with it.
    """

    def __init__(self, data_dir: Path, engine: str, device: str, settings: LatencySettings) -> None:
        """Read nothing yet."""
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
        session = result.measurement.latency.session
        if session is not None:
            self.standings.add(plan.fingerprint, [session], result.objective)
        if self._record is None:
            self._record = TimingRecord(result.repetitions, result.baseline.median_ms, self._settings)
            write_json(self._path, self._record.to_json())
        drift = self._record.baseline_ms / result.baseline.median_ms
        measurement = result.measurement.with_drift(drift)
        if abs(drift - 1.0) > DRIFT_WARNING:
            text = (
                f"{DRIFT_TEXT} {1 / drift:.2f} times as long as when it was first measured; latencies are"
                " corrected for it, but less exact: lock the clocks and close other programs"
            )
            measurement = replace(measurement, warnings=(*measurement.warnings, text))
        return measurement

    @property
    def repetitions(self) -> Repetitions | None:
        """The frozen repetitions; None before the first timing."""
        self._record = self._record or TimingRecord.read(self._path, self._settings)
        return None if self._record is None else self._record.repetitions


class PredictedToolchain(TargetToolchain):
    """Predicts latency by the target's roofline and emulates FP16 rounding: needs no device of that kind.

    With a backend its engines are built, too: a plan whose engine cannot be built has failed, whatever its prediction.
    """

    latency_source: LatencySource = "predicted"
    error_source: ErrorSource = "emulated"

    def _measured(
        self, plan: PrecisionPlan, which: SampleSet, profile: bool, built: Built | None
    ) -> Measurement | Failure:
        return self.predictor.predict(plan, which)


class MeasuredToolchain(TargetToolchain):
    """Builds, computes and times with a backend on the GPU or the CPU here.

    The reference, the observed ranges and emulated errors are ONNX Runtime's.
    """

    latency_source: LatencySource = "measured"
    error_source: ErrorSource = "measured"
    builder: Builder
    _can_profile = True
    """After one failure nothing is profiled any more: each try may cost the worker."""

    @property
    def profiling(self) -> Profiling:
        return self.builder.profiling if self._can_profile else "none"

    def _measured(
        self, plan: PrecisionPlan, which: SampleSet, profile: bool, built: Built | None
    ) -> Measurement | Failure:
        assert built is not None
        job = self._measure_job(built, plan, which)
        if isinstance(job, Failure):
            return job
        result = self._call(job)
        if built.is_kept and _cannot_be_loaded(result) and _cannot_be_loaded(self._call(ReopenJob(job, 0))):
            self.builder.release(self._fp32, faulty=True)  # The baseline alone: another one has other tactics.
        measurement = self._timer.corrected(plan, result)
        if isinstance(measurement, Failure) or not profile or self.profiling == "none":
            return measurement
        try:
            layers = self.builder.layer_times(built)
        except (MptuneError, OSError) as error:
            message = error.message if isinstance(error, MptuneError) else str(error)
            layers = Failure(Stage.TIME, FailureKind.ERROR, message)
        self._can_profile = not isinstance(layers, Failure)
        if not isinstance(layers, Failure) and built.is_kept:
            write_json(EngineLayers.path(built.engine.path), EngineLayers(plan.fingerprint, layers).to_json())
        return with_group_times(measurement, layers, self.context.grouped)

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        built = self.builder.build(plan)
        if isinstance(built, Failure):
            return built
        try:
            job = self._measure_job(built, plan, "search")
            if isinstance(job, Failure):
                return job
            timings = self._call(ReopenJob(job, count))
            if not isinstance(timings, Failure):
                self._timer.standings.add(plan.fingerprint, timings)
            return timings
        finally:
            self.builder.release(plan)

    def _measure_job(self, built: Built, plan: PrecisionPlan, which: SampleSet) -> MeasureJob | Failure:
        baseline = self.builder.build(self._fp32, baseline=True)
        if isinstance(baseline, Failure):
            return baseline
        context = self.context
        return MeasureJob(
            engine=built.engine,
            baseline=baseline.engine,
            scoring=Scoring.in_run(context, which, plan),
            timing_samples=context.samples("search"),
            on_gpu=self.target.kind != "cpu",
            latency=self.settings.latency,
            repetitions=self._timer.repetitions,
            enough=self._timer.standings.enough(plan.fingerprint),
            ignored=self.settings.ignore,
        )


def _cannot_be_loaded(result: object) -> bool:
    """Whether an engine's file cannot be loaded, through no fault of the machine."""
    return isinstance(result, Failure) and result.stage is Stage.BUILD and not result.is_machine_fault
