"""Groups refined by measurement: the nodes that make a group's error are parted from what FP16 speeds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_split, pinned_by_hazards
from mptune.graph.loading.model import load_model
from tests.graph import models
from tests.graph.hazards.observed import magnitudes_of
from tests.graph.models import constant, text

WIDTH = 64


def network(scale: float) -> onnx.ModelProto:
    """A product, whose result is enlarged, passed through a Tanh, and read by another product."""
    rng = np.random.default_rng(0)
    weights = [constant(n, rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8) for n in ("w", "v")]
    nodes = "[first] a = MatMul(x, w) [enlarge] b = Mul(a, scale) [square] c = Mul(b, b) [tanh] t = Tanh(c)"
    graph = f"(float[batch,{WIDTH}] x) => (float[batch,{WIDTH}] y) {{ {nodes} y = MatMul(t, v) }}"
    return text(graph, *weights, constant("scale", scale))


def split(scale: float, ranges: dict[str, float], folder: Path) -> tuple[GroupedModel, dict[str, str]]:
    model = load_model(models.save(network(scale), folder))
    grouped, hazards = find_split(GroupedModel(model, find_groups(model)), magnitudes_of(ranges))
    return grouped, pinned_by_hazards(hazards)


def test_what_is_left_of_the_group_is_free(tmp_path: Path) -> None:
    grouped, pinned = split(100.0, {"a": 8.0, "b": 800.0, "c": 640_000.0, "t": 1.0}, tmp_path)
    owners = grouped.owners
    assert owners["square"] == owners["tanh"] == "g000-fp32"
    assert owners["first"] == owners["enlarge"] == "g000"
    assert [group.id for group in grouped.groups if group.pinned] == ["g000-fp32"]
    assert set(pinned) == {"g000-fp32"}


def test_a_product_whose_own_result_is_beyond_stays_whole(tmp_path: Path) -> None:
    grouped, pinned = split(1.0, {"a": 70_000.0, "b": 70_000.0, "c": 1e9, "t": 1.0}, tmp_path)
    assert [group.id for group in grouped.groups] == ["g000", "g001"]
    assert set(pinned) == {"g000"}


@pytest.mark.slow
def test_a_search_of_a_split_group_is_resumed_picked_and_applied(tmp_path: Path) -> None:
    path = models.save(network(100.0), tmp_path)
    data = {"x": np.random.default_rng(1).standard_normal((16, WIDTH)).astype(np.float32)}
    given = {"data": data, "out": tmp_path / "run", "target": "rtx-4090", "engine": "onnxruntime"}
    first, again = (mptune.search(path, budget=budget, **given) for budget in (3, 4))  # type: ignore[arg-type]
    assert (first.evaluations, again.evaluations) == (3, 4)
    fp16 = again.fp16
    assert fp16 is not None
    assert fp16.plan.precision == {"g000": "fp16", "g000-fp32": "fp32", "g001": "fp16"}
    mptune.pick(tmp_path / "run", plan=fp16.plan.fingerprint)
    chosen = tmp_path / "run" / "chosen"
    mptune.apply(path, chosen / "plan.json", tmp_path / "again.onnx")
    written, applied = (onnx.load(each).graph for each in (chosen / "model.onnx", tmp_path / "again.onnx"))
    assert [n.name for n in written.node] == [n.name for n in applied.node]
