"""Where a study is kept: a journal file in the run directory, or a database by its URL, shown without secrets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import get_lock_file

from mptune.errors import RunError
from mptune.files import writing
from mptune.run_json import DAMAGED_HINT, refuse_other

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from mptune.tuning.record.database import RetryingStorage

STORAGE_VARIABLE = "MPTUNE_STORAGE"
"""Environment variable with a storage's URL, so that its password need not stand in a command."""

_END = b"}\n"
"""How each record of a journal ends: it is a JSON object on a line of its own, and holds no other line break."""

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RecursionError)
"""What Optuna raises at a line that holds no operation, or one that cannot be carried out."""


def without_secrets(url: str) -> str:
    """A URL that has opened, without its password and its options, which may be secrets: what run.json records.

    Of one that has not opened only the scheme: a password with special characters may have been read as its host.
    """
    parsed = _parse(url)
    if parsed is None or url.count("@") > 1:
        return _scheme(url)
    shown: str = parsed.set(query={}).render_as_string(hide_password=True)
    return shown


def storage_url(recorded: str | None, given: str | None = None) -> str | None:
    """The URL to open of a run's storage; None for the journal in its directory.

    A run may come from a stranger, so a storage that only its run.json names is not opened.
    """
    if recorded is None:
        return None
    url = given if given is not None else same_storage(recorded, os.environ.get(STORAGE_VARIABLE))
    if url is None:
        where = without_secrets(recorded) + (", and its password is not stored" if "***" in recorded else "")
        raise RunError(
            f"the run is kept in the storage {where}: a storage that only run.json names is not opened",
            f"name it, if you trust it: --storage URL, or set {STORAGE_VARIABLE} to the whole URL",
        )
    return url


def same_storage(recorded: str | None, given: str | None) -> str | None:
    """``given`` where it is the recorded storage; else None."""
    return given if given is not None and _parse(given) and without_secrets(given) == recorded else None


def named_storage(given: str | None, *, is_journal: bool) -> str | None:
    """The storage of a search: the one given, else that of ``MPTUNE_STORAGE``; None for a journal."""
    return given if given is not None or is_journal else os.environ.get(STORAGE_VARIABLE) or None


def check_storage(path: Path, recorded: str | None, storage: str | None) -> None:
    """Refuse to go on with a run that is kept in another storage."""
    if recorded != storage:
        before, now = ("the journal in it" if url is None else without_secrets(url) for url in (recorded, storage))
        refuse_other(path, "storage", f" ({before} before, {now} now)")


def open_storage(url: str | None, journal: Path, *, is_locked: bool = True) -> BaseStorage:
    """Open Optuna's storage: a database, or the journal for None, which is made where there is none.

    ``is_locked``: the caller holds the lock of the run directory. Then a lock that a killed process left beside the
    journal is deleted: Optuna would wait for its grace period before every write.
    """
    if url is None:
        with writing(journal):
            for leftover in journal.parent.glob(f"{journal.name}.lock*") if is_locked else ():
                leftover.unlink(missing_ok=True)
            file = _JournalFile(journal)
        try:
            return JournalStorage(file)
        except _UNREADABLE as error:
            raise RunError(f"line {file.line} of {journal} is damaged", DAMAGED_HINT) from error
    try:
        from mptune.tuning.record.database import RetryingStorage  # SQLAlchemy is slow to import.

        return cast("BaseStorage", RetryingStorage(url, without_secrets(url), partial(shown_message, url)))
    except Exception as error:  # SQLAlchemy, its drivers and Optuna each raise their own kinds.
        shown, message = _scheme(url), shown_message(url, error.__cause__ or error)
        hint = (
            "check that the server is reachable, and the URL (such as postgresql+psycopg://user:password@host/name; "
            "special characters of the password as %40 for @, %2F for /)"
        )
        if isinstance(error, ImportError):
            message = f"its driver is not installed ({shown_message(url, error)})"
            hint = "pip install 'psycopg[binary]'" if "postgres" in shown else "install the driver that the URL names"
        raise RunError(f"cannot open the storage {shown}: {message}", hint) from None  # a traceback would show the URL


def close_storage(storage: BaseStorage) -> None:
    """Close a database's connections; a journal has none. Idempotent."""
    if not isinstance(storage, JournalStorage):
        cast("RetryingStorage", storage).close()


def check_opens(url: str) -> str:
    """Open a database once; what may be shown and recorded of its URL."""
    close_storage(open_storage(url, Path()))
    return without_secrets(url)


def shown_message(url: str, error: BaseException) -> str:
    """The first line of a driver's message about a URL; the kind of error alone where the line could hold a secret."""
    parsed, kind = _parse(url), type(error).__name__
    # More than one "@": part of the password may have been read as the host, and a driver would name it.
    if parsed is None or (parsed.get_backend_name() != "sqlite" and url.count("@") > 1):
        return kind
    message = next(iter(str(error).strip().splitlines()), kind)
    secrets = [str(value) for value in (parsed.password, *parsed.query.values()) if value]
    return kind if any(form in message for secret in secrets for form in (secret, quote(secret, safe=""))) else message


def _parse(url: str) -> URL | None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        return None


def _scheme(url: str) -> str:
    scheme = re.match(r"[\w+]+(?=:)", url)
    return "(no URL)" if scheme is None else f"{scheme.group()}://..."


class _JournalFile(JournalFileBackend):
    """Optuna's journal file, whose last record is whole whenever another is appended.

    A process that is killed while it appends, or whose disk is full, leaves a part of a record. It was never
    acknowledged; but Optuna would append to it, and refuse the whole file from then on. Other damage is named by its
    line.
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
            # A trial's parameters and attributes go to the disk together with what comes of it.
            if any("state" in log or "trial_id" not in log for log in logs):
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
