"""The models of the corpus, and what torch's two exporters write at opsets 13 to 21."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph.hazards.observed import ranges_on
from tests.graph.helpers import feeds, run
from tests.graph.verify import same_graph

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.onnx"))
EXPORTED = sorted((Path(__file__).parent / "exported").glob("*.onnx"))
"""A CNN and a transformer."""
DISCONTINUOUS = frozenset({"detector", "detector_topk", "qdq"})
"""Which boxes survive, and which integer a value becomes, may turn on one rounding."""
NOT_IN_TENSORRT_RTX = {
    "custom_domain": "Plugin not found",
    "detector": "NonMaxSuppression",
    "sequences": "SplitToSequence",
}
"""Refused in FP32 already, with these words in the message."""


def feed_of(path: Path, model: Model) -> dict[str, np.ndarray]:
    if path in CORPUS:
        feed = feeds(model)
        if "keep" in feed:
            feed["keep"][..., 0] = 1  # a row that is masked everywhere is NaN in FP16: a hazard of its own
        return feed
    rng = np.random.default_rng(1)
    given = {"image": rng.standard_normal((2, 3, 16, 16), np.float32), "tokens": rng.integers(0, 50, (2, 6))}
    given["memory"] = rng.standard_normal((2, 5, 16), np.float32)
    return {info.name: given[info.name] for info in model.inputs}


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_the_fp32_plan_is_the_model_and_every_value_is_observed(path: Path, tmp_path: Path) -> None:
    model = load_model(path)
    groups = find_groups(model)
    fp32 = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP32)
    out = Rewriter(GroupedModel(model, groups)).export(fp32, tmp_path / "fp32.onnx")
    feed = feeds(model)
    reference = run(path, feed)
    for name, y in run(out, feed).items():
        assert np.array_equal(y, reference[name])
    if path.stem not in ("local_functions", "external_data"):
        assert same_graph(onnx.load(out).graph, onnx.load(path).graph)
    ranges = ranges_on(model, [feed], tmp_path, WeightBank.write(model, tmp_path))
    assert all(seen.lowest <= seen.highest for seen in ranges.values())
