"""Sessions of ONNX Runtime: how they are opened, the CPU provider, what errors mean, and runs side by side."""

from __future__ import annotations

import gc
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.environment import usable_cores
from mptune.engines.latency import HostStopwatch, Stopwatch

T = TypeVar("T")
Provider = Literal["cpu", "cuda"]
PROVIDERS: Mapping[Provider, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
Preset = Literal["timed", "reference", "values", "emulation"]
"""What a session is for. ``timed``: as a user runs it, with a CUDA graph and everything bound to the device.
``reference``: outputs, with all optimisations; it records where its nodes were placed. ``values``: values inside the
graph, each node computed as it stands, as little as possible kept in memory. ``emulation``: a graph of switches that
runs again and again, with a CUDA graph."""
Tf32 = Literal["off", "off by environment", "on"]
FATAL = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.DEVICE_LOST, FailureKind.CRASH})
"""After these no other way of running, as without a CUDA graph, is tried."""
OPTIMISED_MODEL = "optimised.onnx"
"""In ``optimised_dir`` of ``SessionOptions``: the graph that is run, large constants beside it."""
_FLOATS = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}
_LOG_WARNING = 2
_NORM_FUSIONS = ("LayerNormFusionL1", "LayerNormFusionL2", "SimplifiedLayerNormFusion")
# What makes a valid model fail to load (ONNX Runtime 1.31.1), and what ONNX Runtime says then. With x64quantprecision a
# Gemm of INT8 activations gets UINT8 weights, and no kernel takes both. Layers of FP8 activations are fused as those of
# INT8 are; and a Relu before FP8 is dropped as one before UINT8 is, where QuantizeLinear gives no negative values. From
# opset 17 on, a norm written out behind a Cast is fused with the Cast into one of two types.
_FAULTY_OPTIMISERS = ("QDQSelectorActionTransformer", "ReluQuantRewrite", *_NORM_FUSIONS)
_FAULTS = (
    *("find kernel for com.microsoft.Q", "find kernel for QLinear", "Type 'tensor(float8"),
    "LayerNormFusion/",  # as the node that the fusion makes is named
)
_MEMORY_SHARE = 0.5  # share of the available memory that runs at the same time may take
_MOST_BYTES = 3 << 28
"""Memory that they may take: a model whose single run takes more has operators large enough for all cores."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class SessionOptions:
    """How a session is opened."""

    provider: Provider = "cpu"
    preset: Preset = "reference"
    threads: int | None = None  # that one run computes with on a CPU; None takes all cores
    tf32: Tf32 = "off"
    """By environment: where NVIDIA's variable switches TF32 off, let it do so alone. Convolutions are faster then, but
    matrix products may use TF32 at times (``cuda_session``)."""
    cuda_graph: bool = True  # capture one, where the preset does and the model allows it
    optimised_dir: Path | None = None  # an empty folder for the graph as it was optimised


@dataclass(eq=False)
class Bound:
    """Inputs and outputs bound for one set of feeds; stopwatches hold nothing of the session once it is released."""

    binding: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    run_options: Any = None
    fed: dict[str, np.ndarray] = field(default_factory=dict)

    def release(self) -> None:
        self.binding = self.run_options = None
        self.inputs, self.fed = {}, {}


class OrtSession:
    """ONNX Runtime's CPU provider, timed with a monotonic clock. Implements ``EngineSession``.

    ONNX Runtime's own session is reached through ``_open_session`` each time and kept in no local variable: the frames
    of an exception, and the stopwatches, would hold it past ``close``.
    """

    def __init__(self, model: Path | bytes, options: SessionOptions) -> None:
        self.options = options
        # Declared type (``tensor(float)``) and shape of every input, and of every output in the model's order.
        self.inputs: dict[str, tuple[str, tuple[int | str | None, ...]]] = {}
        self.outputs: dict[str, tuple[str, tuple[int | str | None, ...]]] = {}
        self._model = model
        self._warnings: dict[str, None] = {}  # a set that keeps its order
        self._session: Any = None
        self._bound_anywhere: weakref.WeakSet[Bound] = weakref.WeakSet()
        self._start()

    def _start(self) -> None:
        self._load([PROVIDERS["cpu"]])

    context_bytes: int | None = None  # not known

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def run(
        self, feeds: Mapping[str, np.ndarray], *, gives_back: bool = False, is_transient: bool = False
    ) -> dict[str, np.ndarray]:
        """See ``EngineSession``; ``gives_back``: on a CPU, the memory that the session keeps for the next run.

        ``is_transient``: the caller lets go of all arrays before the next run, which may write into the same memory.
        Without that they are copied, and each run takes fresh memory for all of them.
        """
        self._open_session()
        options = self._run_options()
        if gives_back:
            import onnxruntime

            options = onnxruntime.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        values = translated(lambda: self._open_session().run(None, self._as_declared(feeds), options))
        # Copies: an array of ONNX Runtime's keeps the memory of all its session's runs, however small it is.
        return dict(zip(self.outputs, values if is_transient else map(np.array, values), strict=True))

    def replay(self, feeds: Mapping[str, np.ndarray], *, is_once: bool = False) -> dict[str, np.ndarray]:
        """As ``run``, for feeds that come again and again, or ``is_once``: arrays that were fed must not change."""
        return self.run(feeds)

    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:

        def bind() -> Bound:
            binding = self._open_session().io_binding()
            for name, array in self._as_declared(feeds).items():
                binding.bind_cpu_input(name, np.asarray(array, order="C"))
            for name in self.outputs:
                binding.bind_output(name, "cpu")
            return Bound(binding)

        bound: Bound = translated(bind)
        self._bound_anywhere.add(bound)
        return HostStopwatch(partial(self._execute, bound))

    def placement(self) -> dict[str, tuple[str, str]]:
        """Node -> its operator and the provider that runs it, of a ``reference``; empty before ONNX Runtime 1.24."""

        parts = translated(lambda: getattr(self._open_session(), "get_provider_graph_assignment_info", tuple)())
        return {
            node.name: (f"{node.domain}.{node.op_type}" if node.domain else node.op_type, part.ep_name)
            for part in parts
            for node in part.get_nodes()
        }

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

        def run() -> None:
            session = self._open_session()
            if bound.binding is None:
                raise EngineError(FailureKind.ERROR, "the session was opened anew after this stopwatch was taken")
            session.run_with_iobinding(bound.binding, bound.run_options)

        translated(run)

    def _open_session(self) -> Any:
        if self._session is None:
            raise EngineError(FailureKind.ERROR, "the session is closed")
        return self._session

    def _as_declared(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Samples are in the types of the original model, FP32 or FP16; another model may have other ones."""
        types = {name: _FLOATS.get(kind) for name, (kind, _) in self.inputs.items()}
        with np.errstate(over="ignore"):  # to infinity
            return {
                n: a.astype(types[n], copy=False) if types.get(n) and a.dtype in (np.float32, np.float16) else a
                for n, a in feeds.items()
            }

    def _run_options(self) -> Any:
        """Options of a run that is not bound; None for the defaults."""
        return None

    def _load(self, providers: list[Any]) -> None:
        import onnx
        import onnxruntime

        from mptune.graph.loading.reading import name_apart

        on_cpu = self.options.provider == "cpu"
        options = _native_options(self.options)
        model: bytes | str = self._model if isinstance(self._model, bytes) else str(self._model)
        # On the CPU this fusion crashes the process on an FP16 norm before an FP16 product (ONNX Runtime 1.31.1).
        # The other one makes x64quantprecision fail where two layers read one INT8 weight ("Attempt to replace the
        # existing tensor", 1.31.1); without it products are as exact, by ONNX Runtime's Avx2WeightS8ToU8Transformer.
        disabled = ["MatmulTransposeFusion", "QDQS8ToU8Transformer"] if on_cpu else []
        if self.options.preset == "emulation":
            # A fused norm takes 1e-5 for an epsilon that is no constant (layer_norm_fusion.cc, ONNX Runtime 1.31), and
            # a switched one is none.
            disabled += _NORM_FUSIONS
        # Without enable_fallback=0 a CUDA failure silently becomes a slow CPU session.
        opened = partial(onnxruntime.InferenceSession, providers=providers, enable_fallback=0)
        while self._session is None:
            try:
                self._session = translated(partial(opened, model, options, disabled_optimizers=disabled))
            except EngineError as error:
                if "two nodes with same node name" in error.message and isinstance(self._model, Path):
                    # ONNX lets nodes share a name, ONNX Runtime does not.
                    proto = onnx.load(self._model, load_external_data=False)
                    name_apart(proto.graph)
                    model, folder = proto.SerializeToString(), str(self._model.resolve().parent)
                    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
                    continue
                if _FAULTY_OPTIMISERS[0] in disabled or not any(words in error.message for words in _FAULTS):
                    raise
                disabled += _FAULTY_OPTIMISERS
                text = (
                    "optimisers of ONNX Runtime fail on this model, and are off: norms that are written out run node by"
                    " node (LayerNormFusion), INT8 and FP8 layers in FP32 between QuantizeLinear and DequantizeLinear"
                )
                self._warnings[text] = None
        self.inputs = {value.name: (value.type, tuple(value.shape)) for value in self._session.get_inputs()}
        self.outputs = {value.name: (value.type, tuple(value.shape)) for value in self._session.get_outputs()}


def _native_options(options: SessionOptions) -> Any:
    """ONNX Runtime's own session options for a preset."""
    import onnxruntime

    on_cpu, preset = options.provider == "cpu", options.preset
    native = onnxruntime.SessionOptions()
    native.log_severity_level = _LOG_WARNING
    # Planned buffers corrupt FP16 norms from the second run on (microsoft/onnxruntime#27768).
    native.enable_mem_pattern = not on_cpu
    # What a fused operator gives may be larger than ONNX Runtime infers, as a key-value cache that grows is, and a
    # buffer that was planned for it too small: only the engine that is timed is run as a user would. And which of many
    # values share a buffer is planned in quadratic time (ONNX Runtime 1.31).
    native.enable_mem_reuse = preset == "timed" or (preset == "reference" and not on_cpu)
    native.enable_cpu_mem_arena = preset != "values" or not on_cpu
    if preset == "values":
        # Nothing is fused where each value is read. On a GPU what is not folded would go to the host and back.
        levels = onnxruntime.GraphOptimizationLevel
        native.graph_optimization_level = levels.ORT_DISABLE_ALL if on_cpu else levels.ORT_ENABLE_BASIC
        # Each node runs as early as the file's order allows: a value is freed once what reads it there has run.
        native.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if preset == "reference":
        native.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if on_cpu:
        native.intra_op_num_threads = options.threads or 0
        if preset != "timed":  # Threads of a run that wait for each other need no processor time meanwhile.
            native.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Threads that spin after a session's run would slow down the session that is timed in turn with it.
        native.add_session_config_entry("session.force_spinning_stop", "1")
        # Without VNNI, INT8 products saturate in 16 bits otherwise; a quantised model is off by 0.2 then
        # (onnxruntime_session_options_config_keys.h, kOrtSessionOptionsAvx2PrecisionMode).
        native.add_session_config_entry("session.x64quantprecision", "1")
    if options.optimised_dir is not None:
        native.optimized_model_filepath = str(options.optimised_dir / OPTIMISED_MODEL)
        # Folded and transposed constants are new: inside the file they might pass protobuf's 2 GiB.
        external = "session.optimized_model_external_initializers"
        native.add_session_config_entry(f"{external}_file_name", "optimised.weights")
        native.add_session_config_entry(f"{external}_min_size_in_bytes", "1024")
    return native


def references(*objects: Any) -> tuple[weakref.ReferenceType[Any], ...]:
    """Weak references to the native objects that can have one; None is left out."""
    watched = []
    for each in objects:
        with suppress(TypeError):  # None, or a type without weak references.
            watched.append(weakref.ref(each))
    return tuple(watched)


def are_gone(watched: tuple[weakref.ReferenceType[Any], ...], what: str) -> bool:
    """Whether all have been freed; a ``RuntimeWarning`` where not: one that outlives its CUDA stream crashes."""
    if any(reference() is not None for reference in watched):
        gc.collect()  # Only a cycle may still hold it.
    if all(reference() is None for reference in watched):
        return True
    warnings.warn(f"{what} is still alive after it was closed: an object holds it", RuntimeWarning, stacklevel=3)
    return False


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
        text = str(error).strip()
        raise EngineError(classify(text), first_words(text) or type(error).__name__) from error


@dataclass(frozen=True)
class SideBySide:
    """How many runs of a session go at a time, each on a thread of its own: threads of one run wait by spinning."""

    count: int = 1
    threads: int | None = None  # that each computes with, as ``SessionOptions.threads``; None takes all cores

    @classmethod
    def for_runs(cls, runs: int, run_bytes: int | None, threads: int = 1) -> SideBySide:
        """As many as there are cores for (each has ``threads`` at least), and memory; one where that is not known."""
        available, cores = available_bytes(), usable_cores()
        if run_bytes is None:
            return cls()
        count = min(cores // threads, runs, min(int(_MEMORY_SHARE * available), _MOST_BYTES) // max(run_bytes, 1))
        return cls() if count <= 1 else cls(count, max(1, cores // count))

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What calls return, in their order; once one has raised an exception no other is begun."""
        if self.count <= 1 or len(calls) <= 1:
            return [call() for call in calls]
        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def available_bytes() -> int:
    """Memory that this process may take beside what it has."""
    import psutil  # type: ignore[import-untyped]

    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((_CGROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        available = min(available, max(limit - used, 0))
    return available


# The first that a message matches is its kind. CUDA's numbers are those of driver_types.h.
_KINDS = {
    FailureKind.OUT_OF_MEMORY: r"out of memory|failed to allocate memory|bad_alloc|bad allocation"
    r"|cu(?:blas|dnn)_status_alloc_failed|cudaerrormemoryallocation|available memory of",
    FailureKind.DISK_FULL: r"no space left on device|disk quota exceeded",
    FailureKind.DRIVER: r"cuda (?:failure|error) 35\b|driver version is insufficient",
    # The device is lost or refuses work: the machine's fault.
    FailureKind.DEVICE_LOST: r"cuda (?:failure|error) (?:3|46|100|101|214|220|714|802|803|804|999)\b"
    r"|no cuda-capable device|devices? unavailable|uncorrectable ecc|busy or unavailable|fallen off the bus",
    # A kernel failed and with it the CUDA context: the plan's fault, and the process cannot be used again.
    FailureKind.CRASH: r"cuda (?:failure|error) (?:700|702|710|715|716|717|718|719)\b|illegal memory access"
    r"|unspecified launch failure|misaligned address|device-side assert|illegal instruction",
    FailureKind.UNSUPPORTED: r"^\[ONNXRuntimeError\] : \d+ : NOT_IMPLEMENTED",
    FailureKind.INVALID_MODEL: r"^\[ONNXRuntimeError\] : \d+ : (?:INVALID_GRAPH|INVALID_PROTOBUF|NO_MODEL)|type error"
    r"|shapeinferenceerror|typeinferenceerror|bound to different types|invalid model",
}
_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
# "/onnxruntime_src/.../graph.cc:1423 void ns::Class::method(args) const [with T = x] condition was false. words": a
# source position, a C++ signature, the message.
_POSITION = re.compile(r"\S+\.(?:cc|cpp|cuh|cu|h|hpp):\d+ ")
_SIGNATURE = re.compile(
    r"^(?:[\w:&*<>~,\[\]\s]|::)*?[\w~>]+\([^()]*(?:\([^()]*\)[^()]*)*\)(?: const)?(?: \[with [^\]]*\])? "
)
_NODE = re.compile(r"Non-zero status code returned while running (\S+) node\. Name:'([^']*)' Status Message: ")


def classify(text: str) -> FailureKind:
    """Kind of failure by a message of ONNX Runtime or CUDA."""
    return next((kind for kind, words in _KINDS.items() if re.search(words, text, re.IGNORECASE)), FailureKind.ERROR)


def first_words(text: str) -> str:
    """The first informative line: without error codes, paths, source positions and C++ signatures."""
    text = _CODE.sub("", text.strip())
    text = re.sub(r"Load model from .+? failed:\s*", "", text, flags=re.DOTALL)
    where = ""
    if node := _NODE.search(text):
        where = f"{node[1]} node {node[2]!r}: "
        text = text[node.end() :]
    while position := _POSITION.search(text):
        text = _SIGNATURE.sub("", text[position.end() :], count=1)
    # CUDA failures go on with the host's name, file and expression.
    text = re.split(r"\s*;\s*(?:GPU|hostname|file)\s*=", text)[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return where + (lines[0] if lines else "")
