"""The backend of ONNX Runtime: sessions of the typed model, on the GPU or the CPU here."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.backends.backend import Availability, BackendStatus, Built, ModelBuilder, Place
from mptune.engines.base import Failure, MissingKernel
from mptune.engines.environment import installed_versions
from mptune.engines.jobs.placement import PlacementJob
from mptune.engines.ort.cuda_session import OrtEngine, probe
from mptune.engines.ort.fusions import FusionsJob, fused_nodes, may_fuse
from mptune.engines.ort.session import PROVIDERS, SessionOptions, Tf32
from mptune.graph.facts import attribute
from mptune.graph.fused import FusedNodes
from mptune.graph.loading.model import Model
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
_REFUSED_BY_CPU = {"ScatterElements": (b"add", b"mul"), "ScatterND": (b"add", b"mul", b"max", b"min")}
"""Operator -> the reductions that its FP16 kernel of the CPU provider refuses when it runs (ONNX Runtime 1.31)."""
CPU_WARNING = (
    "FP16 is seldom faster on a CPU, where ONNX Runtime computes most of it in FP32 and pays for the Casts: give"
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
        """Nothing is written or asked yet."""
        super().__init__(reference, self._engine)
        self.provider = reference.provider
        self.fuses = self.provider != "cuda"  # The CUDA provider runs a kernel for each node.
        # The CPU provider computes FP16 in FP32, and leaves out roundings between nodes.
        self.emulation_holds = self.provider != "cpu"
        self._grouped = self.context.grouped

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
        """How the sessions that are timed are opened (``SessionOptions``); asks the worker for shapes the first time.

        Where convolutions are a good part of the work, both should be as fast as possible without TF32. Elsewhere it
        matters more that no matrix product ever uses TF32.
        """
        model = self.context.model
        has_convolution = self.provider == "cuda" and any(is_convolution(node) for node in model.nodes)
        shapes = self.reference.shapes if has_convolution else {}
        return is_convolutional(model, shapes) if shapes else has_convolution

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``Toolchain``; no node can leave the CPU provider, the last one, but some do not run there in FP16.

        Of BF16 the CPU is not asked: no profile of a CPU has it.
        """
        if self.provider == "cpu":
            return _refused_by_cpu(self.context.model) if precision is Precision.FP16 else ()
        return self.unopened_in_bf16() if precision is Precision.BF16 else self._moved(precision, frozenset())[0]

    def _moved(
        self, precision: Precision, lacking: AbstractSet[str]
    ) -> tuple[tuple[MissingKernel, ...] | Failure, frozenset[str]]:
        """Open the plan that is reduced wherever it may be, without the groups of operators that lack a kernel.

        Returns the nodes that another provider runs than in FP32, and the operators that were reduced.
        """
        grouped = self._grouped
        reduced = [g for g in grouped.groups if g.pinned is None and lacking.isdisjoint(g.ops)]
        fp32 = grouped.uniform(Precision.FP32)
        with self.written(fp32.replace({g.id: precision for g in reduced}), f"all-{precision.value}") as path:
            answer = self.reference.worker.call(
                PlacementJob(path, self.typed_model(fp32, baseline=True), self.provider)
            )
        return answer, frozenset(op for group in reduced for op in group.ops)

    def unopened_in_bf16(self) -> tuple[MissingKernel, ...] | Failure:
        """The nodes without a BF16 kernel: where no provider has one the session does not open, and names one node.

        An operator that ONNX defines by others is written out where it has no kernel: then one of those is named.
        """
        grouped, lacking = self._grouped, set[str]()
        while True:
            answer, reduced = self._moved(Precision.BF16, lacking)
            if not isinstance(answer, Failure):
                nodes = (n for n in grouped.model.nodes if n.op_type in lacking and n.name in grouped.owners)
                provider = PROVIDERS[self.provider]
                return (*(MissingKernel(n.name, n.op_type, provider, "") for n in nodes), *answer)
            named = _without_kernel(answer)
            written_out = sorted(op for op in reduced if is_written_out(op, grouped.model.opset))
            if named in reduced:
                lacking.add(named)
            elif named and written_out:
                trials = ((op, self._moved(Precision.BF16, {*lacking, op})[0]) for op in written_out)
                cure = next((op for op, trial in trials if _without_kernel(trial) != named), None)
                lacking.update(written_out if cure is None else {cure})  # all of them where it takes more than one
            else:
                return answer

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        return self._fused

    @cached_property
    def _fused(self) -> tuple[FusedNodes, ...] | Failure:
        """See ``Toolchain``; asks a session of the all-FP16 plan, if the model has such nodes."""
        grouped = self._grouped
        if not may_fuse(grouped):
            return ()
        with self.written(grouped.uniform(Precision.FP16), "fusions") as path:
            folder = path.with_suffix(".session")  # for what the session writes
            try:
                folder.mkdir()
                answer = self.reference.worker.call(FusionsJob(path, folder, self.provider))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return answer if isinstance(answer, Failure) else fused_nodes(grouped, answer)


def _refused_by_cpu(model: Model) -> tuple[MissingKernel, ...]:
    """The nodes whose FP16 kernel refuses to run: "MLFloat16 data type is not supported"."""
    text = "ONNX Runtime's CPU provider does not run {} with this reduction in FP16"
    return tuple(
        MissingKernel(node.name, node.op_type, PROVIDERS["cpu"], "", text.format(node.op_type))
        for node in model.nodes
        if node.is_standard and attribute(node, "reduction") in _REFUSED_BY_CPU.get(node.op_type, ())
    )


def _without_kernel(answer: object) -> str:
    """The operator that ONNX Runtime names as one that no provider has a kernel for; "" at every other answer."""
    named = _NO_KERNEL.search(answer.message) if isinstance(answer, Failure) else None
    return "" if named is None else named["op"]
