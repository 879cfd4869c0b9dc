"""Files: checked before they are read, written whole or not at all, temporary ones named by process."""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar

from mptune.errors import RunError
from mptune.json_form import JsonForm

Form = TypeVar("Form", bound=JsonForm)
PathLike: TypeAlias = "str | os.PathLike[str]"

RESUME_HINT = "the same command resumes the search: nothing that was evaluated is lost"
DISK_FULL_HINT = f"free some space, then run it again: {RESUME_HINT}"
MOST_TEXT_BYTES = 64 << 20
"""A larger file of text is refused: what is made of its JSON takes several times its size in memory."""
READ_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What reading a file, and making a dataclass of its JSON, can raise."""

_numbers = itertools.count()


def is_disk_full(error: BaseException | None) -> bool:
    """Whether the error says that a disk, or the user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path, *, only_full_disk: bool = False) -> Iterator[None]:
    """Raise an ``OSError`` inside the block as a ``RunError`` about ``path``; ``only_full_disk`` lets others pass."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise RunError(f"disk full: cannot write {path}", DISK_FULL_HINT) from error
        if only_full_disk:
            raise
        hint = "check the permissions, or take another place: a new search with --out DIR, a run as a copy of it"
        raise RunError(f"cannot write {path}: {error.strerror or error}", hint) from error


full_disk_as_error = partial(writing, only_full_disk=True)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to; it takes the name ``path`` at the end of the block, or is deleted.

    It is on the disk before it has its name, so that what names it later can rely on it after a power cut. A reader
    sees the old file or the whole new one. Processes and threads that write one file at a time do not
    disturb each other: the last to finish wins.

    Raises:
        OSError: as the system raised it; ``writing`` around the block makes it a ``RunError``.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):  # weights take gigabytes
        if is_left(leftover.name):
            leftover.unlink(missing_ok=True)
    partial = path.with_name(f".{scratch_name(f'{path.name}.{next(_numbers)}', '.partial')}")
    try:
        partial.unlink(missing_ok=True)  # a link of that name, which somebody put there, would be written through
        yield partial
        _sync(partial)
        partial.replace(path)
        with suppress(OSError):  # not every system can do that to a directory
            _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def files_in_order(folder: Path) -> list[Path]:
    """The files of a folder by their names, hidden ones left out; ``sample_2`` comes before ``sample_10``."""

    def parts(file: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", file.name) if part]

    return sorted((each for each in folder.iterdir() if each.is_file() and each.name[0] != "."), key=parts)


def files_sha256(*paths: Path) -> str:
    """The SHA-256 of the content of files, one after the other, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        with open_file(path) as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def write_bytes(path: Path, chunks: Iterable[bytes]) -> Path:
    """Write a file whole or not at all, and the directories above it where they are missing."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial, partial.open("wb") as file:
            file.writelines(chunks)
    return path


def write_text(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a UTF-8 file whole or not at all, with ``mode`` from its first byte on; it is on the disk on return."""
    with writing(path), whole_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        if mode is not None:
            partial.chmod(mode)
        file.write(text)


def open_file(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file to read its bytes; neither a named pipe nor a device is waited for.

    Raises:
        OSError: as the system raised it; for anything but a regular file, and for one that is too large, too.
    """
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(number)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a named pipe, a socket or a device, and no file", str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_bytes(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a regular file; raises as ``open_file`` does."""
    with open_file(path, most_bytes) as file:
        return file.read()


def read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The content of a regular UTF-8 file; raises as ``open_file`` does, and a ``ValueError`` for other bytes."""
    return read_bytes(path, most_bytes).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """What ``json.loads`` gives; a ``ValueError`` also where Python cannot read it for its depth."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> Any:
    """The JSON in a regular file; raises as ``read_text`` does, and a ``ValueError`` for what is no JSON."""
    return parse_json(read_text(path, most_bytes))


def read_form(form: type[Form], path: Path, hint: str) -> Form | None:
    """Read a dataclass from the file of its JSON form; None where there is no file.

    Raises:
        RunError: the file cannot be read, with ``hint``.
    """
    try:
        return form.from_json(read_json(path))
    except FileNotFoundError:
        return None
    except READ_ERRORS as error:
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {error}", hint) from None


def write_json(path: Path, document: Any, indent: int | None = 2) -> None:
    """As ``write_text``, of JSON with a newline at its end, faster without ``indent``. Refuses non-finite numbers."""
    write_text(path, json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def link_or_copy(source: str, target: str) -> str:
    """Give a file a second name without copying its bytes, where the file system can; the second name."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
    return target


def refuse(path: Path) -> NoReturn:
    """Raise the ``RunError`` for an output that exists already."""
    if path.is_dir():
        raise RunError(f"{path} is a directory", "give the path of a file with -o, such as mixed.onnx")
    raise RunError(f"{path} exists already", "give --force to overwrite it, or another path with -o")


_SCRATCH = re.compile(r"-(?P<pid>\d+)-(?P<started>\d+)-(?P<host>[0-9a-f]{8})\.[a-z]+$")
_CLOCK_S = 2
"""Two looks at one process differ by this much in when it started, where the clock was set in between."""


@cache
def _process(pid: int) -> str:
    import psutil  # type: ignore[import-untyped]

    return f"{pid}-{int(psutil.Process(pid).create_time())}-{_host()}"


@cache
def _host() -> str:
    import socket  # nothing else of the command line needs it

    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def scratch_name(name: str, suffix: str) -> str:
    """A file name of this process alone: ``name``, its number, its start in seconds, its host, ``suffix``."""
    return f"{name}-{_process(os.getpid())}{suffix}"


def is_left(name: str) -> bool:
    """Whether a file, or what else has such a name, is of a process of this host that has ended."""
    match = _SCRATCH.search(name)
    if match is None or match["host"] != _host():
        return False
    import psutil

    try:
        started = psutil.Process(int(match["pid"])).create_time()
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    return bool(abs(started - int(match["started"])) > _CLOCK_S)


def delete_scratch(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Delete what dead processes of this host left: their temporary models and half-written files.

    What belongs to a living process, or to one of another host, stays.
    """
    left = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if is_left(path.name)]
    for path in left:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return tuple(left)
