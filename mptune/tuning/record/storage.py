"""Where a study is kept: a journal file in the run directory, or a database by its URL, shown without secrets."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from optuna.storages import BaseStorage, JournalStorage

from mptune.errors import RunError
from mptune.run_json import refuse_other
from mptune.tuning.record.journal import open_journal

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

    from mptune.tuning.record.database import RetryingStorage

STORAGE_VARIABLE = "MPTUNE_STORAGE"
"""Environment variable with a storage's URL, so that its password need not stand in a command."""


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
    """Open Optuna's storage: a database, or the journal for None.

    ``is_locked``: the caller holds the run directory's lock, so locks that dead processes left may be deleted.
    """
    if url is None:
        return open_journal(journal, is_locked=is_locked)
    shown = _scheme(url)
    try:
        from mptune.tuning.record.database import RetryingStorage  # SQLAlchemy is slow to import.

        return cast("BaseStorage", RetryingStorage(url, without_secrets(url), partial(shown_message, url)))
    except ImportError as error:
        raise RunError(
            f"cannot open the storage {shown}: its driver is not installed ({shown_message(url, error)})",
            "pip install 'psycopg[binary]'" if "postgres" in shown else "install the driver that the URL names",
        ) from None
    except Exception as error:  # SQLAlchemy, its drivers and Optuna each raise their own kinds.
        raise RunError(
            f"cannot open the storage {shown}: {shown_message(url, error.__cause__ or error)}",
            "check that the server is reachable, and the URL (such as postgresql+psycopg://user:password@host/name; "
            "special characters of the password as %40 for @, %2F for /)",
        ) from None  # its traceback would show the URL


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
    parsed, message = _parse(url), _first_line(error)
    # More than one "@": part of the password may have been read as the host, and a driver would name it.
    if parsed is None or (parsed.get_backend_name() != "sqlite" and url.count("@") > 1):
        return type(error).__name__
    secrets = [str(value) for value in (parsed.password, *parsed.query.values()) if value]
    is_secret = any(form in message for secret in secrets for form in (secret, quote(secret, safe="")))
    return type(error).__name__ if is_secret else message


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


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
