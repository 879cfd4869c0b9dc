"""Target to toolchain: what is installed, what fits, why the rest was passed over."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import Failure, Toolchain, Workspace
from mptune.engines.environment import cpu_model
from mptune.engines.jobs import ProbeJob
from mptune.engines.onnxruntime import Provider
from mptune.engines.ort_toolchains import OnnxRuntimeToolchain, PredictedToolchain
from mptune.engines.worker import Worker
from mptune.errors import TargetError
from mptune.settings import EngineChoice, SearchSettings
from mptune.targets.target import Gpu, Target, detect_gpus, load_target, match_target

if TYPE_CHECKING:
    from mptune.graph.groups import LayerGroup
    from mptune.graph.model import Model

DEFAULT_TARGET = "jetson-orin-nano-8gb"
"""The profile that is predicted where there is no GPU and none was named."""

_PROBE_TIMEOUT_S = 120.0
_NOT_YET = "not supported by this version of mptune yet"
_NOT_YET_ENGINES: tuple[EngineChoice, ...] = ("tensorrt", "tensorrt-rtx")
_ORT_INSTALL = "pip install onnxruntime-gpu"
_CUDA_INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]' and a driver for its CUDA version"


@dataclass(frozen=True)
class TargetChoice:
    """A target and how it was come by.

    Attributes:
        target: the profile.
        why: one line for the user; empty where the target was named.
    """

    target: Target
    why: str = ""


@dataclass(frozen=True)
class ToolchainStatus:
    """One line of ``mptune doctor``.

    Attributes:
        name: of the toolchain.
        available: whether ``open_toolchain`` can use it here.
        reason: why not, or what it is used for.
        install: the command that installs it; empty where nothing is missing.
    """

    name: str
    available: bool
    reason: str
    install: str = ""


def choose_target(name: str) -> TargetChoice:
    """Find the target that ``--target`` names; ``auto`` takes the GPU here, else a profile to predict.

    Raises:
        TargetError: the name is neither a profile nor a file.
    """
    if name != "auto":
        return TargetChoice(load_target(name))
    gpus = detect_gpus()
    if not gpus:
        why = f"no GPU was found: latency is predicted for {DEFAULT_TARGET}; --target names another profile"
        return TargetChoice(load_target(DEFAULT_TARGET), why)
    target, reason = match_target(gpus[0]), probe("cuda")
    if reason is None:
        return TargetChoice(target, f"{gpus[0].name} was found")
    return TargetChoice(target, f"{gpus[0].name} was found, but cannot be measured ({reason}): latency is predicted")


def open_toolchain(
    choice: EngineChoice,
    target: Target,
    workspace: Workspace,
    model: Model,
    groups: Sequence[LayerGroup],
    settings: SearchSettings,
) -> Toolchain:
    """Open the toolchain for a target: measured where its device is here, else predicted.

    Raises:
        TargetError: the engine that was asked for cannot be had; the message says why.
    """
    if choice in _NOT_YET_ENGINES:
        raise TargetError(f"--engine {choice} is {_NOT_YET}", "use --engine onnxruntime, or leave it at auto")
    if target.kind == "cpu":
        return OnnxRuntimeToolchain(target, workspace, model, groups, settings, "cpu", device=cpu_model())
    gpus = detect_gpus()
    gpu = next((gpu for gpu in gpus if is_here(target, gpu)), None)
    reason = probe("cuda") if gpus else "no GPU was found"
    if gpu is not None and reason is None:
        if gpu.index != 0:
            raise TargetError(
                f"{gpu.name} is GPU {gpu.index}, and mptune measures GPU 0",
                f"run again with CUDA_VISIBLE_DEVICES={gpu.index}",
            )
        return OnnxRuntimeToolchain(target, workspace, model, groups, settings, "cuda", device=gpu.name)
    if gpu is not None and choice == "onnxruntime":
        raise TargetError(f"--engine onnxruntime cannot measure on {gpu.name}: {reason}", _CUDA_INSTALL)
    where = f"{target.title} is not here" if gpu is None else f"{gpu.name} cannot be measured ({reason})"
    warning = f"{where}: latency is predicted and errors are emulated; search again on the device to measure both"
    provider: Provider = "cuda" if reason is None else "cpu"
    return PredictedToolchain(target, workspace, model, groups, settings, provider, (warning,))


def is_here(target: Target, gpu: Gpu) -> bool:
    """Whether a GPU is the one that a profile describes, the user's own profiles included."""
    if match_target(gpu).name == target.name:
        return True
    if gpu.compute_capability is not None and gpu.compute_capability != target.compute_capability:
        return False
    return any(name.lower() in gpu.name.lower() for name in target.gpu_names)


@cache
def probe(provider: Provider) -> str | None:
    """Run a tiny model in a worker; None where that works, else the reason. Asked once per process."""
    with tempfile.TemporaryDirectory(prefix="mptune-probe-") as folder, Worker(Path(folder)) as worker:
        result = worker.call(ProbeJob(provider), _PROBE_TIMEOUT_S)
        if not isinstance(result, Failure):
            return None
        return _own_words(result) or result.message


def _own_words(failure: Failure) -> str:
    """What ONNX Runtime logged about a library that does not load: its exception only says that it did not."""
    if failure.log_path is None:
        return ""
    for line in failure.log_path.read_text(encoding="utf-8", errors="replace").splitlines():
        if "cannot open shared object file" in line or "Failed to load library" in line:
            return line[line.rfind("error:") + len("error:") :].strip() if "error:" in line else line.strip()
    return ""


def list_toolchains() -> tuple[ToolchainStatus, ...]:
    """What can be used here, for ``mptune doctor``."""
    installed = _version("onnxruntime-gpu") or _version("onnxruntime")
    if installed is None:
        ort = [ToolchainStatus("onnxruntime-cpu", False, "not installed", _ORT_INSTALL)]
    else:
        gpus = detect_gpus()
        reason = probe("cuda") if gpus else "no GPU was found"
        told = f"{installed}: measures on {gpus[0].name}" if gpus and reason is None else f"{installed}: {reason}"
        ort = [
            ToolchainStatus("onnxruntime-cuda", reason is None, told, _CUDA_INSTALL if gpus and reason else ""),
            ToolchainStatus("onnxruntime-cpu", True, f"{installed}: measures with --target cpu, emulates FP16 errors"),
        ]
    return (*ort, *(_not_yet(name) for name in _NOT_YET_ENGINES))


def _not_yet(name: str) -> ToolchainStatus:
    version = _version(name)
    return ToolchainStatus(name, False, f"{version} is installed, but {_NOT_YET}" if version else _NOT_YET)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
