# ruff: noqa: N802, N815 (the names are CUDA's)
"""CUDA's runtime on host memory: what mptune uses of ``cuda.bindings.runtime``, with its order of calls held.

Work that is put on a stream is done when the stream is synchronised and not before, so that whoever reads too early
reads what was there. Addresses are none of the host's, and none is given twice. Sources of the rules: the reference of
CUDA's runtime API (``cuda_runtime_api.h``, in cuda-python's docstrings) and, for memory in use, ``enqueueV3`` in
NvInferRuntime.h.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.device.handles import (
    Allocation,
    Event,
    Graph,
    GraphExec,
    Handle,
    Rules,
    Stream,
    Work,
    cudaError_t,
    cudaMemcpyKind,
    cudaStreamCaptureMode,
)

_FIRST_ADDRESS = 0x7_0000_0000_0000
"""Above every address that Linux gives to a program on x86-64 and on ARM with 48 bits."""
_ALIGNMENT = 512
"""cudaMalloc gives at least 256 (CUDA C++ Programming Guide, "Device Memory Accesses")."""
_GUARD = 4096
_COPY_BYTES_PER_MS = 10e6


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
        sm_count: int = 16,
    ) -> None:
        """Nothing is allocated.

        Args:
            memory_bytes: of the device.
            version: of CUDA, such as 12060.
            rules: takes what is forbidden.
            most_wait_ms: the host waits as long as the device works, and at most so long in one call.
            sm_count: multiprocessors that are on.
        """
        self.rules, self.sm_count = rules or Rules(), sm_count
        self.most_wait_ms = most_wait_ms
        self.memory_bytes = memory_bytes
        self.version = version
        self.now_ms = 0.0
        self.captures = self.launches = self.executions = 0
        self.contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        """Execution contexts, each with the ``_stream`` that it last ran on."""
        self._allocations: dict[int, Allocation] = {}
        self._addresses: list[int] = []
        self._next_address = _FIRST_ADDRESS
        self._numbers = itertools.count(0x1000, 0x10)
        self._handles: dict[int, Handle] = {}
        self._last_error = cudaError_t.cudaSuccess

    # -- for engines and tests ----------------------------------------------------------------------------------

    @property
    def memory(self) -> list[Allocation]:
        """Allocations that were not freed."""
        return [one for one in self._allocations.values() if one.is_alive]

    @property
    def used_bytes(self) -> int:
        """Memory in use."""
        return sum(one.data.size for one in self.memory)

    @property
    def streams(self) -> list[Stream]:
        """Streams that were not destroyed."""
        return [one for one in self._handles.values() if isinstance(one, Stream)]

    @property
    def leaks(self) -> list[str]:
        """What was made and neither freed nor destroyed."""
        memory = [f"{one.data.size} bytes" for one in self.memory]
        return memory + [type(one).__name__.lower() for one in self._handles.values()]

    def allocation(self, address: int, size: int, whose: str) -> Allocation:
        """The allocation in which so many bytes lie from this address; anything else is forbidden."""
        position = bisect_right(self._addresses, address) - 1
        found = self._allocations[self._addresses[position]] if position >= 0 else None
        if found is None or address >= found.end + _GUARD:
            self.rules.forbid(f"{whose}: {address:#x} is no device memory")
        if not found.is_alive:
            self.rules.forbid(f"{whose}: the memory at {address:#x} was freed")
        if address + size > found.end:
            self.rules.forbid(f"{whose}: {size} bytes from {address:#x} reach past the {found.data.size} bytes there")
        return found

    def allocate(self, size: int) -> Allocation | None:
        """New memory, in which all bits are set (NaN in every floating type); None where too little is left."""
        if self.used_bytes + size > self.memory_bytes:
            return None
        made = Allocation(self._next_address, np.full(size, 0xFF, np.uint8))
        self._next_address = -(-(made.end + _GUARD) // _ALIGNMENT) * _ALIGNMENT
        self._allocations[made.address] = made
        self._addresses.append(made.address)
        return made

    def release(self, allocation: Allocation, whose: str) -> None:
        """Free memory; forbidden while work that uses it has not been synchronised (``enqueueV3``)."""
        if any(allocation in work.places for stream in self.streams for work in stream.queue):
            self.rules.forbid(f"{whose}: work that uses the memory has not been synchronised")
        allocation.is_alive = False
        allocation.data = allocation.data[:0]

    def is_device_address(self, address: int) -> bool:
        """Whether an address is none of the host's."""
        return _FIRST_ADDRESS <= address < self._next_address

    def stream(self, handle: Any, whose: str) -> Stream:
        """A living stream, and not the default one: an engine would synchronise the whole device (``enqueueV3``)."""
        if handle is None or int(handle) == 0:
            self.rules.forbid(f"{whose}: the default stream")
        found = self._handles.get(int(handle))
        if not isinstance(found, Stream):
            self.rules.forbid(f"{whose}: the stream was destroyed")
        return found

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
            if not all(one.is_alive for one in work.places):
                self.rules.forbid("work on a stream uses memory that was freed")
            self.now_ms += work.run()
        wait_ms = min(self.now_ms - before_ms, self.most_wait_ms)
        if wait_ms > 0.0:
            time.sleep(max(0.0, stream.since_s + wait_ms / 1000 - time.monotonic()))

    def invalidate(self, stream: Stream) -> None:
        """A call that cannot be captured was made: ending the capture gives no graph."""
        stream.is_invalid = True

    # -- CUDA's names -------------------------------------------------------------------------------------------

    def cudaGetDeviceCount(self) -> tuple[cudaError_t, int]:
        return cudaError_t.cudaSuccess, 1

    def cudaDriverGetVersion(self) -> tuple[cudaError_t, int]:
        return cudaError_t.cudaSuccess, self.version

    def cudaSetDevice(self, device: int) -> tuple[cudaError_t]:
        return self._return(cudaError_t.cudaSuccess if device == 0 else cudaError_t.cudaErrorInvalidDevice)

    def cudaGetErrorString(self, error: int) -> tuple[cudaError_t, bytes]:
        words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in cudaError_t(error).name[9:])
        return cudaError_t.cudaSuccess, words.strip().encode()

    def cudaGetLastError(self) -> tuple[cudaError_t]:
        error, self._last_error = self._last_error, cudaError_t.cudaSuccess
        return (error,)

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[cudaError_t, int]:
        if (attribute, device) != (self.cudaDeviceAttr.cudaDevAttrMultiProcessorCount, 0):
            return cudaError_t.cudaErrorInvalidValue, 0
        return cudaError_t.cudaSuccess, self.sm_count

    def cudaDeviceSynchronize(self) -> tuple[cudaError_t]:
        if self._is_capturing("cudaDeviceSynchronize"):
            return self._return(cudaError_t.cudaErrorStreamCaptureUnsupported)
        for stream in self.streams:
            self.finish(stream)
        return self._return()

    def cudaMalloc(self, size: int) -> tuple[cudaError_t, int | None]:
        if self._is_capturing("cudaMalloc"):
            return (*self._return(cudaError_t.cudaErrorStreamCaptureUnsupported), None)
        if size <= 0:
            self.rules.forbid(f"cudaMalloc of {size} bytes: an address of nothing is null")
        made = self.allocate(size)
        if made is None:
            return (*self._return(cudaError_t.cudaErrorMemoryAllocation), None)
        return cudaError_t.cudaSuccess, made.address

    def cudaFree(self, address: int) -> tuple[cudaError_t]:
        if self._is_capturing("cudaFree"):
            return self._return(cudaError_t.cudaErrorStreamCaptureUnsupported)
        found = self._allocations.get(address)
        if found is None or not found.is_alive:
            self.rules.forbid(f"cudaFree: nothing is allocated at {address:#x}")
        self.release(found, "cudaFree")
        return self._return()

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: Any) -> tuple[cudaError_t]:
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
        return self._return()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[cudaError_t, Stream]:
        if flags != self.cudaStreamNonBlocking:
            self.rules.forbid(f"a stream with flags {flags} waits for the default stream")
        return cudaError_t.cudaSuccess, self._made(Stream(next(self._numbers)))

    def cudaStreamDestroy(self, stream: Any) -> tuple[cudaError_t]:
        found = self.stream(stream, "cudaStreamDestroy")
        if any(context._stream == int(found) for context in self.contexts):
            self.rules.forbid("cudaStreamDestroy: an execution context that ran on the stream is alive")
        self.finish(found)  # The device completes it; only the handle is gone.
        del self._handles[int(found)]
        return self._return()

    def cudaStreamSynchronize(self, stream: Any) -> tuple[cudaError_t]:
        found = self.stream(stream, "cudaStreamSynchronize")
        if self._is_capturing("cudaStreamSynchronize", [found]):
            return self._return(cudaError_t.cudaErrorStreamCaptureUnsupported)
        self.finish(found)
        return self._return()

    def cudaStreamBeginCapture(self, stream: Any, mode: int) -> tuple[cudaError_t]:
        found = self.stream(stream, "cudaStreamBeginCapture")
        if found.captured is not None or mode != cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal:
            self.rules.refuse("cudaStreamBeginCapture: the stream is capturing already, or its mode is another")
            return self._return(cudaError_t.cudaErrorInvalidValue)
        found.captured, found.is_invalid = [], False
        return self._return()

    def cudaStreamEndCapture(self, stream: Any) -> tuple[cudaError_t, Graph | None]:
        found = self.stream(stream, "cudaStreamEndCapture")
        captured, found.captured = found.captured, None
        if captured is None:
            return (*self._return(cudaError_t.cudaErrorStreamCaptureUnmatched), None)
        if found.is_invalid:
            return (*self._return(cudaError_t.cudaErrorStreamCaptureInvalidated), None)
        self.captures += 1
        return cudaError_t.cudaSuccess, self._made(Graph(next(self._numbers), tuple(captured)))

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[cudaError_t, GraphExec]:
        work = self._found(Graph, graph, "cudaGraphInstantiate").work
        return cudaError_t.cudaSuccess, self._made(GraphExec(next(self._numbers), work))

    def cudaGraphDestroy(self, graph: Any) -> tuple[cudaError_t]:
        del self._handles[int(self._found(Graph, graph, "cudaGraphDestroy"))]
        return self._return()

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[cudaError_t]:
        del self._handles[int(self._found(GraphExec, graph, "cudaGraphExecDestroy"))]
        return self._return()

    def cudaGraphLaunch(self, graph: Any, stream: Any) -> tuple[cudaError_t]:
        found, on_stream = self._found(GraphExec, graph, "cudaGraphLaunch"), self.stream(stream, "cudaGraphLaunch")
        for work in found.work:
            if not all(one.is_alive for one in work.places):
                self.rules.forbid("cudaGraphLaunch: memory whose address was captured was freed")
            self.put(on_stream, work)
        self.launches += 1
        return self._return()

    def cudaEventCreate(self) -> tuple[cudaError_t, Event]:
        return cudaError_t.cudaSuccess, self._made(Event(next(self._numbers)))

    def cudaEventRecord(self, event: Any, stream: Any) -> tuple[cudaError_t]:
        found, on_stream = self._found(Event, event, "cudaEventRecord"), self.stream(stream, "cudaEventRecord")
        found.records += 1

        def record() -> float:
            found.done, found.ms = found.done + 1, self.now_ms
            return 0.0

        self.put(on_stream, Work(record))
        return self._return()

    def cudaEventElapsedTime(self, start: Any, end: Any) -> tuple[cudaError_t, float | None]:
        events = [self._found(Event, event, "cudaEventElapsedTime") for event in (start, end)]
        if not all(event.records for event in events):
            self.rules.refuse("cudaEventElapsedTime: an event was not recorded")
            return (*self._return(cudaError_t.cudaErrorInvalidResourceHandle), None)
        if any(event.done < event.records for event in events):
            self.rules.refuse("cudaEventElapsedTime: an event has not completed")
            return (*self._return(cudaError_t.cudaErrorNotReady), None)
        return cudaError_t.cudaSuccess, events[1].ms - events[0].ms

    def cudaEventDestroy(self, event: Any) -> tuple[cudaError_t]:
        """An event may be destroyed before it is complete."""
        del self._handles[int(self._found(Event, event, "cudaEventDestroy"))]
        return self._return()

    # -- inside -------------------------------------------------------------------------------------------------

    def _return(self, error: cudaError_t = cudaError_t.cudaSuccess) -> tuple[cudaError_t]:
        if error:
            self._last_error = error
        return (error,)

    def _made(self, handle: Any) -> Any:
        self._handles[int(handle)] = handle
        return handle

    def _found(self, kind: type[Any], handle: Any, whose: str) -> Any:
        found = None if handle is None else self._handles.get(int(handle))
        if type(found) is not kind:
            self.rules.forbid(f"{whose}: it was destroyed, or is no {kind.__name__.lower()}")
        return found

    def _is_capturing(self, call: str, streams: Sequence[Stream] | None = None) -> bool:
        """Whether a call meets a capture that it spoils (``cudaThreadExchangeStreamCaptureMode``)."""
        found = [one for one in streams or self.streams if one.captured is not None]
        for stream in found:
            self.invalidate(stream)
        if found:
            self.rules.refuse(f"{call} during a capture")
        return bool(found)
