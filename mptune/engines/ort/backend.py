"""The backend of ONNX Runtime: sessions of the typed model, on the GPU or the CPU here."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Sequence, Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.backend import Availability, BackendStatus, Built, ModelBuilder, Place
from mptune.engines.base import Failure, MissingKernel
from mptune.engines.environment import installed_versions
from mptune.engines.ort.cuda_session import OrtEngine, probe
from mptune.engines.ort.fusions import FusionsJob, PlacementJob, fused_nodes, may_fuse
from mptune.engines.ort.session import PROVIDERS, SessionOptions, Tf32
from mptune.graph.facts import FusedNodes
from mptune.graph.ops import is_written_out
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.targets.costs import is_convolution, is_convolutional

if TYPE_CHECKING:
    from mptune.engines.toolchains.reference import ReferenceModel
    from mptune.targets.detect import Gpu
    from mptune.targets.target import Target

INSTALL = "pip install onnxruntime-gpu" if platform.machine() in ("x86_64", "AMD64") else "pip install onnxruntime"
CUDA_INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]' and a driver for its CUDA version"
_NO_KERNEL = re.compile(r"Could not find an implementation for (?P<op>\w+)\(\d+\)")
"""How ONNX Runtime says that no provider has a kernel (its error NOT_IMPLEMENTED)."""
CPU_WARNING = (
    "FP16 is rarely faster on a CPU, where ONNX Runtime computes most of it in FP32 and pays for the Casts: give"
    " --target a GPU or a profile (`mptune targets` lists them)"
)


class OnnxRuntime:
    """Measures on a CPU, and on the GPU here with the CUDA provider."""

    name = "onnxruntime"

    def available(self, place: Place) -> Availability:
        if place.target.kind == "cpu":
            return Availability("measures", "onnxruntime-cpu", notes=(CPU_WARNING,))
        if place.gpu is None:
            return Availability()
        reason = probe("cuda")
        if reason is None:
            return Availability("measures", "onnxruntime-cuda")
        title = "" if place.gpu.is_jetson else "onnxruntime-cuda"  # a Jetson has no wheel of onnxruntime-gpu
        return Availability("", title, reason, CUDA_INSTALL, is_unexpected=True)

    def statuses(self, gpus: Sequence[Gpu]) -> tuple[BackendStatus, ...]:
        versions = installed_versions()
        installed = versions.get("onnxruntime-gpu") or versions.get("onnxruntime")
        if installed is None:
            return (BackendStatus("onnxruntime-cpu", False, "not installed", INSTALL),)
        reason = probe("cuda") if gpus else "no GPU was found"
        text = f"{installed}: measures on {gpus[0].name}" if gpus and reason is None else f"{installed}: {reason}"
        # There are no wheels of onnxruntime-gpu for a Jetson, and TensorRT measures there.
        wanted = gpus and reason is not None and not gpus[0].is_jetson
        return (
            BackendStatus("onnxruntime-cuda", reason is None, text, CUDA_INSTALL if wanted else ""),
            BackendStatus("onnxruntime-cpu", True, f"{installed}: measures with --target cpu, emulates FP16 errors"),
        )

    def builder(self, reference: ReferenceModel, target: Target, gpu: Gpu | None) -> OrtBuilder:
        return OrtBuilder(reference)


ONNXRUNTIME = OnnxRuntime()


class OrtBuilder(ModelBuilder):
    """Sessions of typed models; the provider that computes the reference computes the candidates, too."""

    def __init__(self, reference: ReferenceModel) -> None:
        super().__init__(reference, self._engine)
        self.provider = reference.provider
        self.fuses = self.provider != "cuda"  # The CUDA provider runs a kernel for each node.
        # The CPU provider computes FP16 in FP32, and leaves out roundings between nodes.
        self.emulation_holds = self.provider != "cpu"
        self.opens_beside = self.provider == "cuda"
        self._grouped = self.context.grouped
        self._fused: tuple[FusedNodes, ...] | Failure | None = None

    def _engine(self, path: Path, plan: PrecisionPlan) -> OrtEngine:
        settings = self.context.settings
        # The all-FP32 plan is built as the baseline is.
        uses_tf32 = settings.tf32 and bool(plan.reduced_groups)
        tf32: Tf32 = "on" if uses_tf32 else "off by environment" if self.tf32_by_environment else "off"
        options = SessionOptions(self.provider, "timed", tf32=tf32, cuda_graph=settings.latency.cuda_graph)
        return OrtEngine(path, options)

    def build_tf32(self) -> Built | Failure | None:
        if self.provider == "cpu":
            return None
        plan = self._grouped.uniform(Precision.FP32)
        engine = self._engine(self.typed_model(plan, baseline=True), plan)
        return Built(replace(engine, options=replace(engine.options, tf32="on")))

    @cached_property
    def tf32_by_environment(self) -> bool:
        """Whether convolutions are a good part of the work: elsewhere it matters more that no product uses TF32."""
        model = self.context.model
        if self.provider == "cpu" or not any(map(is_convolution, model.nodes)):
            return False
        static = self.reference.static
        shapes = self.reference.shapes if static.unknown else static.shapes  # what is observed comes later
        return not shapes or is_convolutional(model, shapes)

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``Toolchain``; no node can leave the CPU provider, the last one."""
        return () if self.provider == "cpu" else self.nodes_without_kernel(precision)

    def nodes_without_kernel(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """The nodes that another provider runs than in FP32, or none: opens plans reduced wherever they may be.

        Where no provider has a kernel the session does not open, and names one node: its operator stays FP32 then. An
        operator that ONNX defines by others is written out where it has no kernel: then one of those is named.
        """
        grouped, lacking = self._grouped, set[str]()
        fp32, provider = grouped.uniform(Precision.FP32), PROVIDERS[self.provider]

        def opened(lacking: AbstractSet[str]) -> tuple[tuple[MissingKernel, ...] | Failure, str, set[str]]:
            """Without groups of these operators: the nodes that moved, an operator without kernel, reduced ones."""
            reduced = [g for g in grouped.groups if g.pinned is None and lacking.isdisjoint(g.ops)]
            with self.written(fp32.replace({g.id: precision for g in reduced}), f"all-{precision.value}") as path:
                job = PlacementJob(path, self.typed_model(fp32, baseline=True), self.provider)
                answer = self.reference.worker.call(job)
            named = _NO_KERNEL.search(answer.message) if isinstance(answer, Failure) else None
            return answer, "" if named is None else named["op"], {op for group in reduced for op in group.ops}

        while True:
            answer, named, reduced = opened(lacking)
            if not isinstance(answer, Failure):
                nodes = (n for n in grouped.model.nodes if n.op_type in lacking and n.name in grouped.owners)
                return (*(MissingKernel(n.name, n.op_type, provider, "") for n in nodes), *answer)
            written_out = sorted(op for op in reduced if is_written_out(op, grouped.model.opset))
            if named in reduced:
                lacking.add(named)
            elif named and written_out:
                cure = next((op for op in written_out if opened({*lacking, op})[1] != named), None)
                lacking.update(written_out if cure is None else {cure})  # all of them where it takes more than one
            else:
                return answer

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """See ``Toolchain``; asks a session of the all-FP16 plan once, if the model has such nodes."""
        if self._fused is None:
            self._fused = self._ask_fused() if may_fuse(self._grouped) else ()
        return self._fused

    def _ask_fused(self) -> tuple[FusedNodes, ...] | Failure:
        with self.written(self._grouped.uniform(Precision.FP16), "fusions") as path:
            folder = path.with_suffix(".session")  # for what the session writes
            try:
                folder.mkdir()
                answer = self.reference.worker.call(FusionsJob(path, folder, self.provider))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return answer if isinstance(answer, Failure) else fused_nodes(self._grouped, answer)
