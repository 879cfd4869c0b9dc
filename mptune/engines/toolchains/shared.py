"""What the toolchains share, all of ONNX Runtime's, and the one that predicts for a device that is not here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import (
    ErrorSource,
    Failure,
    Measurement,
    Profiling,
    Progress,
    ReferenceReport,
    SampleSet,
    Stage,
    TensorRange,
)
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.jobs.reference import ObserveJob, ReferenceJob
from mptune.engines.ort.cuda_session import NO_TF32
from mptune.engines.ort.session import Provider
from mptune.engines.timing.latency import Latency, LatencySource
from mptune.engines.worker.parent import Worker
from mptune.engines.workload import Workload
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.engines.jobs.emulation import Emulation
    from mptune.targets.roofline import Execution, LatencyTerms
    from mptune.targets.target import Target


class OrtToolchain:
    """What the toolchains on ONNX Runtime share: the worker, the reference, the observed ranges, the emulation."""

    name: str
    latency_source: LatencySource
    error_source: ErrorSource

    def __init__(
        self,
        target: Target,
        workload: Workload,
        settings: SearchSettings,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        device: str = "",
    ) -> None:
        """Make the toolchain; nothing starts before it is needed.

        Args:
            target: the device that latencies are for.
            workload: the model, its groups and the run's paths.
            settings: of the search.
            provider: who computes.
            warnings: what was passed over on the way to this toolchain, for ``environment``.
            device: name of the GPU or CPU that is timed; the target's where none is.
        """
        self.device = device or target.title
        self.target = target
        self.workload = workload
        self.workspace = workload.workspace
        self.settings = settings
        self.provider = provider
        self._warnings = tuple(warnings)
        self._worker = Worker(workload.workspace.logs_dir, settings.worker, {} if settings.tf32 else NO_TF32)
        self._ranges: Mapping[str, TensorRange] | None = None
        self._emulation: Emulation | None = None
        self._terms: LatencyTerms | None = None

    @property
    def timeout_s(self) -> float:
        """Deadline of a job that builds and runs."""
        return self.settings.worker.build_timeout_s + self.settings.worker.measure_timeout_s

    def environment(self) -> Environment:
        """See ``Toolchain``."""
        return describe_environment().with_warnings(*self._warnings)

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        """See ``Toolchain``."""
        paths = self.workspace
        job = ReferenceJob(paths.model_path, paths.samples(which), paths.reference(which), self.provider)
        return self._worker.call(job, self.timeout_s)

    def observe(self) -> Mapping[str, TensorRange] | Failure:
        """See ``Toolchain``."""
        from mptune.graph.writing.observe import write_observing_model

        if self._ranges is None:
            path = self._scratch("observe")
            try:
                taps = write_observing_model(self.workload.model, self.workload.bank, path)
                job = ObserveJob(path, taps, self.workspace.samples("search"), self.provider)
                ranges = self._worker.call(job, self.timeout_s)
            finally:
                path.unlink(missing_ok=True)
            if isinstance(ranges, Failure):
                return ranges
            self._ranges = ranges
        return self._ranges

    def emulate(self, plans: Sequence[PrecisionPlan]) -> tuple[OutputError, ...] | Failure:
        """See ``Toolchain``."""
        return self._emulate(plans, "search", few=True)

    @property
    def emulation_holds(self) -> bool:
        """See ``Toolchain``."""
        return True

    def _emulate(
        self, plans: Sequence[PrecisionPlan], which: SampleSet, *, few: bool
    ) -> tuple[OutputError, ...] | Failure:
        if self._emulation is None:
            from mptune.engines.jobs.emulation import Emulation

            self._emulation = Emulation(
                self.workload,
                self._as_computed(),
                self.provider,
                self.settings,
                partial(self._worker.call, timeout_s=self.timeout_s),
                self._shapes,
            )
        return self._emulation.errors(plans, which, few=few)

    def _as_computed(self) -> GroupedModel:
        """The model and its groups with a node for each step after which the target's engine rounds."""
        return self.workload.grouped

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Concrete shapes of the FP32 values; none where they cannot be observed."""
        ranges = self.observe()
        return {} if isinstance(ranges, Failure) else {tensor: seen.shape for tensor, seen in ranges.items()}

    @property
    def profiling(self) -> Profiling:
        """See ``Toolchain``."""
        return "none"

    def latency_terms(self) -> LatencyTerms | Failure:
        """See ``Toolchain``."""
        from mptune.targets.roofline import roofline

        if self._terms is None:
            ranges = self.observe()
            if isinstance(ranges, Failure):
                return replace(ranges, stage=Stage.TIME)
            self._terms = roofline(
                self.workload.model, self.workload.groups, self.target, self._shapes(), self._execution()
            )
        return self._terms

    def _execution(self) -> Execution:
        """How the engine that latencies are for runs a model: TensorRT fuses epilogues."""
        from mptune.targets.roofline import FUSED

        return FUSED

    def listen(self, callback: Callable[[Progress], None]) -> None:
        """See ``Toolchain``."""
        self._worker.on_progress = callback

    def restart(self) -> None:
        """See ``Toolchain``."""
        self._worker.close()

    def close(self) -> None:
        """See ``Toolchain``."""
        self._worker.close()
        if self._emulation is not None:
            self._emulation.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scratch(self, name: str) -> Path:
        """A path beside the weight bank, of this process alone: several may search in one run directory."""
        return self.workspace.weights_dir / f"{name}-{os.getpid()}.onnx"


class PredictedToolchain(OrtToolchain):
    """Predicts latency by the target's roofline and emulates FP16's roundings: needs no device of that kind."""

    name = "emulation"
    latency_source: LatencySource = "predicted"
    error_source: ErrorSource = "emulated"

    def __enter__(self) -> PredictedToolchain:
        return self

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        terms = self.latency_terms()
        if isinstance(terms, Failure):
            return terms
        errors = self._emulate([plan], which, few=False)
        if isinstance(errors, Failure):
            return errors
        return Measurement(
            latency=Latency.predicted(terms.predict(plan)),
            baseline=None,
            drift=1.0,
            error=errors[0],
            error_source="emulated",
            build_s=0.0,
        )
