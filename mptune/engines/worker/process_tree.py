"""Start the worker process, kill it with all its descendants, and read the kernel's count of out-of-memory kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]

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
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        for victim in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(OSError):
                if os.getpgid(victim.pid) != pid:
                    found.append(victim)
    return found


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
