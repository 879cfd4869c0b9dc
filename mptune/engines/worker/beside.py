"""Work beside what the first worker does: in a worker of its own, called from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, TypeVar

from mptune.engines.worker.parent import Worker

T = TypeVar("T")


class Beside(Generic[T]):
    """One piece of work, which begins at once. Its worker ends with it."""

    def __init__(self, worker: Worker, work: Callable[[Worker], T]) -> None:
        """Begin.

        Args:
            worker: that nobody else uses.
            work: calls it.
        """
        self._worker = worker
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="mptune-beside", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """What the work gave, once it is done; its process may still end then.

        Raises:
            MptuneError: the work raised it.
        """
        return self._future.result()

    def finish(self) -> None:
        """Wait until the process has ended, too."""
        self._thread.join()

    def stop(self) -> None:
        """Give the work up, and wait until its process is gone."""
        self._worker.abort()
        self._thread.join()

    def _run(self, work: Callable[[Worker], T]) -> None:
        with self._worker:
            try:
                self._future.set_result(work(self._worker))
            except BaseException as error:  # it is raised where the result is asked for
                with suppress(BaseException):
                    self._future.set_exception(error)
