"""Evaluation: a plan with its latency and its error, and its two JSON forms (study and front.json)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from mptune.data.metrics.accuracy import ALL_OUTPUTS, OutputError, error_interval
from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.data.metrics.table import own_value
from mptune.engines.base import ErrorSource, Measurement
from mptune.engines.latency import Latency
from mptune.finding import OutputColumns
from mptune.graph.plan import PrecisionPlan
from mptune.json_form import JsonForm, TextForm, encode
from mptune.targets.detect import PowerMode
from mptune.targets.target import EngineMemory

EMULATION_FACTOR = 1.5
"""A measured and an emulated error disagree where their ratio is beyond this factor."""

_FP32_NOISE = 1e-6  # relative L2 by which FP32 differs from itself where it is summed in another order


@dataclass(frozen=True)
class Origin(TextForm):
    """Who proposed a plan: the search space, as a seed of a name such as ``all-fp32``, or the sampler.

    In JSON files and journals it is a text such as ``seed: all-fp32`` or ``sampler``.
    """

    kind: Literal["seed", "sampler"]
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Origin:
        """Inverse of ``str``."""
        kind, _, name = text.partition(": ")
        return cls("seed", name) if kind == "seed" else ORIGIN_SAMPLER

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}" if self.name else self.kind

    from_json, to_json = parse, __str__

    @property
    def label(self) -> str:
        """For tables: the seed's name, or ``sampler``."""
        return self.name or self.kind


ORIGIN_FP32, ORIGIN_FP16, ORIGIN_TF32 = (Origin("seed", name) for name in ("all-fp32", "all-fp16", "tf32"))
ORIGIN_LARGE_ERRORS = Origin("seed", "largest errors in FP32")
ORIGIN_SAMPLER = Origin("sampler")


@dataclass(frozen=True, repr=False)
class Evaluation(JsonForm):
    """A plan that was built, run and timed (or predicted and emulated).

    Attributes:
        number: Optuna's number of the trial, for ordering and for the logs.
        latency: in milliseconds; drift-corrected where measured.
        error: every named statistic on the search samples, per output and per sample.
        metric: the objective statistic.
        speedup: median of all-FP32 / median of this one; above 1 is faster.
        emulated: the objective statistic by emulation of some of the samples, beside a measured one.
        disagrees: the measured error is not the emulated one, by more than ``EMULATION_FACTOR``.
        held_out: the same statistics on the held-out samples, the worst of several rounds; None until re-measured.
        remeasured: the search measured it again in fresh processes.
        confirmed: a device measured it by ``mptune confirm``.
        power_mode: of the Jetson that it was timed on, and what that mode left; None elsewhere.
        ignored: outputs whose errors do not count.
    """

    plan: PrecisionPlan
    number: int
    origin: Origin
    latency: Latency
    error: OutputError
    metric: str
    error_source: ErrorSource
    speedup: float
    emulated: float | None = None
    disagrees: bool = False
    held_out: OutputError | None = None
    drift: float = 1.0
    build_s: float = 0.0
    engine_path: str | None = None
    remeasured: bool = False
    confirmed: bool = False
    warnings: tuple[str, ...] = ()
    memory: EngineMemory | None = None
    power_mode: PowerMode | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_measurement(
        cls,
        plan: PrecisionPlan,
        measurement: Measurement,
        *,
        number: int,
        origin: Origin,
        metric: str,
        baseline_ms: float | None,
        ignored: tuple[str, ...] = (),
    ) -> Evaluation:
        """Turn what a toolchain returned into an evaluation; ``baseline_ms`` is None for all-FP32 itself."""
        same = ("latency", "error", "error_source", "drift", "build_s", "warnings", "memory", "power_mode")
        figures: dict[str, Any] = {name: getattr(measurement, name) for name in same}
        path = None if measurement.engine_path is None else str(measurement.engine_path)
        evaluation = cls(plan, number, origin, metric=metric, speedup=1.0, engine_path=path, ignored=ignored, **figures)
        return evaluation if baseline_ms is None else evaluation.with_baseline(baseline_ms)

    def with_emulated(self, emulated: float, samples: int, fp32_error: float) -> Evaluation:
        """The same with the plan's error by emulation of the first ``samples``, and whether the two disagree."""
        if self.has_own_value:  # of such metrics the relative L2 is emulated
            return self
        compared = replace(self, emulated=emulated)
        if self.metric not in ADD_IN_SQUARES or not self.is_finite:  # other statistics do not add in squares
            return compared
        measured = self.counted.of_first(samples).value(self.metric)
        expected = math.hypot(emulated, fp32_error)
        is_near = expected / EMULATION_FACTOR <= measured <= expected * EMULATION_FACTOR
        # Neither counts below FP32's own noise, as where FP16 holds every value of a mask.
        return replace(compared, disagrees=not is_near and max(measured, expected) > _FP32_NOISE)

    def __str__(self) -> str:
        held_out = "" if self.held_out is None else f" held out, {self.error_value:.2g} on the search samples"
        error = f"error {self.judged_error:.2g}{held_out} ({self.metric})"
        counts = [f"{count} {precision.name}" for precision, count in self.plan.reduced_counts.items()]
        groups = ", ".join([*counts, f"{len(self.plan.fp32_groups)} FP32"])
        latency = f"{self.latency.median_ms:.4g} ms {self.latency.source}"
        return f"{self.plan.fingerprint}: {latency}, {error}, groups: {groups}, {self.origin}"

    def __repr__(self) -> str:
        return f"Evaluation({self})"

    def engine_in(self, engines: Path) -> Path | None:
        """The plan's engine, in the run's own folder only: the record may come from a stranger, and name any file."""
        if self.engine_path is None:
            return None
        # By its name alone: the directory may have been moved, also from a machine with other separators.
        engine = engines / PureWindowsPath(self.engine_path).name
        return engine if engine.is_file() and not engine.is_symlink() else None

    @cached_property
    def counted(self) -> OutputError:
        """The error of the outputs that count, on the search samples."""
        return self.error.without(self.ignored)

    @cached_property
    def counted_held_out(self) -> OutputError | None:
        """The same on the held-out samples; None until re-measured."""
        return None if self.held_out is None else self.held_out.without(self.ignored)

    @cached_property
    def error_value(self) -> float:
        """The objective statistic on the search samples: the smaller, the more exact."""
        return self.counted.value(self.metric)

    @cached_property
    def held_out_value(self) -> float | None:
        """The objective statistic on the held-out samples; None until re-measured."""
        return None if self.counted_held_out is None else self.counted_held_out.value(self.metric)

    @property
    def judged_error(self) -> float:
        """The error that is shown, and that the front goes by: held-out where there is one, else of the search."""
        return self.error_value if self.held_out_value is None else self.held_out_value

    @property
    def is_larger_in_search(self) -> bool:
        """Whether the error of the search samples is more than twice the held-out one: these lack what makes it."""
        held_out = self.held_out_value
        return held_out is not None and self.error_value > held_out + abs(held_out)

    def values_of(self, metric: str) -> tuple[float | None, float | None]:
        """A metric's own value on the search samples and on the held-out ones; None where it was not taken."""

        def value(error: OutputError | None) -> float | None:
            name = metric
            if error is not None and own_value(metric) in error.per_output.get(ALL_OUTPUTS, {}):
                name = own_value(metric)
            return error.value(name) if error is not None and error.has(name) else None

        return value(self.error), value(self.held_out)

    @property
    def part(self) -> OutputColumns | None:
        """The output, or the part of it, whose error is the plan's; None where the metric sees all outputs at once."""
        return (self.counted_held_out or self.counted).deciding_part(self.metric)

    @cached_property
    def is_finite(self) -> bool:
        """Whether the plan is feasible: no NaN or Inf where the reference has none, on any sample."""
        errors = filter(None, (self.counted, self.counted_held_out))
        is_sound = all(error.non_finite == 0 and math.isfinite(error.value(self.metric)) for error in errors)
        return is_sound and math.isfinite(self.latency.median_ms)

    @property
    def has_own_value(self) -> bool:
        """Whether the objective is a metric over the whole set, or one to maximise: it has a value beside its error."""
        return own_value(self.metric) in self.error.per_output.get(ALL_OUTPUTS, {})

    def ignoring(self, outputs: tuple[str, ...]) -> Evaluation:
        """The same evaluation with outputs that do not count; all others do."""
        return self if outputs == self.ignored else replace(self, ignored=outputs)

    def with_baseline(self, baseline_ms: float) -> Evaluation:
        """The same evaluation with its speedup against another all-FP32 median, in milliseconds."""
        ms = self.latency.median_ms  # 0 of a graph that does nothing, as it is predicted
        return replace(self, speedup=baseline_ms / ms if ms > 0 else 1.0 if baseline_ms <= 0 else math.inf)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON types: the form that the study keeps. What is ignored is a matter of the search."""
        return {**super().to_json(), "ignored": []}

    def to_point(self) -> dict[str, Any]:
        """The POINT of front.json: every key always there, non-finite numbers as strings."""
        figures = ("median_ms", "p90_ms", "p99_ms", "ci95_ms", "cv", "source")
        point: dict[str, Any] = {
            "plan": self.plan.fingerprint,
            "origin": self.origin,
            "latency": {name: getattr(self.latency, name) for name in figures},
            "error": {
                "value": self.error_value,
                "metric": self.metric,
                "source": self.error_source,
                "emulated": self.emulated,
                "held_out": self.held_out_value,
                "ci95": error_interval(self.counted, self.metric),
                "part": self.part and self.part.to_json("output"),
                "per_output": self.error.summary(),
            },
            "engine": self.engine_path,
            "memory_source": self.memory and self.memory.source,
            **{name: getattr(self, name) for name in ("error_value", "held_out_value", "judged_error")},
            **{name: getattr(self, name) for name in ("speedup", "remeasured", "confirmed")},
            **{name: len(getattr(self.plan, name)) for name in ("fp16_groups", "bf16_groups", "fp32_groups")},
            **{n: getattr(self.memory, n, None) for n in ("engine_bytes", "context_bytes", "weight_bytes")},
        }
        encoded: dict[str, Any] = encode(point)
        return encoded
