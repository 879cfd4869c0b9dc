"""Where a study is kept: a journal file in the run directory, or a database that many hosts share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from mptune.errors import RunError
from mptune.files import RESUME_HINT, disk_error
from mptune.tuning.record.journal import remove_stale_locks, repair_journal

STORAGE_VARIABLE = "MPTUNE_STORAGE"
"""Environment variable with the storage URL, where run.json holds it without its password."""


def without_password(url: str) -> str:
    """The URL of a database with its password hidden, fit for messages and files."""
    # Up to the last "@": a password that was not quoted may hold one.
    hidden = re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", hidden)


def storage_url(recorded: str | None) -> str | None:
    """The URL of a run's storage; from ``MPTUNE_STORAGE`` where run.json hides its password.

    Raises:
        RunError: the password is needed and not there.
    """
    if recorded is None or "***" not in recorded:
        return recorded
    url = os.environ.get(STORAGE_VARIABLE)
    if url is None or without_password(url) != recorded:
        raise RunError(
            f"the run is kept in {recorded}, and its password is not stored",
            f"set {STORAGE_VARIABLE} to the whole URL",
        )
    return url


def open_storage(url: str | None, journal: Path, *, repair: bool = True) -> tuple[BaseStorage, str | None]:
    """Open Optuna's storage, repairing what a killed process left in a journal.

    Args:
        url: a database, or None for the journal.
        journal: path of the journal file.
        repair: the caller holds the run directory's lock, so what a dead process left may be cleaned up.

    Returns:
        The storage, and a warning where something had to be repaired.

    Raises:
        RunError: the database cannot be reached, its driver is missing, or the journal cannot be written.
    """
    if url is not None:
        return _open_database(url), None
    copy = None
    if repair:
        remove_stale_locks(journal)
        copy = repair_journal(journal)
    with storing(str(journal)):
        # An open lock, not a symbolic link: symbolic links need privileges on Windows and fail on some mounts.
        backend = JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal)))
        storage = JournalStorage(backend)
    if copy is None:
        return storage, None
    return storage, f"the last record of {journal.name} was torn and has been cut off; the old file is {copy.name}"


def _open_database(url: str) -> BaseStorage:
    shown = without_password(url)
    try:
        return optuna.storages.RDBStorage(url, skip_compatibility_check=False)
    except ImportError as error:
        extra = "pip install 'mptune[postgres]'" if "postgres" in url else "install the driver that the URL names"
        raise RunError(
            f"cannot open the storage {shown}: its driver is not installed ({_line(error)})", extra
        ) from error
    except Exception as error:  # SQLAlchemy, its drivers and Optuna each raise their own kinds.
        hint = "check the URL (such as postgresql+psycopg://user:password@host/name) and that the server is reachable"
        raise RunError(f"cannot open the storage {shown}: {_line(error).replace(url, shown)}", hint) from error


@contextmanager
def storing(where: str) -> Iterator[None]:
    """Turn what a storage raises when it cannot be written or read into a ``RunError`` about ``where``.

    Raises:
        RunError: disk full, not writable, or the database went away.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, Path(where)) from error
    except optuna.exceptions.StorageInternalError as error:
        cause = error.__cause__ or error
        raise RunError(
            f"the storage {where} does not answer: {_line(cause)}", f"when it is back, {RESUME_HINT}"
        ) from error


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
