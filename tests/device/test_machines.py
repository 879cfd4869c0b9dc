"""``search``, ``pick``, ``infer.py``, ``confirm``, ``compare`` and the self-test on three machines with TensorRT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.errors import BaselineError, ModelError, SettingsError, TargetError
from mptune.selftest import engines_here, run_selftest
from mptune.targets.detect import detect_gpus
from mptune.tuning.front import Front
from tests.device.blueprint import Blueprint
from tests.device.machines import MACHINES, Here, Machine, become
from tests.device.program import load_model
from tests.engines.engine_support import QUICK

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU"),
]

ROWS = 12


def search(model: Path, data: Path, run: Path, **settings: Any) -> Front:
    return mptune.search(model, data=data, out=run, confirm_rounds=1, latency=QUICK, **settings)


def test_a_search_measures_picks_and_deploys(here: Here, mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    machine, run = here.machine, tmp_path / "run"
    front = search(mlp_path, mlp_data, run, budget=3)
    assert (front.target, front.engine) == (machine.target, "tensorrt")
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
    assert not chosen.plan.fp16_groups
    engine = Blueprint.from_bytes((chosen_dir / "model.engine").read_bytes())
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


@pytest.fixture
def data(tmp_path: Path) -> Path:
    values = np.random.default_rng(5).standard_normal((ROWS, 32)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=values)
    return tmp_path / "data.npz"


def write_engine(path: Path, model: onnx.ModelProto, machine: Machine, rows: int = ROWS, name: str = "x") -> Path:
    shapes = {name: ((1, 32), (1, 32), (rows, 32))}
    made = Blueprint.of_model(model, shapes=shapes, version=machine.tensorrt, capability=machine.capability)
    path.write_bytes(made.to_bytes())
    return path


def changed(path: Path, factor: float) -> onnx.ModelProto:
    """The model with one weight multiplied."""
    model = load_model(str(path))
    weight = next(one for one in model.graph.initializer if one.name == "block0.w1")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(factor), weight.name))
    return model


def test_an_engine_agrees_if_it_computes_the_model(here: Here, mlp_path: Path, data: Path, tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "m.engine", load_model(str(mlp_path)), here.machine)
    found = mptune.compare(mlp_path, engine, data=data, repeat=2, stress=True)
    assert (found.verdict, found.candidate) == ("agrees", str(engine))
    assert found.outputs["y"]["error"] < 1e-5
    assert [finding.code for finding in found.findings] == ["agrees"]
    engine = write_engine(tmp_path / "m.plan", changed(mlp_path, 1.2), here.machine)
    other = mptune.compare(mlp_path, engine, data=data)
    assert other.verdict == "differs"
    assert other.outputs["y"]["error"] > other.outputs["y"]["limit"]


def test_what_an_engine_cannot_take_is_one_clear_error(here: Here, mlp_path: Path, data: Path, tmp_path: Path) -> None:
    proto = load_model(str(mlp_path))
    engine = write_engine(tmp_path / "m.engine", proto, here.machine, rows=1)
    with pytest.raises(BaselineError, match="is not what the engine was built for") as error:
        mptune.compare(mlp_path, engine, data=data, batch=4)
    assert "batch" in error.value.hint
    other = next(machine for machine in MACHINES.values() if machine.tensorrt != here.machine.tensorrt)
    foreign = write_engine(tmp_path / "foreign.engine", proto, other)
    with pytest.raises(BaselineError, match="cannot be loaded"):
        mptune.compare(mlp_path, foreign, data=data)
    (tmp_path / "cut.engine").write_bytes(engine.read_bytes()[:-7])
    with pytest.raises(BaselineError, match="cannot be loaded"):
        mptune.compare(mlp_path, tmp_path / "cut.engine", data=data)
    here.log.unlink(missing_ok=True)  # what the device refused is what was tried


def test_an_engine_needs_a_device(
    mlp_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = write_engine(tmp_path / "m.engine", load_model(str(mlp_path)), MACHINES["ada"])
    with pytest.raises(SettingsError, match="needs two ONNX models"):
        mptune.compare(mlp_path, engine, data=data, trace=True)
    with pytest.raises(TargetError, match="no NVIDIA GPU is here"):
        mptune.compare(mlp_path, engine, data=data)
    with pytest.raises(ModelError, match="no such file"):
        mptune.compare(mlp_path, tmp_path / "missing.engine", data=data)
    assert main(["compare", str(mlp_path), str(engine), "--data", str(data)]) == 1
    shown = capsys.readouterr().err
    assert "--outputs FILE" in shown
    assert "Traceback" not in shown
