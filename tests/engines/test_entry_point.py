"""A backend of another package: found by its entry point, searched and listed without a change in mptune."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mptune.engines.environment import backend_names
from mptune.engines.toolchains.choose import find_backends
from mptune.errors import TargetError

FOLDER = Path(__file__).with_name("evaluator")
QUICK = """
import sys, mptune
from mptune.settings import LatencySettings
model, data, out = sys.argv[1:]
latency = LatencySettings(warmup_ms=1.0, duration_ms=2.0)
mptune.search(model, data=data, out=out, engine="evaluator", target="cpu", budget=2, seed=1, latency=latency)
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python where the backend is installed."""
    path = os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])))
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=250
    )


@pytest.mark.smoke
def test_it_is_searched_end_to_end(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run("-c", QUICK, mlp_path, mlp_data, out)
    assert done.returncode == 0, done.stderr
    front = json.loads((out / "front.json").read_text())
    assert front["target"]["engine"] == "evaluator"
    assert front["evaluations"] == 2
    fp32, fp16 = front["baseline"]["fp32"], front["baseline"]["fp16"]
    assert (fp32["latency"]["source"], fp32["error"]["source"]) == ("measured", "measured")
    assert fp32["error"]["value"] < 1e-5 < fp16["error"]["value"] < 1e-1
    assert (out / "chosen" / "model.onnx").exists()
    assert json.loads((out / "run.json").read_text())["environment"]["versions"]["mptune-evaluator"] == "1.0"


def test_doctor_lists_it() -> None:
    done = run("-m", "mptune", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    status = {one["name"]: one for one in json.loads(done.stdout)["toolchains"]}["evaluator"]
    assert status["available"]
    assert "measures with --target cpu" in status["reason"]


def test_a_name_that_nobody_has_and_a_place_that_a_backend_refuses_are_errors(
    mlp_path: Path, mlp_data: Path, tmp_path: Path
) -> None:
    assert backend_names() == ("tensorrt", "tensorrt-rtx", "onnxruntime")
    with pytest.raises(TargetError, match="there is no engine 'evaluator'") as caught:
        find_backends("evaluator")
    assert "tensorrt-rtx, onnxruntime" in caught.value.hint
    done = run("-m", "mptune", "search", mlp_path, "--engine", "openvino")
    assert done.returncode == 2
    assert "'auto', 'tensorrt', 'tensorrt-rtx', 'onnxruntime', 'evaluator'" in done.stderr
    options = ("--engine", "evaluator", "--target", "jetson-orin-nano-8gb", "--out", tmp_path / "run")
    done = run("-m", "mptune", "search", mlp_path, "--data", mlp_data, *options)
    assert done.returncode == 1
    assert "it runs on a CPU" in done.stderr
