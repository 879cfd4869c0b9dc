"""Run directories that come from a stranger or are damaged, and secrets that must not get into them."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mptune
from mptune import resources
from mptune.cli import main
from mptune.errors import RunError
from mptune.rundir import open_run, read_run
from mptune.targets.target import load_target
from mptune.tuning.copies import target_copy
from mptune.tuning.front import Front
from tests import fakes
from tests.fakes import make_toolchain

pytestmark = pytest.mark.usefixtures("opened_here")


@pytest.fixture
def place(searched: Front, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with model.onnx, and model.mptune, in which that model was searched."""
    monkeypatch.delenv("MPTUNE_STORAGE", raising=False)
    return place


def search(**settings: object) -> None:
    fakes.search(make_toolchain(), **settings)


def change(run: str, **sections: object) -> None:
    path = Path(run) / "run.json"
    document = json.loads(path.read_text())
    for name, value in sections.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(document))


LINKED = "engines", "confirmed", "confirmed/gpu", "data/search.npz", "weights/model.onnx", "run.lock", "run.json"


class TestLinks:
    @pytest.mark.parametrize("name", LINKED)
    @pytest.mark.parametrize("command", ["report", "confirm", "export", "pick"])
    def test_one_out_of_the_directory_is_refused(
        self, place: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        outside, inside = place / "outside", Path("model.mptune") / name
        if inside.is_dir():
            shutil.move(inside, outside)
        elif inside.exists():
            shutil.copy(inside, outside)
            inside.unlink()
        else:
            outside.mkdir()
            inside.parent.mkdir(exist_ok=True)
        inside.symlink_to(outside)
        assert main([command, "model.mptune", *(["--knee"] if command == "pick" else [])]) == 1
        assert "is a link out of the run directory" in capsys.readouterr().err

    def test_the_lock_of_a_search_is_not_written_through_a_link_nor_is_a_loop_read(self, place: Path) -> None:
        victim = place / "victim"
        victim.write_text("precious")
        for name, target in (("run.lock", victim), ("run.json", "run.json")):
            path = Path("model.mptune") / name
            path.unlink(missing_ok=True)
            path.symlink_to(target)
            with pytest.raises(RunError, match="is a link out of the run directory"), open_run(Path("model.mptune")):
                pass
            if name == "run.lock":
                path.unlink()
        assert victim.read_text() == "precious"

    @pytest.mark.parametrize("name", ["study.journal", "data/more.json", "weights/weights.json"])
    def test_a_named_pipe_is_refused_and_not_waited_for(self, place: Path, name: str) -> None:
        pipe = Path("model.mptune") / name
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        with pytest.raises(RunError, match="is a named pipe"):
            read_run("model.mptune")

    def test_links_inside_and_the_users_own_are_let_be(self, place: Path) -> None:
        run = Path("model.mptune")
        (run / "data" / "same.npz").symlink_to("search.npz")
        (run / "chosen" / "mine").symlink_to(place)
        (run / "notes").symlink_to(place)
        assert mptune.report(run).points


class TestPaths:
    def test_a_confirmation_is_of_the_run_around_it(self, place: Path) -> None:
        for confirms, words in (("/etc", "confirms"), ("..", "confirms"), ("../..", "does not lie in the run")):
            change("model.mptune", confirms=confirms)
            with pytest.raises(RunError, match=words):
                read_run("model.mptune")

    def test_an_engine_outside_is_not_given_a_name_in_chosen(self, place: Path) -> None:
        secret = place / "secret"
        secret.write_text("secret")
        journal = Path("model.mptune/study.journal")
        journal.write_text(journal.read_text().replace('"engine_path":null', f'"engine_path":"{secret}"'))
        assert f'"engine_path":"{secret}"' in journal.read_text()
        assert mptune.pick("model.mptune", knee=True).chosen.engine_path == str(secret)
        assert not Path("model.mptune/chosen/model.engine").exists()

    def test_the_model_is_the_runs_own_copy(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        outside = place / "outside.onnx"
        outside.write_bytes(b"another file, which nobody may read")
        change("model.mptune", model={"path": str(outside)})
        assert main(["pick", "model.mptune", "--knee"]) == 0
        assert main(["export", "model.mptune", "--for", "tensorrt-8"]) == 1
        assert "LayerNormalization (node 'block0/norm') is no operator of TensorRT 8.5" in capsys.readouterr().err

    def test_a_target_in_a_file_is_the_runs_own_copy(self, place: Path) -> None:
        own = place / "mine.toml"
        shutil.copy(resources.find("targets", "cpu"), own)
        search(out="own.mptune", target=str(own))
        own.write_text("changed")
        run, file = read_run("own.mptune")
        assert file.fixed_settings.target == str(own)
        assert load_target(target_copy(run, str(own))).name == "mine"
        mptune.export("own.mptune", "own.tar.gz")
        with tarfile.open("own.tar.gz") as archive:
            assert "own.mptune/data/target/mine.toml" in archive.getnames()


class TestStorages:
    def test_one_that_only_the_run_names_is_not_opened(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        change("model.mptune", storage="sqlite:///trap.db")
        for command in (["report"], ["confirm"], ["export"], ["pick", "--knee"]):
            assert main([*command, "model.mptune"]) == 1
            assert "a storage that only run.json names is not opened" in capsys.readouterr().err
        assert not Path("trap.db").exists()

    def test_the_variable_serves_search_and_report(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MPTUNE_STORAGE", "sqlite:///study.db")
        search()
        assert json.loads(Path("model.mptune/run.json").read_text())["storage"] is None, "it has a journal already"
        search(out="shared.mptune")
        assert not Path("shared.mptune/study.journal").exists()
        front = mptune.report("shared.mptune")
        monkeypatch.delenv("MPTUNE_STORAGE")
        assert mptune.report("shared.mptune", storage="sqlite:///study.db") == front

    def test_nothing_is_stored_of_a_url_that_does_not_open(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mptune.tuning.record.database.PATIENCE_S", 0.0)
        with pytest.raises(RunError, match="cannot open the storage"):
            search(out="new.mptune", storage="postgresql+psycopg://me:SEC@RET@localhost:1/none?sslpassword=SECRET")
        written = [path.read_bytes() for path in Path("new.mptune").rglob("*") if path.is_file()]
        assert not any(b"RET" in content for content in written)

    @pytest.mark.parametrize("given", [["--storage", "postgresql://me:pw@h/n"], ["--storage=postgresql://me:pw@h/n"]])
    def test_an_interrupted_search_does_not_print_it(
        self, place: Path, given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("mptune.api.searching.search", mock.Mock(side_effect=KeyboardInterrupt))
        assert main(["search", "model.onnx", *given, "--fresh"]) == 130
        shown = capsys.readouterr().err
        assert "pw" not in shown
        assert shown.endswith(('--storage "$MPTUNE_STORAGE"\n', '--storage="$MPTUNE_STORAGE"\n'))


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


@pytest.mark.slow
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
