"""``--sampler local``, ``nsga2`` and ``random`` are refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.cli import main


@pytest.mark.parametrize("name", ["local", "nsga2", "random"])
def test_asking_for_one_is_one_line_and_a_hint(mlp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(mlp_path), "--sampler", name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    line, hint = said.err.splitlines()
    assert line == f"error: the sampler '{name}' was removed"
    assert hint.startswith("hint: choose one of precision, tpe")
