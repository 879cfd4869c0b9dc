"""The journal file under Optuna's storage: what a killed process or a full disk leaves behind, and its repair."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from mptune.errors import RunError
from mptune.files import writing

_BLOCK = 1 << 16


def remove_stale_locks(journal: Path) -> None:
    """Delete the lock files that a killed process left beside the journal.

    Only for the process that holds the run directory's own lock: otherwise another's lock would be broken. With one
    left over, Optuna would wait for its grace period before every write.
    """
    with writing(journal):
        for leftover in journal.parent.glob(f"{journal.name}.lock*"):
            leftover.unlink(missing_ok=True)


def repair_journal(journal: Path) -> Path | None:
    """Cut off a last line that was not written whole.

    Optuna reads over a torn last line, but appends to it, and from then on refuses the whole file. A record is one
    line, and a torn one was never acknowledged: nothing that a search relied on is lost.

    Returns:
        The copy of the untouched file that was kept, or None where nothing was torn.

    Raises:
        RunError: the disk is full, or the file cannot be written.
    """
    if not journal.exists():
        return None
    size = journal.stat().st_size
    sound = _sound_length(journal, size)
    if sound == size:
        return None
    copy = journal.with_name(f"{journal.name}.torn-1")
    number = 1
    while copy.exists():
        number += 1
        copy = journal.with_name(f"{journal.name}.torn-{number}")
    with writing(copy):
        shutil.copyfile(journal, copy)
    with writing(journal), journal.open("r+b") as file:
        file.truncate(sound)
        file.flush()
        os.fsync(file.fileno())
    return copy


def copy_journal(journal: Path, copy: Path) -> None:
    """Copy a journal as it is at one moment: to the end of the last line that is whole, while others may append.

    Raises:
        RunError: there is none, or the copy cannot be written.
    """
    if not journal.exists():
        raise RunError(f"{journal} is missing: the run is not whole", "let `mptune search` go on with it first")
    with writing(copy):
        shutil.copyfile(journal, copy)
        with copy.open("r+b") as file:
            file.truncate(_sound_length(copy, copy.stat().st_size))


def _sound_length(journal: Path, size: int) -> int:
    """Length up to the end of the last line that is whole: ends in a newline and holds a JSON object.

    Raises:
        RunError: not one line of several is whole: this is no journal, and nothing of it is touched.
    """
    with journal.open("rb") as file:
        end = size
        while end > 0:
            start = _line_start(file, end)
            line = _read(file, start, end)
            if line.endswith(b"\n") and _is_record(line):
                return end
            if start == 0 and end < size:
                break
            end = start
    if end > 0:
        raise RunError(f"{journal} is not a search's journal", "move it away, or start over with --fresh")
    return 0


def _line_start(file: BinaryIO, end: int) -> int:
    """Where the line that ends before offset ``end`` begins."""
    position = end - 1  # The line's own newline does not count.
    while position > 0:
        start = max(0, position - _BLOCK)
        found = _read(file, start, position).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
