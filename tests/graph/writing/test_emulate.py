from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import models
from tests.graph.helpers import check, feeds, plans, relative_l2, run


def sum_model(terms: int = 64) -> object:
    """1 + 2**-12 + 2**-12 + ...: in FP16 every addition rounds back to 1."""
    nodes = [models.node("Add", [f"a{i}" if i else "x", "tiny"], f"a{i + 1}", f"add{i}") for i in range(terms)]
    return models.model(
        nodes, [models.value("x", [4])], [models.value(f"a{terms}", [4])], [models.constant("tiny", 2.0**-12)]
    )


def test_rounds_where_the_typed_model_on_the_cpu_does_not(tmp_path: Path) -> None:
    """The CPU provider computes the FP16-typed model in FP32 and drops the roundings between nodes."""
    path = models.save(sum_model(), tmp_path)  # type: ignore[arg-type]
    model = load_model(path)
    groups = find_groups(model)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    ones = {"x": np.ones(4, np.float32)}
    exact = 1 + 64 * 2.0**-12
    half = np.float16(1)
    for _ in range(64):
        half += np.float16(2.0**-12)
    emulated = run(Emulator(GroupedModel(model, groups)).write(plan, tmp_path / "e.onnx"), ones)["a64"]
    typed = run(Rewriter(GroupedModel(model, groups)).write(plan, tmp_path / "t.onnx"), ones)["a64"]
    assert np.all(emulated == np.float32(half))
    assert np.all(typed == np.float32(exact))
    assert half != exact


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def test_equals_roundings_done_by_hand(tmp_path: Path) -> None:
    path = models.save(models.mlp(), tmp_path)
    model = load_model(path)
    groups = find_groups(model)
    fc1 = next(g for g in groups if g.name == "block/fc1")
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP32).replace({fc1.id: Precision.FP16})
    feed = feeds(model)
    w = {n: c.numpy() for n, c in model.initializers.items()}
    x = feed["x"].astype(np.float64)
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w["gamma"] + w["beta"]
    h = rounded(rounded(n.astype(np.float32)) @ rounded(w["w1"]))
    r = np.maximum(rounded(h + rounded(w["b1"])), 0)
    s = r @ w["w2"] + feed["x"]
    y = np.exp(s - s.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    out = run(Emulator(GroupedModel(model, groups)).write(plan, tmp_path / "e.onnx"), feed)["y"]
    exact = run(path, feed)["y"]
    assert relative_l2(out, y) < 0.05 * relative_l2(out, exact)


@pytest.mark.parametrize("make", [models.mlp, models.cnn, models.attention, models.decomposed_norm])
def test_any_plan_checks_and_the_fp32_plan_is_exact(make: object, tmp_path: Path) -> None:
    path = models.save(make(), tmp_path)  # type: ignore[operator]
    model = load_model(path)
    groups = find_groups(model)
    emulator = Emulator(GroupedModel(model, groups))
    feed = feeds(model)
    reference = run(path, feed)
    for plan in plans(model, groups, 4):
        out = emulator.write(plan, tmp_path / "e.onnx")
        check(out)
        for name, y in run(out, feed).items():
            error = relative_l2(y, reference[name])
            assert error < 2e-2
            assert (error > 0) == bool(plan.fp16_groups)
            if plan.precision[groups[-1].id] is Precision.FP16:
                assert np.array_equal(y, rounded(y)), "an FP16 output holds FP16 values"


def test_overflow_becomes_infinite(tmp_path: Path) -> None:
    proto = models.product(np.eye(4) * 300)
    model = load_model(models.save(proto, tmp_path))
    groups = find_groups(model)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in groups], Precision.FP16)
    out = run(
        Emulator(GroupedModel(model, groups)).write(plan, tmp_path / "e.onnx"),
        {"x": np.array([[1, -300, 0, 2]], np.float32)},
    )
    assert out["y"].tolist() == [[300, -np.inf, 0, 600]]
