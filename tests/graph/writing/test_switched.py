"""One switched emulation gives what the emulation of each plan gives, to the last bit where nothing is fused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import feeds, plans, run
from tests.graph.test_corpus import CORPUS
from tests.graph.writing.test_saturation import grouped_block, uniform

SWITCHED = [p for p in CORPUS if p.stem != "fp16_island"]
"""Without that one: the CPU provider computes its own FP16 in FP32, so what is FP16 already is not rounded there."""


class Unfused:
    """A session without any optimisation, so that the same operators are computed one by one in both forms."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name for i in self._session.get_inputs()}

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [o.name for o in self._session.get_outputs()]
        wanted = {name: value for name, value in feed.items() if name in self.inputs}
        return dict(zip(names, self._session.run(names, wanted), strict=True))


class Both:
    """Both forms of one model's emulation."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        self.model = load_model(path)
        self.groups = find_groups(self.model)
        self.grouped = GroupedModel(self.model, self.groups)
        self.bank = WeightBank.write(self.model, folder, precisions=REDUCED)
        self.emulator = Emulator(self.grouped, self.bank)
        self.feed = feeds(self.model)
        self.rtol = 1e-6 if path.stem in ("lstm", "gru") else 0.0

    def expected(self, plan: PrecisionPlan) -> dict[str, np.ndarray]:
        return Unfused(self.emulator.write(plan, self.folder / "plan.onnx")).run(self.feed)

    def switches(self, plan: PrecisionPlan) -> dict[str, np.ndarray]:
        on = self.emulator.on(plan)
        return {s: np.array(s in on) for of in self.emulator.switches.values() for s in of.values()}


def assert_same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], rtol: float) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        # Recurrent operators pack constant weights, and sum in another order then.
        np.testing.assert_allclose(values, other[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize("path", SWITCHED, ids=lambda p: p.stem)
def test_one_model_serves_every_plan(path: Path, tmp_path: Path) -> None:
    both = Both(path, tmp_path)
    groups = [group.id for group in both.groups]
    session = Unfused(both.emulator.write_switched(tmp_path / "whole.onnx", groups, precisions=REDUCED))
    for plan in plans(both.model, both.groups, 3, precisions=(Precision.BF16, Precision.FP32, Precision.FP16)):
        assert_same(session.run({**both.feed, **both.switches(plan)}), both.expected(plan), both.rtol)


def test_overflow_becomes_infinite_and_does_no_harm_while_it_is_switched_off(tmp_path: Path) -> None:
    both = Both(models.save(models.product(np.eye(4) * 300), tmp_path), tmp_path / "bank")
    (group,) = both.groups
    session = Unfused(both.emulator.write_switched(tmp_path / "bank" / "whole.onnx", [group.id]))
    both.feed = {"x": np.array([[1, -300, 0, 2]], np.float32)}
    (switch,), plan = both.emulator.switches[Precision.FP16].values(), both.grouped.uniform(Precision.FP16)
    assert session.run({**both.feed, switch: np.array(False)})["y"].tolist() == [[300, -90000, 0, 600]]
    for values in (
        session.run({**both.feed, switch: np.array(True)}),
        both.expected(plan),
    ):
        assert values["y"].tolist() == [[300, -np.inf, 0, 600]]


def test_only_chosen_groups_have_a_switch(tmp_path: Path) -> None:
    both = Both(models.save(models.mlp(), tmp_path), tmp_path / "bank")
    chosen = [both.groups[1].id]
    session = Unfused(both.emulator.write_switched(tmp_path / "bank" / "few.onnx", chosen))
    assert session.inputs == {"x", both.emulator.switches[Precision.FP16][chosen[0]]}


def test_nodes_that_are_named_like_their_results(tmp_path: Path) -> None:
    """ONNX Runtime refuses a model with two nodes of one name."""
    graph = "(float[4,4] x) => (float[4,4] y) { [scores] scores = MatMul(x, w) [y] y = Tanh(scores) }"
    both = Both(models.save(models.text(graph, models.weight("w", 4, 4)), tmp_path), tmp_path)
    path = both.emulator.write_switched(tmp_path / "e.onnx", [group.id for group in both.groups])
    names = [n.name for n in onnx.load(path, load_external_data=False).graph.node]
    assert len({*names}) == len(names)
    ort.InferenceSession(path)


@pytest.mark.parametrize("maker", REDUCED)
@pytest.mark.parametrize("reader", REDUCED)
def test_only_masks_in_fp32_are_held_at_their_casts(reader: Precision, maker: Precision, tmp_path: Path) -> None:
    """One emulation of all plans and the emulation of each agree on rows masked whole, whatever computes the mask."""
    grouped, feed, _ = grouped_block("causal and padding", tmp_path)
    feed = {**feed, "mask": np.array([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]], np.int64)}
    (attention,) = [g.id for g in grouped.groups if "softmax" in g.nodes]
    bank = WeightBank.write(grouped.model, tmp_path, precisions=REDUCED)
    emulator = Emulator(grouped, bank)
    ids = [group.id for group in grouped.groups]
    path = emulator.write_switched(tmp_path / "switched.onnx", ids, precisions=REDUCED)
    known = {i.name for i in onnx.load(path, load_external_data=False).graph.input}
    for of_mask in (maker, Precision.FP32):
        plan = uniform(grouped, of_mask).replace({attention: reader})
        expected = run(emulator.write(plan, tmp_path / "one.onnx"), feed)["y"]
        on = {s: np.array(s in emulator.on(plan)) for of in emulator.switches.values() for s in of.values()}
        y = run(path, {name: value for name, value in {**feed, **on}.items() if name in known})["y"]
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
