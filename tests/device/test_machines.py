"""``search``, ``pick``, ``infer.py``, ``confirm`` and the self-test on three machines with TensorRT."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.selftest import engines_here, run_selftest
from mptune.settings import LatencySettings
from mptune.targets.detect import detect_gpus
from mptune.tuning.front import Front
from tests.device.blueprint import Blueprint
from tests.device.machines import HOPPER, MACHINES, Here, become

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU"),
]

QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=10)


EACH = [pytest.param(name, marks=() if name == "orin" else pytest.mark.slow) for name in MACHINES]
"""An Orin is the machine that the tool is for: it is tested each time."""


@pytest.fixture(params=EACH)
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Here]:
    with become(request.param, tmp_path / "machine", is_alone=True) as here:
        yield here


def search(model: Path, data: Path, run: Path, **settings: Any) -> Front:
    return mptune.search(model, data=data, out=run, confirm_rounds=1, latency=QUICK, **settings)


def test_a_search_measures_picks_and_deploys(here: Here, mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    machine, run = here.machine, tmp_path / "run"
    front = search(mlp_path, mlp_data, run, budget=3)
    assert here.broken() == []
    assert (front.target, front.engine) == (machine.target, "tensorrt")
    assert front.fp32 is not None
    assert front.fp16 is not None
    for point in (front.fp32, front.fp16):
        assert (point.latency.source, point.error_source) == ("measured", "measured")
        assert point.engine_path is not None
    assert front.fp32.latency.median_ms / front.fp16.latency.median_ms > 1.5
    assert front.fp32.error_value < 1e-6
    assert 1e-5 < front.fp16.error_value < 1e-2
    environment = json.loads((run / "run.json").read_text())["environment"]
    assert environment["versions"]["tensorrt"] == machine.tensorrt
    assert (environment["jetson"] is not None) is machine.is_jetson

    chosen, chosen_dir = mptune.pick(run, max_error=1e-9).chosen, run / "chosen"
    assert chosen is not None
    assert not chosen.plan.fp16_groups
    engine = Blueprint.from_bytes((chosen_dir / "model.engine").read_bytes())
    assert engine is not None
    assert (engine.version, engine.capability) == (machine.tensorrt, machine.capability)
    assert (engine.tf32, engine.is_typed, engine.is_detailed, engine.averaged) == (False, True, True, 8)
    assert engine.shapes == {"x": ((1, 32), (1, 32), (1, 32))}
    feeds = dict(np.load(mlp_data))
    np.savez(chosen_dir / "in.npz", x=feeds["x"][:1])
    command = [sys.executable, "-I", "infer.py", "--data", "in.npz", "--save", "out.npz", "--iterations", "2"]
    done = subprocess.run([*command, "--provider", "cpu"], cwd=chosen_dir, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wanted = engine.program().run({"x": feeds["x"][:1]})["y"]
    np.testing.assert_allclose(np.load(chosen_dir / "out.npz")["y"], wanted, rtol=1e-5, atol=1e-6)


def test_the_layers_of_the_chosen_plans_engine_are_shown(
    here: Here, mlp_path: Path, mlp_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    front = search(mlp_path, mlp_data, run, budget=2)
    half = front.fp16
    assert half is not None
    mptune.pick(run, plan=half.plan.fingerprint)
    capsys.readouterr()
    assert main(["report", str(run), "--layers", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"] == half.plan.fingerprint
    layers = {node: layer for layer in document["layers"] for node in layer["nodes"]}
    assert {node.name for node in onnx.load(mlp_path).graph.node} <= layers.keys()
    gemm = layers["block0/fc1/Gemm"]
    assert (gemm["types"], gemm["ms"] > 0.0, bool(gemm["name"])) == (["fp16"], True, True)
    assert main(["report", str(run), "--layers"]) == 0
    shown = capsys.readouterr().out
    (row,) = [line for line in shown.splitlines() if line.endswith("block0/fc1/Gemm")]
    assert row.split()[0] == f"{gemm['ms']:.4f}"
    assert row.split()[2] == "FP16"
    for path in (run / "engines").glob("*.layers.json"):
        path.unlink()
    assert main(["report", str(run), "--layers"]) == 1
    shown = capsys.readouterr().err
    assert "its engine was not profiled\nhint: `mptune confirm RUN`" in shown


@pytest.mark.parametrize(
    ("target", "why"),
    [("jetson-orin-nano-8gb", "its latency is predicted"), ("cpu", "onnxruntime left no engine file")],
)
def test_where_no_layers_were_recorded_is_said_why(
    target: str, why: str, mlp_path: Path, mlp_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(mlp_path, mlp_data, tmp_path / "run", budget=1, target=target)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--layers"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith(f"no layers were recorded: {why}")
    assert hint.startswith("hint: ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MACHINES)
def test_what_was_predicted_elsewhere_is_confirmed_there(
    name: str, mlp_path: Path, mlp_data: Path, tmp_path: Path
) -> None:
    machine, run = MACHINES[name], tmp_path / "run"
    predicted = search(mlp_path, mlp_data, run, budget=12, target=machine.target)
    assert predicted.fp32 is not None
    assert predicted.fp32.latency.source == "predicted"
    with become(name, tmp_path / "machine") as here:
        confirmed = mptune.confirm(run)
        assert here.broken() == []
    assert confirmed.front.engine == "tensorrt"
    assert {point.latency.source for point in confirmed.front.points} == {"measured"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MACHINES)
def test_the_selftest_holds_there(name: str, tmp_path: Path) -> None:
    """But for the clock, since the host waits for moments only."""
    with become(name, tmp_path / "machine", is_alone=True) as here:
        result = run_selftest([engine for engine in engines_here() if engine.can.title == "tensorrt"])
        assert here.broken() == []
    other = {check.name: check.text for check in result.checks if check.status != "holds"}
    assert other.keys() <= {"clock"}, other
    assert len(result.checks) == 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_shapes_and_a_long_search(mlp_path: Path, tmp_path: Path) -> None:
    """Samples of several batch sizes: each shape is bound and captured anew."""
    data = tmp_path / "data"
    data.mkdir()
    generator = np.random.default_rng(0)
    for number in range(6):
        np.savez(data / f"{number}.npz", x=generator.normal(size=(1 + number % 3, 32)).astype(np.float32))
    with become("hopper", tmp_path / "machine") as here:
        front = search(mlp_path, data, tmp_path / "run", budget=16)
        assert here.machine is HOPPER
        assert here.broken() == []
    assert len(front.points) >= 3
