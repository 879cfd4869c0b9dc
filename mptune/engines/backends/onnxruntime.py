"""The backend of ONNX Runtime: sessions of the typed model, on the GPU or the CPU here."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mptune.engines.backends.backend import Availability, BackendStatus, Bench, ModelBuilder, Place
from mptune.engines.base import Failure, MissingKernel
from mptune.engines.jobs.placement import PlacementJob
from mptune.engines.ort.cuda_session import NO_TF32, OrtEngine, probe
from mptune.engines.ort.fusions import FusionsJob, fused_nodes, may_fuse
from mptune.engines.ort.session import PROVIDERS, SessionOptions
from mptune.graph.facts import attribute
from mptune.graph.fused import FusedNodes
from mptune.graph.loading.model import Model
from mptune.graph.ops import is_written_out
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.targets.costs import is_convolution, is_convolutional

if TYPE_CHECKING:
    from mptune.targets.detect import Gpu

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
            return Availability("measures", "onnxruntime-cpu", notes=(CPU_WARNING,), environment=NO_TF32)
        if place.gpu is None:
            return Availability()
        reason = probe("cuda")
        if reason is None:
            return Availability("measures", "onnxruntime-cuda", environment=NO_TF32)
        gpu = place.gpu
        refusal = f"--engine onnxruntime cannot measure on {gpu.name}: {reason}", CUDA_INSTALL
        title = "" if gpu.is_jetson else "onnxruntime-cuda"  # a Jetson has no wheel of onnxruntime-gpu
        return Availability("", title, reason, refusal, f"{gpu.name} cannot be measured: {reason}")

    def statuses(self, gpus: Sequence[Gpu]) -> tuple[BackendStatus, ...]:
        installed = _version("onnxruntime-gpu") or _version("onnxruntime")
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

    def builder(self, bench: Bench) -> OrtBuilder:
        return OrtBuilder(bench)


ONNXRUNTIME = OnnxRuntime()


class OrtBuilder(ModelBuilder):
    """Sessions of typed models; the provider that computes the reference computes the candidates, too."""

    def __init__(self, bench: Bench) -> None:
        """Nothing is written or asked yet."""
        super().__init__(bench, self._engine)
        self.provider = bench.provider
        self.fuses = bench.provider != "cuda"  # The CUDA provider runs a kernel for each node.
        # The CPU provider computes FP16 in FP32, and leaves out roundings between nodes.
        self.emulation_holds = bench.provider != "cpu"
        self._grouped = bench.workload.grouped
        self._call = bench.call

    def _engine(self, path: Path, plan: PrecisionPlan) -> OrtEngine:
        settings = self.bench.settings
        options = SessionOptions(
            self.provider,
            tf32=settings.tf32 and bool(plan.reduced_groups),  # The all-FP32 plan is built as the baseline is.
            tf32_by_environment=self.tf32_by_environment,
            latency=settings.latency,
        )
        return OrtEngine(path, options)

    @cached_property
    def tf32_by_environment(self) -> bool:
        """How the sessions that are timed are opened (``SessionOptions``); asks the worker for shapes the first time.

        Where convolutions are a good part of the work, both should be as fast as possible without TF32. Elsewhere it
        matters more that no matrix product ever uses TF32.
        """
        model = self.bench.workload.model
        has_convolution = self.provider == "cuda" and any(is_convolution(node) for node in model.nodes)
        shapes = self.bench.shapes() if has_convolution else {}
        return is_convolutional(model, shapes) if shapes else has_convolution

    def missing_kernels(self, precision: Precision) -> tuple[MissingKernel, ...] | Failure:
        """See ``NamesKernels``; no node can leave the CPU provider, the last one, but some do not run there in FP16.

        Of BF16 the CPU is not asked: no profile of a CPU has it.
        """
        if self.provider == "cpu":
            return _refused_by_cpu(self.bench.workload.model) if precision is Precision.FP16 else ()
        if precision is Precision.BF16:
            return self.unopened_in_bf16()
        grouped = self._grouped
        kept = {group.id: Precision.FP32 for group in grouped.groups if group.pinned is not None}
        with self.written(grouped.uniform(Precision.FP16).replace(kept), "all-fp16") as path:
            return self._call(
                PlacementJob(path, self.typed_model(grouped.uniform(Precision.FP32), baseline=True), self.provider)
            )

    def fused_nodes(self) -> tuple[FusedNodes, ...] | Failure:
        """See ``NamesKernels``; asks a session of the all-FP16 plan once, if the model has such nodes."""
        return self._fused

    @cached_property
    def _fused(self) -> tuple[FusedNodes, ...] | Failure:
        grouped = self._grouped
        if not may_fuse(grouped):
            return ()
        with self.written(grouped.uniform(Precision.FP16), "fusions") as path, _folder(path) as folder:
            answer = self._call(FusionsJob(path, folder, self.provider))
        return answer if isinstance(answer, Failure) else fused_nodes(grouped, answer)

    def unopened_in_bf16(self) -> tuple[MissingKernel, ...] | Failure:
        """The nodes without a BF16 kernel: where no provider has one the session does not open, and names one node.

        An operator that ONNX defines by others is written out where it has no kernel: then one of those is named.
        """
        grouped, lacking = self._grouped, set[str]()
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
        grouped = self._grouped
        kept = [g.id for g in grouped.groups if g.pinned is not None or not lacking.isdisjoint(g.ops)]
        plan = grouped.uniform(Precision.BF16).replace(dict.fromkeys(kept, Precision.FP32))
        with self.written(plan, "all-bf16") as path:
            answer = self._call(
                PlacementJob(path, self.typed_model(grouped.uniform(Precision.FP32), baseline=True), self.provider)
            )
        return answer, {op for g in grouped.groups if g.id not in kept for op in g.ops}


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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
