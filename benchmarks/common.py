"""Shared by the benchmarks: a model with samples, plans as text, records of measurements, result files."""

from __future__ import annotations

import json
import math
import platform
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mptune.data.archive import save_samples
from mptune.data.calibration import load_calibration
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.environment import describe_environment
from mptune.files import write_text
from mptune.graph.groups import GroupedModel, LayerGroup
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.json_form import decode_float, encode_float
from mptune.settings import DataSettings, SearchSettings
from mptune.tuning.dominance import dominated_area, exactness, gains

T = TypeVar("T")


def make_context(
    grouped: GroupedModel, data: Path, folder: Path, samples: int, batch: int, settings: SearchSettings | None = None
) -> RunContext:
    """A model with a run's folders under ``folder``, with the first samples for the search, and the next ones held out.

    Where there are no more than ``samples`` samples, the same are held out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = RunContext.in_folder(grouped, folder, settings)
    loaded = load_calibration(data, grouped.model.inputs, DataSettings(batch=batch), seed=0)
    held_out = loaded.samples[samples : 2 * samples] or loaded.samples[:samples]
    for which, chosen in (("search", loaded.samples[:samples]), ("held_out", held_out)):
        save_samples(context.samples(which), chosen)
    return context


def one_group_plans(model: Model, groups: Sequence[LayerGroup]) -> dict[str, PrecisionPlan]:
    """Group id -> the plan with that group alone in FP16."""
    fp32 = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP32)
    return {g.id: fp32.replace({g.id: Precision.FP16}) for g in groups}


def random_plans(groups: Sequence[LayerGroup], count: int, seed: int, kept: Collection[str] = ()) -> list[str]:
    """Plans of all densities: in turn each group by itself, and runs of groups, as good plans have them.

    Args:
        groups: of the model.
        count: plans.
        seed: that they are drawn by.
        kept: ids of groups that stay in FP32.
    """
    rng = np.random.default_rng(seed)
    free = np.array([group.pinned is None and group.id not in kept for group in groups])
    found = []
    for number in range(count):
        density = rng.uniform(0.05, 0.95)
        chosen = rng.random(len(groups)) < density
        if number % 2:
            starts = rng.random(len(groups)) < rng.uniform(0.05, 0.4)
            starts[0] = True
            chosen = chosen[np.maximum.accumulate(np.where(starts, np.arange(len(groups)), 0))]
        found.append("".join("1" if bit else "0" for bit in chosen & free))
    return found


def failure_words(failure: Failure) -> str:
    """Kind, stage and message."""
    return f"{failure.kind.value} ({failure.stage.value}): {failure.message}"


def error_line(stderr: str, status: int) -> str:
    """The line of a program's standard error that says what went wrong, or its exit status."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("error:") or "Error: " in line or "Exception: " in line]
    return (named or lines or [f"exit status {status}"])[-1][:300]


def require(result: T | Failure) -> T:
    """The result; a failure ends the program with its message."""
    if isinstance(result, Failure):
        raise SystemExit(failure_words(result))
    return result


def plan_of(model: Model, groups: Sequence[LayerGroup], bits: str) -> PrecisionPlan:
    """The plan of a text with one 0 (FP32) or 1 (FP16) per group, in the order of the groups."""
    chosen = (Precision.FP16 if bit == "1" else Precision.FP32 for bit in bits)
    return PrecisionPlan(model.sha256, dict(zip((g.id for g in groups), chosen, strict=True)))


def bits_of(groups: Sequence[LayerGroup], plan: PrecisionPlan) -> str:
    """Inverse of ``plan_of``."""
    return "".join("1" if plan.precision[g.id] is Precision.FP16 else "0" for g in groups)


def bools_of(bits: Sequence[str]) -> np.ndarray:
    """Plans as rows of booleans, True is FP16."""
    return np.array([[bit == "1" for bit in row] for row in bits], dtype=bool)


def hypervolume(latency_ms: np.ndarray, error: np.ndarray, base_ms: float) -> float:
    """``hypervolume`` of ``mptune.tuning.dominance`` of plain numbers; not finite is an infinite error."""
    return dominated_area(gains(latency_ms, base_ms), exactness(error))


class Record:
    """The measurements of each plan, one JSON line per plan, so that an interrupted call resumes. Thread-safe.

    The first line holds the repetitions and the latency of the first timing of the baseline.
    """

    def __init__(self, path: Path, groups: int) -> None:
        self.plans: dict[str, dict[str, Any]] = {}
        self.emulated: dict[str, float] = {}
        self.marked: dict[str, list[str]] = {}
        self.repetitions: dict[str, Any] | None = None
        self.baseline_ms = math.nan
        self._path = path
        self._lock = threading.Lock()
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if "repetitions" in entry:
                self.repetitions, self.baseline_ms = entry["repetitions"], entry["baseline_ms"]
            elif "emulated" in entry:
                self.emulated[entry["emulated"]] = entry["error"]
            elif "mark" in entry:
                self.marked.setdefault(entry["mark"], []).append(entry["of"])
            elif len(entry["plan"]) == groups:
                self.plans[entry.pop("plan")] = entry

    def begin(self, repetitions: dict[str, Any], baseline_ms: float) -> None:
        """Fix the repetitions and the baseline for everything that follows."""
        self.repetitions, self.baseline_ms = repetitions, baseline_ms
        self._write({"repetitions": repetitions, "baseline_ms": baseline_ms})

    def add(self, bits: str, entry: dict[str, Any], *, keep: bool = True) -> dict[str, Any]:
        """Keep the measurement of a plan; with ``keep`` also in the file."""
        self.plans[bits] = entry
        if keep:
            self._write({"plan": bits, **entry})
        return entry

    def add_emulated(self, bits: str, error: float) -> None:
        """Keep an emulated error."""
        self.emulated[bits] = error
        self._write({"emulated": bits, "error": error})

    def mark(self, bits: str, mark: str) -> None:
        """Note for which purpose a plan was built."""
        self.marked.setdefault(mark, []).append(bits)
        self._write({"mark": mark, "of": bits})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan in a file of ``benchmarks.peers collect``.

    Attributes:
        kind: ``uniform``, ``one-group``, ``random`` or ``front``.
        precision: one 0 (FP32) or 1 (FP16) per group.
        latency_ms: median, NaN where it failed.
        latency_sd_ms: standard error of it.
        error: relative L2 of the device's engine, infinite where it failed or is not finite.
        emulated: relative L2 of the emulation on the same samples; None where it was not taken.
    """

    kind: str
    precision: str
    latency_ms: float
    latency_sd_ms: float
    error: float
    emulated: float | None


@dataclass(frozen=True)
class MeasuredPlans:
    """A file of ``benchmarks.peers collect``.

    Attributes:
        model: name of its script in ``benchmarks/models``.
        device: what measured.
        groups: id, name and kind of each.
        shapes: tensor -> concrete shape.
        baseline_ms: all-FP32.
        plans: all-FP32 first, then all-FP16.
    """

    model: str
    device: str
    groups: tuple[tuple[str, str, str], ...]
    shapes: Mapping[str, tuple[int, ...]]
    baseline_ms: float
    plans: tuple[MeasuredPlan, ...]

    def of_kind(self, kind: str) -> tuple[MeasuredPlan, ...]:
        """The plans of one kind."""
        return tuple(plan for plan in self.plans if plan.kind == kind)


def read_measured_plans(path: Path) -> MeasuredPlans:
    """Read what ``benchmarks.peers collect`` wrote."""
    document = json.loads(path.read_text())
    return MeasuredPlans(
        document["model"],
        document["device"],
        tuple(tuple(group) for group in document["groups"]),
        {tensor: tuple(shape) for tensor, shape in document["shapes"].items()},
        document["baseline_ms"],
        tuple(map(_measured_plan, document["plans"])),
    )


def _measured_plan(plan: Mapping[str, Any]) -> MeasuredPlan:
    names = ("latency_ms", "latency_sd_ms", "error", "emulated")
    figures: dict[str, Any] = {name: None if plan.get(name) is None else decode_float(plan[name]) for name in names}
    figures["error"] = figures["error"] if plan["finite"] else math.inf
    return MeasuredPlan(plan["kind"], plan["precision"], **figures)


def check_groups(measured: MeasuredPlans, groups: Sequence[LayerGroup]) -> None:
    """End the program if a file was measured with other groups than the model has now."""
    if measured.groups != tuple((g.id, g.name, g.kind) for g in groups):
        raise SystemExit(f"{measured.model}: the layer groups are not those that were measured; measure again")


def rounded(value: float) -> float | str:
    """Five digits, as JSON can hold it."""
    return encode_float(float(f"{value:.5g}"))


@cache
def _environment() -> dict[str, Any]:
    """Read once: reading takes time, and results are written while others are being measured."""
    return describe_environment().to_json()


def save(path: Path | None, document: dict[str, Any], *, lists: Sequence[str] = ()) -> None:
    """Write the figures with the environment they were taken in.

    Args:
        path: where; None writes nothing.
        document: the figures.
        lists: keys of long lists, of which every item stands on one line.
    """
    if path is None:
        return
    date = datetime.now(timezone.utc).date().isoformat()
    document = {**document, "environment": _environment(), "host": platform.machine(), "date": date}
    apart = {key: document.pop(key) for key in lists if key in document}
    text = json.dumps(document, indent=1 if not lists else None)
    for key, items in apart.items():
        rows = ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
        text = f"{text[:-1]},\n{json.dumps(key)}: [\n{rows}\n]}}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")
