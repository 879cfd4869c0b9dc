"""Temporary files that carry their process in their name, so that those of dead processes can be deleted."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_SCRATCH = re.compile(r"-(?P<pid>\d+)-(?P<started>\d+)-(?P<host>[0-9a-f]{8})\.[a-z]+$")
_PARTIAL = re.compile(r"^\..+\.(?P<pid>\d+)\.\d+\.partial$")
_CLOCK_S = 2
"""Two looks at one process differ by this much in when it started, where the clock was set in between."""


def scratch_name(name: str, suffix: str) -> str:
    """A file name of this process alone: ``name``, its number, its start in seconds, its host, ``suffix``."""
    return f"{name}-{_this_process(os.getpid())}{suffix}"


def delete_scratch(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Delete what dead processes of this host left: their temporary models and half-written files.

    What belongs to a living process, or to one of another host, stays.
    """
    found = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if _is_left(path.name)]
    for path in found:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return tuple(found)


@lru_cache(maxsize=1)
def _this_process(pid: int) -> str:
    import psutil  # type: ignore[import-untyped]

    return f"{pid}-{int(psutil.Process(pid).create_time())}-{_host()}"


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _is_left(name: str) -> bool:
    scratch, partial = _SCRATCH.search(name), _PARTIAL.match(name)
    if scratch is not None:
        return scratch["host"] == _host() and not _lives(int(scratch["pid"]), int(scratch["started"]))
    return partial is not None and not _lives(int(partial["pid"]), None)


def _lives(pid: int, started: int | None) -> bool:
    import psutil

    try:
        since = psutil.Process(pid).create_time()
        return started is None or bool(abs(since - started) <= _CLOCK_S)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
