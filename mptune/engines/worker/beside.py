"""Work beside what the first worker does: in a worker of its own, called from a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from mptune.engines.worker.parent import Worker

T = TypeVar("T")


class Beside(Generic[T]):
    """One piece of work in a worker that nobody else uses. It begins at once, and its process ends with it."""

    def __init__(self, worker: Worker, work: Callable[[Worker], T]) -> None:
        self._worker = worker
        pool = ThreadPoolExecutor(1, thread_name_prefix="mptune-beside")
        self._future = pool.submit(self._run, work)
        pool.shutdown(wait=False)

    def result(self) -> T:
        """What the work gave, or raised, once it is done and its process has ended."""
        return self._future.result()

    def stop(self) -> None:
        """Give the work up, and wait until its process is gone."""
        self._worker.abort()
        wait([self._future])

    def _run(self, work: Callable[[Worker], T]) -> T:
        with self._worker:
            return work(self._worker)
