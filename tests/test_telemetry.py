"""ONNX Runtime's telemetry is off in every process that mptune starts, and in the script that it writes.

What shows it is the files that telemetry writes: ``.ses`` in the temporary folder, and a database in the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("collecting")
ROOT = Path(__file__).resolve().parents[1]

_RUNS_A_MODEL = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {"x": np.zeros((1, 32), np.float32)})
"""


def run(home: Path, *arguments: str | Path, **variables: str) -> list[str]:
    """Run Python with a home and a temporary folder of its own; the names of the files that telemetry left there.

    No other variables: ONNX Runtime collects nothing where CI is set.
    """
    folders = {"HOME": home / "home", "TMPDIR": home / "tmp"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **variables}
    environment |= {name: str(folder) for name, folder in folders.items()}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [path.name for path in (*folders["TMPDIR"].rglob("*.ses"), *folders["HOME"].rglob("*onnxruntime*"))]


@pytest.fixture(scope="module")
def collecting(mlp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where ONNX Runtime collects nothing by itself: then no test could fail."""
    if not run(tmp_path_factory.mktemp("raw"), "-c", _RUNS_A_MODEL, mlp_path):
        pytest.skip("this ONNX Runtime writes no telemetry of its own accord")


def test_a_search_and_its_script_collect_nothing(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--target", "jetson-orin-nano-8gb", "--budget", "2", "--data", mlp_data, "--out", out)
    assert run(tmp_path / "search", "-m", "mptune", "search", mlp_path, *options) == []
    assert run(tmp_path / "script", out / "chosen" / "infer.py") == []


def test_neither_a_program_that_imports_mptune_first_nor_a_worker_of_another_collects(
    mlp_path: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "program", "-c", "import mptune\n" + _RUNS_A_MODEL, mlp_path) == []
    text = """
from pathlib import Path
from mptune.engines.ort.cuda_session import ProbeJob
from mptune.processes.parent import Worker
with Worker(Path("logs")) as worker:
    assert worker.call(ProbeJob("cpu"), 120.0) is None
"""
    assert run(tmp_path / "worker", "-c", text, ORT_DISABLE_TELEMETRY="0") == []
