"""Where a study is kept: a journal file in the run directory, or a database by its URL, shown without secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.trial import FrozenTrial

from mptune.errors import RunError
from mptune.files import RESUME_HINT, disk_error
from mptune.identity import refuse_other
from mptune.tuning.record.journal import damaged_line, line_of_attribute, open_journal

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from mptune.tuning.record.database import RetryingStorage

STORAGE_VARIABLE = "MPTUNE_STORAGE"
"""Environment variable with a storage's URL, so that its password need not stand in a command."""

_SHOWN_OPTIONS = ("host", "port", "user", "dbname", "sslmode")
"""Options of a URL's query that are shown and recorded. All others may hold a secret: password, passfile, token."""


def without_secrets(url: str) -> str:
    """A URL that has opened, without its password and the options that may be secrets: what run.json records.

    Of a URL that has not opened, use ``scheme_of``: a password with special characters may have been read as its host.
    """
    parsed = _parse(url)
    if parsed is None or url.count("@") > 1:
        return scheme_of(url)
    shown: str = parsed.difference_update_query(_secret_options(parsed)).render_as_string(hide_password=True)
    return shown


def scheme_of(url: str) -> str:
    """What can be shown of a URL that has not opened: dialect and driver; of a file without options, all of it."""
    parsed = _parse(url)
    if parsed is None:
        return "(a URL that SQLAlchemy does not understand)"
    is_file = parsed.get_backend_name() == "sqlite" and not parsed.query and parsed.password is None
    return url if is_file else f"{parsed.drivername}://..."


def shown_message(url: str, error: BaseException) -> str:
    """The first line of a driver's message about a URL; the kind of error alone where the line could hold a secret."""
    parsed, message = _parse(url), _first_line(error)
    # More than one "@": part of the password may have been read as the host, and a driver would name it.
    if parsed is None or (parsed.get_backend_name() != "sqlite" and url.count("@") > 1):
        return type(error).__name__
    values = [parsed.password, *(parsed.query[name] for name in _secret_options(parsed))]
    secrets = [str(text) for value in values if value for text in ((value,) if isinstance(value, str) else value)]
    is_secret = any(form in message for secret in secrets for form in (secret, quote(secret, safe="")))
    return type(error).__name__ if is_secret else message


def storage_url(recorded: str | None, given: str | None = None) -> str | None:
    """The URL to open of a run's storage; None for the journal in its directory.

    A run may come from a stranger, so a storage that only its run.json names is not opened.
    """
    if recorded is None or given is not None:
        return None if recorded is None else given
    url = os.environ.get(STORAGE_VARIABLE)
    if same_storage(recorded, url) is not None:
        return url
    where = without_secrets(recorded) + (", and its password is not stored" if "***" in recorded else "")
    raise RunError(
        f"the run is kept in the storage {where}: a storage that only run.json names is not opened",
        f"name it, if you trust it: --storage URL, or set {STORAGE_VARIABLE} to the whole URL",
    )


def check_storage(path: Path, recorded: str | None, storage: str | None) -> None:
    """Refuse to go on with a run that is kept in another storage."""
    if recorded != storage:
        before, now = ("the journal in it" if url is None else without_secrets(url) for url in (recorded, storage))
        refuse_other(path, "storage", f" ({before} before, {now} now)")


def same_storage(recorded: str | None, given: str | None) -> str | None:
    """``given`` where it is the recorded storage; else None."""
    is_same = given is not None and _parse(given) is not None and without_secrets(given) == recorded
    return given if is_same else None


def named_storage(given: str | None, *, is_journal: bool) -> str | None:
    """The storage of a search: the one given, else that of ``MPTUNE_STORAGE``; None for a journal."""
    return given if given is not None or is_journal else os.environ.get(STORAGE_VARIABLE) or None


def open_storage(url: str | None, journal: Path, *, is_locked: bool = True) -> BaseStorage:
    """Open Optuna's storage: a database, or the journal for None.

    ``is_locked``: the caller holds the run directory's lock, so locks that dead processes left may be deleted.
    """
    if url is not None:
        return cast("BaseStorage", _open_database(url))
    with storing(str(journal)):
        return open_journal(journal, is_locked=is_locked)


def close_storage(storage: BaseStorage) -> None:
    """Close a database's connections; a journal has none. Idempotent."""
    if not isinstance(storage, JournalStorage):
        with suppress(Exception):
            cast("RetryingStorage", storage).dispose()


def check_opens(url: str) -> str:
    """Open a database once; what may be shown and recorded of its URL."""
    _open_database(url).dispose()
    return without_secrets(url)


def _open_database(url: str) -> RetryingStorage:
    from mptune.tuning.record.database import RetryingStorage  # SQLAlchemy is slow to import.

    shown = scheme_of(url)
    try:
        return RetryingStorage(url, lambda error: shown_message(url, error))
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


@contextmanager
def storing(where: str) -> Iterator[None]:
    """Turn what a storage raises when it cannot be written or read into a ``RunError`` about ``where``."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, Path(where)) from error
    except StorageInternalError as error:
        cause = _first_line(error.__cause__ or error)
        raise RunError(f"the storage {where} does not answer: {cause}", f"when it is back, {RESUME_HINT}") from error


def damaged_trial(trial: FrozenTrial, attribute: str, where: str) -> RunError:
    """The error for an attribute of a trial that is not what mptune writes."""
    what = f"the {attribute} of trial {trial.number}"
    if "://" in where:
        hint = "restore the database from a backup, or start over with --fresh"
        return RunError(f"{where} is damaged: {what} cannot be read", hint)
    journal = Path(where)
    return damaged_line(journal, line_of_attribute(journal, trial._trial_id, attribute), what)


def _parse(url: str) -> URL | None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        return None


def _secret_options(url: URL) -> list[str]:
    return [name for name in url.query if name not in _SHOWN_OPTIONS]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
