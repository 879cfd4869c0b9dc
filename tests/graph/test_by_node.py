"""Plans by hand: names, globs and operators of nodes, carried out without splitting what is indivisible."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from mptune.errors import PlanError
from mptune.graph.groups import GroupedModel, NodesPlan, plan_of_nodes
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import models
from tests.graph.models import node, text, value, weight

FP16, FP32 = Precision.FP16, Precision.FP32


def planned(proto: onnx.ModelProto, folder: Path, **wanted: str) -> tuple[Model, NodesPlan, set[str]]:
    """The plan for ``wanted`` (key -> precision), and the nodes that it has in FP16."""
    model = load_model(models.save(proto, folder))
    result = plan_of_nodes(model, {key: Precision.named(p) for key, p in wanted.items()})
    precisions = Rewriter(GroupedModel(model, result.groups)).types.node_precisions(result.plan)
    return model, result, {name for name, precision in precisions.items() if precision is FP16}


def test_names_globs_and_operators(tmp_path: Path) -> None:
    _, result, fp16 = planned(models.mlp(), tmp_path, **{"/head/Softmax": "fp16", "*/norm/*": "fp16"})
    assert fp16 == {"/head/Softmax", "/block/norm/LayerNormalization"}
    assert result.warnings == ()
    _, _, fp16 = planned(models.mlp(), tmp_path, **{"op:Softmax": "fp16"})
    assert fp16 == {"/head/Softmax"}


def test_the_last_line_that_names_a_node_counts(tmp_path: Path) -> None:
    wanted = {"*": "fp16", "/block/*": "fp32", "/block/norm/LayerNormalization": "fp16"}
    assert planned(models.mlp(), tmp_path, **wanted)[2] == {"/block/norm/LayerNormalization", "/head/Softmax"}


def test_bias_and_activation_go_with_their_product(tmp_path: Path) -> None:
    _, result, fp16 = planned(models.mlp(), tmp_path, **{"op:MatMul": "fp16"})
    assert fp16 == {"/block/fc1/MatMul", "/block/fc1/Add", "/block/act/Relu", "/block/fc2/MatMul"}
    assert result.warnings == ()
    _, result, fp16 = planned(models.mlp(), tmp_path, **{"op:MatMul": "fp16", "op:Relu": "fp32"})
    assert fp16 == {"/block/fc2/MatMul"}
    assert result.warnings == (
        "block/fc1 (matmul) is indivisible, and the plan has 1 of its 3 nodes in FP16: it is FP32 as a whole",
    )


def test_a_pattern_that_would_be_split_is_fp32_and_named(tmp_path: Path) -> None:
    _, result, fp16 = planned(models.attention(mask=-1e4), tmp_path, **{"*": "fp16", "*/Softmax": "fp32"})
    assert "/attn/MatMul" not in fp16
    assert {"/attn/q/MatMul", "/mask/Mul"} <= fp16
    (warning,) = result.warnings
    assert "(attention)" in warning
    assert "4 of its 5" in warning
    _, result, fp16 = planned(models.decomposed_norm(), tmp_path, **{"op:Pow": "fp16"})
    assert fp16 == set()
    assert "(norm)" in result.warnings[0]
    assert planned(models.decomposed_norm(), tmp_path, **{"*": "fp16", "op:Pow": "fp32"})[2] == {
        "/fc1/MatMul",
        "/fc2/MatMul",
    }


def test_views_go_with_what_they_view(tmp_path: Path) -> None:
    nodes = "[product] a = MatMul(x, w) [turn] b = Transpose(a) [back] c = Transpose(b) y = Relu(c)"
    proto = text(f"(float[4,4] x) => (float[4,4] y) {{ {nodes} }}", weight("w", 4, 4))
    assert planned(proto, tmp_path, product="fp16")[2] == {"product", "turn", "back"}
    assert planned(proto, tmp_path, product="fp16", turn="fp32")[2] == {"product", "turn", "back"}
    _, result, fp16 = planned(proto, tmp_path, turn="fp16")
    assert (fp16, len(result.warnings)) == (set(), 1), "nor does a view take its input along"


def test_a_name_with_brackets_is_a_name_first(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], "a", "m[0]"), node("Relu", ["a"], "b", "m0"), node("Abs", ["b"], "y", "abs")]
    proto = models.model(nodes, [value("x", [4, 4])], [value("y", [4, 4])], [weight("w", 4, 4)])
    assert planned(proto, tmp_path, **{"m[0]": "fp16", "m0": "fp16"})[2] == {"m[0]", "m0"}


def test_what_names_nothing_is_an_error_with_a_guess(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'/head/Sofmax' names no node") as caught:
        planned(models.mlp(), tmp_path, **{"/head/Sofmax": "fp16"})
    assert "'/head/Softmax'" in caught.value.hint
    with pytest.raises(PlanError, match=r"op:Conv") as caught:
        planned(models.mlp(), tmp_path, **{"op:Conv": "fp16"})
    assert caught.value.hint


def test_what_cannot_be_fp16_is_told(tmp_path: Path) -> None:
    nodes = "a = MatMul(x, w) [odd] y = com.example.Mystery(a)"
    proto = text(f"(float[4,4] x) => (float[4,4] y) {{ {nodes} }}", weight("w", 4, 4))
    _, result, fp16 = planned(proto, tmp_path, odd="fp16")
    assert fp16 == set()
    assert "com.example" in result.warnings[0]
