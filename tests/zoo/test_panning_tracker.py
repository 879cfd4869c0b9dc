"""The plan that one-step errors choose runs away; the one with --feedback keeps its positions, and is no slower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.weights import WeightBank
from tests.zoo.panning_tracker import STEPS, record, roll, save_tracker

LIMIT_PX = 6.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_the_plan_chosen_with_feedback_keeps_its_positions_at_no_higher_latency(tmp_path: Path, seed: int) -> None:
    path, data = tmp_path / "tracker.onnx", tmp_path / "data.npz"
    save_tracker(path, seed)
    record(path, data, seed + 1)
    model, exact = load_model(path), roll(path, seed + 1)
    emulator = Emulator(GroupedModel(model, find_groups(model)), WeightBank.write(model, tmp_path / "bank"))

    def drift_px(plan: PrecisionPlan) -> float:
        """At the end of 500 steps, by an emulation apart from the search's."""
        rounded = roll(emulator.write(plan, tmp_path / "bank" / f"{plan.fingerprint}.onnx"), seed + 1)
        return float(np.abs(rounded - exact)[-1].max())

    given = {"data": data, "budget": 12, "target": "jetson-orin-nano-8gb"}
    one_step = mptune.search(path, out=tmp_path / "one", **given).chosen
    assert one_step is not None
    assert drift_px(one_step.plan) > 5 * LIMIT_PX, "each step of it is right to .2 pixels"
    rolled = mptune.search(
        path,
        out=tmp_path / "rolled",
        feedback="next_position:position",
        steps=STEPS,
        max_latency_ms=one_step.latency.median_ms,
        **given,
    )
    assert rolled.limits_met
    assert rolled.chosen is not None
    assert rolled.chosen.latency.median_ms <= one_step.latency.median_ms
    assert drift_px(rolled.chosen.plan) <= LIMIT_PX
