"""The journal file under Optuna's storage: what a killed process or a full disk leaves behind, and its repair."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mptune.errors import RunError
from mptune.files import write_bytes, writing


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
    content = journal.read_bytes()
    sound = _sound_length(journal, content)
    if sound == len(content):
        return None
    copy = keep_copy(journal, "torn")
    with writing(journal), journal.open("r+b") as file:
        file.truncate(sound)
        file.flush()
        os.fsync(file.fileno())
    return copy


def keep_copy(journal: Path, why: str) -> Path:
    """Copy the untouched file to ``NAME.WHY-1``, or the next free number, before it is changed."""
    number = 1
    while (copy := journal.with_name(f"{journal.name}.{why}-{number}")).exists():
        number += 1
    with writing(copy):
        shutil.copyfile(journal, copy)
    return copy


def copy_journal(journal: Path, copy: Path) -> None:
    """Copy a journal as it is at one moment: to the end of the last line that is whole, while others may append.

    Raises:
        RunError: there is none, or the copy cannot be written.
    """
    if not journal.exists():
        raise RunError(f"{journal} is missing: the run is not whole", "let `mptune search` go on with it first")
    content = journal.read_bytes()
    write_bytes(copy, [content[: _sound_length(journal, content)]])


def _sound_length(journal: Path, content: bytes) -> int:
    """Length up to the end of the last line that is whole: ends in a newline and holds a JSON object.

    Raises:
        RunError: not one line of several is whole: this is no journal, and nothing of it is touched.
    """
    end = len(content)
    while end > 0:
        start = content.rfind(b"\n", 0, end - 1) + 1
        if content.endswith(b"\n", start, end) and decode_record(content[start:end]) is not None:
            return end
        if start == 0 and end < len(content):
            raise RunError(f"{journal} is not a search's journal", "move it away, or start over with --fresh")
        end = start
    return 0


def decode_record(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
