# ruff: noqa: N802, N815 (the names are CUDA's)
"""CUDA: streams, events, graphs, buffers, a delay kernel and a stopwatch.

By ``cuda.bindings``; on a Jetson whose driver refuses cuda-python by the system's own ``libcudart.so``, which JetPack
brings with its driver: ``SystemRuntime`` has the names of ``cuda.bindings.runtime``, by ctypes (signatures:
``cuda_runtime_api.h`` of CUDA 11.4 to 13).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.ort.session import classify
from mptune.targets.detect import cuda_series, detect_gpus

DELAY_US = 200  # longer than a launch takes
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry wait(.param .u64 span_ns)
{
    .reg .pred %waiting;
    .reg .u64 %span, %begin, %now, %passed;
    ld.param.u64 %span, [span_ns];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %waiting, %passed, %span;
    @%waiting bra again;
    ret;
}
\0"""
INSTALL = {12: "pip install 'cuda-bindings<13'", 13: "pip install cuda-bindings"}
"""By the CUDA of the driver: version 12 works with drivers of 525 and later, 13 only with 580 and later (CUDA's release
notes, table 3)."""
_FOLDERS = ("usr/local/cuda/lib64", "usr/local/cuda/targets/*/lib", "usr/lib/*-linux-gnu")

CALLS: Mapping[str, tuple[Any, ...]] = {
    "cudaDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cudaDeviceSynchronize": (),
    "cudaDriverGetVersion": (POINTER(c_int),),
    "cudaEventCreate": (POINTER(c_void_p),),
    "cudaEventDestroy": (c_void_p,),
    "cudaEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaFree": (c_void_p,),
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaGetLastError": (),
    "cudaGraphDestroy": (c_void_p,),
    "cudaGraphExecDestroy": (c_void_p,),
    "cudaGraphInstantiate": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cudaGraphLaunch": (c_void_p, c_void_p),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaSetDevice": (c_int,),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cudaStreamSynchronize": (c_void_p,),
}
"""Name -> types of the arguments; a pointer is what the call writes through, which Python gets as a result."""
SYMBOLS = {"cudaGraphInstantiate": "cudaGraphInstantiateWithFlags"}
"""The signature of cudaGraphInstantiate itself changed with CUDA 12; that of this symbol is the same in all."""


class Code(int):
    """A ``cudaError_t`` with its name."""

    name: str


class SystemRuntime:
    """The calls of ``cuda.bindings.runtime`` on a loaded ``libcudart``: the first item of each result is the error."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)
    cudaStreamNonBlocking = 1
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self, library: Any) -> None:
        self._library = library
        for function in (library.cudaGetErrorName, library.cudaGetErrorString):
            function.restype, function.argtypes = c_char_p, (c_int,)
        for name, types in CALLS.items():
            function = getattr(library, SYMBOLS.get(name, name))
            function.restype, function.argtypes = c_int, types
            setattr(self, name, partial(self._call, function, types))

    def cudaGetErrorString(self, code: int) -> tuple[Code, bytes]:
        return Code(0), self._library.cudaGetErrorString(int(code)) or b""

    def _call(self, function: Any, types: tuple[Any, ...], *given: Any) -> tuple[Any, ...]:
        values = iter(given)
        written: Any = next((kind._type_() for kind in types if hasattr(kind, "contents")), None)  # by the one pointer
        code = Code(function(*(byref(written) if hasattr(kind, "contents") else next(values) for kind in types)))
        name = "cudaSuccess" if code == 0 else (self._library.cudaGetErrorName(code) or b"").decode(errors="replace")
        code.name = name or f"error {int(code)}"
        return (code,) if written is None else (code, written.value)


def system_libraries(root: Path = Path("/")) -> list[str]:
    """Names and paths under which the system may have the library, the newest version first."""

    def version(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in path.name.partition(".so.")[2].split(".") if part.isdigit())

    paths = {path.resolve() for pattern in _FOLDERS for path in root.glob(f"{pattern}/libcudart.so.*")}
    name = ctypes.util.find_library("cudart")
    return [*map(str, sorted(paths, key=version, reverse=True)), *([] if name is None else [name])]


def load_system_runtime(root: Path = Path("/")) -> Any:
    """The first of the system's libraries that finds a device; None where none does."""
    for name in system_libraries(root):
        try:
            runtime: Any = SystemRuntime(ctypes.CDLL(name))
            code, count = runtime.cudaGetDeviceCount()
        except (OSError, AttributeError):
            continue
        if code == 0 and count > 0:
            return runtime
    return None


@lru_cache(maxsize=1)
def runtime() -> Any:
    """The module ``cuda.bindings.runtime``; the system's own library where that is missing or refused by the driver."""
    reason = ""
    try:
        from cuda.bindings import runtime as module

        code, count = module.cudaGetDeviceCount()
        if int(code) == 0 and count > 0:
            return module
    except Exception as error:  # Besides ImportError, a driver that lacks a function raises RuntimeError.
        reason = str(error) or type(error).__name__
    system = load_system_runtime()
    if system is None and reason:
        message = f"cuda-python is not usable ({reason}); {install_line()} installs it"
        raise EngineError(FailureKind.UNSUPPORTED, message)
    return module if system is None else system


def install_line() -> str:
    """The command that installs cuda-python for the driver here."""
    return INSTALL[cuda_series(detect_gpus())]


def require_device() -> None:
    """Raise ``EngineError`` where no GPU can be used: ``DEVICE_LOST`` where none is visible."""
    code, count = runtime().cudaGetDeviceCount()
    name = getattr(code, "name", "")
    if name == "cudaErrorInsufficientDriver" and runtime().cudaDriverGetVersion()[1]:  # 0 where there is no driver
        text = f"the driver is older than the CUDA of cuda-python: {install_line()}, or update the driver"
        raise EngineError(FailureKind.DRIVER, text)
    if name in ("cudaErrorNoDevice", "cudaErrorInsufficientDriver") or (int(code) == 0 and not count):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cause = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise EngineError(FailureKind.DEVICE_LOST, f"no CUDA device is visible{cause}")
    check((code, count), "cudaGetDeviceCount")


def unavailable_reason() -> str | None:
    """Why CUDA cannot be used here; None where it can."""
    try:
        require_device()
    except EngineError as error:
        return error.message
    return None


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack what a cuda-python call returned: nothing, one value or a tuple of values."""
    code, *values = result
    if int(code) != 0:
        name = str(getattr(code, "name", code))
        words = ""
        if name.startswith("cudaError"):  # The driver's own errors have other names, and no words here.
            text = runtime().cudaGetErrorString(code)[1]
            words = f": {text.decode(errors='replace')}" if text else ""
        raise EngineError(classify(f"CUDA error {int(code)}{words}"), f"{call} failed with {name}{words}")
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def call(name: str, *arguments: Any) -> Any:
    """Make a call of CUDA's runtime; raises ``EngineError``."""
    return check(getattr(runtime(), name)(*arguments), name)


def multiprocessors() -> int | None:
    """Multiprocessors of the current device that are on, as CUDA reports them; None where it does not."""
    try:
        attribute = runtime().cudaDeviceAttr.cudaDevAttrMultiProcessorCount
        return int(call("cudaDeviceGetAttribute", attribute, 0))
    except EngineError:
        return None


class _Handle:
    """What CUDA made and takes back."""

    handle: Any = None
    destroy: str

    def close(self) -> None:
        """Give it back. Idempotent; errors of a lost context are ignored."""
        handle, self.handle = self.handle, None
        if handle is not None:
            getattr(runtime(), self.destroy)(handle)


class Stream(_Handle):
    """A CUDA stream of its own that does not wait for the default stream."""

    destroy = "cudaStreamDestroy"

    def __init__(self) -> None:
        self.handle = call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking)

    @property
    def address(self) -> int:
        if self.handle is None:
            raise EngineError(FailureKind.ERROR, "the stream is closed")
        return int(self.handle)

    def synchronize(self) -> None:
        call("cudaStreamSynchronize", self.handle)

    def abandon_capture(self) -> None:
        """End a capture that failed, whatever its state; without a capture nothing happens."""
        code, graph = runtime().cudaStreamEndCapture(self.handle)
        if int(code) == 0 and graph is not None:
            runtime().cudaGraphDestroy(graph)
        runtime().cudaGetLastError()  # Reading the error clears it.


class Event(_Handle):
    """A CUDA event with timing (resolution about half a microsecond)."""

    destroy = "cudaEventDestroy"

    def __init__(self) -> None:
        self.handle = call("cudaEventCreate")

    def record(self, stream: Stream) -> None:
        call("cudaEventRecord", self.handle, stream.handle)

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both must have completed."""
        return float(call("cudaEventElapsedTime", self.handle, end.handle))


class Graph(_Handle):
    """A captured CUDA graph. The caller enqueues once and synchronises before; other shapes need another one."""

    destroy = "cudaGraphExecDestroy"

    def __init__(self, stream: Stream, enqueue: Callable[[], None]) -> None:
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", stream.handle, mode)
        try:
            enqueue()
        except BaseException:
            stream.abandon_capture()  # Left open, it would make every later call on the stream fail.
            raise
        graph = call("cudaStreamEndCapture", stream.handle)
        try:
            self.handle = call("cudaGraphInstantiate", graph, 0)
        finally:
            runtime().cudaGraphDestroy(graph)

    def launch(self, stream: Stream) -> None:
        call("cudaGraphLaunch", self.handle, stream.handle)


class DeviceBuffer(_Handle):
    """Memory on the device for one array of a fixed shape and type."""

    destroy = "cudaFree"

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        # At least one byte: an empty tensor still needs an address that is not null.
        self.handle = int(call("cudaMalloc", max(1, self.nbytes)))

    @property
    def address(self) -> int:
        return int(self.handle)

    def upload(self, array: np.ndarray, stream: Stream) -> None:
        host = np.asarray(array, dtype=self.dtype, order="C")
        kind = runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", self.address, host.ctypes.data, self.nbytes, kind, stream.handle)
        stream.synchronize()

    def download(self, stream: Stream) -> np.ndarray:
        host, kind = np.empty(self.shape, self.dtype), runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", host.ctypes.data, self.address, self.nbytes, kind, stream.handle)
        stream.synchronize()
        return host


def enqueue_delay(stream: Stream, span_us: int = DELAY_US) -> None:
    """Keep a stream busy for ``span_us`` microseconds."""
    driver, function = _delay_kernel()
    span = np.array([span_us * 1000], dtype=np.uint64)
    pointers = np.array([span.ctypes.data], dtype=np.uint64)
    handle = driver.CUstream(stream.address)
    check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, handle, pointers.ctypes.data, 0), "cuLaunchKernel")


@lru_cache(maxsize=1)
def _delay_kernel() -> tuple[Any, Any]:
    """The driver's bindings and the kernel. Needs a current context, which exists wherever a stream does."""
    try:
        from cuda.bindings import driver

        module = check(driver.cuModuleLoadData(_PTX), "cuModuleLoadData")
    except (ImportError, RuntimeError) as error:  # RuntimeError: the driver lacks a function
        raise EngineError(FailureKind.UNSUPPORTED, f"cuda-python is not usable ({error})") from error
    return driver, check(driver.cuModuleGetFunction(module, b"wait"), "cuModuleGetFunction")


@dataclass(eq=False)
class StreamStopwatch:
    """Times executions by events around each of them on their stream, as trtexec does. Implements ``Stopwatch``."""

    enqueue: Callable[[], None]
    stream: Stream
    clock: Callable[[], float]
    delay: Callable[[], None] | None = field(default=None, kw_only=True)
    """Keeps the stream busy for a moment, where ``enqueue`` returns only when the execution has ended."""
    _enqueue_ms: list[float] = field(default_factory=list, init=False)

    @property
    def enqueue_ms(self) -> float | None:
        return None if self.delay or not self._enqueue_ms else float(np.median(self._enqueue_ms))

    def run_once(self) -> None:
        self.enqueue()
        self.stream.synchronize()

    def value_ms(self, executions: int) -> float:
        """See ``Stopwatch``. The device does not wait for the host, unless enqueueing takes longer than executing.

        An execution, or the delay, always stands before the first event: on an empty stream the launch of the execution
        (20 to 150 us on a Jetson's CPU) would lie between the events. trtexec enqueues one ahead, too.
        """
        with ExitStack() as events:
            pairs = [[events.enter_context(closing(Event())) for _ in range(2)] for _ in range(executions)]
            if executions > 1 or self.delay is None:
                self.enqueue()
            for start, end in pairs:
                if self.delay is not None:
                    self.delay()
                before = self.clock()
                start.record(self.stream)
                self.enqueue()
                end.record(self.stream)
                self._enqueue_ms.append(self.clock() - before)
            self.stream.synchronize()
            return float(np.mean([start.elapsed_ms(end) for start, end in pairs]))

    def span_ms(self, executions: int) -> float:
        """See ``Stopwatch``: one event before all executions, which the device has reached, and one after them."""
        with closing(Event()) as start, closing(Event()) as end:
            start.record(self.stream)
            self.stream.synchronize()
            for _ in range(executions):
                self.enqueue()
            end.record(self.stream)
            self.stream.synchronize()
            return start.elapsed_ms(end)
