"""The journal file under Optuna's storage: a torn tail is cut before each append; damage elsewhere is named by line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from optuna.storages.journal import JournalFileOpenLock

from mptune.errors import RunError
from mptune.files import open_file, parse_json, read_bytes, write_bytes, writing
from mptune.run_json import damaged_hint

_END = b"}\n"
"""How each record ends: it is a JSON object on a line of its own, and holds no other line break."""

_BLOCK = 1 << 16


class JournalLock(JournalFileOpenLock):
    """Optuna's lock for appending to a journal; whoever gets it cuts off a torn tail first.

    A process that is killed while it appends, or whose disk is full, leaves a part of a record. It was never
    acknowledged; but Optuna would append to it, and refuse the whole file from then on.
    """

    def __init__(self, journal: Path) -> None:
        # An open lock, not a symbolic link: symbolic links need privileges on Windows and fail on some mounts.
        super().__init__(str(journal))
        self._journal = journal

    def acquire(self) -> bool:
        """Wait for the lock. The journal ends with a whole record then."""
        super().acquire()
        try:
            cut_torn_tail(self._journal)
        except BaseException:
            self.release()
            raise
        return True


def cut_torn_tail(journal: Path) -> None:
    """Cut off what follows the last whole record. Only for the process that holds the journal's lock."""
    with journal.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _whole_length(file, size)
        if whole < size:
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())


def _whole_length(file: BinaryIO, size: int) -> int:
    """Where the last whole record ends."""
    start, tail = size, b""
    while start > 0:
        block = min(start, _BLOCK)
        start -= block
        file.seek(start)
        tail = file.read(block) + tail
        end = tail.rfind(_END)
        if end >= 0:
            return start + end + len(_END)
    return 0


def remove_stale_locks(journal: Path) -> None:
    """Delete the lock files that a killed process left beside the journal.

    Only for the process that holds the run directory's own lock: otherwise another's lock would be broken. With one
    left over, Optuna would wait for its grace period before every write.
    """
    with writing(journal):
        for leftover in journal.parent.glob(f"{journal.name}.lock*"):
            leftover.unlink(missing_ok=True)


def copy_journal(journal: Path, copy: Path) -> None:
    """Copy a journal as it is at one moment: to the end of the last record that is whole, while others may append."""
    if not journal.exists():
        raise RunError(f"{journal} is missing: the run is not whole", "let `mptune search` go on with it first")
    content = read_bytes(journal)
    whole, end, _ = content.rpartition(_END)
    write_bytes(copy, [whole, end])


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)
"""What Optuna raises at a line that holds no operation, or one that cannot be carried out."""


def damaged_line(journal: Path, line: int | None, what: str = "") -> RunError:
    """The ``RunError`` for a line of a journal that is not what mptune writes."""
    place = f"{journal}" if line is None else f"line {line} of {journal}"
    why = f": {what} cannot be read" if what else ""
    return RunError(f"{place} is damaged{why}", damaged_hint(journal.parent))


def line_of_attribute(journal: Path, trial_id: int, attribute: str) -> int | None:
    """The last line that gives a trial this attribute; None where none does."""
    last = None
    with open_file(journal) as file:
        for number, line in enumerate(file, start=1):
            if attribute.encode() in line:
                record = parse_json(line)
                if record.get("trial_id") == trial_id and attribute in record.get("user_attr", {}):
                    last = number
    return last
