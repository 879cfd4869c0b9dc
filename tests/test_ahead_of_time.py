"""A whole search for an RTX GPU that is not here: predicted, emulated, and built by TensorRT-RTX."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mptune
from mptune.engines.tensorrt.library import load_library
from mptune.engines.toolchains.choose import detect_gpus
from mptune.errors import TargetError
from tests.graph import rtx

pytestmark = [
    pytest.mark.tensorrt_rtx,
    pytest.mark.skipif(bool(detect_gpus()), reason="needs a machine without a GPU"),
]


def test_the_front_has_engines_and_the_chosen_one_ships(
    mlp_path: Path, mlp_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    front = mptune.search(mlp_path, target="rtx-4500-ada", budget=5, data=mlp_data, out=run)
    assert (front.engine, front.fp32.latency.source) == ("tensorrt-rtx", "predicted")
    assert front.fp32.error_source == "emulated"
    assert "target-not-here" in {finding.code for finding in front.findings}
    document = json.loads((run / "front.json").read_text())
    assert document["baseline"]["tf32"]["engine"] is None, "it is predicted, and nothing is built for it"
    baselines = [document["baseline"][name] for name in ("fp32", "fp16")]
    engines = {Path(point["engine"]) for point in (*document["points"], *filter(None, baselines))}
    assert engines == set((run / "engines").glob("*.engine"))
    library = load_library("tensorrt-rtx")
    assert [rtx.engine_faults(library, path.read_bytes()) for path in engines] == [()] * len(engines)
    shipped = run / "chosen" / "model.engine"
    assert shipped.read_bytes() == Path(front.chosen.engine_path).read_bytes()
    # A run that was moved still finds its engines.
    moved = run.rename(tmp_path / "moved")
    (moved / "chosen" / "model.engine").unlink()
    monkeypatch.chdir(tmp_path)
    other = next(point for point in (front.fp32, front.fp16) if point is not None and point is not front.chosen)
    mptune.pick(moved, plan=other.plan.fingerprint)
    name = Path(other.engine_path).name
    assert (moved / "chosen" / "model.engine").read_bytes() == (moved / "engines" / name).read_bytes()


@pytest.mark.slow
def test_a_model_that_tensorrt_rtx_does_not_parse_is_predicted_and_the_run_says_why(tmp_path: Path) -> None:
    model = Path(__file__).parent / "graph" / "corpus" / "custom_domain.onnx"
    front = mptune.search(model, target="rtx-4500-ada", budget=2, out=tmp_path / "run")
    assert front.engine != "tensorrt-rtx"
    (warning,) = (text for text in front.warnings if text.startswith("tensorrt-rtx is passed over"))
    assert "FusedMatMul" in warning
    with pytest.raises(TargetError, match=r"its parser does not take this model with .*FusedMatMul"):
        mptune.search(model, target="rtx-4500-ada", engine="tensorrt-rtx", budget=2, out=tmp_path / "asked")
