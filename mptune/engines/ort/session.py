"""Sessions of ONNX Runtime: what its providers share, and the CPU provider.

ONNX Runtime is imported when the first session opens.
"""

from __future__ import annotations

import re
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.lifetime import are_gone, references
from mptune.engines.timing.latency import HostStopwatch, Stopwatch
from mptune.settings import LatencySettings

_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ", re.DOTALL)

# "/onnxruntime_src/.../graph.cc:1423 void ns::Class::method(args) const [with T = x] condition was false. words": a
# source position, a C++ signature, the message.
_POSITION = re.compile(r"\S+\.(?:cc|cpp|cuh|cu|h|hpp):\d+ ")

_SIGNATURE = re.compile(
    r"^(?:[\w:&*<>~,\[\]\s]|::)*?[\w~>]+\([^()]*(?:\([^()]*\)[^()]*)*\)(?: const)?(?: \[with [^\]]*\])? "
)

_LOAD = re.compile(r"Load model from .+? failed:\s*", re.DOTALL)

_NODE = re.compile(
    r"Non-zero status code returned while running (\S+) node\. Name:'([^']*)' Status Message: ", re.DOTALL
)

_OUT_OF_MEMORY = (
    "out of memory",
    "failed to allocate memory",
    "bad_alloc",
    "bad allocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudaerrormemoryallocation",
    "available memory of",
)

_DISK_FULL = ("no space left on device", "disk quota exceeded")

# The device is lost or refuses work: the machine's fault. CUDA numbers from driver_types.h.
_DEVICE_LOST = re.compile(
    r"cuda (?:failure|error) (?:3|46|100|101|214|220|714|802|803|804|999)\b|no cuda-capable device"
    r"|devices? unavailable|uncorrectable ecc|busy or unavailable|fallen off the bus",
    re.IGNORECASE,
)

_OLD_DRIVER = re.compile(r"cuda (?:failure|error) 35\b|driver version is insufficient", re.IGNORECASE)

# A kernel failed and with it the CUDA context: the plan's fault, and the process cannot be used again.
_CRASHED = re.compile(
    r"cuda (?:failure|error) (?:700|702|710|715|716|717|718|719)\b|illegal memory access|unspecified launch failure"
    r"|misaligned address|device-side assert|illegal instruction",
    re.IGNORECASE,
)

_INVALID = ("type error", "shapeinferenceerror", "typeinferenceerror", "bound to different types", "invalid model")


def translate(error: BaseException) -> EngineError:
    """The ``EngineError`` for anything that ONNX Runtime raised."""
    text = str(error).strip()
    return EngineError(classify(text), first_words(text) or type(error).__name__)


def classify(text: str) -> FailureKind:
    """Kind of failure by ONNX Runtime's error code and message."""
    lower = text.lower()
    match = _CODE.match(text)
    code = match.group(1) if match else ""
    if any(words in lower for words in _OUT_OF_MEMORY):
        return FailureKind.OUT_OF_MEMORY
    if any(words in lower for words in _DISK_FULL):
        return FailureKind.DISK_FULL
    if _OLD_DRIVER.search(text):
        return FailureKind.DRIVER
    if _DEVICE_LOST.search(text):
        return FailureKind.DEVICE_LOST
    if _CRASHED.search(text):
        return FailureKind.CRASH
    if code == "NOT_IMPLEMENTED":
        return FailureKind.UNSUPPORTED
    if code in {"INVALID_GRAPH", "INVALID_PROTOBUF", "NO_MODEL"} or any(words in lower for words in _INVALID):
        return FailureKind.INVALID_MODEL
    return FailureKind.ERROR


def first_words(text: str) -> str:
    """The first informative line: without error codes, paths, source positions and C++ signatures."""
    text = _CODE.sub("", text.strip())
    text = _LOAD.sub("", text)
    node = _NODE.search(text)
    where = ""
    if node:
        where = f"{node.group(1)} node {node.group(2)!r}: "
        text = text[node.end() :]
    while position := _POSITION.search(text):
        text = _SIGNATURE.sub("", text[position.end() :], count=1)
    # CUDA failures go on with the host's name, file and expression.
    text = re.split(r"\s*;\s*(?:GPU|hostname|file)\s*=", text)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return where + (lines[0] if lines else "")


Provider = Literal["cpu", "cuda"]
PROVIDERS: Mapping[Provider, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
OPTIMISED_MODEL = "optimised.onnx"
"""In ``optimised_dir`` of ``SessionOptions``: the graph that is run, large constants beside it."""
_OPTIMISED_WEIGHTS = "optimised.weights"
_QUANTISED_KERNEL = "Failed to find kernel for com.microsoft.Q"
_FP8_KERNEL = ("Failed to find kernel for QLinear", "Type 'tensor(float8")
_SAME_NAMES = "two nodes with same node name"
_NORM_FUSION = "LayerNormFusion/"
"""In the name of the node that a fusion makes: ``LayerNormFusion``, or ``SimplifiedLayerNormFusion`` (1.23 to 1.25)."""
_NORM_FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2")
_SIMPLIFIED_NORM_FUSION = "SimplifiedLayerNormFusion"
_LOG_WARNING = 2


@dataclass(frozen=True)
class SessionOptions:
    """How a session is opened."""

    provider: Provider = "cpu"
    tf32: bool = False
    tf32_by_environment: bool = False
    """Where NVIDIA's environment variable switches TF32 off, let it do so alone: convolutions are faster with the
    provider's own option left on, but matrix products may use TF32 at times (``cuda_session``)."""
    latency: LatencySettings = field(default_factory=LatencySettings)
    timing: bool = True
    """The session will be timed. Without it no CUDA graph is prepared, and nothing is bound to the device."""
    optimise: bool = True
    extended: bool = True
    """With the optimisations that ONNX Runtime calls extended: what is written out becomes one operator."""
    optimised_dir: Path | None = None
    """An empty folder for the graph as it was optimised."""
    record_placement: bool = False
    reuses_buffers: bool = True
    """Plan which values share a buffer, in quadratic time (ONNX Runtime 1.31); on a CPU only where a session is timed.
    """
    node_by_node: bool = False
    """No optimisation and no arena: each node is computed as it stands, and memory is given back."""
    arena: bool = True
    """Keep memory of a CPU run for the next; without, a run takes less memory and more time."""
    in_file_order: bool = False
    """Run each node as early as the file's order allows: a value is freed once what reads it there has run."""
    fuses_norms: bool = True
    """Make norms of nodes that write them out; not where an epsilon is computed: a fused norm takes 1e-5 for what is no
    constant (``layer_norm_fusion.cc``, ONNX Runtime 1.31)."""
    threads: int | None = None
    """That one run computes with on a CPU; None takes all cores."""


@dataclass(frozen=True)
class Placed:
    """A node of a session's graph."""

    name: str
    op_type: str
    provider: str


@dataclass(eq=False)
class Bound:
    """Inputs and outputs bound for one set of feeds.

    Stopwatches hold it, and with it nothing of the session once it is released: ONNX Runtime's binding keeps the
    session alive.
    """

    binding: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    run_options: Any = None
    fed: dict[str, np.ndarray] = field(default_factory=dict)

    def release(self) -> None:
        """Let go of everything. Idempotent."""
        self.binding = self.run_options = None
        self.inputs = {}
        self.fed = {}


class OrtSession(ABC):
    """What both providers share: loading, running on host arrays, error translation. Implements ``EngineSession``.

    ONNX Runtime's own session is reached through ``_open_session`` each time and kept in no local variable: the frames
    of an exception, and the stopwatches, would hold it past ``close``.
    """

    def __init__(self, model: Path | bytes, options: SessionOptions) -> None:
        self.options = options
        self._model = model
        self._warnings: list[str] = []
        self._session: Any = None
        self._bound_anywhere: weakref.WeakSet[Bound] = weakref.WeakSet()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    @property
    def inputs(self) -> dict[str, tuple[int | str | None, ...]]:
        """Declared shape of every input."""
        return {value.name: tuple(value.shape) for value in self._open_session().get_inputs()}

    @property
    def input_types(self) -> dict[str, str]:
        """Type (``tensor(float)``) of every input."""
        return {value.name: value.type for value in self._open_session().get_inputs()}

    @property
    def outputs(self) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
        """Type (``tensor(float)``) and declared shape of every output."""
        return {value.name: (value.type, tuple(value.shape)) for value in self._open_session().get_outputs()}

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs in the model's order."""
        return tuple(value.name for value in self._open_session().get_outputs())

    def run(self, feeds: Mapping[str, np.ndarray], *, gives_back: bool = False) -> dict[str, np.ndarray]:
        """See ``EngineSession``; on a CPU a run may give back the memory that the session keeps for the next."""
        self._open_session()
        options = self._run_options()
        if gives_back:
            import onnxruntime

            options = onnxruntime.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        values = translated(lambda: self._open_session().run(None, dict(feeds), options))
        # Copies: an array of ONNX Runtime's keeps the memory of all its session's runs, however small it is.
        return dict(zip(self.output_names, (np.array(value) for value in values), strict=True))

    def replay(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As ``run``, for feeds that come again and again: arrays that were fed before must not have been changed."""
        return self.run(feeds)

    @abstractmethod
    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        """See ``EngineSession``."""

    def placement(self) -> tuple[Placed, ...]:
        """Which provider runs which node; only where ``record_placement`` is set.

        Empty where ONNX Runtime does not say (before 1.24).
        """

        def read() -> tuple[Placed, ...]:
            session = self._open_session()
            if not hasattr(session, "get_provider_graph_assignment_info"):
                return ()
            return tuple(
                Placed(node.name, f"{node.domain}.{node.op_type}" if node.domain else node.op_type, part.ep_name)
                for part in session.get_provider_graph_assignment_info()
                for node in part.get_nodes()
            )

        placed: tuple[Placed, ...] = translated(read)
        return placed

    def close(self) -> None:
        self._end_session()

    def _end_session(self) -> bool:
        """Destroy ONNX Runtime's session, what is bound to it first. Returns whether it is gone."""
        for bound in list(self._bound_anywhere):
            bound.release()
        watched = references(self._session, getattr(self._session, "_sess", None))
        self._session = None
        return are_gone(watched, "a session of ONNX Runtime")

    def _execute(self, bound: Bound) -> None:
        """Run once on what is bound."""

        def run() -> None:
            session = self._open_session()
            if bound.binding is None:
                raise EngineError(FailureKind.ERROR, "the session was opened anew after this stopwatch was taken")
            session.run_with_iobinding(bound.binding, bound.run_options)

        translated(run)

    @property
    def _on_cpu(self) -> bool:
        return self.options.provider == "cpu"

    def _open_session(self) -> Any:
        if self._session is None:
            raise EngineError(FailureKind.ERROR, "the session is closed")
        return self._session

    def _run_options(self) -> Any:
        """Options of an untimed run; None for the defaults."""
        return None

    def _load(self, providers: list[Any]) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _LOG_WARNING
        # Planned buffers corrupt FP16 norms from the second run on (microsoft/onnxruntime#27768).
        options.enable_mem_pattern = not self._on_cpu
        # What a fused operator gives may be larger than ONNX Runtime infers, as a key-value cache that grows is, and a
        # buffer that was planned for it too small. The engine that is timed is run as a user would.
        options.enable_mem_reuse = self.options.reuses_buffers and (self.options.timing or not self._on_cpu)
        if not self.options.optimise:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        elif not self.options.extended:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        if self._on_cpu:
            options.intra_op_num_threads = self.options.threads or 0
            if not self.options.timing:  # Threads of a run that wait for each other need no processor time meanwhile.
                options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            # Threads that spin after a session's run would slow down the session that is timed in turn with it.
            options.add_session_config_entry("session.force_spinning_stop", "1")
            # Without VNNI, INT8 products saturate in 16 bits otherwise; a quantised model is off by 0.2 then
            # (onnxruntime_session_options_config_keys.h, kOrtSessionOptionsAvx2PrecisionMode).
            options.add_session_config_entry("session.x64quantprecision", "1")
        options.enable_cpu_mem_arena = self.options.arena and not self.options.node_by_node
        if self.options.in_file_order:
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        if self.options.node_by_node:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if self.options.record_placement:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if self.options.optimised_dir is not None:
            options.optimized_model_filepath = str(self.options.optimised_dir / OPTIMISED_MODEL)
            # Folded and transposed constants are new: inside the file they might pass protobuf's 2 GiB.
            external = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{external}_file_name", _OPTIMISED_WEIGHTS)
            options.add_session_config_entry(f"{external}_min_size_in_bytes", "1024")
        model: bytes | str = self._model if isinstance(self._model, bytes) else str(self._model)
        # Without enable_fallback=0 a CUDA failure silently becomes a slow CPU session.
        # On the CPU this fusion crashes the process on an FP16 norm before an FP16 product (ONNX Runtime 1.31.1).
        # The other one makes x64quantprecision fail where two layers read one INT8 weight ("Attempt to replace the
        # existing tensor", 1.31.1); without it products are as exact, by ONNX Runtime's Avx2WeightS8ToU8Transformer.
        disabled = ["MatmulTransposeFusion", "QDQS8ToU8Transformer"] if self._on_cpu else []
        disabled += [] if self.options.fuses_norms else [_SIMPLIFIED_NORM_FUSION, *_NORM_FUSIONS]

        opened = partial(onnxruntime.InferenceSession, providers=providers, enable_fallback=0)
        while True:
            try:
                return translated(partial(opened, model, options, disabled_optimizers=disabled))
            except EngineError as error:
                if _SAME_NAMES in error.message and isinstance(model, str):
                    model, folder = with_names_apart(Path(model))
                    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
                    continue
                optimizers, warning = self._without(error.message)
                if not optimizers or optimizers[0] in disabled:
                    raise
            disabled += optimizers
            self._warnings.append(warning)

    def _without(self, message: str) -> tuple[list[str], str]:
        """The optimisers of ONNX Runtime that make a valid model fail to load, and the warning; none at another fault.

        Seen with 1.31.1, where no other version is named.
        """
        if self._on_cpu and _QUANTISED_KERNEL in message:
            # With x64quantprecision a Gemm of INT8 activations gets UINT8 weights, and no kernel takes both.
            return ["QDQSelectorActionTransformer"], (
                "ONNX Runtime has no INT8 kernel for a quantised layer of this model on a CPU: all of its quantised"
                " layers compute in FP32 between QuantizeLinear and DequantizeLinear"
            )
        if self._on_cpu and any(words in message for words in _FP8_KERNEL):
            # Layers of FP8 activations are fused as those of INT8 are. And a Relu before FP8 is dropped as one before
            # UINT8 is, where QuantizeLinear gives no negative values.
            return ["QDQSelectorActionTransformer", "ReluQuantRewrite"], (
                "ONNX Runtime has no FP8 kernels on a CPU: the quantised layers of this model compute in FP32 between"
                " QuantizeLinear and DequantizeLinear"
            )
        if _NORM_FUSION in message:
            # From opset 17 on, a norm written out behind a Cast is fused with the Cast into one of two types.
            return [*_NORM_FUSIONS, _SIMPLIFIED_NORM_FUSION], (
                "ONNX Runtime's LayerNormFusion joins a Cast and the norm behind it and fails: it is off, so that all"
                " norms that are written out run node by node"
            )
        return [], ""


class CpuSession(OrtSession):
    """ONNX Runtime's CPU provider, all cores, timed with a monotonic clock."""

    def __init__(self, model: Path | bytes, options: SessionOptions) -> None:
        super().__init__(model, options)
        self._session = self._load([PROVIDERS["cpu"]])

    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        bound = self._bind(feeds)
        return HostStopwatch(partial(self._execute, bound))

    def _bind(self, feeds: Mapping[str, np.ndarray]) -> Bound:
        self._open_session()

        def bind() -> Bound:
            binding = self._open_session().io_binding()
            for name, array in feeds.items():
                binding.bind_cpu_input(name, np.asarray(array, order="C"))
            for name in self.output_names:
                binding.bind_output(name, "cpu")
            return Bound(binding)

        bound: Bound = translated(bind)
        self._bound_anywhere.add(bound)
        return bound


def with_names_apart(path: Path) -> tuple[bytes, str]:
    """A model whose nodes have names of their own, without its external data; and the folder of these.

    ONNX lets nodes share a name, ONNX Runtime does not.
    """
    import onnx

    from mptune.graph.loading.reading import name_apart

    proto = onnx.load(path, load_external_data=False)
    name_apart(proto.graph)
    return proto.SerializeToString(), str(path.resolve().parent)


def translated(call: Callable[[], Any]) -> Any:
    """Run a call into ONNX Runtime; whatever it raises becomes an ``EngineError``.

    The frames of the call, ONNX Runtime's own included, let go of their variables: a session among them would live as
    long as the exception, past its stream.
    """
    try:
        return call()
    except (EngineError, MemoryError) as error:
        traceback.clear_frames(error.__traceback__)
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise translate(error) from error
