"""One switched emulation gives what the emulation of each plan gives, to the last bit where nothing is fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.variants import write_with_outputs
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import feeds, plans, run
from tests.graph.test_corpus import CORPUS
from tests.graph.writing.test_saturation import grouped_block, uniform

SWITCHED = [p for p in CORPUS if p.stem != "fp16_island"]
"""Without that one: the CPU provider computes its own FP16 in FP32, so what is FP16 already is not rounded there."""


def unfused(path: Path) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """A session without any optimisation, so that the same operators are computed one by one in both forms."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names, given = [o.name for o in session.get_outputs()], {i.name for i in session.get_inputs()}
    return lambda feed: dict(zip(names, session.run(names, {n: v for n, v in feed.items() if n in given}), strict=True))


class Both:
    """Both forms of one model's emulation."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder, self.model = folder, load_model(path)
        self.grouped = GroupedModel(self.model, find_groups(self.model))
        self.groups = [group.id for group in self.grouped.groups]
        self.emulator = Emulator(self.grouped, WeightBank.write(self.model, folder, precisions=REDUCED))
        self.feed = feeds(self.model)

    def expected(self, plan: PrecisionPlan) -> dict[str, np.ndarray]:
        return unfused(self.emulator.write(plan, self.folder / "plan.onnx"))(self.feed)

    def switched_feed(self, plan: PrecisionPlan) -> dict[str, np.ndarray]:
        on = self.emulator.on(plan)
        return self.feed | {s: np.array(s in on) for of in self.emulator.switches.values() for s in of.values()}


@pytest.mark.parametrize("path", SWITCHED, ids=lambda p: p.stem)
def test_one_model_serves_every_plan(path: Path, tmp_path: Path) -> None:
    both = Both(path, tmp_path)
    session = unfused(both.emulator.write_switched(tmp_path / "whole.onnx", both.groups, precisions=REDUCED))
    rtol = 1e-6 if path.stem in ("lstm", "gru") else 0.0  # which pack constant weights, and sum in another order then
    for plan in plans(both.model, both.grouped.groups, 3, precisions=(Precision.BF16, Precision.FP32, Precision.FP16)):
        values, expected = session(both.switched_feed(plan)), both.expected(plan)
        assert values.keys() == expected.keys()
        for name in values:
            np.testing.assert_allclose(values[name], expected[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize("path", SWITCHED, ids=lambda p: p.stem)
def test_a_session_of_a_stretch_runs_what_the_stretch_changes_and_gives_the_same(path: Path, tmp_path: Path) -> None:
    both = Both(path, tmp_path)
    stretch = both.groups[len(both.groups) // 2 :]
    given, outputs = both.emulator.cut(stretch)
    assert outputs, "the last groups make no output"
    whole, cut, before = (tmp_path / f"{name}.onnx" for name in ("whole", "cut", "before"))
    session = unfused(both.emulator.write_switched(whole, stretch))
    of_stretch = unfused(both.emulator.write_switched(cut, stretch, cut=(given, outputs)))
    assert len(onnx.load(cut, load_external_data=False).graph.node) <= len(onnx.load(whole).graph.node)
    write_with_outputs(both.model, None, before, given)
    values = unfused(before)(both.feed) if given else {}
    fp32 = both.grouped.uniform(Precision.FP32)
    for on in (stretch, stretch[:1], stretch[-1:]):
        feed = both.switched_feed(fp32.replace(dict.fromkeys(on, Precision.FP16)))
        expected, found = session(feed), of_stretch({**feed, **values})
        assert list(found) == [name for name in expected if name in outputs]
        for name in expected:
            other = found[name] if name in found else session(both.switched_feed(fp32))[name]
            np.testing.assert_array_equal(other, expected[name], err_msg=name)


def test_overflow_becomes_infinite_and_does_no_harm_while_it_is_switched_off(tmp_path: Path) -> None:
    both = Both(models.save(models.product(np.eye(4) * 300), tmp_path), tmp_path / "bank")
    session = unfused(both.emulator.write_switched(tmp_path / "bank" / "whole.onnx", both.groups))
    both.feed = {"x": np.array([[1, -300, 0, 2]], np.float32)}
    fp32, fp16 = both.grouped.uniform(Precision.FP32), both.grouped.uniform(Precision.FP16)
    assert session(both.switched_feed(fp32))["y"].tolist() == [[300, -90000, 0, 600]]
    for values in (session(both.switched_feed(fp16)), both.expected(fp16)):
        assert values["y"].tolist() == [[300, -np.inf, 0, 600]]


def test_only_chosen_groups_have_a_switch(tmp_path: Path) -> None:
    both = Both(models.save(models.mlp(), tmp_path), tmp_path / "bank")
    path = both.emulator.write_switched(tmp_path / "bank" / "few.onnx", both.groups[1:2])
    given = {value.name for value in onnx.load(path, load_external_data=False).graph.input}
    assert given == {"x", both.emulator.switches[Precision.FP16][both.groups[1]]}


def test_nodes_that_are_named_like_their_results(tmp_path: Path) -> None:
    """ONNX Runtime refuses a model with two nodes of one name."""
    graph = "(float[4,4] x) => (float[4,4] y) { [scores] scores = MatMul(x, w) [y] y = Tanh(scores) }"
    both = Both(models.save(models.text(graph, models.weight("w", 4, 4)), tmp_path), tmp_path)
    path = both.emulator.write_switched(tmp_path / "e.onnx", both.groups)
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
