"""What fails after a plan was chosen takes nothing of the result away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.errors import DataError, RunError
from mptune.graph.plan import PrecisionPlan
from tests.fakes import make_toolchain, search
from tests.graph import models

PARTS = {
    "mptune.reporting.run_files.collect_check": "chosen/check.npz",
    "mptune.reporting.chosen.infer_script": "chosen/infer.py",
    "mptune.reporting.chosen.readme_text": "chosen/README.txt",
    "mptune.reporting.run_files.run_outputs": "report.html",
    "mptune.reporting.run_files.write_report": "report.html",
}
"""Function -> what it makes."""


@pytest.fixture(autouse=True)
def _here(place: Path) -> None:
    """A model and its data, as the working directory."""


def failing(error: Exception, cause: Exception | None = None) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error from cause

    return fail


fail = failing(IndexError("list index out of range"))


@pytest.mark.parametrize("function", PARTS)
def test_the_result_is_written_and_the_fault_is_a_warning(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(function, fail)
        front = search(make_toolchain())
    what = PARTS[function]
    (warning,) = [text for text in front.warnings if what in text]
    assert "could not be made (IndexError: list index out of range)" in warning
    log = Path(warning.rpartition(" ")[2])
    assert log.parent == front.run_dir / "logs"
    assert "in fail" in log.read_text()
    onnx.checker.check_model(str(front.run_dir / "chosen" / "model.onnx"))
    document = json.loads((front.run_dir / "front.json").read_text())
    plan = PrecisionPlan.from_json((front.run_dir / "chosen" / "plan.json").read_text())
    assert document["chosen"] == plan.fingerprint
    assert not (front.run_dir / what).exists()
    again = search(make_toolchain())
    assert again.chosen == front.chosen
    assert (front.run_dir / "report.html").exists(), "made by the next call"


@pytest.mark.parametrize(
    "error",
    [DataError("no such rows"), RunError("the samples were changed"), OSError(5, "Input/output error", "samples.npz")],
)
def test_errors_of_mptune_and_of_the_system_are_faults_too(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mptune.reporting.run_files.collect_check", failing(error))
    front = search(make_toolchain())
    assert any(f"chosen/check.npz could not be made ({type(error).__name__}: {error})" in w for w in front.warnings)
    for name in ("chosen/model.onnx", "chosen/infer.py", "front.json"):
        assert (front.run_dir / name).exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RunError("disk full: cannot write")])
def test_a_full_disk_is_an_error_and_the_result_is_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    full = failing(error, OSError(28, "No space left on device"))
    monkeypatch.setattr("mptune.reporting.run_files.write_report", full)
    with pytest.raises(RunError, match="disk full"):
        search(make_toolchain())
    assert Path("model.mptune/chosen/model.onnx").exists()
    assert Path("model.mptune/front.json").exists()


def test_a_page_of_an_earlier_result_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    front = search(make_toolchain())
    monkeypatch.setattr("mptune.reporting.run_files.write_report", fail)
    picked = mptune.pick(front.run_dir, plan=front.fp32.plan.fingerprint)
    assert any("report.html could not be made" in text for text in picked.warnings)
    assert not (front.run_dir / "report.html").exists()


def test_a_scalar_input_beside_a_dynamic_axis(capsys: pytest.CaptureFixture[str]) -> None:
    graph = "(float[1,frames,8] x, float gain) => (float[1,frames,8] z) { y = MatMul(x, w) z = Mul(y, gain) }"
    models.save(models.text(graph, models.weight("w", 8, 8, scale=0.1)), Path(), "scaled.onnx")
    rows = np.random.default_rng(1).normal(size=(16, 12, 8)).astype(np.float32)
    np.savez("scaled.npz", x=rows, gain=np.full(16, 2, np.float32))
    command = ["search", "scaled.onnx", "--data", "scaled.npz", "--budget", "4", "--target", "jetson-orin-nano-8gb"]
    assert main(command) == 0
    assert "could not be made" not in capsys.readouterr().err
    assert Path("scaled.mptune/chosen/model.onnx").exists()
