"""A job in a worker of its own, which ends with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from mptune.engines.worker.child import Job
from mptune.engines.worker.failure import Failure
from mptune.engines.worker.parent import Worker

T = TypeVar("T")


def run_once(
    job: Job[T],
    timeout_s: float,
    words: Callable[[Failure], str] = lambda failure: "",
    spare_environment: Mapping[str, str] | None = None,
) -> T | str:
    """Run a job in a worker of its own.

    Args:
        job: what to run.
        timeout_s: as of ``Worker.call``.
        words: why it failed; "" for the failure's own message.
        spare_environment: run it in a process that was started ahead with this environment, and leave that to the next
            worker: what the job has loaded is there then. None starts a process and ends it.

    Returns:
        The result, or why it failed: by ``words``, else by its message.

    Raises:
        MptuneError: the job raised it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mptune-probe-") as folder,
        Worker(Path(folder), environment=spare_environment) as worker,
    ):
        result = worker.call(job, timeout_s)
        if not isinstance(result, Failure):
            if spare_environment is not None:
                worker.hand_on()
            return result
        return words(result) or result.message  # The log goes with the folder.
