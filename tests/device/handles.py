# ruff: noqa: N801, N815 (the names are CUDA's)
"""What CUDA's runtime hands out: errors, memory, work on a stream, opaque handles; and the record of broken rules."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


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


class Rules:
    """The record of what was forbidden and of what was refused, also in a file that outlives a worker.

    Attributes:
        forbidden: calls whose behaviour is undefined.
        refused: calls that fail as documented, since an argument or their order is wrong.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.forbidden: list[str] = []
        self.refused: list[str] = []
        self._log = log

    def forbid(self, text: str) -> NoReturn:
        """Keep a call whose behaviour is undefined.

        Raises:
            ForbiddenError: always; on a device the process would have crashed, or gone on with wrong values.
        """
        self.forbidden.append(text)
        self._write("forbidden", text)
        raise ForbiddenError(text)

    def refuse(self, text: str) -> None:
        """Keep a call that returns an error."""
        self.refused.append(text)
        self._write("refused", text)

    def _write(self, kind: str, text: str) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{kind}: {text}\n")
