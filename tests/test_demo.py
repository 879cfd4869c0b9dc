"""``--open``, and the model that comes with mptune. `.ci/run` runs `mptune demo` from a built wheel."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from mptune.commands.common import open_page
from mptune.resources import demo_model


def test_open_starts_the_browser_with_the_page_where_there_is_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened, run = tmp_path / "opened", tmp_path / "a run.mptune"
    code = f"import sys; open({str(opened)!r}, 'w').write(sys.argv[1])"
    monkeypatch.setenv("BROWSER", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} %s")
    monkeypatch.setenv("DISPLAY", ":1")
    open_page(run)
    assert opened.read_text() == (run / "report.html").as_uri()
    assert capsys.readouterr().err == ""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    open_page(run)
    assert capsys.readouterr().err == f"no browser can be opened here: the page is {run / 'report.html'}\n"


def test_the_demo_has_its_model_and_samples() -> None:
    assert [path.is_file() for path in demo_model()] == [True, True]
