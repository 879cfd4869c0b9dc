"""The journal file under Optuna's storage: its lines, what is damaged among them, and its repair."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend

from mptune.errors import RunError
from mptune.files import open_file, read_bytes, write_bytes, writing
from mptune.tuning.record.readable import is_readable_operation


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
    """
    if not journal.exists():
        return None
    content = read_bytes(journal)
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
    """Copy a journal as it is at one moment: to the end of the last line that is whole, while others may append."""
    if not journal.exists():
        raise RunError(f"{journal} is missing: the run is not whole", "let `mptune search` go on with it first")
    content = read_bytes(journal)
    write_bytes(copy, [content[: _sound_length(journal, content)]])


def _sound_length(journal: Path, content: bytes) -> int:
    """Length up to the end of the last line that is whole: ends in a newline and holds a JSON object."""
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


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)
"""What Optuna raises at an operation that cannot be carried out."""

_CREATE_TRIAL = 4
"""Optuna's number of the operation that creates a trial; those with larger numbers are on trials."""


def refuse_damage(journal: Path) -> None:
    """Raise what is wrong with a journal that cannot be read."""
    lines = damaged_lines(journal)
    if not lines:
        raise RunError(f"{journal} cannot be read, though every line of it can", "copy the run directory again")
    more = f", and {len(lines) - 1} more are" if len(lines) > 1 else " is"
    raise RunError(
        f"line {lines[0]} of {journal}{more} damaged",
        f"`mptune report {journal.parent} --repair` sets damaged lines aside and keeps the rest",
    )


def damaged_lines(journal: Path) -> tuple[int, ...]:
    """The numbers of the lines, from 1, that hold no operation, or one that Optuna cannot carry out.

    A last line without an end is being written.
    """
    return tuple(number for number, _, record in _lines(journal) if record is None)


def set_damage_aside(journal: Path) -> Path | None:
    """Write a journal anew without its damaged lines. Only for the process that holds the run directory's lock."""
    sound = _without_damage(journal)
    if sound is None:
        return None
    copy = keep_copy(journal, "damaged")
    write_bytes(journal, sound)
    return copy


def _without_damage(journal: Path) -> list[bytes] | None:
    """The lines that are sound, and those that keep the numbers of trials; None where nothing is damaged."""
    sound: list[bytes] = []
    created, gap, example, damaged_count = 0, 0, b"", 0
    for _, line, record in _lines(journal):
        if record is None:
            damaged_count += 1
            gap = len(sound)  # where a creation that turns out to be missing belongs
            continue
        if record["op_code"] == _CREATE_TRIAL:
            created += 1
            example = example or _empty_trial(record)
        missing = record["trial_id"] - created + 1 if record["op_code"] > _CREATE_TRIAL else 0
        if 0 < missing <= damaged_count and example:
            sound[gap:gap] = [example] * missing
            created += missing
        sound.append(line)
    return sound if damaged_count else None


def _empty_trial(record: dict[str, Any]) -> bytes:
    """A line that creates a trial about which nothing is known."""
    whole = {"op_code", "worker_id", "study_id", "datetime_start"}
    empty = {name: value for name, value in record.items() if name in whole}
    return json.dumps(empty, separators=(",", ":")).encode() + b"\n"


class _OneByOne(BaseJournalBackend):
    """Gives Optuna's storage a single operation, and tells whether it was carried out."""

    def __init__(self) -> None:
        self._record: dict[str, Any] | None = None
        self._is_carried_out = False
        self._storage = JournalStorage(self)

    def carry_out(self, record: dict[str, Any]) -> bool:
        """Whether Optuna can do what the record says, after all records before it."""
        self._record, self._is_carried_out = record, False
        with suppress(*UNREADABLE):
            self._storage.get_trial(-1)  # There is no such trial: Optuna reads what is new, and raises.
        return self._is_carried_out

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if self._record is not None:
            yield self._record
            self._is_carried_out = True

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        raise NotImplementedError("nothing is written")


def _lines(journal: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Number, line and operation, which is None where the line holds none that can be carried out."""
    optuna = _OneByOne()
    with writing(journal), open_file(journal) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                record = decode_record(line)
                is_sound = (
                    record and _names_a_trial(record) and is_readable_operation(record) and optuna.carry_out(record)
                )
                yield number, line, record if is_sound else None


def _names_a_trial(record: dict[str, Any]) -> bool:
    """Whether an operation on a trial says which; Optuna passes over one that names a trial that there is not."""
    code = record.get("op_code")
    return not isinstance(code, int) or not _CREATE_TRIAL < code < 10 or isinstance(record.get("trial_id"), int)
