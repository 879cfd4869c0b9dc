"""Build, run and time the tiny models on every engine of this machine, and judge what was seen."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mptune.data.archive import read_outputs
from mptune.engines.backends.backend import Availability, Backend, Bench, Builder, Place, Rounds
from mptune.engines.backends.registry import find_backends
from mptune.engines.base import Engine, Failure
from mptune.engines.ort.session import Provider
from mptune.graph.folded import FoldedValues
from mptune.graph.loading.shapes import static_shapes
from mptune.json_form import JsonForm
from mptune.processes.parent import Worker
from mptune.selftest.cases import FP16, FP32, Case, make_cases
from mptune.selftest.checks import Check, Seen, judge, relative, unchecked
from mptune.selftest.job import EngineRun, RunEngineJob
from mptune.settings import SearchSettings, WorkerSettings
from mptune.targets.detect import detect_gpus
from mptune.targets.target import load_target, match_target

_RUN_TIMEOUT_S = 120.0
_SETTINGS = SearchSettings(worker=WorkerSettings(build_timeout_s=240.0))


@dataclass(frozen=True)
class Engines:
    """A backend on a device of this machine; ``place`` is the device."""

    backend: Backend
    place: Place
    can: Availability

    @property
    def name(self) -> str:
        """As ``mptune doctor`` lists it."""
        return self.can.title


@dataclass(frozen=True)
class SelfTest(JsonForm):
    """What the self-test found.

    Attributes:
        engines: facts of every engine that was built, as JSON types: model, plan, seconds, bytes, latency, warnings.
    """

    checks: tuple[Check, ...]
    engines: tuple[dict[str, Any], ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no check failed, and some engine was checked."""
        statuses = {check.status for check in self.checks}
        return "holds" in statuses and "does not hold" not in statuses

    def to_json(self) -> dict[str, Any]:
        """All fields, and whether it holds."""
        return {"holds": self.holds, **super().to_json()}


def engines_here() -> tuple[Engines, ...]:
    """The backends that are installed, on the CPU and on the GPU, those that cannot run here with the reason."""
    places = [Place(load_target("cpu"))]
    places += [Place(match_target(gpu), gpu) for gpu in detect_gpus()[:1]]
    backends = sorted(find_backends(), key=lambda backend: backend.name)
    every = (Engines(backend, place, backend.available(place)) for backend in backends for place in places)
    return tuple(engines for engines in every if engines.name)


def run_selftest(
    engines: Sequence[Engines] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> SelfTest:
    """Run the self-test."""
    started = time.monotonic()
    checks: list[Check] = []
    facts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mptune-selftest-") as folder:
        progress("models, reference outputs and emulation")
        cases = make_cases(Path(folder))
        for each in engines_here() if engines is None else engines:
            if each.can.ability != "measures":
                checks.append(unchecked(each.name, "builds", "0 failures", each.can.obstacle))
                continue
            test = EngineTest(each, cases, Path(folder), progress)
            checks += test.run()
            facts += test.facts()
    return SelfTest(tuple(checks), tuple(facts), time.monotonic() - started)


class EngineTest:
    """The self-test of a backend on one device."""

    def __init__(self, engines: Engines, cases: Sequence[Case], folder: Path, progress: Callable[[str], None]) -> None:
        self.engines = engines
        self._cases = cases
        self._folder = folder
        self._progress = progress
        self._seen: list[Seen] = []

    def run(self) -> tuple[Check, ...]:
        """Build and run every model in every plan; the checks."""
        with Worker(self._folder / "logs", environment=self.engines.can.environment) as worker:
            for case in self._cases:
                builder = self._builder(worker, case)
                for plan in case.plans:
                    self._progress(f"{self.engines.name}: {case.name}, {plan}")
                    self._seen.append(self._see(worker, builder, case, plan))
                builder.close()
        return judge(self.engines.name, self._seen)

    def facts(self) -> list[dict[str, Any]]:
        """Facts of every engine that was built, as JSON types."""
        return [self._fact(seen) for seen in self._seen]

    def _fact(self, seen: Seen) -> dict[str, Any]:
        clock = seen.run.clock if isinstance(seen.run, EngineRun) else None
        return {
            "engine": self.engines.name,
            "model": seen.case.name,
            "plan": seen.plan,
            "build_s": seen.build_s,
            "bytes": seen.nbytes,
            "error": relative(seen.outputs[0], seen.reference[0]) if seen.outputs else None,
            "emulated_error": relative(seen.emulated[seen.plan], seen.reference[0]),
            "latency_ms": None if clock is None else clock.latency_ms,
            "failure": seen.run.to_json() if isinstance(seen.run, Failure) else None,
            "warnings": list(seen.run.warnings) if isinstance(seen.run, EngineRun) else [],
        }

    def _builder(self, worker: Worker, case: Case) -> Builder:
        gpu, target = self.engines.place.gpu, self.engines.place.target
        call = partial(worker.call, timeout_s=_SETTINGS.worker.build_timeout_s)
        shapes = static_shapes(case.workload.model).shapes
        provider: Provider = "cpu" if gpu is None else "cuda"
        bench = Bench(target, gpu, case.workload, _SETTINGS, provider, worker, call, lambda: dict(shapes), FoldedValues)
        return self.engines.backend.builder(bench)

    def _see(self, worker: Worker, builder: Builder, case: Case, plan: str) -> Seen:
        fuses = not isinstance(builder, Rounds) or builder.fuses
        built = builder.build(case.plans[plan])
        if isinstance(built, Failure):
            return Seen(case, plan, fuses, built)
        outputs = self._folder / "outputs.npz"
        engine, samples = self.engine(case, built.engine, plan), case.workload.workspace.samples("search")
        run = worker.call(RunEngineJob(engine, samples, outputs, plan in (FP32, FP16)), _RUN_TIMEOUT_S)
        build_s, nbytes = built.build_s or 0.0, built.engine.path.stat().st_size if built.is_kept else None
        builder.release(case.plans[plan])
        if isinstance(run, Failure):
            return Seen(case, plan, fuses, run, build_s=build_s)
        arrays = tuple(next(iter(sample.values())) for sample in read_outputs(outputs))
        return Seen(case, plan, fuses, run, arrays, build_s + run.open_s, nbytes)

    def engine(self, case: Case, engine: Engine, plan: str) -> Engine:
        """The engine that is run, of the one that was built for a plan."""
        return engine
