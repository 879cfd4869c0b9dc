"""The engines of a run, one per plan; and which operators TensorRT's parser lacks, asked before a search begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mptune.engines.base import EngineError, Failure, Measurement, MissingKernel
from mptune.engines.tensorrt.builder import BuildOptions, parse_network
from mptune.engines.tensorrt.jobs import BuildJob, BuildResult
from mptune.engines.tensorrt.library import Kind, load_library, open_log
from mptune.engines.worker.child import WorkerState
from mptune.engines.worker.parent import Worker
from mptune.engines.workload import Workload
from mptune.graph.loading.model import Model
from mptune.graph.plan import PrecisionPlan

PARSED = frozenset(
    {
        "Attention",
        "CausalConvWithState",
        "DequantizeLinear",
        "GatherND",
        "Gelu",
        "GridSample",
        "GroupQueryAttention",
        "LinearAttention",
        "MatMulNBits",
        "MultiHeadAttention",
        "Pad",
        "QMoE",
        "QuantizeLinear",
        "Range",
        "RotaryEmbedding",
        "SkipSimplifiedLayerNormalization",
        "Trilu",
    }
)

"""Operators of com.microsoft that the parser of TensorRT-RTX 1.7 takes by their name, some of them in some forms only
(``OnnxParser.supports_operator``); older parsers have fewer."""

_NOT_IN_BF16 = frozenset({"GRU", "HardSwish"})

"""Operators of ONNX that the parser of TensorRT-RTX 1.7 takes in FP32 and FP16 alone: it subtracts a GRU's gate from an
FP32 one ("ElementWiseOperation SUB must have same input types. But they are of types Float and BFloat16"); and "Only
FLOAT, HALF or INT8 input is supported for the HardSwish operator"."""

CURE = "give the model from before ONNX Runtime's optimiser, or --engine onnxruntime"


@dataclass(frozen=True)
class ParseJob:
    """Whether the parser of TensorRT or TensorRT-RTX takes a model: None where it does, else why not."""

    kind: Kind
    model: Path

    def run(self, state: WorkerState) -> str | None:
        """See the class."""
        library = load_library(self.kind)
        try:
            parse_network(library, self.model, open_log(library.trt))
        except EngineError as error:
            return error.message
        return None


def foreign_operators(model: Model) -> Counter[str]:
    """Operators of other domains than ONNX's own, with their domain, and how many nodes each has."""
    return Counter(f"{node.domain}.{node.op_type}" for node in model.nodes if not node.is_standard)


def unparsed_operators(model: Model) -> str:
    """The operators of ONNX Runtime's domains that no parser of TensorRT takes, as a text; "" where there are none."""
    found = {
        name: count
        for name, count in foreign_operators(model).items()
        if name.startswith("com.microsoft") and name.removeprefix("com.microsoft.") not in PARSED
    }
    return ", ".join(f"{name} ({count} nodes)" if count > 1 else name for name, count in found.items())


def refused_in_bf16(model: Model, kind: Kind) -> tuple[MissingKernel, ...]:
    """The nodes that the parser refuses in BF16."""
    names = (node for node in model.nodes if node.is_standard and node.op_type in _NOT_IN_BF16)
    wanted = "TensorRT-RTX" if kind == "tensorrt-rtx" else "TensorRT"
    others = "" if kind == "tensorrt-rtx" else "; TensorRT's own has not been tried"
    return tuple(
        MissingKernel(
            node.name,
            node.op_type,
            wanted,
            "",
            f"the ONNX parser of TensorRT-RTX 1.7 refuses {node.op_type} in BF16{others}",
        )
        for node in names
    )


_GRACE_S = 20.0

"""TensorRT is asked to stop at the deadline; the worker is killed this much later."""


@dataclass(frozen=True)
class StoredEngine:
    """The engine file of a plan.

    Attributes:
        build_s: seconds to build it; 0 where the file existed.
    """

    path: Path
    build_s: float = 0.0
    warnings: tuple[str, ...] = ()


class EngineStore:
    """Builds engines of plans in the worker and finds them again.

    Two builds of a plan may choose different kernels and differ in speed, so a plan that is measured again (in a
    confirmation) is measured with the file of its first build.
    """

    def __init__(
        self,
        worker: Worker,
        workload: Workload,
        options: BuildOptions,
        version: str,
        timeout_s: float,
        *,
        alone: bool = False,
    ) -> None:
        """Nothing is built yet.

        Args:
            options: how engines are built; ``tf32`` is for plans that have FP16 groups, all-FP32 is the baseline.
            version: of the library; engines of another version cannot be loaded.
            alone: close the worker's open sessions before a build (``BuildJob``).
        """
        self._worker = worker
        self._workload = workload
        self._workspace = workload.workspace
        self._options = options
        self._version = version
        self._timeout_s = timeout_s
        self._alone = alone

    def find_or_build(self, plan: PrecisionPlan) -> StoredEngine | Failure:
        """The engine of a plan: its file where there is one, else built."""
        path = self._path(plan)
        if path.exists():
            return StoredEngine(path)
        model = self._workload.rewriter.write(plan, self._workspace.scratch(f"build-{plan.fingerprint}"))
        try:
            job = BuildJob(
                model=model,
                engine_path=path,
                options=self._options_for(plan),
                samples=(self._workspace.samples("search"), self._workspace.samples("held_out")),
                timeout_s=self._timeout_s,
                alone=self._alone,
            )
            built: BuildResult | Failure = self._worker.call(job, self._timeout_s + _GRACE_S)
        finally:
            model.unlink(missing_ok=True)
        return built if isinstance(built, Failure) else StoredEngine(path, built.build_s, built.warnings)

    def evaluate(self, plan: PrecisionPlan, evaluate: Callable[[], Measurement | Failure]) -> Measurement | Failure:
        """Build a plan's engine, evaluate the plan, and name the engine in the measurement.

        An engine whose plan failed is deleted, unless the machine was at fault.

        Args:
            evaluate: measures or predicts it; not called where the engine cannot be built.
        """
        stored = self.find_or_build(plan)
        if isinstance(stored, Failure):
            return stored
        result = evaluate()
        if isinstance(result, Failure):
            if not result.is_machine_fault:
                self.discard(plan)
            return result
        warnings = tuple(dict.fromkeys((*stored.warnings, *result.warnings)))
        return replace(result, build_s=stored.build_s, engine_path=stored.path, warnings=warnings)

    def discard(self, plan: PrecisionPlan) -> None:
        """Delete a plan's engine file, so that a damaged one is not used again."""
        self._path(plan).unlink(missing_ok=True)

    def _path(self, plan: PrecisionPlan) -> Path:
        return self._workspace.engines_dir / f"{plan.fingerprint}.{self._options.kind}-{self._version}.engine"

    def _options_for(self, plan: PrecisionPlan) -> BuildOptions:
        # The all-FP32 plan is the baseline, which never uses TF32.
        return replace(self._options, tf32=self._options.tf32 and bool(plan.reduced_groups))
