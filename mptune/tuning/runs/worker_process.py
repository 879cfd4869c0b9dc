"""A worker of a search as a process of its own: the parent's handle, and what the process runs.

The parent writes a pickled call to the process' standard input, so that no password stands on a command line. The
process answers with a line of JSON for each event. What it or a library prints goes to a log file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, BinaryIO

from mptune import errors
from mptune.errors import MptuneError, RunError
from mptune.files import parse_json, writing
from mptune.processes.parent import absolute_sys_path, kill_tree
from mptune.tuning.listener import Silent

_CLOSE_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerProcess:
    """The parent's handle of one worker."""

    def __init__(
        self,
        gpu: int,
        function: Callable[..., object],
        arguments: Mapping[str, Any],
        log: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.gpu = gpu
        self.log = log
        self.events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        try:
            call = pickle.dumps((os.getpid(), function, dict(arguments)))
        except Exception as error:
            raise RunError(
                f"a worker process cannot be given these arguments: {error}",
                "give the metric as script.py:function, and no function of a notebook",
            ) from None
        with writing(log), log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the parent, which ends the workers in order.
                env={
                    **os.environ,
                    **variables,
                    "PYTHONPATH": os.pathsep.join(absolute_sys_path()),
                    "PYTHONSAFEPATH": "1",
                },
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It died already, which ``is_alive`` shows.
            self.process.stdin.write(call)
            self.process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or has events that were not read."""
        return self._reader.is_alive() or self.process.poll() is None or not self.events.empty()

    def interrupt(self) -> None:
        """Ask it to give its plan back and to end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Wait until it has ended; kill it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_TIMEOUT_S)
        kill_tree(self.process)
        self._reader.join(_CLOSE_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # A line that was cut off when it died.
                self.events.put(parse_json(line))


def error_of(event: Mapping[str, Any]) -> MptuneError:
    """The error that an event of the kind ``error`` tells of."""
    kind: type[MptuneError] = getattr(errors, event["type"], RunError)
    error = kind(event["error"], event["hint"])
    error.setting = event["setting"]
    return error


class _Reports(Silent):
    """Sends what the parent does not read from the study: no outcomes, and no progress of builds, which run at once."""

    def __init__(self, channel: BinaryIO) -> None:
        self._channel = channel

    def send(self, event: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # The parent is gone, and a signal is on its way.
            self._channel.write(json.dumps(event).encode() + b"\n")
            self._channel.flush()

    def stage(self, text: str) -> None:
        self.send({"stage": text})

    def warning(self, text: str) -> None:
        self.send({"warning": text})


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """What the process runs."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Native code that prints must not reach the parent as an event.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    parent, function, arguments = pickle.load(sys.stdin.buffer)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)  # when the parent ends
        if os.getppid() != parent:
            return
    reports = _Reports(channel)
    try:
        function(**arguments, listener=reports)
        reports.send({"done": True})
    except KeyboardInterrupt:
        reports.send({"done": False})
    except MptuneError as error:
        reports.send({"error": error.text, "hint": error.hint, "setting": error.setting, "type": type(error).__name__})


if __name__ == "__main__":
    main()
