"""The toolchains with TensorRT and TensorRT-RTX: measured on the GPU here, or built for one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import (
    ErrorSource,
    Failure,
    Measurement,
    Profiling,
    SampleSet,
    Stage,
    Workspace,
)
from mptune.engines.jobs.layer_times import LayerTime
from mptune.engines.jobs.measure import ReopenJob
from mptune.engines.jobs.samples import Scoring
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import EngineProfileJob, LibraryReport, MeasureEngineJob
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.store import EngineStore
from mptune.engines.timing.latency import LatencySource
from mptune.engines.timing.spread import SessionTiming
from mptune.engines.toolchains.shared import BaseToolchain, Profiler, Timer, predict
from mptune.engines.workload import Workload
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings
from mptune.targets.memory import default_workspace_mb

if TYPE_CHECKING:
    from mptune.targets.target import Gpu, Target

_TIMING_CACHE = "timing.cache"
_RUNTIME_CACHE = "runtime.cache"


class TensorRtToolchain(BaseToolchain):
    """Builds, computes and times with TensorRT or TensorRT-RTX on the GPU here.

    The reference, the observed ranges and emulated errors are ONNX Runtime's.
    """

    latency_source: LatencySource = "measured"
    error_source: ErrorSource = "measured"

    def __init__(
        self,
        target: Target,
        workload: Workload,
        settings: SearchSettings,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        gpu: Gpu,
        kind: Kind,
        library: LibraryReport,
    ) -> None:
        """See ``BaseToolchain``."""
        super().__init__(target, workload, settings, provider, (*warnings, *library.warnings), device=gpu.name)
        self.name = kind
        self._kind = kind
        capability = gpu.compute_capability if kind == "tensorrt-rtx" else None
        shares = gpu.is_jetson
        options = _build_options(kind, workload.workspace, settings, capability, gpu.memory_gb if shares else None)
        self._store = EngineStore(
            self._worker, workload, options, library.version, settings.worker.build_timeout_s, alone=shares
        )
        self._timer = Timer(workload.workspace.data_dir, kind, self.device, settings.latency)
        self._profiler = Profiler(workload.grouped)
        self._fp32 = workload.grouped.uniform(Precision.FP32)

    @property
    def profiling(self) -> Profiling:
        """See ``Toolchain``."""
        return "none" if self._profiler.failed else "along"

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        return self._with_memory(plan, self._store.evaluate(plan, partial(self._time, plan, which, profile=profile)))

    def _time(self, plan: PrecisionPlan, which: SampleSet, *, profile: bool) -> Measurement | Failure:
        job = self._measure_job(plan, which)
        if isinstance(job, Failure):
            return job
        result = self._call(job)
        if _cannot_be_loaded(result) and _cannot_be_loaded(self._call(ReopenJob(job, 0))):
            self._store.discard(self._fp32)  # The baseline alone: another one has other tactics.
        measurement = self._timer.corrected(plan, result)
        if isinstance(measurement, Failure) or not profile or self.profiling == "none":
            return measurement
        return self._profiler.profile(measurement, partial(self._layer_times, plan))

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        """See ``Toolchain``: the engine's file is loaded anew."""
        job = self._measure_job(plan, "search")
        return job if isinstance(job, Failure) else self._timer.with_reopened(plan, self._call(ReopenJob(job, count)))

    def _measure_job(self, plan: PrecisionPlan, which: SampleSet) -> MeasureEngineJob | Failure:
        """The job that measures a plan's engine; engines that are not there are built."""
        stored, baseline = self._store.find_or_build(plan), self._store.find_or_build(self._fp32)
        if isinstance(stored, Failure):
            return stored
        if isinstance(baseline, Failure):
            return baseline
        paths = self.workload.workspace
        return MeasureEngineJob(
            model=stored.path,
            baseline=baseline.path,
            samples=paths.samples(which),
            timing_samples=paths.samples("search"),
            reference=paths.reference(which),
            provider="cuda",
            latency=self.settings.latency,
            repetitions=self._timer.repetitions,
            enough=self._timer.standings.enough(plan.fingerprint),
            ignored=self.settings.ignore,
            metric=self.settings.metric,
            dependent=self.workload.dependent_outputs,
            scoring=Scoring.of(self.settings, paths.sketches(plan, which)),
            kind=self._kind,
            nodes=self.workload.rewriter.node_precisions(plan),
            runtime_cache=self._runtime_cache,
            fp64_inputs=self._fp64_inputs,
        )

    def _layer_times(self, plan: PrecisionPlan) -> tuple[LayerTime, ...] | Failure:
        """The time of each layer of a plan's engine, whose file is loaded again: no fault costs the latency."""
        stored = self._store.find_or_build(plan)
        if isinstance(stored, Failure):
            return stored
        samples, latency = self.workload.workspace.samples("search"), self.settings.latency
        kept = (self._runtime_cache, self._fp64_inputs)
        return self._call(EngineProfileJob(stored.path, samples, self._kind, latency, *kept))

    @property
    def _fp64_inputs(self) -> frozenset[str]:
        return frozenset(info.name for info in self.workload.model.inputs if info.dtype == "double")

    @property
    def _runtime_cache(self) -> Path | None:
        return self.workload.workspace.engines_dir / _RUNTIME_CACHE if self._kind == "tensorrt-rtx" else None


class AheadToolchain(BaseToolchain):
    """Builds TensorRT-RTX engines for a GPU that is not here, beside predicted latencies and emulated errors.

    A plan whose engine cannot be built has failed, whatever its prediction.
    """

    name = "tensorrt-rtx"
    _kind: Kind = "tensorrt-rtx"
    latency_source: LatencySource = "predicted"
    error_source: ErrorSource = "emulated"

    def __init__(
        self,
        target: Target,
        workload: Workload,
        settings: SearchSettings,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        library: LibraryReport,
    ) -> None:
        """See ``BaseToolchain``; ``library`` is TensorRT-RTX as the worker found it."""
        super().__init__(target, workload, settings, provider, (*warnings, *library.warnings))
        options = _build_options("tensorrt-rtx", workload.workspace, settings, target.compute_capability)
        self._store = EngineStore(self._worker, workload, options, library.version, settings.worker.build_timeout_s)

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        return self._with_memory(plan, self._store.evaluate(plan, partial(predict, self, plan, which)))


def _cannot_be_loaded(result: object) -> bool:
    """Whether an engine's file cannot be loaded, through no fault of the machine."""
    return isinstance(result, Failure) and result.stage is Stage.BUILD and not result.is_machine_fault


def _build_options(
    kind: Kind,
    workspace: Workspace,
    settings: SearchSettings,
    capability: tuple[int, int] | None,
    shared_gb: float | None = None,
) -> BuildOptions:
    limit = settings.tensorrt.workspace_mb or default_workspace_mb(shared_gb)
    return BuildOptions(
        kind=kind,
        tf32=settings.tf32,
        capabilities=() if capability is None else (capability,),
        shapes=settings.shapes,
        settings=replace(settings.tensorrt, workspace_mb=limit),
        timing_cache=workspace.engines_dir / _TIMING_CACHE if settings.tensorrt.timing_cache else None,
    )
