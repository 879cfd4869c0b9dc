"""Where a study is kept: a journal file in the run directory, or a database that many hosts share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock

from mptune.errors import RunError
from mptune.files import RESUME_HINT, disk_error
from mptune.tuning.record.backends.journal import remove_stale_locks, repair_journal
from mptune.tuning.record.damage import UNREADABLE, refuse_damage
from mptune.tuning.record.storage_urls import scheme_of, without_secrets, without_secrets_of

if TYPE_CHECKING:
    from mptune.tuning.record.backends.patience import PatientStorage


class _BatchedFile(BaseJournalBackend):
    """Optuna's journal file, which goes to the disk once for a whole batch: Optuna syncs it after every record."""

    def __init__(self, path: Path) -> None:
        # An open lock, not a symbolic link: symbolic links need privileges on Windows and fail on some mounts.
        self._file = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
        self._batch: list[dict[str, Any]] | None = None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if self._batch is None:
            self._file.append_logs(logs)
        else:
            self._batch += logs

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        # Within a batch nothing is read: its own records would come behind those of other processes.
        return self._file.read_logs(log_number_from) if self._batch is None else ()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write what is appended in the block at its end, in one piece."""
        assert self._batch is None, "a batch within a batch"
        self._batch = []
        try:
            yield
        finally:
            records, self._batch = self._batch, None
            if records:
                self._file.append_logs(records)


class _Journal(JournalStorage):
    """Optuna's journal storage on a file."""

    def __init__(self, path: Path) -> None:
        self.file = _BatchedFile(path)
        super().__init__(self.file)


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
        return cast("BaseStorage", _open_database(url)), None
    copy = None
    if repair:
        remove_stale_locks(journal)
        copy = repair_journal(journal)
    with storing(str(journal)):
        try:
            storage = _Journal(journal)
        except UNREADABLE:
            refuse_damage(journal)
            raise
    if copy is None:
        return storage, None
    return storage, f"the last record of {journal.name} was torn and has been cut off; the old file is {copy.name}"


def close_storage(storage: BaseStorage) -> None:
    """Close a database's connections; a journal has none. Idempotent."""
    if not isinstance(storage, JournalStorage):
        with suppress(Exception):
            cast("PatientStorage", storage).dispose()


def check_opens(url: str) -> str:
    """Open a database once; what may be shown and recorded of its URL.

    Raises:
        RunError: it cannot be reached, or its driver is missing.
    """
    _open_database(url).dispose()
    return without_secrets(url)


def _open_database(url: str) -> PatientStorage:
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
    return storage.file.batch() if isinstance(storage, _Journal) else nullcontext()


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
