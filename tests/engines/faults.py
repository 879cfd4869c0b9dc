"""Jobs that misbehave, to be run in a real worker: ``faults.echo(3)`` is a job that calls ``_echo`` there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mptune.engines.base import Progress, Stage
from mptune.processes.child import WorkerState

_SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


@dataclass(frozen=True)
class Fault:
    """Calls a function of this module in the worker."""

    name: str
    arguments: tuple[Any, ...]

    def run(self, state: WorkerState) -> Any:
        return globals()[f"_{self.name}"](state, *self.arguments)


def note_start() -> None:
    """What a process that is started ahead calls: appends its number to a file."""
    with Path(os.environ["NOTE_START"]).open("a") as file:
        file.write(f"{os.getpid()} ")


def __getattr__(name: str) -> Callable[..., Fault]:
    return lambda *arguments: Fault(name, arguments)


def _echo(state: WorkerState, value: Any) -> Any:
    """Behaves."""
    sys.stdout.write("this is printed, and nobody should see it")
    return value


def _report(state: WorkerState, threads: int, steps: int) -> str:
    """Tells its progress from several threads at once, as builders do."""

    def tell(name: str) -> None:
        for step in range(steps):
            state.report(Progress(name, step + 1, steps))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(tell, [f"phase {k}" for k in range(threads)]))
    return "told"


def _report_on(state: WorkerState, answer: bytes) -> bytes:
    """Goes on telling its progress while its answer, larger than a pipe holds, is written."""
    begun = threading.Event()

    def tell() -> None:
        for step in range(20_000):
            state.report(Progress("behind", step + 1, 20_000))
            begun.set()

    threading.Thread(target=tell, daemon=True).start()
    begun.wait()
    return answer


def _pid(state: WorkerState) -> int:
    return os.getpid()


def _surroundings(state: WorkerState, name: str) -> tuple[str | None, list[str]]:
    """A variable of the environment, and where modules are looked for."""
    return os.environ.get(name), sys.path


def _count(state: WorkerState, key: int) -> int:
    """How often the worker's cache was filled."""
    calls = state.cached("calls", 0, list)
    state.cached("counted", key, lambda: calls.append(key))
    return len(calls)


def _ask(state: WorkerState, question: bytes) -> Any:
    return state.ask(question)


def _work(state: WorkerState, steps: int) -> str:
    """Takes its time, in small steps: a process that is stopped gets no further."""
    for _ in range(steps):
        time.sleep(0.1)
    return "done"


def _die(state: WorkerState, number: int, stage: Stage = Stage.RUN) -> None:
    """Is killed by a signal in a stage."""
    state.enter(stage)
    os.write(1, b"last words")
    os.kill(os.getpid(), number)


def _abort(state: WorkerState, words: str = "") -> None:
    """Ends as C++ does that throws past its last handler."""
    os.write(2, words.encode())
    os.abort()


def _hang(state: WorkerState, pids: Path, apart: bool = True) -> None:
    """Never returns; starts processes first, one of them in a session of its own if ``apart``."""
    state.enter(Stage.TIME)
    started = [subprocess.Popen(_SLEEP)]
    if apart:
        started.append(subprocess.Popen(_SLEEP, start_new_session=True))
    pids.write_text(" ".join(str(pid) for pid in (os.getpid(), *(p.pid for p in started))))
    while True:
        pass


def _start_and_leave(state: WorkerState, pids: Path, crashes: bool) -> None:
    """Returns or crashes while a process that it started goes on, with every inherited descriptor if it crashes."""
    pids.write_text(str(subprocess.Popen(_SLEEP, close_fds=not crashes).pid))
    if crashes:
        os.kill(os.getpid(), signal.SIGSEGV)


def _fork_and_crash(state: WorkerState, pids: Path) -> None:
    """As ``start_and_leave``, in a fork with a session of its own."""
    if not os.fork():
        os.setsid()
        pids.write_text(str(os.getpid()))
        time.sleep(3600)
    while not pids.exists() or not pids.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSEGV)


def _fork(state: WorkerState) -> None:
    """Forks, and both raise: one answer must come."""
    child = os.fork()
    if not child:
        raise ValueError("in the child")
    os.waitpid(child, 0)
    raise RuntimeError("in the parent")


def _close_all(state: WorkerState) -> None:
    """Closes its connection and its output."""
    os.closerange(1, 100)


def _gorge(state: WorkerState, limit_bytes: int) -> None:
    """Allocates until it is stopped, at so much address space: the machine itself should not run out."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    eaten = []
    while True:
        eaten.append(np.zeros(1 << 24))  # Address space is what is limited: no page needs to be touched.


def _babble(state: WorkerState, megabytes: int, fails: bool) -> str:
    """Prints megabytes past Python, then does as told."""
    os.write(1, b"the beginning\n")
    for _ in range(megabytes):
        os.write(1, (b"x" * 1023 + b"\n") * 1024)
    os.write(2, b"the end\n")
    if fails:
        raise ValueError("first line\nsecond line")
    return "done"


def _fail(state: WorkerState, error: BaseException, stage: Stage = Stage.BUILD) -> None:
    state.enter(stage)
    raise error


def _unpicklable(state: WorkerState) -> Any:
    return threading.Lock()


class Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return int, ("not a number",)


def _return_trap(state: WorkerState) -> Any:
    """Pickles, but does not unpickle."""
    return Trap()


def _exit_with(state: WorkerState, leave: Callable[[int], None], status: int) -> None:
    """Ends its process by ``sys.exit`` or ``os._exit``."""
    leave(status)


def _garble(state: WorkerState) -> None:
    """Writes rubbish where answers go."""
    os.write(int(sys.argv[1]), b"\xff" * 64)


class _HardToClose:
    """Takes its process down when it is closed, as a session does whose stream is gone, or is never closed."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    def close(self) -> None:
        if not self._hangs:
            os.kill(os.getpid(), signal.SIGSEGV)
        while True:
            time.sleep(3600)


def _fail_in_teardown(state: WorkerState, value: Any, hangs: bool) -> Any:
    """Gives its result; what it used crashes or hangs when it is torn down."""
    state.transient(lambda: _HardToClose(hangs))
    return value
