"""What a job printed, kept in memory within bounds and written to a log file when the job fails."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

KEEP_BYTES = 1 << 20
"""How much of the start and of the end of a job's output is kept."""


class Output:
    """What a job printed: the first and the last ``KEEP_BYTES``, however much there was."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Append what was read from the pipe."""
        room = KEEP_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        # Trimmed at twice the size, so that the copying stays proportional to what is printed.
        if len(self._tail) > 2 * KEEP_BYTES:
            self._trim()

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def text(self) -> bytes:
        """What is kept, with a line for the number of bytes that were left out."""
        self._trim()
        gap = f"\n[... {self._left_out} bytes left out ...]\n".encode() if self._left_out else b""
        return bytes(self._head) + gap + bytes(self._tail)

    def write(self, directory: Path, name: str) -> Path | None:
        """Write a new log file; None where that fails (a full disk must not hide the failure it belongs to)."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = directory / f"{stamp}-{os.getpid()}-{next(self._numbers):03d}-{name}.log"
            path.write_bytes(self.text())
        except OSError:
            return None
        return path

    def _trim(self) -> None:
        surplus = len(self._tail) - KEEP_BYTES
        if surplus > 0:
            del self._tail[:surplus]
            self._left_out += surplus
