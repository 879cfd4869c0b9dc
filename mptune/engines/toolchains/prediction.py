"""What is predicted of engines: latency by the target's roofline, errors by emulation, memory, missing kernels."""

from __future__ import annotations

import math
from dataclasses import replace

from mptune.data.metrics.parts import ADD_IN_SQUARES
from mptune.engines.backend import Builder
from mptune.engines.base import Failure, Measurement, MissingKernel, SampleSet, Stage
from mptune.engines.latency import MARGIN, Latency
from mptune.engines.tensorrt.backend import refused_in_bf16
from mptune.engines.toolchains.emulation import Emulation
from mptune.engines.toolchains.reference import ReferenceModel
from mptune.graph.groups import GroupedModel
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rounding_steps import with_rounding_steps
from mptune.targets.costs import plan_memory
from mptune.targets.roofline import LatencyTerms, roofline
from mptune.targets.target import EngineMemory, Target


class Prediction:
    """Predicts for plans of one model on a target, with the shapes that were observed."""

    def __init__(self, reference: ReferenceModel, target: Target, builder: Builder | None) -> None:
        """Without a builder engines are taken to round as TensorRT's do."""
        self._reference, self._context, self._target, self._builder = reference, reference.context, target, builder
        self.fuses = builder is None or builder.fuses  # see ``Builder``
        self._terms: dict[bool, LatencyTerms] = {}
        self._fastest_ms = math.inf  # of the plans within the limit
        self._emulations: dict[str, tuple[GroupedModel, Emulation]] = {}

    @property
    def emulation(self) -> Emulation:
        """Emulates plans; made when it is first needed."""
        return self.emulation_of(self._context.grouped)

    def emulation_of(self, grouped: GroupedModel) -> Emulation:
        """Emulates plans of these groups of the model: the run's, or others, of which the last are kept."""
        name, reference = "emulated" if grouped is self._context.grouped else "other groups", self._reference
        if name not in self._emulations or self._emulations[name][0] is not grouped:
            if name in self._emulations:
                self._emulations[name][1].close()
            answer = () if self._builder is None else self._builder.fused_nodes()
            fused = () if isinstance(answer, Failure) else answer  # where the engine does not say, each step is rounded
            computed = grouped if self.fuses else with_rounding_steps(grouped, fused, self._context.precisions)
            of_model = computed, reference.provider, reference.worker, reference.shapes
            self._emulations[name] = grouped, Emulation(self._context, *of_model, fused, name)
        return self._emulations[name][1]

    def terms(self, *, tf32: bool) -> LatencyTerms | Failure:
        """The roofline's terms, computed once."""
        ranges = self._reference.observe()
        if isinstance(ranges, Failure):
            return replace(ranges, stage=Stage.TIME)
        if tf32 not in self._terms:
            self._terms[tf32] = roofline(self._context.grouped, self._target, self._reference.shapes, tf32=tf32)
        return self._terms[tf32]

    def measurement(
        self, plan: PrecisionPlan | None, which: SampleSet = "search", limit: float | None = None
    ) -> Measurement | Failure:
        """The predicted latency and the emulated error of a plan; None is all-FP32 with TF32."""
        terms = self.terms(tf32=plan is None or self._context.settings.tf32)
        if isinstance(terms, Failure):
            return terms
        latency_ms = terms.base_ms - terms.tf32_gain_ms if plan is None else terms.predict(plan)
        most, settings = math.inf, self._context.settings
        if limit is not None and which == "search" and settings.metric in ADD_IN_SQUARES and not settings.ignore:
            most = limit if latency_ms <= (1.0 + MARGIN["predicted"]) * self._fastest_ms else 0.0
        errors = self.emulation.tf32_errors() if plan is None else self.emulation.errors([plan], which, limit=most)
        if isinstance(errors, Failure):
            return errors
        if plan is not None and limit is not None and most < math.inf and errors[0].value(settings.metric) <= limit:
            self._fastest_ms = min(latency_ms, self._fastest_ms)
        return Measurement(Latency.predicted(latency_ms), None, 1.0, errors[0], "emulated", build_s=0.0)

    def memory(self, plan: PrecisionPlan, measured: EngineMemory | None) -> EngineMemory:
        """What a plan's engine takes: as its own figures say, else predicted."""
        memory = plan_memory(self._context.rewriter.types, plan, self._reference.shapes)
        if measured is None:
            return memory
        return replace(memory, context_bytes=measured.context_bytes, source=measured.source)

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...]:
        """The nodes that TensorRT is expected to refuse in a reduced precision."""
        return refused_in_bf16(self._context.model, "tensorrt") if precision is Precision.BF16 else ()

    def close(self) -> None:
        """Delete the models that were written."""
        for _, emulation in self._emulations.values():
            emulation.close()
