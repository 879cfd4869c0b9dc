"""The TOML files that come with mptune: found in the tree and installed, read with errors that name the cure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest

import mptune
from mptune import resources
from mptune.errors import SpaceError, TargetError

TREE = Path(mptune.__file__).resolve().parent.parent


class Schema(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    size: int


def test_files_are_found_in_an_installed_package(tmp_path: Path) -> None:
    """The layout of the wheel: the folder lies inside the package."""
    shutil.copytree(TREE / "mptune", tmp_path / "mptune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TREE / "search_spaces", tmp_path / "mptune" / "search_spaces")
    code = "from mptune import resources as r; print(r.find('targets', 'h200')); print(*r.names('spaces'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    path, names = done.stdout.splitlines()
    assert Path(path).is_relative_to(tmp_path.resolve())
    assert names.split() == sorted(resources.names("spaces"))
    assert {"default", "transformer", "detector"} <= set(names.split())


def test_a_file_is_located_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.locate("targets", "h200", TargetError).name == "h200.toml"
    (tmp_path / "mine.toml").write_text("")
    assert resources.locate("targets", str(tmp_path / "mine.toml"), TargetError) == tmp_path / "mine.toml"
    monkeypatch.chdir(tmp_path)
    assert resources.locate("targets", "mine.toml", TargetError) == Path("mine.toml")
    for kind, name, error, message, hint in (
        ("targets", "jetson-orin-nano", TargetError, "there is no target 'jetson-orin-nano'", "jetson-orin-nano-8gb"),
        ("targets", "none/x.toml", TargetError, r"there is no file .none/x\.toml", "`mptune targets`"),
        ("spaces", "zzz", SpaceError, "there is no search space 'zzz'", "`mptune spaces`"),
    ):
        with pytest.raises(error, match=message) as caught:
            resources.locate(kind, name, error)
        assert hint in caught.value.hint


@pytest.mark.parametrize("content", [b"size =", b"\xff\xfe", b"size = " + b"[" * 10_000, None])
def test_what_is_no_toml_is_one_line_and_a_hint(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(TargetError, match="cannot be read" if content is None else "is not TOML") as caught:
        resources.read_toml(path, Schema, TargetError, "copy one")
    assert caught.value.hint
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
