"""A backend of another package: found by its entry point, searched and listed without a change in mptune."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mptune
from mptune.cli import main
from mptune.engines.environment import backend_entries
from mptune.engines.toolchains.choose import find_backends
from mptune.errors import TargetError
from tests.engines.engine_support import QUICK


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend's package is installed, here and in workers."""
    monkeypatch.syspath_prepend(Path(__file__).with_name("evaluator"))
    backend_entries.cache_clear()
    yield
    sys.modules.pop("mptune_evaluator", None)
    backend_entries.cache_clear()


@pytest.mark.smoke
@pytest.mark.usefixtures("_installed")
def test_it_is_searched_end_to_end(mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"engine": "evaluator", "target": "cpu", "budget": 2, "confirm_rounds": 1, "latency": QUICK}
    mptune.search(mlp_path, data=mlp_data, out=out, **settings)
    front = json.loads((out / "front.json").read_text())
    assert front["target"]["engine"] == "evaluator"
    assert front["evaluations"] == 2
    fp32, fp16 = front["baseline"]["fp32"], front["baseline"]["fp16"]
    assert (fp32["latency"]["source"], fp32["error"]["source"]) == ("measured", "measured")
    assert fp32["error"]["value"] < 1e-5 < fp16["error"]["value"] < 1e-1
    assert (out / "chosen" / "model.onnx").exists()
    assert json.loads((out / "run.json").read_text())["environment"]["versions"]["mptune-evaluator"] == "1.0"


@pytest.mark.usefixtures("_installed")
def test_doctor_lists_it_and_search_names_it(
    mlp_path: Path, mlp_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    status = {each["name"]: each for each in json.loads(capsys.readouterr().out)["toolchains"]}["evaluator"]
    assert status["available"]
    assert "measures with --target cpu" in status["reason"]
    assert main(["search", str(mlp_path), "--engine", "openvino"]) == 2
    assert "'auto', 'tensorrt', 'tensorrt-rtx', 'onnxruntime', 'evaluator'" in capsys.readouterr().err
    options = ("--engine", "evaluator", "--target", "jetson-orin-nano-8gb", "--out", str(tmp_path / "run"))
    assert main(["search", str(mlp_path), "--data", str(mlp_data), *options]) == 1
    assert "it runs on a CPU" in capsys.readouterr().err


def test_a_name_that_nobody_has_is_an_error() -> None:
    assert list(backend_entries()) == ["tensorrt", "tensorrt-rtx", "onnxruntime"]
    with pytest.raises(TargetError, match="there is no engine 'evaluator'") as caught:
        find_backends("evaluator")
    assert "tensorrt-rtx, onnxruntime" in caught.value.hint
