"""Runs of one session at the same time, each on a thread of its own: threads of one run wait by spinning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mptune.engines.environment import usable_cores

T = TypeVar("T")
_MEMORY_SHARE = 0.5
"""Share of the available memory that runs at the same time may take."""
_MOST_BYTES = 3 << 28
"""Memory that they may take: a model whose single run takes more has operators large enough for all cores."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class SideBySide:
    """How many runs of a session go at a time."""

    count: int = 1
    threads: int | None = None
    """That each computes with, as ``SessionOptions.threads``; None takes all cores."""

    @classmethod
    def for_runs(cls, runs: int, run_bytes: int | None, threads: int = 1) -> SideBySide:
        """As many as there are cores for, and memory; one after another where the memory of a run is not known.

        Args:
            run_bytes: memory that one of them takes about, bytes.
            threads: that each has at least.
        """
        available, cores = available_bytes(), usable_cores()
        if run_bytes is None or available is None:
            return cls()
        count = min(cores // threads, runs, min(int(_MEMORY_SHARE * available), _MOST_BYTES) // max(run_bytes, 1))
        return cls() if count <= 1 else cls(count, max(1, cores // count))

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What calls return, in their order; once one has raised an exception no other is begun."""
        if self.count <= 1 or len(calls) <= 1:
            return [call() for call in calls]
        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def available_bytes() -> int | None:
    """Memory that this process may take beside what it has; None where the system does not say."""
    limits = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((_CGROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        limits.append(max(limit - used, 0))
    return min(limits, default=None)
