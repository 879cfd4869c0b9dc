"""One worker process and its pipes: requests, answers, and what it prints."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mptune.engines.worker.child import HEADER, Message, encode
from mptune.engines.worker.failure import FailureKind, Progress, Stage
from mptune.engines.worker.output import Output
from mptune.engines.worker.process_tree import absolute_sys_path, kill_tree, oom_kills, signal_name, spawn

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


class WorkerProcess:
    """One worker process with its three pipes: requests, answers, output."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; ``wait_until_ready`` waits.

        Raises:
            OSError: it cannot be started.
        """
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

        Args:
            deadline: by the monotonic clock, in seconds.

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
