"""Build, run and time the tiny models on every engine of this machine, and judge what was seen."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mptune.data.archive import read_outputs
from mptune.engines.base import Failure
from mptune.engines.jobs.measure import MeasureJob
from mptune.engines.ort.cuda_session import NO_TF32
from mptune.engines.ort.session import Provider
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import BuildJob, MeasureEngineJob
from mptune.engines.tensorrt.library import Kind, is_installed
from mptune.engines.toolchains.choose import why_not_on
from mptune.engines.toolchains.reference import probe
from mptune.engines.worker.parent import Worker
from mptune.selftest.cases import FP16, FP32, Case, make_cases
from mptune.selftest.checks import Check, Seen, judge, relative, unchecked
from mptune.selftest.job import EngineRun, RunEngineJob
from mptune.settings import TensorRtSettings
from mptune.targets.memory import default_workspace_mb
from mptune.targets.target import Gpu, detect_gpus

_BUILD_TIMEOUT_S = 240.0
_RUN_TIMEOUT_S = 120.0
_FIRST_TF32 = (8, 0)
"""Compute capability from which on GPUs have TF32."""


@dataclass(frozen=True)
class Engine:
    """An engine that the self-test runs.

    Attributes:
        name: as ``mptune doctor`` lists it.
        kind: TensorRT or TensorRT-RTX; None for ONNX Runtime.
        gpu: the device; None for the CPU.
        obstacle: why it cannot run here although it is installed; empty where it can.
    """

    name: str
    provider: Provider
    kind: Kind | None = None
    gpu: Gpu | None = None
    obstacle: str = ""


@dataclass(frozen=True)
class SelfTest:
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
        found = {check.status for check in self.checks}
        return "holds" in found and "does not hold" not in found

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        checks = [check.to_json() for check in self.checks]
        return {"holds": self.holds, "seconds": self.seconds, "checks": checks, "engines": list(self.engines)}


def engines_here() -> tuple[Engine, ...]:
    """The engines that are installed, those that cannot run here with the reason."""
    found = [Engine("onnxruntime-cpu", "cpu", obstacle=probe("cpu") or "")]
    gpus = detect_gpus()
    if not gpus:
        return tuple(found)
    gpu = gpus[0]
    if not gpu.is_jetson or probe("cuda") is None:  # a Jetson has no wheel of onnxruntime-gpu
        found.append(Engine("onnxruntime-cuda", "cuda", gpu=gpu, obstacle=probe("cuda") or ""))
    kinds: tuple[Kind, ...] = ("tensorrt", "tensorrt-rtx")
    for kind in kinds:
        if is_installed(kind):
            found.append(Engine(kind, "cuda", kind, gpu, why_not_on(kind, gpu) or ""))
    return tuple(found)


def run_selftest(
    engines: Sequence[Engine] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    tester: type[EngineTest] | None = None,
) -> SelfTest:
    """Run the self-test."""
    started = time.monotonic()
    checks: list[Check] = []
    facts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mptune-selftest-") as folder:
        progress("models, reference outputs and emulation")
        cases = make_cases(Path(folder))
        for engine in engines_here() if engines is None else engines:
            if engine.obstacle:
                checks.append(unchecked(engine.name, "builds", "0 failures", engine.obstacle))
                continue
            test = (tester or EngineTest)(engine, cases, Path(folder), progress)
            checks += test.run()
            facts += test.facts()
    return SelfTest(tuple(checks), tuple(facts), time.monotonic() - started)


class EngineTest:
    """The self-test of one engine."""

    def __init__(self, engine: Engine, cases: Sequence[Case], folder: Path, progress: Callable[[str], None]) -> None:
        self.engine = engine
        self._cases = cases
        self._folder = folder
        self._progress = progress
        self._seen: list[Seen] = []

    def run(self) -> tuple[Check, ...]:
        """Build and run every model in every plan; the checks."""
        # TensorRT's TF32 must be off by the engine's own flag; what ONNX Runtime calls obeys a variable, too.
        variables = {} if self.engine.kind else NO_TF32
        with Worker(self._folder / "logs", environment=variables) as worker:
            for case in self._cases:
                for plan in case.plans:
                    self._progress(f"{self.engine.name}: {case.name}, {plan}")
                    self._seen.append(self._see(worker, case, plan, tf32=False))
        why_not = self._why_no_tf32()
        tf32: dict[str, float] = {}
        if not why_not:
            with Worker(self._folder / "logs") as worker:
                for case in (case for case in self._cases if not case.quantised):
                    self._progress(f"{self.engine.name}: {case.name}, TF32 on")
                    seen = self._see(worker, case, FP32, tf32=True)
                    if seen.outputs:
                        tf32[case.name] = seen.error
        return judge(self.engine.name, self._seen, tf32, why_not or "with TF32 on it could not be run")

    def facts(self) -> list[dict[str, Any]]:
        """Facts of every engine that was built, as JSON types."""
        return [self._fact(one) for one in self._seen]

    def _fact(self, one: Seen) -> dict[str, Any]:
        clock = one.run.clock if isinstance(one.run, EngineRun) else None
        return {
            "engine": self.engine.name,
            "model": one.model,
            "plan": one.plan,
            "build_s": one.build_s,
            "bytes": one.nbytes,
            "error": relative(one.outputs[0], one.reference[0]) if one.outputs else None,
            "emulated_error": relative(one.emulated[one.plan], one.reference[0]),
            "latency_ms": None if clock is None else clock.latency_ms,
            "failure": one.run.to_json() if isinstance(one.run, Failure) else None,
            "warnings": list(one.run.warnings) if isinstance(one.run, EngineRun) else [],
        }

    def _why_no_tf32(self) -> str:
        gpu = self.engine.gpu
        if gpu is None:
            return "a CPU has no TF32"
        has_tf32 = gpu.compute_capability is None or gpu.compute_capability >= _FIRST_TF32
        return "" if has_tf32 else f"{gpu.name} has no TF32"

    def _see(self, worker: Worker, case: Case, plan: str, *, tf32: bool) -> Seen:
        workload = case.workload
        seen = Seen(
            case.name,
            plan,
            case.reference,
            case.unfused if self.engine.name == "onnxruntime-cuda" else case.fused,
            case.quantised,
            workload.rewriter.node_precisions(case.plans[plan]),
            run=EngineRun(0.0, None, "", ()),
        )
        model = workload.rewriter.write(case.plans[plan], workload.workspace.scratch(f"selftest-{tf32}"))
        build_s, path = 0.0, model
        if self.engine.kind is not None:
            path = workload.workspace.engines_dir / f"{plan.replace(' ', '-')}-{tf32}.engine"
            built = worker.call(self._build_job(self.engine.kind, case, model, path, tf32), _BUILD_TIMEOUT_S + 20)
            if isinstance(built, Failure):
                return replace(seen, run=built)
            build_s = built.build_s
        outputs = self._folder / "outputs.npz"
        timed = not tf32 and plan in (FP32, FP16)
        run = worker.call(RunEngineJob(self.measure_job(case, path, plan, tf32), outputs, timed), _RUN_TIMEOUT_S)
        if isinstance(run, Failure):
            return replace(seen, run=run, build_s=build_s)
        arrays = tuple(next(iter(sample.values())) for sample in read_outputs(outputs))
        nbytes = path.stat().st_size if self.engine.kind else None
        return replace(seen, run=run, outputs=arrays, build_s=build_s + run.open_s, nbytes=nbytes)

    def _build_job(self, kind: Kind, case: Case, model: Path, engine: Path, tf32: bool) -> BuildJob:
        gpu, workspace = self.engine.gpu, case.workload.workspace
        assert gpu is not None
        capability = gpu.compute_capability
        shared_gb = gpu.memory_gb if gpu.is_jetson else None
        options = BuildOptions(
            kind,
            tf32=tf32,
            capabilities=(capability,) if kind == "tensorrt-rtx" and capability is not None else (),
            settings=TensorRtSettings(workspace_mb=default_workspace_mb(shared_gb)),
            timing_cache=self._folder / "timing.cache",
        )
        return BuildJob(model, engine, options, (workspace.samples("search"),), _BUILD_TIMEOUT_S, gpu.is_jetson)

    def measure_job(self, case: Case, model: Path, plan: str, tf32: bool) -> MeasureJob:
        """The job of a search whose candidate is opened."""
        workspace = case.workload.workspace
        samples, reference = workspace.samples("search"), workspace.reference("search")
        if self.engine.kind is None:
            # As a search opens models whose work is convolutions.
            by_environment = self.engine.provider == "cuda" and case.name != "attention"
            provider = self.engine.provider
            return MeasureJob(
                model, model, samples, samples, reference, provider, tf32=tf32, tf32_by_environment=by_environment
            )
        cache = self._folder / "runtime.cache" if self.engine.kind == "tensorrt-rtx" else None
        return MeasureEngineJob(
            model,
            model,
            samples,
            samples,
            reference,
            "cuda",
            kind=self.engine.kind,
            nodes=case.workload.rewriter.node_precisions(case.plans[plan]),
            runtime_cache=cache,
        )
