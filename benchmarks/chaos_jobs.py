"""The jobs of ``benchmarks.chaos``. Imports nothing that a worker has not imported anyway: it starts often here."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mptune.engines.base import EngineError, FailureKind, Stage
from mptune.processes.child import Job, WorkerState

FAULTS = {
    "crash": 4,
    "crash with the result ready": 3,
    "killed": 3,
    "out of memory": 2,
    "device lost": 2,
    "disk full": 1,
    "hang": 1,
}
"""What goes wrong in a job that meets a fault, with relative frequencies. None of it is the plan's doing."""


@dataclass(frozen=True)
class Faulty:
    """A job that meets a fault: before it begins, or when its result is ready."""

    job: Job[Any]
    fault: str

    def run(self, state: WorkerState) -> Any:
        if self.fault == "crash with the result ready":
            self.job.run(state)
        state.enter(Stage.RUN)
        if self.fault.startswith("crash"):
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no dump of the stacks
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "out of memory":
            raise MemoryError
        if self.fault == "device lost":
            raise EngineError(FailureKind.DEVICE_LOST, "the device fell off the bus")
        if self.fault == "disk full":
            raise EngineError(FailureKind.DISK_FULL, "no space left on device")
        while True:
            time.sleep(3600)


@dataclass(frozen=True)
class Busy:
    """Reads the file that it was given, and takes its time."""

    path: Path
    seconds: float

    def run(self, state: WorkerState) -> None:
        state.enter(Stage.RUN)
        if not self.path.stat().st_size:
            raise EngineError(FailureKind.INVALID_MODEL, "the model is empty")
        time.sleep(self.seconds)
