"""The toolchains that need nothing but ONNX Runtime: measured on the device here, or predicted for one that is not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from mptune.data.accuracy import OutputError
from mptune.engines.base import Failure, Measurement, ReferenceReport, SampleSet, Stage, TensorRange, Workspace
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.jobs import ErrorsJob, MeasureJob, MeasureResult, ObserveJob, OutputsJob, ReferenceJob
from mptune.engines.latency import Latency, Repetitions
from mptune.engines.onnxruntime import Provider
from mptune.engines.worker import Worker
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.graph.emulate import Emulator
    from mptune.graph.groups import LayerGroup
    from mptune.graph.model import Model
    from mptune.graph.rewrite import Rewriter
    from mptune.graph.weights import WeightBank
    from mptune.targets.roofline import LatencyTerms
    from mptune.targets.target import Target

DRIFT_WARNING = 0.1
"""A baseline that moved by more than this share since it was first measured is a warning."""

EMULATED_SAMPLES = 8
"""So many samples tell the error of a group well enough; evaluations take all."""

CPU_WARNING = (
    "FP16 is seldom faster on a CPU, where ONNX Runtime computes most of it in FP32 and pays for the Casts: give"
    " --target a GPU or a profile (`mptune targets` lists them)"
)


class OrtToolchain:
    """What the toolchains on ONNX Runtime share: the worker, the reference, the observed ranges."""

    name: str
    device: str
    latency_source: Literal["measured", "predicted"]
    error_source: Literal["measured", "emulated"]

    def __init__(
        self,
        target: Target,
        workspace: Workspace,
        model: Model,
        groups: Sequence[LayerGroup],
        settings: SearchSettings,
        provider: Provider,
        warnings: Sequence[str] = (),
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
        """
        self.target = target
        self.workspace = workspace
        self.settings = settings
        self.provider = provider
        self._model = model
        self._groups = groups
        self._warnings = tuple(warnings)
        self._worker = Worker(workspace.logs_dir, settings.worker)
        self._bank: WeightBank | None = None
        self._ranges: Mapping[str, TensorRange] | None = None
        self._emulator: Emulator | None = None
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
        paths = [self._write_emulation(plan) for plan in plans]
        try:
            search, reference = self.workspace.samples("search"), self.workspace.reference("search")
            job = ErrorsJob(tuple(paths), search, reference, self.provider, self.settings.metric, EMULATED_SAMPLES)
            return self._worker.call(job, self.timeout_s)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _write_emulation(self, plan: PrecisionPlan) -> Path:
        from mptune.graph.emulate import Emulator

        if self._emulator is None:
            self._emulator = Emulator(self._model, self._groups, self._weight_bank())
        return self._emulator.write(plan, self._scratch(f"emulated-{plan.fingerprint}"))

    def latency_terms(self) -> LatencyTerms | Failure:
        """See ``Toolchain``."""
        from mptune.targets.roofline import roofline

        if self._terms is None:
            ranges = self.observe()
            if isinstance(ranges, Failure):
                return replace(ranges, stage=Stage.TIME)
            shapes = {tensor: seen.shape for tensor, seen in ranges.items()}
            self._terms = roofline(self._model, self._groups, self.target, shapes)
        return self._terms

    def restart(self) -> None:
        """See ``Toolchain``."""
        self._worker.close()

    def close(self) -> None:
        """See ``Toolchain``."""
        self._worker.close()

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


@dataclass(frozen=True)
class TimingRecord:
    """What the first measurement of a run fixes for all later ones, on this device, resumed runs included.

    Attributes:
        repetitions: frozen.
        baseline_ms: median of the FP32 baseline then.
    """

    repetitions: Repetitions
    baseline_ms: float

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {"repetitions": self.repetitions.to_json(), "baseline_ms": self.baseline_ms}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> TimingRecord:
        """Inverse of ``to_json``."""
        return cls(Repetitions.from_json(document["repetitions"]), float(document["baseline_ms"]))


class OnnxRuntimeToolchain(OrtToolchain):
    """Builds, computes and times with ONNX Runtime on the GPU or the CPU here."""

    def __init__(
        self,
        target: Target,
        workspace: Workspace,
        model: Model,
        groups: Sequence[LayerGroup],
        settings: SearchSettings,
        provider: Provider,
        warnings: Sequence[str] = (),
        *,
        device: str,
    ) -> None:
        """See ``OrtToolchain``; ``device`` is the name of the GPU or CPU here."""
        if provider == "cpu":
            warnings = (*warnings, CPU_WARNING)
        super().__init__(target, workspace, model, groups, settings, provider, warnings)
        self.name, self.device = "onnxruntime", device
        self.latency_source, self.error_source = "measured", "measured"
        self._rewriter: Rewriter | None = None
        self._baseline: Path | None = None
        self._record: TimingRecord | None = None

    def __enter__(self) -> OnnxRuntimeToolchain:
        return self

    def evaluate(self, plan: PrecisionPlan, which: SampleSet = "search") -> Measurement | Failure:
        """See ``Toolchain``."""
        if self._rewriter is None:
            from mptune.graph.rewrite import Rewriter

            self._rewriter = Rewriter(self._model, self._groups, self._weight_bank())
        record = self._record = self._record or self._read_record()
        path = self._rewriter.write(plan, self._scratch(plan.fingerprint))
        try:
            job = MeasureJob(
                model=path,
                baseline=self._baseline_model(self._rewriter),
                samples=self.workspace.samples(which),
                timing_samples=self.workspace.samples("search"),
                reference=self.workspace.reference(which),
                provider=self.provider,
                # The all-FP32 plan is the baseline, so it is built as the baseline is.
                tf32=self.settings.tf32 and bool(plan.fp16_groups),
                latency=self.settings.latency,
                repetitions=record.repetitions if record else None,
                metric=self.settings.metric,
            )
            result: MeasureResult | Failure = self._worker.call(job, self.timeout_s)
        finally:
            path.unlink(missing_ok=True)
        return result if isinstance(result, Failure) else self._corrected(result)

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
            self._write_record(self._record)
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

    def _baseline_model(self, rewriter: Rewriter) -> Path:
        if self._baseline is None:
            plan = PrecisionPlan.uniform(self._model.sha256, (group.id for group in self._groups), Precision.FP32)
            self._baseline = rewriter.write(plan, self._scratch("baseline"))
        return self._baseline

    @property
    def _record_path(self) -> Path:
        device = re.sub(r"[^a-z0-9]+", "-", f"{self.provider} {self.device}".lower()).strip("-")
        return self.workspace.data_dir / f"timing-{device}.json"

    def _read_record(self) -> TimingRecord | None:
        """The record of an earlier process; None where there is none or latency was taken in another way then."""
        try:
            document = json.loads(self._record_path.read_text(encoding="utf-8"))
            if document["settings"] != asdict(self.settings.latency):
                return None
            return TimingRecord.from_json(document)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_record(self, record: TimingRecord) -> None:
        document = {**record.to_json(), "settings": asdict(self.settings.latency)}
        temporary = self._record_path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(document, indent=2), encoding="utf-8")
        temporary.replace(self._record_path)


class PredictedToolchain(OrtToolchain):
    """Predicts latency by the target's roofline and emulates FP16's roundings: needs no device of that kind."""

    def __init__(
        self,
        target: Target,
        workspace: Workspace,
        model: Model,
        groups: Sequence[LayerGroup],
        settings: SearchSettings,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
    ) -> None:
        """See ``OrtToolchain``."""
        super().__init__(target, workspace, model, groups, settings, provider, warnings)
        self.name, self.device = "emulation", target.title
        self.latency_source, self.error_source = "predicted", "emulated"

    def __enter__(self) -> PredictedToolchain:
        return self

    def evaluate(self, plan: PrecisionPlan, which: SampleSet = "search") -> Measurement | Failure:
        """See ``Toolchain``."""
        terms = self.latency_terms()
        if isinstance(terms, Failure):
            return terms
        path = self._write_emulation(plan)
        try:
            job = OutputsJob(
                path,
                self.workspace.samples(which),
                self.workspace.reference(which),
                self.provider,
                self.settings.metric,
            )
            result = self._worker.call(job, self.timeout_s)
        finally:
            path.unlink(missing_ok=True)
        if isinstance(result, Failure):
            return result
        return Measurement(
            latency=Latency.predicted(terms.predict(plan)),
            baseline=None,
            drift=1.0,
            error=result.error,
            error_source="emulated",
            build_s=result.build_s,
        )
