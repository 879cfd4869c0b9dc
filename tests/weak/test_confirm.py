"""``confirm`` and ``doctor`` on JetPack 6.0: TensorRT 8.6 as a backend, with faults of builds that users met."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

import mptune
from mptune.cli import main
from mptune.engines.base import EngineError
from mptune.engines.tensorrt.session import EngineOptions, TensorRtSession
from mptune.errors import BaselineError
from mptune.settings import LatencySettings
from mptune.targets.detect import detect_gpus
from tests.device.blueprint import Blueprint
from tests.device.machines import Here, become
from tests.weak.machine import Faults

pytestmark = pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU")


QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=10)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory, mlp_path: Path, mlp_data: Path) -> Path:
    """A run for this device, made elsewhere; copy it."""
    run = tmp_path_factory.mktemp("predicted") / "run"
    mptune.search(
        mlp_path, data=mlp_data, out=run, budget=3, target="jetson-orin-nano-8gb-super", confirm_rounds=1, latency=QUICK
    )
    return run


@pytest.fixture
def run(predicted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(predicted, tmp_path / "run"))


@pytest.fixture
def here(tmp_path: Path, run: Path) -> Iterator[Here]:
    with become("orin-6.0", tmp_path / "machine", is_alone=True) as here:
        yield here


def with_faults(**faults: Any) -> None:
    sys.modules["tensorrt"]._faults = Faults(**faults)  # type: ignore[attr-defined]


def test_a_front_is_confirmed_by_layer_precisions(here: Here, run: Path) -> None:
    front = mptune.confirm(run).front
    assert here.broken() == []
    assert front.engine == "tensorrt"
    assert {point.latency.source for point in front.points} == {point.error_source for point in front.points}
    assert front.fp32 is not None
    assert front.fp16 is not None
    assert front.fp32.error_value < 1e-6 < front.fp16.error_value < 1e-2
    assert front.fp16.latency.median_ms < front.fp32.latency.median_ms
    environment = json.loads((front.run_dir / "run.json").read_text())["environment"]
    assert environment["versions"]["tensorrt"] == "8.6.2"
    configs = sys.modules["tensorrt"]._configs  # type: ignore[attr-defined]
    flags = [{flag.name for flag in config._flags} for config in configs]
    assert {"OBEY_PRECISION_CONSTRAINTS"} in flags  # all-FP32
    assert {"FP16", "OBEY_PRECISION_CONSTRAINTS"} in flags


def test_what_is_written_of_it(here: Here, run: Path, mlp_path: Path) -> None:
    """Layers by the nodes of the user's model; and the way to build it there, which is not trtexec --stronglyTyped."""
    front = mptune.confirm(run).front
    shown = [json.loads(path.read_text()) for path in (front.run_dir / "engines").glob("*.layers.json")]
    nodes = {node.name for node in onnx.load(mlp_path).graph.node}
    assert shown
    for document in shown:
        assert nodes <= {node for layer in document["layers"] for node in layer["nodes"]}
    hint = "TensorRT 8.6.2 does not take this command: `mptune export RUN --for tensorrt-8.6` writes one"
    assert hint in (front.run_dir / "chosen" / "build.sh").read_text()
    weak = mptune.export(front.run_dir, for_="tensorrt-8.6")
    assert hint not in (weak / "build.sh").read_text()
    assert "--precisionConstraints=obey" in (weak / "build.sh").read_text()


def test_what_obey_refuses_is_preferred_and_checked(here: Here, run: Path) -> None:
    with_faults(obey="always")
    front = mptune.confirm(run).front
    assert here.broken() == []
    assert front.fp16 is not None
    assert any("built no engine with all precisions obeyed" in text for text in front.fp16.warnings)


def test_an_engine_that_is_not_the_plan_fails_with_its_reason(here: Here, run: Path) -> None:
    with_faults(is_fp32=True)
    front = mptune.confirm(run).front
    assert not any(point.plan.fp16_groups for point in front.points)
    assert "the engine is not what the plan says: no tensor of the engine is FP16" in str(vars(front))


def test_a_baseline_that_is_not_the_plan_ends_it(here: Here, run: Path) -> None:
    with_faults(is_blind=True)
    sys.modules["tensorrt"].ICudaEngine._is_blind = True  # type: ignore[attr-defined]
    with pytest.raises(BaselineError, match="TensorRT shows the types of no node"):
        mptune.confirm(run)


def test_int64_inputs_are_int32_there(here: Here, tmp_path: Path) -> None:
    """As onnx-tensorrt 8.6 declares them; values that INT32 does not hold are refused."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Cast", ["ids"], ["y"], "cast", to=TensorProto.FLOAT)],
        "g",
        [value("ids", TensorProto.INT32, [2])],
        [value("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "ids.engine"
    path.write_bytes(Blueprint.of_model(model, version="8.6.2", capability=(8, 7)).to_bytes())
    session = TensorRtSession(path, EngineOptions("tensorrt"))
    assert session.run({"ids": np.array([3, -1], np.int64)})["y"].tolist() == [3, -1]
    with pytest.raises(EngineError, match="does not hold all its values"):
        session.run({"ids": np.array([1 << 40, 0], np.int64)})
    session.close()
    assert here.broken() == []


def test_doctor_says_what_it_can_do(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "8.6.2 (TensorRT 8.6.2 has no strongly typed networks: a plan is built as layer precisions" in shown
