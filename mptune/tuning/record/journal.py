"""The journal file under Optuna's storage: a torn tail is cut before each append; other damage is named by its line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import get_lock_file

from mptune.errors import RunError
from mptune.files import writing
from mptune.run_json import DAMAGED_HINT

_END = b"}\n"
"""How each record ends: it is a JSON object on a line of its own, and holds no other line break."""

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)
"""What Optuna raises at a line that holds no operation, or one that cannot be carried out."""


class _JournalFile(JournalFileBackend):
    """Optuna's journal file, whose last record is whole whenever another is appended.

    A process that is killed while it appends, or whose disk is full, leaves a part of a record. It was never
    acknowledged; but Optuna would append to it, and refuse the whole file from then on.
    """

    def __init__(self, path: Path) -> None:
        # An open lock, not a symbolic link: those need privileges on Windows and fail on some mounts.
        self._append_lock = JournalFileOpenLock(str(path))
        super().__init__(str(path), lock_obj=self._append_lock)
        self._path = path
        self.line = 1
        """The line that is read, or carried out, next."""

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        self.line = log_number_from + 1
        with writing(self._path):
            for record in super().read_logs(log_number_from):
                yield record
                self.line += 1

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with writing(self._path), get_lock_file(self._append_lock), self._path.open("r+b") as file:
            cut_torn_tail(file)
            file.write(lines.encode())
            file.flush()
            # A plan has a record for each group: they go to the disk together with what follows them.
            if any("param_name" not in log for log in logs):
                os.fsync(file.fileno())


def cut_torn_tail(file: BinaryIO) -> None:
    """Cut off what follows the last whole record, and go to its end. Only under the journal's lock."""
    size = start = file.seek(0, os.SEEK_END)
    block, end = len(_END), -1
    while start > 0 and end < 0:
        start = max(0, size - block)
        file.seek(start)
        end = file.read().rfind(_END)
        block *= 16
    file.truncate(file.seek(start + end + len(_END) if end >= 0 else 0))


def open_journal(path: Path, *, is_locked: bool) -> JournalStorage:
    """Optuna's journal storage on a file, made where there is none.

    ``is_locked``: the caller holds the lock of the run directory. Then a lock that a killed process left beside the
    journal is deleted: Optuna would wait for its grace period before every write.
    """
    with writing(path):
        for leftover in path.parent.glob(f"{path.name}.lock*") if is_locked else ():
            leftover.unlink(missing_ok=True)
        file = _JournalFile(path)
    try:
        return JournalStorage(file)
    except _UNREADABLE as error:
        raise RunError(f"line {file.line} of {path} is damaged", DAMAGED_HINT) from error
