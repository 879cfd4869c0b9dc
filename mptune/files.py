"""Writing that survives: atomic files, and what to say when the disk refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mptune.errors import RunError

RESUME_HINT = "the same command resumes the search: nothing that was evaluated is lost"

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def disk_error(error: OSError, path: Path) -> RunError:
    """Say in words what an ``OSError`` while writing ``path`` means, and what to do."""
    if error.errno in _FULL:
        return RunError(f"disk full: cannot write {path}", f"free some space, then run it again: {RESUME_HINT}")
    if error.errno in _FORBIDDEN:
        return RunError(f"cannot write {path}: {os.strerror(error.errno or 0)}", "choose another place with --out DIR")
    return RunError(f"cannot write {path}: {error.strerror or error}", "choose another place with --out DIR")


@contextmanager
def full_disk_told(path: Path) -> Iterator[None]:
    """Turn a full disk, wherever in the block it shows, into a ``RunError``; other errors of the system pass.

    Raises:
        RunError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_error(error, path) from error
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside the block into a ``RunError`` about ``path``.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def write_atomic(path: Path, text: str) -> None:
    """Write a whole file or nothing: beside it first, synced, then moved over it.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing(path):
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def link_or_copy(source: str, target: str) -> str:
    """Give a file a second name without copying its bytes, where the file system can; the second name."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
    return target


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file atomically, indented, with a newline at its end. Non-finite numbers are refused.

    Raises:
        RunError: the disk is full, or the place cannot be written.
    """
    write_atomic(path, json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
