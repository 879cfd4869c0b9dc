"""``mptune compare MODEL ENGINE`` on three machines with TensorRT: it is run, and what does not fit is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.errors import BaselineError, ModelError, SettingsError, TargetError
from mptune.targets.detect import detect_gpus
from tests.conftest import save_mlp
from tests.device.blueprint import Blueprint
from tests.device.machines import MACHINES, Here, Machine, become
from tests.device.program import load_model

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU"),
]

ROWS = 12


EACH = [pytest.param(name, marks=() if name == "orin" else pytest.mark.slow) for name in MACHINES]


@pytest.fixture(params=EACH)
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Here]:
    with become(request.param, tmp_path / "machine", is_alone=True) as here:
        yield here
        assert here.broken() == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_mlp(tmp_path / "mlp.onnx")


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


def test_an_engine_agrees_if_it_computes_the_model(here: Here, model: Path, data: Path, tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "m.engine", load_model(str(model)), here.machine)
    found = mptune.compare(model, engine, data=data, repeat=2, stress=True)
    assert (found.verdict, found.candidate) == ("agrees", str(engine))
    assert found.outputs["y"]["error"] < 1e-5
    assert [finding.code for finding in found.findings] == ["agrees"]
    other = mptune.compare(model, write_engine(tmp_path / "m.plan", changed(model, 1.2), here.machine), data=data)
    assert other.verdict == "differs"
    assert other.outputs["y"]["error"] > other.outputs["y"]["limit"]


def test_inputs_and_outputs_correspond_by_name_else_by_place(
    here: Here, model: Path, data: Path, tmp_path: Path
) -> None:
    other = load_model(str(model))
    other.graph.input[0].name, other.graph.output[0].name = "in", "out"
    for node in other.graph.node:
        node.input[:] = ["in" if name == "x" else name for name in node.input]
        node.output[:] = ["out" if name == "y" else name for name in node.output]
    engine = write_engine(tmp_path / "m.trt", other, here.machine, rows=4, name="in")
    found = mptune.compare(model, engine, data=data, batch=4)
    assert (found.verdict, list(found.outputs)) == ("agrees", ["y"])


def test_what_an_engine_cannot_take_is_one_clear_error(here: Here, model: Path, data: Path, tmp_path: Path) -> None:
    proto = load_model(str(model))
    engine = write_engine(tmp_path / "m.engine", proto, here.machine, rows=1)
    with pytest.raises(BaselineError, match="is not what the engine was built for") as error:
        mptune.compare(model, engine, data=data, batch=4)
    assert "batch" in error.value.hint
    other = next(machine for machine in MACHINES.values() if machine.tensorrt != here.machine.tensorrt)
    foreign = write_engine(tmp_path / "foreign.engine", proto, other)
    with pytest.raises(BaselineError, match="cannot be loaded"):
        mptune.compare(model, foreign, data=data)
    (tmp_path / "cut.engine").write_bytes(engine.read_bytes()[:-7])
    (tmp_path / "engine.bin").write_bytes(b"ftrt" + bytes(64))  # an engine by its first bytes
    for name in ("cut.engine", "engine.bin"):
        with pytest.raises(BaselineError, match="cannot be loaded"):
            mptune.compare(model, tmp_path / name, data=data)
    here.log.unlink(missing_ok=True)  # what the device refused is what was tried


def test_an_engine_needs_a_device(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_engine(tmp_path / "m.engine", load_model(str(model)), MACHINES["ada"])
    with pytest.raises(SettingsError, match="needs two ONNX models"):
        mptune.compare(model, engine, data=data, trace=True)
    with pytest.raises(TargetError, match="no NVIDIA GPU is here"):
        mptune.compare(model, engine, data=data)
    with pytest.raises(ModelError, match="no such file"):
        mptune.compare(model, tmp_path / "missing.engine", data=data)
    assert main(["compare", str(model), str(engine), "--data", str(data)]) == 1
    shown = capsys.readouterr().err
    assert "--outputs FILE" in shown
    assert "Traceback" not in shown
