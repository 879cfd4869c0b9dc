"""Optuna's journal storage on a file, opened and written in fewer steps.

Optuna replays one operation for each parameter and each attribute, and copies the trial each time: a study of a
thousand trials took seconds to open. ``FoldingBackend`` joins the operations of each trial into one that creates it
whole, when the file is read first. The file itself is what Optuna writes and reads: any of its tools opens it, and
files of earlier versions open as quickly. Optuna's own snapshots are pickles, which would run code that a downloaded
run directory brings along.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock

from mptune.tuning.record.backends.folding import (
    Operation,
    Parameter,
    ParameterRun,
    Record,
    fold,
    is_step_of_open_trial,
    singly,
)
from mptune.tuning.record.backends.lines import LineReader
from mptune.tuning.record.backends.packed import pack
from mptune.tuning.record.backends.replay import SharingReplay

_ATTRS = {Operation.CREATE_TRIAL: "user_attrs", Operation.SET_TRIAL_USER_ATTR: "user_attr"}


class _JournalFile(JournalFileBackend):
    """Optuna's file, which goes to the disk where that matters.

    What a process has written outlives it without a sync, which takes milliseconds: only when the machine itself stops
    is more lost. So the steps of a trial that still runs wait for the end of the trial, and go to the disk before or
    with it. Where the machine stops sooner, the plan is proposed again.
    """

    def append_logs(self, logs: list[Record]) -> None:
        """Append records in one write, with a sync unless all are steps of trials that run on."""
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in logs)
        self._lock.acquire()
        try:
            with Path(self._file_path).open("ab") as file:
                file.write(lines.encode())
                file.flush()
                if not all(map(is_step_of_open_trial, logs)):
                    os.fsync(file.fileno())
        finally:
            self._lock.release()


class FoldingBackend(BaseJournalBackend):
    """A journal file whose first reading is folded (``mptune.tuning.record.backends.folding``). For one storage.

    Other processes may append at the same time: a last line without its newline is left for the next reading.
    """

    def __init__(self, path: Path, packed: str | None = None) -> None:
        """Open the file, which is created where it is missing; nothing is read yet.

        Args:
            path: of the file.
            packed: attributes of trials that are given packed (``mptune.tuning.record.backends.packed``): JSON objects
                whose names begin so. None packs nothing.

        Raises:
            OSError: it cannot be created.
        """
        self._path = path
        self._packed = packed
        self._reader = LineReader()
        # An open lock, not a symbolic link: symbolic links need privileges on Windows and fail on some mounts.
        self._file = _JournalFile(str(path), lock_obj=JournalFileOpenLock(str(path)))
        self._batch: list[Record] | None = None
        self._is_open = False
        self.is_silent = False
        """Nothing is read: what is in the file comes later."""
        # Where in the file the records of the last reading end, that before the first one, too, and their first number.
        self._first, self._ends = 0, [0]

    def append_logs(self, logs: list[Record]) -> None:
        """Append records in one write, or keep them for the end of the batch."""
        if self._batch is None:
            self._file.append_logs(logs)
        else:
            self._batch += logs

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write what is appended in the block at its end, in one piece. Until then nothing is read."""
        if self._batch is not None:  # within another one
            yield
            return
        self._batch = []
        try:
            yield
        finally:
            records, self._batch = self._batch, None
            if records:
                self._file.append_logs(records)

    def read_logs(self, log_number_from: int) -> Iterator[Record]:
        """The records from this number on; numbers count what was given, not what the file holds.

        Raises:
            ValueError: a line before the last one is damaged, or the record was given by an earlier reading.
        """
        if self.is_silent or (self._is_open and self._batch is not None):
            return
        if not self._is_open:
            self._is_open = True
            given = 0
            for record in fold(self._records(0, joined=True)):
                given += 1
                yield self._with_packed(record)
            self._first, self._ends = given, self._ends[-1:]
            return
        if log_number_from < self._first:
            raise ValueError(f"record {log_number_from} of {self._path} has been read before")
        start = self._ends[log_number_from - self._first]
        self._first = log_number_from
        if self._path.stat().st_size <= start:  # nearly always: it is asked before and after each operation
            self._ends = [start]
            return
        yield from map(self._with_packed, singly(self._records(start)))

    def _with_packed(self, record: Record) -> Record:
        name = _ATTRS.get(record.get("op_code", -1))
        if self._packed is None or name not in record:
            return record
        return {**record, name: pack(record[name], self._packed)}

    def _records(self, start: int, *, joined: bool = False) -> Iterator[Record | ParameterRun]:
        """Records of the file from an offset on; keeps where each ends. Joined, parameters of a trial come as one."""
        self._ends = [start]
        with self._path.open("rb") as file:
            file.seek(start)
            damage: ValueError | None = None
            run: list[Parameter] = []
            for line in file:
                if damage is not None:
                    raise damage
                if joined and (parameter := self._reader.next_parameter(line)) is not None:
                    run.append(parameter)
                    self._ends[-1] += len(line)
                    continue
                if run:
                    yield ParameterRun(self._reader.head, run)
                    run = []
                if not line.endswith(b"\n"):
                    break
                try:
                    record = self._reader.read(line)
                except ValueError as error:
                    damage = error  # unless it is the last line, which a writer may not have finished
                    continue
                self._ends.append(self._ends[-1] + len(line))
                yield record
            if run:
                yield ParameterRun(self._reader.head, run)


class BatchedStorage(JournalStorage):
    """Optuna's journal storage on a ``FoldingBackend``, whose trials share what they have in common."""

    def __init__(self, path: Path, packed: str | None = None) -> None:
        """Open the file and read it.

        Args:
            path: of the file.
            packed: as ``FoldingBackend`` takes it.

        Raises:
            OSError: it cannot be read or created.
            ValueError: a line before the last one is damaged.
        """
        self._folding = FoldingBackend(path, packed)
        self._folding.is_silent = True  # Optuna reads at once, into a replay of its own.
        super().__init__(self._folding)
        self._folding.is_silent = False
        with self._thread_lock:
            self._replay_result = SharingReplay(self._worker_id_prefix)
            self._sync_with_backend()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write what is set in the block at its end, in one piece; the storage does not give it back before."""
        with self._folding.batch():
            yield
