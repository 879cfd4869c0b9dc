from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mptune.errors import PlanError
from mptune.graph.facts import node_rule
from mptune.graph.groups import FOLDED, GroupedModel, LayerGroup, find_fitting_groups, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.loading.model import Model, load_model
from mptune.graph.patterns import find_patterns
from tests.graph import models
from tests.graph.hazards.observed import magnitudes_of
from tests.graph.models import constant, node, text, value, weight

HERE = Path(__file__).parent
FILES = [*sorted((HERE / "exported").glob("*.onnx")), *sorted((HERE / "corpus").glob("*.onnx"))]
TRANSFORMER = HERE / "exported" / "transformer_torchscript_17.onnx"
GRANULARITIES = ("op", "fusion", "block")


def load(proto: object, folder: Path) -> tuple[Model, tuple[LayerGroup, ...]]:
    model = load_model(models.save(proto, folder))  # type: ignore[arg-type]
    return model, find_groups(model)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.smoke
def test_every_node_is_in_one_group_and_coarser_groups_are_made_of_finer_ones(path: Path) -> None:
    model = load_model(path)
    expected = {n.name for n in model.nodes if node_rule(model, n).inputs or node_rule(model, n).outputs}
    fine = [{model.nodes[k].name for k in pattern.nodes} & expected for pattern in find_patterns(model)]
    for granularity in GRANULARITIES:
        groups = find_groups(model, granularity)  # type: ignore[arg-type]
        assert sorted(name for g in groups for name in g.nodes) == sorted(expected)
        assert [g.id for g in groups] == [f"g{k:03d}" for k in range(len(groups))]
        assert len({g.name for g in groups}) == len(groups)
        home = {name: k for k, g in enumerate(groups) for name in g.nodes}
        assert all(len({home[name] for name in nodes}) <= 1 for nodes in fine)
        fine = [set(g.nodes) for g in groups]


def test_bias_activation_batch_norm_and_residual_join_their_layer(tmp_path: Path) -> None:
    _, groups = load(models.mlp(), tmp_path)
    assert [(g.name, g.kind, dict(g.ops)) for g in groups] == [
        ("block/norm", "norm", {"LayerNormalization": 1}),
        ("block/fc1", "matmul", {"MatMul": 1, "Add": 1, "Relu": 1}),
        ("block/fc2", "matmul", {"MatMul": 1, "Add": 1}),
        ("head", "softmax", {"Softmax": 1}),
    ]
    _, groups = load(models.cnn(), tmp_path)
    assert [g.kind for g in groups] == ["conv", "reduce", "matmul"]
    assert groups[0].nodes == ("/conv/Conv", "/bn/BatchNormalization", "/relu/Relu")


def test_blocks_are_modules_and_repeat() -> None:
    blocks = find_groups(load_model(TRANSFORMER), "block")
    layers = [block for block in blocks if block.kind == "block"]
    assert [block.name for block in layers] == ["encoder/layers.0", "encoder/layers.1", "cross"]
    assert [block.name for block in blocks if block.kind in ("norm", "matmul")] == ["encoder/norm", "head"]
    assert layers[0].pattern == layers[1].pattern != layers[2].pattern


def test_a_repeat_is_a_repeat_with_other_weights_only(tmp_path: Path) -> None:
    nodes = "h = MatMul(x, a) i = MatMul(h, b) j = MatMul(i, c) k = Gemm(j, a) y = Gemm<transB = 1>(k, a)"
    for inner in (4, 6):
        weights = [weight("a", 4, 4), weight("b", 4, inner), weight("c", inner, 4)]
        _, groups = load(text(f"(float[2,4] x) => (float[2,4] y) {{ {nodes} }}", *weights), tmp_path)
        one, two, three, four, five = (g.pattern for g in groups)
        assert len({one, four, five}) == 3
        assert len({one, two, three}) == (1 if inner == 4 else 3), "3 where the weights are of another shape"


def test_an_identity_before_a_shared_weight_is_no_group_and_no_difference(tmp_path: Path) -> None:
    nodes = [node("Identity", ["w"], "shared", "/Identity")]
    for k in range(3):
        source = f"x{k}" if k else "x"
        nodes += [
            node("MatMul", [source, "shared" if k else "w"], f"m{k}", f"/layers.{k}/fc/MatMul"),
            node("Relu", [f"m{k}"], f"x{k + 1}", f"/layers.{k}/Relu"),
        ]
    _, groups = load(models.model(nodes, [value("x", [2, 4])], [value("x3", None)], [weight("w", 4, 4)]), tmp_path)
    assert [g.name for g in groups] == [f"layers.{k}/fc" for k in range(3)]
    assert len({g.pattern for g in groups}) == 1


def test_what_is_computed_from_constants_alone_is_not_searched(tmp_path: Path) -> None:
    """A causal mask that two attention cores share: folded before the model runs."""
    cores = "".join(
        f"q{k} = MatMul(x, w{k}) t{k} = Transpose<perm = [1, 0]>(x) s{k} = MatMul(q{k}, t{k})"
        f" m{k} = Add(s{k}, mask) p{k} = Softmax(m{k}) y{k} = MatMul(p{k}, x) "
        for k in "ab"
    )
    constants = [weight("wa", 4, 4), weight("wb", 4, 4), constant("low", -1e4), weight("below", 2, 2)]
    graph = f"(float[2,4] x) => (float[2,4] ya, float[2,4] yb) {{ [mask] mask = Mul(below, low) {cores} }}"
    _, groups = load(text(graph, *constants), tmp_path)
    assert [(g.name, g.pinned) for g in groups if g.pinned] == [("mask", FOLDED)]


@pytest.mark.parametrize("rows", [2, "rows"])
def test_what_is_computed_from_fixed_shapes_alone_is_not_searched(rows: int | str, tmp_path: Path) -> None:
    """A window mask, as exporters write it: from the shape of the input, which only a fixed shape makes a constant."""
    graph = f"""(float[{rows},4] x) => (float[{rows},4] z) <int64[1,2] place = {{0, 1}}, float[1] low = {{-10000}}> {{
        shape = Shape(x) [mask] zeros = ConstantOfShape(shape) scattered = ScatterND(zeros, place, low)
        mask = Mul(scattered, scattered) p = MatMul(x, w) y = Add(p, mask) q = MatMul(y, w) z = Add(q, mask)
    }}"""
    _, groups = load(text(graph, weight("w", 4, 4)), tmp_path)
    assert [(g.name, g.pinned) for g in groups if "ScatterND" in g.ops] == [("mask", FOLDED if rows == 2 else None)]
    assert [g.pinned for g in groups if "MatMul" in g.ops] == [None, None]


def test_auto_is_fusion_but_for_a_large_budget_or_very_many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(TRANSFORMER)  # of 59 free groups at op granularity, 22 at fusion
    for most, budget, expected in ((500, 30, "op"), (500, 29, "fusion"), (22, 1, "fusion"), (21, 12, "block")):
        monkeypatch.setattr("mptune.graph.groups.MOST_GROUPS", most)
        granularity, groups = find_fitting_groups(model, budget)
        assert granularity == expected
        assert groups == find_groups(model, granularity) == find_groups(model, "auto", budget)
    with pytest.raises(PlanError, match="needs a budget"):
        find_groups(model, "auto")
    with pytest.raises(PlanError, match="granularity"):
        find_groups(model, "layer")  # type: ignore[arg-type]


def test_is_the_same_in_every_process() -> None:
    code = (
        "import sys; from mptune.graph.groups import find_groups\n"
        "from mptune.graph.loading.model import load_model\n"
        "for g in ('op', 'fusion', 'block'): print(find_groups(load_model(sys.argv[1]), g))"
    )
    command = [sys.executable, "-c", code, str(TRANSFORMER)]
    one, two = (subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": k}) for k in "12")
    assert one.stdout == two.stdout != b""


def test_sources_that_feed_each_others_readers_are_one_group(tmp_path: Path) -> None:
    """Each would join the group of its readers, which is led by the other: that once had no end."""
    nodes = "s = Shape(x) r = Reshape(x, s) a = Relu(x) g = Greater(x, a) w = Where(g, x, r) y = Add(r, a)"
    _, (group,) = load(text(f"(float[2,4] x) => (float[2,4] w, float[2,4] y) {{ {nodes} }}"), tmp_path)
    assert len(group.nodes) == 5


@pytest.mark.parametrize("granularity", ["fusion", "block"])
def test_the_scaling_of_an_input_is_apart_from_the_product_that_it_feeds(tmp_path: Path, granularity: str) -> None:
    """In 16 bits per channel, pixels pass 65504: the scaling must be FP32 where the convolution need not be."""
    graph = """(float[n,8,8,3] image) => (float[n,4,6,6] y) {
        [centre] centred = Sub(image, mean) [scale] scaled = Div(centred, deviation)
        [nchw] nchw = Transpose<perm = [0, 3, 1, 2]>(scaled) [conv] c = Conv(nchw, w) [relu] y = Relu(c)
    }"""
    constants = [constant("mean", [3e4] * 3), constant("deviation", [2e4] * 3), weight("w", 4, 3, 3, 3)]
    model = load_model(models.save(text(graph, *constants), tmp_path))
    groups = find_groups(model, granularity)  # type: ignore[arg-type]
    assert [group.nodes for group in groups] == [("centre", "scale"), ("nchw", "conv", "relu")]
    pinned = pinned_by_hazards(
        find_hazards(GroupedModel(model, groups), magnitudes_of({"image": 65535.0, "scaled": 1.8}))
    )
    assert list(pinned) == [groups[0].id]


def test_a_mask_is_apart_from_the_product_that_it_is_added_to(tmp_path: Path) -> None:
    graph = """(float[n,4] x, float[n,4] keep) => (float[n,4] y) <float one = {1}, float huge = {-1000000000}> {
        [invert] drop = Sub(one, keep) [mask] bias = Mul(drop, huge) h = MatMul(x, w) s = Add(h, bias) y = Sigmoid(s)
    }"""
    model, groups = load(text(graph, weight("w", 4, 4)), tmp_path)
    hazards = find_hazards(GroupedModel(model, groups))
    held = {hazard.place.group for hazard in hazards if "held_as" in hazard.evidence}
    assert [group.nodes for group in groups if group.id in held] == [("invert", "mask")]
    assert not pinned_by_hazards(hazards)  # it is held as -65504
