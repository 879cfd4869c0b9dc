"""A classifier with classes that no sample is near: what their probabilities change by decides nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.settings import LatencySettings
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here")


def test_a_search_a_check_and_a_confirmation_judge_probabilities_on_their_own_scale(tmp_path: Path) -> None:
    graph = """(float[1,32] x) => (float[1,20] y) {
        a = MatMul(x, w) logits = Add(a, b) p = Softmax<axis = -1>(logits) y = Reshape(p, shape) }"""
    path = models.save(
        models.text(
            graph,
            models.weight("w", 32, 20, scale=1.0),
            models.constant("b", np.linspace(0, -16, 20)),  # the last are far below FP16's smallest normal number
            models.constant("shape", [-1, 20], np.int64),
        ),
        tmp_path,
    )
    data = {"x": 0.4 * np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)}
    quick = LatencySettings(warmup_ms=1.0, duration_ms=2.0)
    options = {"target": "jetson-orin-nano-8gb", "budget": 3, "latency": quick}
    fp16 = mptune.search(path, data=data, out=tmp_path / "run", **options).fp16  # type: ignore[arg-type]
    mptune.apply(path, fp16.plan, tmp_path / "mixed.onnx")
    assert mptune.check(tmp_path / "mixed.onnx", max_error=5e-3, against=path, data=data).agrees
    plans = mptune.confirm(tmp_path / "run", target="cpu").plans
    (confirmed,) = (plan.measured for plan in plans if not plan.searched.plan.fp32_groups)
    for evaluation in (fp16, confirmed):
        assert max(evaluation.error_value, evaluation.held_out_value) < 5e-3
