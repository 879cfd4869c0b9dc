"""Importing mptune costs nothing heavy, and it works where optional packages are absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = (
    "onnxruntime",
    "optuna",
    "onnx",
    "torch",
    "tensorrt",
    "tensorrt_rtx",
    "cuda",
    "scipy",
    "sqlalchemy",
)
OPTIONAL = ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "cuda", "torch", "psycopg", "sklearn")

LIST_HEAVY = f"""
import json, sys
found = sorted({{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r}))
print(json.dumps(found))
"""


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


BLOCK_OPTIONAL = blocking(OPTIONAL)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    "statement",
    [
        "import mptune",
        "import mptune.settings, mptune.errors",
        "from mptune.cli import main; main(['--help'])",
        "from mptune.cli import main; main(['search', '--help'])",
        "from mptune.cli import main; main(['--version'])",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    done = run_python(statement + "\n" + LIST_HEAVY)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_works_without_the_optional_packages(mlp_path: object) -> None:
    done = run_python(
        BLOCK_OPTIONAL
        + f"""
import mptune
from mptune.cli import main
model = mptune.load_model({str(mlp_path)!r})
groups = mptune.find_groups(model)
plan = mptune.PrecisionPlan.uniform(model.sha256, [g.id for g in groups], mptune.Precision.FP16)
assert mptune.rewrite(model, plan, groups).graph.node
assert main(["targets"]) == 0
assert main(["spaces"]) == 0
assert main(["doctor", "--json"]) == 0
assert all(getattr(mptune, name) for name in mptune.__all__)
"""
    )
    assert done.returncode == 0, done.stderr
    assert '"tensorrt"' in done.stdout
    assert "tensorrt-rtx is not installed" in done.stdout


def test_searches_without_the_optional_packages(mlp_path: Path, tmp_path: Path) -> None:
    """Measured on the CPU, and predicted for an RTX GPU, for which no engine can be built then."""
    done = run_python(
        BLOCK_OPTIONAL
        + f"""
import mptune
from mptune.settings import LatencySettings
quick = LatencySettings(warmup_ms=1.0, duration_ms=1.0)
for target, engine in (("cpu", "onnxruntime"), ("rtx-4500-ada", "emulation")):
    out = {str(tmp_path)!r} + "/" + target
    front = mptune.search({str(mlp_path)!r}, target=target, budget=3, out=out, latency=quick, confirm_rounds=1)
    assert front.engine == engine, front.engine
    assert all(point.engine_path is None for point in front.points)
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_suite_passes_without_tensorrt_rtx(tmp_path: Path) -> None:
    """As on aarch64, for which TensorRT-RTX does not exist: the tests marked ``tensorrt_rtx`` are skipped."""
    (tmp_path / "sitecustomize.py").write_text(blocking(("tensorrt_rtx",)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-rf"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" in done.stdout
