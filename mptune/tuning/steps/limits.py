"""What ends a search before its budget is spent: the time, its run directory's size, a nearly full disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from mptune.errors import RunError
from mptune.files import DISK_FULL_HINT
from mptune.settings import SearchSettings

LEAST_FREE_BYTES = 256 << 20
"""Free on the disk before anything is built: room for the journal, the report and the chosen model of most searches."""
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
        self._timeout_s, self._max_bytes = settings.timeout_s, settings.max_disk_bytes
        self._run_dir = run_dir
        self._clock = clock
        self._started_s = clock() - max(0.0, elapsed_s)
        self._size_bytes: int | None = None
        self._largest_plan_bytes = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the time began."""
        return self._clock() - self._started_s

    def reached(self) -> Stop | None:
        """The limit that is reached; None where another evaluation may start. A nearly full disk is a RunError."""
        if self._timeout_s is not None and self.elapsed_s >= self._timeout_s:
            return Stop.TIMEOUT
        if self._run_dir is None:
            return None
        free_bytes, size_bytes = shutil.disk_usage(self._run_dir).free, size_of(self._run_dir)
        if self._size_bytes is not None:
            self._largest_plan_bytes = max(self._largest_plan_bytes, size_bytes - self._size_bytes)
        self._size_bytes = size_bytes
        if self._max_bytes is not None and size_bytes + self._largest_plan_bytes > self._max_bytes:
            return Stop.DISK
        needed_bytes = LEAST_FREE_BYTES + 2 * self._largest_plan_bytes
        if free_bytes < needed_bytes:
            raise RunError(
                f"the disk of {self._run_dir} is nearly full: {free_bytes >> 20} MiB are free, and the next plan "
                f"may need {needed_bytes >> 20} MiB",
                DISK_FULL_HINT,
            )
        return None


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, each once however many names it has; links are not followed."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process may delete its temporary files meanwhile
                status = Path(parent, name).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
