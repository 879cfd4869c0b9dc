"""Jobs that misbehave, to be run in a real worker."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mptune.engines.base import EngineError, FailureKind, Progress, Stage
from mptune.errors import ModelError
from mptune.processes.child import WorkerState


@dataclass(frozen=True)
class Echo:
    """Behaves."""

    value: Any

    def run(self, state: WorkerState) -> Any:
        sys.stdout.write("this is printed, and nobody should see it")
        return self.value


@dataclass(frozen=True)
class Report:
    """Tells its progress from several threads at once, as builders do."""

    threads: int
    steps: int

    def run(self, state: WorkerState) -> str:
        def tell(name: str) -> None:
            for step in range(self.steps):
                state.report(Progress(name, step + 1, self.steps))

        tellers = [threading.Thread(target=tell, args=(f"phase {k}",)) for k in range(self.threads)]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
        return "told"


@dataclass(frozen=True)
class ReportOn:
    """Goes on telling its progress while its answer, larger than a pipe holds, is written."""

    answer: bytes

    def run(self, state: WorkerState) -> bytes:
        begun = threading.Event()

        def tell() -> None:
            for step in range(20_000):
                state.report(Progress("behind", step + 1, 20_000))
                begun.set()

        threading.Thread(target=tell, daemon=True).start()
        begun.wait()
        return self.answer


@dataclass(frozen=True)
class Pid:
    def run(self, state: WorkerState) -> int:
        return os.getpid()


@dataclass(frozen=True)
class Variable:
    name: str

    def run(self, state: WorkerState) -> str | None:
        return os.environ.get(self.name)


@dataclass(frozen=True)
class SysPath:
    def run(self, state: WorkerState) -> list[str]:
        return sys.path


@dataclass(frozen=True)
class Count:
    """How often the worker's cache was filled."""

    key: int

    def run(self, state: WorkerState) -> int:
        calls = state.cached("calls", 0, list)
        state.cached("counted", self.key, lambda: calls.append(self.key))
        return len(calls)


@dataclass(frozen=True)
class Ask:
    question: bytes

    def run(self, state: WorkerState) -> Any:
        return state.ask(self.question)


@dataclass(frozen=True)
class Work:
    """Takes its time, in small steps: a process that is stopped gets no further."""

    steps: int

    def run(self, state: WorkerState) -> str:
        for _ in range(self.steps):
            time.sleep(0.1)
        return "done"


@dataclass(frozen=True)
class Signalled:
    """Is killed by a signal in a stage."""

    number: int
    stage: Stage = Stage.RUN

    def run(self, state: WorkerState) -> None:
        state.enter(self.stage)
        os.write(1, b"last words")
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class Abort:
    """Ends as C++ does that throws past its last handler."""

    words: str = ""

    def run(self, state: WorkerState) -> None:
        os.write(2, self.words.encode())
        os.abort()


@dataclass(frozen=True)
class Hang:
    """Never returns; starts processes first, one of them in a session of its own if ``apart``."""

    pids: Path
    apart: bool = True

    def run(self, state: WorkerState) -> None:
        state.enter(Stage.TIME)
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        started = [subprocess.Popen(command)]
        if self.apart:
            started.append(subprocess.Popen(command, start_new_session=True))
        self.pids.write_text(" ".join(str(pid) for pid in (os.getpid(), *(p.pid for p in started))))
        while True:
            pass


@dataclass(frozen=True)
class StartAndLeave:
    """Returns while a process that it started goes on."""

    pids: Path

    def run(self, state: WorkerState) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        self.pids.write_text(str(subprocess.Popen(command).pid))


@dataclass(frozen=True)
class OrphanAndCrash:
    """Crashes and leaves a process behind that holds every inherited descriptor."""

    pids: Path

    def run(self, state: WorkerState) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        self.pids.write_text(str(subprocess.Popen(command, close_fds=False).pid))
        os.kill(os.getpid(), signal.SIGSEGV)


@dataclass(frozen=True)
class ForkAndCrash:
    """As ``OrphanAndCrash``, in a fork with a session of its own."""

    pids: Path

    def run(self, state: WorkerState) -> None:
        if not os.fork():
            os.setsid()
            self.pids.write_text(str(os.getpid()))
            time.sleep(3600)
        while not self.pids.exists() or not self.pids.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSEGV)


@dataclass(frozen=True)
class Fork:
    """Forks, and both raise: one answer must come."""

    def run(self, state: WorkerState) -> None:
        child = os.fork()
        if not child:
            raise ValueError("in the child")
        os.waitpid(child, 0)
        raise RuntimeError("in the parent")


@dataclass(frozen=True)
class CloseAll:
    """Closes its connection and its output."""

    def run(self, state: WorkerState) -> None:
        os.closerange(1, 100)


@dataclass(frozen=True)
class Gorge:
    """Allocates until it is stopped, at so much address space: the machine itself should not run out."""

    limit_bytes: int

    def run(self, state: WorkerState) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (self.limit_bytes, self.limit_bytes))
        eaten = []
        while True:
            eaten.append(np.zeros(1 << 24))  # Address space is what is limited: no page needs to be touched.


@dataclass(frozen=True)
class Babble:
    """Prints megabytes past Python, then does as told."""

    megabytes: int
    fails: bool

    def run(self, state: WorkerState) -> str:
        os.write(1, b"the beginning\n")
        for _ in range(self.megabytes):
            line = b"x" * 1023 + b"\n"
            os.write(1, line * 1024)
        os.write(2, b"the end\n")
        if self.fails:
            raise ValueError("first line\nsecond line")
        return "done"


@dataclass(frozen=True)
class Raise:
    error: BaseException

    def run(self, state: WorkerState) -> None:
        raise self.error


@dataclass(frozen=True)
class RaiseEngineError:
    kind: FailureKind
    stage: Stage = Stage.BUILD

    def run(self, state: WorkerState) -> None:
        state.enter(self.stage)
        raise EngineError(self.kind, "in its own words")


@dataclass(frozen=True)
class RaiseModelError:
    def run(self, state: WorkerState) -> None:
        raise ModelError("the model is odd", "mend it")


@dataclass(frozen=True)
class Unpicklable:
    def run(self, state: WorkerState) -> Any:
        return threading.Lock()


class Trap:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return int, ("not a number",)


@dataclass(frozen=True)
class ReturnTrap:
    def run(self, state: WorkerState) -> Any:
        return Trap()


@dataclass(frozen=True)
class BeTrap:
    """Cannot be unpickled in the worker."""

    trap: Trap

    def run(self, state: WorkerState) -> None:
        raise AssertionError


@dataclass(frozen=True)
class Exit:
    status: int

    def run(self, state: WorkerState) -> None:
        sys.exit(self.status)


@dataclass(frozen=True)
class HardExit:
    status: int

    def run(self, state: WorkerState) -> None:
        os._exit(self.status)


@dataclass(frozen=True)
class Garble:
    """Writes rubbish where answers go."""

    def run(self, state: WorkerState) -> None:
        os.write(int(sys.argv[1]), b"\xff" * 64)


class _FatalToClose:
    """Takes its process down when it is closed, as a session does whose stream is gone."""

    def close(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


@dataclass(frozen=True)
class CrashInTeardown:
    """Gives its result; what it used crashes when it is torn down."""

    value: Any

    def run(self, state: WorkerState) -> Any:
        state.transient(_FatalToClose)
        return self.value


class _HangsToClose:
    def close(self) -> None:
        while True:
            time.sleep(3600)


@dataclass(frozen=True)
class HangInTeardown:
    """Gives its result; what it used is never torn down."""

    value: Any

    def run(self, state: WorkerState) -> Any:
        state.transient(_HangsToClose)
        return self.value
