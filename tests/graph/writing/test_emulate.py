from __future__ import annotations

from pathlib import Path

import numpy as np

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import models
from tests.graph.helpers import feeds, relative_l2, run


def test_rounds_where_the_typed_model_on_the_cpu_does_not(tmp_path: Path) -> None:
    """1 + 2**-12 + 2**-12 + ...: in FP16 every addition rounds back to 1.

    The CPU provider computes the FP16-typed model in FP32 and drops the roundings between nodes.
    """
    sums = " ".join(f"a{i + 1} = Add({f'a{i}' if i else 'x'}, tiny)" for i in range(64))
    proto = models.text(f"(float[4] x) => (float[4] a64) {{ {sums} }}", models.constant("tiny", 2.0**-12))
    model = load_model(models.save(proto, tmp_path))
    grouped = GroupedModel(model, find_groups(model))
    plan, ones = grouped.uniform(Precision.FP16), {"x": np.ones(4, np.float32)}
    assert np.all(run(Emulator(grouped).write(plan, tmp_path / "e.onnx"), ones)["a64"] == 1)
    assert np.all(run(Rewriter(grouped).write(plan, tmp_path / "t.onnx"), ones)["a64"] == 1 + 64 * 2.0**-12)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


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
    h = rounded(rounded(n.astype(np.float32)) @ rounded(w["w1"]))
    r = np.maximum(rounded(h + rounded(w["b1"])), 0)
    s = r @ w["w2"] + feed["x"]
    y = np.exp(s - s.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    out = run(Emulator(grouped).write(plan, tmp_path / "e.onnx"), feed)["y"]
    exact = run(path, feed)["y"]
    assert relative_l2(out, y) < 0.05 * relative_l2(out, exact)
