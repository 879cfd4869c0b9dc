"""A Jetson as its own files describe it: module, JetPack, power mode, clocks, memory; and NVIDIA's own programs.

Also whether it throttled while it was timed: nvidia-smi answers N/A there. Sources: Jetson Linux Developer Guide,
"Platform Power and Performance" (``oc*_event_cnt`` of the driver ``soctherm_oc``: OC1 is under-voltage, OC2 average and
OC3 instantaneous over-current); the Linux kernel's documentation of devfreq; NVIDIA's nvpmodel files, as copied in
LineageOS/android_device_nvidia_concord (which files set a power mode, and the mask of TPCs that are off).
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mptune.json_form import JsonForm

TIMEOUT_S = 10.0
"""A driver that hangs is given up after this long."""


def ask_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """What nvidia-smi prints; None where there is none, or it fails or does not answer in time."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


_JETPACK_MAJORS = {"35": "5", "36": "6", "38": "7", "39": "7"}
"""Series of JetPack by that of Jetson Linux (NVIDIA's JetPack archive)."""

_RELEASE = re.compile(r"# R(\d+) .*REVISION: ([\d.]+)")

_MEMORY_TOLERANCE = 0.15
"""What a device reports lies within a tenth of the GB in its name; siblings differ by half or double."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The clocks of a Jetson's GPU; None where one is unknown."""

    gpu_mhz: float | None = None
    gpu_min_mhz: float | None = None
    """The lowest that the governor may choose; equal to the highest where ``jetson_clocks`` ran."""
    gpu_max_mhz: float | None = None
    """The highest that the power mode allows."""


_TPC_MASKS = (
    *("sys/devices/gpu.0/tpc_pg_mask", "sys/devices/platform/gpu.0/tpc_pg_mask"),
    *("sys/devices/platform/17000000.gpu/tpc_pg_mask", "sys/devices/platform/bus@0/17000000.gpu/tpc_pg_mask"),
)
_MEMORY_CAPS = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")
"""Of JetPack 6 and later, and of JetPack 5; 0 is no cap."""
_INT_MAX, _NO_LIMIT_HZ = 2**31 - 1, 1e11
_ORIN_TPCS, _SMS_PER_TPC = 8, 2


@dataclass(frozen=True)
class PowerMode(JsonForm):
    """What a Jetson's power mode leaves of the GPU and the memory; None or empty where a value is unknown.

    Attributes:
        sm_count: multiprocessors that are on.
        memory_mhz: cap of the memory's clock; None where there is none, too.
    """

    name: str = ""
    sm_count: int | None = None
    gpu_mhz: float | None = None
    memory_mhz: float | None = None

    def __str__(self) -> str:
        facts = (
            "" if self.sm_count is None else f"{self.sm_count} SMs",
            "" if self.gpu_mhz is None else f"GPU up to {self.gpu_mhz:.0f} MHz",
            "" if self.memory_mhz is None else f"memory up to {self.memory_mhz:.0f} MHz",
        )
        listed = ", ".join(fact for fact in facts if fact)
        return f"{self.name or 'unnamed'}{f' ({listed})' if listed else ''}"

    def differs(self, other: PowerMode) -> bool:
        """Whether a value that both know is another."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return any(ours and theirs and ours != theirs for ours, theirs in pairs)


@dataclass(frozen=True)
class JetsonState(Clocks, JsonForm):
    """A Jetson at one moment; None or empty where a value is unknown.

    Attributes:
        part: number of the module, such as ``p3767-0005``; the carrier board may be anyone's.
        memory_gb: what CPU and GPU share, less what the firmware keeps, GB (10^9 bytes).
        l4t: release of Jetson Linux, such as ``36.4.3``.
        jetpack: such as ``6.2``, or ``6`` where only the series is known.
        sm_count: multiprocessors that the power mode leaves.
        memory_max_mhz: the highest clock of the memory that it allows; None where it sets none, too.
    """

    model: str
    part: str = ""
    memory_gb: float | None = None
    l4t: str = ""
    jetpack: str = ""
    power_mode: str = ""
    memory_mhz: float | None = None
    sm_count: int | None = None
    memory_max_mhz: float | None = None

    @property
    def mode(self) -> PowerMode:
        """The power mode and what it leaves."""
        return PowerMode(self.power_mode, self.sm_count, self.gpu_max_mhz, self.memory_max_mhz)

    def facts(self) -> list[tuple[str, str]]:
        """The device as (name, value) lines; unknown values are left out."""
        clock = ""
        if self.gpu_max_mhz is not None:
            now = "" if self.gpu_mhz is None else f"{self.gpu_mhz:.0f} of "
            clock = f"{now}{self.gpu_max_mhz:.0f} MHz"
        lines = [
            ("Jetson", f"{self.model}{f' ({self.part})' if self.part else ''}"),
            ("JetPack", f"{self.jetpack or '?'} (L4T {self.l4t})" if self.l4t else self.jetpack),
            ("power mode", self.power_mode),
            ("SMs", "" if self.sm_count is None else str(self.sm_count)),
            ("GPU clock", clock),
            ("memory clock", "" if self.memory_mhz is None else f"{self.memory_mhz:.0f} MHz"),
            ("memory cap", "" if self.memory_max_mhz is None else f"{self.memory_max_mhz:.0f} MHz"),
        ]
        return [(name, value) for name, value in lines if value]


def read_jetson(root: Path = Path("/")) -> JetsonState | None:
    """Read the device's files; None where this is no Jetson."""
    model, mode = _model(root), read_power_mode(root)
    if mode is None:
        return None
    total = re.search(r"^MemTotal:\s*(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    compatible = read_text(root / "proc/device-tree/compatible").split("\0")
    release = _RELEASE.search(read_text(root / "etc/nv_tegra_release"))
    l4t = f"{release[1]}.{release[2]}" if release else ""
    memory = read_number(root / "sys/kernel/debug/bpmp/debug/clk/emc/rate")
    return JetsonState(
        model=model,
        part=_part(compatible),
        memory_gb=round(int(total[1]) * 1024 / 1e9, 1) if total else None,
        l4t=l4t,
        jetpack=_jetpack(root, l4t),
        power_mode=mode.name,
        memory_mhz=None if memory is None else memory / 1e6,
        sm_count=mode.sm_count,
        memory_max_mhz=mode.memory_mhz,
        **asdict(gpu_clocks(root)),
    )


def read_power_mode(root: Path = Path("/")) -> PowerMode | None:
    """The power mode and what it leaves; None where this is no Jetson."""
    model = _model(root).lower()
    if not model:
        return None
    sm_count = _sm_count(root) if "orin" in model else None
    return PowerMode(_power_mode_name(root), sm_count, gpu_clocks(root).gpu_max_mhz, _memory_cap_mhz(root))


def _model(root: Path) -> str:
    """The name of the device; a container hides the device tree, and jetson-containers copies it to /tmp."""
    for name in ("proc/device-tree/model", "sys/devices/soc0/machine", "tmp/nv_jetson_model"):
        model = read_text(root / name).strip("\0\n ")
        if "jetson" in model.lower() and not model.lower().startswith("not "):
            return model
    return ""


def same_memory(reported_gb: float, named_gb: float) -> bool:
    """Whether what a device reports can be the memory in a product's name."""
    return abs(reported_gb / named_gb - 1) <= _MEMORY_TOLERANCE


def _part(compatible: Sequence[str]) -> str:
    """Of ``nvidia,p3768-0000+p3767-0005-super``, ``nvidia,p3767-0005``, ``nvidia,tegra234`` the second."""
    matches = (re.fullmatch(r"nvidia,(p\d{4}-\d{4})", entry.strip()) for entry in compatible)
    return next((match[1] for match in matches if match), "")


def _jetpack(root: Path, l4t: str) -> str:
    """By the installed package; else the series, by the release of Jetson Linux."""
    status = read_text(root / "var/lib/dpkg/status")
    package = re.search(r"^Package: nvidia-jetpack\n(?:.+\n)*?Version: ([\d.]+)", status, re.MULTILINE)
    if package:
        return package[1]
    return _JETPACK_MAJORS.get(l4t.partition(".")[0], "")


def _power_mode_name(root: Path) -> str:
    """The name of the power mode, by the files of ``nvpmodel``."""
    modes = re.findall(
        r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", read_text(root / "etc/nvpmodel.conf"), re.MULTILINE
    )
    kept = re.search(r"pmode:(\d+)", read_text(root / "var/lib/nvpmodel/status"))
    names = {int(number): name.removeprefix("MODE_") for number, name in modes}
    return names.get(int(kept[1]), "") if kept else ""


def _sm_count(root: Path) -> int | None:
    """By the mask of the TPCs that are off; bits of TPCs that a module lacks are set in all of its modes."""
    masks = [mask for name in _TPC_MASKS if (mask := read_number(root / name)) is not None]
    if not masks:
        return None
    on = ~int(max(masks)) & (1 << _ORIN_TPCS) - 1
    return _SMS_PER_TPC * on.bit_count()


def _memory_cap_mhz(root: Path) -> float | None:
    """None where there is none: the file holds 0, or what nvpmodel writes for -1."""
    hz = (read_number(root / name) or 0.0 for name in _MEMORY_CAPS)
    return next((each / 1e6 for each in hz if 0 < each < _NO_LIMIT_HZ and each != _INT_MAX), None)


def gpu_clocks(root: Path) -> Clocks:
    """By devfreq: the GPU is ``17000000.gpu`` on JetPack 6, ``17000000.ga10b`` on 5, ``gpu-gpc-0`` on 7 on a Thor."""
    for pattern in ("*.gpu", "*.ga10b", "*.gv11b", "gpu-gpc-0"):
        for folder in sorted((root / "sys/class/devfreq").glob(pattern)):
            hz = [read_number(folder / name) for name in ("cur_freq", "min_freq", "max_freq")]
            if any(hz):
                now, lowest, highest = (value / 1e6 if value else None for value in hz)
                return Clocks(gpu_mhz=now, gpu_min_mhz=lowest, gpu_max_mhz=highest)
    return Clocks()


def read_number(path: Path) -> float | None:
    """The number that a file holds; None where it holds none or cannot be read."""
    try:
        return float(read_text(path))
    except ValueError:
        return None


def read_text(path: Path) -> str:
    """What a file holds; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_CLOCK_TOLERANCE = 0.05


@dataclass(frozen=True)
class Throttling:
    """A Jetson's state at one moment, as far as its files show it."""

    clocks: Clocks
    events: Mapping[str, int]
    """Event counter, such as ``oc3`` -> events since the device was started."""


def read_throttling(root: Path = Path("/")) -> Throttling | None:
    """Read the files; None where this is no Jetson. Never raises."""
    clocks = gpu_clocks(root)
    return None if clocks == Clocks() else Throttling(clocks, _events(root))


def throttling_warnings(now: Throttling, before: Throttling, first: Throttling) -> tuple[str, ...]:
    """What lowered the clocks during a timing, one line each, ending with what to do.

    ``before`` is read before the timing, ``now`` right after it, before the GPU is idle, ``first`` as ``now`` of the
    first timing.
    """
    warnings = []
    for name, count in now.events.items():
        more = count - before.events.get(name, count)
        if more > 0:
            warnings.append(
                f"the Jetson throttled while it was timed (under-voltage or over-current, {name}: {more} times): use a"
                " stronger supply or a lower power mode, and measure again"
            )
    usual, mhz = first.clocks.gpu_mhz, now.clocks.gpu_mhz
    if usual and mhz and mhz < (1 - _CLOCK_TOLERANCE) * usual:
        warnings.append(
            f"the GPU's clock fell from {usual:.0f} to {mhz:.0f} MHz since the first timing: cool the Jetson, or lock"
            " the clocks of the power mode that will be deployed (sudo jetson_clocks)"
        )
    return tuple(warnings)


def _events(root: Path) -> dict[str, int]:
    events: dict[str, int] = defaultdict(int)
    for path in sorted((root / "sys/class/hwmon").glob("hwmon*/oc*_event_cnt")):
        count = read_number(path)
        if count is not None:
            events[path.name.removesuffix("_event_cnt")] += int(count)
    return events
