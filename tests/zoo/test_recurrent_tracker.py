"""A state that is fed back and stagnates in FP16: one step hardly shows it, and a search still keeps it in FP32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mptune
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.weights import WeightBank
from mptune.tuning.evaluation import Evaluation
from tests.zoo.recurrent_tracker import STEPS, record, roll, save_tracker

LIMIT_PX = 6.0


def drift_px(evaluation: Evaluation) -> float:
    return evaluation.error.summary()["next_position"]["max_abs"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_the_chosen_plans_keep_their_position_that_plain_fp16_loses(tmp_path: Path, seed: int) -> None:
    path, data = tmp_path / "tracker.onnx", tmp_path / "data.npz"
    save_tracker(path, seed)
    record(path, data, seed + 1)
    model, exact = load_model(path), roll(path, seed + 1)
    grouped = GroupedModel(model, find_groups(model))
    emulator = Emulator(grouped, WeightBank.write(model, tmp_path / "bank"))

    def rounded(plan: PrecisionPlan) -> np.ndarray:
        """Positions by an emulation apart from the search's, shape (STEPS + 1, 2)."""
        return roll(emulator.write(plan, tmp_path / "bank" / f"{plan.fingerprint}.onnx"), seed + 1)

    plain = np.abs(rounded(grouped.uniform(Precision.FP16)) - exact)
    assert plain[1].max() < 1e-3 * exact[1].max(), "one step of plain FP16 looks right"
    assert plain[-1].max() > LIMIT_PX, "the steps are lost"
    given = {"data": data, "budget": 10, "target": "jetson-orin-nano-8gb"}
    one_step = mptune.search(path, out=tmp_path / "one", **given)
    rolled = mptune.search(path, out=tmp_path / "rolled", feedback="next_position:position", steps=STEPS, **given)
    for front in (one_step, rolled):
        assert front.chosen is not None
        assert front.chosen.plan.reduced_groups
        assert np.abs(rounded(front.chosen.plan) - exact).max() < LIMIT_PX
    assert rolled.chosen is not None
    assert drift_px(rolled.chosen) == pytest.approx(np.abs(rounded(rolled.chosen.plan) - exact)[-1].max(), rel=0.5)
    errors = rolled.chosen.error.summary()
    after = [errors[f"next_position after {k} steps"]["max_abs"] for k in (STEPS // 4, STEPS // 2)]
    assert after[0] < after[1] < drift_px(rolled.chosen)
