"""The toolchains with TensorRT and TensorRT-RTX: measured on the GPU here, or built for one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import Failure, Measurement, Profiling, SampleSet, Stage, Workspace
from mptune.engines.jobs.layer_times import LayerTime
from mptune.engines.jobs.measure import MeasureResult
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import LibraryReport, MeasureEngineJob
from mptune.engines.tensorrt.library import Kind
from mptune.engines.tensorrt.profile import EngineProfileJob
from mptune.engines.tensorrt.store import EngineStore
from mptune.engines.timing.latency import Repetitions
from mptune.engines.toolchains.onnxruntime import OnnxRuntimeToolchain
from mptune.engines.toolchains.shared import OrtToolchain, PredictedToolchain
from mptune.engines.workload import Workload
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.targets.target import Gpu, Target

_TIMING_CACHE = "timing.cache"
_RUNTIME_CACHE = "runtime.cache"


class _Storing(OrtToolchain):
    """Keeps the engines that it builds."""

    def _open_store(self, options: BuildOptions, version: str) -> EngineStore:
        timeout_s = self.settings.worker.build_timeout_s
        return EngineStore(self._worker, self.workload, options, version, timeout_s)


class TensorRtToolchain(_Storing, OnnxRuntimeToolchain):
    """Builds, computes and times with TensorRT or TensorRT-RTX on the GPU here.

    The reference, the observed ranges and emulated errors stay ONNX Runtime's.
    """

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
        """See ``OrtToolchain``.

        Args:
            target: the device.
            workload: the model, its groups and the run's paths.
            settings: of the search.
            provider: of ONNX Runtime, for the reference.
            warnings: for ``environment``.
            gpu: the device here.
            kind: TensorRT or TensorRT-RTX.
            library: as the worker found it.
        """
        told = (*warnings, *library.warnings)
        super().__init__(target, workload, settings, provider, told, device=gpu.name)
        self.name = self._timed_by = kind
        self._kind = kind
        options = _options(
            kind, workload.workspace, settings, gpu.compute_capability if kind == "tensorrt-rtx" else None
        )
        self._store = self._open_store(options, library.version)
        self._fp32 = workload.grouped.uniform(Precision.FP32)

    def __enter__(self) -> TensorRtToolchain:
        return self

    @property
    def profiling(self) -> Profiling:
        """See ``Toolchain``."""
        return "none" if self._profile_failed else "along"

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        found = self._store.measured(plan, partial(super().evaluate, plan, which, profile=profile))
        if isinstance(found, Failure) and found.stage is Stage.BUILD and not found.is_machine_fault:
            self._store.discard(self._fp32)  # The file that cannot be loaded may be the baseline's.
        return found

    def _measure(
        self, plan: PrecisionPlan, which: SampleSet, repetitions: Repetitions | None
    ) -> MeasureResult | Failure:
        stored, baseline = self._store.find_or_build(plan), self._store.find_or_build(self._fp32)
        if isinstance(stored, Failure):
            return stored
        if isinstance(baseline, Failure):
            return baseline
        paths = self.workspace
        job = MeasureEngineJob(
            model=stored.path,
            baseline=baseline.path,
            samples=paths.samples(which),
            timing_samples=paths.samples("search"),
            reference=paths.reference(which),
            provider="cuda",
            latency=self.settings.latency,
            repetitions=repetitions,
            metric=self.settings.metric,
            kind=self._kind,
            nodes=self._store.node_precisions(plan),
            runtime_cache=self._runtime_cache,
        )
        return self._worker.call(job, self.timeout_s)

    def _layer_times(self, plan: PrecisionPlan) -> tuple[LayerTime, ...] | Failure:
        """What each layer of a plan's engine takes: its file is loaded again, so that no fault costs the figures."""
        stored = self._store.find_or_build(plan)
        if isinstance(stored, Failure):
            return stored
        samples, latency = self.workspace.samples("search"), self.settings.latency
        job = EngineProfileJob(stored.path, samples, self._kind, latency, self._runtime_cache)
        return self._worker.call(job, self.timeout_s)

    @property
    def _runtime_cache(self) -> Path | None:
        return self.workspace.engines_dir / _RUNTIME_CACHE if self._kind == "tensorrt-rtx" else None


class AheadToolchain(_Storing, PredictedToolchain):
    """Builds TensorRT-RTX engines for a GPU that is not here, beside predicted latencies and emulated errors.

    A plan whose engine cannot be built has failed, whatever its prediction.
    """

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
        """See ``OrtToolchain``; ``library`` is TensorRT-RTX as the worker found it."""
        super().__init__(target, workload, settings, provider, (*warnings, *library.warnings))
        self.name = "tensorrt-rtx"
        options = _options("tensorrt-rtx", workload.workspace, settings, target.compute_capability)
        self._store = self._open_store(options, library.version)

    def __enter__(self) -> AheadToolchain:
        return self

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        return self._store.measured(plan, partial(super().evaluate, plan, which))


def _options(
    kind: Kind, workspace: Workspace, settings: SearchSettings, capability: tuple[int, int] | None
) -> BuildOptions:
    return BuildOptions(
        kind=kind,
        tf32=settings.tf32,
        capabilities=() if capability is None else (capability,),
        shapes=settings.shapes,
        settings=settings.tensorrt,
        timing_cache=workspace.engines_dir / _TIMING_CACHE if settings.tensorrt.timing_cache else None,
    )
