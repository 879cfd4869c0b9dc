"""The toolchain that builds, computes and times with ONNX Runtime on the device here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.base import ErrorSource, Failure, Measurement, MissingKernel, Profiling, SampleSet
from mptune.engines.environment import Environment
from mptune.engines.jobs.layer_times import LayerTime, OrtProfileJob
from mptune.engines.jobs.measure import MeasureJob, ReopenJob
from mptune.engines.jobs.placement import PlacementJob
from mptune.engines.jobs.samples import Scoring
from mptune.engines.ort.fusions import FusionsJob, fused_nodes, may_fuse
from mptune.engines.ort.session import PROVIDERS, Provider
from mptune.engines.timing.latency import LatencySource
from mptune.engines.timing.spread import SessionTiming
from mptune.engines.toolchains.shared import BaseToolchain, Profiler, Timer
from mptune.engines.workload import Workload
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.lookup import attribute
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.schemas import is_written_out
from mptune.settings import SearchSettings

if TYPE_CHECKING:
    from mptune.targets.target import Target

_NO_KERNEL = re.compile(r"Could not find an implementation for (?P<op>\w+)\(\d+\)")
"""How ONNX Runtime says that no provider has a kernel (its error NOT_IMPLEMENTED)."""

_REFUSED_BY_CPU = {"ScatterElements": (b"add", b"mul"), "ScatterND": (b"add", b"mul", b"max", b"min")}
"""Operator -> the reductions that its FP16 kernel of the CPU provider refuses when it runs (ONNX Runtime 1.31)."""

CPU_WARNING = (
    "FP16 is seldom faster on a CPU, where ONNX Runtime computes most of it in FP32 and pays for the Casts: give"
    " --target a GPU or a profile (`mptune targets` lists them)"
)


class OnnxRuntimeToolchain(BaseToolchain):
    """Builds, computes and times with ONNX Runtime on the GPU or the CPU here."""

    name = "onnxruntime"
    latency_source: LatencySource = "measured"
    error_source: ErrorSource = "measured"

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
        """See ``BaseToolchain``; the provider computes the candidates, too."""
        super().__init__(target, workload, settings, provider, warnings, device=device)
        self._timer = Timer(workload.workspace.data_dir, provider, self.device, settings.latency)
        self._profiler = Profiler(workload.grouped)
        self._baseline: Path | None = None
        self._convolves: bool | None = None
        self._fused: tuple[FusedNodes, ...] | None = None

    @property
    def fuses(self) -> bool:
        """See ``BaseToolchain``; the CUDA provider runs a kernel for each node."""
        return self.provider != "cuda"

    @property
    def profiling(self) -> Profiling:
        """See ``Toolchain``; of the CUDA provider's kernels ONNX Runtime times the launch alone (``ort_profile``)."""
        return "none" if self._profiler.failed or self.provider == "cuda" else "apart"

    def environment(self) -> Environment:
        """See ``Toolchain``."""
        environment = super().environment()
        return environment.with_warnings(CPU_WARNING) if self.provider == "cpu" else environment

    @property
    def emulation_holds(self) -> bool:
        """See ``Toolchain``; the CPU provider computes FP16 in FP32, and leaves out roundings between nodes."""
        return self.provider != "cpu"

    @property
    def tf32_by_environment(self) -> bool:
        """How the sessions that are timed are opened (``SessionOptions``); asks the worker for shapes the first time.

        Where convolutions are a good part of the work, both should be as fast as possible without TF32. Elsewhere it
        matters more that no matrix product ever uses TF32.
        """
        if self._convolves is None:
            from mptune.targets.costs import is_convolution, is_convolutional

            model = self.workload.model
            has_convolution = self.provider == "cuda" and any(is_convolution(node) for node in model.nodes)
            shapes = self._shapes() if has_convolution else {}
            self._convolves = is_convolutional(model, shapes) if shapes else has_convolution
        return self._convolves

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        """See ``Toolchain``."""
        with self._written(plan) as path:
            result = self._call(self._measure_job(plan, path, which))
        measurement = self._with_memory(plan, self._timer.corrected(plan, result))
        if isinstance(measurement, Failure) or not profile or self.profiling == "none":
            return measurement
        return self._profiler.profile(measurement, partial(self._layer_times, plan))

    def close(self) -> None:
        """See ``Toolchain``."""
        super().close()
        if self._baseline is not None:
            self._baseline.unlink(missing_ok=True)
            self._baseline = None

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``Toolchain``; from the CPU provider, the last one, no node can fall, but some do not run there in FP16.

        Of BF16 the CPU is not asked: no profile of a CPU has it.
        """
        if self.provider == "cpu":
            return _refused_by_cpu(self.workload.model) if precision is Precision.FP16 else ()
        if precision is Precision.BF16:
            return self.unopened_in_bf16()
        grouped = self.workload.grouped
        kept = {group.id: Precision.FP32 for group in grouped.groups if group.pinned is not None}
        with self._written(grouped.uniform(Precision.FP16).replace(kept), "all-fp16") as path:
            return self._call(PlacementJob(path, self._baseline_model(), self.provider))

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """See ``Toolchain``; asks a session of the all-FP16 plan once, if the model has such nodes."""
        grouped = self.workload.grouped
        if self._fused is None and not may_fuse(grouped):
            self._fused = ()
        if self._fused is None:
            with self._written(grouped.uniform(Precision.FP16), "fusions") as path, _folder(path) as folder:
                answer = self._call(FusionsJob(path, folder, self.provider))
            if isinstance(answer, Failure):
                self._fused = ()  # It is not asked again: each step is emulated.
                return answer
            self._fused = fused_nodes(grouped, answer)
        return self._fused

    def unopened_in_bf16(self) -> tuple[MissingKernel, ...] | Failure:
        """The nodes without a BF16 kernel: where no provider has one the session does not open, and names one node.

        An operator that ONNX defines by others is written out where it has no kernel: then one of those is named.
        """
        grouped, lacking = self.workload.grouped, set[str]()
        while True:
            answer, left = self._open_in_bf16(lacking)
            if not isinstance(answer, Failure):
                nodes = (n for n in grouped.model.nodes if n.op_type in lacking and n.name in grouped.owners)
                provider = PROVIDERS[self.provider]
                return (*(MissingKernel(n.name, n.op_type, provider, "") for n in nodes), *answer)
            named = _without_kernel(answer)
            if not named:
                return answer
            if named in left:
                lacking.add(named)
                continue
            written_out = sorted(op for op in left if is_written_out(op, grouped.model.opset))
            if not written_out:
                return answer
            cured = (op for op in written_out if _without_kernel(self._open_in_bf16({*lacking, op})[0]) != named)
            lacking.update(next(([op] for op in cured), written_out))  # all of them where it takes more than one

    def _open_in_bf16(self, lacking: set[str]) -> tuple[tuple[MissingKernel, ...] | Failure, set[str]]:
        """Open the all-BF16 plan without the groups of some operators; what it says, and the operators in BF16."""
        grouped = self.workload.grouped
        kept = [g.id for g in grouped.groups if g.pinned is not None or not lacking.isdisjoint(g.ops)]
        plan = grouped.uniform(Precision.BF16).replace(dict.fromkeys(kept, Precision.FP32))
        with self._written(plan, "all-bf16") as path:
            answer = self._call(PlacementJob(path, self._baseline_model(), self.provider))
        return answer, {op for g in grouped.groups if g.id not in kept for op in g.ops}

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        """See ``Toolchain``."""
        with self._written(plan) as path:
            job = ReopenJob(self._measure_job(plan, path, "search"), count)
            return self._timer.with_reopened(plan, self._call(job))

    def _measure_job(self, plan: PrecisionPlan, path: Path, which: SampleSet) -> MeasureJob:
        workspace = self.workload.workspace
        return MeasureJob(
            model=path,
            baseline=self._baseline_model(),
            samples=workspace.samples(which),
            timing_samples=workspace.samples("search"),
            reference=workspace.reference(which),
            provider=self.provider,
            tf32=self.settings.tf32 and bool(plan.reduced_groups),  # The all-FP32 plan is built as the baseline is.
            tf32_by_environment=self.tf32_by_environment,
            latency=self.settings.latency,
            repetitions=self._timer.repetitions,
            enough=self._timer.standings.enough(plan.fingerprint),
            ignored=self.settings.ignore,
            metric=self.settings.metric,
            dependent=self.workload.dependent_outputs,
            scoring=Scoring.of(self.settings, workspace.sketches(plan, which)),
        )

    def _layer_times(self, plan: PrecisionPlan) -> tuple[LayerTime, ...] | Failure:
        """The time of each layer of a plan's engine, in another session."""
        with self._written(plan) as path, _folder(path) as folder:
            return self._call(OrtProfileJob(path, self.workload.workspace.samples("search"), folder))

    @contextmanager
    def _written(self, plan: PrecisionPlan, name: str | None = None) -> Iterator[Path]:
        """The typed model of a plan, which is deleted at the end."""
        path = self._typed_model(plan, name)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _typed_model(self, plan: PrecisionPlan, name: str | None = None) -> Path:
        """Write the typed model of a plan beside the weight bank."""
        path = self.workload.workspace.scratch(name or plan.fingerprint)
        return self.workload.rewriter.write(plan, path, self._reference_model.folded_values)

    def _baseline_model(self) -> Path:
        if self._baseline is None:
            self._baseline = self._typed_model(self.workload.grouped.uniform(Precision.FP32), "baseline")
        return self._baseline


@contextmanager
def _folder(model: Path) -> Iterator[Path]:
    """A folder beside a typed model, for what a session writes; it is deleted at the end."""
    folder = model.with_suffix(".session")
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused_by_cpu(model: Model) -> tuple[MissingKernel, ...]:
    """The nodes whose FP16 kernel refuses to run: "MLFloat16 data type is not supported"."""
    return tuple(
        MissingKernel(
            node.name,
            node.op_type,
            PROVIDERS["cpu"],
            "",
            f"ONNX Runtime's CPU provider does not run {node.op_type} with this reduction in FP16",
        )
        for node in model.nodes
        if node.is_standard and attribute(node, "reduction") in _REFUSED_BY_CPU.get(node.op_type, ())
    )


def _without_kernel(answer: object) -> str:
    """The operator that ONNX Runtime names as one that no provider has a kernel for; "" at every other answer."""
    named = _NO_KERNEL.search(answer.message) if isinstance(answer, Failure) else None
    return "" if named is None else named["op"]
