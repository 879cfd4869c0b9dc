"""The toolchains that need nothing but ONNX Runtime: measured on the device here, or predicted for one that is not."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from mptune.data.accuracy import OutputError
from mptune.engines.base import (
    Failure,
    FailureKind,
    Measurement,
    Profiling,
    Progress,
    ReferenceReport,
    SampleSet,
    Stage,
    TensorRange,
    Workspace,
)
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.jobs import MeasureJob, MeasureResult, ObserveJob, ReferenceJob
from mptune.engines.latency import Latency, Repetitions
from mptune.engines.layer_times import LayerTime, with_group_times
from mptune.engines.ort_cuda import NO_TF32
from mptune.engines.ort_profile import OrtProfileJob
from mptune.engines.ort_session import Provider
from mptune.engines.timing_record import TimingRecord
from mptune.engines.worker import Worker
from mptune.errors import MptuneError
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.engines.emulation import Emulation
    from mptune.graph.groups import LayerGroup
    from mptune.graph.model import Model
    from mptune.graph.rewrite import Rewriter
    from mptune.graph.weights import WeightBank
    from mptune.targets.roofline import Execution, LatencyTerms
    from mptune.targets.target import Target

DRIFT_WARNING = 0.1
"""A baseline that moved by more than this share since it was first measured is a warning."""

CPU_WARNING = (
    "FP16 is seldom faster on a CPU, where ONNX Runtime computes most of it in FP32 and pays for the Casts: give"
    " --target a GPU or a profile (`mptune targets` lists them)"
)


class OrtToolchain:
    """What the toolchains on ONNX Runtime share: the worker, the reference, the observed ranges, the emulation."""

    name: str
    latency_source: Literal["measured", "predicted"]
    error_source: Literal["measured", "emulated"]

    def __init__(
        self,
        target: Target,
        workspace: Workspace,
        model: Model,
        groups: Sequence[LayerGroup],
        settings: SearchSettings,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        device: str = "",
    ) -> None:
        """Make the toolchain; nothing starts before it is needed.

        Args:
            target: the device that latencies are for.
            workspace: the run's paths.
            model: the user's model.
            groups: its layer groups.
            settings: of the search.
            provider: who computes.
            warnings: what was passed over on the way to this toolchain, for ``environment``.
            device: name of the GPU or CPU that is timed; the target's where none is.
        """
        self.device = device or target.title
        self.target = target
        self.workspace = workspace
        self.settings = settings
        self.provider = provider
        self._model = model
        self._groups = groups
        self._warnings = tuple(warnings)
        self._worker = Worker(workspace.logs_dir, settings.worker, {} if settings.tf32 else NO_TF32)
        self._bank: WeightBank | None = None
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
        from mptune.graph.observe import write_observing_model

        if self._ranges is None:
            path = self._scratch("observe")
            try:
                taps = write_observing_model(self._model, self._weight_bank(), path)
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
            from mptune.engines.emulation import Emulation

            self._emulation = Emulation(
                *self._as_computed(),
                self._weight_bank(),
                self.workspace,
                self.provider,
                self.settings,
                partial(self._worker.call, timeout_s=self.timeout_s),
                self._shapes,
            )
        return self._emulation.errors(plans, which, few=few)

    def _as_computed(self) -> tuple[Model, Sequence[LayerGroup]]:
        """The model and its groups with a node for each step after which the target's engine rounds."""
        return self._model, self._groups

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
            self._terms = roofline(self._model, self._groups, self.target, self._shapes(), self._execution())
        return self._terms

    def _execution(self) -> Execution:
        """How the engine that latencies are for runs a model: TensorRT fuses epilogues."""
        from mptune.targets.roofline import FUSED

        return FUSED

    def listen(self, heard: Callable[[Progress], None]) -> None:
        """See ``Toolchain``."""
        self._worker.heard = heard

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

    def _weight_bank(self) -> WeightBank:
        from mptune.graph.weights import WeightBank

        if self._bank is None:
            self._bank = WeightBank.write(self._model, self.workspace.weights_dir)
        return self._bank

    def _scratch(self, name: str) -> Path:
        """A path beside the weight bank, of this process alone: several may search in one run directory."""
        return self.workspace.weights_dir / f"{name}-{os.getpid()}.onnx"


class OnnxRuntimeToolchain(OrtToolchain):
    """Builds, computes and times with ONNX Runtime on the GPU or the CPU here."""

    name = "onnxruntime"
    latency_source: Literal["measured", "predicted"] = "measured"
    error_source: Literal["measured", "emulated"] = "measured"
    _profile_failed = False
    _timed_by: str | None = None
    _rewriter: Rewriter | None = None
    _baseline: Path | None = None
    _record: TimingRecord | None = None
    _predicted: Mapping[Precision, Mapping[str, float]] | None = None
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

    def _as_computed(self) -> tuple[Model, Sequence[LayerGroup]]:
        if self._engine != "cuda":
            return super()._as_computed()
        from mptune.graph.spelled import spell_out

        return spell_out(self._model, self._groups)

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

            found = self._engine == "cuda" and any(is_convolution(node) for node in self._model.nodes)
            shapes = self._shapes() if found else {}
            self._convolves = is_convolutional(self._model, shapes) if shapes else found
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
        weights: Mapping[str, float] | None = None
        try:
            layers = self._layer_times(plan)
            weights = self._expected_ms(plan)
        except (MptuneError, OSError) as error:
            layers = Failure(Stage.TIME, FailureKind.ERROR, str(error))
        if isinstance(layers, Failure):
            self._profile_failed = True  # Each try may cost the worker: there is no second one.
        return with_group_times(measurement, layers, self._model, self._groups, weights)

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

    def _expected_ms(self, plan: PrecisionPlan) -> Mapping[str, float] | None:
        """What the roofline predicts each group to take under a plan; None where no shapes can be observed."""
        from mptune.targets.roofline import groups_ms

        shapes = self._shapes()
        if not shapes:
            return None
        if not self._predicted:
            args = self._model, self._groups, self.target, shapes, self._execution()
            self._predicted = {precision: groups_ms(*args, precision) for precision in Precision}
        return {group.id: self._predicted[plan.precision[group.id]][group.id] for group in self._groups}

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
            from mptune.graph.rewrite import Rewriter

            self._rewriter = Rewriter(self._model, self._groups, self._weight_bank())
        return self._rewriter.write(plan, self._scratch(name or plan.fingerprint))

    def _baseline_model(self) -> Path:
        if self._baseline is None:
            plan = PrecisionPlan.uniform(self._model.sha256, (group.id for group in self._groups), Precision.FP32)
            self._baseline = self._typed_model(plan, "baseline")
        return self._baseline

    def _uses_tf32(self, plan: PrecisionPlan) -> bool:
        """The all-FP32 plan is the baseline, so it is built as the baseline is."""
        return self.settings.tf32 and bool(plan.fp16_groups)

    @property
    def _record_path(self) -> Path:
        device = re.sub(r"[^a-z0-9]+", "-", f"{self._engine} {self.device}".lower()).strip("-")
        return self.workspace.data_dir / f"timing-{device}.json"


class PredictedToolchain(OrtToolchain):
    """Predicts latency by the target's roofline and emulates FP16's roundings: needs no device of that kind."""

    name = "emulation"
    latency_source: Literal["measured", "predicted"] = "predicted"
    error_source: Literal["measured", "emulated"] = "emulated"

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
