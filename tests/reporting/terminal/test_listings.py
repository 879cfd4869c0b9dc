"""One profile: every figure with its unit and its source."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from mptune.cli import main
from mptune.reporting.terminal.listings import print_target
from mptune.targets.target import FIGURES, Target, list_targets
from tests.reporting.conftest import Terminal, printed
from tests.targets.test_target import MINE


@pytest.mark.parametrize("target", list_targets(), ids=lambda target: target.name)
def test_every_figure_with_its_source(target: Target) -> None:
    text = printed(target, 200, print_target)
    for figure in FIGURES:
        assert (target.sources.get(figure, "") or "figure") in text
    assert target.note in text


def test_units_and_marks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["targets", "jetson-orin-nx-8gb-super"]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    stated = {f"{figure} NVIDIA's specification" for figure in ("compute capability 8.7", "memory 8 GB")}
    assert {"GPU clock 1173 MHz † from memory", *stated} <= lines


def test_a_file_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert main(["targets", str(path)]) == 0
    assert "not stated" in capsys.readouterr().out
    assert main(["targets", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "My board"
    path.write_text(path.read_text().replace("50", "-50"))
    assert main(["targets", str(path)]) == 1
    assert "greater than 0" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["targets"], ["targets", "jetson-orin-nano-8gb"], ["doctor"], ["spaces"]])
def test_words_are_not_cut_at_80_columns(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, narrow = io.StringIO(), Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    for stream in (whole, narrow):
        monkeypatch.setattr("sys.stdout", stream)
        assert main(words) == 0
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in narrow.getvalue().splitlines()]
    assert max(map(len, shown)) <= 80
    listed = {word for line in shown for word in line.split()}
    assert listed <= {word for line in whole.getvalue().splitlines() for word in line.split()}
