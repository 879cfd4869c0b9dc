"""What a worker sends beside a result: how a job failed, and how far it is. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mptune.json_form import JsonForm


class Stage(str, Enum):
    """Where a job failed."""

    START = "start"  # of the worker process itself
    BUILD = "build"  # rewritten model to engine (for ONNX Runtime: to a session)
    RUN = "run"  # computing the outputs
    TIME = "time"


class FailureKind(str, Enum):
    """Why a job failed."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    UNSUPPORTED = "unsupported"  # an operator, type or device that the engine does not support
    INVALID_MODEL = "invalid model"
    PARSER = "parser error"  # TensorRT's ONNX parser rejects the model, and not for an unsupported operator
    NO_TACTIC = "no tactic"
    """TensorRT supports the operators, but finds no kernel for a layer in the types asked for."""
    DISK_FULL = "disk full"
    DEVICE_LOST = "device lost"
    DRIVER = "driver too old"  # CUDA error 35: the driver is older than the CUDA of a library, or there is none
    WORKER = "worker did not start"
    ERROR = "error"


@dataclass(frozen=True)
class Failure(JsonForm):
    """A job that gave no result."""

    stage: Stage
    kind: FailureKind
    message: str  # one line, from the message of the library that failed where there is one
    log_path: Path | None = None  # file of what the worker printed during the job; None where nothing was kept

    @property
    def is_machine_fault(self) -> bool:
        """Whether the machine is at fault, not the plan: such a job is run again."""
        return self.kind in (FailureKind.DISK_FULL, FailureKind.DEVICE_LOST, FailureKind.DRIVER, FailureKind.WORKER)

    @property
    def is_inconclusive(self) -> bool:
        """Whether one such failure does not show whose fault it is: what a job causes comes again in a new process."""
        return self.kind in (FailureKind.CRASH, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY)


class EngineError(Exception):
    """Raised inside the worker by sessions and CUDA calls; the parent gets it as a ``Failure``."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(kind, message)  # so it can be pickled
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Progress:
    """How far a long job is."""

    phase: str
    done: int
    steps: int
