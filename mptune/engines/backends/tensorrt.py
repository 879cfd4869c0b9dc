"""The backends of TensorRT and TensorRT-RTX: engine files, built for the GPU here or for one that is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.backends.backend import Availability, BackendStatus, Bench, Built, Place
from mptune.engines.base import Failure, MissingKernel, Profiling
from mptune.engines.jobs.layer_times import LayerTime
from mptune.engines.ort.cuda_session import PROBE_TIMEOUT_S
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import BuildJob, EngineProfileJob, LibraryJob, LibraryReport, TensorRtEngine
from mptune.engines.tensorrt.library import (
    AHEAD_OF_TIME,
    RTX_CAPABILITIES,
    Kind,
    install_line,
    is_installed,
)
from mptune.engines.tensorrt.operators import CURE, ParseJob, foreign_operators, named_operators, refused_in_bf16
from mptune.engines.tensorrt.session import EngineOptions
from mptune.graph.fused import FusedNodes
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.parent import run_once
from mptune.targets.memory import default_workspace_mb

if TYPE_CHECKING:
    from mptune.targets.detect import Gpu
    from mptune.targets.target import Target

TIMING_CACHE = "timing.cache"
"""Of a run, in its folder of engines."""
_RUNTIME_CACHE = "runtime.cache"
_GRACE_S = 20.0
"""TensorRT is asked to stop at the deadline; the worker is killed this much later."""


@dataclass(frozen=True)
class TensorRt:
    """Builds and measures on the GPU here; TensorRT-RTX builds for RTX GPUs that are elsewhere, too."""

    name: Kind

    def available(self, place: Place) -> Availability:
        target, gpu, flag = place.target, place.gpu, f"--engine {self.name}"
        if target.kind == "cpu":
            refusal = f"{flag} is for NVIDIA GPUs", "name one with --target, or leave --engine out"
            return Availability(refusal=refusal)
        if gpu is None:
            return self._ahead(place)
        title = self.name if is_installed(self.name) else ""
        obstacle = why_not_on(self.name, gpu)
        if obstacle is not None:
            refusal = f"{flag} cannot measure on {gpu.name}: {obstacle}", install_line(self.name, (gpu,))
            passed = f"{self.name} is passed over ({obstacle}): fix that, or give --engine onnxruntime"
            warning = passed if title and runs_on(self.name, gpu) else ""
            ahead = Availability() if place.is_named else self._ahead(place)
            return replace(ahead, title=title, obstacle=obstacle, refusal=refusal, warning=warning or ahead.warning)
        complaint = None if place.model is None else why_not_parsed(self.name, place.model, place.plugins)
        if complaint is None:
            return Availability("measures", title, loads_plugins=True, notes=_report(self.name).warnings)
        refusal = f"{flag} cannot be used: {complaint}", CURE
        return Availability("", title, complaint, refusal, f"{self.name} is passed over: {complaint}", True)

    def _ahead(self, place: Place) -> Availability:
        """For a device that is elsewhere."""
        target, flag = place.target, f"--engine {self.name}"
        if self.name != "tensorrt-rtx":
            message = f"TensorRT builds engines on the device that they are for, and {target.title} is not here"
            return Availability(refusal=(message, "search on the device itself, or leave --engine at auto to predict"))
        if not place.is_named and target.compute_capability not in RTX_CAPABILITIES:
            return Availability()
        obstacle = _why_not_ahead(target)
        if obstacle is not None:
            refusal = f"{flag} cannot build for {target.title}: {obstacle}", install_line(self.name)
            return Availability(refusal=refusal)
        complaint = None if place.model is None else why_not_parsed(self.name, place.model, place.plugins)
        if complaint is None:
            return Availability("builds", loads_plugins=True, notes=_report(self.name).warnings)
        refusal = f"{flag} cannot build for {target.title}: {complaint}", CURE
        return Availability(refusal=refusal, warning=f"{self.name} is passed over: {complaint}; {CURE}")

    def statuses(self, gpus: Sequence[Gpu]) -> tuple[BackendStatus, ...]:
        name, library = self.name, find_library(self.name)
        if isinstance(library, str):
            return (BackendStatus(name, False, library, install_line(name, gpus)),)
        version = library.version + "".join(f" ({warning})" for warning in library.warnings)
        fitting = next((gpu for gpu in gpus if runs_on(name, gpu)), None)
        if fitting is not None and library.cuda_obstacle is None:
            return (BackendStatus(name, True, f"{version}: builds and measures on {fitting.name}"),)
        obstacle = library.cuda_obstacle if fitting is not None else "no GPU that it runs on was found"
        if name == "tensorrt-rtx":
            text = f"{version}: builds ahead of time for compute capability {_listed(AHEAD_OF_TIME)}; {obstacle}"
            return (BackendStatus(name, True, text),)
        install = library.cuda_install if fitting is not None else ""
        return (BackendStatus(name, False, f"{version}: {obstacle}", install),)

    def builder(self, bench: Bench) -> TensorRtBuilder:
        return TensorRtBuilder(self.name, bench)


TENSORRT, TENSORRT_RTX = TensorRt("tensorrt"), TensorRt("tensorrt-rtx")


def runs_on(kind: Kind, gpu: Gpu) -> bool:
    """Whether engines of a kind compute FP32 and FP16 on a GPU."""
    return kind != "tensorrt-rtx" or gpu.compute_capability in RTX_CAPABILITIES


def why_not_on(kind: Kind, gpu: Gpu) -> str | None:
    """Why TensorRT or TensorRT-RTX cannot measure on a GPU that is here; None where it can."""
    if not runs_on(kind, gpu):
        capabilities = _listed(sorted(RTX_CAPABILITIES))
        return f"TensorRT-RTX computes FP32 and FP16 on GPUs of compute capability {capabilities}"
    library = find_library(kind)
    return library if isinstance(library, str) else library.cuda_obstacle


def _why_not_ahead(target: Target) -> str | None:
    """Why TensorRT-RTX cannot build for a GPU that is not here; None where it can."""
    if target.compute_capability not in AHEAD_OF_TIME:
        return f"it builds for compute capability {_listed(AHEAD_OF_TIME)}"
    library = find_library("tensorrt-rtx")
    return library if isinstance(library, str) else None


def _listed(capabilities: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def why_not_parsed(kind: Kind, model: Model, plugins: tuple[Path, ...] = ()) -> str | None:
    """Why TensorRT or TensorRT-RTX cannot parse a model with operators of other domains than ONNX's own; else None."""
    operators = foreign_operators(model)
    complaint = run_once(ParseJob(kind, model.path, plugins), PROBE_TIMEOUT_S) if operators else None
    named = named_operators(operators)
    return None if complaint is None else f"its parser does not take this model with {named}: {complaint}"


@cache
def find_library(kind: Kind) -> LibraryReport | str:
    """TensorRT or TensorRT-RTX as a worker finds it, or why it cannot be used. Cached for the process."""
    if not is_installed(kind):
        return f"{kind} is not installed"
    return run_once(LibraryJob(kind), PROBE_TIMEOUT_S)


def _report(kind: Kind) -> LibraryReport:
    library = find_library(kind)
    assert not isinstance(library, str), library
    return library


class TensorRtBuilder:
    """Builds engines of plans in the worker and finds them again.

    Two builds of a plan may choose different kernels and differ in speed, so a plan that is measured again (in a
    confirmation) is measured with the file of its first build.
    """

    fuses = True
    emulation_holds = True
    profiling: Profiling = "along"

    def __init__(self, kind: Kind, bench: Bench) -> None:
        self.kind = kind
        self._bench = bench
        self._version = _report(kind).version
        self._workspace = bench.workload.workspace
        self._options = _build_options(kind, bench)
        self._timeout_s = bench.settings.worker.build_timeout_s

    def build(self, plan: PrecisionPlan, *, baseline: bool = False) -> Built | Failure:
        """The file of a plan where there is one, else built."""
        space, workload, path = self._workspace, self._bench.workload, self._path(plan)
        engine = self._engine(plan, path)
        if path.exists():
            return Built(engine, 0.0, is_kept=True)
        model = workload.rewriter.write(plan, space.scratch(f"build-{path.stem}"))
        try:
            job = BuildJob(
                model=model,
                engine_path=path,
                # The all-FP32 plan is the baseline, which never uses TF32.
                options=replace(self._options, tf32=self._options.tf32 and bool(plan.reduced_groups)),
                samples=(space.samples("search"), space.samples("held_out")),
                timeout_s=self._timeout_s,
                alone=self._bench.gpu is not None and self._bench.gpu.is_jetson,
            )
            built = self._bench.worker.call(job, self._timeout_s + _GRACE_S)
        finally:
            model.unlink(missing_ok=True)
        return built if isinstance(built, Failure) else Built(engine, built.build_s, built.warnings, is_kept=True)

    def release(self, plan: PrecisionPlan, *, faulty: bool = False) -> None:
        """A faulty file is deleted, any other stays."""
        if faulty:
            self._path(plan).unlink(missing_ok=True)

    def close(self) -> None:
        """Engines stay."""

    def layer_times(self, built: Built) -> tuple[LayerTime, ...] | Failure:
        assert isinstance(built.engine, TensorRtEngine)
        return self._bench.call(EngineProfileJob(built.engine, self._workspace.samples("search")))

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``NamesKernels``; by operator, as TensorRT's parser refuses them."""
        return refused_in_bf16(self._bench.workload.model, self.kind) if precision is Precision.BF16 else ()

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """See ``NamesKernels``; what TensorRT fuses is known once it has built an engine, and differs by version."""
        return ()

    def _path(self, plan: PrecisionPlan) -> Path:
        return self._workspace.engines_dir / f"{plan.fingerprint}.{self.kind}-{self._version}.engine"

    def _engine(self, plan: PrecisionPlan, path: Path) -> TensorRtEngine:
        workload = self._bench.workload
        options = EngineOptions(
            self.kind,
            self._bench.settings.latency,
            runtime_cache=self._workspace.engines_dir / _RUNTIME_CACHE if self.kind == "tensorrt-rtx" else None,
            plugins=self._bench.settings.plugins,
            fp64_inputs=frozenset(info.name for info in workload.model.inputs if info.dtype == "double"),
        )
        return TensorRtEngine(path, options, workload.rewriter.node_precisions(plan))


def _build_options(kind: Kind, bench: Bench) -> BuildOptions:
    """How the engines of a run are built: for the GPU here, else for the target."""
    gpu, settings = bench.gpu, bench.settings
    capability = bench.target.compute_capability if gpu is None else gpu.compute_capability
    shared_gb = gpu.memory_gb if gpu is not None and gpu.is_jetson else None
    limit = settings.tensorrt.workspace_mb or default_workspace_mb(shared_gb)
    return BuildOptions(
        kind=kind,
        tf32=settings.tf32,
        capabilities=(capability,) if kind == "tensorrt-rtx" and capability is not None else (),
        shapes=settings.shapes,
        settings=replace(settings.tensorrt, workspace_mb=limit),
        plugins=settings.plugins,
        timing_cache=bench.workload.workspace.engines_dir / TIMING_CACHE if settings.tensorrt.timing_cache else None,
    )
