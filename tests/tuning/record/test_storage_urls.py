"""Secrets of storage URLs, and which storages are opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.errors import RunError
from mptune.tuning.record.storage import check_opens, check_storage, shown_message, storage_url, without_secrets

URLS = [
    "postgresql+psycopg://me:SEC/RET@localhost:1/none",
    "postgresql+psycopg://me:SEC@RET/x@localhost:1/none",
    "postgresql+psycopg://localhost:1/none?user=me&password=SECRET",
    "postgresql+psycopg://me@localhost:1/none?sslpassword=SECRET&passfile=/SECRET",
    "postgresql+nodriver://me:SECRET@h/n",
    "postgresql+psycopg:me:SECRET@h/n",
]


@pytest.mark.parametrize("url", URLS)
def test_what_does_not_open_shows_no_part_of_its_secrets(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mptune.tuning.record.database.PATIENCE_S", 0.0)
    with pytest.raises(RunError, match="cannot open the storage") as caught:
        check_opens(url)
    shown = caught.value.message + caught.value.hint
    assert not {part for part in ("SEC", "RET") if part in shown}
    assert caught.value.__suppress_context__, "--debug would show the URL"


def test_the_rendering_of_a_url_that_opened() -> None:
    assert without_secrets("postgresql+psycopg://me:pa%40ss@h:5/n") == "postgresql+psycopg://me:***@h:5/n"
    assert without_secrets("postgresql://me:p/w@h/n") == "postgresql://me:***@h/n"
    assert without_secrets("postgresql://me@h/n") == "postgresql://me@h/n"
    assert without_secrets("postgresql://me@h/n?sslpassword=x&sslmode=require&passfile=/x") == "postgresql://me@h/n"
    assert without_secrets("sqlite:///a.db") == "sqlite:///a.db"


@pytest.mark.parametrize("message", ["no p@w for me", "no p%40w for me", "no (key)", 'invalid sslpassword "key"'])
def test_a_drivers_message_with_a_secret_is_not_shown(message: str) -> None:
    url = "postgresql://me:p%40w@h/n?sslpassword=key"
    assert shown_message(url, OSError(message)) == "OSError"
    assert shown_message("postgresql://me@h/n", OSError(message)) == message


def test_only_a_storage_that_the_caller_names_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = "sqlite:///x.db"
    monkeypatch.delenv("MPTUNE_STORAGE", raising=False)
    assert storage_url(None) is None
    assert storage_url(recorded, recorded) == recorded
    with pytest.raises(RunError, match="names is not opened") as caught:
        storage_url(recorded)
    assert "--storage" in caught.value.hint
    for named in ("sqlite:///other.db", "nonsense"):
        monkeypatch.setenv("MPTUNE_STORAGE", named)
        with pytest.raises(RunError, match="names is not opened"):
            storage_url(recorded)
    monkeypatch.setenv("MPTUNE_STORAGE", recorded)
    assert storage_url(recorded) == recorded
    hidden, whole = "postgresql://me:***@h/n", "postgresql://me:pw@h/n?passfile=f"
    with pytest.raises(RunError, match=r"//me:\*\*\*@h/n, and its password is not stored"):
        storage_url(hidden)
    monkeypatch.setenv("MPTUNE_STORAGE", whole)
    assert storage_url(hidden) == whole


@pytest.mark.parametrize(
    "recorded",
    ["postgresql+psycopg://u:geheim@h/x", "postgresql://u:ge@heim@h/x", "mysql://h/x?sslpassword=geheim", "geheim"],
)
def test_a_secret_that_a_run_of_before_recorded_is_not_shown(recorded: str) -> None:
    with pytest.raises(RunError, match="is not opened") as caught:
        storage_url(recorded)
    assert "heim" not in str(caught.value)
    with pytest.raises(RunError, match="another storage") as caught:
        check_storage(Path("run"), recorded, "sqlite:///x.db")
    assert "heim" not in str(caught.value)
