"""URLs of storages: shown and recorded without their secrets, and opened only where the user names them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from mptune.errors import RunError
from mptune.identity import refuse_other

if TYPE_CHECKING:
    from sqlalchemy.engine import URL  # Slow to import, and a journal needs none of it.

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
    """SQLAlchemy's own rendering of a URL that has opened, without its password and the secrets of its query.

    Of a URL that has not opened, use ``scheme_of``: a password with special characters may have been read as its host.
    """
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    options = {name: value if name in _SHOWN_OPTIONS else _HIDDEN for name, value in parsed.query.items()}
    shown: str = parsed.set(query=options).render_as_string(hide_password=True)
    return shown.replace("%2A%2A%2A", _HIDDEN)


def scheme_of(url: str) -> str:
    """What can be shown of a URL that has not opened: dialect and driver; of a file without options, all of it."""
    parsed = _parse(url)
    if parsed is None:
        return "(a URL that SQLAlchemy does not understand)"
    if parsed.get_backend_name() == "sqlite" and not parsed.query and parsed.password is None:
        return url
    return f"{parsed.drivername}://..."


def without_secrets_of(url: str, text: str) -> str:
    """A text, such as a driver's message, without the secrets of a URL; empty where they cannot be identified."""
    parsed = _parse(url)
    if parsed is None:
        return ""
    secrets = [parsed.password, *(v for name, v in parsed.query.items() if name not in _SHOWN_OPTIONS)]
    # More than one "@": part of the password may have been read as the host, and a driver would name it.
    if parsed.get_backend_name() != "sqlite" and url.count("@") > 1:
        return ""
    for secret in secrets:
        for value in (secret,) if isinstance(secret, str) else secret or ():
            for form in (str(value or ""), quote(str(value or ""), safe="")):
                text = text.replace(form, _HIDDEN) if form else text
    return text.replace(url, scheme_of(url))


def storage_url(recorded: str | None, given: str | None = None) -> str | None:
    """The URL to open of a run's storage; None for the journal in its directory.

    A run may come from a stranger, so a storage that only its run.json names is not opened.

    Args:
        recorded: in run.json, without its secrets; None for the journal.
        given: what the caller names; else ``MPTUNE_STORAGE`` where it is the recorded one.

    Raises:
        RunError: the caller does not name it.
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
    """Refuse to go on with a run that is kept in another storage.

    Args:
        path: of the run.
        recorded: in its run.json; None for the journal.
        storage: the caller's, without its secrets.

    Raises:
        RunError: they differ.
    """
    if recorded != storage:
        own = "the journal in it"
        before, now = own if recorded is None else _shown(recorded), own if storage is None else storage
        refuse_other(path, "storage", f" ({before} before, {now} now)")


def same_storage(recorded: str | None, given: str | None) -> str | None:
    """``given`` where it is the recorded storage; else None, and ``storage_url`` opens nothing for it."""
    is_same = given is not None and _parse(given) is not None and without_secrets(given) == recorded
    return given if is_same else None


def named_storage(given: str | None, *, is_journal: bool) -> str | None:
    """The storage of a search: the one given, else that of ``MPTUNE_STORAGE``; None for a journal.

    Args:
        given: the caller's.
        is_journal: the run has a journal already, so the variable does not concern it.
    """
    return given if given is not None or is_journal else os.environ.get(STORAGE_VARIABLE) or None


def _parse(url: str) -> URL | None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        return None
