"""Where a study is kept: a journal file in the run directory, or a database that many hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import BaseStorage

from mptune.errors import RunError
from mptune.files import RESUME_HINT, disk_error
from mptune.tuning.record.backends.journal import remove_stale_locks, repair_journal
from mptune.tuning.record.backends.journal_storage import BatchedStorage
from mptune.tuning.record.damage import UNREADABLE, refuse_damage
from mptune.tuning.record.storage_urls import scheme_of, without_secrets, without_secrets_of
from mptune.tuning.sampler.trials import JSON_MARK

if TYPE_CHECKING:
    from optuna.storages import RDBStorage


def open_storage(
    url: str | None, journal: Path, *, repair: bool = True, packed: bool = False
) -> tuple[BaseStorage, str | None]:
    """Open Optuna's storage, repairing what a killed process left in a journal.

    Args:
        url: a database, or None for the journal.
        journal: path of the journal file.
        repair: the caller holds the run directory's lock, so what a dead process left may be cleaned up.
        packed: attributes of trials that hold JSON for mptune alone are given packed where a journal is kept, so that a
            long search takes less memory: for ``StudyRecord``, which unpacks them.

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
        try:
            storage = BatchedStorage(journal, JSON_MARK if packed else None)
        except UNREADABLE:
            refuse_damage(journal)
            raise
    if copy is None:
        return storage, None
    return storage, f"the last record of {journal.name} was torn and has been cut off; the old file is {copy.name}"


def check_opens(url: str) -> str:
    """Open a database once; what may be shown and recorded of its URL.

    Raises:
        RunError: it cannot be reached, or its driver is missing.
    """
    storage = _open_database(url)
    storage.remove_session()
    storage.engine.dispose()
    return without_secrets(url)


def _open_database(url: str) -> RDBStorage:
    from mptune.tuning.record.backends.patience import PatientStorage  # SQLAlchemy is slow to import.

    shown = scheme_of(url)
    try:
        return PatientStorage(url)
    except ImportError as error:
        extra = "pip install 'psycopg[binary]'" if "postgres" in shown else "install the driver that the URL names"
        raise RunError(
            f"cannot open the storage {shown}: its driver is not installed ({without_secrets_of(url, _line(error))})",
            extra,
        ) from None
    except Exception as error:  # SQLAlchemy, its drivers and Optuna each raise their own kinds.
        reason = without_secrets_of(url, _line(error.__cause__ or error)) or type(error).__name__
        raise RunError(
            f"cannot open the storage {shown}: {reason}",
            "check that the server is reachable, and the URL (such as postgresql+psycopg://user:password@host/name; "
            "special characters of the password as %40 for @, %2F for /)",
        ) from None  # its traceback would show the URL


def batch(storage: BaseStorage) -> AbstractContextManager[None]:
    """Write what is set in the block in one piece at its end, where the storage can; nothing read back before holds it.

    Raises:
        OSError: as ``storing`` takes it.
    """
    return storage.batch() if isinstance(storage, BatchedStorage) else nullcontext()


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
