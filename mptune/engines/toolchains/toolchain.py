"""The toolchain: builds, runs and times plans for one target with a backend's engines, or predicts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mptune.data.metrics.accuracy import OutputError
from mptune.engines import base
from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.environment import Environment, describe_environment
from mptune.engines.latency import LatencySource
from mptune.engines.ort.session import Provider, available_bytes
from mptune.engines.tensorrt.layers import EngineLayers, with_group_times
from mptune.engines.toolchains import ahead, measuring
from mptune.engines.toolchains.prediction import Prediction
from mptune.engines.toolchains.reference import ReferenceModel, Workers, has_room_beside
from mptune.graph.plan import Precision, PrecisionPlan

if TYPE_CHECKING:
    from mptune.engines.backend import Backend, Built
    from mptune.graph.facts import FusedNodes
    from mptune.graph.groups import GroupedModel
    from mptune.graph.hazards.hazard import TensorRange
    from mptune.targets.detect import Gpu
    from mptune.targets.roofline import LatencyTerms
    from mptune.targets.target import Target

_PROCESS_BYTES, _HOST_BYTES = 1e9, 2e9
"""That a process with cuDNN and cuBLAS takes of the device's memory beside its models, and of the host's, about."""


class Toolchain(AbstractContextManager["Toolchain"]):
    """Evaluates plans for one target. Lives in the parent process.

    Every method that builds or runs anything does so in a worker process under a deadline; a plan that fails comes
    back as a ``Failure``. Nothing starts before it is needed. Predicted, the roofline gives latencies and emulation the
    errors: no device is needed. With a backend engines are built then, too: a plan whose engine cannot be has failed.
    """

    def __init__(
        self,
        backend: Backend | None,
        target: Target,
        context: RunContext,
        provider: Provider = "cpu",
        warnings: Sequence[str] = (),
        *,
        latency_source: LatencySource = "measured",
        gpu: Gpu | None = None,
        device: str = "",
        workers: Workers | None = None,
    ) -> None:
        """Make the toolchain.

        Args:
            backend: builds the engines; None where none are built, and latency is predicted.
            provider: ONNX Runtime's, which computes the reference and emulations.
            gpu: that engines are built for and timed on; None for the target's, which is not here, and for a CPU.
            workers: of this run, which end with the toolchain; None makes them.
        """
        given: dict[str, Any] = {
            "provider": provider,
            "warnings": warnings,
            "latency_source": latency_source,
            "gpu": gpu,
        }
        self._make = partial(Toolchain, backend, target, **given, device=device)
        self.name = "emulation" if backend is None else backend.name
        self.device = device or target.title  # name of what is timed; the target's where nothing is
        self.latency_source: LatencySource = "predicted" if backend is None else latency_source
        self.error_source: base.ErrorSource = "measured" if self.latency_source == "measured" else "emulated"
        self.target, self.context, self.provider = target, context, provider
        self._warnings = tuple(warnings)
        self._workers = workers or Workers(context.settings)
        self._workers.serve(context)
        self.worker = self._workers.main
        self.reference_model = ReferenceModel(context, provider, self.worker, self._workers.observers)
        self.builder = None if backend is None else backend.builder(self.reference_model, target, gpu)
        self.prediction = Prediction(self.reference_model, target, self.builder)
        self._timings: measuring.Timings | None = None  # None where latency is predicted
        if self.builder is not None and self.latency_source == "measured":
            record = context.timing_record(f"{self.name} {self.device}")
            self._timings = measuring.Timings(context, self.builder, record, on_gpu=target.kind != "cpu")
        self.emulation_holds = self.builder is None or self.builder.emulation_holds  # see ``Builder``
        self._can_profile = True
        self._ahead = ahead.Ahead(self._workers)
        self._first: dict[tuple[str, SampleSet], Measurement] = {}
        self._has_room = has_room_beside(provider)
        self.limit: float | None = None  # on the error: less is emulated of plans that cannot be chosen within it

    def reference(self, which: SampleSet) -> base.ReferenceReport | Failure:
        """Compute the reference outputs of a set of samples, in FP32 without TF32, and write them to the context."""
        return self.reference_model.reference(which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        """Run the model over the search samples, and reduce float tensors to their ranges; ``stage`` gets progress."""
        return self.reference_model.observe(stage)

    def missing_kernels(self, precision: Precision) -> tuple[base.MissingKernel, ...] | Failure:
        """The nodes that another provider runs in a reduced precision than in FP32, or none does."""
        return (self.builder or self.prediction).missing_kernels(precision)

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """The nodes that the engine computes as one, with FP32 inside, wherever they are FP16, such as norms."""
        return () if self.builder is None else self.builder.fused_nodes()

    def environment(self) -> Environment:
        """Versions, driver, clocks and warnings."""
        environment = describe_environment()
        if self.latency_source == "predicted":  # nothing is timed here: a busy or hot GPU disturbs nothing
            environment = replace(environment, warnings=())
        return environment.with_warnings(*self._warnings)

    @property
    def emulated_samples(self) -> base.EmulatedSamples:
        """The first few search samples, on which ``emulate`` takes errors; known once they are written."""
        return self.prediction.emulation.samples

    def emulate(
        self, plans: Sequence[PrecisionPlan], part: range | None = None, grouped: GroupedModel | None = None
    ) -> tuple[OutputError, ...] | Failure:
        """Emulated errors of plans on ``emulated_samples``, or on one part of them; no engine is built.

        ``grouped`` has the groups of the plans where these are not those of the run.
        """
        part = range(self.emulated_samples.count) if part is None else part
        return self.prediction.emulation_of(grouped or self.context.grouped).errors(plans, part=part)

    def latency_terms(self) -> LatencyTerms | Failure:
        """The roofline's terms for the target: a prior where latency is measured, else latency is computed from it."""
        return self.prediction.terms(tf32=self.context.settings.tf32)

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """Build, run and time one plan. An engine whose plan failed is faulty, unless the machine was at fault.

        What ``evaluate_first`` measured is not measured again. With ``profile`` the layer groups are timed, too, where
        ``profiling`` says so. A profile that fails is a warning of the measurement, not a failure.
        """
        if (plan.fingerprint, which) in self._first:
            return self._first.pop((plan.fingerprint, which))
        built = None if self.builder is None else self.builder.build(plan)
        if isinstance(built, Failure):
            return built
        result: Measurement | Failure | None = None
        try:
            if built is None or self._timings is None:
                result = self.prediction.measurement(plan, which, self.limit)
            else:
                job = self._timings.job(built, plan, which)
                worker = self._ahead.take(plan.fingerprint)
                timed = job if isinstance(job, Failure) else worker.call(job)
                if isinstance(timed, Failure):
                    result = timed
                else:
                    sessions = [*filter(None, [timed.measurement.latency.session])]
                    self._timings.standings.add(plan.fingerprint, sessions, timed.objective)
                    result = self._timings.corrected(timed)
                    if profile and self.profiling != "none":
                        result = self._profiled(result, plan, built)
        finally:
            if self.builder is not None:
                self.builder.release(plan, faulty=isinstance(result, Failure) and not result.is_machine_fault)
        if isinstance(result, Failure):
            return result
        memory = self.prediction.memory(plan, result.memory)
        if built is None:
            return replace(result, memory=memory)
        path = built.engine.path if built.is_kept else None
        if path is not None and path.exists():
            memory = replace(memory, engine_bytes=path.stat().st_size)
        return replace(
            result,
            build_s=result.build_s if built.build_s is None else built.build_s,
            engine_path=path,
            warnings=tuple(dict.fromkeys((*built.warnings, *result.warnings))),
            memory=memory,
        )

    def turn_elsewhere(self, plan: PrecisionPlan) -> None:
        """End the process that timed the last plan, which may be wrong; ``plan`` is evaluated in another one."""
        self._ahead.turn_elsewhere(plan.fingerprint)

    def _profiled(self, measurement: Measurement, plan: PrecisionPlan, built: Built) -> Measurement:
        """A measurement with the times of its layer groups, whose layers are written beside the engine."""
        assert self.builder is not None
        layers = self.builder.layer_times(built)
        self._can_profile = not isinstance(layers, Failure)
        if not isinstance(layers, Failure) and built.is_kept:
            EngineLayers(plan.fingerprint, layers).write(built.engine.path)
        return with_group_times(measurement, layers, self.context.grouped)

    def evaluate_tf32(self) -> Measurement | Failure | None:
        """All-FP32 with TF32; None where the device has none. Where latency is predicted, no engine of it is built.

        It is measured in a process of its own, whose environment allows TF32.
        """
        if self.target.tf32_tflops is None:
            return None
        if self._timings is None or self.builder is None:
            return self.prediction.measurement(None)
        built = self.builder.build_tf32()
        if built is None or isinstance(built, Failure):
            return built
        try:
            job = self._timings.job(built, self._fp32, "search")
            result = job if isinstance(job, Failure) else self._workers.tf32.call(job)
            return result if isinstance(result, Failure) else self._timings.corrected(result)
        finally:
            if built.is_kept:
                built.engine.path.unlink(missing_ok=True)

    @property
    def profiling(self) -> base.Profiling:
        """``along``: any plan that is timed; ``none``: no profiler is usable, or it has failed once."""
        usable = self._timings is not None and self._can_profile
        return self.builder.profiling if self.builder is not None and usable else "none"

    @property
    def most_ahead(self) -> int:
        """How many plans ``open_ahead`` opens at most; 1 where plans are opened one by one, as they are timed."""
        if self._ahead.most is None:
            self._ahead.most = 1
            if self._opens_beside:
                memory = self.prediction.memory(self._fp32, None)
                # Of baseline and candidate; the arenas of ONNX Runtime grow by doubling.
                each = _PROCESS_BYTES + 2 * ((memory.weight_bytes or 0) + 2 * (memory.context_bytes or 0))
                room = min(0.5e9 * (self.target.memory_gb or 0.0) / each, 0.5 * available_bytes() / _HOST_BYTES)
                self._ahead.most = max(1, min(1 + len(self._workers.beside), int(room)))
        return self._ahead.most

    @property
    def _opens_beside(self) -> bool:
        opens = self._timings is not None and self.builder is not None and self.builder.opens_beside
        # A metric of the calling program answers one job at a time.
        return opens and self._has_room and self.context.settings.metric_function is None

    @property
    def _measures_first(self) -> bool:
        return self._opens_beside and not self.context.settings.gpus  # several have workers of their own

    def open_ahead(self, plans: Sequence[PrecisionPlan], which: SampleSet = "search") -> int:
        """Begin to open plans: ``evaluate`` waits until they are open, and has to time them only.

        Each is opened in a process of its own that has not had it, beside a baseline of its own, up to the first for
        which there is none; returns how many there is one for. One that fails there is opened anew.
        """
        opens, plans = self.most_ahead > 1, [plan for plan in plans if (plan.fingerprint, which) not in self._first]
        workers = self._ahead.place([plan.fingerprint for plan in plans])
        for plan, worker in zip(plans, workers, strict=False) if opens else ():
            if (job := self._job(plan, which)) is not None:
                self._ahead.open(plan.fingerprint, worker, job)
        return len(workers)

    @property
    def is_opening(self) -> bool:
        """Whether plans are not open yet that are being opened."""
        return self._ahead.is_opening

    def open_first(self) -> None:
        """Begin to open all-FP32, where it is measured before the search asks for it."""
        if self._measures_first and (job := self._job(self._fp32)) is not None:
            self._ahead.open(self._fp32.fingerprint, self._workers.beside[0], job)

    def open_tf32(self) -> None:
        """Begin to open all-FP32 with TF32, where there is memory for a plan in every process."""
        has_room = self.target.tf32_tflops is not None and self.most_ahead > len(self._workers.beside)
        if has_room and (job := self._job(self._fp32, tf32=True)) is not None:
            self._ahead.open("TF32", self._workers.tf32, job)

    def open_baselines(self) -> None:
        """Begin to open the baseline in processes beside the first that have none: plans open sooner there.

        Not where that has to wait for the ranges.
        """
        unused = self._ahead.unused if self._opens_beside and not self.reference_model.static.unknown else []
        if unused and (job := self._job(self._fp32, baseline=True)) is not None:
            for worker in unused:
                self._ahead.open("", worker, job, is_baseline=True)

    @property
    def _fp32(self) -> PrecisionPlan:
        return self.context.grouped.uniform(Precision.FP32)

    def _job(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, baseline: bool = False, tf32: bool = False
    ) -> measuring.MeasureJob | None:
        assert self.builder is not None
        assert self._timings is not None
        built = self.builder.build_tf32() if tf32 else self.builder.build(plan, baseline=baseline)
        job = None if built is None or isinstance(built, Failure) else self._timings.job(built, plan, which)
        return None if isinstance(job, Failure) else job

    def evaluate_first(self) -> Measurement | None:
        """Measure all-FP32, and begin to open baselines; None where none is opened ahead, or where that fails."""
        measured = self.evaluate(self._fp32) if self._measures_first else None
        if measured is None or isinstance(measured, Failure):
            return None
        self._first[self._fp32.fingerprint, "search"] = measured
        if self.most_ahead > 1:
            self.open_baselines()
        return measured

    def regrouped(self, context: RunContext) -> Toolchain:
        """The toolchain for other groups of the model, in the same processes, which may open baselines still.

        This one is at its end, and is to be closed later: what is being opened reads its files.
        """
        other = self._make(context=context, workers=self._workers)
        other.limit, other._ahead = self.limit, self._ahead
        other._first = {(other._fp32.fingerprint, which): first for (_, which), first in self._first.items()}
        return other

    def listen(self, callback: Callable[[base.Progress], None]) -> None:
        """Call this with the progress of long builds: while ``evaluate`` waits for them, and in its thread."""
        self.worker.on_progress = callback

    def start_ahead(self) -> None:
        """Start the processes of after the next ``restart``, which load libraries meanwhile, and touch no device."""
        for worker in (self.worker, *self._ahead.beside) if self._has_room else ():
            worker.start_ahead(f"{measuring.__name__}:load_libraries")

    def restart(self) -> None:
        """End the worker process; the next job starts a new one. What runs beside it is ended, too."""
        self.reference_model.stop_observing()
        self._ahead.restart(self.worker, *self._workers.beside, self._workers.tf32)

    def close(self) -> None:
        """End the workers, and delete what is not kept. Idempotent."""
        self._workers.close()
        self._let_go()

    def _let_go(self) -> None:
        self.reference_model.stop_observing()
        self.prediction.close()
        if self.builder is not None:
            self.builder.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
