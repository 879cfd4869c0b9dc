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

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from mptune.errors import MptuneError
from mptune.processes.child import Job, encode
from mptune.processes.failure import Failure, FailureKind, Progress, Stage
from mptune.processes.process import WorkerProcess
from mptune.settings import WorkerSettings

# After these the process is replaced: its CUDA context may be lost, or its memory exhausted.
_RETIRING = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.DEVICE_LOST, FailureKind.CRASH})
_ABORTED = "the worker was stopped"
_idle: list[tuple[Mapping[str, str], WorkerProcess]] = []
"""Environment variables and process, left by a worker (``leave``) to the next one that wants the same variables."""
T_co = TypeVar("T_co", covariant=True)


class Worker:
    """The parent's end. Starts the process at the first call, and again after a crash, a timeout or ``max_jobs``.

    Thread-safe: calls queue up. The process ends when the worker is closed or the parent ends, however that ends.
    """

    def __init__(
        self, logs_dir: Path, settings: WorkerSettings | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """The process starts at the first call."""
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        """Called with the progress of a long job, in the thread that waits for it."""
        self.on_question: Callable[[Any], Any] = lambda question: None
        """Answers what a job asks (``WorkerState.ask``), in the thread that waits for it."""
        self._logs_dir = logs_dir
        self._settings = settings or WorkerSettings()
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._ending: threading.Thread | None = None
        self._jobs_done = 0
        self._is_aborted = False

    @property
    def pid(self) -> int | None:
        """Process number of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def call(self, job: Job[T_co], timeout_s: float) -> T_co | Failure:
        """Run a job in the worker; raises an ``MptuneError`` that the job raised.

        ``timeout_s`` is from handing it over until its result is read; a start has ``start_timeout_s`` on top.
        """
        with self._lock:
            try:
                return self._call(job, timeout_s)
            except BaseException as error:
                # An MptuneError is an answer. Anything else (Ctrl-C) left a job running whose result nobody reads.
                if not isinstance(error, MptuneError):
                    self._kill()
                raise

    def restart(self) -> None:
        """Have the next call start a new process; this one ends while that one starts."""
        with self._lock:
            self._end()

    def leave(self) -> None:
        """Leave the process, with the libraries that it has loaded, to another worker; ``end_idle`` ends it."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _idle.append((self._environment, process))

    def close(self) -> None:
        """Let the process end by itself, else kill it. Idempotent; a later call starts a new one."""
        with self._lock:
            self._end()
            self._wait_for_end()

    def abort(self) -> None:
        """Kill the process from another thread than that of a call, which fails then, as every later one does."""
        self._is_aborted = True
        process = self._process
        if process is not None:
            process.end_now()

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
        if self._is_aborted:
            self._kill()
            return Failure(stage, FailureKind.WORKER, _ABORTED)
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

    def _living(self) -> WorkerProcess | Failure:
        """The process, started where there is none or where it ended between two jobs: no job failed then."""
        if self._is_aborted:
            return Failure(Stage.START, FailureKind.WORKER, _ABORTED)
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
        if limit is not None and self._jobs_done >= limit:
            self._end()

    def _start(self) -> Failure | None:
        self._jobs_done = 0
        self._process = _take_idle(self._environment)
        if self._process is not None:
            return None
        try:
            self._process = WorkerProcess(self._environment)
        except OSError as error:
            return Failure(Stage.START, FailureKind.WORKER, f"the worker process could not be started: {error}")
        if self._is_aborted:  # meanwhile
            self._process.end_now()
        message = self._process.wait_until_ready(self._settings.start_timeout_s)
        self._wait_for_end()  # No two processes share the device and its memory.
        if self._is_aborted:
            self._kill()
            return Failure(Stage.START, FailureKind.WORKER, _ABORTED)
        if message is None:
            return None
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

    def _end(self) -> None:
        """Let the process end by itself, in a thread."""
        process, self._process = self._process, None
        if process is not None:
            self._wait_for_end()
            self._ending = threading.Thread(target=process.close, name="mptune-ending")
            self._ending.start()

    def _wait_for_end(self) -> None:
        if self._ending is not None:
            self._ending.join()
            self._ending = None

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()


def _take_idle(environment: Mapping[str, str]) -> WorkerProcess | None:
    """A process that was left by a worker with these environment variables; None where there is none."""
    for entry in tuple(_idle):
        if entry[0] == environment:
            _idle.remove(entry)
            if entry[1].is_alive:
                return entry[1]
            entry[1].kill()
    return None


def end_idle() -> None:
    """End the processes that no worker took."""
    while _idle:
        _idle.pop()[1].close()


T = TypeVar("T")


class Beside(Generic[T]):
    """One piece of work in a worker that nobody else uses. It begins at once, and its process ends with it."""

    def __init__(self, worker: Worker, work: Callable[[Worker], T]) -> None:
        self._worker = worker
        pool = ThreadPoolExecutor(1, thread_name_prefix="mptune-beside")
        self._future = pool.submit(self._run, work)
        pool.shutdown(wait=False)

    def result(self) -> T:
        """What the work gave, or raised, once it is done and its process has ended."""
        return self._future.result()

    def stop(self) -> None:
        """Give the work up, and wait until its process is gone."""
        self._worker.abort()
        wait([self._future])

    def _run(self, work: Callable[[Worker], T]) -> T:
        with self._worker:
            return work(self._worker)


def run_once(
    job: Job[T],
    timeout_s: float,
    words: Callable[[Failure], str] = lambda failure: "",
    leave_to: Mapping[str, str] | None = None,
) -> T | str:
    """The result of a job in a worker of its own, or why it failed: by ``words``, else by its message.

    The process is left to a worker that wants the environment variables ``leave_to``, if given.
    """
    with tempfile.TemporaryDirectory(prefix="mptune-probe-") as folder, Worker(Path(folder), None, leave_to) as worker:
        result = worker.call(job, timeout_s)
        if not isinstance(result, Failure):
            if leave_to is not None:
                worker.leave()
            return result
        return words(result) or result.message  # The log goes with the folder.
