"""The toolchain that builds, computes and times with ONNX Runtime on the device here."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import (
    ErrorSource,
    Failure,
    FailureKind,
    Measurement,
    Profiling,
    SampleSet,
    Stage,
)
from mptune.engines.environment import Environment
from mptune.engines.jobs.layer_times import LayerTime, with_group_times
from mptune.engines.jobs.measure import MeasureJob, MeasureResult
from mptune.engines.jobs.ort_profile import OrtProfileJob
from mptune.engines.timing.latency import LatencySource, Repetitions
from mptune.engines.timing.record import TimingRecord
from mptune.engines.toolchains.shared import OrtToolchain
from mptune.errors import MptuneError
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.plan import Precision, PrecisionPlan

if TYPE_CHECKING:
    from mptune.graph.writing.rewrite import Rewriter
    from mptune.targets.roofline import Execution

DRIFT_WARNING = 0.1
"""A baseline that moved by more than this share since it was first measured is a warning."""

CPU_WARNING = (
    "FP16 is seldom faster on a CPU, where ONNX Runtime computes most of it in FP32 and pays for the Casts: give"
    " --target a GPU or a profile (`mptune targets` lists them)"
)


class OnnxRuntimeToolchain(OrtToolchain):
    """Builds, computes and times with ONNX Runtime on the GPU or the CPU here."""

    name = "onnxruntime"
    latency_source: LatencySource = "measured"
    error_source: ErrorSource = "measured"
    _profile_failed = False
    _timed_by: str | None = None
    _rewriter: Rewriter | None = None
    _baseline: Path | None = None
    _record: TimingRecord | None = None
    _convolves: bool | None = None

    def __enter__(self) -> OnnxRuntimeToolchain:
        return self

    @property
    def _engine(self) -> str:
        """What computes the candidates: a provider of ONNX Runtime, or the library that times them in its place."""
        return self._timed_by or self.provider

    @property
    def profiling(self) -> Profiling:
        """See ``Toolchain``; of the CUDA provider's kernels ONNX Runtime tells the launching (``ort_profile``)."""
        return "none" if self._profile_failed or self._engine == "cuda" else "apart"

    def environment(self) -> Environment:
        """See ``Toolchain``."""
        found = super().environment()
        return found.with_warnings(CPU_WARNING) if self._engine == "cpu" else found

    @property
    def emulation_holds(self) -> bool:
        """See ``Toolchain``; the CPU provider computes FP16 in FP32, and leaves out roundings between nodes."""
        return self._engine != "cpu"

    def _as_computed(self) -> GroupedModel:
        if self._engine != "cuda":
            return super()._as_computed()
        from mptune.graph.writing.rounding_steps import with_rounding_steps

        return GroupedModel(*with_rounding_steps(self.workload.model, self.workload.groups))

    def _execution(self) -> Execution:
        from mptune.targets.roofline import UNFUSED

        return UNFUSED if self._engine == "cuda" else super()._execution()  # it counts the CUDA provider's kernels

    @property
    def tf32_by_environment(self) -> bool:
        """How the sessions that are timed are opened (``SessionOptions``); asks the worker for shapes the first time.

        Where convolutions are a good part of the work, baseline and candidates are to be as fast as can be had without
        TF32. Where they are not, it is matrix products that must be certain to be FP32.
        """
        if self._convolves is None:
            from mptune.targets.costs import is_convolution, is_convolutional

            found = self._engine == "cuda" and any(is_convolution(node) for node in self.workload.model.nodes)
            shapes = self._shapes() if found else {}
            self._convolves = is_convolutional(self.workload.model, shapes) if shapes else found
        return self._convolves

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        record = self._record = self._record or TimingRecord.read(self._record_path, self.settings.latency)
        result = self._measure(plan, which, record.repetitions if record else None)
        if isinstance(result, Failure):
            return result
        measurement = self._corrected(result)
        return self._profiled(measurement, plan) if profile and self.profiling != "none" else measurement

    def _profiled(self, measurement: Measurement, plan: PrecisionPlan) -> Measurement:
        try:
            layers = self._layer_times(plan)
        except (MptuneError, OSError) as error:
            layers = Failure(Stage.TIME, FailureKind.ERROR, str(error))
        if isinstance(layers, Failure):
            self._profile_failed = True  # Each try may cost the worker: there is no second one.
        return with_group_times(measurement, layers, self.workload.grouped)

    def _layer_times(self, plan: PrecisionPlan) -> tuple[LayerTime, ...] | Failure:
        """What each layer of a plan's engine takes, in another session."""
        path = self._typed_model(plan)
        folder = path.with_suffix(".profile")
        try:
            folder.mkdir()
            return self._worker.call(OrtProfileJob(path, self.workspace.samples("search"), folder), self.timeout_s)
        finally:
            path.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def _measure(
        self, plan: PrecisionPlan, which: SampleSet, repetitions: Repetitions | None
    ) -> MeasureResult | Failure:
        """Build, run and time one plan beside the baseline; without ``repetitions`` they are calibrated."""
        path = self._typed_model(plan)
        try:
            job = MeasureJob(
                model=path,
                baseline=self._baseline_model(),
                samples=self.workspace.samples(which),
                timing_samples=self.workspace.samples("search"),
                reference=self.workspace.reference(which),
                provider=self.provider,
                tf32=self._uses_tf32(plan),
                tf32_by_environment=self.tf32_by_environment,
                latency=self.settings.latency,
                repetitions=repetitions,
                metric=self.settings.metric,
            )
            return self._worker.call(job, self.timeout_s)
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """See ``Toolchain``."""
        super().close()
        if self._baseline is not None:
            self._baseline.unlink(missing_ok=True)
            self._baseline = None

    def _corrected(self, result: MeasureResult) -> Measurement:
        """Scale by the drift of the baseline since it was first measured."""
        if self._record is None:
            self._record = TimingRecord(result.repetitions, result.baseline.median_ms)
            self._record.write(self._record_path, self.settings.latency)
        drift = self._record.baseline_ms / result.baseline.median_ms
        warnings = result.warnings
        if abs(drift - 1.0) > DRIFT_WARNING:
            text = (
                f"the FP32 baseline takes {1 / drift:.2f} times as long as when it was first measured; latencies are"
                " corrected for it, but steadier ones are to be had: lock the clocks and close other programs"
            )
            warnings = (*warnings, text)
        return Measurement(
            latency=result.latency.scaled(drift),
            baseline=result.baseline,
            drift=drift,
            error=result.error,
            error_source="measured",
            build_s=result.build_s,
            warnings=warnings,
        )

    def _typed_model(self, plan: PrecisionPlan, name: str | None = None) -> Path:
        """Write the typed model of a plan beside the weight bank."""
        if self._rewriter is None:
            from mptune.graph.writing.rewrite import Rewriter

            self._rewriter = Rewriter(self.workload.model, self.workload.groups, self.workload.bank)
        return self._rewriter.write(plan, self._scratch(name or plan.fingerprint))

    def _baseline_model(self) -> Path:
        if self._baseline is None:
            self._baseline = self._typed_model(self.workload.grouped.uniform(Precision.FP32), "baseline")
        return self._baseline

    def _uses_tf32(self, plan: PrecisionPlan) -> bool:
        """The all-FP32 plan is the baseline, so it is built as the baseline is."""
        return self.settings.tf32 and bool(plan.fp16_groups)

    @property
    def _record_path(self) -> Path:
        device = re.sub(r"[^a-z0-9]+", "-", f"{self._engine} {self.device}".lower()).strip("-")
        return self.workspace.data_dir / f"timing-{device}.json"
