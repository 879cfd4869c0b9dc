"""What a detector's boxes hide of its scores: the default search keeps the scores right, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.graph.plan import Precision, PrecisionPlan
from tests.zoo.detector import LAYOUTS, Layout, detector, images, scores
from tests.zoo.plans import emulated, emulator_of

LIMIT = 0.005  # largest absolute error of the score column


@pytest.mark.parametrize(
    "layout", [*LAYOUTS[:2], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[2:])]
)
def test_the_score_column_is_right_by_default(layout: Layout, tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(detector(layout), path)
    fp32, fp16 = (emulator_of(path)[0].uniform(precision) for precision in (Precision.FP32, Precision.FP16))

    def scores_under(plan: PrecisionPlan) -> np.ndarray:
        found = emulated(path, plan, [{"image": image[None]} for image in images(16, seed=9)])
        return np.concatenate([scores(outputs, layout) for outputs in found])

    exact = scores_under(fp32)
    assert np.abs(scores_under(fp16) - exact).max() > 10 * LIMIT, "nothing is hidden here"
    given = {"data": {"image": images(16)}, "out": tmp_path / "run", "target": "jetson-orin-nano-8gb"}
    front = mptune.search(path, budget=30, **given)
    assert front.metric == "worst_part"
    assert np.abs(scores_under(front.chosen.plan) - exact).max() < LIMIT
