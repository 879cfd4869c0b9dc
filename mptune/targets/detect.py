"""What is here: GPUs by nvidia-smi, a Jetson by its own files. Loads no CUDA, never raises for what is missing.

nvidia-smi answers N/A to nearly everything on a Jetson. Sources of what its files mean: Jetson Linux Developer Guide,
"Platform Power and Performance" (``oc*_event_cnt``: OC1 is under-voltage, OC2 average and OC3 instantaneous
over-current); the Linux kernel's documentation of devfreq; NVIDIA's nvpmodel files, as copied in
LineageOS/android_device_nvidia_concord (which files set a power mode, and the mask of TPCs that are off).
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mptune.errors import TargetError
from mptune.json_form import JsonForm

_ROOT = Path("/")
_TIMEOUT_S = 10.0  # a driver that hangs is given up after this long

_QUERY = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version")
_DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "dev/nvgpu/igpu0/ctrl")
"""Of the drivers for separate GPUs and, the last three, for those of a Jetson."""
_DRIVER_OF_CUDA_13, _L4T_OF_CUDA_13 = 580, 38

# Compute capability by module (NVIDIA's CUDA GPUs page); the first that the model's name holds.
_JETSON_CAPABILITIES = {"thor": (11, 0), "orin": (8, 7), "xavier": (7, 2), "tx2": (6, 2), "tx1": (5, 3), "nano": (5, 3)}
_JETPACK_MAJORS = {"35": "5", "36": "6", "38": "7", "39": "7"}  # by series of Jetson Linux (NVIDIA's JetPack archive)
_TPC_FOLDERS = ("gpu.0", "platform/gpu.0", "platform/17000000.gpu", "platform/bus@0/17000000.gpu")
_ORIN_TPCS, _SMS_PER_TPC = 8, 2
_MEMORY_CAPS = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")  # of JetPack 6, and of 5
_INT_MAX, _NO_LIMIT_HZ = 2**31 - 1, 1e11  # where a mode sets no cap, nvpmodel writes 0, the first, or above the second
_CLOCK_TOLERANCE = 0.05


@dataclass(frozen=True)
class PowerMode(JsonForm):
    """What a Jetson's power mode leaves of the GPU and the memory; None or empty where a value is unknown.

    Attributes:
        sm_count: multiprocessors that are on.
        gpu_mhz: the highest clock of the GPU.
        memory_mhz: cap of the memory's clock; None where there is none, too.
    """

    name: str = ""
    sm_count: int | None = None
    gpu_mhz: float | None = None
    memory_mhz: float | None = None

    def __str__(self) -> str:
        gpu, memory = "GPU up to {:.0f} MHz", "memory up to {:.0f} MHz"
        limits = {"{:.0f} SMs": self.sm_count, gpu: self.gpu_mhz, memory: self.memory_mhz}
        listed = ", ".join(words.format(limit) for words, limit in limits.items() if limit is not None)
        return f"{self.name or 'unnamed'}{f' ({listed})' if listed else ''}"


@dataclass(frozen=True)
class JetsonState(JsonForm):
    """A Jetson at one moment; None or empty where a value is unknown.

    Attributes:
        part: number of the module, such as ``p3767-0005``; the carrier board may be anyone's.
        memory_gb: what CPU and GPU share, less what the firmware keeps, GB (10^9 bytes).
        jetpack: such as ``6.2``, or ``6`` where only the series is known, by that of Jetson Linux (``l4t``).
        gpu_min_mhz: the lowest that the governor may choose; equal to the highest where ``jetson_clocks`` ran.
    """

    model: str
    part: str = ""
    memory_gb: float | None = None
    l4t: str = ""
    jetpack: str = ""
    mode: PowerMode = PowerMode()
    gpu_mhz: float | None = None
    gpu_min_mhz: float | None = None
    memory_mhz: float | None = None

    def facts(self) -> list[tuple[str, str]]:
        """The device as (name, value) lines; unknown values are left out."""
        now = "" if self.gpu_mhz is None else f"{self.gpu_mhz:.0f} of "
        lines = [
            ("Jetson", f"{self.model}{f' ({self.part})' if self.part else ''}"),
            ("JetPack", f"{self.jetpack or '?'} (L4T {self.l4t})" if self.l4t else self.jetpack),
            ("power mode", self.mode.name),
            ("SMs", "" if self.mode.sm_count is None else str(self.mode.sm_count)),
            ("GPU clock", "" if self.mode.gpu_mhz is None else f"{now}{self.mode.gpu_mhz:.0f} MHz"),
            ("memory clock", "" if self.memory_mhz is None else f"{self.memory_mhz:.0f} MHz"),
            ("memory cap", "" if self.mode.memory_mhz is None else f"{self.mode.memory_mhz:.0f} MHz"),
        ]
        return [(name, value) for name, value in lines if value]


@dataclass(frozen=True)
class Throttling:
    """What shows whether a Jetson throttles; the events are counted from its start, by name such as ``oc3``."""

    gpu_mhz: float | None
    events: Mapping[str, int]


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        memory_gb: total, GB (10^9 bytes); on a Jetson what CPU and GPU share. None where it is unknown.
        driver: version of the driver, or of L4T on a Jetson.
        index: as CUDA counts the visible devices.
        part: number of the Jetson module; empty where it is unknown.
    """

    name: str
    compute_capability: tuple[int, int] | None
    memory_gb: float | None
    driver: str
    index: int = 0
    is_jetson: bool = False
    part: str = ""
    mode: PowerMode = PowerMode()


def ask_nvidia_smi(*arguments: str, timeout_s: float = _TIMEOUT_S) -> str | None:
    """What nvidia-smi prints; None where there is none, or it fails or does not answer in time."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=timeout_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def detect_gpus(root: Path = _ROOT, timeout_s: float = _TIMEOUT_S) -> tuple[Gpu, ...]:
    """List the GPUs that CUDA would see here; empty where there is none or nvidia-smi does not answer.

    ``CUDA_VISIBLE_DEVICES`` is respected where it holds indices or UUIDs of whole GPUs.
    """
    jetson = read_jetson(root)
    if jetson is not None:  # its nvidia-smi, where there is one, answers "[N/A]"
        model, driver = jetson.model.lower(), f"L4T {jetson.l4t}" if jetson.l4t else ""
        capability = next((c for name, c in _JETSON_CAPABILITIES.items() if name in model), None)
        return (Gpu(jetson.model, capability, jetson.memory_gb, driver, 0, True, jetson.part, jetson.mode),)
    text = ask_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", timeout_s=timeout_s)
    cells = csv.reader((text or "").splitlines(), skipinitialspace=True)
    rows = [[cell.strip() for cell in row] for row in cells if len(row) == len(_QUERY)]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and not wanted.strip().startswith("MIG"):
        visible: list[list[str]] = []
        for entry in (part.strip() for part in wanted.split(",")):
            matches = [
                row for row in rows if entry == row[0] or (entry.startswith("GPU-") and row[1].startswith(entry))
            ]
            if len(matches) != 1 or matches[0] in visible:
                break  # as CUDA does: the list ends at its first bad entry
            visible += matches
        rows = visible
    gpus = []
    for index, (_, _, name, capability_text, mebibytes, driver) in enumerate(rows):
        memory = _number(mebibytes)  # "[N/A]" where CPU and GPU share their memory
        memory_gb = None if memory is None else round(memory * 2**20 / 1e9, 1)
        gpus.append(Gpu(name, parse_capability(capability_text), memory_gb, driver, index))
    return tuple(gpus)


def parse_capability(text: str) -> tuple[int, int] | None:
    """A compute capability such as ``8.7``; None for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def cuda_series(gpus: Sequence[Gpu]) -> int:
    """The newest CUDA whose packages run with the driver here: 12, or 13; 12 where no driver is known.

    CUDA 13 needs a driver of 580 or later (CUDA's release notes, table 3), which Jetson Linux has from 38 on.
    """
    number = re.search(r"\d+", gpus[0].driver.removeprefix("L4T")) if gpus else None
    return 13 if number and int(number[0]) >= (_L4T_OF_CUDA_13 if gpus[0].is_jetson else _DRIVER_OF_CUDA_13) else 12


def hidden_gpu(root: Path = _ROOT, timeout_s: float = _TIMEOUT_S) -> Path | None:
    """A device file of an NVIDIA GPU where ``detect_gpus`` finds none; None where there is none, or the user hid it.

    In containers nvidia-smi may be missing where CUDA works.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return None
    file = next((path for pattern in _DEVICE_FILES for path in sorted(root.glob(pattern))), None)
    return file if file is not None and not detect_gpus(root, timeout_s) else None


def gpu_variables(index: int) -> dict[str, str]:
    """The environment variables with which CUDA sees one GPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    if entries is not None and index >= len(entries):
        raise TargetError(f"there is no GPU {index}: CUDA_VISIBLE_DEVICES is {visible!r}", "give a smaller number")
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": entries[index] if entries else str(index), "CUDA_DEVICE_ORDER": order}


def read_jetson(root: Path = _ROOT) -> JetsonState | None:
    """Read the device's files; None where this is no Jetson."""
    mode = read_power_mode(root)
    if mode is None:
        return None
    total_kib = re.search(r"(?m)^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"))
    # Of nvidia,p3768-0000+p3767-0005-super, nvidia,p3767-0005, nvidia,tegra234 the second is the module.
    compatible = _text(root / "proc/device-tree/compatible").split("\0")
    parts = (re.fullmatch(r"nvidia,(p\d{4}-\d{4})", entry.strip()) for entry in compatible)
    release = re.search(r"# R(\d+) .*REVISION: ([\d.]+)", _text(root / "etc/nv_tegra_release"))
    status = _text(root / "var/lib/dpkg/status")
    package = re.search(r"(?m)^Package: nvidia-jetpack\n(?:.+\n)*?Version: ([\d.]+)", status)
    gpu_mhz, gpu_min_mhz, _ = _gpu_clocks_mhz(root)
    memory_hz = _number(_text(root / "sys/kernel/debug/bpmp/debug/clk/emc/rate"))
    return JetsonState(
        model=_model(root),
        part=next((match[1] for match in parts if match), ""),
        memory_gb=round(int(total_kib[1]) * 1024 / 1e9, 1) if total_kib else None,
        l4t=f"{release[1]}.{release[2]}" if release else "",
        jetpack=package[1] if package else _JETPACK_MAJORS.get(release[1] if release else "", ""),
        mode=mode,
        gpu_mhz=gpu_mhz,
        gpu_min_mhz=gpu_min_mhz,
        memory_mhz=None if memory_hz is None else memory_hz / 1e6,
    )


def read_power_mode(root: Path = _ROOT) -> PowerMode | None:
    """The power mode and what it leaves; None where this is no Jetson."""
    model = _model(root)
    if not model:
        return None
    modes = re.findall(r"(?m)^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", _text(root / "etc/nvpmodel.conf"))
    current = re.search(r"pmode:(\d+)", _text(root / "var/lib/nvpmodel/status"))
    names = {int(number): name.removeprefix("MODE_") for number, name in modes}
    # The mask holds the TPCs that are off; bits of those that a module lacks are set in all of its modes.
    mask_texts = (_text(root / "sys/devices" / folder / "tpc_pg_mask") for folder in _TPC_FOLDERS)
    masks = [mask for text in mask_texts if (mask := _number(text)) is not None]
    caps_hz = [hz for file in _MEMORY_CAPS if 0 < (hz := _number(_text(root / file)) or 0.0) < _NO_LIMIT_HZ]
    tpcs = (~int(max(masks)) & (1 << _ORIN_TPCS) - 1).bit_count() if masks and "orin" in model.lower() else None
    return PowerMode(
        name=names.get(int(current[1]), "") if current else "",
        sm_count=None if tpcs is None else _SMS_PER_TPC * tpcs,
        gpu_mhz=_gpu_clocks_mhz(root)[2],
        memory_mhz=next((hz / 1e6 for hz in caps_hz if hz != _INT_MAX), None),
    )


def read_throttling(root: Path = _ROOT) -> Throttling | None:
    """What shows whether this Jetson throttles; None where this is none. Never raises."""
    clocks = _gpu_clocks_mhz(root)
    if not any(clocks):
        return None
    events: dict[str, int] = defaultdict(int)
    for path in sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")):
        count = _number(_text(path))
        if count is not None:
            events[path.name.removesuffix("_event_cnt")] += int(count)
    return Throttling(clocks[0], events)


def throttling_warnings(now: Throttling, before: Throttling, first: Throttling) -> tuple[str, ...]:
    """What lowered the clocks during a timing, one line each, ending with what to do.

    ``before`` is read before the timing, ``now`` right after it, before the GPU is idle, ``first`` as ``now`` of the
    first timing.
    """
    warnings = []
    for name, count in now.events.items():
        more = count - before.events.get(name, count)
        if more > 0:
            text = f"the Jetson throttled while it was timed (under-voltage or over-current, {name}: {more} times)"
            warnings.append(f"{text}: use a stronger supply or a lower power mode, and measure again")
    usual, mhz = first.gpu_mhz, now.gpu_mhz
    if usual and mhz and mhz < (1 - _CLOCK_TOLERANCE) * usual:
        warnings.append(
            f"the GPU's clock fell from {usual:.0f} to {mhz:.0f} MHz since the first timing: cool the Jetson, or lock"
            " the clocks of the power mode that will be deployed (sudo jetson_clocks)"
        )
    return tuple(warnings)


def _model(root: Path) -> str:
    """The name of the Jetson; empty where this is none."""
    # A container hides the device tree, and jetson-containers copies it to /tmp.
    files = ("proc/device-tree/model", "sys/devices/soc0/machine", "tmp/nv_jetson_model")
    names = (_text(root / file).strip("\0\n ") for file in files)
    return next((name for name in names if "jetson" in name.lower() and not name.lower().startswith("not ")), "")


def _gpu_clocks_mhz(root: Path) -> tuple[float | None, ...]:
    """By devfreq: the clock now, the lowest and the highest that are allowed; None where one is unknown."""
    # 17000000.gpu on JetPack 6, 17000000.ga10b on 5, gpu-gpc-0 on 7 on a Thor
    for pattern in ("*.gpu", "*.ga10b", "*.gv11b", "gpu-gpc-0"):
        for folder in sorted((root / "sys/class/devfreq").glob(pattern)):
            hz = [_number(_text(folder / name)) for name in ("cur_freq", "min_freq", "max_freq")]
            if any(hz):
                return tuple(value / 1e6 if value else None for value in hz)
    return None, None, None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(path: Path) -> str:
    """What a file holds; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
