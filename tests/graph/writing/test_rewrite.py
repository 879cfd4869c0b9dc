from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.errors import PlanError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter, rewrite
from mptune.graph.writing.weights import WeightBank
from tests.graph import models
from tests.graph.helpers import check, feeds, half, plans, relative_l2, run
from tests.graph.verify import verify

FAMILIES = {
    "mlp": models.mlp,
    "mlp, opset 21": lambda: models.mlp(21),
    "cnn": models.cnn,
    "attention": models.attention,
    "attention with a mask": lambda: models.attention(-1e4),
    "decomposed LayerNorm": models.decomposed_norm,
    "decomposed RMSNorm": lambda: models.decomposed_norm(rms=True),
}


def rewriter(path: Path, *, bank: bool = True) -> tuple[Rewriter, tuple[PrecisionPlan, ...], Path]:
    model = load_model(path)
    groups = find_groups(model)
    folder = path.parent / "weights"
    writer = Rewriter(GroupedModel(model, groups), WeightBank.write(model, folder) if bank else None)
    return writer, tuple(plans(model, groups, 6)), folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.smoke
def test_any_plan_checks_runs_and_keeps_the_interface(family: str, tmp_path: Path) -> None:
    """And its emulation, of which the one in FP32 is exact."""
    path = models.save(FAMILIES[family](), tmp_path)
    writer, candidates, folder = rewriter(path)
    model = writer.types.model
    feed = feeds(model)
    reference = run(path, feed)
    groups = find_groups(model)
    emulator = Emulator(GroupedModel(model, groups))
    for plan in candidates:
        out = writer.write(plan, folder / "typed.onnx")
        verify(writer, plan, out)
        typed, contained = run(out, feed), run(writer.export(plan, tmp_path / "alone.onnx"), feed)
        for name, y in typed.items():
            assert relative_l2(y, reference[name]) < 2e-2, plan
            assert np.array_equal(y, contained[name]), "the bank and the export hold the same weights"
        out = emulator.write(plan, tmp_path / "emulated.onnx")
        check(out)
        for name, y in run(out, feed).items():
            error = relative_l2(y, reference[name])
            assert error < 2e-2
            assert (error > 0) == bool(plan.fp16_groups)
            if plan.precision[groups[-1].id] is Precision.FP16:
                assert np.array_equal(y, y.astype(np.float16)), "an FP16 output holds FP16 values"


def test_names_that_look_like_ours_are_left_alone(tmp_path: Path) -> None:
    graph = "(float[2,4] x) => (float[2,4] y) { x__fp16 = MatMul(x, w) y = MatMul(x__fp16, w) }"
    writer, candidates, folder = rewriter(models.save(models.text(graph, models.weight("w", 4, 4)), tmp_path))
    for plan in candidates:
        check(writer.write(plan, folder / "t.onnx"))


def test_refuses_another_models_plan_and_incomplete_plans(tmp_path: Path) -> None:
    writer, candidates, _ = rewriter(models.save(models.mlp(), tmp_path))
    types: ValueTypes = writer.types
    with pytest.raises(PlanError, match="another model"):
        types.resolve(PrecisionPlan("0" * 64, candidates[0].precision))
    with pytest.raises(PlanError, match="lacks"):
        types.resolve(PrecisionPlan(types.model.sha256, {"g000": Precision.FP16}))
    with pytest.raises(PlanError, match="names a group"):
        types.resolve(PrecisionPlan(types.model.sha256, {**candidates[0].precision, "g999": Precision.FP16}))


def test_rewrite_in_memory(tmp_path: Path) -> None:
    model = load_model(models.save(models.mlp(), tmp_path))
    groups = find_groups(model)
    proto = rewrite(model, PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16))
    onnx.checker.check_model(proto, full_check=True)
    assert {i.data_type for i in proto.graph.initializer} == {TensorProto.FLOAT16}


def test_equals_roundings_done_by_hand(tmp_path: Path) -> None:
    path = models.save(models.mlp(), tmp_path)
    model = load_model(path)
    grouped = GroupedModel(model, find_groups(model))
    fc1 = next(g for g in grouped.groups if g.name == "block/fc1")
    plan = grouped.uniform(Precision.FP32).replace({fc1.id: Precision.FP16})
    feed = feeds(model)
    w = {n: c.numpy() for n, c in model.initializers.items()}
    x = feed["x"].astype(np.float64)
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w["gamma"] + w["beta"]
    h = half(half(n.astype(np.float32)) @ half(w["w1"]))
    r = np.maximum(half(h + half(w["b1"])), 0)
    s = r @ w["w2"] + feed["x"]
    y = np.exp(s - s.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    out = run(Emulator(grouped).write(plan, tmp_path / "e.onnx"), feed)["y"]
    exact = run(path, feed)["y"]
    assert relative_l2(out, y) < 0.05 * relative_l2(out, exact)
