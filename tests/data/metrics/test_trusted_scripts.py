"""A script that only a run directory names is not run."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from mptune.data.metrics.trusted_scripts import check_recorded, configuration_folder, refuse_inside, script_of, trust
from mptune.errors import RunError


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script and a run directory, and an empty configuration folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    work = tmp_path / "work"
    (work / "run.mptune").mkdir(parents=True)
    (work / "mine.py").write_text("def worst(outputs, reference):\n    return 0.0\n")
    monkeypatch.chdir(work)
    return work


RUN = Path("run.mptune")


def test_a_script_is_trusted_by_its_content() -> None:
    with pytest.raises(RunError, match="is not run unless you name it") as caught:
        check_recorded("mine.py:worst", RUN)
    assert "`mptune confirm run.mptune --metric mine.py:worst`" in caught.value.hint
    trust("mine.py:worst")
    check_recorded("mine.py:worst", RUN)
    check_recorded("mine.py:other", RUN)
    Path("mine.py").write_text("import os\n")
    with pytest.raises(RunError):
        check_recorded("mine.py:worst", RUN)


def test_the_list_is_the_users_alone() -> None:
    trust("mine.py:worst")
    path = configuration_folder() / "trusted_scripts.json"
    assert path == Path(os.environ["XDG_CONFIG_HOME"]) / "mptune" / "trusted_scripts.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(json.loads(path.read_text())["scripts"]) == 1


def test_the_same_script_among_other_neighbours_is_not_trusted(place: Path) -> None:
    Path("mine.py").write_text("import helpers\nfrom helpers.more import x\n")
    trust("mine.py:worst")
    other = place / "other"
    other.mkdir()
    (other / "mine.py").write_text(Path("mine.py").read_text())
    check_recorded(f"{other}/mine.py:worst", RUN)
    (other / "helpers.py").write_text("raise SystemExit")
    with pytest.raises(RunError):
        check_recorded(f"{other}/mine.py:worst", RUN)


@pytest.mark.parametrize(
    "metric", ["run.mptune/evil.py:f", "run.mptune/../run.mptune/evil.py/:f", "link.py:f", "run.mptune/out.py:f"]
)
def test_a_script_in_the_run_directory_is_never_run(metric: str) -> None:
    (RUN / "evil.py").write_text("")
    Path("link.py").symlink_to("run.mptune/evil.py")
    (RUN / "out.py").symlink_to("../mine.py")
    trust(metric)
    for check in (check_recorded, refuse_inside):
        with pytest.raises(RunError, match="lies in the run directory"):
            check(metric, RUN)


@pytest.mark.parametrize("content", ["", "[]", '{"scripts": []}', '{"scripts": {"a": 1}}', "[" * 100_000])
def test_a_damaged_list_trusts_nothing_and_is_written_anew(content: str) -> None:
    path = configuration_folder() / "trusted_scripts.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(RunError):
        check_recorded("mine.py:worst", RUN)
    trust("mine.py:worst")
    check_recorded("mine.py:worst", RUN)


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path("file").resolve()))
    trust("mine.py:worst")
    assert Path("file").read_text() == ""


def test_what_is_a_script() -> None:
    assert script_of("a.py:f") == script_of("a.py/:f") == Path("a.py")
    assert script_of("relative_l2") is script_of("callable:f") is script_of("a.txt:f") is None
