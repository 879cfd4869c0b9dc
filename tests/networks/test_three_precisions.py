"""Plans of FP32, FP16 and BF16 of whole networks, as they are and raised to opset 22; the corpus's: tests/graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from mptune.errors import ModelError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph.helpers import plans, run
from tests.graph.test_three_precisions import ALL, OPSETS, computes_the_same, without_hazards
from tests.graph.verify import verify
from tests.networks.networks import filled, samples
from tests.networks.test_networks import STEMS

pytestmark = pytest.mark.usefixtures("opened_here")

PLANS, RUN_EVERY = 100, 10
"""Random plans of each network, and every which of them is run and held against its emulation: that takes longest."""

DISCONTINUOUS = ("retinanet", "yolo", "two_stage")
"""Networks that choose among candidates: a rounding changes which."""


def runs(typed: Path, feed: dict[str, np.ndarray]) -> bool:
    """Whether ONNX Runtime's CPU provider has the kernels; any other refusal fails."""
    try:
        run(typed, feed)
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("stem", STEMS)
def test_a_hundred_plans_are(stem: str, opset: int | None, tmp_path: Path) -> None:
    """Valid, with the same interface and the fewest Casts; what runs computes what its emulation does."""
    path = filled(stem, tmp_path)
    try:
        model = load_model(path, opset=opset)
    except ModelError as error:  # ONNX's converter knows not every operator
        if opset is None:
            raise
        pytest.skip(error.message)
    grouped = GroupedModel(model, find_groups(model))
    bank = WeightBank.write(model, tmp_path, precisions=REDUCED)
    hazards = find_hazards(grouped)
    rewriter, emulator, feed = Rewriter(grouped, bank), Emulator(grouped, bank), samples(model, 1)[0]
    exact = rewriter.write(grouped.uniform(Precision.FP32), tmp_path / "exact.onnx")
    can_run = runs(exact, feed)  # opset 22's RoiAlign has no kernel on a CPU, in FP32 either
    for number, plan in enumerate(plans(model, grouped.groups, PLANS, precisions=ALL)):
        typed = rewriter.write(plan, tmp_path / "typed.onnx")
        verify(rewriter, plan, typed)
        if can_run and number % RUN_EVERY == 0:
            safe = without_hazards(plan, hazards)
            emulated = run(emulator.write(safe, tmp_path / "emulated.onnx"), feed)
            typed = rewriter.write(safe, typed)
            runs(typed, feed)
            computes_the_same(typed, emulated, feed, tmp_path, discontinuous=stem.startswith(DISCONTINUOUS))
