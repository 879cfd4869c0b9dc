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
from tests.graph.models import text, weight

FP16, FP32 = Precision.FP16, Precision.FP32


def planned(proto: onnx.ModelProto, folder: Path, **wanted: str) -> tuple[Model, NodesPlan, set[str]]:
    """The plan for ``wanted`` (key -> precision), and the nodes that it has in FP16."""
    model = load_model(models.save(proto, folder))
    result = plan_of_nodes(model, {key: Precision.named(p) for key, p in wanted.items()})
    precisions = Rewriter(GroupedModel(model, result.groups)).types.node_precisions(result.plan)
    return model, result, {name for name, precision in precisions.items() if precision is FP16}


SPLIT = "block/fc1 (matmul) is indivisible, and the plan has 1 of its 3 nodes in FP16: it is FP32 as a whole"
FC2 = "/block/fc2/MatMul"


@pytest.mark.parametrize(
    ("wanted", "expected", "warnings"),
    [
        ({"/head/Softmax": "fp16", "*/norm/*": "fp16"}, {"/head/Softmax", "/block/norm/LayerNormalization"}, ()),
        ({"op:Softmax": "fp16"}, {"/head/Softmax"}, ()),
        ({"*": "fp16", "/block/*": "fp32", FC2: "fp16"}, {FC2, "/head/Softmax"}, ()),  # the last one counts
        ({"op:MatMul": "fp16"}, {"/block/fc1/MatMul", "/block/fc1/Add", "/block/act/Relu", FC2}, ()),
        ({"op:MatMul": "fp16", "op:Relu": "fp32"}, {FC2}, (SPLIT,)),
    ],
)
def test_names_globs_and_operators(
    wanted: dict[str, str], expected: set[str], warnings: tuple[str, ...], tmp_path: Path
) -> None:
    _, result, fp16 = planned(models.mlp(), tmp_path, **wanted)
    assert (fp16, result.warnings) == (expected, warnings)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"m[0]": "fp16"}, {"m[0]", "turn", "back"}),  # a name with brackets is a name first
        ({"m[0]": "fp16", "turn": "fp32"}, {"m[0]", "turn", "back"}),
        ({"turn": "fp16"}, set()),
    ],
)
def test_views_go_with_what_they_view(wanted: dict[str, str], expected: set[str], tmp_path: Path) -> None:
    nodes = "[product] a = MatMul(x, w) [turn] b = Transpose(a) [back] c = Transpose(b) y = Relu(c)"
    proto = text(f"(float[4,4] x) => (float[4,4] y) {{ {nodes} }}", weight("w", 4, 4))
    proto.graph.node[0].name = "m[0]"
    _, result, fp16 = planned(proto, tmp_path, **wanted)
    assert (fp16, len(result.warnings)) == (expected, not expected), "nor does a view take its input along"


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
