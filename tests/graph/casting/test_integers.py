"""Casts from integers, and the model's own Casts that a plan makes needless at an output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import DEFAULT_PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.graph.helpers import run
from tests.graph.models import constant, model, node, save, value, weight
from tests.graph.verify import verify

INT64 = TensorProto.INT64
IDS = np.array([[1, 2049], [4097, 3]])


def _two_readers(tmp_path: Path) -> Path:
    """Ids that two products read, after a scaling each."""
    nodes = [
        node("Cast", ["ids"], "f", "cast", to=TensorProto.FLOAT),
        node("MatMul", ["f", "w1"], "y1", "one"),
        node("MatMul", ["f", "w2"], "y2", "two"),
    ]
    constants = [constant("w1", np.eye(2)), weight("w2", 2, 2)]
    outputs = [value("y1", [2, 2]), value("y2", [2, 2])]
    return save(model(nodes, [value("ids", [2, 2], INT64)], outputs, constants), tmp_path)


def test_a_lone_cast_from_integers_is_not_searched(tmp_path: Path) -> None:
    groups = find_groups(load_model(_two_readers(tmp_path)))
    (group,) = [g for g in groups if "cast" in g.nodes]
    assert group.nodes == ("cast",)
    assert "integers" in str(group.pinned)


@pytest.mark.parametrize("of_cast", DEFAULT_PRECISIONS)
def test_readers_in_fp32_get_exact_integers_under_any_plan(tmp_path: Path, of_cast: Precision) -> None:
    loaded = load_model(_two_readers(tmp_path))
    grouped = GroupedModel(loaded, find_groups(loaded))
    wanted = {"cast": of_cast, "one": Precision.FP32, "two": Precision.FP16}
    plan = PrecisionPlan(loaded.sha256, {g.id: wanted[g.nodes[0]] for g in grouped.groups})
    bank = WeightBank.write(loaded, tmp_path)
    rewriter = Rewriter(grouped, bank)
    typed = rewriter.write(plan, tmp_path / "typed.onnx")
    verify(rewriter, plan, typed)
    casts = [n for n in onnx.load(typed).graph.node if n.op_type == "Cast" and n.input[0] == "ids"]
    assert sorted(n.attribute[0].i for n in casts) == [TensorProto.FLOAT, TensorProto.FLOAT16]
    emulated = Emulator(grouped, bank).write(plan, tmp_path / "emulated.onnx")
    for path in (typed, emulated):
        assert np.array_equal(run(path, {"ids": IDS})["y1"], IDS.astype(np.float32)), path.name
    rounded = [run(path, {"ids": IDS})["y2"] for path in (typed, emulated)]
    assert np.allclose(rounded[0], rounded[1], rtol=2e-3)


def test_an_output_that_the_model_has_in_fp16_is_computed_as_it(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "h", "product"),
        node("Cast", ["h"], "y", "own", to=TensorProto.FLOAT16),
        node("Relu", ["h"], "z", "relu"),
    ]
    outputs = [value("y", [2, 4], TensorProto.FLOAT16), value("z", [2, 4])]
    path = save(model(nodes, [value("x", [2, 4])], outputs, [weight("w", 4, 4)]), tmp_path)
    loaded = load_model(path)
    grouped = GroupedModel(loaded, find_groups(loaded))
    rewriter = Rewriter(grouped, WeightBank.write(loaded, tmp_path))
    plan = grouped.uniform(Precision.FP16)
    out = rewriter.write(plan, tmp_path / "typed.onnx")
    verify(rewriter, plan, out)
    graph = onnx.load(out).graph
    assert not [n.name for n in graph.node if n.op_type == "Cast" and "y" in (*n.input, *n.output)]
    assert next(n for n in graph.node if n.name == "product").output == ["y"]
    x = np.ones((2, 4), np.float32)
    assert np.allclose(run(out, {"x": x})["y"], run(path, {"x": x})["y"], atol=1e-2)
