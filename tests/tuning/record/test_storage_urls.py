"""Secrets of storage URLs, and which storages are opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.errors import RunError
from mptune.tuning.record.storage import check_opens, check_storage, shown_message, storage_url, without_secrets


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:SEC/RET@localhost:1/none",
        "postgresql+psycopg://me:SEC@RET/x@localhost:1/none",
        "postgresql+psycopg://localhost:1/none?user=me&password=SECRET",
        "postgresql+psycopg://me@localhost:1/none?sslpassword=SECRET&passfile=/SECRET",
        "postgresql+nodriver://me:SECRET@h/n",
        "postgresql+psycopg:me:SECRET@h/n",
        "SECRET",
    ],
)
def test_what_does_not_open_shows_no_part_of_its_secrets(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what a run of before recorded."""
    monkeypatch.setattr("mptune.tuning.record.database.PATIENCE_S", 0.0)
    for opens, message in (
        (lambda: check_opens(url), "cannot open the storage"),
        (lambda: storage_url(url), "is not opened"),
        (lambda: check_storage(Path("run"), url, "sqlite:///x.db"), "another storage"),
    ):
        with pytest.raises(RunError, match=message) as caught:
            opens()
        shown = caught.value.message + caught.value.hint
        assert not {part for part in ("SEC", "RET") if part in shown}
        assert message != "cannot open the storage" or caught.value.__suppress_context__, "--debug would show the URL"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://me:pa%40ss@h:5/n", "postgresql+psycopg://me:***@h:5/n"),
        ("postgresql://me:p/w@h/n", "postgresql://me:***@h/n"),
        ("postgresql://me@h/n", "postgresql://me@h/n"),
        ("postgresql://me@h/n?sslpassword=x&sslmode=require&passfile=/x", "postgresql://me@h/n"),
        ("sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_the_rendering_of_a_url_that_opened(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize("message", ["no p@w for me", "no p%40w for me", "no (key)", 'invalid sslpassword "key"'])
def test_a_drivers_message_with_a_secret_is_not_shown(message: str) -> None:
    url = "postgresql://me:p%40w@h/n?sslpassword=key"
    assert shown_message(url, OSError(message)) == "OSError"
    assert shown_message("postgresql://me@h/n", OSError(message)) == message


def test_only_a_storage_that_the_caller_names_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, hidden, whole = "sqlite:///x.db", "postgresql://me:***@h/n", "postgresql://me:pw@h/n?passfile=f"
    monkeypatch.delenv("MPTUNE_STORAGE", raising=False)
    assert storage_url(None) is None
    assert storage_url(recorded, recorded) == recorded
    for named in ("", "sqlite:///other.db", "nonsense"):
        monkeypatch.setenv("MPTUNE_STORAGE", named)
        with pytest.raises(RunError, match="names is not opened") as caught:
            storage_url(recorded)
        assert "--storage" in caught.value.hint
    monkeypatch.setenv("MPTUNE_STORAGE", recorded)
    assert storage_url(recorded) == recorded
    with pytest.raises(RunError, match=r"//me:\*\*\*@h/n, and its password is not stored"):
        storage_url(hidden)
    monkeypatch.setenv("MPTUNE_STORAGE", whole)
    assert storage_url(hidden) == whole
