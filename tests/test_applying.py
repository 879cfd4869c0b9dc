"""``mptune.apply`` without a search: plans by nodes, plans by patterns, and files that are never overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import mptune
import mptune.graph.writing.weights
from mptune.errors import PlanError, RunError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from tests.graph import models
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, node, value, weight

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a plan.json."""

    def written(**document: object) -> Path:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document))
        return path

    return written


def fp16_weights(path: Path) -> set[str]:
    halves = (c for c in load_model(path).initializers.values() if c.dtype == "float16")
    return {c.name.removesuffix("__fp16") for c in halves}


def test_a_plan_by_nodes(mlp_path: Path, tmp_path: Path, write: Write) -> None:
    plan = write(nodes={"block0/*": "fp16", "block0/fc2/*": "fp32"})
    out = mptune.apply(mlp_path, plan, tmp_path / "out.onnx")
    assert fp16_weights(out) == {"block0.w1", "block0.b1", "block0.gain", "block0.shift"}
    feed = {"x": np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)}
    assert 0 < relative_l2(run(out, feed)["y"], run(mlp_path, feed)["y"]) < 1e-2


def test_what_would_be_split_is_reported_to_the_caller(tmp_path: Path, write: Write) -> None:
    path = models.save(models.attention(mask=-1e4), tmp_path)
    messages: list[str] = []
    plan = write(nodes={"*": "fp16", "op:Softmax": "fp32"})
    out = mptune.apply(path, plan, tmp_path / "out.onnx", warn=messages.append)
    assert fp16_weights(out) >= {"wq", "wk", "wv"}
    assert ["(attention)" in text for text in messages] == [True]


def test_fp16_where_it_can_be_right(tmp_path: Path, write: Write) -> None:
    """A mask of -1e9 is held as -65504; a weight of 1e5 would be, and nothing here shows what that does."""
    messages: list[str] = []
    path = models.save(models.attention(mask=-1e9), tmp_path)
    out = mptune.apply(path, None, tmp_path / "out.onnx", warn=messages.append)
    assert fp16_weights(out) == {"wq", "wk", "wv", "scale", "huge", "one"}
    assert messages == []
    path = models.save(models.product(np.eye(4) * 1e5), tmp_path)
    out = mptune.apply(path, None, tmp_path / "weights.onnx", warn=messages.append)
    assert not fp16_weights(out)
    assert len(messages) == 1
    assert "stays in FP32: w: 4 of 16 values exceed FP16's 65504 and are held as 65504" in messages[0]
    out = mptune.apply(path, write(nodes={"*": "fp16"}), tmp_path / "nodes.onnx", warn=messages.append)
    assert "w" in fp16_weights(out), "a plan by nodes is obeyed, and doubted"
    assert any("FP16 cannot be right there" in text for text in messages)


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["kind:norm"], {"block0.gain", "block0.shift", "block1.gain", "block1.shift"}),
        (["op:Softmax", "head/*"], {"head.w", "head.b"}),
        (["block1/*"], {f"block1.{n}" for n in ("gain", "shift", "w1", "b1", "w2", "b2")}),
    ],
)
def test_patterns_that_stay_in_fp32(
    patterns: list[str], kept: set[str], mlp_path: Path, tmp_path: Path, write: Write
) -> None:
    model = load_model(mlp_path)
    weights = {c.name for c in model.initializers.values()}
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in find_groups(model)], Precision.FP16)
    for name, given in (("none", None), ("nodes", write(nodes={"*": "fp16"})), ("groups", plan)):
        out = mptune.apply(mlp_path, given, tmp_path / f"{name}.onnx", keep_fp32=patterns)
        assert fp16_weights(out) == weights - kept


@pytest.mark.parametrize("granularity", ["op", "fusion", "block"])
def test_a_plan_of_any_granularity_is_known_by_its_nodes(granularity: str, tmp_path: Path, write: Write) -> None:
    """Two granularities may have equally many groups; the nodes tell which one is meant."""
    path = models.save(models.decomposed_norm(), tmp_path)
    model = load_model(path)
    groups = find_groups(model, granularity)  # type: ignore[arg-type]
    plan = PrecisionPlan(model.sha256, {g.id: list(PRECISIONS)[k % 2] for k, g in enumerate(groups)})
    expected = Rewriter(GroupedModel(model, groups)).export(plan, tmp_path / "expected.onnx")
    document = plan.to_json(Rewriter(GroupedModel(model, groups)).types.node_precisions(plan))
    assert mptune.apply(path, write(**document), tmp_path / "out.onnx").read_bytes() == expected.read_bytes()


def test_a_plan_of_other_groups_is_carried_out_by_its_nodes(mlp_path: Path, tmp_path: Path, write: Write) -> None:
    messages: list[str] = []
    plan = write(format=1, precision={"g000": "fp16"}, nodes={"head/Gemm": "fp16", "mixing/Softmax": "fp32"})
    out = mptune.apply(mlp_path, plan, tmp_path / "out.onnx", warn=messages.append)
    assert fp16_weights(out) == {"head.w", "head.b"}
    assert "another version's" in messages[0]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("", "is no plan: Expecting value"),
        ("[" * 100_000, "is no plan: it is nested too deeply"),
        ("[1]", "the file: Input should be"),
        ("{}", "neither 'precision' nor 'nodes'"),
        ('{"nodes": {}}', "neither 'precision' nor 'nodes'"),
        ('{"nodes": ["*"]}', "nodes: Input should be"),
        ('{"nodes": {"*": "fp8"}}', "nodes.*: 'fp8' is not a valid"),
        ('{"nodes": {"*": ["fp16"]}}', "nodes.*: ['fp16'] is not a valid"),
        ('{"nodes": {"*": "fp16"}, "format": 9}', "format: Input should be 1"),
        ('{"nodes": {"*": "fp16"}, "keep": []}', "keep: Extra inputs"),
        ('{"nodes": {"*/conv/*": "fp16"}}', "names no node"),
        ('{"nodes": {"*": "fp16"}, "model_sha256": "12"}', "another model"),
        ('{"precision": {"g000": "fp16"}}', "which are not those of"),
        ('{"precision": ["g000"]}', "precision: Input should be"),
        ('{"precision": {"g000": "fp8"}}', "fp8"),
        ("\udcff", "is no plan: 'utf-8' codec"),
    ],
)
def test_what_is_no_plan(document: str, says: str, mlp_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(document.encode(errors="surrogateescape"))
    with pytest.raises(PlanError) as caught:
        mptune.apply(mlp_path, path, tmp_path / "out.onnx")
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "out.onnx").exists()


def test_precision_and_nodes_that_contradict_each_other(mlp_path: Path, tmp_path: Path, write: Write) -> None:
    model = load_model(mlp_path)
    plan = PrecisionPlan.uniform(model.sha256, [g.id for g in find_groups(model)], Precision.FP16).to_json()
    with pytest.raises(PlanError, match="contradict"):
        mptune.apply(mlp_path, write(**{**plan, "nodes": {"head/Gemm": "fp32"}}), tmp_path / "out.onnx")


def big(folder: Path) -> Path:
    """A model whose weights lie in big.onnx.data."""
    proto = models.model(
        [node("MatMul", ["x", "w"], "a", "one"), node("Mul", ["a", "k"], "y", "two")],
        [value("x", [2, 64])],
        [value("y", [2, 64])],
        [weight("w", 64, 64), constant("k", 2.0)],
    )
    onnx.save(proto, folder / "big.onnx", save_as_external_data=True, location="big.onnx.data", size_threshold=1024)
    return folder / "big.onnx"


def test_never_overwrites_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, data = big(tmp_path), tmp_path / "out.onnx", tmp_path / "out.onnx.data"
    monkeypatch.setattr(mptune.graph.writing.weights, "SELF_CONTAINED_LIMIT", 0)  # as if the weights passed 2 GiB
    data.write_text("mine")
    with pytest.raises(RunError, match=r"out\.onnx\.data exists already"):
        mptune.apply(source, None, out)
    assert data.read_text() == "mine"
    assert not out.exists()
    assert mptune.apply(source, None, out, force=True) == out
    onnx.checker.check_model(str(out), full_check=True)
    before = out.read_bytes(), data.read_bytes()
    with pytest.raises(RunError, match=r"out\.onnx exists already"):
        mptune.apply(source, None, out)
    assert (out.read_bytes(), data.read_bytes()) == before


def test_never_overwrites_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = big(tmp_path)
    before = source.read_bytes(), (tmp_path / "big.onnx.data").read_bytes()
    with pytest.raises(PlanError, match="made from"):
        mptune.apply(source, None, source, force=True)
    monkeypatch.setattr(mptune.graph.writing.weights, "SELF_CONTAINED_LIMIT", 0)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PlanError, match="made from"):
        mptune.apply(source, None, tmp_path / "link" / "big.onnx", force=True)
    moved = tmp_path / "other.onnx"
    moved.write_bytes(source.read_bytes())
    source.unlink()
    with pytest.raises(PlanError, match=r"big\.onnx\.data is what the mixed model is made from"):
        mptune.apply(moved, None, source, force=True)
    assert (tmp_path / "big.onnx.data").read_bytes() == before[1]


def _trained(seed: int, scale: float, folder: Path, name: str = "second") -> Path:
    """A product, its squares and another product, with weights of this seed and size."""
    rng = np.random.default_rng(seed)
    nodes = [
        node("MatMul", ["x", "w"], "h", "first"),
        node("Pow", ["h", "two"], "p", "power"),
        node("MatMul", ["p", "v"], "y", name),
    ]
    constants = [
        constant("w", rng.normal(0, scale, (32, 32))), constant("two", 2.0), constant("v", rng.normal(0, 0.1, (32, 8)))
    ]  # fmt: skip
    proto = models.model(nodes, [value("x", [1, 32])], [value("y", [1, 8])], constants)
    return models.save(proto, folder, f"trained{seed}{name}.onnx")


@pytest.fixture
def all_half(tmp_path: Path) -> tuple[Path, Path]:
    """A model and a plan.json of a search, all in FP16."""
    path = _trained(1, 0.2, tmp_path)
    model = load_model(path)
    groups = GroupedModel(model, find_groups(model))
    plan = groups.uniform(Precision.FP16)
    document = plan.to_json(Rewriter(groups).types.node_precisions(plan))
    (tmp_path / "searched.json").write_text(json.dumps(document))
    return path, tmp_path / "searched.json"


DATA = {"x": np.random.default_rng(5).standard_normal((8, 32)).astype(np.float32)}


def test_a_plan_of_a_model_that_was_trained_again(all_half: tuple[Path, Path], tmp_path: Path) -> None:
    searched, plan = all_half
    retrained, messages = _trained(2, 0.2, tmp_path), list[str]()
    out = mptune.apply(retrained, plan, tmp_path / "out.onnx", warn=messages.append)
    assert len(fp16_weights(out)) == len(fp16_weights(mptune.apply(searched, plan, tmp_path / "same.onnx"))) > 0
    feed = {"x": DATA["x"][:1]}
    assert 0 < relative_l2(run(out, feed)["y"], run(retrained, feed)["y"]) < 1e-2
    assert len(messages) == 2
    assert "with the same nodes: its precisions are used" in messages[0]
    assert "give --data PATH" in messages[1]
    messages.clear()
    mptune.apply(retrained, plan, tmp_path / "out.onnx", warn=messages.append, data=DATA, force=True)
    assert len(messages) == 1, "its values fit FP16"
    messages.clear()
    mptune.apply(searched, plan, tmp_path / "a.onnx", warn=messages.append, data=DATA)
    assert messages == []
    mptune.apply(searched, plan, tmp_path / "b.onnx", warn=messages.append, data={"x": DATA["x"] * 1000})
    assert any("FP16 cannot be right there: p: reached" in text for text in messages)


def test_a_pin_that_is_missing_in_the_plan_is_named(all_half: tuple[Path, Path], tmp_path: Path) -> None:
    _, plan = all_half
    wild, messages = _trained(3, 40.0, tmp_path), list[str]()
    mptune.apply(wild, plan, tmp_path / "out.onnx", warn=messages.append, data=DATA)
    doubts = [text for text in messages if "FP16 cannot be right there" in text]
    assert any("p: reached" in text for text in doubts)
    kept = [text.rsplit("--keep-fp32 ", 1)[1] for text in doubts]
    messages.clear()
    out = mptune.apply(wild, plan, tmp_path / "kept.onnx", keep_fp32=kept, warn=messages.append, data=DATA)
    assert not [text for text in messages if "cannot be right" in text], "the option that is named cures it"
    assert np.isfinite(run(out, {"x": DATA["x"][:1]})["y"]).all()


def test_fp16_all_keeps_what_the_data_show_in_fp32(tmp_path: Path) -> None:
    wild, messages = _trained(3, 40.0, tmp_path), list[str]()
    out = mptune.apply(wild, None, tmp_path / "out.onnx", warn=messages.append, data=DATA)
    assert any("stays in FP32: p: reached" in text for text in messages)
    assert np.isfinite(run(out, {"x": DATA["x"][:1]})["y"]).all()


def test_fp16_all_warns_with_what_the_structure_shows(tmp_path: Path) -> None:
    path, messages = models.save(models.decomposed_norm(1e-9), tmp_path), list[str]()
    mptune.apply(path, None, tmp_path / "out.onnx", warn=messages.append)
    assert [text.split(": ")[0] for text in messages[:-1]] == ["vanishing-epsilon", "norm-written-out"]
    assert "the constant 1e-09 is zero in FP16" in messages[0]
    assert "values of this model were not checked" in messages[-1]
    messages.clear()
    mptune.apply(path, None, tmp_path / "kept.onnx", keep_fp32=["/norm/*"], warn=messages.append)
    assert [text for text in messages if "were not checked" not in text] == [], "what is kept is no doubt"


def test_a_model_with_other_nodes_is_another_model(all_half: tuple[Path, Path], tmp_path: Path) -> None:
    _, plan = all_half
    with pytest.raises(PlanError, match="with other nodes, such as 'second'") as caught:
        mptune.apply(_trained(2, 0.2, tmp_path, "third"), plan, tmp_path / "out.onnx")
    assert "trained again" in caught.value.hint
    assert not (tmp_path / "out.onnx").exists()


def bf16_weights(path: Path) -> set[str]:
    reduced = (c for c in load_model(path).initializers.values() if c.dtype == "bfloat16")
    return {c.name.removesuffix("__bf16") for c in reduced}


def test_bf16_where_values_leave_fp16s_range(tmp_path: Path) -> None:
    """BF16 holds 1e9, and FP32's lowest number as its own."""
    path = models.save(models.attention(mask=-1e9), tmp_path)
    messages: list[str] = []
    out = mptune.apply(path, None, tmp_path / "out.onnx", reduced="bf16", warn=messages.append)
    assert bf16_weights(out) == {"wq", "wk", "wv", "scale", "huge", "one"}
    assert not fp16_weights(out)
    assert messages == []
    path = models.save(models.product(np.eye(4) * np.finfo(np.float32).max), tmp_path)
    out = mptune.apply(path, None, tmp_path / "ends.onnx", reduced="bf16", warn=messages.append)
    assert not bf16_weights(out)
    assert [text for text in messages if "stays in FP32" in text]


def test_groups_that_are_kept_in_bf16(tmp_path: Path, write: Write) -> None:
    path = models.save(models.attention(mask=-1e9), tmp_path)
    out = mptune.apply(path, None, tmp_path / "out.onnx", keep_bf16=["*mask*"])
    assert bf16_weights(out) == {"huge", "one"}
    assert fp16_weights(out) == {"wq", "wk", "wv", "scale"}
    plan = write(nodes={"*": "fp16"})
    out = mptune.apply(path, plan, tmp_path / "both.onnx", keep_bf16=["*"], keep_fp32=["*mask*"])
    assert bf16_weights(out) == {"wq", "wk", "wv", "scale"}
    with pytest.raises(PlanError, match="keep_bf16= nowhere/\\* matches nothing"):
        mptune.apply(path, None, tmp_path / "no.onnx", keep_bf16=["nowhere/*"])


def test_what_has_no_bf16_stays_and_is_said(tmp_path: Path, write: Write) -> None:
    path = models.save(models.cnn(), tmp_path)
    messages: list[str] = []
    out = mptune.apply(path, write(nodes={"*": "bf16"}), tmp_path / "out.onnx", warn=messages.append)
    convolving = {c.inputs[1] for c in load_model(path).nodes if c.op_type == "Conv"}
    assert not bf16_weights(out) & convolving
    (warning,) = [text for text in messages if "BF16" in text]
    assert "ONNX has no BF16 for Conv" in warning
    assert "--opset 22" in warning
    messages.clear()
    out = mptune.apply(path, write(nodes={"*": "bf16"}), tmp_path / "22.onnx", warn=messages.append, opset=22)
    assert bf16_weights(out) >= convolving
    assert load_model(out).opset == 22
    assert not [text for text in messages if "has no BF16" in text]
