# ruff: noqa: N801, N802, N815 (the names are CUDA's)
"""CUDA's runtime on host memory: what mptune uses of ``cuda.bindings.runtime``, with its order of calls held.

Work that is put on a stream is done when the stream is synchronised and not before, so that whoever reads too early
reads what was there. Addresses are none of the host's, and none is given twice. Sources of the rules: the reference of
CUDA's runtime API (``cuda_runtime_api.h``, in cuda-python's docstrings) and, for memory in use, ``enqueueV3`` in
NvInferRuntime.h.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

_FIRST_ADDRESS = 0x7_0000_0000_0000
"""Above every address that Linux gives to a program on x86-64 and on ARM with 48 bits."""
_ALIGNMENT = 512
"""cudaMalloc gives at least 256 (CUDA C++ Programming Guide, "Device Memory Accesses")."""
_GUARD = 4096
_COPY_BYTES_PER_MS = 10e6


class cudaError_t(enum.IntEnum):
    """The errors that are returned here; values of ``driver_types.h``."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorNotReady = 600
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901
    cudaErrorStreamCaptureUnmatched = 903


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


@dataclass(eq=False)
class Allocation:
    """Device memory; ``version`` changes with each write."""

    address: int
    data: np.ndarray
    is_alive: bool = True
    version: int = 0

    @property
    def end(self) -> int:
        return self.address + self.data.size


@dataclass(frozen=True, eq=False)
class Work:
    """Something on a stream.

    Attributes:
        run: does it, and returns how many milliseconds it took on the device.
        places: memory that it reads or writes.
        owner: the execution context that it belongs to, weakly: no graph keeps one alive; None for copies and events.
    """

    run: Callable[[], float]
    places: tuple[Allocation, ...] = ()
    owner: weakref.ReferenceType[Any] | None = None


@dataclass(eq=False)
class Handle:
    """An opaque handle, as cuda-python's: ``int()`` gives the pointer."""

    pointer: int

    def __int__(self) -> int:
        return self.pointer


@dataclass(eq=False)
class Stream(Handle):
    queue: deque[Work] = field(default_factory=deque)
    since_s: float = 0.0
    captured: list[Work] | None = None
    is_invalid: bool = False
    """A call was made that cannot be captured: ending the capture gives no graph."""


@dataclass(eq=False)
class Event(Handle):
    records: int = 0
    done: int = 0
    ms: float = 0.0


@dataclass(eq=False)
class Graph(Handle):
    work: tuple[Work, ...] = ()


class GraphExec(Graph):
    pass


class ForbiddenError(AssertionError):
    """A call whose behaviour NVIDIA's headers leave undefined."""


class CudaError(Exception):
    """A call that fails as documented; the caller gets the code."""


class Rules:
    """The record of calls whose behaviour is undefined and of calls that return an error, since an argument or their
    order is wrong; also in a file that outlives a worker."""

    def __init__(self, log: Path | None = None) -> None:
        self.forbidden: list[str] = []
        self.refused: list[str] = []
        self._log = log

    def forbid(self, text: str) -> NoReturn:
        """On a device the process would have crashed, or gone on with wrong values."""
        self.forbidden.append(text)
        self._write(f"forbidden: {text}")
        raise ForbiddenError(text)

    def refuse(self, text: str) -> None:
        self.refused.append(text)
        self._write(f"refused: {text}")

    def _write(self, line: str) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def _as_cuda_python(device: type[FakeCuda]) -> type[FakeCuda]:
    """Make CUDA's functions return what cuda-python's do: the error, then the value of those that have one."""

    def returning(function: Callable[..., Any], has_value: bool) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> tuple[Any, ...]:
            error, value = cudaError_t.cudaSuccess, None
            try:
                value = function(*arguments)
            except CudaError as failure:
                (error,) = failure.args
            return (error, value) if has_value else (error,)

        return call

    for name, function in list(vars(device).items()):
        if name.startswith("cuda") and isfunction(function):
            setattr(device, name, returning(function, function.__annotations__["return"] != "None"))
    return device


@_as_cuda_python
class FakeCuda:
    """A device. The public names that begin with ``cuda`` are those of ``cuda.bindings.runtime``."""

    cudaMemcpyKind = cudaMemcpyKind
    cudaStreamCaptureMode = cudaStreamCaptureMode
    cudaStreamNonBlocking = 1
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrMultiProcessorCount=16)  # driver_types.h

    def __init__(
        self,
        memory_bytes: int = 8 << 30,
        version: int = 12060,
        rules: Rules | None = None,
        *,
        most_wait_ms: float = 0.0,
    ) -> None:
        """Nothing is allocated.

        Args:
            memory_bytes: of the device.
            version: of CUDA, such as 12060.
            rules: takes what is forbidden.
            most_wait_ms: the host waits as long as the device works, at most this long in one call.
        """
        self.memory_bytes, self.version, self.most_wait_ms = memory_bytes, version, most_wait_ms
        self.rules = rules or Rules()
        self.now_ms = 0.0
        self.captures = self.launches = 0
        self.contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        """Execution contexts, each with the ``_stream`` that it last ran on."""
        self._allocations: dict[int, Allocation] = {}
        self._addresses: list[int] = []
        self._next_address = _FIRST_ADDRESS
        self._numbers = itertools.count(0x1000, 0x10)
        self._handles: dict[int, Handle] = {}

    # -- for engines and tests ----------------------------------------------------------------------------------

    @property
    def memory(self) -> list[Allocation]:
        """Allocations that were not freed."""
        return [place for place in self._allocations.values() if place.is_alive]

    @property
    def streams(self) -> list[Stream]:
        """Streams that were not destroyed."""
        return [handle for handle in self._handles.values() if isinstance(handle, Stream)]

    @property
    def leaks(self) -> list[str]:
        """What was made and neither freed nor destroyed."""
        memory = [f"{place.data.size} bytes" for place in self.memory]
        return memory + [type(handle).__name__.lower() for handle in self._handles.values()]

    def allocation(self, address: int, size: int, whose: str) -> Allocation:
        """The allocation in which so many bytes lie from this address; anything else is forbidden."""
        position = bisect_right(self._addresses, address) - 1
        place = self._allocations[self._addresses[position]] if position >= 0 else None
        if place is None or address >= place.end + _GUARD:
            self.rules.forbid(f"{whose}: {address:#x} is no device memory")
        if not place.is_alive:
            self.rules.forbid(f"{whose}: the memory at {address:#x} was freed")
        if address + size > place.end:
            self.rules.forbid(f"{whose}: {size} bytes from {address:#x} reach past the {place.data.size} bytes there")
        return place

    def allocate(self, size: int) -> Allocation | None:
        """New memory, in which all bits are set (NaN in every floating type); None where too little is left."""
        if sum(place.data.size for place in self.memory) + size > self.memory_bytes:
            return None
        place = Allocation(self._next_address, np.full(size, 0xFF, np.uint8))
        self._next_address = -(-(place.end + _GUARD) // _ALIGNMENT) * _ALIGNMENT
        self._allocations[place.address] = place
        self._addresses.append(place.address)
        return place

    def release(self, allocation: Allocation, whose: str) -> None:
        """Free memory; forbidden while work that uses it has not been synchronised (``enqueueV3``)."""
        if any(allocation in work.places for stream in self.streams for work in stream.queue):
            self.rules.forbid(f"{whose}: work that uses the memory has not been synchronised")
        allocation.is_alive = False
        allocation.data = allocation.data[:0]

    def is_device_address(self, address: int) -> bool:
        return _FIRST_ADDRESS <= address < self._next_address

    def stream(self, handle: Any, whose: str) -> Stream:
        """A living stream, and not the default one: an engine would synchronise the whole device (``enqueueV3``)."""
        if handle is None or int(handle) == 0:
            self.rules.forbid(f"{whose}: the default stream")
        return self._living(Stream, handle, whose)

    def put(self, stream: Stream, work: Work) -> None:
        """Put work on a stream, or into the graph that is being captured from it."""
        if stream.captured is not None:
            stream.captured.append(work)
            return
        if not stream.queue:
            stream.since_s = time.monotonic()
        stream.queue.append(work)

    def finish(self, stream: Stream) -> None:
        """Do everything that is on a stream."""
        before_ms = self.now_ms
        while stream.queue:
            work = stream.queue.popleft()
            if not all(place.is_alive for place in work.places):
                self.rules.forbid("work on a stream uses memory that was freed")
            self.now_ms += work.run()
        wait_ms = min(self.now_ms - before_ms, self.most_wait_ms)
        if wait_ms > 0.0:
            time.sleep(max(0.0, stream.since_s + wait_ms / 1000 - time.monotonic()))

    # -- CUDA's names -------------------------------------------------------------------------------------------

    def cudaGetDeviceCount(self) -> int:
        return 1

    def cudaDriverGetVersion(self) -> int:
        return self.version

    def cudaSetDevice(self, device: int) -> None:
        if device != 0:
            raise CudaError(cudaError_t.cudaErrorInvalidDevice)

    def cudaGetErrorString(self, error: int) -> bytes:
        words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in cudaError_t(error).name[9:])
        return words.strip().encode()

    def cudaGetLastError(self) -> None:
        pass

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> int:
        if (attribute, device) != (self.cudaDeviceAttr.cudaDevAttrMultiProcessorCount, 0):
            raise CudaError(cudaError_t.cudaErrorInvalidValue)
        return 16

    def cudaDeviceSynchronize(self) -> None:
        self._refuse_in_capture("cudaDeviceSynchronize", self.streams)
        for stream in self.streams:
            self.finish(stream)

    def cudaMalloc(self, size: int) -> int:
        self._refuse_in_capture("cudaMalloc", self.streams)
        if size <= 0:
            self.rules.forbid(f"cudaMalloc of {size} bytes: an address of nothing is null")
        place = self.allocate(size)
        if place is None:
            raise CudaError(cudaError_t.cudaErrorMemoryAllocation)
        return place.address

    def cudaFree(self, address: int) -> None:
        self._refuse_in_capture("cudaFree", self.streams)
        place = self._allocations.get(address)
        if place is None or not place.is_alive:
            self.rules.forbid(f"cudaFree: nothing is allocated at {address:#x}")
        self.release(place, "cudaFree")

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: Any) -> None:
        is_upload = kind == cudaMemcpyKind.cudaMemcpyHostToDevice
        on_device, on_host = (to, source) if is_upload else (source, to)
        on_stream = self.stream(stream, "cudaMemcpyAsync")
        place = self.allocation(on_device, size, "cudaMemcpyAsync")
        if not on_host or self.is_device_address(on_host):
            self.rules.forbid(f"cudaMemcpyAsync: {on_host:#x} is no memory of the host")

        def copy() -> float:
            first = on_device - place.address
            if is_upload:
                place.data[first : first + size] = np.frombuffer(ctypes.string_at(on_host, size), np.uint8)
                place.version += 1
            else:
                ctypes.memmove(on_host, place.data[first : first + size].tobytes(), size)
            return size / _COPY_BYTES_PER_MS

        self.put(on_stream, Work(copy, (place,)))

    def cudaStreamCreateWithFlags(self, flags: int) -> Stream:
        if flags != self.cudaStreamNonBlocking:
            self.rules.forbid(f"a stream with flags {flags} waits for the default stream")
        return self._add(Stream(next(self._numbers)))

    def cudaStreamDestroy(self, stream: Any) -> None:
        on_stream = self.stream(stream, "cudaStreamDestroy")
        if any(context._stream == int(on_stream) for context in self.contexts):
            self.rules.forbid("cudaStreamDestroy: an execution context that ran on the stream is alive")
        self.finish(on_stream)  # The device completes it; only the handle is gone.
        del self._handles[int(on_stream)]

    def cudaStreamSynchronize(self, stream: Any) -> None:
        on_stream = self.stream(stream, "cudaStreamSynchronize")
        self._refuse_in_capture("cudaStreamSynchronize", [on_stream])
        self.finish(on_stream)

    def cudaStreamBeginCapture(self, stream: Any, mode: int) -> None:
        on_stream = self.stream(stream, "cudaStreamBeginCapture")
        if on_stream.captured is not None or mode != cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal:
            self.rules.refuse("cudaStreamBeginCapture: the stream is capturing already, or its mode is another")
            raise CudaError(cudaError_t.cudaErrorInvalidValue)
        on_stream.captured, on_stream.is_invalid = [], False

    def cudaStreamEndCapture(self, stream: Any) -> Graph:
        on_stream = self.stream(stream, "cudaStreamEndCapture")
        captured, on_stream.captured = on_stream.captured, None
        if captured is None:
            raise CudaError(cudaError_t.cudaErrorStreamCaptureUnmatched)
        if on_stream.is_invalid:
            raise CudaError(cudaError_t.cudaErrorStreamCaptureInvalidated)
        self.captures += 1
        return self._add(Graph(next(self._numbers), tuple(captured)))

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> GraphExec:
        return self._add(GraphExec(next(self._numbers), self._living(Graph, graph, "cudaGraphInstantiate").work))

    def cudaGraphDestroy(self, graph: Any) -> None:
        del self._handles[int(self._living(Graph, graph, "cudaGraphDestroy"))]

    def cudaGraphExecDestroy(self, graph: Any) -> None:
        del self._handles[int(self._living(GraphExec, graph, "cudaGraphExecDestroy"))]

    def cudaGraphLaunch(self, graph: Any, stream: Any) -> None:
        on_stream = self.stream(stream, "cudaGraphLaunch")
        for work in self._living(GraphExec, graph, "cudaGraphLaunch").work:
            if not all(place.is_alive for place in work.places):
                self.rules.forbid("cudaGraphLaunch: memory whose address was captured was freed")
            self.put(on_stream, work)
        self.launches += 1

    def cudaEventCreate(self) -> Event:
        return self._add(Event(next(self._numbers)))

    def cudaEventRecord(self, event: Any, stream: Any) -> None:
        recorded: Event = self._living(Event, event, "cudaEventRecord")
        on_stream = self.stream(stream, "cudaEventRecord")
        recorded.records += 1

        def record() -> float:
            recorded.done, recorded.ms = recorded.done + 1, self.now_ms
            return 0.0

        self.put(on_stream, Work(record))

    def cudaEventElapsedTime(self, start: Any, end: Any) -> float:
        events = [self._living(Event, event, "cudaEventElapsedTime") for event in (start, end)]
        if not all(event.records for event in events):
            self.rules.refuse("cudaEventElapsedTime: an event was not recorded")
            raise CudaError(cudaError_t.cudaErrorInvalidResourceHandle)
        if any(event.done < event.records for event in events):
            self.rules.refuse("cudaEventElapsedTime: an event has not completed")
            raise CudaError(cudaError_t.cudaErrorNotReady)
        return events[1].ms - events[0].ms

    def cudaEventDestroy(self, event: Any) -> None:
        """An event may be destroyed before it is complete."""
        del self._handles[int(self._living(Event, event, "cudaEventDestroy"))]

    # -- inside -------------------------------------------------------------------------------------------------

    def _add(self, handle: Any) -> Any:
        self._handles[int(handle)] = handle
        return handle

    def _living(self, kind: type[Any], handle: Any, whose: str) -> Any:
        living = None if handle is None else self._handles.get(int(handle))
        if type(living) is not kind:
            self.rules.forbid(f"{whose}: it was destroyed, or is no {kind.__name__.lower()}")
        return living

    def _refuse_in_capture(self, call: str, streams: Iterable[Stream]) -> None:
        """Fail where a call meets a capture, which it spoils (``cudaThreadExchangeStreamCaptureMode``)."""
        capturing = [stream for stream in streams if stream.captured is not None]
        for stream in capturing:
            stream.is_invalid = True
        if capturing:
            self.rules.refuse(f"{call} during a capture")
            raise CudaError(cudaError_t.cudaErrorStreamCaptureUnsupported)
