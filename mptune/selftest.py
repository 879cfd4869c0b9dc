"""The self-test: a small vision transformer is built, run, timed and checked on every engine of this machine.

Plans go through the toolchain of a search, in FP32 and with half or all of the groups in FP16. Each check is one
line: a figure against a limit.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from mptune.data.archive import save_samples
from mptune.engines.backend import Availability, Backend, Place
from mptune.engines.base import Engine, EngineError, Failure, SampleSet, Stage
from mptune.engines.context import RunContext
from mptune.engines.environment import cpu_model
from mptune.engines.ort.cuda_session import probe
from mptune.engines.samples import cached_samples
from mptune.engines.toolchains import choose, toolchain
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.json_form import JsonForm
from mptune.processes.child import WorkerState
from mptune.resources import small_model
from mptune.settings import LatencySettings, SearchSettings, WorkerSettings
from mptune.targets import detect, target

Status = Literal["holds", "does not hold", "cannot be checked here"]
FP32 = "all-fp32"
_SPANS, _SPAN_MS = 3, 60.0
"""Spans that both clocks time, and how long one takes at least: long beside what a call costs."""
_SAMPLES, _ROWS = 4, 8
_SETTINGS = SearchSettings(
    metric="relative_l2",
    latency=LatencySettings(warmup_ms=50.0, duration_ms=100.0),
    worker=WorkerSettings(build_timeout_s=240.0, measure_timeout_s=120.0),
)


@dataclass(frozen=True)
class Check(JsonForm):
    """One line of the self-test."""

    engine: str
    name: str
    status: Status
    figure: float | None
    limit: str
    text: str


@dataclass(frozen=True)
class Figures(JsonForm):
    """One plan on one engine."""

    engine: str
    plan: str
    failure: str = ""  # why it has no figures
    build_s: float | None = None
    latency_ms: float | None = None
    error: float = math.nan
    emulated_error: float = math.nan
    change: float = math.nan  # how far two runs on one sample differ
    span_ratio: float = math.nan  # the engine's clock over the host's
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelfTest(JsonForm):
    """What the self-test found; ``engines`` has the figures that the checks were made of."""

    checks: tuple[Check, ...]
    engines: tuple[Figures, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no check failed, and some engine was checked."""
        statuses = {check.status for check in self.checks}
        return "holds" in statuses and "does not hold" not in statuses

    def to_json(self) -> dict[str, Any]:
        """All fields, and whether it holds."""
        return {"holds": self.holds, **super().to_json()}


@dataclass(frozen=True)
class Engines:
    """A backend on a device of this machine, named as ``mptune doctor`` lists it."""

    backend: Backend
    place: Place
    can: Availability


def engines_here() -> tuple[Engines, ...]:
    """The backends that are installed, on the CPU and on the GPU, those that cannot run here with the reason."""
    gpus = detect.detect_gpus()[:1]
    places = [Place(target.load_target("cpu")), *(Place(target.match_target(gpu), gpu) for gpu in gpus)]
    backends = sorted(choose.find_backends(), key=lambda backend: backend.name)
    every = (Engines(backend, place, backend.available(place)) for backend in backends for place in places)
    return tuple(engines for engines in every if engines.can.title)


def run_selftest(
    engines: Sequence[Engines] | None = None, progress: Callable[[str], None] = lambda text: None
) -> SelfTest:
    """Run the self-test, by default on every engine of this machine."""
    started = time.monotonic()
    checks: list[Check] = []
    tested: list[Figures] = []
    for each in engines_here() if engines is None else engines:
        name = each.can.title
        if each.can.ability != "measures":
            checks.append(Check(name, "builds", "cannot be checked here", None, "0 failures", each.can.obstacle))
            continue
        with tempfile.TemporaryDirectory(prefix="mptune-selftest-") as folder:
            own = run_engine(each, Path(folder), progress)
        checks += judge(name, own)
        tested += own
    return SelfTest(tuple(checks), tuple(tested), time.monotonic() - started)


def run_engine(each: Engines, folder: Path, progress: Callable[[str], None]) -> list[Figures]:
    """Evaluate the plans on one engine, as a search does, and look at what was built."""
    path, data = small_model("digits")
    with np.load(data) as arrays:
        rows = {name: np.split(values[: _SAMPLES * _ROWS], _SAMPLES) for name, values in arrays.items()}
    model, gpu, engine = load_model(path), each.place.gpu, each.can.title
    grouped = GroupedModel(model, find_groups(model))
    context = RunContext.in_folder(grouped, folder, _SETTINGS)
    for which in get_args(SampleSet):
        save_samples(context.samples(which), [{name: rows[name][k] for name in rows} for k in range(_SAMPLES)])
    free = [group.id for group in grouped.groups if group.pinned is None]
    provider: Literal["cuda", "cpu"] = "cuda" if gpu is not None and probe("cuda") is None else "cpu"
    device = cpu_model() if gpu is None else gpu.name

    def required(result: Any) -> Any:
        if isinstance(result, Failure):
            raise EngineError(result.kind, f"{result.stage.value}: {result.kind.value}: {result.message}")
        return result

    tested = []
    with toolchain.Toolchain(each.backend, each.place.target, context, provider, gpu=gpu, device=device) as tools:
        assert tools.builder is not None
        for name, reduced in ((FP32, []), ("half", free[::2]), ("all-fp16", free)):
            progress(f"{engine}: {name}")
            plan = grouped.uniform(Precision.FP32).replace(dict.fromkeys(reduced, Precision.FP16))
            try:
                required(tools.reference("search"))
                measured = required(tools.evaluate(plan))
                (emulated,) = required(tools.prediction.emulation.errors([plan]))
                look = LookJob(required(tools.builder.build(plan)).engine, context.samples("search"))
                change, span_ratio = required(tools.worker.call(look))
                tools.builder.release(plan)
            except EngineError as failure:
                tested.append(Figures(engine, name, str(failure)))
                continue
            figures = Figures(
                engine,
                name,
                build_s=measured.build_s,
                latency_ms=measured.latency.median_ms,
                error=math.inf if measured.error.non_finite else measured.error.value("relative_l2"),
                emulated_error=emulated.value("relative_l2"),
                change=change,
                span_ratio=span_ratio,
                warnings=measured.warnings,
            )
            tested.append(figures)
    return tested


@dataclass(frozen=True)
class LookJob:
    """Run an engine on a sample, on another one and on the first again, and hold its clock to the host's.

    The host's clock is read by itself here: a mistake in that of the latencies would not show otherwise.
    """

    engine: Engine
    samples: Path

    def run(self, state: WorkerState) -> tuple[float, float]:
        """How far the two runs on the first sample differ, and the engine's clock over the host's."""
        session = state.transient(self.engine.open)
        state.enter(Stage.RUN)
        first, second = cached_samples(state, self.samples)[:2]
        before, _ = session.run(first), session.run(second)
        state.enter(Stage.TIME)
        watch, executions, ratios = session.stopwatch(first), 4, list[float]()
        while len(ratios) < _SPANS:
            started_ns = time.monotonic_ns()
            span_ms = watch.span_ms(executions)
            host_ms = (time.monotonic_ns() - started_ns) / 1e6
            if host_ms < _SPAN_MS:
                executions *= 2
            else:
                ratios.append(span_ms / host_ms)
        state.enter(Stage.RUN)
        after = session.run(first)
        norm = np.linalg.norm
        change = max(float(norm(after[name] - values) / norm(values)) for name, values in before.items())
        return change, float(np.median(ratios))


def judge(engine: str, tested: Sequence[Figures]) -> list[Check]:
    """The checks of one engine: of each, the plan whose figure is farthest from its limits."""

    def check(name: str, holds: bool | None, figure: float | None, limit: str, text: str) -> Check:
        status: Status = "cannot be checked here" if holds is None else "holds" if holds else "does not hold"
        return Check(engine, name, status, figure, limit, text)

    failed = [each for each in tested if each.failure]
    ran = [each for each in tested if not each.failure]
    text = f"{len(ran)} of {len(tested)} plans built, run and timed"
    text += f"; {failed[0].plan}: {failed[0].failure}" if failed else ""
    checks = [check("builds", not failed, float(len(failed)), "0 failures", text)]
    fp32 = {each.plan: each.error for each in ran if each.plan == FP32}
    ratios = {each.plan: each.error / each.emulated_error for each in ran if each.plan != FP32}
    changes = {each.plan: each.change for each in ran}
    clocks = {each.plan: each.span_ratio for each in ran}
    for name, what, figures, low, high in (
        # Sums of some hundred products give about 5e-7, TF32 gives 3e-4.
        ("fp32", "with TF32 off the relative error of FP32 is", fp32, 0.0, 5e-5),
        # Real FP16 engines: 0.82 to 1.08 (an H200, one group at a time).
        ("fp16", "the error over the emulated one is", ratios, 1 / 3, 3.0),
        # Atomic additions come in any order.
        ("repeat", "two runs on one sample, with another between, differ by", changes, 0.0, 1e-4),
        ("clock", "the engine's clock over the host's is", clocks, 0.9, 1.05),
    ):
        limit = f"<= {high:g}" if low == 0.0 else f"{low:.2g} to {high:g}"
        if not figures:
            checks.append(check(name, None, None, limit, "no such plan could be run"))
            continue
        plan, worst = max(figures.items(), key=lambda item: max(item[1] - high, low - item[1]))
        checks.append(check(name, low <= worst <= high, worst, limit, f"{what} {worst:.2g} ({plan})"))
    return checks
