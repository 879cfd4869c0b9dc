"""The parent's end of the worker process, in which every engine is built and run.

The parent owns the deadline, kills the whole process tree, and starts the worker again when it is needed. A job that
raises ``MptuneError`` met a problem that the user has to fix, so the error is raised again in the parent; every other
exception, crash or timeout comes back as a ``Failure``, with a log of what the job printed. POSIX only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from mptune.errors import MptuneError
from mptune.processes.child import SECONDS, EngineError, Failure, FailureKind, Job, Progress, Stage
from mptune.settings import WorkerSettings

KEEP_BYTES = 1 << 20  # how much of the start and of the end of a job's output its log holds
_STALL_S = 120  # the worker may rest this long within a message
_TICK_S = 1.0
_OVERTIME_S = 5.0  # what was sent before the deadline is read for this long after it
_MOST_PRINTED_BYTES = 64 << 20  # while a job runs its output may become this large
_END_TIMEOUT_S = 10.0  # a process may take this long to end
_CLOSE_WAKES_S = 0.02
_PROGRAM = "from mptune.processes.child import main; main()"
_RETIRING = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.DEVICE_LOST, FailureKind.CRASH})
"""After these the process is replaced: its CUDA context may be lost, or its memory exhausted."""
_no_start = partial(Failure, Stage.START, FailureKind.WORKER)
T = TypeVar("T")


class Worker(contextlib.AbstractContextManager["Worker"]):
    """The parent's end. Starts the process at the first call, and again after a crash, a timeout or ``max_jobs``.

    Thread-safe: calls queue up. The process ends when the worker is closed or the parent ends, however that ends.
    """

    def __init__(
        self,
        logs_dir: Path | None = None,  # of failed jobs; None keeps no logs
        settings: WorkerSettings | None = None,
        environment: Mapping[str, str] | None = None,  # beside the variables of this process
    ) -> None:
        self.logs_dir = logs_dir
        self.settings = settings or WorkerSettings()
        # Both are called in the thread that waits for the job. The time that an answer takes does not count.
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.on_question: Callable[[Any], Any] = lambda question: None
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._ahead: WorkerProcess | None = None
        self.is_closed = False

    @property
    def pid(self) -> int | None:
        """Process number of the worker; None while there is none."""
        return None if self._process is None else self._process.popen.pid

    def call(self, job: Job[T], timeout_s: float | None = None) -> T | Failure:
        """Run a job in the worker; raises an ``MptuneError`` that the job raised.

        ``timeout_s`` is from its start until its result is read, by default what a build and a measurement may take;
        until its start the worker has ``start_timeout_s``.
        """
        if timeout_s is None:
            timeout_s = self.settings.build_timeout_s + self.settings.measure_timeout_s
        with self._lock:
            while not self.is_closed:
                used = self._process
                if used is None or used.jobs == self.settings.max_jobs or not used.is_alive:
                    self._end()
                    used = self._process
                try:
                    process = self._process = used or WorkerProcess(self._environment)
                except OSError as error:
                    return _no_start(f"the worker process could not be started: {error}")
                result = process.exchange(job, timeout_s, self)
                if not isinstance(result, Failure):
                    return result
                # A process that does not begin a job crashed, or is stuck, in what the last one left: a new one takes
                # it. And what ``close`` kills leaves no log.
                if self.is_closed or (used is not None and process.stage is Stage.START):
                    continue
                if process.stage is Stage.START:
                    result = _no_start(f"the worker process did not start: {result.message}")
                return replace(result, log_path=process.write_log(self.logs_dir, type(job).__name__))
            return _no_start("the worker was closed")

    def start_ahead(self, load: str) -> None:
        """Start the process that takes the place of this one, unless it waits already.

        ``load`` is a function, as ``module:name``, that it calls meanwhile.
        """
        with self._lock, contextlib.suppress(OSError):
            if self._ahead is None and not self.is_closed:
                self._ahead = WorkerProcess(self._environment, load)

    def restart(self) -> None:
        """End the process; the next call starts a new one, or takes the one that was started ahead."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the process for good: by itself, or killed where another thread waits for its job. Idempotent.

        That job fails then, as every later one does.
        """
        self.is_closed = True
        while self._lock.locked():  # Another thread waits for a job, or starts the process for it.
            if (process := self._process) is not None:
                kill_tree(process.popen)
            time.sleep(_CLOSE_WAKES_S)
        with self._lock:
            self._end()
            if self._process is not None:
                self._process.kill()  # What it loads may take longer than anybody waits.
            self._end()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _end(self) -> None:
        """End the process, if there is one; that which was started ahead, if any, takes its place."""
        process, self._process, self._ahead = self._process, self._ahead, None
        if process is not None:
            process.end()


class WorkerProcess:
    """A process that runs jobs, one after the other."""

    def __init__(self, environment: Mapping[str, str], load: str = "") -> None:
        """Start it; OSError where that cannot be done. ``load``: see ``Worker.start_ahead``."""
        self.jobs = 0  # that it was given
        self.stage = Stage.START  # that the job in work has reached; ``START`` until the process begins it
        self.connection, theirs = Pipe()
        # A file without a name, to which the process appends what it prints, native code and its children included.
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # until ``end``
        fcntl.fcntl(self._output, fcntl.F_SETFL, fcntl.fcntl(self._output, fcntl.F_GETFL) | os.O_APPEND)
        variables = {
            "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime 1.29 and later collect facts about models and the machine.
            "PYTHONPATH": os.pathsep.join(absolute_sys_path()),
            "PYTHONSAFEPATH": "1",  # The working directory must not shadow modules (Python 3.11 and up).
        }
        with theirs:
            try:
                self.popen = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), load],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C reaches the parent alone.
                    env={**os.environ, **environment, **variables},
                )
            except OSError:
                self._output.close()
                raise
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _STALL_S, 0))

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return not self.connection.closed and self.popen.poll() is None

    def exchange(self, job: Job[T], timeout_s: float, worker: Worker) -> T | Failure:
        """Run a job; ``worker`` receives its progress and answers its questions. Raises the job's ``MptuneError``.

        After a failure or an interruption the process is killed, unless it is fit for the next job.
        """

        def send(value: Any) -> None:
            with contextlib.suppress(OSError):  # A process that is gone, or does not read, gives no answer either.
                self.connection.send_bytes(pickle.dumps(value, protocol=5))

        if self.jobs > 0:
            self._output.truncate(0)  # what the last job printed
        self.jobs += 1
        self.stage = Stage.START
        is_fit, kind = False, ""
        try:
            send(job)
            limit_s = left_s = worker.settings.start_timeout_s
            turned = time.monotonic()
            while kind not in ("result", "error"):
                is_ready = bool(wait([self.connection], min(max(left_s, 0.0), _TICK_S)))
                if left_s <= (-_OVERTIME_S if is_ready else 0.0):
                    timeout = EngineError(FailureKind.TIMEOUT, f"no result after {limit_s:g} s")
                    raise timeout if self.is_alive else self._cause_of_death()
                # A turn counts for a tick at most. If it took longer, this process was stopped (SIGSTOP, a container
                # that is paused), and perhaps the worker with it, or it answered a question.
                now = time.monotonic()
                if threading.current_thread() is threading.main_thread():  # Others wait beside it.
                    SECONDS[getattr(job, "purpose", self.stage.value)] += now - turned
                left_s, turned = left_s - min(now - turned, _TICK_S), now
                self._shorten_output(_MOST_PRINTED_BYTES)
                if not is_ready:
                    if not self.is_alive:  # There is no end of file where a process that it forked holds the socket.
                        left_s = min(left_s, 0.0)
                    continue
                try:
                    kind, value = pickle.loads(self.connection.recv_bytes())
                except Exception as error:
                    if isinstance(error, (EOFError, OSError)) and not isinstance(error, BlockingIOError):
                        raise self._cause_of_death() from None
                    text = f"the worker's answer cannot be read: {type(error).__name__}: {error}"
                    raise EngineError(FailureKind.ERROR, text) from error
                if kind == "stage":
                    if self.stage is Stage.START:
                        limit_s = left_s = timeout_s
                    self.stage = value
                elif kind == "progress":
                    worker.on_progress(value)
                elif kind == "question":
                    try:
                        send(("answer", worker.on_question(value)))
                    except MptuneError as error:
                        send(("refused", error))
            is_fit = not (isinstance(value, Failure) and value.kind in _RETIRING)
            if kind == "error":
                raise value
            result: T | Failure = value
            return result
        except EngineError as error:
            return Failure(self.stage, error.kind, error.message)
        finally:
            if not is_fit:  # Ctrl-C, say, leaves a job running whose result nobody reads.
                self.kill()

    def _cause_of_death(self) -> EngineError:
        """Why the process is gone, by its exit status and what it printed last."""
        try:
            status = self.popen.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return EngineError(FailureKind.CRASH, "closed its connection without an answer")
        if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return EngineError(FailureKind.OUT_OF_MEMORY, "killed by SIGKILL, as the system does where memory runs out")
        end = self._output.seek(0, os.SEEK_END)
        last_words = os.pread(self._output.fileno(), 4096, max(0, end - 4096)).lower()
        is_starved = any(words in last_words for words in (b"bad_alloc", b"out of memory", b"memoryerror"))
        names = {-number.value: f"killed by {number.name}" for number in signal.Signals}
        text = f"exited with status {status}" if status >= 0 else names.get(status, f"killed by signal {-status}")
        return EngineError(FailureKind.OUT_OF_MEMORY if is_starved else FailureKind.CRASH, text)

    def _shorten_output(self, most_bytes: int) -> None:
        """Leave the middle out where there is more."""
        size = self._output.seek(0, os.SEEK_END)
        if size > most_bytes:
            end = os.pread(self._output.fileno(), KEEP_BYTES, size - KEEP_BYTES)
            self._output.truncate(KEEP_BYTES)
            with contextlib.suppress(OSError):  # a full disk
                self._output.write(f"\n[... at least {size - 2 * KEEP_BYTES} bytes left out ...]\n".encode() + end)

    def write_log(self, folder: Path | None, name: str) -> Path | None:
        """Write what the job printed to a new file; None where that fails: a full disk must not hide the failure."""
        if folder is None:
            return None
        self._shorten_output(2 * KEEP_BYTES)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{self.popen.pid}-{self.jobs:03d}-{name}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.pread(self._output.fileno(), 3 * KEEP_BYTES, 0))
        except OSError:
            return None
        return path

    def kill(self) -> None:
        """Kill the whole tree; what was printed stays."""
        kill_tree(self.popen)
        self.connection.close()

    def end(self) -> None:
        """Let the process end by itself (end of file on its connection) for a while; then kill what is left."""
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_END_TIMEOUT_S)
        kill_tree(self.popen)
        self._output.close()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session of its own, its process group and all its descendants; reap it.

    The children of a process that has ended are still in its group. Nothing is stopped first (SIGSTOP): if this process
    died then, what it had stopped would stay for ever, the guard of the group included.
    """
    descendants: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:  # those outside of the group
        with contextlib.suppress(psutil.Error):
            descendant.kill()
    # A process in an uninterruptible system call (a driver that hangs) dies later; that is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)


def absolute_sys_path() -> tuple[str, ...]:
    """This process' import path as absolute paths."""
    return tuple(str(Path(entry).absolute()) for entry in sys.path)


def run_once(job: Job[T], timeout_s: float) -> T | str:
    """The result of a job in a worker of its own, or why it failed."""
    with Worker() as worker:
        result = worker.call(job, timeout_s)
    return result.message if isinstance(result, Failure) else result
