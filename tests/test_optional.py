"""Importing mptune costs nothing heavy, and it works where optional packages are absent."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("onnxruntime", "optuna", "onnx", "torch", "tensorrt", "tensorrt_rtx", "cuda", "scipy", "sqlalchemy")
OPTIONAL = ("tensorrt", "tensorrt_rtx", "cuda", "torch", "psycopg", "sklearn")

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
import mptune.api
"""
    )
    assert done.returncode == 0, done.stderr
    assert '"tensorrt"' in done.stdout
