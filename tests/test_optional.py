"""What importing mptune costs, and that it works where optional packages are absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"onnxruntime", "optuna", "onnx", "torch", "tensorrt", "tensorrt_rtx", "cuda", "scipy", "sqlalchemy"}
OPTIONAL = ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "cuda", "torch", "psycopg", "sklearn")


def blocking(names: tuple[str, ...]) -> str:
    """Code after which these packages cannot be imported."""
    return f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run_python(code: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(statement: str) -> set[str]:
    """The names of all modules that a fresh process has then."""
    return set(run_python(f"import sys\n{statement}\nprint(*sys.modules)").splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import mptune, mptune.settings, mptune.errors",
        *(f"from mptune.cli import main; main({words})" for words in (["--help"], ["search", "--help"], ["--version"])),
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    assert {name.partition(".")[0] for name in imported(statement)} & HEAVY == set()


@pytest.mark.parametrize("modules", ["mptune.api.reading, mptune.reporting.terminal.front", "mptune.tuning.space"])
def test_what_runs_no_model_is_without_what_does(modules: str) -> None:
    names = imported(f"import {modules}")
    assert "mptune.tuning.evaluation" in names
    assert not {"onnx", "onnxruntime", "scipy", "PIL", "mptune.engines.toolchains.choose"} & names
    running = {name for name in names if name.startswith(("mptune.graph.writing.", "mptune.processes."))}
    assert running <= {"mptune.processes.child"}, "they start no process"


def test_works_without_the_optional_packages(mlp_path: Path) -> None:
    code = f"""
import mptune
from mptune.cli import main
model = mptune.load_model({str(mlp_path)!r})
groups = mptune.find_groups(model)
plan = mptune.PrecisionPlan.uniform(model.sha256, [g.id for g in groups], mptune.Precision.FP16)
assert mptune.rewrite(model, plan, groups).graph.node
assert [main([word]) for word in ("targets", "spaces")] == [0, 0]
assert main(["doctor", "--json"]) == 0
assert all(getattr(mptune, name) for name in mptune.__all__)
"""
    assert "tensorrt-rtx is not installed" in run_python(blocking(OPTIONAL) + code)


def test_searches_without_the_optional_packages(mlp_path: Path, tmp_path: Path) -> None:
    """Measured on the CPU, and predicted for an RTX GPU, for which no engine can be built then."""
    code = f"""
import mptune
from mptune.settings import LatencySettings
quick = LatencySettings(warmup_ms=1.0, duration_ms=1.0)
for target, engine in (("cpu", "onnxruntime"), ("rtx-4500-ada", "emulation")):
    out = {str(tmp_path)!r} + "/" + target
    front = mptune.search({str(mlp_path)!r}, target=target, budget=3, out=out, latency=quick, confirm_rounds=1)
    assert front.engine == engine, front.engine
    assert all(point.engine_path is None for point in front.points)
"""
    run_python(blocking(OPTIONAL) + code)
