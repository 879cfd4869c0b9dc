"""The worker process: receives jobs, runs them, sends the results. Imports nothing heavy before a job needs it.

And what it sends beside a result: how a job failed, and how far it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mptune.errors import MptuneError
from mptune.files import is_disk_full
from mptune.json_form import JsonForm

_GUARD_WAKES_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
TRANSIENT = "transient"
SECONDS: defaultdict[str, float] = defaultdict(float)
"""That a parent process has waited for jobs, by the stage they were in, or by their ``purpose``."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stage(str, Enum):
    """Where a job failed."""

    START = "start"  # of the worker process itself
    BUILD = "build"  # rewritten model to engine (for ONNX Runtime: to a session)
    RUN = "run"  # computing the outputs
    COMPARE = "compare"  # them with the reference
    TIME = "time"


class FailureKind(str, Enum):
    """Why a job failed."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of memory"
    UNSUPPORTED = "unsupported"  # an operator, type or device that the engine does not support
    INVALID_MODEL = "invalid model"
    PARSER = "parser error"  # TensorRT's ONNX parser rejects the model, and not for an unsupported operator
    NO_TACTIC = "no tactic"  # TensorRT supports the operators, but finds no kernel for a layer in the types asked for
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


class Job(Protocol[T_co]):
    """Work for the worker: a frozen dataclass that can be pickled."""

    def run(self, state: WorkerState) -> T_co:
        """Run it. The result must be picklable."""


class WorkerState:
    """What the worker keeps from job to job, and its end of the connection (None where a job runs without a parent)."""

    def __init__(self, connection: Connection | None = None) -> None:
        self.stage = Stage.BUILD
        self._connection = connection
        self._sending = threading.Lock()
        self._cache: dict[str, tuple[Hashable, Any]] = {}

    def enter(self, stage: Stage) -> None:
        """Begin a stage, to which a crash or timeout will be attributed."""
        self.stage = stage
        self.send(pickle.dumps(("stage", stage)))

    def report(self, progress: Progress) -> None:
        """Send the progress of a long job to the parent."""
        self.send(pickle.dumps(("progress", progress)))

    def ask(self, question: Any) -> Any:
        """Put a question to the parent and wait for its answer; raises what the parent raised for it."""
        self.send(pickle.dumps(("question", question), protocol=5))
        assert self._connection is not None
        kind, value = pickle.loads(self._connection.recv_bytes())
        if kind == "refused":
            raise value
        return value

    def send(self, message: bytes) -> None:
        """Send a message. Builders report from threads of their own, also while an answer is sent."""
        if self._connection is not None:
            with self._sending:
                self._connection.send_bytes(message)

    def cached(self, slot: str, key: Hashable, make: Callable[[], T]) -> T:
        """The value in a slot; made again, and the old one closed, when the key differs."""
        entry = self._cache.get(slot)
        if entry is None or entry[0] != key:
            self.drop(slot)
            entry = self._cache[slot] = (key, make())
        value: T = entry[1]
        return value

    def transient(self, make: Callable[[], T]) -> T:
        """Something of this job alone, such as a session: closed once the job's answer is sent, or at the next one.

        So a crash while it is torn down costs no result.
        """
        return self.cached(TRANSIENT, object(), make)

    def take(self, slot: str, key: Hashable) -> Any:
        """What a slot holds under this key, the caller's to close from here on; None where it holds nothing so."""
        return self._cache.pop(slot)[1] if self._cache.get(slot, (None,))[0] == key else None

    def drop(self, slot: str) -> None:
        """Close and forget what a slot holds."""
        _, value = self._cache.pop(slot, (None, None))
        if hasattr(value, "close"):
            value.close()

    def close(self) -> None:
        """Close and forget everything."""
        for slot in list(self._cache):
            with contextlib.suppress(Exception):
                self.drop(slot)


def main() -> None:
    """Serve until the parent closes the connection.

    Arguments: its file descriptor, the parent's process number, and a function to call before the first job, or "".
    """
    descriptor, parent = (int(argument) for argument in sys.argv[1:3])
    os.set_inheritable(descriptor, False)  # A grandchild that outlives this process must not keep the parent waiting.
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    # A terminal's Ctrl-C and a service manager's SIGTERM may reach the whole group; the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker = os.getpid()
    guard = _guard_group(worker, parent, descriptor)
    # Linux kills this process first where memory runs out: the parent has the record, and takes another worker. By
    # itself the kernel may choose the parent, since it does not count what a driver has allocated (on a Jetson).
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    faulthandler.enable(sys.stderr)
    sys.setswitchinterval(2e-4)  # By default a thread that computes in Python keeps the one of a device waiting 5 ms.
    with contextlib.suppress(Exception):  # a job that needs what does not load fails by itself
        pkgutil.resolve_name(sys.argv[3])()

    connection = Connection(descriptor)
    state = WorkerState(connection)
    try:
        while True:
            message = connection.recv_bytes()
            state.enter(Stage.BUILD)
            try:
                answer = pickle.dumps(("result", pickle.loads(message).run(state)), protocol=5)
            except MptuneError as error:
                answer = pickle.dumps(("error", error))
            except SystemExit:
                raise
            except BaseException as error:
                with contextlib.suppress(OSError):  # a full disk
                    traceback.print_exc()
                answer = pickle.dumps(("result", Failure(state.stage, *describe(error))))
            if os.getpid() != worker:  # The job forked: this copy must not answer in the worker's place.
                os._exit(1)
            with contextlib.suppress(OSError):  # a full disk
                sys.stdout.flush()
                sys.stderr.flush()
            state.send(answer)
            with contextlib.suppress(Exception):  # What goes wrong once the answer is sent is no matter of the job.
                state.drop(TRANSIENT)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent has closed the connection.
    finally:
        if os.getpid() == worker:
            state.close()
            with contextlib.suppress(OSError):
                os.kill(guard, signal.SIGKILL)  # The parent kills what else is in the group.
                os.waitpid(guard, 0)


def describe(error: BaseException) -> tuple[FailureKind, str]:
    """Kind and one line for an exception that a job raised."""
    if isinstance(error, EngineError):
        return error.kind, error.message
    if isinstance(error, MemoryError):
        return FailureKind.OUT_OF_MEMORY, f"out of memory: {error}" if str(error) else "out of memory"
    if is_disk_full(error):
        return FailureKind.DISK_FULL, str(error)
    lines = str(error).strip().splitlines()
    return FailureKind.ERROR, f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def end_with(parent: int) -> None:
    """Interrupt this process when the one that started it ends, however that ends, or where it has ended."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        raise KeyboardInterrupt


def _guard_group(worker: int, parent: int, descriptor: int) -> int:
    """Start a process that kills this process' group once this process or its parent is gone, however it ended.

    So it does while native code is stuck, and what a job has started ends with it.
    """
    if guard := os.fork():
        return guard
    try:
        for number in (0, 1, 2, descriptor):
            os.close(number)
        import psutil  # type: ignore[import-untyped]  # here it costs the worker no time

        process = psutil.Process(worker)
        while os.getppid() == worker and process.ppid() == parent:
            time.sleep(_GUARD_WAKES_S)
    finally:
        os.killpg(0, signal.SIGKILL)
        os._exit(0)
