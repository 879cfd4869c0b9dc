"""``--max-memory``: the figures of every point, and the choice among plans that keep to it."""

from __future__ import annotations

import math

import onnx
import pytest

import mptune
from mptune.cli import main
from mptune.resources import demo_model
from mptune.settings import LatencySettings
from mptune.tuning.front import Front

pytestmark = pytest.mark.usefixtures("opened_here")

QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=3)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    model, data = demo_model()
    out = tmp_path_factory.mktemp("memory") / "run"
    return mptune.search(model, data=data, out=out, budget=4, target="cpu", confirm_rounds=1, latency=QUICK)


def test_every_point_has_its_memory(front: Front) -> None:
    document = front.to_json()
    fp32, fp16 = document["baseline"]["fp32"], document["baseline"]["fp16"]
    for point in (fp32, fp16, *document["points"]):
        assert point["memory_source"] == "predicted"  # ONNX Runtime does not say
        assert point["engine_bytes"] is None
        assert fp16["weight_bytes"] <= point["weight_bytes"] <= fp32["weight_bytes"]
        assert fp16["context_bytes"] <= point["context_bytes"] <= fp32["context_bytes"]
    constants = onnx.load(demo_model()[0]).graph.initializer
    floats = [constant for constant in constants if constant.data_type == onnx.TensorProto.FLOAT]
    # the initializers, and a few small constants that nodes hold
    assert fp32["weight_bytes"] == pytest.approx(sum(4 * math.prod(constant.dims) for constant in floats), rel=1e-3)


def test_the_plan_that_a_limit_chooses(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    most = front.fp16.memory.total_bytes
    picked = mptune.pick(front.run_dir, max_memory_bytes=most, max_error=0.1)
    assert picked.limits_met, "though it is off the front"
    assert picked.chosen.memory.total_bytes <= most
    for size, code, words in (
        (str(most), 3, "no plan has"),  # within 1 % nothing is so small
        ("5kB", 3, "no plan has error <= 0.01 and memory <= 0.005 MB; the nearest is "),
        ("much", 2, "Invalid value for '--max-memory': 'much' is not a size"),
    ):
        assert main(["pick", str(front.run_dir), "--max-memory", size]) == code
        assert words in "".join(capsys.readouterr())
