"""A job in a worker of its own, which ends with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mptune.engines.worker.child import Job
from mptune.engines.worker.failure import Failure
from mptune.engines.worker.parent import Worker

T = TypeVar("T")


def run_once(job: Job[T], timeout_s: float, words: Callable[[Failure], str] = lambda failure: "") -> T | str:
    """The result of a job in a worker of its own, or why it failed: by ``words``, else by its message.

    Raises:
        MptuneError: the job raised it.
    """
    with tempfile.TemporaryDirectory(prefix="mptune-probe-") as folder, Worker(Path(folder)) as worker:
        result = worker.call(job, timeout_s)
        if not isinstance(result, Failure):
            return result
        return words(result) or result.message  # The log goes with the folder.
