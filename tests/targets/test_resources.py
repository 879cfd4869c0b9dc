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


def test_names_are_those_of_the_files() -> None:
    assert {"default", "transformer", "detector"} <= set(resources.names("spaces"))
    assert {"cpu", "h200", "jetson-agx-orin-64gb", "jetson-orin-nano-8gb"} <= set(resources.names("targets"))
    for kind in ("spaces", "targets"):
        assert list(resources.names(kind)) == sorted(resources.names(kind))
        assert all(resources.find(kind, name).is_file() for name in resources.names(kind))


def test_find_knows_only_names() -> None:
    with pytest.raises(KeyError):
        resources.find("spaces", "targets/h200")


def test_files_are_found_in_an_installed_package(tmp_path: Path) -> None:
    """The layout of the wheel: the folder lies inside the package."""
    shutil.copytree(TREE / "mptune", tmp_path / "mptune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TREE / "search_spaces", tmp_path / "mptune" / "search_spaces")
    code = "from mptune import resources as r; print(r.find('targets', 'h200')); print(*r.names('spaces'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    path, names = done.stdout.splitlines()
    assert Path(path).is_relative_to(tmp_path.resolve())
    assert names.split() == list(resources.names("spaces"))


class TestLocate:
    def test_by_name(self) -> None:
        assert resources.locate("targets", "h200", TargetError).name == "h200.toml"

    def test_by_path(self, tmp_path: Path, monkeypatch) -> None:
        (tmp_path / "mine.toml").write_text("")
        assert resources.locate("targets", str(tmp_path / "mine.toml"), TargetError) == tmp_path / "mine.toml"
        monkeypatch.chdir(tmp_path)
        assert resources.locate("targets", "mine.toml", TargetError) == Path("mine.toml")

    def test_unknown_name_with_close_matches(self) -> None:
        with pytest.raises(TargetError, match="there is no target 'jetson-orin-nano'") as caught:
            resources.locate("targets", "jetson-orin-nano", TargetError)
        assert "jetson-orin-nano-8gb" in caught.value.hint
        assert "`mptune targets`" in caught.value.hint

    def test_unknown_name_without(self) -> None:
        with pytest.raises(SpaceError, match="there is no search space 'zzz'") as caught:
            resources.locate("spaces", "zzz", SpaceError)
        assert caught.value.hint.startswith("`mptune spaces`")

    def test_no_such_file(self) -> None:
        with pytest.raises(TargetError, match=r"no such file: none/x\.toml") as caught:
            resources.locate("targets", "none/x.toml", TargetError)
        assert "`mptune targets`" in caught.value.hint


class TestReadToml:
    def refused(self, path: Path, match: str) -> None:
        with pytest.raises(TargetError, match=match) as caught:
            resources.read_toml(path, Schema, TargetError, "copy one")
        assert caught.value.hint
        assert path.name in caught.value.message
        assert "\n" not in caught.value.message

    @pytest.mark.parametrize("content", [b"size =", b"\xff\xfe", b"size = " + b"[" * 10_000])
    def test_misfit(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.toml").write_bytes(content)
        self.refused(tmp_path / "x.toml", "is not TOML")

    def test_unreadable(self, tmp_path: Path) -> None:
        (tmp_path / "x.toml").mkdir()
        self.refused(tmp_path / "x.toml", "cannot be read")
