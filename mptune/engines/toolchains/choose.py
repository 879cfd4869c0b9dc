"""Choose the target and the toolchain that serves it; list what is installed for ``mptune doctor``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Literal

from mptune.engines.environment import cpu_model
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.jobs import LibraryJob, LibraryReport
from mptune.engines.tensorrt.library import AHEAD_OF_TIME, INSTALL, RTX_CAPABILITIES, Kind, is_installed
from mptune.engines.tensorrt.store import CURE, ParseJob, foreign_operators, unparsed_operators
from mptune.engines.toolchains.onnxruntime import OnnxRuntimeToolchain
from mptune.engines.toolchains.reference import PROBE_TIMEOUT_S, probe
from mptune.engines.toolchains.shared import BaseToolchain, PredictedToolchain
from mptune.engines.toolchains.tensorrt import AheadToolchain, TensorRtToolchain
from mptune.engines.worker.parent import run_once
from mptune.engines.workload import Workload
from mptune.errors import TargetError
from mptune.graph.loading.model import Model
from mptune.settings import EngineChoice, SearchSettings
from mptune.targets.detect import hidden_gpu
from mptune.targets.jetson import same_memory
from mptune.targets.target import Gpu, Target, check_precisions, detect_gpus, load_target, match_target

DEFAULT_TARGET = "jetson-orin-nano-8gb"
"""The profile whose latency is predicted where there is no GPU and no target is named."""

_TENSORRT_KINDS: tuple[Kind, ...] = ("tensorrt", "tensorrt-rtx")
_ORT_INSTALL = "pip install onnxruntime-gpu" if platform.machine() in ("x86_64", "AMD64") else "pip install onnxruntime"
_CUDA_INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]' and a driver for its CUDA version"


@dataclass(frozen=True)
class TargetChoice:
    """A target and why it was chosen.

    Attributes:
        why: one line for the user; empty where the user named the target.
    """

    target: Target
    why: str = ""


@dataclass(frozen=True)
class ToolchainStatus:
    """One line of ``mptune doctor``.

    Attributes:
        install: the command that installs it; empty where nothing is missing.
    """

    name: str
    available: bool
    reason: str
    install: str = ""


def choose_target(name: str) -> TargetChoice:
    """Find the target that ``--target`` names; ``auto`` is the GPU here, else a profile to predict.

    Raises:
        TargetError: the name is neither a profile nor a file; or it is ``auto``, and a GPU is here that nothing names.
    """
    if name != "auto":
        return TargetChoice(load_target(name))
    gpus = detect_gpus()
    if not gpus:
        refuse_hidden_gpu("predicts for another device")
        why = f"no GPU was found: latency is predicted for {DEFAULT_TARGET}; --target names another profile"
        return TargetChoice(load_target(DEFAULT_TARGET), why)
    target, reason = match_target(gpus[0]), probe("cuda")
    if reason is None or any(why_not_on(kind, gpus[0]) is None for kind in _TENSORRT_KINDS):
        return TargetChoice(target, f"{gpus[0].name} was found")
    obstacles = "; ".join((f"onnxruntime: {reason}", *_obstacles(gpus[0])))
    return TargetChoice(target, f"{gpus[0].name} was found, but cannot be measured ({obstacles}): latency is predicted")


def _obstacles(gpu: Gpu) -> tuple[str, ...]:
    """Why TensorRT cannot measure on a GPU although it is installed."""
    kinds = [kind for kind in _TENSORRT_KINDS if is_installed(kind) and _runs_on(kind, gpu)]
    return tuple(f"{kind}: {why_not_on(kind, gpu)}" for kind in kinds)


def refuse_hidden_gpu(otherwise: str) -> None:
    """Stop where an NVIDIA GPU is here that neither nvidia-smi nor a Jetson's files name.

    Args:
        otherwise: what another target does, for the hint.

    Raises:
        TargetError: it is.
    """
    file = hidden_gpu()
    if file is not None:
        raise TargetError(
            f"{file} shows an NVIDIA GPU, but neither nvidia-smi nor a Jetson's files name it",
            "make nvidia-smi run here (in a container: start it with NVIDIA's container runtime and"
            f" NVIDIA_DRIVER_CAPABILITIES=all); --target NAME {otherwise}",
        )


def open_toolchain(
    choice: EngineChoice,
    target: Target,
    workload: Workload,
    settings: SearchSettings,
) -> BaseToolchain:
    """Open the toolchain for a target: one that measures where the device is here, else one that predicts.

    Raises:
        TargetError: the engine that was asked for is not available; the message says why. Or the target has no BF16.
    """
    check_precisions(target, workload.precisions)
    if target.kind == "cpu":
        if choice in _TENSORRT_KINDS:
            raise TargetError(f"--engine {choice} is for NVIDIA GPUs", "name one with --target, or leave --engine out")
        return OnnxRuntimeToolchain(target, workload, settings, "cpu", device=cpu_model())
    gpus = detect_gpus()
    gpu = next((gpu for gpu in gpus if is_here(target, gpu)), None)
    reason = probe("cuda") if gpus else "no GPU was found"
    provider: Provider = "cuda" if reason is None else "cpu"
    engine, passed_over = (None, ()) if gpu is None else _measuring_engine(choice, gpu, reason)
    if gpu is not None and engine is not None:
        if gpu.index != 0:
            raise TargetError(
                f"{gpu.name} is GPU {gpu.index}, and mptune measures GPU 0",
                f"run again with CUDA_VISIBLE_DEVICES={gpu.index}",
            )
        if engine == "onnxruntime":
            return OnnxRuntimeToolchain(target, workload, settings, "cuda", passed_over, device=gpu.name)
        library = _library(engine)
        complaint = _why_not_parsed(engine, workload.model)
        if complaint is None:
            return TensorRtToolchain(
                target, workload, settings, provider, passed_over, gpu=gpu, kind=engine, library=library
            )
        if choice == engine or reason is not None:
            raise TargetError(f"--engine {engine} cannot be used: {complaint}", CURE)
        passed_over = (*passed_over, f"{engine} is passed over: {complaint}")
        return OnnxRuntimeToolchain(target, workload, settings, "cuda", passed_over, device=gpu.name)
    warnings = passed_over if gpu is None else (*passed_over, f"{gpu.name} cannot be measured: {reason}")
    if choice == "tensorrt":
        raise TargetError(
            f"TensorRT builds engines on the device that they are for, and {target.title} is not here",
            "search on the device itself, or leave --engine at auto to predict",
        )
    if choice == "tensorrt-rtx" or (choice == "auto" and target.compute_capability in RTX_CAPABILITIES):
        obstacle = _why_not_ahead(target)
        complaint = None if obstacle is not None else _why_not_parsed("tensorrt-rtx", workload.model)
        if obstacle is None and complaint is None:
            library = _library("tensorrt-rtx")
            return AheadToolchain(target, workload, settings, provider, warnings, library=library)
        if choice == "tensorrt-rtx":
            raise TargetError(
                f"--engine tensorrt-rtx cannot build for {target.title}: {obstacle or complaint}",
                INSTALL["tensorrt-rtx"] if obstacle else CURE,
            )
        if complaint is not None:
            warnings = (*warnings, f"tensorrt-rtx is passed over: {complaint}; {CURE}")
    unparsed = unparsed_operators(workload.model)
    if unparsed:
        text = f"TensorRT cannot parse {unparsed}: on {target.title} this model runs in ONNX Runtime only"
        warnings = (*warnings, f"{text}; for TensorRT give the model from before ONNX Runtime's optimiser")
    return PredictedToolchain(target, workload, settings, provider, warnings)


def _why_not_parsed(kind: Kind, model: Model) -> str | None:
    """Why TensorRT or TensorRT-RTX cannot parse a model with operators of other domains than ONNX's own; else None."""
    operators = foreign_operators(model)
    if not operators:
        return None
    complaint = run_once(ParseJob(kind, model.path), PROBE_TIMEOUT_S)
    if complaint is None:
        return None
    named = ", ".join(f"{name} ({count} nodes)" if count > 1 else name for name, count in operators.items())
    return f"its parser does not take this model with {named}: {complaint}"


def _measuring_engine(
    choice: EngineChoice, gpu: Gpu, cuda_reason: str | None
) -> tuple[Kind | Literal["onnxruntime"] | None, tuple[str, ...]]:
    """What measures on a GPU that is here, None where nothing can; and warnings about installed engines that cannot.

    Raises:
        TargetError: the engine that was asked for cannot.
    """
    passed_over: list[str] = []
    for kind in _TENSORRT_KINDS:
        if choice not in ("auto", kind):
            continue
        obstacle = why_not_on(kind, gpu)
        if obstacle is None:
            return kind, tuple(passed_over)
        if choice == kind:
            raise TargetError(f"--engine {kind} cannot measure on {gpu.name}: {obstacle}", INSTALL[kind])
        if is_installed(kind) and _runs_on(kind, gpu):
            passed_over.append(f"{kind} is passed over ({obstacle}): fix that, or give --engine onnxruntime")
    if choice in _TENSORRT_KINDS:
        return None, tuple(passed_over)
    if cuda_reason is not None and choice == "onnxruntime":
        raise TargetError(f"--engine onnxruntime cannot measure on {gpu.name}: {cuda_reason}", _CUDA_INSTALL)
    return ("onnxruntime" if cuda_reason is None else None), tuple(passed_over)


def _runs_on(kind: Kind, gpu: Gpu) -> bool:
    return kind != "tensorrt-rtx" or gpu.compute_capability in RTX_CAPABILITIES


def why_not_on(kind: Kind, gpu: Gpu) -> str | None:
    """Why TensorRT or TensorRT-RTX cannot measure on a GPU that is here; None where it can."""
    if not _runs_on(kind, gpu):
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in sorted(RTX_CAPABILITIES))
        return f"TensorRT-RTX computes FP32 and FP16 on GPUs of compute capability {capabilities}"
    library = find_library(kind)
    return library if isinstance(library, str) else library.cuda_obstacle


def _why_not_ahead(target: Target) -> str | None:
    """Why TensorRT-RTX cannot build for a GPU that is not here; None where it can."""
    if target.compute_capability not in AHEAD_OF_TIME:
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in AHEAD_OF_TIME)
        return f"it builds for compute capability {capabilities}"
    library = find_library("tensorrt-rtx")
    return library if isinstance(library, str) else None


def _library(kind: Kind) -> LibraryReport:
    library = find_library(kind)
    if isinstance(library, str):
        raise TargetError(f"--engine {kind}: {library}", INSTALL[kind])
    return library


@cache
def find_library(kind: Kind) -> LibraryReport | str:
    """TensorRT or TensorRT-RTX as a worker finds it, or why it cannot be used. Cached for the process."""
    if not is_installed(kind):
        return f"{kind} is not installed"
    return run_once(LibraryJob(kind), PROBE_TIMEOUT_S)


def is_here(target: Target, gpu: Gpu) -> bool:
    """Whether a GPU is the one that a profile describes, the user's own profiles included."""
    if match_target(gpu).name == target.name:
        return True
    if gpu.compute_capability is not None and gpu.compute_capability != target.compute_capability:
        return False
    if any(name.lower() in gpu.name.lower() for name in target.gpu_names):
        return True
    # In a container a Jetson may be known by its family alone.
    family = gpu.name.lower().removeprefix("nvidia ")
    known = gpu.is_jetson and gpu.memory_gb is not None and target.memory_gb is not None
    return known and _same_family(family, target) and same_memory(gpu.memory_gb or 0.0, target.memory_gb or 0.0)


def _same_family(family: str, target: Target) -> bool:
    return any(name.lower().startswith(f"{family} ") for name in target.gpu_names)


def list_toolchains() -> tuple[ToolchainStatus, ...]:
    """The toolchains and whether they can be used here, for ``mptune doctor``."""
    installed = _version("onnxruntime-gpu") or _version("onnxruntime")
    gpus = detect_gpus()
    if installed is None:
        ort = [ToolchainStatus("onnxruntime-cpu", False, "not installed", _ORT_INSTALL)]
    else:
        reason = probe("cuda") if gpus else "no GPU was found"
        text = f"{installed}: measures on {gpus[0].name}" if gpus and reason is None else f"{installed}: {reason}"
        # There are no wheels of onnxruntime-gpu for a Jetson, and TensorRT measures there.
        wanted = gpus and reason is not None and not gpus[0].is_jetson
        ort = [
            ToolchainStatus("onnxruntime-cuda", reason is None, text, _CUDA_INSTALL if wanted else ""),
            ToolchainStatus("onnxruntime-cpu", True, f"{installed}: measures with --target cpu, emulates FP16 errors"),
        ]
    return (*ort, *(_tensorrt_status(kind, gpus) for kind in _TENSORRT_KINDS))


def _tensorrt_status(kind: Kind, gpus: Sequence[Gpu]) -> ToolchainStatus:
    library = find_library(kind)
    if isinstance(library, str):
        return ToolchainStatus(kind, False, library, INSTALL[kind])
    version = library.version + "".join(f" ({warning})" for warning in library.warnings)
    fitting = next((gpu for gpu in gpus if _runs_on(kind, gpu)), None)
    if fitting is not None and library.cuda_obstacle is None:
        return ToolchainStatus(kind, True, f"{version}: builds and measures on {fitting.name}")
    obstacle = library.cuda_obstacle if fitting is not None else "no GPU that it runs on was found"
    if kind == "tensorrt-rtx":
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in AHEAD_OF_TIME)
        return ToolchainStatus(
            kind, True, f"{version}: builds ahead of time for compute capability {capabilities}; {obstacle}"
        )
    return ToolchainStatus(kind, False, f"{version}: {obstacle}", library.cuda_install if fitting is not None else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
