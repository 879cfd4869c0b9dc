"""Importing mptune costs nothing heavy, and it works where optional packages are absent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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

BLOCK_OPTIONAL = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


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
        "from mptune.cli import main; main(['search', 'model.onnx', '--budget', '0'])",
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
