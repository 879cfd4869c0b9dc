"""Which GPUs this machine has, by nvidia-smi or a Jetson's device tree. Loads no CUDA, never raises."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mptune.errors import TargetError
from mptune.targets.jetson import TIMEOUT_S, PowerMode, ask_nvidia_smi, read_jetson

_QUERY = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version")

_DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/nvhost-gpu", "dev/nvhost-ctrl-gpu", "dev/nvgpu/igpu0/ctrl")
"""Of the drivers for separate GPUs and, the last three, for those of a Jetson."""

_DRIVER_OF_CUDA_13, _L4T_OF_CUDA_13 = 580, 38

_JETSON_CAPABILITIES = {"Thor": (11, 0), "Orin": (8, 7), "Xavier": (7, 2), "TX2": (6, 2), "TX1": (5, 3), "Nano": (5, 3)}
"""Compute capability by module (NVIDIA's CUDA GPUs page); the first that the model's name holds."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        memory_gb: total, GB (10^9 bytes); on a Jetson what CPU and GPU share. None where it is unknown.
        driver: version of the driver, or of L4T on a Jetson.
        index: as CUDA counts the visible devices.
        part: number of the Jetson module; empty where it is unknown.
        mode: a Jetson's power mode and what it leaves.
    """

    name: str
    compute_capability: tuple[int, int] | None
    memory_gb: float | None
    driver: str
    index: int = 0
    is_jetson: bool = False
    part: str = ""
    mode: PowerMode = PowerMode()  # noqa: RUF009  it is frozen


def detect_gpus(root: Path = Path("/"), timeout_s: float = TIMEOUT_S) -> tuple[Gpu, ...]:
    """List the GPUs that CUDA would see here; empty where there is none or nvidia-smi does not answer.

    ``CUDA_VISIBLE_DEVICES`` is respected where it holds indices or UUIDs of whole GPUs.
    """
    jetson = _detect_jetson(root)
    if jetson is not None:  # its nvidia-smi, where there is one, answers "[N/A]"
        return (jetson,)
    rows = _listed_gpus(timeout_s)
    visible = _visible([row["index"] for row in rows], [row["uuid"] for row in rows])
    return tuple(
        Gpu(
            name=rows[k]["name"],
            compute_capability=parse_capability(rows[k]["compute_cap"]),
            memory_gb=_memory_gb(rows[k]["memory.total"]),
            driver=rows[k]["driver_version"],
            index=index,
        )
        for index, k in enumerate(visible)
    )


def cuda_series(gpus: Sequence[Gpu]) -> int:
    """The newest CUDA whose packages run with the driver here: 12, or 13; 12 where no driver is known.

    CUDA 13 needs a driver of 580 or later (CUDA's release notes, table 3), which Jetson Linux has from 38 on.
    """
    if not gpus:
        return 12
    number = re.search(r"\d+", gpus[0].driver.removeprefix("L4T"))
    return 13 if number and int(number[0]) >= (_L4T_OF_CUDA_13 if gpus[0].is_jetson else _DRIVER_OF_CUDA_13) else 12


def hidden_gpu(root: Path = Path("/"), timeout_s: float = TIMEOUT_S) -> Path | None:
    """A device file of an NVIDIA GPU where ``detect_gpus`` finds none; None where there is none, or the user hid it.

    In containers nvidia-smi may be missing where CUDA works.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return None
    files = (path for pattern in _DEVICE_FILES for path in sorted(root.glob(pattern)))
    file = next(files, None)
    return file if file is not None and not detect_gpus(root, timeout_s) else None


def gpu_variables(index: int) -> dict[str, str]:
    """The environment variables with which CUDA sees one GPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    if entries is not None and index >= len(entries):
        raise TargetError(f"there is no GPU {index}: CUDA_VISIBLE_DEVICES is {visible!r}", "give a smaller number")
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"CUDA_VISIBLE_DEVICES": entries[index] if entries else str(index), "CUDA_DEVICE_ORDER": order}


def _listed_gpus(timeout_s: float) -> list[dict[str, str]]:
    text = ask_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", timeout_s=timeout_s)
    rows = csv.reader((text or "").splitlines(), skipinitialspace=True)
    return [dict(zip(_QUERY, (cell.strip() for cell in row), strict=True)) for row in rows if len(row) == len(_QUERY)]


def _visible(indices: list[str], uuids: list[str]) -> list[int]:
    """Positions of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; it ends at the first bad entry."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or wanted.strip().startswith("MIG"):
        return list(range(len(indices)))
    chosen: list[int] = []
    for entry in (part.strip() for part in wanted.split(",")):
        matches = [
            k
            for k, (i, u) in enumerate(zip(indices, uuids, strict=True))
            if entry == i or (entry.startswith("GPU-") and u.startswith(entry))
        ]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def parse_capability(text: str) -> tuple[int, int] | None:
    """A compute capability such as ``8.7``; None for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _memory_gb(mebibytes: str) -> float | None:
    try:
        return round(float(mebibytes) * 2**20 / 1e9, 1)
    except ValueError:  # "[N/A]" where CPU and GPU share their memory
        return None


def _detect_jetson(root: Path) -> Gpu | None:
    jetson = read_jetson(root)
    if jetson is None:
        return None
    model = jetson.model.lower()
    return Gpu(
        name=jetson.model,
        compute_capability=next((c for name, c in _JETSON_CAPABILITIES.items() if name.lower() in model), None),
        memory_gb=jetson.memory_gb,
        driver=f"L4T {jetson.l4t}" if jetson.l4t else "",
        is_jetson=True,
        part=jetson.part,
        mode=jetson.mode,
    )
