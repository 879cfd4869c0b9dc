"""Target profiles: what a device can do, each figure with its source, read from TOML and matched to the GPU here."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from mptune import resources
from mptune.errors import TargetError
from mptune.graph.precision import Precision
from mptune.targets.detect import Gpu, detect_gpus, parse_capability
from mptune.targets.jetson import PowerMode, same_memory

__all__ = ["FIGURES", "Gpu", "Target", "detect_gpus", "list_targets", "load_target", "match_target"]

TargetKind = Literal["jetson", "gpu", "cpu"]

FIGURES = (
    "compute_capability",
    "sm_count",
    "gpu_mhz",
    "fp16_tflops",
    "bf16_tflops",
    "fp32_tflops",
    "tf32_tflops",
    "bandwidth_gbps",
    "memory_mhz",
    "memory_gb",
    "l2_mb",
    "launch_us",
    "power_modes",
)
"""The fields of a profile that need a source."""

EXPECTED_FACTOR = 1.5
"""Of published latencies of whole networks 87 % lie within this factor of predictions, each family of networks left out
of the fit (``benchmarks/published``)."""

_PEAKS = ("fp16_tflops", "bf16_tflops", "fp32_tflops", "tf32_tflops")

_EXAMPLE = "start from one of the files in search_spaces/targets/"


_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
_Part = Annotated[str, pydantic.Field(pattern=r"^p\d{4}-\d{4}$")]


def _capability(given: object) -> object:
    """A compute capability as a file has it, ``"8.7"``, as two numbers."""
    if not isinstance(given, str):
        return given
    if parse_capability(given) is None:
        raise ValueError('String should match "8.7"')
    return parse_capability(given)


class Target(pydantic.BaseModel):
    """The device that engines are for; units are in the names, GB/s and GB of 10^9 bytes.

    Only title, kind, compute capability and the figures of the roofline are needed in a file.

    Attributes:
        fp16_tflops: dense FP16 peak of matrix products (tensor cores where there are), TFLOP/s.
        fp32_tflops: FP32 peak without TF32.
        memory_gb: memory that engines can use, GB; None where it depends on the machine.
        sources: figure -> where it comes from. ``† from memory`` and ``‡ inferred`` are marked as such.
        gpu_mhz: clock that the peaks hold at; given for Jetsons, whose power modes cap it.
        memory_mhz: clock of the memory that its bandwidth holds at; the same.
        bf16_tflops: the same of BF16; None where the device has none (before compute capability 8.0, by the support
            matrices of TensorRT and TensorRT-RTX).
        tf32_tflops: the same of TF32: what FP32 groups reach where TF32 is allowed; None as for BF16.
        launch_us: fixed cost of one kernel within a CUDA graph, microseconds.
        gpu_names: what drivers and device trees call it; parts of the name, in any case.
        part_numbers: of the Jetson modules that the profile is for, such as ``p3767-0005``.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = pydantic.Field(1, exclude=True)
    name: str = ""
    title: str = pydantic.Field(min_length=1)
    kind: TargetKind
    fp16_tflops: _Positive
    fp32_tflops: _Positive
    bandwidth_gbps: _Positive
    launch_us: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
    sources: dict[str, str] = {}
    memory_gb: _Positive | None = None
    compute_capability: Annotated[tuple[int, int], pydantic.BeforeValidator(_capability)] | None = None
    sm_count: Annotated[int, pydantic.Field(gt=0)] | None = None
    gpu_mhz: _Positive | None = None
    memory_mhz: _Positive | None = None
    bf16_tflops: _Positive | None = None
    tf32_tflops: _Positive | None = None
    l2_mb: _Positive | None = None
    power_modes: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    part_numbers: tuple[_Part, ...] = ()
    note: str = ""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Target:
        unknown = sorted(set(self.sources) - set(FIGURES))
        if unknown:
            raise ValueError(f"sources names {unknown[0]!r}, which is no figure")
        if self.kind != "cpu" and self.compute_capability is None:
            raise ValueError('compute_capability is missing, such as "8.7"')
        return self

    @property
    def figures_sha256(self) -> str:
        """A hash of what predictions are made with."""
        figures = {figure: getattr(self, figure) for figure in FIGURES}
        return hashlib.sha256(json.dumps(figures).encode()).hexdigest()


def load_target(name_or_path: str) -> Target:
    """Read a profile by its name, or from a TOML file of the user's."""
    return _read(resources.locate("targets", name_or_path, TargetError))


def check_precisions(target: Target, precisions: Collection[str]) -> None:
    """Refuse precisions that a device lacks."""
    for precision in map(Precision.named, precisions):
        if getattr(target, precision.throughput) is None:
            since = ".".join(map(str, precision.since))
            raise TargetError(
                f"{target.title} has no {precision.name}, which --precisions asks for",
                f"leave {precision} out of --precisions; GPUs of compute capability {since} and newer have it"
                " (`mptune targets`)",
            )


def list_targets() -> tuple[Target, ...]:
    """All profiles that come with mptune, sorted by name."""
    return tuple(_read(resources.find("targets", name)) for name in resources.names("targets"))


def _read(path: Path) -> Target:
    """The profile in a file; a figure that is given without a source says so, and TF32 may be inferred."""
    target = resources.read_toml(path, Target, TargetError, _EXAMPLE)
    given = [figure for figure in FIGURES if getattr(target, figure)]
    sources = {figure: target.sources.get(figure, "not stated") for figure in given}
    tf32, capability = target.tf32_tflops, target.compute_capability
    if tf32 is None and capability is not None and capability >= Precision.BF16.since:
        tf32, sources["tf32_tflops"] = target.fp16_tflops / 2, "‡ inferred: half of dense FP16"
    return target.model_copy(update={"name": path.stem, "tf32_tflops": tf32, "sources": sources})


def match_target(gpu: Gpu) -> Target:
    """The profile of a GPU: by its module's number, else by name and memory; else a stand-in.

    Of several profiles of one Jetson module, that whose clock is nearest to the highest that the power mode allows;
    where that is not known, the slowest, whose prediction is the most cautious.

    The stand-in has the GPU's own name, compute capability and memory; the other figures are those of the profile
    whose compute capability is nearest (newer rather than older, then the smaller device), and their sources say so.
    It is good enough as a prior: the search fits the scale of all gains to its first two builds.
    """
    profiles = [target for target in list_targets() if target.kind != "cpu"]
    fitting = [target for target in profiles if gpu.part and gpu.part in target.part_numbers]
    fitting = fitting or [
        target
        for target in profiles
        if can_be(target, gpu.name, gpu.memory_gb) and gpu.compute_capability in (None, target.compute_capability)
    ]
    if fitting:
        return max(fitting, key=lambda target: (_named(target, gpu), *_clocked(target, gpu)))
    kind: TargetKind = "jetson" if gpu.is_jetson else "gpu"
    nearest = min(profiles, key=lambda target: _distance(target, gpu, kind))
    source = f"‡ inferred: that of {nearest.name}, the profile nearest to this GPU"
    own = {"compute_capability": gpu.compute_capability, "memory_gb": gpu.memory_gb}
    sources = dict.fromkeys((name for name in nearest.sources if name not in ("bf16_tflops", "tf32_tflops")), source)
    sources |= {figure: "reported by the driver" for figure, value in own.items() if value is not None}
    capability = gpu.compute_capability or nearest.compute_capability
    bf16_tflops = tf32_tflops = None
    if capability is not None and capability >= Precision.BF16.since:
        bf16_tflops = nearest.bf16_tflops or nearest.fp16_tflops
        tf32_tflops = nearest.tf32_tflops
        sources |= {"bf16_tflops": source, "tf32_tflops": source}
    return nearest.model_copy(
        update={
            "name": re.sub(r"[^a-z0-9]+", "-", gpu.name.lower().removeprefix("nvidia")).strip("-") or "gpu",
            "title": gpu.name,
            "kind": kind,
            "compute_capability": capability,
            "bf16_tflops": bf16_tflops,
            "tf32_tflops": tf32_tflops,
            "memory_gb": gpu.memory_gb or nearest.memory_gb,
            "sources": sources,
            "power_modes": (),
            "gpu_names": (),
            "part_numbers": (),
            "note": f"no profile of its own: peaks and bandwidth are taken from {nearest.name}",
        }
    )


def _named(target: Target, gpu: Gpu) -> int:
    """How many letters of the GPU's name the profile's names match."""
    return max((len(name) for name in target.gpu_names if name.lower() in gpu.name.lower()), default=0)


def _clocked(target: Target, gpu: Gpu) -> tuple[float, float]:
    """Sort key: largest for the profile whose clock is nearest to the device's, then for the lower clock."""
    mhz = target.gpu_mhz or 0.0
    if gpu.mode.gpu_mhz is None or not mhz:
        return 0.0, -mhz
    return -abs(math.log(gpu.mode.gpu_mhz / mhz)), -mhz


def in_power_mode(target: Target, mode: PowerMode) -> Target:
    """A Jetson's profile with the figures that a power mode leaves: SMs, clock of the GPU, clock of the memory.

    What is unknown of the mode changes nothing. A mode that leaves more SMs than a module has leaves all of them: fused
    ones need not be in its mask.
    """
    sms = min(1.0, _ratio(mode.sm_count, target.sm_count))
    scales = {name: sms * _ratio(mode.gpu_mhz, target.gpu_mhz) for name in _PEAKS if getattr(target, name)}
    scales |= {"gpu_mhz": _ratio(mode.gpu_mhz, target.gpu_mhz), "sm_count": sms}
    scales |= dict.fromkeys(("memory_mhz", "bandwidth_gbps"), _ratio(mode.memory_mhz, target.memory_mhz))
    scales = {name: scale for name, scale in scales.items() if scale != 1.0}
    figures = {name: getattr(target, name) * scale for name, scale in scales.items()}
    if "sm_count" in figures:
        figures["sm_count"] = round(figures["sm_count"])
    scaled = {name: f"{target.sources.get(name, 'not stated')}; scaled to power mode {mode}" for name in figures}
    return target.model_copy(update={**figures, "sources": {**target.sources, **scaled}})


def _ratio(limit: float | None, figure: float | None) -> float:
    return limit / figure if limit and figure else 1.0


def can_be(target: Target, name: str, memory_gb: float | None) -> bool:
    """Whether a device of this name and memory can be the profile's; what is not known of either rules nothing out."""
    if target.gpu_names and not any(known_as.lower() in name.lower() for known_as in target.gpu_names):
        return False
    return memory_gb is None or target.memory_gb is None or same_memory(memory_gb, target.memory_gb)


def _distance(target: Target, gpu: Gpu, kind: TargetKind) -> tuple[float, ...]:
    major, minor = gpu.compute_capability or (8, 6)  # the most common among GPUs whose driver is too old to report it
    there = target.compute_capability or (0, 0)
    steps = 10 * (there[0] - major) + there[1] - minor
    return (float(target.kind != kind), abs(steps) + (0.5 if steps < 0 else 0.0), target.fp16_tflops)
