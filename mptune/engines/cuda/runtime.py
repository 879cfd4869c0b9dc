"""CUDA through ``cuda.bindings``: streams, events, graphs, buffers, a delay kernel and a stopwatch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda.system import load_system_runtime
from mptune.targets.detect import cuda_series, detect_gpus

INSTALL = {12: "pip install 'cuda-bindings<13'", 13: "pip install cuda-bindings"}
"""By the CUDA of the driver: version 12 works with drivers of 525 and later, 13 only with 580 and later (CUDA's release
notes, table 3)."""
_FIRST_MAJOR = 12
"""The oldest CUDA that cuda-python's packages of interest are built for: 12.6."""

# A lost device, or one that refuses work, is the machine's fault: the job is tried again. The other sticky errors
# (illegal address, launch failure, assert) come from a kernel, so from the plan: they count as a crash.
_DEVICE_LOST = (
    *("cudaErrorNoDevice", "cudaErrorInvalidDevice", "cudaErrorDevicesUnavailable", "cudaErrorDeviceUninitialized"),
    *("cudaErrorECCUncorrectable", "cudaErrorNvlinkUncorrectable", "cudaErrorHardwareStackError"),
    *("cudaErrorSystemNotReady", "cudaErrorSystemDriverMismatch"),
    *("cudaErrorCompatNotSupportedOnDevice", "cudaErrorInitializationError", "cudaErrorUnknown"),
)
_CRASHED = (
    *("cudaErrorIllegalAddress", "cudaErrorLaunchFailure", "cudaErrorLaunchTimeout", "cudaErrorAssert"),
    *("cudaErrorMisalignedAddress", "cudaErrorInvalidAddressSpace", "cudaErrorInvalidPc"),
    "cudaErrorIllegalInstruction",
)
KINDS: Mapping[str, FailureKind] = {
    "cudaErrorMemoryAllocation": FailureKind.OUT_OF_MEMORY,
    "cudaErrorInsufficientDriver": FailureKind.DRIVER,
    **dict.fromkeys(_DEVICE_LOST, FailureKind.DEVICE_LOST),
    **dict.fromkeys(_CRASHED, FailureKind.CRASH),
}
"""Name of a CUDA error -> kind of failure; any other is an ordinary error."""


@lru_cache(maxsize=1)
def runtime() -> Any:
    """The module ``cuda.bindings.runtime``; the system's own library where that is missing or refused."""
    bindings, error = _bindings()
    if bindings is not None and _finds_devices(bindings):
        return bindings
    system = load_system_runtime()
    if system is not None:
        return system
    if bindings is None:
        message = f"cuda-python is not usable ({error}); {install_line()} installs it"
        raise EngineError(FailureKind.UNSUPPORTED, message) from error
    return bindings


def _bindings() -> tuple[Any, Exception | None]:
    try:
        from cuda.bindings import runtime as module
    except Exception as error:  # Besides ImportError, a broken driver library raises RuntimeError on import.
        return None, error
    return module, None


def _finds_devices(module: Any) -> bool:
    try:
        code, count = module.cudaGetDeviceCount()
    except Exception:  # cuda-python raises RuntimeError where the driver lacks a function
        return False
    return int(code) == 0 and count > 0


def unavailable_reason() -> str | None:
    """Why CUDA cannot be used here; None where it can."""
    try:
        count = device_count()
    except EngineError as error:
        return error.message
    if count:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "no CUDA device is visible" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})")


def install_line() -> str:
    """The command that installs cuda-python for the driver here."""
    return INSTALL[cuda_series(detect_gpus())]


def missing_package() -> str:
    """The command that makes CUDA usable here; empty where nothing that can be installed is missing."""
    module, _ = _bindings()
    if module is None:
        return install_line()
    driver, built_for = versions()
    return _older_bindings(driver) if built_for > driver >= 1000 * _FIRST_MAJOR else ""


def _older_bindings(driver: int) -> str:
    """How cuda-python gets as old as the driver, without taking from torch what that brought."""
    command = f"pip install 'cuda-bindings<{driver // 1000 + 1}'"
    try:
        needed = any(name.startswith("cuda-bindings") for name in metadata.requires("torch") or ())
    except metadata.PackageNotFoundError:
        needed = False
    return (
        f"update the driver, or, in an environment without torch, which needs its version: {command}"
        if needed
        else command
    )


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack what a cuda-python call returned: nothing, one value or a tuple of values."""
    code, values = result[0], result[1:]
    if int(code) != 0:
        name = str(getattr(code, "name", code))
        words = ""
        error, text = runtime().cudaGetErrorString(code)
        if int(error) == 0 and text is not None:
            words = ": " + (text.decode(errors="replace") if isinstance(text, bytes) else str(text))
        raise EngineError(KINDS.get(name, FailureKind.ERROR), f"{call} failed with {name}{words}")
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def device_count() -> int:
    """Number of visible CUDA devices; 0 also where there is no driver."""
    code, count = runtime().cudaGetDeviceCount()
    name = getattr(code, "name", "")
    if name == "cudaErrorInsufficientDriver" and versions()[0]:
        raise EngineError(FailureKind.UNSUPPORTED, _insufficient(*versions()))
    if name in {"cudaErrorNoDevice", "cudaErrorInsufficientDriver"}:
        return 0
    return int(check((code, count), "cudaGetDeviceCount"))


def _insufficient(driver: int, built_for: int) -> str:
    """What to do about a driver that is older than the runtime in cuda-python.

    A runtime works with every driver of its own major version (NVIDIA's "CUDA minor version compatibility").
    """
    words = (
        f"the driver supports CUDA {version_text(driver)}, and cuda-python is built for CUDA {version_text(built_for)}"
    )
    if driver // 1000 >= _FIRST_MAJOR:
        return f"{words}: {_older_bindings(driver)}"
    return f"{words}: update the driver to one for CUDA {_FIRST_MAJOR} or later"


def version_text(version: int) -> str:
    """A version as CUDA counts them, such as 12060, as people write it: 12.6."""
    return f"{version // 1000}.{version % 1000 // 10}"


def versions() -> tuple[int, int]:
    """CUDA versions of the driver and of the runtime as CUDA counts them: 12060 is 12.6; 0 where there is no driver."""
    cudart = runtime()
    driver = check(cudart.cudaDriverGetVersion(), "cudaDriverGetVersion")
    return int(driver), int(check(cudart.cudaRuntimeGetVersion(), "cudaRuntimeGetVersion"))


def multiprocessors() -> int | None:
    """Multiprocessors of the current device that are on, as CUDA reports them; None where it does not."""
    try:
        attribute = runtime().cudaDeviceAttr.cudaDevAttrMultiProcessorCount
        return int(check(runtime().cudaDeviceGetAttribute(attribute, 0), "cudaDeviceGetAttribute"))
    except EngineError:
        return None


def set_device(index: int) -> None:
    """Make a device the current one of this thread."""
    check(runtime().cudaSetDevice(index), "cudaSetDevice")


def synchronize_device() -> None:
    """Wait until the current device has finished everything."""
    check(runtime().cudaDeviceSynchronize(), "cudaDeviceSynchronize")


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
        cudart = runtime()
        flags = cudart.cudaStreamNonBlocking
        self.handle = check(cudart.cudaStreamCreateWithFlags(flags), "cudaStreamCreateWithFlags")

    @property
    def address(self) -> int:
        """The ``cudaStream_t`` as an integer, as engines take it."""
        if self.handle is None:
            raise EngineError(FailureKind.ERROR, "the stream is closed")
        return int(self.handle)

    def synchronize(self) -> None:
        """Wait until everything enqueued so far has finished."""
        check(runtime().cudaStreamSynchronize(self.handle), "cudaStreamSynchronize")

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
        self.handle = check(runtime().cudaEventCreate(), "cudaEventCreate")

    def record(self, stream: Stream) -> None:
        """Enqueue the event on the stream."""
        check(runtime().cudaEventRecord(self.handle, stream.handle), "cudaEventRecord")

    def synchronize(self) -> None:
        """Wait until the event has completed."""
        check(runtime().cudaEventSynchronize(self.handle), "cudaEventSynchronize")

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both must have completed."""
        return float(check(runtime().cudaEventElapsedTime(self.handle, end.handle), "cudaEventElapsedTime"))


class Graph(_Handle):
    """A captured CUDA graph, ready to be launched.

    The caller enqueues once and synchronises before the capture, and captures again when shapes or addresses change.
    """

    destroy = "cudaGraphExecDestroy"

    def __init__(self, stream: Stream, enqueue: Callable[[], None]) -> None:
        """Capture what ``enqueue`` puts on the stream."""
        cudart = runtime()
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        check(cudart.cudaStreamBeginCapture(stream.handle, mode), "cudaStreamBeginCapture")
        try:
            enqueue()
        except BaseException:
            stream.abandon_capture()  # Left open, it would make every later call on the stream fail.
            raise
        graph = check(cudart.cudaStreamEndCapture(stream.handle), "cudaStreamEndCapture")
        try:
            self.handle = check(cudart.cudaGraphInstantiate(graph, 0), "cudaGraphInstantiate")
        finally:
            cudart.cudaGraphDestroy(graph)

    def launch(self, stream: Stream) -> None:
        """Enqueue the graph."""
        if self.handle is None:
            raise EngineError(FailureKind.ERROR, "the CUDA graph is closed")
        check(runtime().cudaGraphLaunch(self.handle, stream.handle), "cudaGraphLaunch")


class DeviceBuffer:
    """Memory on the device for one array of a fixed shape and type."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        # At least one byte: an empty tensor still needs an address that is not null.
        self.address: int | None = int(check(runtime().cudaMalloc(max(1, self.nbytes)), "cudaMalloc"))

    def upload(self, array: np.ndarray, stream: Stream) -> None:
        """Copy a host array of this shape and type to the device and wait for it."""
        host = np.asarray(array, dtype=self.dtype, order="C")
        if host.shape != self.shape:
            raise ValueError(f"shape {host.shape} does not fit a buffer of shape {self.shape}")
        cudart = runtime()
        kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        copied = cudart.cudaMemcpyAsync(self.address, host.ctypes.data, self.nbytes, kind, stream.handle)
        check(copied, "cudaMemcpyAsync")
        stream.synchronize()

    def download(self, stream: Stream) -> np.ndarray:
        """Wait for the stream and copy to a new host array."""
        host = np.empty(self.shape, self.dtype)
        cudart = runtime()
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        copied = cudart.cudaMemcpyAsync(host.ctypes.data, self.address, self.nbytes, kind, stream.handle)
        check(copied, "cudaMemcpyAsync")
        stream.synchronize()
        return host

    def close(self) -> None:
        """Free the memory. Idempotent."""
        address, self.address = self.address, None
        if address is not None:
            runtime().cudaFree(address)


DELAY_US = 200
"""Longer than a launch takes."""
_NAME = b"wait"

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
"""


def enqueue_delay(stream: Stream, span_us: int = DELAY_US) -> None:
    """Keep a stream busy for ``span_us`` microseconds."""
    driver, function = _kernel()
    span = np.array([span_us * 1000], dtype=np.uint64)
    pointers = np.array([span.ctypes.data], dtype=np.uint64)
    code = driver.cuLaunchKernel(
        function, 1, 1, 1, 1, 1, 1, 0, driver.CUstream(stream.address), pointers.ctypes.data, 0
    )[0]
    _check(driver, code, "cuLaunchKernel")


@lru_cache(maxsize=1)
def _kernel() -> tuple[Any, Any]:
    """The driver's bindings and the kernel. Needs a current context, which exists wherever a stream does."""
    try:
        from cuda.bindings import driver

        code, module = driver.cuModuleLoadData(_PTX + b"\0")
    except (ImportError, RuntimeError) as error:  # RuntimeError: the driver lacks a function
        raise EngineError(FailureKind.UNSUPPORTED, f"cuda-python is not usable ({error})") from error
    _check(driver, code, "cuModuleLoadData")
    code, function = driver.cuModuleGetFunction(module, _NAME)
    _check(driver, code, "cuModuleGetFunction")
    return driver, function


def _check(driver: Any, code: Any, call: str) -> None:
    if int(code) != 0:
        raise EngineError(FailureKind.ERROR, f"{call} failed with {getattr(code, 'name', code)}")


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
        pairs: list[tuple[Event, Event]] = []
        try:
            for _ in range(executions):
                pairs.append((Event(), Event()))
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
        finally:
            for event in (event for pair in pairs for event in pair):
                event.close()

    def span_ms(self, executions: int) -> float:
        """See ``Stopwatch``: one event before all executions, which the device has reached, and one after them."""
        start, end = Event(), Event()
        try:
            start.record(self.stream)
            self.stream.synchronize()
            for _ in range(executions):
                self.enqueue()
            end.record(self.stream)
            self.stream.synchronize()
            return start.elapsed_ms(end)
        finally:
            start.close()
            end.close()
