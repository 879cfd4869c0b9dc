"""Run directories with random bytes, values, sizes, links and pipes in their files: a result, or one clear error."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mptune.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("opened_here")]

COMMANDS = (
    ["report", "model.mptune"],
    ["report", "model.mptune", "--json"],
    ["report", "model.mptune", "--explain"],
    ["pick", "model.mptune", "--knee"],
    ["export", "model.mptune", "-o", "packed.tar.gz", "--force"],
)
VALUES = (None, True, -1, 1.5, 10**400, "", "nan", [], {}, [1], {"a": 1}, "\udc80", float("inf"), "../outside", [[]])
OPENED: list[str] = []
"""Every path that this process opened; a link is named as it stands."""


def flip_bytes(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 3, 30)) if content else 0):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def enlarge(path: Path, draw: random.Random) -> None:
    """Sparse: 3 GB of zeros behind the content."""
    os.truncate(path, 3 << 30)


def nest(path: Path, draw: random.Random) -> None:
    depth = draw.choice((200, 900, 100_000))
    path.write_text('{"op_code":' + "[" * depth + "]" * depth + "}\n")


def become_other(path: Path, draw: random.Random) -> None:
    path.unlink()
    draw.choice((Path.mkdir, os.mkfifo))(path)


def link_outside(path: Path, draw: random.Random) -> None:
    path.symlink_to(path.rename(Path("linked").absolute()))


def change_value(path: Path, draw: random.Random) -> None:
    """Replace a value of JSON, or delete its key."""
    if path.suffix != ".json":
        return
    document = json.loads(path.read_text())
    parent, key = draw.choice(list(places(document)))
    if draw.random() < 0.2:
        del parent[key]
    else:
        parent[key] = draw.choice(VALUES)
    path.write_text(json.dumps(document))


def places(document: Any) -> list[tuple[Any, Any]]:
    """Where each value stands in a document: what holds it, and its key."""
    if not isinstance(document, dict | list):
        return []
    entries = list(document.items() if isinstance(document, dict) else enumerate(document))
    return [place for key, value in entries for place in ((document, key), *places(value))]


KINDS = (flip_bytes, cut, enlarge, nest, remove, become_other, become_other, link_outside, *(change_value,) * 8)


@pytest.mark.parametrize("seed", range(60))
def test_damage_is_survived_or_named(
    seed: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.parent, tmp_path, dirs_exist_ok=True)
    Path("outside").write_text("{}")
    draw = random.Random(seed)
    files = sorted(path for path in (tmp_path / "model.mptune").rglob("*") if path.is_file())
    path, kind = draw.choice(files), draw.choice(KINDS)
    kind(path, draw)
    if not OPENED:
        sys.addaudithook(lambda event, arguments: OPENED.append(str(arguments[0])) if event == "open" else None)
    OPENED[:] = [""]
    for command in COMMANDS:
        code = main(list(command))
        said = capsys.readouterr().err
        what = f"{path.relative_to(tmp_path)}, {kind.__name__}, {command}: {code}\n{said}"
        assert code in range(5), what
        assert "this is a bug" not in said, what
        assert code != 1 or "\nhint: " in said, what
    assert [path for path in OPENED if Path(path).name == "outside"] == []
