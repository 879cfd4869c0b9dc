"""What a detector's boxes hide of its scores: the default search keeps the scores right, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import mptune
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.weights import WeightBank
from tests.zoo.detector import LAYOUTS, Layout, detector, images, scores

LIMIT = 0.005
"""Largest absolute error of the score column."""


class Emulated:
    """The detector under plans, as FP16 rounds it."""

    def __init__(self, path: Path, folder: Path, layout: Layout) -> None:
        self._model = load_model(path)
        self.groups = GroupedModel(self._model, find_groups(self._model))
        self._emulator = Emulator(self.groups, WeightBank.write(self._model, folder / "bank"))
        self._folder, self._layout = folder / "bank", layout

    def scores(self, plan: PrecisionPlan) -> np.ndarray:
        path = self._emulator.write(plan, self._folder / "emulated.onnx")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        found = [dict(zip(names, session.run(None, {"image": x[None]}), strict=True)) for x in images(16, seed=9)]
        return np.concatenate([scores(outputs, self._layout) for outputs in found])

    def score_error(self, plan: PrecisionPlan) -> float:
        fp32 = self.groups.uniform(Precision.FP32)
        return float(np.abs(self.scores(plan) - self.scores(fp32)).max())


@pytest.mark.parametrize(
    "layout", [*LAYOUTS[:2], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[2:])]
)
def test_the_score_column_is_right_by_default(layout: Layout, tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(detector(layout), path)
    np.savez(tmp_path / "data.npz", image=images(16))
    emulated = Emulated(path, tmp_path, layout)
    assert emulated.score_error(emulated.groups.uniform(Precision.FP16)) > 10 * LIMIT, "nothing is hidden here"
    front = mptune.search(
        path, data=tmp_path / "data.npz", out=tmp_path / "run", budget=30, target="jetson-orin-nano-8gb"
    )
    assert front.metric == "worst_part"
    assert front.chosen is not None
    assert front.chosen.plan != emulated.groups.uniform(Precision.FP16)
    assert emulated.score_error(front.chosen.plan) < LIMIT
