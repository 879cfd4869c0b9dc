"""The TF32 baseline: evaluated once beside all-FP32, in front.json, and a bound of what is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mptune
from tests.fakes import make_toolchain, search

pytestmark = pytest.mark.usefixtures("opened_here", "place")


def written() -> dict[str, Any]:
    """The baselines of front.json."""
    return json.loads(Path("model.mptune/front.json").read_text())["baseline"]


def test_it_is_measured_once_and_stands_in_front_json() -> None:
    toolchain = make_toolchain(tf32=(0.6, 5e-4))
    front = search(toolchain, budget=6)
    assert front.tf32.error_value == pytest.approx(5e-4)
    assert front.tf32.speedup == pytest.approx(front.fp32.latency.median_ms / front.tf32.latency.median_ms)
    assert written()["tf32"]["latency"]["median_ms"] == pytest.approx(front.tf32.latency.median_ms)
    assert written()["tf32"]["fp32"] == []
    assert search(toolchain, budget=8).tf32 == front.tf32
    assert toolchain.tf32_calls == 1
    assert mptune.report("model.mptune").tf32 == front.tf32


@pytest.mark.parametrize(("target", "has_tf32"), [("jetson-orin-nano-8gb", True), ("t4", False)])
def test_a_target_that_is_not_here_has_a_predicted_one(target: str, has_tf32: bool) -> None:
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((64, 32), np.float32))
    mptune.search("model.onnx", data="data.npz", target=target, budget=2, progress=False)
    tf32, fp32, fp16 = (written()[name] for name in ("tf32", "fp32", "fp16"))
    assert (tf32 is not None) is has_tf32
    if has_tf32:
        assert (tf32["latency"]["source"], tf32["error"]["source"]) == ("predicted", "emulated")
        assert tf32["latency"]["median_ms"] <= fp32["latency"]["median_ms"]
        assert 0 < tf32["error"]["value"] < fp16["error"]["value"]


def test_a_plan_that_is_slower_and_less_exact_is_not_chosen() -> None:
    without = search(make_toolchain(), budget=12, out="without.mptune")
    assert without.tf32 is None, "the device has none"
    assert without.chosen.plan.reduced_groups
    ms, error = without.chosen.latency.median_ms, without.chosen.judged_error
    front = search(make_toolchain(tf32=(0.5 * ms, 0.01 * error)), budget=12, out="with.mptune")
    assert front.chosen.plan != without.chosen.plan
    assert front.chosen.judged_error <= 0.01 * error, "none is as fast, so what is chosen is more exact"
