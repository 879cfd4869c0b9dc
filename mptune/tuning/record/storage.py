"""Where a study is kept: a journal file in the run directory, or a database by its URL, shown without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import FrozenTrial

from mptune.errors import RunError
from mptune.files import RESUME_HINT, disk_error
from mptune.identity import refuse_other
from mptune.tuning.record.backends.journal import (
    UNREADABLE,
    JournalLock,
    damaged_line,
    line_of_attribute,
    remove_stale_locks,
)
from mptune.tuning.sampler.trials import JSON_MARK

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from mptune.tuning.record.backends.patience import PatientStorage

STORAGE_VARIABLE = "MPTUNE_STORAGE"
"""Environment variable with a storage's URL, so that its password need not stand in a command."""

_HIDDEN = "***"

_SHOWN_OPTIONS = frozenset(
    {
        *("host", "port", "user", "dbname", "database", "sslmode", "ssl_mode", "connect_timeout", "timeout"),
        *("application_name", "target_session_attrs", "client_encoding", "charset", "driver"),
        *("mode", "uri", "cache", "nolock", "immutable", "check_same_thread"),
    }
)
"""Options of a URL's query that hold no secret. All others may: sslpassword, passfile, a driver's own."""


def without_secrets(url: str) -> str:
    """SQLAlchemy's own rendering of a URL that has opened, without its password and the options that may be secrets.

    Of a URL that has not opened, use ``scheme_of``: a password with special characters may have been read as its host.
    """
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    shown: str = parsed.difference_update_query(_secret_options(parsed)).render_as_string(hide_password=True)
    return shown


def scheme_of(url: str) -> str:
    """What can be shown of a URL that has not opened: dialect and driver; of a file without options, all of it."""
    parsed = _parse(url)
    if parsed is None:
        return "(a URL that SQLAlchemy does not understand)"
    if parsed.get_backend_name() == "sqlite" and not parsed.query and parsed.password is None:
        return url
    return f"{parsed.drivername}://..."


def shown_message(url: str, error: BaseException) -> str:
    """The first line of a driver's message about a URL; the kind of error alone where the line could hold a secret.

    A message is shown as it is or not at all: a secret of one letter stands in many words that are none.
    """
    parsed, message = _parse(url), _line(error)
    # More than one "@": part of the password may have been read as the host, and a driver would name it.
    if parsed is None or (parsed.get_backend_name() != "sqlite" and url.count("@") > 1):
        return type(error).__name__
    values = [parsed.password, *(parsed.query[name] for name in _secret_options(parsed))]
    secrets = [str(text) for value in values if value for text in ((value,) if isinstance(value, str) else value)]
    forms = {form for secret in secrets for form in (secret, quote(secret, safe=""))}
    holds_secret = any(re.search(rf"(?<!\w)(?<!\w'){re.escape(form)}(?!\w)", message) for form in forms if form)
    return type(error).__name__ if holds_secret else message


def _secret_options(url: URL) -> list[str]:
    return [name for name in url.query if name not in _SHOWN_OPTIONS]


def storage_url(recorded: str | None, given: str | None = None) -> str | None:
    """The URL to open of a run's storage; None for the journal in its directory.

    A run may come from a stranger, so a storage that only its run.json names is not opened.
    """
    if recorded is None:
        return None
    if given is not None:
        return given
    url = os.environ.get(STORAGE_VARIABLE)
    if url and _parse(url) is not None and without_secrets(url) == recorded:
        return url
    where = _shown(recorded) + (", and its password is not stored" if _HIDDEN in recorded else "")
    raise RunError(
        f"the run is kept in the storage {where}: a storage that only run.json names is not opened",
        f"name it, if you trust it: --storage URL, or set {STORAGE_VARIABLE} to the whole URL",
    )


def _shown(recorded: str) -> str:
    """A recorded URL; of one that was not recorded as ``without_secrets`` gives it, what ``scheme_of`` shows."""
    is_safe = _parse(recorded) is not None and without_secrets(recorded) == recorded and recorded.count("@") < 2
    return recorded if is_safe else scheme_of(recorded)


def check_storage(path: Path, recorded: str | None, storage: str | None) -> None:
    """Refuse to go on with a run that is kept in another storage."""
    if recorded != storage:
        own = "the journal in it"
        before, now = own if recorded is None else _shown(recorded), own if storage is None else storage
        refuse_other(path, "storage", f" ({before} before, {now} now)")


def same_storage(recorded: str | None, given: str | None) -> str | None:
    """``given`` where it is the recorded storage; else None, and ``storage_url`` opens nothing for it."""
    is_same = given is not None and _parse(given) is not None and without_secrets(given) == recorded
    return given if is_same else None


def named_storage(given: str | None, *, is_journal: bool) -> str | None:
    """The storage of a search: the one given, else that of ``MPTUNE_STORAGE``; None for a journal."""
    return given if given is not None or is_journal else os.environ.get(STORAGE_VARIABLE) or None


def _parse(url: str) -> URL | None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        return None


class _BatchedFile(BaseJournalBackend):
    """Optuna's journal file, which goes to the disk once for a whole batch: Optuna syncs it after every record."""

    def __init__(self, path: Path) -> None:
        self._file = JournalFileBackend(str(path), lock_obj=JournalLock(path))
        self._batch: list[dict[str, Any]] | None = None
        self.line = 1
        """The line of the file that is read, or carried out, next."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if self._batch is None:
            self._file.append_logs(logs)
        else:
            self._batch += logs

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if self._batch is not None:  # Its own records would come behind those of other processes.
            return
        self.line = log_number_from + 1
        for record in self._file.read_logs(log_number_from):
            yield record
            self.line += 1

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
        try:
            super().__init__(self.file)
        except UNREADABLE as error:
            raise damaged_line(path, self.file.line) from error


def open_storage(url: str | None, journal: Path, *, is_locked: bool = True) -> BaseStorage:
    """Open Optuna's storage: a database, or the journal for None.

    ``is_locked``: the caller holds the run directory's lock, so locks that dead processes left may be deleted.
    """
    if url is not None:
        return cast("BaseStorage", _open_database(url))
    if is_locked:
        remove_stale_locks(journal)
    with storing(str(journal)):
        return _Journal(journal)


def close_storage(storage: BaseStorage) -> None:
    """Close a database's connections; a journal has none. Idempotent."""
    if not isinstance(storage, JournalStorage):
        with suppress(Exception):
            cast("PatientStorage", storage).dispose()


def check_opens(url: str) -> str:
    """Open a database once; what may be shown and recorded of its URL."""
    _open_database(url).dispose()
    return without_secrets(url)


def _open_database(url: str) -> PatientStorage:
    from mptune.tuning.record.backends.patience import PatientStorage  # SQLAlchemy is slow to import.

    shown = scheme_of(url)
    try:
        return PatientStorage(url, lambda error: shown_message(url, error))
    except ImportError as error:
        extra = "pip install 'psycopg[binary]'" if "postgres" in shown else "install the driver that the URL names"
        raise RunError(
            f"cannot open the storage {shown}: its driver is not installed ({shown_message(url, error)})", extra
        ) from None
    except Exception as error:  # SQLAlchemy, its drivers and Optuna each raise their own kinds.
        raise RunError(
            f"cannot open the storage {shown}: {shown_message(url, error.__cause__ or error)}",
            "check that the server is reachable, and the URL (such as postgresql+psycopg://user:password@host/name; "
            "special characters of the password as %40 for @, %2F for /)",
        ) from None  # its traceback would show the URL


def batch(storage: BaseStorage) -> AbstractContextManager[None]:
    """Write what is set in the block in one piece at its end, where the storage can; not to be read back before."""
    return storage.file.batch() if isinstance(storage, _Journal) else nullcontext()


@contextmanager
def storing(where: str) -> Iterator[None]:
    """Turn what a storage raises when it cannot be written or read into a ``RunError`` about ``where``."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, Path(where)) from error
    except optuna.exceptions.StorageInternalError as error:
        cause = error.__cause__ or error
        raise RunError(
            f"the storage {where} does not answer: {_line(cause)}", f"when it is back, {RESUME_HINT}"
        ) from error


def damaged_trial(trial: FrozenTrial, attribute: str, where: str) -> RunError:
    """The ``RunError`` for an attribute of a trial that is not what mptune writes."""
    what = f"{attribute.removeprefix(JSON_MARK)} of trial {trial.number}"
    if "://" in where:
        return RunError(
            f"{where} is damaged: {what} cannot be read",
            "restore the database from a backup, or start over with --fresh",
        )
    journal = Path(where)
    return damaged_line(journal, line_of_attribute(journal, trial._trial_id, attribute), what)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
