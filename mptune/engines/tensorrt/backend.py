"""The backends of TensorRT and TensorRT-RTX: engine files, built for the GPU here or for one that is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.backend import Availability, BackendStatus, Builder, Built, Place
from mptune.engines.base import Failure, MissingKernel, Profiling
from mptune.engines.tensorrt.builder import BuildJob, BuildOptions, parser_complaint
from mptune.engines.tensorrt.layers import LayerTime
from mptune.engines.tensorrt.library import (
    AHEAD_OF_TIME,
    RTX_CAPABILITIES,
    Kind,
    find_library,
    install_line,
    is_installed,
)
from mptune.engines.tensorrt.session import EngineOptions, EngineProfileJob, TensorRtEngine
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.targets.costs import default_workspace_mb

if TYPE_CHECKING:
    from mptune.engines.toolchains.reference import ReferenceModel
    from mptune.targets.detect import Gpu
    from mptune.targets.target import Target

TIMING_CACHE = "timing.cache"  # of a run, in its folder of engines
_GRACE_S = 20.0  # TensorRT is asked to stop at the deadline; the worker is killed this much later
_NOT_IN_BF16 = frozenset({"GRU", "HardSwish"})
"""Operators of ONNX that the parser of TensorRT-RTX 1.7 takes in FP32 and FP16 alone: it subtracts a GRU's gate from an
FP32 one ("ElementWiseOperation SUB must have same input types. But they are of types Float and BFloat16"); and "Only
FLOAT, HALF or INT8 input is supported for the HardSwish operator"."""
CURE = "give the model from before ONNX Runtime's optimiser, or --engine onnxruntime"


@dataclass(frozen=True)
class TensorRt:
    """Builds and measures on the GPU here; TensorRT-RTX builds for RTX GPUs that are elsewhere, too."""

    name: Kind

    def available(self, place: Place) -> Availability:
        gpu, model = place.gpu, place.model
        if place.target.kind == "cpu":
            hint = "name one with --target, or leave --engine out"
            return Availability(obstacle="it is for NVIDIA GPUs", hint=hint)
        title = self.name if gpu is not None and is_installed(self.name) else ""
        obstacle = self._why_not_ahead(place) if gpu is None else why_not_on(self.name, gpu)
        if obstacle is not None:
            hint = install_line(self.name, () if gpu is None else (gpu,))
            if gpu is None and self.name == "tensorrt":
                hint = "search on the device itself, or leave --engine at auto to predict"
            is_unexpected = gpu is not None and bool(title) and runs_on(self.name, gpu)
            return Availability("", title, obstacle, hint, is_unexpected)
        if model is not None and (operators := foreign_operators(model)):
            complaint = parser_complaint(self.name, model.path, place.plugins)
            if complaint is not None:
                obstacle = f"its parser does not take this model with {operators}: {complaint}"
                return Availability("", title, obstacle, CURE, is_unexpected=True, is_models_fault=gpu is not None)
        library = find_library(self.name)
        notes = () if isinstance(library, str) else library.warnings
        return Availability("builds" if gpu is None else "measures", title, loads_plugins=True, notes=notes)

    def _why_not_ahead(self, place: Place) -> str | None:
        """Why no engines are built for a device that is not here; some are only where TensorRT-RTX is named."""
        if self.name == "tensorrt":
            return f"TensorRT builds engines on the device that they are for, and {place.target.title} is not here"
        if place.target.compute_capability not in (AHEAD_OF_TIME if place.is_named else RTX_CAPABILITIES):
            return f"it builds for compute capability {_listed(AHEAD_OF_TIME)}"
        library = find_library(self.name)
        return library if isinstance(library, str) else None

    def statuses(self, gpus: Sequence[Gpu]) -> tuple[BackendStatus, ...]:
        name, library = self.name, find_library(self.name)
        if isinstance(library, str):
            return (BackendStatus(name, False, library, install_line(name, gpus)),)
        version = library.version + "".join(f" ({warning})" for warning in library.warnings)
        gpu = next((gpu for gpu in gpus if runs_on(name, gpu)), None)
        if gpu is not None and library.cuda_obstacle is None:
            return (BackendStatus(name, True, f"{version}: builds and measures on {gpu.name}"),)
        obstacle = library.cuda_obstacle if gpu is not None else "no GPU that it runs on was found"
        if name == "tensorrt-rtx":
            text = f"{version}: builds ahead of time for compute capability {_listed(AHEAD_OF_TIME)}; {obstacle}"
            return (BackendStatus(name, True, text),)
        return (BackendStatus(name, False, f"{version}: {obstacle}"),)

    def builder(self, reference: ReferenceModel, target: Target, gpu: Gpu | None) -> TensorRtBuilder:
        return TensorRtBuilder(self.name, reference, target, gpu)


TENSORRT, TENSORRT_RTX = TensorRt("tensorrt"), TensorRt("tensorrt-rtx")


def runs_on(kind: Kind, gpu: Gpu) -> bool:
    """Whether engines of a kind compute FP32 and FP16 on a GPU."""
    return kind != "tensorrt-rtx" or gpu.compute_capability in RTX_CAPABILITIES


def why_not_on(kind: Kind, gpu: Gpu) -> str | None:
    """Why TensorRT or TensorRT-RTX cannot measure on a GPU that is here; None where it can."""
    if not runs_on(kind, gpu):
        return f"TensorRT-RTX computes FP32 and FP16 on GPUs of compute capability {_listed(sorted(RTX_CAPABILITIES))}"
    library = find_library(kind)
    return library if isinstance(library, str) else library.cuda_obstacle


def _listed(capabilities: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities)


def foreign_operators(model: Model, domain: str = "") -> str:
    """Operators of other domains than ONNX's own, or of one of them, and how many nodes each has, as a text."""
    counts = Counter(f"{node.domain}.{node.op_type}" for node in model.nodes if not node.is_standard)
    return ", ".join(f"{name} ({count})" for name, count in counts.items() if name.startswith(domain))


def refused_in_bf16(model: Model, kind: Kind) -> tuple[MissingKernel, ...]:
    """The nodes that the parser refuses in BF16."""
    title = "TensorRT-RTX" if kind == "tensorrt-rtx" else "TensorRT"
    others = "" if kind == "tensorrt-rtx" else "; TensorRT's own has not been tried"
    reason = "the ONNX parser of TensorRT-RTX 1.7 refuses {} in BF16" + others
    nodes = (node for node in model.nodes if node.is_standard and node.op_type in _NOT_IN_BF16)
    return tuple(MissingKernel(n.name, n.op_type, title, "", reason.format(n.op_type)) for n in nodes)


class TensorRtBuilder(Builder):
    """Builds engines of plans in the worker and finds them again: builds of one plan may differ in speed."""

    profiling: Profiling = "along"

    def __init__(self, kind: Kind, reference: ReferenceModel, target: Target, gpu: Gpu | None) -> None:
        self._kind, self._target, self._gpu = kind, target, gpu
        self._context, self._worker = reference.context, reference.worker
        library = find_library(kind)
        assert not isinstance(library, str), library
        self._version = library.version
        self._timeout_s = self._context.settings.worker.build_timeout_s

    def build(self, plan: PrecisionPlan, *, baseline: bool = False) -> Built | Failure:
        """The file of a plan where there is one, else built: for the GPU here, else for the target."""
        # The all-FP32 plan is the baseline, which never uses TF32.
        return self._build(plan, self._path(plan), tf32=self._context.settings.tf32 and bool(plan.reduced_groups))

    def build_tf32(self) -> Built | Failure | None:
        plan = self._context.grouped.uniform(Precision.FP32)
        path = self._path(plan)
        return self._build(plan, path.with_name(f"tf32-{path.name}"), tf32=True)

    def _build(self, plan: PrecisionPlan, path: Path, *, tf32: bool) -> Built | Failure:
        context, settings, gpu = self._context, self._context.settings, self._gpu
        is_rtx = self._kind == "tensorrt-rtx"
        engine = TensorRtEngine(path, EngineOptions(self._kind, settings.latency.cuda_graph, settings.plugins))
        if path.exists():
            return Built(engine, 0.0, is_kept=True)
        capability = self._target.compute_capability if gpu is None else gpu.compute_capability
        shared_gb = gpu.memory_gb if gpu is not None and gpu.is_jetson else None
        limit = settings.tensorrt.workspace_mb or default_workspace_mb(shared_gb)
        options = BuildOptions(
            kind=self._kind,
            tf32=tf32,
            capabilities=(capability,) if is_rtx and capability is not None else (),
            shapes=settings.shapes,
            settings=replace(settings.tensorrt, workspace_mb=limit),
            plugins=settings.plugins,
            timing_cache=context.engines_dir / TIMING_CACHE if settings.tensorrt.timing_cache else None,
        )
        samples = context.samples("search"), context.samples("held_out")
        model = context.rewriter.write(plan, context.scratch(f"build-{path.stem}"))
        try:
            alone = gpu is not None and gpu.is_jetson
            job = BuildJob(model, path, options, samples, self._timeout_s, alone)
            built = self._worker.call(job, self._timeout_s + _GRACE_S)
        finally:
            model.unlink(missing_ok=True)
        return built if isinstance(built, Failure) else Built(engine, *built, is_kept=True)

    def release(self, plan: PrecisionPlan, *, faulty: bool = False) -> None:
        if faulty:
            self._path(plan).unlink(missing_ok=True)

    def close(self) -> None:
        """Engines stay."""

    def layer_times(self, built: Built) -> tuple[LayerTime, ...] | Failure:
        assert isinstance(built.engine, TensorRtEngine)
        return self._worker.call(EngineProfileJob(built.engine, self._context.samples("search")))

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``Toolchain``; by operator, as TensorRT's parser refuses them."""
        return refused_in_bf16(self._context.model, self._kind) if precision is Precision.BF16 else ()

    def _path(self, plan: PrecisionPlan) -> Path:
        return self._context.engines_dir / f"{plan.fingerprint}.{self._kind}-{self._version}.engine"
