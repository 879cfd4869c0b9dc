"""The worker process: receives jobs, runs them, sends the results. Imports nothing heavy before a job needs it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mptune.errors import MptuneError
from mptune.files import is_disk_full
from mptune.processes.failure import EngineError, Failure, FailureKind, Progress, Stage

HEADER = struct.Struct("!Q")
"""A message is its length in bytes, then a pickle of ``(kind, value)``."""
Message = tuple[str, Any]
_GUARD_WAKES_S = 60.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TRANSIENT = "transient"
"""Slot of what a job alone uses."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Job(Protocol[T_co]):
    """Work for the worker: a frozen dataclass that pickles to a few kilobytes."""

    def run(self, state: WorkerState) -> T_co:
        """Run it. The result must be picklable and small."""
        ...


class Call(Protocol):
    """Runs a job in the worker; in the parent."""

    def __call__(self, job: Job[T], /) -> T | Failure:
        """Its result, or the failure."""
        ...


class WorkerState:
    """What the worker keeps from job to job."""

    def __init__(
        self,
        announce: Callable[[Stage], None] = lambda stage: None,
        report: Callable[[Progress], None] = lambda progress: None,
        ask: Callable[[Any], Any] = lambda question: None,
    ) -> None:
        self._announce = announce
        self.ask = ask
        """Puts a question to the parent and waits for its answer; raises what the parent raised for it."""
        self.report = report
        """Sends the progress of a long job to the parent. May be called from any thread."""
        self._cache: dict[str, tuple[Hashable, Any]] = {}
        self.stage = Stage.BUILD

    def enter(self, stage: Stage) -> None:
        """Begin a stage, to which a crash or timeout will be attributed."""
        self.stage = stage
        self._announce(stage)

    def cached(self, slot: str, key: Hashable, make: Callable[[], T]) -> T:
        """The value in a slot; made again, and the old one closed, when the key differs."""
        if slot in self._cache and self._cache[slot][0] == key:
            value: T = self._cache[slot][1]
            return value
        self.drop(slot)
        made = make()
        self._cache[slot] = (key, made)
        return made

    def transient(self, make: Callable[[], T]) -> T:
        """Something of this job alone, such as a session: closed once the job's answer is sent, or at the next one.

        So a crash while it is torn down costs no result.
        """
        return self.cached(_TRANSIENT, object(), make)

    def end_job(self) -> None:
        """Close what belongs to the last job alone."""
        self.drop(_TRANSIENT)

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


def encode(message: Message) -> bytes:
    """A message as it goes over the pipe."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main() -> None:
    """Serve until the parent closes the pipe. Arguments: request fd, answer fd, the parent's process number."""
    signal_at_death_of_parent(signal.SIGKILL)  # even while native code is stuck
    if os.getppid() != int(sys.argv[3]):  # it is dead already
        os._exit(1)
    requests, answers = (int(argument) for argument in sys.argv[1:3])
    for fd in (requests, answers):
        os.set_inheritable(fd, False)  # A grandchild that outlives us must not keep the parent waiting.
    # Ctrl-C reaches the whole terminal, and a service manager's SIGTERM the whole group; the parent decides.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _offer_to_oom_killer()
    guard = _guard_group((requests, answers))
    faulthandler.enable(sys.stderr)

    whole = threading.Lock()

    def write(data: bytes) -> None:
        with whole:  # Builders report their progress from threads of their own, also while an answer is written.
            _write(answers, data)

    def send(message: Message) -> None:
        write(encode(message))

    def ask(question: Any) -> Any:
        send(("question", question))
        kind, value = _receive(requests) or ("refused", BrokenPipeError("the parent is gone"))
        if kind != "answer":
            raise value
        return value

    state = WorkerState(lambda stage: send(("stage", stage)), lambda progress: send(("progress", progress)), ask)
    try:
        while (message := _receive(requests)) is not None:
            if message[0] == "start":
                sys.path[:] = message[1]
                write(encode(("ready", os.getpid())))
                continue
            answer = _answer(message[1], state)
            sys.stdout.flush()
            sys.stderr.flush()
            write(answer)
            try:
                state.end_job()
            except Exception:  # What goes wrong once the answer is sent is for the log alone.
                traceback.print_exc()
    except BrokenPipeError:
        pass  # The parent is gone.
    finally:
        state.close()
        if guard is not None:
            with contextlib.suppress(OSError):
                os.kill(guard, signal.SIGKILL)  # The parent kills what else is in the group.
                os.waitpid(guard, 0)


def _answer(job: Job[Any] | Exception, state: WorkerState) -> bytes:
    """Run a job and encode its result or failure; does not raise what the job raises."""
    state.enter(Stage.BUILD)
    try:
        if isinstance(job, Exception):
            raise job
        return encode(("result", job.run(state)))
    except MptuneError as error:
        return encode(("error", error))
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        failure = Failure(state.stage, *describe(error))
    return encode(("failure", failure))


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


def signal_at_death_of_parent(number: int) -> None:
    """On Linux have the kernel send this process a signal when the thread that started it ends."""
    if sys.platform != "linux":
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _offer_to_oom_killer() -> None:
    """Have Linux kill this process first where memory runs out: the parent has the record, and takes another worker.

    Without it the kernel may take the parent, since it does not count what a driver has allocated (a Jetson's GPU
    shares the memory). A process may always raise its own ``oom_score_adj`` (proc(5)).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _guard_group(pipes: tuple[int, int]) -> int | None:
    """On Linux start a process that kills this process' group when this process dies, however it does.

    The kernel's signal reaches this process alone when the parent dies, and not what a job has started.
    """
    if sys.platform != "linux":
        return None
    worker = os.getpid()
    guard = os.fork()
    if guard:
        return guard
    try:
        for fd in (0, 1, 2, *pipes):
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal_at_death_of_parent(signal.SIGUSR1)
        while os.getppid() == worker:
            signal.sigtimedwait({signal.SIGUSR1}, _GUARD_WAKES_S)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(0)


def _receive(fd: int) -> Message | None:
    """The next request; None at end-of-file. A job that does not unpickle comes back as the exception it raised."""
    header = _read(fd, HEADER.size)
    if header is None:
        return None
    body = _read(fd, HEADER.unpack(header)[0])
    if body is None:
        return None
    try:
        message: Message = pickle.loads(body)
    except Exception as error:
        return ("job", error)
    return message


def _read(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(fd, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
