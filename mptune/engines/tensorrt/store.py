"""The engines of a run: one per plan, built once into the run's folder; the file that was measured is deployed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mptune.engines.base import Failure, Measurement
from mptune.engines.tensorrt.builder import BuildOptions
from mptune.engines.tensorrt.jobs import BuildJob, BuildResult
from mptune.engines.worker.parent import Worker
from mptune.engines.workload import Workload
from mptune.graph.plan import PrecisionPlan

_GRACE_S = 20.0
"""TensorRT is asked to stop at the deadline; the worker is killed this much later."""


@dataclass(frozen=True)
class StoredEngine:
    """The engine file of a plan.

    Attributes:
        build_s: seconds to build it; 0 where the file existed.
    """

    path: Path
    build_s: float = 0.0
    warnings: tuple[str, ...] = ()


class EngineStore:
    """Builds engines of plans in the worker and finds them again.

    Two builds of a plan may choose different kernels and differ in speed, so a plan that is measured again (in a
    confirmation) is measured with the file of its first build.
    """

    def __init__(
        self,
        worker: Worker,
        workload: Workload,
        options: BuildOptions,
        version: str,
        timeout_s: float,
        *,
        alone: bool = False,
    ) -> None:
        """Nothing is built yet.

        Args:
            options: how engines are built; ``tf32`` is for plans that have FP16 groups, all-FP32 is the baseline.
            version: of the library; engines of another version cannot be loaded.
            alone: close the worker's open sessions before a build (``BuildJob``).
        """
        self._worker = worker
        self._workload = workload
        self._workspace = workload.workspace
        self._options = options
        self._version = version
        self._timeout_s = timeout_s
        self._alone = alone

    def find_or_build(self, plan: PrecisionPlan) -> StoredEngine | Failure:
        """The engine of a plan: its file where there is one, else built."""
        path = self._path(plan)
        if path.exists():
            return StoredEngine(path)
        model = self._workload.rewriter.write(plan, self._workspace.scratch(f"build-{plan.fingerprint}"))
        try:
            job = BuildJob(
                model=model,
                engine_path=path,
                options=self._options_for(plan),
                samples=(self._workspace.samples("search"), self._workspace.samples("held_out")),
                timeout_s=self._timeout_s,
                alone=self._alone,
            )
            built: BuildResult | Failure = self._worker.call(job, self._timeout_s + _GRACE_S)
        finally:
            model.unlink(missing_ok=True)
        return built if isinstance(built, Failure) else StoredEngine(path, built.build_s, built.warnings)

    def evaluate(self, plan: PrecisionPlan, evaluate: Callable[[], Measurement | Failure]) -> Measurement | Failure:
        """Build a plan's engine, evaluate the plan, and name the engine in the measurement.

        An engine whose plan failed is deleted, unless the machine was at fault.

        Args:
            evaluate: measures or predicts it; not called where the engine cannot be built.
        """
        stored = self.find_or_build(plan)
        if isinstance(stored, Failure):
            return stored
        result = evaluate()
        if isinstance(result, Failure):
            if not result.is_machine_fault:
                self.discard(plan)
            return result
        warnings = tuple(dict.fromkeys((*stored.warnings, *result.warnings)))
        return replace(result, build_s=stored.build_s, engine_path=stored.path, warnings=warnings)

    def discard(self, plan: PrecisionPlan) -> None:
        """Delete a plan's engine file, so that a damaged one is not used again."""
        self._path(plan).unlink(missing_ok=True)

    def _path(self, plan: PrecisionPlan) -> Path:
        return self._workspace.engines_dir / f"{plan.fingerprint}.{self._options.kind}-{self._version}.engine"

    def _options_for(self, plan: PrecisionPlan) -> BuildOptions:
        # The all-FP32 plan is the baseline, which never uses TF32.
        return replace(self._options, tf32=self._options.tf32 and bool(plan.reduced_groups))
