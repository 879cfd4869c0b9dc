from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mptune.files import delete_scratch, scratch_name
from mptune.rundir import open_run

_WRITES = """
import sys
from pathlib import Path
from mptune.files import scratch_name
folder = Path(sys.argv[1])
(folder / scratch_name("plan", ".onnx")).write_text("")
(folder / scratch_name("plan", ".profile")).mkdir()
print("ready", flush=True)
sys.stdin.read()
"""


def writer(folder: Path) -> subprocess.Popen[str]:
    """A process with two temporary files; it lives until it is killed."""
    command = [sys.executable, "-c", _WRITES, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_files_of_dead_processes_alone_are_deleted(tmp_path: Path) -> None:
    dead, living = writer(tmp_path), writer(tmp_path)
    end(dead)
    own = tmp_path / scratch_name("own", ".onnx")
    mark = scratch_name("x", "").split("-")
    reused = tmp_path / f"x-{os.getpid()}-{int(mark[2]) - 1000}-{mark[3]}.onnx"
    elsewhere = tmp_path / f"x-{dead.pid}-{mark[2]}-00000000.onnx"
    half = tmp_path / f".search.npz.3-{dead.pid}-{mark[2]}-{mark[3]}.partial"
    writing = tmp_path / scratch_name(".search.npz.3", ".partial")
    others = [tmp_path / name for name in ("model.onnx", "fp16.bin", "search-1-2.npz")]
    for path in (own, reused, elsewhere, half, writing, *others):
        path.write_text("")
    gone = delete_scratch([tmp_path, tmp_path / "missing"])
    left = sorted(path.name for path in tmp_path.iterdir())
    end(living)
    assert len(gone) == 4
    assert not any(f"-{dead.pid}-" in name for name in left if name != elsewhere.name)
    assert not reused.exists()
    assert not half.exists()
    assert sum(f"-{living.pid}-" in name for name in left) == 2
    assert all(path.exists() for path in (own, elsewhere, writing, *others))


def test_a_run_directory_is_tidied_when_it_is_opened(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        run.weights.mkdir()
        end(writer(run.weights))
        assert len(list(run.weights.iterdir())) == 2
    with open_run(tmp_path / "run") as run:
        assert not list(run.weights.iterdir())
