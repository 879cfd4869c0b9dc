"""CUDA streams, events, graphs and device buffers over ``cuda.bindings.runtime`` (cuda-python), shared by all sessions.

cuda-python is optional and imported on first use; the system's ``libcudart`` takes its place where that works. Every
call's error code is checked; an error raises ``EngineError`` with CUDA's name and description of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from mptune.engines.base import EngineError, FailureKind
from mptune.engines.cuda.system import load_system_runtime

INSTALL = "pip install 'cuda-bindings<13'"
"""Version 12 works with drivers of 525 and later, 13 only with 580 and later (CUDA's release notes, table 3)."""

_FIRST_MAJOR = 12
"""The oldest CUDA that cuda-python's packages of interest are built for: 12.6."""

# A lost device, or one that refuses work, is the machine's fault: the job is tried again. The other sticky errors
# (illegal address, launch failure, assert) come from a kernel, so from the plan: they count as a crash.
_OUT_OF_MEMORY = frozenset({"cudaErrorMemoryAllocation"})
_DEVICE_LOST = frozenset(
    {
        "cudaErrorNoDevice",
        "cudaErrorInvalidDevice",
        "cudaErrorDevicesUnavailable",
        "cudaErrorDeviceUninitialized",
        "cudaErrorECCUncorrectable",
        "cudaErrorNvlinkUncorrectable",
        "cudaErrorHardwareStackError",
        "cudaErrorInsufficientDriver",
        "cudaErrorSystemNotReady",
        "cudaErrorSystemDriverMismatch",
        "cudaErrorCompatNotSupportedOnDevice",
        "cudaErrorInitializationError",
        "cudaErrorUnknown",
    }
)
_CRASHED = frozenset(
    {
        "cudaErrorIllegalAddress",
        "cudaErrorLaunchFailure",
        "cudaErrorLaunchTimeout",
        "cudaErrorAssert",
        "cudaErrorMisalignedAddress",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorIllegalInstruction",
    }
)


@lru_cache(maxsize=1)
def runtime() -> Any:
    """The module ``cuda.bindings.runtime``; the system's own library where that is missing or refused and this works.

    Raises:
        EngineError: cuda-python is not installed or does not load, and the system has no library that finds a device.
    """
    bindings, error = _bindings()
    if bindings is not None and _finds_devices(bindings):
        return bindings
    system = load_system_runtime()
    if system is not None:
        return system
    if bindings is None:
        message = f"cuda-python is not usable ({error}); {INSTALL} installs it"
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


def missing_package() -> str:
    """The command that makes CUDA usable here; empty where nothing that can be installed is missing."""
    module, _ = _bindings()
    if module is None:
        return INSTALL
    driver, built_for = versions()
    return INSTALL if built_for > driver >= 1000 * _FIRST_MAJOR else ""


def kind_of(name: str) -> FailureKind:
    """The kind of failure of a CUDA error, by its name (such as ``cudaErrorMemoryAllocation``)."""
    if name in _OUT_OF_MEMORY:
        return FailureKind.OUT_OF_MEMORY
    if name in _DEVICE_LOST:
        return FailureKind.DEVICE_LOST
    if name in _CRASHED:
        return FailureKind.CRASH
    return FailureKind.ERROR


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack what a cuda-python call returned: nothing, one value or a tuple of values.

    Raises:
        EngineError: the error code is not success.
    """
    code, values = result[0], result[1:]
    if int(code) != 0:
        name = str(getattr(code, "name", code))
        words = ""
        error, text = runtime().cudaGetErrorString(code)
        if int(error) == 0 and text is not None:
            words = ": " + (text.decode(errors="replace") if isinstance(text, bytes) else str(text))
        raise EngineError(kind_of(name), f"{call} failed with {name}{words}")
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def device_count() -> int:
    """Number of visible CUDA devices; 0 also where there is no driver.

    Raises:
        EngineError: the driver is too old for the runtime; the message has both versions and what to install.
    """
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
    major = driver // 1000
    if major >= _FIRST_MAJOR:
        return f"{words}: pip install 'cuda-bindings<{major + 1}'"
    return f"{words}: update the driver to one for CUDA {_FIRST_MAJOR} or later"


def version_text(version: int) -> str:
    """A version as CUDA counts them, such as 12060, as people write it: 12.6."""
    return f"{version // 1000}.{version % 1000 // 10}"


def versions() -> tuple[int, int]:
    """CUDA versions of the driver and of the runtime as CUDA counts them: 12060 is 12.6; 0 where there is no driver."""
    cudart = runtime()
    driver = check(cudart.cudaDriverGetVersion(), "cudaDriverGetVersion")
    return int(driver), int(check(cudart.cudaRuntimeGetVersion(), "cudaRuntimeGetVersion"))


def set_device(index: int) -> None:
    """Make a device the current one of this thread."""
    check(runtime().cudaSetDevice(index), "cudaSetDevice")


def synchronize_device() -> None:
    """Wait until the current device has finished everything."""
    check(runtime().cudaDeviceSynchronize(), "cudaDeviceSynchronize")


class Stream:
    """A CUDA stream of its own that does not wait for the default stream."""

    def __init__(self) -> None:
        cudart = runtime()
        flags = cudart.cudaStreamNonBlocking
        self.handle: Any = check(cudart.cudaStreamCreateWithFlags(flags), "cudaStreamCreateWithFlags")

    @property
    def address(self) -> int:
        """The ``cudaStream_t`` as an integer, as engines take it.

        Raises:
            EngineError: the stream is closed.
        """
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

    def close(self) -> None:
        """Destroy the stream. Idempotent; errors of a lost context are ignored."""
        handle, self.handle = self.handle, None
        if handle is not None:
            runtime().cudaStreamDestroy(handle)


class Event:
    """A CUDA event with timing (resolution about half a microsecond)."""

    def __init__(self) -> None:
        self.handle: Any = check(runtime().cudaEventCreate(), "cudaEventCreate")

    def record(self, stream: Stream) -> None:
        """Enqueue the event on the stream."""
        check(runtime().cudaEventRecord(self.handle, stream.handle), "cudaEventRecord")

    def synchronize(self) -> None:
        """Wait until the event has completed."""
        check(runtime().cudaEventSynchronize(self.handle), "cudaEventSynchronize")

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds from this event to a later one; both must have completed."""
        return float(check(runtime().cudaEventElapsedTime(self.handle, end.handle), "cudaEventElapsedTime"))

    def close(self) -> None:
        """Destroy the event. Idempotent."""
        handle, self.handle = self.handle, None
        if handle is not None:
            runtime().cudaEventDestroy(handle)


class Graph:
    """A captured CUDA graph, ready to be launched.

    The caller enqueues once and synchronises before the capture, and captures again when shapes or addresses change.
    """

    def __init__(self, stream: Stream, enqueue: Callable[[], None]) -> None:
        """Capture what ``enqueue`` puts on the stream.

        Raises:
            EngineError: something in it cannot be captured; the stream is usable again afterwards.
        """
        cudart = runtime()
        self.handle: Any = None
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
        """Enqueue the graph.

        Raises:
            EngineError: the graph is closed, or cannot be enqueued.
        """
        if self.handle is None:
            raise EngineError(FailureKind.ERROR, "the CUDA graph is closed")
        check(runtime().cudaGraphLaunch(self.handle, stream.handle), "cudaGraphLaunch")

    def close(self) -> None:
        """Destroy the graph. Idempotent."""
        handle, self.handle = self.handle, None
        if handle is not None:
            runtime().cudaGraphExecDestroy(handle)


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
