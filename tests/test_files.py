"""Files that take their name when they are whole, and what is left where a process was killed; a disk that is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mptune.errors import RunError
from mptune.files import (
    MOST_TEXT_BYTES,
    delete_scratch,
    full_disk_as_error,
    is_disk_full,
    link_or_copy,
    read_json,
    scratch_name,
    whole_file,
    write_bytes,
    write_json,
    write_text,
    writing,
)
from mptune.rundir import open_run


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path, reason in (
        (tmp_path / "pipe", "it is a named pipe"),
        (Path("/dev/zero"), "it is a named pipe, a socket or a device"),
        (tmp_path, "Is a directory"),
        (tmp_path / "loop", "Too many levels"),
    ):
        with pytest.raises(OSError, match=reason):
            read_json(path)


def test_text_has_a_size_and_a_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)
    os.truncate(path, MOST_TEXT_BYTES + 1)  # sparse
    with pytest.raises(OSError, match="it is larger than 64 MiB"):
        read_json(path)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with suppress(KeyboardInterrupt), whole_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert (path.read_text(), names(tmp_path)) == ("old", ["a.txt"])
    with whole_file(path) as first, whole_file(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert path.read_text() == "old"
    assert (path.read_text(), names(tmp_path)) == ("first", ["a.txt"]), "it finished last"


_WRITES = """
import sys
from pathlib import Path
from mptune.files import scratch_name, whole_file
folder = Path(sys.argv[1])
(folder / scratch_name("plan", ".onnx")).write_text("")
(folder / scratch_name("plan", ".profile")).mkdir()
with whole_file(folder / "w[1].bin") as partial:
    partial.write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def writer(folder: Path) -> subprocess.Popen[str]:
    """A process with three temporary files; it lives until it is killed."""
    command = [sys.executable, "-c", _WRITES, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def partial_of(path: Path) -> list[Path]:
    return list(path.parent.glob("*.partial"))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: events.append("sync") or real_sync(number))
    monkeypatch.setattr(Path, "replace", lambda self, to: events.append("name") or real_replace(self, to))
    with whole_file(tmp_path / "a") as partial:
        partial.write_bytes(b"x")
    assert events[:2] == ["sync", "name"]


def test_what_a_killed_process_left_is_deleted_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "w[1].bin"
    write_bytes(path, [])  # makes the folders
    end(writer(path.parent))
    assert len(partial_of(path)) == 1
    living = path.with_name(f".{scratch_name(path.name + '.0', '.partial')}")
    living.write_text("half")
    write_bytes(path, [b"ab", b"c"])
    assert path.read_bytes() == b"abc"
    assert partial_of(path) == [living]


def test_files_of_dead_processes_alone_are_deleted(tmp_path: Path) -> None:
    dead, living = writer(tmp_path), writer(tmp_path)
    end(dead)
    own = tmp_path / scratch_name("own", ".onnx")
    mark = scratch_name("x", "").split("-")
    reused = tmp_path / f"x-{os.getpid()}-{int(mark[2]) - 1000}-{mark[3]}.onnx"
    elsewhere = tmp_path / f"x-{dead.pid}-{mark[2]}-00000000.onnx"
    others = [tmp_path / name for name in ("model.onnx", "fp16.bin", "search-1-2.npz")]
    for path in (own, reused, elsewhere, *others):
        path.write_text("")
    deleted = delete_scratch([tmp_path, tmp_path / "missing"])
    left = set(tmp_path.iterdir())
    end(living)
    assert len(deleted) == 4
    assert left >= {own, elsewhere, *others}
    assert reused not in left
    assert sum(f"-{living.pid}-" in path.name for path in left) == 3
    assert [path for path in left if f"-{dead.pid}-" in path.name] == [elsewhere]


def test_a_run_directory_is_tidied_when_it_is_opened(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        run.weights.mkdir()
        end(writer(run.weights))
        assert len(list(run.weights.iterdir())) == 3
    with open_run(tmp_path / "run") as run:
        assert not list(run.weights.iterdir())


def test_json_is_indented_and_refuses_what_json_does_not_know(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, "é"]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "x": [\n    1,\n    "é"\n  ]\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", float("nan"))
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_the_same_everywhere(tmp_path: Path, code: int) -> None:
    error = OSError(code, "full")
    assert is_disk_full(error)
    for block in (writing, full_disk_as_error):
        with pytest.raises(RunError) as caught, block(tmp_path):
            raise error
        assert caught.value.message == f"disk full: cannot write {tmp_path}"
        assert "free some space" in caught.value.hint


def test_other_errors_of_the_system_name_the_path_or_pass(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*/x/a\.txt: No such file") as caught:
        write_text(tmp_path / "x" / "a.txt", "")
    assert "--out" in caught.value.hint
    with pytest.raises(FileNotFoundError), full_disk_as_error(tmp_path):
        (tmp_path / "none").read_text()
    assert not is_disk_full(ValueError("full"))


def test_a_file_system_without_hard_links_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no hard links")

    (tmp_path / "a").write_text("x")
    link_or_copy(str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.setattr(os, "link", no_links)
    link_or_copy(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "b").samefile(tmp_path / "a")
    assert not (tmp_path / "c").samefile(tmp_path / "a")
    assert (tmp_path / "c").read_text() == "x"
