"""The worker process: receives jobs, runs them, sends the results. Imports nothing heavy before a job needs it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mptune.errors import MptuneError
from mptune.files import is_disk_full
from mptune.processes.failure import EngineError, Failure, FailureKind, Progress, Stage

_GUARD_WAKES_S = 0.1
TRANSIENT = "transient"
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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
        if slot in self._cache and self._cache[slot][0] == key:
            cached: T = self._cache[slot][1]
            return cached
        self.drop(slot)
        value = make()
        self._cache[slot] = (key, value)
        return value

    def transient(self, make: Callable[[], T]) -> T:
        """Something of this job alone, such as a session: closed once the job's answer is sent, or at the next one.

        So a crash while it is torn down costs no result.
        """
        return self.cached(TRANSIENT, object(), make)

    def drop(self, slot: str) -> None:
        """Close and forget what a slot holds."""
        entry = self._cache.pop(slot, None)
        close = getattr(entry[1], "close", None) if entry is not None else None
        if close is not None:
            close()

    def close(self) -> None:
        """Close and forget everything."""
        for slot in list(self._cache):
            with contextlib.suppress(Exception):
                self.drop(slot)


def main() -> None:
    """Serve until the parent closes the connection. Arguments: its file descriptor, the parent's process number."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:])
    os.set_inheritable(descriptor, False)  # A grandchild that outlives this process must not keep the parent waiting.
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    # A terminal's Ctrl-C and a service manager's SIGTERM may reach the whole group; the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker, guard = os.getpid(), _guard_group(parent, descriptor)
    # Linux kills this process first where memory runs out: the parent has the record, and takes another worker. By
    # itself the kernel may choose the parent, since it does not count what a driver has allocated (on a Jetson).
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    faulthandler.enable(sys.stderr)

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
                answer = pickle.dumps(("failure", Failure(state.stage, *describe(error))))
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


def _guard_group(parent: int, descriptor: int) -> int:
    """Start a process that kills this process' group once this process or its parent is gone, however it ended.

    So it does while native code is stuck, and what a job has started ends with it.
    """
    worker = os.getpid()
    guard = os.fork()
    if guard:
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
