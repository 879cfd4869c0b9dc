"""One worker process: its pipes, what it prints, and how it is killed with all its descendants."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from mptune.processes.child import HEADER, Message, encode
from mptune.processes.failure import FailureKind, Progress, Stage

KEEP_BYTES = 1 << 20
"""How much of the start and of the end of a job's output is kept."""


class Output:
    """What a job printed: the first and the last ``KEEP_BYTES``, however much there was."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Append what was read from the pipe."""
        room = KEEP_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        # Trimmed at twice the size, so that the copying stays proportional to what is printed.
        if len(self._tail) > 2 * KEEP_BYTES:
            self._trim()

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def text(self) -> bytes:
        """What is kept, with a line for the number of bytes that were left out."""
        self._trim()
        gap = f"\n[... {self._left_out} bytes left out ...]\n".encode() if self._left_out else b""
        return bytes(self._head) + gap + bytes(self._tail)

    def write(self, directory: Path, name: str) -> Path | None:
        """Write a new log file; None where that fails (a full disk must not hide the failure it belongs to)."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = directory / f"{stamp}-{os.getpid()}-{next(self._numbers):03d}-{name}.log"
            path.write_bytes(self.text())
        except OSError:
            return None
        return path

    def _trim(self) -> None:
        surplus = len(self._tail) - KEEP_BYTES
        if surplus > 0:
            del self._tail[:surplus]
            self._left_out += surplus


_REAP_TIMEOUT_S = 10.0
NO_TELEMETRY: Mapping[str, str] = {"ORT_DISABLE_TELEMETRY": "1"}
"""Environment variable that keeps ONNX Runtime 1.29 and later from collecting names of models and facts about the
machine. It is read when the library loads."""


def absolute_sys_path() -> tuple[str, ...]:
    """This process' import path as absolute paths."""
    return tuple(str(Path(entry).absolute()) if entry else str(Path.cwd()) for entry in sys.path)


_spawner: tuple[int, ThreadPoolExecutor] | None = None
_spawner_lock = threading.Lock()


def spawn(
    command: list[str], fds: tuple[int, ...], output: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process from a thread that lives as long as this process does, with more environment variables.

    Linux sends the parent-death signal when the *thread* that started the child ends, so a caller's short-lived
    thread must not be the one.
    """
    global _spawner
    with _spawner_lock:
        if _spawner is None or _spawner[0] != os.getpid():  # A fork does not take the thread along.
            _spawner = (os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="mptune-spawn"))
        executor = _spawner[1]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=fds[:2],
            start_new_session=True,
            # The working directory must not shadow modules (Python 3.11 and up); the import path is the parent's.
            env={
                **os.environ,
                **environment,
                **NO_TELEMETRY,
                "PYTHONPATH": os.pathsep.join(absolute_sys_path()),
                "PYTHONSAFEPATH": "1",
            },
        )

    return executor.submit(start).result()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session of its own, its process group and all its descendants; reap it.

    The children of a process that has ended are still found by its process group. Nothing is stopped first (SIGSTOP):
    if this process died then, what it had stopped would stay for ever, the guard of the group included.
    """
    outside: list[psutil.Process] = []
    if process.poll() is None:
        outside = _outside_of_group(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for victim in outside:
        with contextlib.suppress(psutil.Error):
            victim.kill()
    with contextlib.suppress(OSError):
        process.kill()
    # A process in an uninterruptible system call (a driver that hangs) dies later; that is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_TIMEOUT_S)


def _outside_of_group(pid: int) -> list[psutil.Process]:
    """The descendants of a process group's leader that the group's signal does not reach."""
    outside: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        for victim in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(OSError):
                if os.getpgid(victim.pid) != pid:
                    outside.append(victim)
    return outside


def oom_kills() -> int | None:
    """Number of out-of-memory kills since boot (Linux 4.13 and later); None where unknown."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def signal_name(number: int) -> str:
    """Its name, such as ``SIGSEGV``; its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_MAX_MESSAGE_BYTES = 1 << 30
_READ_BYTES = 1 << 16
_CLOSE_TIMEOUT_S = 10.0
_DYING_TIMEOUT_S = 5.0
_TICK_S = 1.0
_STOPPED_S = 2.0
"""A wait that took so much longer than asked for: this process was stopped (SIGSTOP, a container that is paused), and
perhaps the worker with it. That time does not count."""
_REST_S = 0.1
"""Grace period for reading the rest of an answer that started before the deadline."""
_OVERTIME_S = 5.0
"""After this, nothing more is read."""


class WorkerProcess:
    """One worker process with its three pipes: requests, answers, output."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; ``wait_until_ready`` waits."""
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
            "mptune.processes",
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
        with contextlib.suppress(BrokenPipeError):  # it has ended: the first answer is end-of-file
            os.write(self._requests, encode(("start", absolute_sys_path())))

    @property
    def pid(self) -> int:
        """Process number."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def wait_until_ready(self, timeout_s: float) -> str | None:
        """Wait until it takes jobs; None then, else why it will not."""
        deadline = time.monotonic() + timeout_s
        _, outcome = self.exchange(b"", deadline, Stage.START, lambda progress: None, lambda question: b"")
        if outcome is None:
            return f"the worker did not answer within {timeout_s:g} s"
        if outcome[0] != "ready":
            return "the worker ended while it started: " + self.cause_of_death()[1]
        self.output.clear()
        return None

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

    def end_now(self) -> None:
        """Kill the whole tree, in any thread; whoever waits for an answer sees that it is gone, and calls ``kill``."""
        kill_tree(self._popen)

    def kill(self) -> None:
        """Kill the whole tree and free the pipes; what was printed stays in ``output``."""
        kill_tree(self._popen)
        with contextlib.suppress(OSError):
            self.drain()
        for fd in (self._requests, self._answers, self._printed):
            if fd >= 0:
                os.close(fd)
        self._requests = self._answers = self._printed = -1

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
