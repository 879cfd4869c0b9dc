"""The environment of a measurement: installed packages and backends, machine, GPUs (by nvidia-smi), processes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from mptune.json_form import JsonForm
from mptune.targets.detect import JetsonState, ask_nvidia_smi, read_jetson

BACKEND_GROUP = "mptune.backends"  # the group of entry points in which other packages bring backends
_BUILT_IN = {
    "tensorrt": "mptune.engines.tensorrt.backend:TENSORRT",
    "tensorrt-rtx": "mptune.engines.tensorrt.backend:TENSORRT_RTX",
    "onnxruntime": "mptune.engines.ort.backend:ONNXRUNTIME",
}
"""Name -> where it is; the first one that measures on the target is taken, unless one is named."""
_PACKAGES = ("mptune", "numpy", "onnx", "optuna", "cuda-bindings")
_ENGINE_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-lean", "tensorrt-rtx")
_VARIANTS = ("", "-cu12", "-cu13")
"""TensorRT's packages for one CUDA bring the same module, without the package of the plain name."""
_QUERY = "index,name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit"
"""What nvidia-smi is asked for, in the order of ``GpuState``'s fields."""
# Bits of nvmlClocksEventReasons (nvml.h) that mean throttling. Idle, application clocks and sync boost do not.
_THROTTLE_BITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU by nvidia-smi at one moment; None where nvidia-smi reports none."""

    index: int
    name: str
    driver: str | None = None
    memory_mb: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    power_limit_w: float | None = None
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment(JsonForm):
    """The machine at one moment."""

    versions: Mapping[str, str]
    os: str
    cpu: str
    cpu_count: int
    gpus: tuple[GpuState, ...] = ()
    warnings: tuple[str, ...] = ()
    jetson: JetsonState | None = None

    def with_warnings(self, *warnings: str) -> Environment:
        return replace(self, warnings=(*self.warnings, *warnings))


def describe_environment(root: Path = Path("/")) -> Environment:
    """Describe the machine. Does not raise for what is missing."""
    gpus = read_gpus()
    versions, warnings = {"python": platform.python_version(), **installed_versions()}, list[str]()
    if gpus:
        cuda = re.search(r"CUDA Version:\s*([0-9.]+)", ask_nvidia_smi() or "")
        versions |= {"cuda driver": cuda[1]} if cuda else {}
        warnings += [*(warning for gpu in gpus for warning in state_warnings(gpu)), *process_warnings()]
    system = platform.platform(), cpu_model(), usable_cores()
    return Environment(versions, *system, gpus, tuple(warnings), read_jetson(root))


def installed_versions() -> dict[str, str]:
    """Versions of the packages that can change a result, by package metadata."""
    versions: dict[str, str] = {}
    for package in (*_PACKAGES, *engine_packages()):
        for variant in _VARIANTS:
            with suppress(metadata.PackageNotFoundError):
                versions.setdefault(package, metadata.version(f"{package}{variant}"))
    return versions


def engine_packages() -> tuple[str, ...]:
    """The packages that backends are in, installed or not."""
    brought = {entry.dist.name for entry in metadata.entry_points(group=BACKEND_GROUP) if entry.dist is not None}
    return (*_ENGINE_PACKAGES, *sorted(brought - {*_ENGINE_PACKAGES, "mptune"}))


def read_gpus() -> tuple[GpuState, ...]:
    """The state of every GPU that nvidia-smi shows; empty where there is none."""
    # Asked for apart: drivers renamed the last field, and nvidia-smi refuses a whole query for one unknown field.
    queries = _QUERY, "clocks_throttle_reasons.active", "clocks_event_reasons.active"
    asked = [(f"--query-gpu={query}", "--format=csv,noheader,nounits") for query in queries]
    with ThreadPoolExecutor(len(asked)) as pool:
        text, *reasons = pool.map(lambda each: ask_nvidia_smi(*each) or "", asked)
    masks = [line for line in next(filter(None, reasons), "").splitlines() if line.strip()]
    gpus: list[GpuState] = []
    for line in text.splitlines():
        index, *words = (field.strip() for field in line.split(","))
        if len(words) != _QUERY.count(",") or not index.isdigit():
            continue
        memory_mb, clock_mhz, max_clock_mhz, limit_w = map(_number, words[2:])
        bits = 0
        with suppress(ValueError, IndexError):
            bits = int(masks[len(gpus)], 16)
        throttle = tuple(reason for bit, reason in _THROTTLE_BITS.items() if bits & bit)
        gpus.append(GpuState(int(index), words[0], words[1], memory_mb, clock_mhz, max_clock_mhz, limit_w, throttle))
    return tuple(gpus)


def _number(word: str) -> float | None:
    """A number of nvidia-smi's; None for [N/A]."""
    with suppress(ValueError):
        return float(word)
    return None


def state_warnings(now: GpuState, before: GpuState | None = None) -> tuple[str, ...]:
    """Warnings about a GPU's state for timing; ``before`` is that of an earlier timing."""
    warnings = []
    if now.throttle:
        reasons = ", ".join(now.throttle)
        warnings.append(f"{now.name} is throttled ({reasons}): cool it, raise its power limit or lock lower clocks")
    then_mhz, now_mhz = before.sm_clock_mhz if before else None, now.sm_clock_mhz
    if then_mhz and now_mhz and now_mhz < 0.95 * then_mhz:
        warnings.append(
            f"{now.name}'s clock fell from {then_mhz:.0f} to {now_mhz:.0f} MHz during the run:"
            " lock the clocks (nvidia-smi --lock-gpu-clocks, or jetson_clocks)"
        )
    return tuple(warnings)


def process_warnings() -> tuple[str, ...]:
    """A warning for compute processes on the visible GPUs other than this one, its parents and its children."""
    import psutil  # type: ignore[import-untyped]

    query = ["--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"(\d+|GPU-[\w-]+)(,(\d+|GPU-[\w-]+))*", visible):
        query.append(f"--id={visible}")  # Who uses another GPU, such as another worker, disturbs nothing.
    rows = [line.partition(",") for line in (ask_nvidia_smi(*query) or "").splitlines()]
    listed = {int(pid): Path(name.strip()).name for pid, _, name in rows if pid.strip().isdigit()}
    if not listed:
        return ()
    me = psutil.Process()
    related = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    # In a container nvidia-smi shows the host's process numbers: one that is unknown here may be our own.
    others = [f"{listed[pid]} ({pid})" for pid in listed if pid not in related and psutil.pid_exists(pid)]
    return (f"other processes use the GPU and disturb the timing: stop {', '.join(others)}",) if others else ()


def cpu_model() -> str:
    """The CPU's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Hardware|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Logical processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def backend_entries() -> dict[str, metadata.EntryPoint]:
    """All entry points by name: mptune's own first, which no other package replaces."""
    own = {name: metadata.EntryPoint(name, value, BACKEND_GROUP) for name, value in _BUILT_IN.items()}
    others = sorted(metadata.entry_points(group=BACKEND_GROUP), key=lambda entry: entry.name)
    return own | {entry.name: entry for entry in others if entry.name not in own}
