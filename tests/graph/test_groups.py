from __future__ import annotations

from pathlib import Path

import pytest

from mptune.errors import PlanError
from mptune.graph.groups import LayerGroup, find_groups
from mptune.graph.model import Model, load_model
from mptune.graph.op_rules import node_rule
from tests.graph import models


def load(proto: object, folder: Path) -> tuple[Model, tuple[LayerGroup, ...]]:
    model = load_model(models.save(proto, folder))  # type: ignore[arg-type]
    return model, find_groups(model)


@pytest.mark.parametrize("make", [models.mlp, models.cnn, models.attention, models.decomposed_norm])
def test_every_node_with_a_precision_is_in_exactly_one_group(make: object, tmp_path: Path) -> None:
    model, groups = load(make(), tmp_path)  # type: ignore[operator]
    grouped = [name for g in groups for name in g.nodes]
    assert len(grouped) == len(set(grouped))
    expected = {n.name for n in model.nodes if node_rule(model, n).inputs or node_rule(model, n).outputs}
    assert set(grouped) == expected
    assert [g.id for g in groups] == sorted(g.id for g in groups)


def test_bias_activation_and_residual_join_their_product(tmp_path: Path) -> None:
    _, groups = load(models.mlp(), tmp_path)
    assert [(g.name, g.kind, dict(g.ops)) for g in groups] == [
        ("block/norm", "norm", {"LayerNormalization": 1}),
        ("block/fc1", "matmul", {"MatMul": 1, "Add": 1, "Relu": 1}),
        ("block/fc2", "matmul", {"MatMul": 1, "Add": 1}),
        ("head", "softmax", {"Softmax": 1}),
    ]


def test_batch_norm_and_activation_join_their_convolution(tmp_path: Path) -> None:
    _, groups = load(models.cnn(), tmp_path)
    assert [g.kind for g in groups] == ["conv", "reduce", "matmul"]
    assert groups[0].nodes == ("/conv/Conv", "/bn/BatchNormalization", "/relu/Relu")


def test_an_attention_core_is_indivisible(tmp_path: Path) -> None:
    _, groups = load(models.attention(mask=-1e4), tmp_path)
    core = next(g for g in groups if g.kind == "attention")
    assert core.ops == {"MatMul": 2, "Mul": 1, "Add": 1, "Softmax": 1}
    assert sorted(g.kind for g in groups if g is not core) == ["elementwise", "matmul", "matmul", "matmul"]
    mask = next(g for g in groups if g.kind == "elementwise")
    assert mask.nodes == ("/mask/Cast", "/mask/Sub", "/mask/Mul"), "the mask may stay FP32 where the core is FP16"


@pytest.mark.parametrize("rms", [False, True])
def test_a_decomposed_norm_is_indivisible(rms: bool, tmp_path: Path) -> None:
    _, groups = load(models.decomposed_norm(rms=rms), tmp_path)
    assert [g.kind for g in groups] == ["matmul", "norm", "matmul"]
    assert all("/norm/" in name for name in groups[1].nodes)
    assert len(groups[1].nodes) == (6 if rms else 8)


def test_op_granularity_splits_everything_but_patterns(tmp_path: Path) -> None:
    model = load_model(models.save(models.mlp(), tmp_path))
    assert [len(g.nodes) for g in find_groups(model, "op")] == [1] * 7
    model = load_model(models.save(models.decomposed_norm(), tmp_path))
    assert sorted(len(g.nodes) for g in find_groups(model, "op")) == [1, 1, 8]


def test_is_the_same_for_the_same_model(tmp_path: Path) -> None:
    model, groups = load(models.attention(mask=-1e9), tmp_path)
    assert find_groups(load_model(model.path)) == groups


def test_refuses_an_unknown_granularity(tmp_path: Path) -> None:
    model, _ = load(models.mlp(), tmp_path)
    with pytest.raises(PlanError, match="granularity"):
        find_groups(model, "layer")  # type: ignore[arg-type]
