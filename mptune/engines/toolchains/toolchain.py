"""The toolchain: builds, runs and times plans for one target with a backend's engines, or predicts them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.table import number_of
from mptune.engines.backends.backend import Backend, Built
from mptune.engines.backends.tensorrt import refused_in_bf16
from mptune.engines.base import (
    EmulatedSamples,
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
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.jobs.measure import MeasureJob, MeasureResult, ReopenJob
from mptune.engines.jobs.samples import Scoring
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.layers import EngineLayers, with_group_times
from mptune.engines.timing.latency import DRIFT_TEXT, Latency, LatencySource, TimingRecord
from mptune.engines.timing.spread import SessionTiming, Standings
from mptune.engines.toolchains.emulation import Emulation
from mptune.engines.toolchains.reference import ReferenceModel
from mptune.engines.workers import Workers
from mptune.errors import MptuneError
from mptune.files import write_json
from mptune.graph.fused import FusedNodes
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.parent import Worker
from mptune.targets.memory import plan_memory

if TYPE_CHECKING:
    from mptune.graph.hazards.hazard import TensorRange
    from mptune.targets.detect import Gpu
    from mptune.targets.roofline import LatencyTerms
    from mptune.targets.target import Target

DRIFT_WARNING = 0.1
"""A baseline whose latency has changed by more than this share since its first timing is a warning."""


class Toolchain(AbstractContextManager["Toolchain"]):
    """Evaluates plans for one target. Lives in the parent process.

    Every method that builds or runs anything does so in a worker process under a deadline; a plan that fails comes
    back as a ``Failure``. Nothing starts before it is needed. Predicted, the roofline gives latencies and emulation the
    errors: no device is needed. With a backend engines are built then, too: a plan whose engine cannot be has failed.

    Attributes:
        name: of the backend, or ``emulation``.
        device: name of the GPU or CPU that is timed; the target's where none is.
        fuses: whether engines fuse nodes into one kernel; else the result of each node is rounded.
        emulation_holds: whether engines round every value that a plan puts in FP16, so that emulated errors predict
            theirs.
    """

    def __init__(
        self,
        backend: Backend | None,
        target: Target,
        context: RunContext,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        latency_source: LatencySource = "measured",
        gpu: Gpu | None = None,
        device: str = "",
        workers: Workers | None = None,
    ) -> None:
        """Make the toolchain.

        Args:
            backend: builds the engines; None where none are built, and latency is predicted.
            provider: ONNX Runtime's, which computes the reference and emulations.
            gpu: that engines are built for and timed on; None for the target's, which is not here, and for a CPU.
            workers: of this run, which end with the toolchain; None makes them.
        """
        self.name = "emulation" if backend is None else backend.name
        self.device = device or target.title
        self.latency_source: LatencySource = "predicted" if backend is None else latency_source
        self.error_source: ErrorSource = "measured" if self.latency_source == "measured" else "emulated"
        self.target, self.context, self.provider = target, context, provider
        self._warnings = tuple(warnings)
        self._workers = workers or Workers(context.settings)
        self._workers.log_to(context.logs_dir)
        self.worker = self._workers.main
        function = context.settings.metric_function
        if function is not None:
            self.worker.on_question = partial(number_of, context.settings.metric, function)
        self.reference_model = ReferenceModel(context, provider, self.worker, self._workers.observer)
        self.builder = None if backend is None else backend.builder(self.reference_model, target, gpu)
        # Without a builder engines are taken to round as TensorRT's do.
        self.fuses = self.builder is None or self.builder.fuses
        self.emulation_holds = self.builder is None or self.builder.emulation_holds
        self._fp32 = context.grouped.uniform(Precision.FP32)
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.name} {self.device}".lower()).strip("-")
        self._timing_path = context.notes_dir / f"timing-{name}.json"
        self._timing: TimingRecord | None = None
        self._standings = Standings()  # What was timed in this process tells how exact the next timing has to be.
        self._can_profile = True
        self._terms: LatencyTerms | None = None

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """Compute the reference outputs of a set of samples, in FP32 without TF32, and write them to the context."""
        return self.reference_model.reference(which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        """Run the model over the search samples, and reduce float tensors to their ranges; ``stage`` gets progress."""
        return self.reference_model.observe(stage)

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """The nodes that another provider runs in a reduced precision than in FP32, or none does."""
        if self.builder is None:
            return refused_in_bf16(self.context.model, "tensorrt") if precision is Precision.BF16 else ()
        return self.builder.missing_kernels(precision)

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """The nodes that the engine computes as one, with FP32 inside, wherever they are FP16, such as norms."""
        return () if self.builder is None else self.builder.fused_nodes()

    def environment(self) -> Environment:
        """Versions, driver, clocks and warnings."""
        environment = describe_environment()
        if self.latency_source == "predicted":  # nothing is timed here: a busy or hot GPU disturbs nothing
            environment = replace(environment, warnings=())
        return environment.with_warnings(*self._warnings)

    @cached_property
    def emulation(self) -> Emulation:
        """Emulates plans; made when it is first needed."""
        fused = self.fused_nodes()
        nodes = () if isinstance(fused, Failure) else fused  # where the engine does not say, each step is rounded
        grouped = self.context.grouped
        if not self.fuses:
            from mptune.graph.writing.rounding_steps import with_rounding_steps

            grouped = with_rounding_steps(grouped, nodes, self.context.precisions)
        return Emulation(self.context, grouped, self.provider, self.worker, self.reference_model.shapes, nodes)

    @property
    def emulated_samples(self) -> EmulatedSamples:
        """The first few search samples, on which ``emulate`` takes errors; known once they are written."""
        return self.emulation.samples

    def emulate(self, plans: Sequence[PrecisionPlan], part: range | None = None) -> tuple[OutputError, ...] | Failure:
        """Emulated errors of plans on ``emulated_samples``, or on one part of them; no engine is built."""
        return self.emulation.errors(plans, part=range(self.emulated_samples.count) if part is None else part)

    def latency_terms(self) -> LatencyTerms | Failure:
        """The roofline's terms for the target: a prior where latency is measured, else latency is computed from it."""
        from mptune.targets.roofline import roofline

        ranges = self.observe()
        if isinstance(ranges, Failure):
            return replace(ranges, stage=Stage.TIME)
        if self._terms is None:
            shapes, tf32 = self.reference_model.shapes, self.context.settings.tf32
            self._terms = roofline(self.context.grouped, self.target, shapes, tf32=tf32)
        return self._terms

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """Build, run and time one plan. An engine whose plan failed is faulty, unless the machine was at fault.

        With ``profile`` the layer groups are timed, too, where ``profiling`` says so. A profile that fails is a warning
        of the measurement, not a failure.
        """
        built = None if self.builder is None else self.builder.build(plan)
        if isinstance(built, Failure):
            return built
        result: Measurement | Failure | None = None
        try:
            if built is not None and self.latency_source == "measured":
                job = self._measure_job(built, plan, which)
                timed = job if isinstance(job, Failure) else self.worker.call(job)
                result = timed if isinstance(timed, Failure) else self._corrected(timed, plan, built, profile=profile)
            elif isinstance(terms := self.latency_terms(), Failure):
                result = terms
            elif isinstance(errors := self.emulation.errors([plan], which), Failure):
                result = errors
            else:
                latency = Latency.predicted(terms.predict(plan))
                result = Measurement(latency, None, 1.0, errors[0], "emulated", build_s=0.0)
        finally:
            if self.builder is not None:
                self.builder.release(plan, faulty=isinstance(result, Failure) and not result.is_machine_fault)
        if isinstance(result, Failure):
            return result
        # What the plan's engine takes: as its own figures say, else predicted.
        memory, own = plan_memory(self.context.rewriter.types, plan, self.reference_model.shapes), result.memory
        if own is not None:
            memory = replace(memory, context_bytes=own.context_bytes, source=own.source)
        if built is None:
            return replace(result, memory=memory)
        path = built.engine.path if built.is_kept else None
        if path is not None and path.exists():
            memory = replace(memory, engine_bytes=path.stat().st_size)
        return replace(
            result,
            build_s=result.build_s if built.build_s is None else built.build_s,
            engine_path=path,
            warnings=tuple(dict.fromkeys((*built.warnings, *result.warnings))),
            memory=memory,
        )

    def _corrected(self, result: MeasureResult, plan: PrecisionPlan, built: Built, *, profile: bool) -> Measurement:
        """What was measured of a plan, corrected for drift, with the times of its layer groups."""
        timing = result.measurement.latency.session
        if timing is not None:
            self._standings.add(plan.fingerprint, [timing], result.objective)
        drift = self._drift(result)
        measurement = result.measurement.with_drift(drift)
        if abs(drift - 1.0) > DRIFT_WARNING:
            text = (
                f"{DRIFT_TEXT} {1 / drift:.2f} times as long as when it was first measured; latencies are"
                " corrected for it, but less exact: lock the clocks and close other programs"
            )
            measurement = replace(measurement, warnings=(*measurement.warnings, text))
        if self.builder is None or not profile or self.profiling == "none":
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

    def _drift(self, result: MeasureResult) -> float:
        """The first latency of the baseline on this device over that beside a result, which freezes the repetitions."""
        if self._timing is None:
            self._timing = TimingRecord(result.repetitions, result.baseline.median_ms, self.context.settings.latency)
            write_json(self._timing_path, self._timing.to_json())
        return self._timing.baseline_ms / result.baseline.median_ms

    def evaluate_tf32(self) -> Measurement | Failure | None:
        """All-FP32 with TF32; None where the device has none. Where latency is predicted, no engine of it is built.

        It is measured in a process of its own, whose environment allows TF32.
        """
        if self.target.tf32_tflops is None:
            return None
        if self.latency_source == "predicted":
            return self._predict_tf32()
        built = None if self.builder is None else self.builder.build_tf32()
        if built is None or isinstance(built, Failure):
            return built
        try:
            job = self._measure_job(built, self._fp32, "search")
            if isinstance(job, Failure):
                return job
            with Worker(self.context.logs_dir, self.context.settings.worker) as worker:
                worker.on_question = self.worker.on_question
                result = worker.call(job)
            return result if isinstance(result, Failure) else result.measurement.with_drift(self._drift(result))
        finally:
            if built.is_kept:
                built.engine.path.unlink(missing_ok=True)

    def _predict_tf32(self) -> Measurement | Failure:
        from mptune.targets.roofline import roofline

        ranges = self.observe()  # the shapes
        if isinstance(ranges, Failure):
            return replace(ranges, stage=Stage.TIME)
        error = self.emulation.tf32_error()
        if isinstance(error, Failure):
            return error
        terms = roofline(self.context.grouped, self.target, self.reference_model.shapes, tf32=True)
        latency = Latency.predicted(terms.base_ms - terms.tf32_gain_ms)
        return Measurement(latency, None, 1.0, error, "emulated", build_s=0.0)

    def _measure_job(self, built: Built, plan: PrecisionPlan, which: SampleSet) -> MeasureJob | Failure:
        assert self.builder is not None
        baseline = self.builder.build(self._fp32, baseline=True)
        if isinstance(baseline, Failure):
            return baseline
        settings = self.context.settings
        self._timing = self._timing or TimingRecord.read(self._timing_path, settings.latency)
        return MeasureJob(
            engine=built.engine,
            baseline=baseline.engine,
            scoring=Scoring.in_run(self.context, which, plan),
            timing_samples=self.context.samples("search"),
            on_gpu=self.target.kind != "cpu",
            latency=settings.latency,
            repetitions=None if self._timing is None else self._timing.repetitions,
            enough=self._standings.enough(plan.fingerprint),
            ignored=settings.ignore,
        )

    @property
    def profiling(self) -> Profiling:
        """``along``: any plan that is timed; ``none``: no profiler is usable, or it has failed once."""
        usable = self.builder is not None and self.latency_source == "measured" and self._can_profile
        return self.builder.profiling if self.builder is not None and usable else "none"

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        """Open the engine of a plan anew, this many times, and time each session; empty where latency is predicted."""
        if self.builder is None or self.latency_source == "predicted":
            return ()
        built = self.builder.build(plan)
        if isinstance(built, Failure):
            return built
        try:
            job = self._measure_job(built, plan, "search")
            timings = job if isinstance(job, Failure) else self.worker.call(ReopenJob(job, count))
            if not isinstance(timings, Failure):
                self._standings.add(plan.fingerprint, timings)
            return timings
        finally:
            self.builder.release(plan)

    def listen(self, callback: Callable[[Progress], None]) -> None:
        """Call this with the progress of long builds: while ``evaluate`` waits for them, and in its thread."""
        self.worker.on_progress = callback

    def restart(self) -> None:
        """End the worker process; the next job starts a new one. What runs beside it is ended, too."""
        self.reference_model.stop_observing()
        self.worker.restart()

    def close(self) -> None:
        """End the workers, and delete what is not kept. Idempotent."""
        self._workers.close()
        self.reference_model.stop_observing()
        if "emulation" in vars(self):
            self.emulation.close()
        if self.builder is not None:
            self.builder.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
