"""What ends a search before its budget is spent: the time, or its run directory's size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from mptune.settings import SearchSettings

HOPELESS = 20
"""This many plans that fail, while none with FP16 in it ever ran, end the search: each may cost hours."""


class Stop(str, Enum):
    """Why a search stopped."""

    BUDGET = "the budget is spent"
    TIMEOUT = "the time is over"
    DISK = "the run directory has reached --max-disk"
    CONVERGED = "no plan is expected to improve the front beyond the noise"
    EXHAUSTED = "every plan of the search space has been evaluated"
    HOPELESS = f"{HOPELESS} plans failed, and no plan with FP16 in it has ever run"


class Limits:
    """The limits of one call of ``search``, asked before each evaluation and each measurement again."""

    def __init__(
        self,
        settings: SearchSettings,
        run_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
    ) -> None:
        self._timeout_s, self._max_bytes, self._run_dir = settings.timeout_s, settings.max_disk_bytes, run_dir
        self._clock, self._started_s = clock, clock() - max(0.0, elapsed_s)
        self._size_bytes: int | None = None
        self._largest_plan_bytes = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the time began."""
        return self._clock() - self._started_s

    def reached(self) -> Stop | None:
        """The limit that is reached; None where another evaluation may start."""
        if self._timeout_s is not None and self.elapsed_s >= self._timeout_s:
            return Stop.TIMEOUT
        if self._run_dir is None or self._max_bytes is None:
            return None
        size_bytes = size_of(self._run_dir)
        if self._size_bytes is not None:
            self._largest_plan_bytes = max(self._largest_plan_bytes, size_bytes - self._size_bytes)
        self._size_bytes = size_bytes
        return Stop.DISK if size_bytes + self._largest_plan_bytes > self._max_bytes else None


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, each once however many names it has; links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may delete its temporary files meanwhile
                status = Path(parent, name).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
