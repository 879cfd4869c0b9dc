"""A toolchain that runs nothing: plans obey an additive law, and it fails, lies or drifts where it is told to.

It has what a search uses of ``mptune.engines.toolchains.toolchain.Toolchain``, so that everything above the engines is
tested for real.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import mptune
from mptune.data.archive import save_samples
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import (
    EmulatedSamples,
    ErrorSource,
    Failure,
    FailureKind,
    Measurement,
    MissingKernel,
    Profiling,
    Progress,
    ReferenceReport,
    SampleSet,
    Stage,
)
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment
from mptune.engines.latency import Latency, LatencySource, summarise
from mptune.engines.spread import SessionTiming
from mptune.graph.facts import FusedNodes
from mptune.graph.groups import APART, GroupedModel, LayerGroup, find_groups
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import LatencySettings
from mptune.targets.roofline import BoundaryCost, LatencyTerms
from mptune.tuning.evaluation import Origin
from mptune.tuning.front import Front

SHA = "0" * 64
FAST = LatencySettings()
SOUND_REFERENCE = ReferenceReport(
    "FakeProvider", {"y": {"non_finite": 0.0, "zero_fraction": 0.0, "absmax": 1.0}}, repeat_error=0.0
)


def make_groups(count: int, kind: str = "matmul") -> tuple[LayerGroup, ...]:
    """Groups g000, g001, ... of one node each."""
    return tuple(
        LayerGroup(f"g{i:03d}", f"layer{i}/{kind}", kind, (f"layer{i}/MatMul",), {"MatMul": 1}) for i in range(count)
    )


AT_ONCE = EmulatedSamples((range(2),), None)
"""Emulated errors as on a GPU: of all samples at once."""


@dataclass
class Law:
    """What plans cost and err, by group id. Deterministic for the groups.

    Latency is ``base - gains of FP16 groups + boundary cost for each neighbour of another precision``; the error is the
    root of the summed squares of the FP16 groups' errors.
    """

    groups: Sequence[str]
    base_ms: float = 10.0
    boundary_ms: float = 0.02
    fp32_error: float = 2e-7
    gains: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(len(self.groups))
        count = max(1, len(self.groups))
        gains = generator.uniform(0.2, 1.0, len(self.groups)) * self.base_ms / count
        errors = 10 ** generator.uniform(-5, -2, len(self.groups))
        self.gains = {**dict(zip(self.groups, map(float, gains), strict=True)), **self.gains}
        self.errors = {**dict(zip(self.groups, map(float, errors), strict=True)), **self.errors}

    def latency_ms(self, plan: PrecisionPlan) -> float:
        precisions = [plan.precision[g] for g in self.groups]
        crossings = sum(a is not b for a, b in pairwise(precisions))
        return self.base_ms - sum(self.gains[g] for g in plan.fp16_groups) + self.boundary_ms * crossings

    def error(self, plan: PrecisionPlan) -> float:
        return math.sqrt(self.fp32_error**2 + sum(self.errors[g] ** 2 for g in plan.fp16_groups))


@dataclass
class FakeToolchain:
    """See the module."""

    law: Law
    # -- what goes wrong --
    fails: Collection[str] = ()  # a plan with any of these groups in FP16 does not build
    crashes: Collection[str] = ()  # the same, as a crash while running
    emulation_fails: Collection[str] = ()  # emulating any of these groups crashes
    non_finite: Collection[str] = ()  # a plan with any of these groups in FP16 gives NaN
    non_finite_held_out: Collection[str] = ()  # the same, on the held-out samples alone
    non_finite_calls: Collection[int] = ()  # numbers of the evaluations that give NaN whatever the plan
    faults: int = 0  # how many faults of the machine come before evaluations work; below 0 they never end
    fault_kind: FailureKind = FailureKind.DEVICE_LOST
    fails_fresh: Collection[str] = ()  # fingerprints that fail once the worker has been restarted
    killed: Collection[int] | Callable[[int], bool] = ()  # numbers of the jobs whose worker is killed from outside
    interrupt_after: int | None = None  # KeyboardInterrupt when this many evaluations are done
    # -- what is measured, beside the law --
    noise: float = 1e-4  # relative spread of the measured values
    session_spread: float = 0.0  # relative spread between sessions of one plan
    drifts: Sequence[float] = ()  # baseline medians one after another, as factors of the true one; the last stays
    held_out_factor: float = 1.1  # held-out errors are this much larger
    errs_at_first: Collection[str] = ()  # these err three times as much until the worker has been restarted
    error_factor: float = 1.0  # errors of all plans with FP16 are this much larger than the law's
    tf32: tuple[float, float] | None = None  # latency in milliseconds and error of all-FP32 with TF32
    # -- how long it takes --
    delay_s: float = 0.0  # each evaluation
    before: Callable[[PrecisionPlan], object] = lambda plan: None  # each evaluation; a Failure of it is the result
    diary: Path | None = None  # each evaluation is appended as a JSON line when it begins
    gate: Path | None = None  # from the third evaluation on each waits until this file is there
    # -- what a toolchain says --
    name: str = "fake"
    device: str = "Fake 1000"
    latency_source: LatencySource = "measured"
    error_source: ErrorSource = "measured"
    statistics: Sequence[str] = ("relative_l2", "max_abs", "non_finite", "worst_part")
    report: ReferenceReport | Failure = SOUND_REFERENCE
    ranges: Mapping[str, TensorRange] | Failure = field(default_factory=dict)
    emulation_holds: bool = True
    emulated_samples: EmulatedSamples = AT_ONCE
    profiling: Profiling = "none"  # a profile gives each group twice its gain in FP32, and its gain in FP16
    most_ahead: int = 1
    is_opening: bool = False
    kernel_answers: Sequence[tuple[MissingKernel, ...] | Failure] = ((),)  # one after another; the last stays
    fused: tuple[FusedNodes, ...] = ()
    context: RunContext | None = None  # where reference outputs are written; None writes none
    # -- what was asked of it --
    opened: int = 0
    closed: int = 0
    restarts: int = 0
    observed: int = 0
    jobs: int = 0
    asked_for_kernels: int = 0
    tf32_calls: int = 0
    calls: list[tuple[str, SampleSet, int]] = field(default_factory=list)  # evaluations: plan, samples, restarts
    ahead: list[str] = field(default_factory=list)
    together: list[list[str]] = field(default_factory=list)  # plans that are opened at once
    opened_at: int = -1  # the number of evaluations then
    emulated: list[str] = field(default_factory=list)
    profiled: list[str] = field(default_factory=list)

    @property
    def built(self) -> list[str]:
        """Fingerprints evaluated on the search samples, in order."""
        return [fingerprint for fingerprint, which, _ in self.calls if which == "search"]

    def environment(self) -> Environment:
        return Environment(versions={"fake": "1.0"}, os="none", cpu="none", cpu_count=1)

    def _kill(self) -> Failure | None:
        """What a job gives whose worker is killed from outside; counts the job."""
        number, self.jobs = self.jobs, self.jobs + 1
        is_killed = self.killed(number) if callable(self.killed) else number in self.killed
        return Failure(Stage.RUN, FailureKind.CRASH, "killed by SIGKILL", Path("worker.log")) if is_killed else None

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        if self.context is not None:
            save_samples(self.context.reference(which), [{"y": np.zeros(1, np.float32)}])
        return self._kill() or self.report

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        self.observed += 1
        return self._kill() or self.ranges

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        if precision is Precision.BF16:
            return ()
        self.asked_for_kernels += 1
        return self.kernel_answers[min(self.asked_for_kernels, len(self.kernel_answers)) - 1]

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        return self.fused

    def emulate(
        self, plans: Sequence[PrecisionPlan], part: range | None = None, grouped: GroupedModel | None = None
    ) -> tuple[OutputError, ...] | Failure:
        """The law knows of the model's own groups only."""
        if grouped is not None and {group.id for group in grouped.groups} != set(self.law.groups):
            return Failure(Stage.RUN, FailureKind.ERROR, "other groups")
        self.emulated += [plan.fingerprint for plan in plans]
        if (kill := self._kill()) is not None:
            return kill
        if self.emulation_fails and any(set(self.emulation_fails) & set(plan.fp16_groups) for plan in plans):
            return Failure(Stage.RUN, FailureKind.CRASH, "segmentation fault", Path("worker.log"))
        return tuple(self._emulated_error(plan) for plan in plans)

    @property
    def prediction(self) -> Any:
        """Its emulation on other samples is the same."""
        return SimpleNamespace(emulation=SimpleNamespace(errors=lambda plans, which: self.emulate(plans)))

    def _emulated_error(self, plan: PrecisionPlan) -> OutputError:
        return self._output_error(plan, 1.0)

    def latency_terms(self) -> LatencyTerms | Failure:
        if (kill := self._kill()) is not None:
            return kill
        pairs = pairwise(self.law.groups)
        boundaries = tuple(BoundaryCost(f"t{b}", a, (b,), self.law.boundary_ms) for a, b in pairs)
        return LatencyTerms(self.law.base_ms, dict(self.law.gains), boundaries)

    def listen(self, callback: Callable[[Progress], None]) -> None:
        """Nothing is built that takes its time; every run listens once it has opened a toolchain."""
        self.opened += 1

    def start_ahead(self) -> None:
        self.ahead.append("next")

    def open_ahead(self, plans: Sequence[PrecisionPlan], which: SampleSet = "search") -> int:
        names = [name for name, _, restarts in self.calls if restarts == self.restarts]
        placed = []
        for plan in plans[: self.most_ahead]:  # each process takes a plan once
            names.append(plan.fingerprint)
            if names.count(plan.fingerprint) > self.most_ahead:
                break
            placed.append(plan.fingerprint)
        if not self.together or self.opened_at != len(self.calls):  # what opened before has been evaluated
            self.together.append([])
        self.opened_at = len(self.calls)
        self.together[-1] += placed
        return len(placed)

    def open_first(self) -> None:
        return

    def open_tf32(self) -> None:
        self.ahead.append("tf32")

    def open_baselines(self) -> None:
        return

    def evaluate_first(self) -> None:
        return None

    def restart(self) -> None:
        self.restarts += 1

    def turn_elsewhere(self, plan: PrecisionPlan) -> None:
        self.restart()

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        if self.interrupt_after is not None and len(self.calls) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.calls.append((plan.fingerprint, which, self.restarts))
        if self.diary is not None:
            with self.diary.open("a") as file:
                file.write(json.dumps([plan.fingerprint, which]) + "\n")
        if self.delay_s:
            time.sleep(self.delay_s)
        while len(self.calls) > 2 and self.gate is not None and not self.gate.exists():
            time.sleep(0.02)
        if (kill := self._kill()) is not None:
            return kill
        if isinstance(failure := self.before(plan), Failure):
            return failure
        if self.faults:
            self.faults -= 1
            return Failure(Stage.RUN, self.fault_kind, "the machine is on fire")
        half = set(plan.fp16_groups)
        if half & set(self.fails):
            return Failure(Stage.BUILD, FailureKind.ERROR, "no kernel for this")
        if half & set(self.crashes) or (self.restarts and plan.fingerprint in self.fails_fresh):
            return Failure(Stage.RUN, FailureKind.CRASH, "segmentation fault", Path("worker.log"))
        measurement = self._measurement(plan, which)
        if not profile or self.profiling == "none":
            return measurement
        self.profiled.append(plan.fingerprint)
        times = {g: self.law.gains[g] * (1.0 if g in half else 2.0) for g in self.law.groups}
        return replace(measurement, group_times_ms=times)

    def evaluate_tf32(self) -> Measurement | Failure | None:
        if self.tf32 is None:
            return None
        self.tf32_calls += 1
        ms, error = self.tf32
        latency, baseline = self._in_turn(ms, 1.0, 10_000)
        statistics = {name: (0.0 if name == "non_finite" else error,) * 2 for name in self.statistics}
        return Measurement(latency, baseline, 1.0, OutputError({"y": statistics}), "measured", build_s=0.0)

    def _output_error(self, plan: PrecisionPlan, factor: float) -> OutputError:
        non_finite = bool(set(plan.fp16_groups) & set(self.non_finite))
        error = self.law.error(plan) * factor
        if plan.fp16_groups:
            error *= self.error_factor
        if plan.fingerprint in self.errs_at_first and not self.restarts:
            error *= 3
        values = {
            "relative_l2": (math.nan if non_finite else error,) * 2,
            "max_abs": (math.nan if non_finite else 1 / (1 + error),) * 2,
            "non_finite": (3.0 if non_finite else 0.0,) * 2,
        }
        values["worst_part"] = values["relative_l2"]
        return OutputError({"y": {name: values[name] for name in self.statistics}})

    def _measurement(self, plan: PrecisionPlan, which: SampleSet) -> Measurement:
        true_ms, baseline, drift = self.law.latency_ms(plan), None, 1.0
        if self.latency_source == "predicted":
            latency = Latency.predicted(true_ms)
        else:
            seen = self.drifts[min(len(self.calls), len(self.drifts)) - 1] if self.drifts else 1.0
            drift = 1.0 / seen
            latency, baseline = self._in_turn(true_ms, seen, len(self.calls))
            latency = latency.scaled(drift)
        is_held_out, half = which == "held_out", set(plan.fp16_groups)
        error = self._output_error(plan, self.held_out_factor if is_held_out else 1.0)
        if len(self.calls) - 1 in self.non_finite_calls or (is_held_out and half & set(self.non_finite_held_out)):
            nan, count = dict.fromkeys(self.statistics, (math.nan,) * 2), {"non_finite": (3.0,) * 2}
            error = OutputError(dict.fromkeys(error.per_output, nan | count))
        return Measurement(
            latency=latency,
            baseline=baseline,
            drift=drift,
            error=error,
            error_source=self.error_source,
            build_s=0.1,
        )

    def _in_turn(self, true_ms: float, seen: float, seed: int) -> tuple[Latency, Latency]:
        """Latencies of a session opened anew and of this process's session of the baseline."""
        name = f"{self.device} {self.restarts}"
        own, common = (
            math.exp(self.session_spread * np.random.default_rng([seed_of, 7]).normal())
            for seed_of in (seed, 10**6 + self.restarts)
        )
        latency, baseline = self._timed(true_ms * seen * own, seed), self._timed(self.law.base_ms * seen * common, 0)
        timing = SessionTiming.of_values(name, latency.raw_ms, baseline.raw_ms)
        return replace(latency, session=timing), baseline

    def _timed(self, ms: float, seed: int) -> Latency:
        spread = np.random.default_rng(seed).normal(1.0, self.noise, 11) if self.noise else np.ones(11)
        return summarise([float(ms * s) for s in spread], FAST, executions_per_value=1000)

    def close(self) -> None:
        self.closed += 1

    def open(self, context: RunContext) -> FakeToolchain:
        """For ``mptune.api.search(open_toolchain=...)``: the law must be of the model's groups."""
        assert [g.id for g in context.grouped.groups if not g.id.endswith(APART)] == list(self.law.groups), (
            "and nodes set apart"
        )
        self.context = context
        return self


@dataclass
class Diary:
    """A listener that keeps what it hears."""

    stages: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    failures: list[tuple[str, Failure | str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    builds: list[Progress] = field(default_factory=list)

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def evaluated(self, evaluation: object, done: int, budget: int) -> None:
        self.done.append(evaluation.plan.fingerprint)  # type: ignore[attr-defined]
        self.counts.append((done, budget))

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        self.failures.append((plan.fingerprint, failure))
        self.counts.append((done, budget))

    def building(self, progress: Progress) -> None:
        self.builds.append(progress)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def make_plan(bits: str, sha: str = SHA) -> PrecisionPlan:
    """``make_plan("010")``: g000 and g002 in FP32, g001 in FP16."""
    return PrecisionPlan(
        sha, {f"g{i:03d}": Precision.FP16 if bit == "1" else Precision.FP32 for i, bit in enumerate(bits)}
    )


def make_toolchain(model: str | Path = "model.onnx", **options: object) -> FakeToolchain:
    """A fake toolchain for the layer groups of a model."""
    return FakeToolchain(Law([group.id for group in find_groups(load_model(model))]), **options)  # type: ignore[arg-type]


def search(toolchain: FakeToolchain, model: str = "model.onnx", **settings: object) -> Front:
    """Search data.npz in the working directory, with 12 plans unless another budget is given."""
    wanted = {"data": "data.npz", "budget": 12, "target": "cpu", "latency": FAST, **settings}
    return mptune.search(model, open_toolchain=toolchain.open, **wanted)
