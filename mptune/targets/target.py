"""Target profiles: what a device can do, each figure with its source, read from TOML and matched to the GPU here.

And what an engine takes of its memory, as a record keeps it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from mptune import resources
from mptune.errors import TargetError
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm
from mptune.targets.detect import Gpu, JetsonState, PowerMode, parse_capability

TargetKind = Literal["jetson", "gpu", "cpu"]

FIGURES = (
    *("compute_capability", "sm_count", "gpu_mhz", "fp16_tflops", "bf16_tflops", "fp32_tflops", "tf32_tflops"),
    *("bandwidth_gbps", "memory_mhz", "memory_gb", "l2_mb", "launch_us", "power_modes"),
)
"""The fields of a profile that need a source."""

EXPECTED_FACTOR = 1.5
"""Of published latencies of whole networks 87 % lie within this factor of predictions, each family of networks left out
of the fit (``benchmarks/published``)."""

_PEAKS = ("fp16_tflops", "bf16_tflops", "fp32_tflops", "tf32_tflops")

# What a device reports lies within a tenth of the GB in its name; siblings differ by half or double.
_MEMORY_TOLERANCE = 0.15
_CLOCK_TOLERANCE = 0.05  # the steps of the clock are finer; profiles round it

_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
_Part = Annotated[str, pydantic.Field(pattern=r"^p\d{4}-\d{4}$")]


def _capability(given: object) -> object:
    """A compute capability as a file has it, ``"8.7"``, as two numbers."""
    parsed = parse_capability(given) if isinstance(given, str) else given
    if parsed is None:
        raise ValueError('String should match "8.7"')
    return parsed


class Target(pydantic.BaseModel):
    """The device that engines are for; units are in the names, GB/s and GB of 10^9 bytes.

    Only title, kind, compute capability and the figures of the roofline are needed in a file.

    Attributes:
        fp16_tflops: dense FP16 peak of matrix products (tensor cores where there are), TFLOP/s; FP32's is without TF32.
        bf16_tflops: the same of BF16; None where the device has none, as TF32's (before compute capability 8.0, by the
            support matrices of TensorRT and TensorRT-RTX).
        launch_us: fixed cost of one kernel within a CUDA graph, microseconds.
        sources: figure -> where it comes from. ``† from memory`` and ``‡ inferred`` are marked as such.
        memory_gb: memory that engines can use, GB; None where it depends on the machine.
        gpu_mhz: clock that the peaks hold at, as the bandwidth at ``memory_mhz``: a Jetson's power modes cap them.
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


@dataclass(frozen=True)
class EngineMemory(JsonForm):
    """What one plan's engine takes, in bytes; None where it is not known.

    Attributes:
        engine_bytes: size of the engine's file, which holds its weights.
        context_bytes: what a context takes for values and scratch: the built engine's own figure where it is measured,
            else the most that is alive at once.
        weight_bytes: constants as the plan stores them, computed from the model.
    """

    engine_bytes: int | None
    context_bytes: int | None
    weight_bytes: int | None
    source: Literal["measured", "predicted"]

    @property
    def total_bytes(self) -> int:
        """What the engine takes when it is loaded: its file or its weights, and the context."""
        return max(self.engine_bytes or 0, self.weight_bytes or 0) + (self.context_bytes or 0)


def load_target(name_or_path: str) -> Target:
    """Read a profile by its name, or from a TOML file of the user's."""
    return _read(resources.locate("targets", name_or_path, TargetError))


def check_precisions(target: Target, precisions: Collection[str]) -> None:
    """Refuse precisions that a device lacks."""
    for precision in map(Precision.named, precisions):
        if getattr(target, precision.throughput) is None:
            text = f"{target.title} has no {precision.name}, which --precisions asks for"
            raise TargetError(text, f"leave {precision} out of --precisions (`mptune targets` lists other devices)")


def list_targets() -> tuple[Target, ...]:
    """All profiles that come with mptune, sorted by name."""
    return tuple(_read(resources.find("targets", name)) for name in resources.names("targets"))


def _read(path: Path) -> Target:
    """The profile in a file; a figure that is given without a source says so, and TF32 may be inferred."""
    target = resources.read_toml(path, Target, TargetError, "start from one of the files in search_spaces/targets/")
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
    """
    profiles = [target for target in list_targets() if target.kind != "cpu"]
    fitting = [target for target in profiles if gpu.part and gpu.part in target.part_numbers]
    fitting = fitting or [
        target
        for target in profiles
        if _can_be(target, gpu.name, gpu.memory_gb) and gpu.compute_capability in (None, target.compute_capability)
    ]
    if not fitting:
        return _stand_in(gpu, profiles)

    def likeness(target: Target) -> tuple[float, float, float]:
        """How much of the GPU's name the profile's names match, how near its clock is, and the lower clock."""
        letters = max((len(name) for name in target.gpu_names if name.lower() in gpu.name.lower()), default=0)
        mhz = target.gpu_mhz or 0.0
        off = abs(math.log(gpu.mode.gpu_mhz / mhz)) if gpu.mode.gpu_mhz is not None and mhz else 0.0
        return letters, -off, -mhz

    return max(fitting, key=likeness)


def _stand_in(gpu: Gpu, profiles: Collection[Target]) -> Target:
    """A profile with the GPU's own name, compute capability and memory; the other figures are the nearest profile's.

    Nearest is the compute capability (newer rather than older, then the smaller device), and the sources say so. It is
    good enough as a prior: the search fits the scale of all gains to its first two builds.
    """
    kind: TargetKind = "jetson" if gpu.is_jetson else "gpu"
    major, minor = gpu.compute_capability or (8, 6)  # the most common among GPUs whose driver is too old to report it

    def distance(target: Target) -> tuple[float, ...]:
        there = target.compute_capability or (0, 0)
        steps = 10 * (there[0] - major) + there[1] - minor
        return float(target.kind != kind), abs(steps) + (0.5 if steps < 0 else 0.0), target.fp16_tflops

    nearest = min(profiles, key=distance)
    capability = gpu.compute_capability or nearest.compute_capability
    is_ampere = capability is not None and capability >= Precision.BF16.since
    reported = {"compute_capability": gpu.compute_capability, "memory_gb": gpu.memory_gb}
    reported = {name: value for name, value in reported.items() if value is not None}
    peaks = {"bf16_tflops": nearest.bf16_tflops or nearest.fp16_tflops, "tf32_tflops": nearest.tf32_tflops}
    peaks = {name: peak if is_ampere else None for name, peak in peaks.items()}
    inferred = f"‡ inferred: that of {nearest.name}, the profile nearest to this GPU"
    sources = {name: inferred for name in (*nearest.sources, *peaks) if is_ampere or name not in peaks}
    return nearest.model_copy(
        update={
            **reported,
            **peaks,
            "name": re.sub(r"[^a-z0-9]+", "-", gpu.name.lower().removeprefix("nvidia")).strip("-") or "gpu",
            "title": gpu.name,
            "kind": kind,
            "sources": sources | dict.fromkeys(reported, "reported by the driver"),
            **dict.fromkeys(("power_modes", "gpu_names", "part_numbers"), ()),
            "note": f"no profile of its own: peaks and bandwidth are taken from {nearest.name}",
        }
    )


def in_power_mode(target: Target, mode: PowerMode) -> Target:
    """A Jetson's profile with the figures that a power mode leaves: SMs, clock of the GPU, clock of the memory.

    What is unknown of the mode changes nothing. A mode that leaves more SMs than a module has leaves all of them: fused
    ones need not be in its mask.
    """

    def ratio(limit: float | None, figure: float | None) -> float:
        return limit / figure if limit and figure else 1.0

    sms, gpu = min(1.0, ratio(mode.sm_count, target.sm_count)), ratio(mode.gpu_mhz, target.gpu_mhz)
    scales = {"gpu_mhz": gpu, "sm_count": sms, **dict.fromkeys(_PEAKS, sms * gpu)}
    scales |= dict.fromkeys(("memory_mhz", "bandwidth_gbps"), ratio(mode.memory_mhz, target.memory_mhz))
    figures = {name: getattr(target, name) * s for name, s in scales.items() if s != 1.0 and getattr(target, name)}
    if "sm_count" in figures:
        figures["sm_count"] = round(figures["sm_count"])
    scaled = {name: f"{target.sources.get(name, 'not stated')}; scaled to power mode {mode}" for name in figures}
    return target.model_copy(update={**figures, "sources": {**target.sources, **scaled}})


def _can_be(target: Target, name: str, memory_gb: float | None) -> bool:
    """Whether a device of this name and memory can be the profile's; what is not known of either rules nothing out."""
    if target.gpu_names and not any(known_as.lower() in name.lower() for known_as in target.gpu_names):
        return False
    return memory_gb is None or target.memory_gb is None or same_memory(memory_gb, target.memory_gb)


def same_memory(reported_gb: float, named_gb: float) -> bool:
    """Whether what a device reports can be the memory in a product's name."""
    return abs(reported_gb / named_gb - 1) <= _MEMORY_TOLERANCE


def profile_warnings(target: Target, jetson: JetsonState) -> tuple[str, ...]:
    """Where the device here differs from the one that a profile describes, one line each, ending with what to do."""
    warnings = []
    is_alike = target.kind == "jetson" and _can_be(target, jetson.model, jetson.memory_gb)
    if not (jetson.part in target.part_numbers if jetson.part and target.part_numbers else is_alike):
        text = f"this is {jetson.model} {jetson.part}".strip()
        cure = "the predictions are for another module; give --target the profile of this one"
        warnings.append(f"{text}, and the target is {target.title}: {cure}")
    mode = jetson.mode
    scaled = in_power_mode(target, mode)
    figures = {"sm_count": "{:.0f} SMs", "gpu_mhz": "GPU {:.0f} MHz", "memory_mhz": "memory {:.0f} MHz"}
    pairs = {words: (getattr(scaled, figure), getattr(target, figure)) for figure, words in figures.items()}
    limits = {w: pair for w, pair in pairs.items() if all(pair) and abs(pair[0] / pair[1] - 1) > _CLOCK_TOLERANCE}
    if limits:
        here, assumed = (", ".join(words.format(pair[k]) for words, pair in limits.items()) for k in (0, 1))
        warnings.append(
            f"power mode {mode.name or 'here'} has {here}; the profile {target.name} assumes {assumed} "
            f"({scaled.fp16_tflops:.1f} of {target.fp16_tflops:.1f} TFLOPS in FP16): set the mode that will be "
            "deployed (sudo nvpmodel -m ID), and rely on what is measured in it"
        )
    highest, lowest = mode.gpu_mhz, jetson.gpu_min_mhz
    if highest is not None and lowest is not None and lowest < highest:
        text = f"the GPU's clock floats between {lowest:.0f} and {highest:.0f} MHz"
        warnings.append(f"{text}: lock it for measuring (sudo jetson_clocks)")
    return tuple(warnings)


def other_mode(earlier: JetsonState | None, now: JetsonState | None, before: str, cure: str) -> tuple[str, ...]:
    """The warning that measurements go on in another power mode than that of those ``before``, as far as is known."""
    if earlier is None or now is None:
        return ()
    pairs = zip(astuple(earlier.mode), astuple(now.mode), strict=True)
    if not any(was and is_now and was != is_now for was, is_now in pairs):
        return ()
    return (f"{before} in power mode {earlier.mode}, and this is {now.mode}: {cure}",)
