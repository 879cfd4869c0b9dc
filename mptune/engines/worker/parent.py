"""The parent's end of the worker process, in which every engine is built and run.

The parent owns the deadline, kills the whole process tree, and starts the worker again when it is needed. A job is a
frozen dataclass with ``run(state)``; only jobs, small results, failures and ``MptuneError`` cross the pipe, as
length-prefixed pickles. A job that raises ``MptuneError`` met a problem that the user has to fix, so the error is
raised again in the parent; every other exception, crash or timeout comes back as a ``Failure``.

What the worker prints, native code included, goes through a second pipe that the parent drains while it waits: it keeps
the first and the last megabyte in memory and writes them to a log file when the job fails.

POSIX only: process groups, ``selectors`` on pipes and (on Linux) ``PR_SET_PDEATHSIG``.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mptune.engines.base import Failure, FailureKind, Progress, Stage
from mptune.engines.worker.child import HEADER, Job, Message, encode
from mptune.engines.worker.output import Output
from mptune.engines.worker.process_tree import absolute_sys_path, kill_tree, oom_kills, signal_name, spawn
from mptune.errors import MptuneError
from mptune.settings import WorkerSettings

_MAX_MESSAGE_BYTES = 1 << 30
_READ_BYTES = 1 << 16
_CLOSE_TIMEOUT_S = 10.0
_DYING_TIMEOUT_S = 5.0
_TICK_S = 1.0
_STOPPED_S = 2.0
"""A wait that took so much longer than asked for: this process was stopped (SIGSTOP, a container that is paused), and
perhaps the worker with it. That time does not count."""
_REST_S = 0.1
"""Past the deadline, so long is the rest of an answer that has begun waited for."""
_OVERTIME_S = 5.0
"""So long past the deadline nothing is read any more."""

# After these the process is replaced: its CUDA context may be lost, or its memory exhausted.
_RETIRING = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.DEVICE_LOST, FailureKind.CRASH})

T_co = TypeVar("T_co", covariant=True)


class Worker:
    """The parent's end. Starts the process at the first call, and again after a crash, a timeout or ``max_jobs``.

    Thread-safe: calls queue up. The process ends when the worker is closed or the parent ends, however that ends.
    """

    def __init__(
        self, logs_dir: Path, settings: WorkerSettings | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """The process starts at the first call.

        Args:
            logs_dir: gets a file for each failed job.
            settings: limits and retries.
            environment: more environment variables of the process.
        """
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        """Called with the progress of a long job, in the thread that waits for it."""
        self.on_question: Callable[[Any], Any] = lambda question: None
        """Answers what a job asks (``WorkerState.ask``), in the thread that waits for it."""
        self._logs_dir = logs_dir
        self._settings = settings or WorkerSettings()
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._jobs_done = 0

    @property
    def pid(self) -> int | None:
        """Process number of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def call(self, job: Job[T_co], timeout_s: float) -> T_co | Failure:
        """Run a job in the worker.

        Args:
            job: frozen dataclass; it and its result must be picklable and small.
            timeout_s: from handing it over until its result is read; a worker that has to start first has
                ``start_timeout_s`` for that on top.

        Raises:
            MptuneError: the job raised it.
        """
        with self._lock:
            try:
                return self._call(job, timeout_s)
            except BaseException as error:
                # An MptuneError is an answer. Anything else (Ctrl-C) left a job running whose result nobody reads.
                if not isinstance(error, MptuneError):
                    self._kill()
                raise

    def close(self) -> None:
        """Let the process end by itself, else kill it. Idempotent; a later call starts a new one."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, job: Job[T_co], timeout_s: float) -> T_co | Failure:
        process = self._living()
        if isinstance(process, Failure):
            return process
        request, deadline = encode(("job", job)), time.monotonic() + timeout_s
        stage, outcome = process.exchange(request, deadline, Stage.BUILD, self.on_progress, self._reply)
        if outcome == ("gone", None):
            # It died before it began the job, while it tore down what the last one had left: this job is not at fault.
            self._kill()
            process = self._living()
            if isinstance(process, Failure):
                return process
            deadline = time.monotonic() + timeout_s
            stage, outcome = process.exchange(request, deadline, Stage.BUILD, self.on_progress, self._reply)
        if outcome is None:
            return self._fail(Failure(stage, FailureKind.TIMEOUT, f"no result after {timeout_s:g} s"), job, retire=True)
        kind, value = outcome
        if kind == "gone":
            return self._fail(Failure(stage, *process.cause_of_death()), job, retire=True)
        if kind == "garbled":
            return self._fail(Failure(stage, FailureKind.ERROR, value), job, retire=True)
        if kind == "failure":
            return self._fail(value, job, retire=value.kind in _RETIRING)
        process.output.clear()
        self._count_job()
        if kind == "error":
            raise value
        result: T_co = value
        return result

    def _living(self) -> _Process | Failure:
        """The process, started where there is none or where it ended between two jobs: no job failed then."""
        if self._process is not None and not self._process.is_alive:
            self._kill()
        failure = None if self._process is not None else self._start()
        if failure is not None:
            return failure
        assert self._process is not None
        return self._process

    def _reply(self, question: Any) -> bytes:
        try:
            return encode(("answer", self.on_question(question)))
        except MptuneError as error:
            return encode(("refused", error))

    def _count_job(self) -> None:
        self._jobs_done += 1
        limit = self._settings.max_jobs
        if limit is not None and self._jobs_done >= limit and self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> Failure | None:
        self._jobs_done = 0
        timeout_s = self._settings.start_timeout_s
        try:
            self._process = _Process(self._environment)
        except OSError as error:
            return Failure(Stage.START, FailureKind.WORKER, f"the worker process could not be started: {error}")
        deadline = time.monotonic() + timeout_s
        _, outcome = self._process.exchange(
            encode(("start", absolute_sys_path())), deadline, Stage.START, self.on_progress, self._reply
        )
        if outcome is not None and outcome[0] == "ready":
            self._process.output.clear()
            return None
        if outcome is None:
            message = f"the worker did not answer within {timeout_s:g} s"
        else:
            message = "the worker ended while it started: " + self._process.cause_of_death()[1]
        return self._fail(Failure(Stage.START, FailureKind.WORKER, message), None, retire=True)

    def _fail(self, failure: Failure, job: Job[Any] | None, *, retire: bool) -> Failure:
        """Keep the log, replace or count the worker, and name the log in the failure."""
        process = self._process
        assert process is not None
        if retire:
            self._kill()
        else:
            process.drain()
        name = type(job).__name__ if job is not None else "start"
        log_path = process.output.write(self._logs_dir, name)
        process.output.clear()
        if not retire:
            self._count_job()
        return Failure(failure.stage, failure.kind, failure.message, log_path)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()


class _Process:
    """One worker process with its three pipes: requests, answers, output."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.output = Output()
        self._buffer = bytearray()
        self._oom_kills = oom_kills()
        request_read, self._requests = os.pipe()
        self._answers, answer_write = os.pipe()
        self._printed, print_write = os.pipe()
        ours = (self._requests, self._answers, self._printed)
        theirs = (request_read, answer_write, print_write)
        command = [
            sys.executable,
            "-m",
            "mptune.engines.worker",
            str(request_read),
            str(answer_write),
            str(os.getpid()),
        ]
        try:
            self._popen = spawn(command, theirs, print_write, environment)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for fd in ours:
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def exchange(
        self,
        request: bytes,
        deadline: float,
        stage: Stage,
        on_progress: Callable[[Progress], None],
        reply: Callable[[Any], bytes],
    ) -> tuple[Stage, Message | None]:
        """Send a request and wait for its answer, all under one deadline; progress goes to ``on_progress`` meanwhile.

        A question is answered with what ``reply`` gives; the time that this takes does not count.

        Returns:
            the stage reached, and the answer: None past the deadline, ("gone", stage) where the worker ended without
            one, None in place of the stage where it ended before it began, ("garbled", why) where it cannot be read.
        """
        pending, begun = memoryview(request), False
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(self._printed, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_WRITE)
            woken = time.monotonic()
            while True:
                before = time.monotonic()
                left = deadline - before
                # Past the deadline what waits already is read: this process may have been stopped meanwhile.
                wait = min(max(left, _REST_S if self._buffer else 0.0), _TICK_S)
                ready = {key.fd for key, _ in selector.select(wait)}
                now = time.monotonic()
                stopped = now - woken - wait
                deadline += stopped if stopped > _STOPPED_S else 0.0
                woken = now
                if deadline - now <= 0 and (self._answers not in ready or deadline - now <= -_OVERTIME_S):
                    return stage, None
                if self._printed in ready and not self.drain():
                    selector.unregister(self._printed)
                if self._requests in ready:
                    # Where the worker has ended, end-of-file on the answers follows, which is handled below.
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        pending = pending[os.write(self._requests, pending[:_READ_BYTES]) :]
                    if not pending or not self.is_alive:
                        selector.unregister(self._requests)
                        pending = memoryview(b"")
                if self._answers not in ready:
                    continue
                data = os.read(self._answers, _READ_BYTES)
                if not data:
                    return stage, ("gone", stage if begun else None)
                self._buffer += data
                for message in self._messages():
                    if message[0] == "stage":
                        stage, begun = message[1], True
                    elif message[0] == "progress":
                        on_progress(message[1])
                    elif message[0] == "question":
                        asked = time.monotonic()
                        pending = memoryview(reply(message[1]))
                        deadline += time.monotonic() - asked
                        woken = time.monotonic()
                        selector.register(self._requests, selectors.EVENT_WRITE)
                    else:
                        self.drain()
                        return stage, message

    def _messages(self) -> Any:
        """The complete messages in the buffer."""
        import pickle

        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > _MAX_MESSAGE_BYTES:
                yield ("garbled", "the worker's answer is not in its format")
                return
            end = HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            try:
                yield pickle.loads(body)
            except Exception as error:
                yield ("garbled", f"the worker's answer cannot be read: {type(error).__name__}: {error}")
                return

    def drain(self) -> bool:
        """Read what was printed so far, without waiting; False at end-of-file."""
        while True:
            try:
                data = os.read(self._printed, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.output.add(data)

    def cause_of_death(self) -> tuple[FailureKind, str]:
        """Why the process is gone, by its exit status, what it printed last and the kernel's own count."""
        try:
            status = self._popen.wait(_DYING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return FailureKind.CRASH, "closed its pipe without an answer"
        self.drain()
        last_words = self.output.text()[-4096:].lower()
        starved = b"bad_alloc" in last_words or b"out of memory" in last_words or b"memoryerror" in last_words
        killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
        before, now = self._oom_kills, oom_kills()
        if killed and (before is None or now is None or now > before):
            return FailureKind.OUT_OF_MEMORY, "killed by SIGKILL, probably because memory ran out"
        kind = FailureKind.OUT_OF_MEMORY if starved else FailureKind.CRASH
        return kind, f"killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"

    def kill(self) -> None:
        """Kill the whole tree and free the pipes; what was printed stays in ``output``."""
        kill_tree(self._popen)
        with contextlib.suppress(OSError):
            self.drain()
        self._close_pipes()

    def close(self) -> None:
        """Let the process end by itself (end-of-file on its requests), within a limit; then kill what is left."""
        os.close(self._requests)
        self._requests = -1
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            # It may print megabytes while it ends, and would block on a full pipe.
            selector.register(self._answers, selectors.EVENT_READ)
            selector.register(self._printed, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left)}
                if self._printed in ready and not self.drain():
                    selector.unregister(self._printed)
                if self._answers in ready and not os.read(self._answers, _READ_BYTES):
                    break
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _close_pipes(self) -> None:
        for fd in (self._requests, self._answers, self._printed):
            if fd >= 0:
                os.close(fd)
        self._requests = self._answers = self._printed = -1
