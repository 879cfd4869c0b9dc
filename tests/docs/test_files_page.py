"""docs/reference/files.md against a finished run: every file of it, and every key of its JSON, is on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mptune.cli import main
from tests.docs.pages import read
from tests.docs.test_commands import searched

__all__ = ["searched"]

PAGE = read("docs/reference/files.md")

OPEN = {"evidence", "per_output", "outputs", "ops", "limits", "versions", "plans", "nodes", "precision"}
"""Keys whose own keys are names of outputs, nodes, plans or figures."""


def section(title: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    return re.split(r"^#+ ", PAGE.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def keys_of(document: Any) -> Iterator[str]:
    """Every key at every depth that has a fixed name."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            if key not in OPEN:
                yield from keys_of(value)
    elif isinstance(document, list):
        for value in document:
            yield from keys_of(value)


def missing(keys: set[str], *titles: str) -> set[str]:
    text = " ".join(map(section, titles))
    return {key for key in keys if f"`{key}`" not in text}


def test_every_file_of_a_run_is_on_the_page(searched: Path) -> None:
    run = searched / "model.mptune"
    names = [f"{path.name}/" if path.is_dir() else path.name for path in run.iterdir()]
    names += [f"chosen/{path.name}" for path in (run / "chosen").iterdir()]
    assert [name for name in names if f"`{name}" not in section("The run directory")] == []


def test_every_key_of_its_json_is_on_the_page(searched: Path) -> None:
    run, point = searched / "model.mptune", ("A point", "A group in FP32", "A finding")
    front, run_json, plan = (json.loads((run / f"{name}.json").read_text()) for name in ("front", "run", "chosen/plan"))
    assert not missing(set(keys_of(front)), "front.json", *point)
    assert not missing(set(run_json), "run.json")
    assert not missing(set(plan), "plan.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "model.mptune", "--explain"),
        ("inspect", "model.onnx", "--data", "samples.npz"),
        ("compare", "model.onnx", "model.mptune/chosen/model.onnx", "--data", "samples.npz"),
        ("doctor",),
    ],
)
def test_what_commands_print_as_json_is_on_the_page(
    arguments: tuple[str, ...], searched: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(searched)
    assert main([*arguments, "--json"]) in (0, 3)
    assert not missing(set(json.loads(capsys.readouterr().out)), "JSON of the commands")
