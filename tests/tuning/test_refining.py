"""Groups refined by measurement: the nodes that make a group's error are parted from what FP16 speeds up."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
from mptune.data.archive import save_samples
from mptune.engines.context import RunContext
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.groups import GroupedModel, find_groups, set_apart
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.hazards.hazard import ObservedValues
from mptune.graph.loading.model import load_model
from mptune.settings import SearchSettings
from mptune.targets.target import load_target
from mptune.tuning.refining import RefinedGroup, refine
from tests.graph import models
from tests.graph.models import constant, text

WIDTH, ROWS = 256, 16
RNG = np.random.default_rng(0)
DATA = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)


def network(chain: str, **constants: float) -> onnx.ModelProto:
    """A product, what follows it in its group, and another product; ``chain`` computes ``t`` of ``a``."""
    weights = [constant(n, RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16) for n in ("w", "v")]
    shapes = f"(float[batch,{WIDTH}] x) => (float[batch,{WIDTH}] y)"
    graph = f"{shapes} {{ [first] a = MatMul(x, w) {chain} y = MatMul(t, v) }}"
    return text(graph, *weights, *(constant(name, value) for name, value in constants.items()))


BEYOND = network("[enlarge] b = Mul(a, scale) [square] c = Mul(b, b) [root] t = Sqrt(c)", scale=300.0)
CHAIN = "[bend] s = Tanh(a) [raise] b = Add(s, level) [lower] t = Sub(b, level)"
COARSE = network(CHAIN, level=3000.0)
TURNED = network("[angle] b = Mul(x, rate) [turn] s = Sin(b) t = Mul(a, s)", rate=4000.0)


def refined(proto: onnx.ModelProto, folder: Path, **settings: object) -> tuple[GroupedModel, tuple[RefinedGroup, ...]]:
    """The groups as a search for an Orin Nano has them, and those that were parted."""
    model = load_model(models.save(proto, folder))
    grouped = GroupedModel(model, find_groups(model))
    context = RunContext.in_folder(grouped, folder, SearchSettings(**settings))
    save_samples(context.samples("search"), [{"x": DATA}] * 2)
    with Toolchain(None, load_target("jetson-orin-nano-8gb"), context) as toolchain:
        toolchain.reference("search")
        hazards = find_hazards(grouped, ObservedValues(toolchain.observe()))
        parted = refine(toolchain, grouped, hazards, context.settings, lambda text: None)
    nodes = [name for group in parted for name in group.nodes]
    return GroupedModel(model, set_apart(model, grouped.groups, nodes)), parted


def test_values_beyond_fp16_leave_the_product_free(tmp_path: Path) -> None:
    grouped, (parted,) = refined(BEYOND, tmp_path)
    assert parted.nodes == ("square", "root")
    assert parted.error == math.inf
    assert 0.0 < parted.rest_error < 5e-3
    assert grouped.owners["square"] == grouped.owners["root"] == "g000-apart"
    assert grouped.owners["first"] == grouped.owners["enlarge"] == "g000"
    hazards = find_hazards(grouped, ObservedValues())
    assert not pinned_by_hazards(hazards), "values were not observed here"


def test_an_error_that_one_part_makes_is_parted(tmp_path: Path) -> None:
    grouped, (parted,) = refined(COARSE, tmp_path)
    assert set(parted.nodes) <= {"raise", "lower"}
    assert "raise" in parted.nodes
    assert parted.error > 0.1 > 20 * parted.rest_error
    assert [group.name for group in grouped.groups][1] == "raise"
    assert "g000 is split: in FP16 its error is " in parted.text("g000")


def test_large_angles_leave_the_product_free(tmp_path: Path) -> None:
    grouped, (parted,) = refined(TURNED, tmp_path)
    assert "turn" in parted.nodes
    assert "first" in {name for group in grouped.groups if group.id == "g000" for name in group.nodes}
    assert math.isfinite(parted.error)


@pytest.mark.parametrize(
    ("proto", "settings"),
    [
        (network(CHAIN, level=1.0), {}),
        (COARSE, {"max_error": 10.0}),
        (COARSE, {"knee": True}),
        (network("[large] b = Mul(a, scale) t = Relu(b)", scale=1e5), {}),
    ],
    ids=["small error", "within the limit", "no limit", "the product feeds it"],
)
def test_others_stay_whole(proto: onnx.ModelProto, settings: dict[str, object], tmp_path: Path) -> None:
    _, parted = refined(proto, tmp_path, **settings)
    assert parted == () or "first" not in parted[0].nodes


def test_the_node_that_makes_a_groups_error_is_named(tmp_path: Path) -> None:
    path = models.save(network(CHAIN, level=5.0), tmp_path)  # too small an error for the group to be parted
    front = mptune.search(path, data={"x": DATA}, out=tmp_path / "run", target="jetson-orin-nano-8gb", budget=4)
    assert [group.group for group in front.explanation.groups if group.group.endswith("apart")] == []
    (worth,) = (worth for worth in front.explanation.groups if worth.group == "g000")
    share = re.fullmatch(r"(?:raise|lower) makes (\d+) % of it", worth.culprit or "")
    assert share
    assert int(share[1]) > 50
    fp32 = front.explanation.fp32_groups(front.fp32.plan.fingerprint)
    assert any(f"cancellation: {worth.one_group_error:.1e} alone, {worth.culprit}" in kept.because for kept in fp32)
    named = {finding.code: finding.where.nodes for finding in front.findings}
    assert named["cancellation"] == ("lower",), "inspect finds no more than a loss of a factor of ten there"
    assert "cancellation" not in {finding.code for finding in mptune.inspect(path, data={"x": DATA}).findings}


@pytest.mark.slow
def test_a_search_of_a_parted_group_is_resumed_picked_and_applied(tmp_path: Path) -> None:
    path = models.save(BEYOND, tmp_path)
    given = {"data": {"x": DATA}, "out": tmp_path / "run", "target": "rtx-4090", "engine": "onnxruntime"}
    first, again = (mptune.search(path, budget=budget, **given) for budget in (3, 4))
    assert (first.evaluations, again.evaluations) == (3, 4)
    fp16 = again.fp16
    assert fp16 is not None
    assert fp16.plan.precision == {"g000": "fp16", "g000-apart": "fp32", "g001": "fp16"}
    mptune.pick(tmp_path / "run", plan=fp16.plan.fingerprint)
    chosen = tmp_path / "run" / "chosen"
    mptune.apply(path, chosen / "plan.json", tmp_path / "again.onnx")
    written, applied = (onnx.load(each).graph for each in (chosen / "model.onnx", tmp_path / "again.onnx"))
    assert [n.name for n in written.node] == [n.name for n in applied.node]
