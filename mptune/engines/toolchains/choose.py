"""Choose the target and the toolchain that serves it; list what is installed for ``mptune doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread

from mptune.engines.backend import Availability, Backend, BackendStatus, Place
from mptune.engines.context import RunContext
from mptune.engines.environment import backend_entries, cpu_model
from mptune.engines.ort.cuda_session import PROBE_TIMEOUT_S, ProbeJob, probe
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.backend import foreign_operators
from mptune.engines.toolchains.reference import Workers, has_room_beside
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.errors import TargetError
from mptune.settings import SearchSettings
from mptune.targets.detect import Gpu, detect_gpus, hidden_gpu
from mptune.targets.target import Target, check_precisions, in_power_mode, load_target, match_target, same_memory

DEFAULT_TARGET = "jetson-orin-nano-8gb"
"""The profile whose latency is predicted where there is no GPU and no target is named."""


@dataclass(frozen=True)
class TargetChoice:
    """A target and why it was chosen."""

    target: Target
    why: str = ""  # one line for the user; empty where the user named the target


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
    gpu, target = gpus[0], match_target(gpus[0])
    obstacles: list[str] = []
    for backend in sorted(find_backends(), key=lambda backend: backend.name):
        answer = backend.available(Place(target, gpu))
        if answer.ability == "measures":
            return TargetChoice(target, f"{gpu.name} was found")
        if answer.is_unexpected:
            obstacles.append(f"{backend.name}: {answer.obstacle}")
    why = f"{gpu.name} was found, but cannot be measured ({'; '.join(obstacles)}): latency is predicted"
    return TargetChoice(target, why)


def refuse_hidden_gpu(otherwise: str) -> None:
    """Raise ``TargetError`` where an NVIDIA GPU is here that neither nvidia-smi nor a Jetson's files name."""
    file = hidden_gpu()
    if file is not None:
        raise TargetError(
            f"{file} shows an NVIDIA GPU, but neither nvidia-smi nor a Jetson's files name it",
            "make nvidia-smi run here (in a container: start it with NVIDIA's container runtime and"
            f" NVIDIA_DRIVER_CAPABILITIES=all); --target NAME {otherwise}",
        )


@contextmanager
def probed_ahead(settings: SearchSettings) -> Iterator[Workers]:
    """The workers of a search; while the model is read, each loads CUDA's libraries, where there is a GPU."""
    workers, target = Workers(settings), settings.target

    def ask() -> None:
        with suppress(Exception):  # whoever asks again gets it
            if (target == "auto" or load_target(target).kind != "cpu") and detect_gpus():
                for worker in (*workers.observers, workers.beside[0]) if has_room_beside("cuda") else ():
                    Thread(target=worker.call, args=(ProbeJob("cuda"), PROBE_TIMEOUT_S), daemon=True).start()
                probe("cuda", workers.main)

    Thread(target=ask, daemon=True).start()
    try:
        yield workers
    finally:
        workers.close()


def open_toolchain(target: Target, context: RunContext, workers: Workers | None = None) -> Toolchain:
    """Open the toolchain for a target: it measures where the device is here, else it predicts.

    Raises:
        TargetError: the engine that was asked for is not available; the message says why. Or the target has no BF16.
    """
    settings = context.settings
    check_precisions(target, context.precisions)
    gpus = () if target.kind == "cpu" else detect_gpus()
    gpu = next((gpu for gpu in gpus if is_here(target, gpu)), None)
    if gpu is not None:
        target = in_power_mode(target, gpu.mode)
    provider: Provider = "cuda" if gpus and probe("cuda") is None else "cpu"
    place = Place(target, gpu, context.model, is_named=settings.engine != "auto", plugins=settings.plugins)
    # The first backend that measures, else the first that builds, else none.
    where = place.target.title if gpu is None else gpu.name
    backend: Backend | None = None
    answer, refusal, warnings = Availability(), None, list[str]()
    for each in find_backends(settings.engine):
        can = each.available(place)
        if can.obstacle and (place.is_named or can.is_models_fault) and refusal is None:
            refusal = TargetError(f"--engine {each.name} cannot be used for {where}: {can.obstacle}", can.hint)
        if can.is_unexpected:
            warnings.append(f"{each.name} is passed over for {where}: {can.obstacle}; {can.hint}")
        if can.ability == "measures" or (can.ability == "builds" and backend is None):
            backend, answer = each, can
        if can.ability == "measures":
            break
    if answer.ability != "measures" and refusal is not None:
        raise refusal
    warnings += answer.notes
    if settings.plugins and not answer.loads_plugins:
        served = "its latency is predicted" if backend is None else f"{backend.name} serves it here"
        raise TargetError(
            f"is for engines of TensorRT, and none are built for {target.title}: {served}",
            "leave --plugin out, and give it to `mptune confirm` on a device with TensorRT",
            setting="plugins",
        )
    if answer.ability == "measures" and backend is not None:
        if gpu is not None and gpu.index != 0:
            raise TargetError(
                f"{gpu.name} is GPU {gpu.index}, and mptune measures GPU 0",
                f"run again with CUDA_VISIBLE_DEVICES={gpu.index}",
            )
        device = cpu_model() if gpu is None else gpu.name
        return Toolchain(backend, target, context, provider, warnings, gpu=gpu, device=device, workers=workers)
    own = foreign_operators(context.model, "com.microsoft")
    if backend is None and own:
        warnings.append(
            f"TensorRT parses few of ONNX Runtime's own operators, and this model has {own}: on {target.title} it may"
            " run in ONNX Runtime only; for TensorRT give the model from before ONNX Runtime's optimiser"
        )
    return Toolchain(backend, target, context, provider, warnings, latency_source="predicted", workers=workers)


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
    if not gpu.is_jetson or not any(name.lower().startswith(f"{family} ") for name in target.gpu_names):
        return False
    return bool(gpu.memory_gb and target.memory_gb and same_memory(gpu.memory_gb, target.memory_gb))


def find_backends(choice: str = "auto") -> tuple[Backend, ...]:
    """The backends that a choice leaves: the one that it names; of ``auto`` all, mptune's own first.

    Raises:
        TargetError: there is none of that name, or its package does not load.
    """
    backends: list[Backend] = []
    for name in backend_entries() if choice == "auto" else (choice,):
        entry = backend_entries().get(name)
        if entry is None:
            raise TargetError(f"there is no engine {name!r}", f"give --engine auto, {', '.join(backend_entries())}")
        try:
            backends.append(entry.load())
        except Exception as error:
            message = f"the engine {name} does not load ({entry.value}): {type(error).__name__}: {error}"
            raise TargetError(message, "install its package again, or uninstall it") from error
    return tuple(backends)


def list_toolchains() -> tuple[BackendStatus, ...]:
    """The backends and whether they can be used here, for ``mptune doctor``."""
    gpus = detect_gpus()
    backends = sorted(find_backends(), key=lambda backend: backend.name)
    return tuple(status for backend in backends for status in backend.statuses(gpus))
