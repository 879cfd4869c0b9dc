"""The environment of a measurement: versions, machine, GPU state, other processes; and warnings about them.

Versions come from package metadata, so that nothing heavy is imported; the state of GPUs comes from nvidia-smi.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from mptune.json_form import JsonForm
from mptune.targets.detect import JetsonState, ask_nvidia_smi, read_jetson

BACKEND_GROUP = "mptune.backends"
"""The group of entry points in which other packages bring backends."""
_PACKAGES = ("mptune", "numpy", "onnx", "optuna", "cuda-bindings")
_ENGINE_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-lean", "tensorrt-rtx")
_VARIANTS = ("", "-cu12", "-cu13")
"""TensorRT's packages for one CUDA bring the same module, without the package of the plain name."""
_GPU_FIELDS = (
    "index,name,memory.total,memory.used,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,"
    "temperature.gpu"
)
_GPU_NUMBERS = (
    *("memory_mb", "memory_used_mb", "sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz"),
    *("power_w", "power_limit_w", "temperature_c"),
)
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
    memory_mb: float | None = None
    memory_used_mb: float | None = None
    driver: str | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
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
        """The same with more warnings."""
        return replace(self, warnings=(*self.warnings, *warnings))


def describe_environment(root: Path = Path("/")) -> Environment:
    """Describe the machine. Does not raise for what is missing."""
    with ThreadPoolExecutor(2) as pool:  # each waits for nvidia-smi
        driver, foreign = pool.submit(_cuda_of_driver), pool.submit(foreign_gpu_processes)
        gpus = read_gpus()
    versions = {"python": platform.python_version(), **installed_versions()}
    if gpus and driver.result():
        versions["cuda driver"] = str(driver.result())
    warnings = [warning for gpu in gpus for warning in state_warnings(gpu)]
    warnings += process_warnings(foreign.result()) if gpus else []
    return Environment(
        versions=versions,
        os=platform.platform(),
        cpu=cpu_model(),
        cpu_count=usable_cores(),
        gpus=gpus,
        warnings=tuple(warnings),
        jetson=read_jetson(root),
    )


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
    text = ask_nvidia_smi(f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    # Asked for apart: drivers renamed the field, and nvidia-smi refuses a whole query for one unknown field.
    reasons = ask_nvidia_smi("--query-gpu=clocks_throttle_reasons.active", "--format=csv,noheader") or ask_nvidia_smi(
        "--query-gpu=clocks_event_reasons.active", "--format=csv,noheader"
    )
    return parse_gpus(text or "", reasons or "")


def parse_gpus(text: str, reasons: str = "") -> tuple[GpuState, ...]:
    """Read nvidia-smi's CSV: one line per GPU in ``_GPU_FIELDS``, and one hexadecimal bit mask per GPU."""
    masks = [line.strip() for line in reasons.splitlines() if line.strip()]
    gpus: list[GpuState] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_GPU_FIELDS.split(",")) or not fields[0].isdigit():
            continue
        numbers = {name: _number(field) for name, field in zip(_GPU_NUMBERS, (*fields[2:4], *fields[5:]), strict=True)}
        throttle = _throttle(masks[len(gpus)]) if len(gpus) < len(masks) else ()
        gpus.append(GpuState(int(fields[0]), fields[1], driver=fields[4], throttle=throttle, **numbers))
    return tuple(gpus)


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


def foreign_gpu_processes() -> tuple[tuple[int, str], ...]:
    """Compute processes on the visible GPUs other than this one, its parents and its children: (pid, name)."""
    query = ["--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"(\d+|GPU-[\w-]+)(,(\d+|GPU-[\w-]+))*", visible):
        query.append(f"--id={visible}")  # Who uses another GPU, such as another worker, disturbs nothing.
    text = ask_nvidia_smi(*query)
    import psutil  # type: ignore[import-untyped]

    listed = parse_processes(text or "")
    if not listed:
        return ()
    me = psutil.Process()
    related = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    # In a container nvidia-smi shows the host's process numbers: one that is unknown here may be our own.
    return tuple((pid, name) for pid, name in listed if pid not in related and psutil.pid_exists(pid))


def parse_processes(text: str) -> tuple[tuple[int, str], ...]:
    """Read nvidia-smi's CSV of compute processes."""
    processes = []
    for line in text.splitlines():
        pid, _, name = line.partition(",")
        if pid.strip().isdigit():
            processes.append((int(pid), Path(name.strip()).name))
    return tuple(processes)


def process_warnings(processes: Sequence[tuple[int, str]]) -> list[str]:
    """A warning for other processes on the GPU."""
    if not processes:
        return []
    names = ", ".join(f"{name} ({pid})" for pid, name in processes)
    return [f"other processes use the GPU and disturb the timing: stop {names}"]


def _throttle(mask: str) -> tuple[str, ...]:
    try:
        bits = int(mask, 16)
    except ValueError:
        return ()
    return tuple(reason for bit, reason in _THROTTLE_BITS.items() if bits & bit)


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None


def _cuda_of_driver() -> str | None:
    match = re.search(r"CUDA Version:\s*([0-9.]+)", ask_nvidia_smi() or "")
    return match.group(1) if match else None


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
