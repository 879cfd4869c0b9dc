"""A state that is fed back: what one step does not show, a rollout over the recording does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune import api
from mptune.tuning.evaluation import Evaluation
from tests.zoo.recurrent_tracker import STEPS, record, save_tracker


def drift_px(evaluation: Evaluation) -> float:
    return evaluation.error.summary()["next_position"]["max_abs"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_the_plan_chosen_with_feedback_keeps_its_position(tmp_path: Path, seed: int) -> None:
    model, data = tmp_path / "tracker.onnx", tmp_path / "data.npz"
    save_tracker(model, seed)
    record(model, data, seed=seed + 1)
    given = {"data": data, "budget": 10, "target": "jetson-orin-nano-8gb"}
    one_step = api.search(model, out=tmp_path / "one", **given)
    assert one_step.fp16 is not None
    assert one_step.fp16.error_value < 1e-3, "one step of all-FP16 looks right"
    assert one_step.chosen is not None
    limit_ms = one_step.chosen.latency.median_ms
    rolled = api.search(
        model, out=tmp_path / "rolled", feedback="next_position:position", steps=STEPS, max_latency_ms=limit_ms, **given
    )
    assert rolled.fp16 is not None
    assert rolled.fp16.error_value > 1e-2
    assert drift_px(rolled.fp16) > 6.0, "the steps are lost"
    assert rolled.limits_met
    assert rolled.chosen is not None
    assert rolled.chosen.latency.median_ms <= limit_ms
    assert drift_px(rolled.chosen) < 6.0
    grown = rolled.fp16.error.summary()
    after = [grown[f"next_position after {k} steps"]["max_abs"] for k in (STEPS // 4, STEPS // 2)]
    assert after[0] < after[1] < drift_px(rolled.fp16)
