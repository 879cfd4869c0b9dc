"""The toolchains that need nothing but ONNX Runtime: measured on the device here, or predicted for one that is not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from mptune.data.accuracy import OutputError
from mptune.engines.base import (
    Failure,
    Measurement,
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
from mptune.engines.ort_cuda import NO_TF32
from mptune.engines.ort_session import Provider
from mptune.engines.worker import Worker
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.engines.emulation import Emulation
    from mptune.graph.groups import LayerGroup
    from mptune.graph.model import Model
    from mptune.graph.rewrite import Rewriter
    from mptune.graph.weights import WeightBank
    from mptune.targets.roofline import LatencyTerms
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

    def latency_terms(self) -> LatencyTerms | Failure:
        """See ``Toolchain``."""
        from mptune.targets.roofline import FUSED, UNFUSED, roofline

        if self._terms is None:
            ranges = self.observe()
            if isinstance(ranges, Failure):
                return replace(ranges, stage=Stage.TIME)
            execution = FUSED if self._fuses() else UNFUSED
            self._terms = roofline(self._model, self._groups, self.target, self._shapes(), execution)
        return self._terms

    def _fuses(self) -> bool:
        """Whether the engine that latencies are for fuses epilogues, as TensorRT does."""
        return True

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

    name = "onnxruntime"
    latency_source: Literal["measured", "predicted"] = "measured"
    error_source: Literal["measured", "emulated"] = "measured"
    _timed_by: str | None = None
    _rewriter: Rewriter | None = None
    _baseline: Path | None = None
    _record: TimingRecord | None = None

    def __enter__(self) -> OnnxRuntimeToolchain:
        return self

    @property
    def _engine(self) -> str:
        """What computes the candidates: a provider of ONNX Runtime, or the library that times them in its place."""
        return self._timed_by or self.provider

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

    def _fuses(self) -> bool:
        return self._engine != "cuda"  # UNFUSED counts the CUDA provider's kernels

    def evaluate(self, plan: PrecisionPlan, which: SampleSet = "search") -> Measurement | Failure:
        """See ``Toolchain``."""
        record = self._record = self._record or self._read_record()
        result = self._measure(plan, which, record.repetitions if record else None)
        return result if isinstance(result, Failure) else self._corrected(result)

    def _measure(
        self, plan: PrecisionPlan, which: SampleSet, repetitions: Repetitions | None
    ) -> MeasureResult | Failure:
        """Build, run and time one plan beside the baseline; without ``repetitions`` they are calibrated."""
        if self._rewriter is None:
            from mptune.graph.rewrite import Rewriter

            self._rewriter = Rewriter(self._model, self._groups, self._weight_bank())
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
        device = re.sub(r"[^a-z0-9]+", "-", f"{self._engine} {self.device}".lower()).strip("-")
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

    name = "emulation"
    latency_source: Literal["measured", "predicted"] = "predicted"
    error_source: Literal["measured", "emulated"] = "emulated"

    def __enter__(self) -> PredictedToolchain:
        return self

    def evaluate(self, plan: PrecisionPlan, which: SampleSet = "search") -> Measurement | Failure:
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
