"""Sessions on ONNX Runtime's CUDA provider, and whether it starts.

They run on one explicit stream, with inputs and outputs bound on the device, and replay a CUDA graph where capture
works. TF32 is off unless asked for. With the provider option ``use_tf32`` off, FP16 convolutions do not use tensor
cores (ResNet-50 on an H200: 1.64 ms, and 1.42 where ``NO_TF32`` alone switches TF32 off); with it on, cuBLAS ignored
the variable in 1 session of 100. So the option is left on for convolutions alone (``off by environment``). CUDA's
libraries read the variable once, so it must be set when the process starts.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mptune.engines import cuda
from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.engines.cuda import StreamStopwatch, enqueue_delay
from mptune.engines.latency import Stopwatch, monotonic_ms
from mptune.engines.ort.session import FATAL, PROVIDERS, Bound, OrtSession, Provider, SessionOptions, translated
from mptune.processes.child import WorkerState
from mptune.processes.parent import Worker

NO_TF32: Mapping[str, str] = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment variable that keeps CUDA's libraries from TF32. cuBLAS does not always obey it."""

_PROBE = '<ir_version: 8, opset_import: ["" : 17]> probe (float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, x) }'
PROBE_TIMEOUT_S = 120.0
_reasons: dict[Provider, str | None] = {}
_probing = threading.Lock()

# Ops whose output shape depends on values, or that run subgraphs: they read back to the host, which capture forbids.
_NOT_CAPTURABLE = frozenset(
    {
        *("NonZero", "NonMaxSuppression", "Unique", "Compress", "If", "Loop", "Scan", "SequenceMap", "SequenceInsert"),
        *("SequenceAt", "SequenceConstruct", "SplitToSequence", "ConcatFromSequence", "StringNormalizer"),
    }
)


class CudaSession(OrtSession):
    """ONNX Runtime's CUDA provider on a stream of its own."""

    def _start(self) -> None:
        load_libraries()
        self._stream: cuda.Stream | None = None
        self._bindings: dict[tuple[Any, ...], Bound] = {}
        cuda.require_device()
        is_timed = self.options.preset in ("timed", "emulation")
        obstacle = graph_obstacle(self._model) if is_timed else None
        self._has_dynamic_outputs = obstacle is not None
        wants_graph = is_timed and self.options.cuda_graph
        if wants_graph and obstacle is not None:
            text = f"no CUDA graph: {obstacle} cannot be captured, so latency contains launch costs"
            self._warnings[f"{text}: cut it from the model"] = None
        self._open(graph=wants_graph and obstacle is None)

    def stopwatch(self, feeds: Mapping[str, np.ndarray]) -> Stopwatch:
        enqueue, stream = partial(self._execute, self._settled(feeds)), self._opened_stream()
        delay: Callable[[], None] | None = None
        if self._has_graph:
            # A graph is one launch, and ONNX Runtime waits for its end inside it: the stream is empty at the next one.
            delay = partial(enqueue_delay, stream)
            try:
                delay()
            except EngineError as error:
                text = f"latency contains the cost of a launch ({error.message}): update the driver"
                self._warnings[text] = None
                delay = lambda: None  # noqa: E731  enqueueing still takes as long as executing
        return StreamStopwatch(enqueue, stream, monotonic_ms, delay=delay)

    def replay(self, feeds: Mapping[str, np.ndarray], *, is_once: bool = False) -> dict[str, np.ndarray]:
        """See ``OrtSession``; by a CUDA graph where one is captured: thousands of launches take much longer.

        A graph for feeds of other shapes costs several runs, so of what is run once only the first has one captured.
        """
        if not self._has_graph or (is_once and self._bindings and _binding_key(feeds) not in self._bindings):
            return self.run(feeds)
        bound = self._settled(feeds, unchanged=True)
        values = translated(lambda: [value.numpy() for value in bound.binding.get_outputs()])
        return dict(zip(self.outputs, values, strict=True))

    def close(self) -> None:
        self._bindings.clear()
        is_gone = self._end_session()
        # The session's own teardown still uses the stream, so it goes last: rather never than before the session.
        if self._stream is not None and is_gone:
            self._stream.close()
        self._stream = None

    def _opened_stream(self) -> cuda.Stream:
        if self._stream is None:
            raise EngineError(FailureKind.ERROR, "the session is closed")
        return self._stream

    def _open(self, *, graph: bool, refusal: str = "") -> None:
        """Load the model on a new stream; without a CUDA graph where ONNX Runtime refuses one (``refusal``: why)."""
        self.close()
        if refusal:
            text = f"no CUDA graph ({refusal}): latency contains launch costs; keep every node of the model on the GPU"
            self._warnings[text] = None
        cuda.call("cudaSetDevice", 0)
        self._stream = cuda.Stream()
        self._has_graph = graph
        provider = provider_options(self.options, self._stream.address, graph=graph)
        try:
            self._load([(PROVIDERS["cuda"], provider), PROVIDERS["cpu"]])
            refusal = ""
        except EngineError as error:
            if not graph or error.kind in FATAL:
                self.close()
                raise
            refusal = error.message
        # Outside of the block above: an exception may hold what belongs to the session.
        if refusal:
            self._open(graph=False, refusal=refusal)
        elif PROVIDERS["cuda"] not in self._session.get_providers():
            self.close()
            raise EngineError(
                FailureKind.UNSUPPORTED, "ONNX Runtime's CUDA provider did not start (the log has its messages)"
            )

    def _run_options(self) -> Any:
        if not self._has_graph:
            return None
        import onnxruntime

        options = onnxruntime.RunOptions()
        # Host arrays have new addresses every time: such a run must be neither captured nor a replay.
        options.add_run_config_entry("gpu_graph_id", "-1")
        return options

    def _settled(self, feeds: Mapping[str, np.ndarray], *, unchanged: bool = False) -> Bound:
        """Put the feeds on the device (if ``unchanged`` those that are new) and run once, which captures the graph."""
        stream = self._opened_stream()
        try:
            return self._bind(feeds, unchanged=unchanged)
        except EngineError as error:
            if not self._has_graph or error.kind in FATAL:
                raise
            refusal = error.message
        # A failed capture leaves session and stream in an unknown state: start over without.
        stream.abandon_capture()
        self._open(graph=False, refusal=refusal)
        return self._bind(feeds)

    def _bind(self, feeds: Mapping[str, np.ndarray], *, unchanged: bool = False) -> Bound:
        feeds = self._as_declared(feeds)
        key = _binding_key(feeds)
        # ONNX Runtime would write an output that it allocated itself into the old buffer, whatever its new shape.
        bound = None if self._has_dynamic_outputs else self._bindings.get(key)
        if bound is not None:
            # A captured graph reads from the addresses it saw: new values go to the old place.
            for name, array in feeds.items():
                if not unchanged or bound.fed.get(name) is not array:
                    translated(partial(bound.inputs[name].update_inplace, np.asarray(array, order="C")))
        else:
            outputs = {} if self._has_dynamic_outputs else self.run(feeds)  # Only for their shapes and types.
            bound = translated(partial(self._new_binding, feeds, outputs))
            self._bindings[key] = bound
            self._bound_anywhere.add(bound)
        bound.fed = dict(feeds)
        cuda.call("cudaDeviceSynchronize")  # Uploads went through the default stream, which ours does not wait for.
        self._execute(bound)
        self._opened_stream().synchronize()
        return bound

    def _new_binding(self, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> Bound:
        import onnxruntime

        options = onnxruntime.RunOptions()
        # Otherwise every run waits for the device, and an event pair would contain the host's way there and back.
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self._has_graph:
            options.add_run_config_entry("gpu_graph_id", str(len(self._bindings) + 1))
        binding, inputs = self._open_session().io_binding(), {}
        for name, array in feeds.items():
            inputs[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), "cuda", 0)
            binding.bind_ortvalue_input(name, inputs[name])
        for name in self.outputs:
            value = outputs.get(name)
            if value is None:
                binding.bind_output(name, "cuda", 0)
            else:
                place = onnxruntime.OrtValue.ortvalue_from_shape_and_type(value.shape, value.dtype, "cuda", 0)
                binding.bind_ortvalue_output(name, place)
        return Bound(binding, inputs, options)


def _binding_key(feeds: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    """What the shapes of the outputs can depend on: the inputs' shapes, and the values of small integer inputs."""
    return tuple(
        (name, a.shape, a.dtype.str, a.tobytes() if a.dtype.kind in "iu" and a.size <= 64 else b"")
        for name, a in sorted(feeds.items())
    )


def provider_options(options: SessionOptions, stream_address: int, *, graph: bool) -> dict[str, str]:
    """What the CUDA provider is opened with."""
    by_environment = options.tf32 == "off by environment" and NO_TF32.items() <= os.environ.items()
    # Choosing the kernels of a convolution takes 25 ms by ONNX Runtime's default, cuDNN's heuristics of mode B, and a
    # tenth of that by mode A, whose kernels may be slower (RAFT on an H200: 3.1 ms, and 2.1).
    choice = "EXHAUSTIVE" if options.preset == "timed" else "HEURISTIC"
    return {
        "device_id": "0",
        "cudnn_conv_algo_search": choice,
        "use_tf32": "1" if options.tf32 == "on" or by_environment else "0",
        "enable_cuda_graph": "1" if graph else "0",
        "user_compute_stream": str(stream_address),
    }


def load_libraries() -> None:
    """Load what opening a session takes long to load; no device is touched."""
    import onnx  # noqa: F401
    import onnxruntime

    onnxruntime.preload_dlls()  # from the nvidia packages of this environment


def open_session(model: Path | bytes, options: SessionOptions) -> OrtSession:
    """Open a session; building the engine happens here."""
    return CudaSession(model, options) if options.provider == "cuda" else OrtSession(model, options)


@dataclass(frozen=True)
class OrtEngine:
    """A typed model that ONNX Runtime opens. Implements ``Engine``."""

    path: Path
    options: SessionOptions

    def open(self) -> OrtSession:
        return open_session(self.path, self.options)


def graph_obstacle(model: Path | bytes) -> str | None:
    """The first node of a model that a CUDA graph cannot capture, as text; None where there is none."""
    import onnx

    proto = translated(
        lambda: onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)
    )
    for node in proto.graph.node:
        if node.op_type in _NOT_CAPTURABLE:
            return f"{node.op_type} ({node.name or 'unnamed'})"
    return None


@dataclass(frozen=True)
class ProbeJob:
    """Check that a provider starts: ONNX Runtime lists providers whose libraries may be missing."""

    provider: Provider

    def run(self, state: WorkerState) -> None:
        import onnx.parser

        model = onnx.parser.parse_model(_PROBE)
        session = state.transient(partial(open_session, model.SerializeToString(), SessionOptions(self.provider)))
        state.enter(Stage.RUN)
        session.run({"x": np.eye(2, dtype=np.float32)})


def probe(provider: Provider, worker: Worker | None = None) -> str | None:
    """Why a tiny model does not run in a worker, which keeps its process where it is given; None where it runs."""
    with _probing, tempfile.TemporaryDirectory(prefix="mptune-probe-") as folder:
        if provider in _reasons:
            return _reasons[provider]
        with Worker() if worker is None else nullcontext(worker) as probing:
            probing.logs_dir, logs_dir = Path(folder), probing.logs_dir
            failure = probing.call(ProbeJob(provider), PROBE_TIMEOUT_S)
            probing.logs_dir = logs_dir
            reason = None
            if failure is not None:
                # ONNX Runtime logs the library that does not load; its exception names no cause.
                log = "" if failure.log_path is None else failure.log_path.read_text(encoding="utf-8", errors="replace")
                words = r"^.*(?:cannot open shared object file|Failed to load library).*$"
                library = re.search(words, log, re.MULTILINE)
                reason = failure.message if library is None else library[0].rpartition("error:")[2].strip()
            if not probing.is_closed:  # Else it was ended for another reason.
                _reasons[provider] = reason
        return reason
