"""``mptune compare MODEL CANDIDATE --trace``: with one planted difference, the first group that diverges is its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import mptune
from mptune.cli import main
from mptune.diagnosis.structure import align
from mptune.engines.loading import load_typed_model
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.contrib_models import optimised, transformer
from tests.diagnosis.recordings import session
from tests.graph import models
from tests.graph.exported.stripped import load_filled
from tests.graph.helpers import plans, run
from tests.networks.networks import FILES

ROOT = Path(__file__).resolve().parents[2]
EXPORTED = ROOT / "tests/graph/exported"


def perturbed(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """Weights of one node, by 2 %."""
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) >= 8]
    used = [t for t in floats if any(t.name in n.input for n in model.graph.node)]
    tensor = used[int(rng.integers(len(used)))]
    values = numpy_helper.to_array(tensor)
    changed = (values * (1 + 0.02 * rng.standard_normal(values.shape))).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    return next(n.name for n in model.graph.node if tensor.name in n.input)


def cast(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """The result of one node goes through FP16."""
    rounded = {"MatMul", "Conv", "Gemm", "Mul", "Add", "LayerNormalization", "BatchNormalization", "Softmax"}
    places = [k for k, n in enumerate(model.graph.node) if n.op_type in rounded]
    at = places[int(rng.integers(len(places)))]
    node = model.graph.node[at]
    out = node.output[0]
    node.output[0] = f"{out}_raw"
    model.graph.node.insert(
        at + 1, helper.make_node("Cast", [f"{out}_raw"], [f"{out}_half"], to=onnx.TensorProto.FLOAT16)
    )
    model.graph.node.insert(at + 2, helper.make_node("Cast", [f"{out}_half"], [out], to=onnx.TensorProto.FLOAT))
    return node.name


def attribute(operator: str, name: str, value: object) -> Callable[[onnx.ModelProto, np.random.Generator], str]:
    """One attribute of one node of an operator."""

    def change(model: onnx.ModelProto, rng: np.random.Generator) -> str:
        nodes = [n for n in model.graph.node if n.op_type == operator]
        node = nodes[int(rng.integers(len(nodes)))]
        for old in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(old)
        node.attribute.append(helper.make_attribute(name, value))
        return node.name

    return change


def permuted(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """The output channels of a weight in another order."""
    nodes = [n for n in model.graph.node if n.op_type in ("Conv", "MatMul", "Gemm")]
    constants = {t.name: t for t in model.graph.initializer}
    nodes = [n for n in nodes if n.input[1] in constants]
    node = nodes[int(rng.integers(len(nodes)))]
    tensor = constants[node.input[1]]
    axis = 0 if node.op_type == "Conv" else len(tensor.dims) - 1
    values = np.roll(numpy_helper.to_array(tensor), 1, axis)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), tensor.name))
    return node.name


def resized() -> onnx.ModelProto:
    """A convolution before and after a Resize."""
    graph = """(float[batch,3,8,8] x) => (float[batch,2,16,16] y) <float[4] scales = {1, 1, 2, 2}> {
        ["/down/Conv"] a = Conv<pads = [1, 1, 1, 1]>(x, w) ["/down/Relu"] r = Relu(a)
        ["/up/Resize"] u = Resize<mode = "linear">(r, , scales) ["/head/Conv"] y = Conv<pads = [1, 1, 1, 1]>(u, v)
    }"""
    return models.text(graph, models.weight("w", 4, 3, 3, 3), models.weight("v", 2, 4, 3, 3))


def load(name: str) -> onnx.ModelProto:
    made = {"mlp": models.mlp, "cnn": models.cnn, "attention": models.attention, "resize": resized}
    if name in made:
        return made[name]()
    files = {"vit": ROOT / "benchmarks/models/digits_vit.onnx", "exported": EXPORTED / "cnn_torchscript_17.onnx"}
    return onnx.load(str(files.get(name, EXPORTED / f"{name}.onnx")))


TRANSFORMER = "transformer_torchscript_17"
PAIRS = [
    ("mlp", perturbed),
    ("cnn", perturbed),
    ("vit", perturbed),
    ("exported", perturbed),
    (TRANSFORMER, perturbed),
    ("mlp", cast),
    ("attention", cast),
    ("exported", cast),
    (TRANSFORMER, cast),
    ("vit", cast),
    ("mlp", attribute("LayerNormalization", "epsilon", 1e-3)),
    (TRANSFORMER, attribute("LayerNormalization", "epsilon", 1e-4)),
    ("cnn", attribute("BatchNormalization", "epsilon", 1e-2)),
    ("attention", attribute("Softmax", "axis", 1)),
    (TRANSFORMER, attribute("Softmax", "axis", 1)),
    ("resize", attribute("Resize", "mode", "nearest")),
    ("resize", attribute("Resize", "coordinate_transformation_mode", "align_corners")),
    ("cnn", permuted),
    ("mlp", permuted),
    ("exported", permuted),
]


def data_of(model: Path, rng: np.random.Generator, rows: int = 4) -> dict[str, np.ndarray]:
    found = {}
    for value in session(model.read_bytes()).get_inputs():
        shape = [rows, *(d if isinstance(d, int) else 6 for d in value.shape[1:])]
        integers = "int" in value.type
        found[value.name] = rng.integers(0, 40, shape) if integers else rng.standard_normal(shape).astype(np.float32)
    return found


LONG = [k for k, (name, plant) in enumerate(PAIRS) if name in ("vit", TRANSFORMER) and plant in (perturbed, cast)]
"""Pairs that take long, and whose difference other pairs have, too."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(k, marks=pytest.mark.slow) if k in LONG else k for k in range(len(PAIRS))],
    ids=[f"{n}-{getattr(f, '__name__', f)}" for n, f in PAIRS],
)
def test_the_first_group_that_diverges_is_that_of_the_planted_difference(case: int, tmp_path: Path) -> None:
    name, plant = PAIRS[case]
    rng = np.random.default_rng([case, 15])
    proto = load(name)
    left = models.save(proto, tmp_path, "left.onnx")
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    node = plant(changed, rng)
    right = models.save(changed, tmp_path, "right.onnx")

    found = mptune.compare(left, right, data=data_of(left, rng), trace=True)

    groups = [group.id for group in mptune.find_groups(mptune.load_model(left)) if node in group.nodes]
    (first,) = [finding for finding in found.findings if finding.code == "first-difference"]
    assert first.where.groups == tuple(groups), (node, first.text)
    structural = [finding for finding in found.findings if finding.code == "attribute-differs"]
    if plant is cast:
        assert not structural
    else:
        assert structural[0].where.nodes == (node,)
        assert "99999" not in structural[0].text, "1e-05, and not 9.999999747378752e-06"
        assert found.verdict == "differs"


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_where_fp16_begins_is_no_fault(scale: float, tmp_path: Path) -> None:
    graph = """(float[batch,8] x) => (float[batch,8] y) { ["/first/MatMul"] h = MatMul(x, w)
        ["/second/Mul"] s = Mul(h, scale) ["/third/Mul"] q = Mul(s, s) ["/third/Sqrt"] y = Sqrt(q) }"""
    proto = models.text(graph, models.weight("w", 8, 8), models.constant("scale", scale))
    left = models.save(proto, tmp_path, "left.onnx")
    mptune.apply(left, None, tmp_path / "right.onnx")
    found = mptune.compare(left, tmp_path / "right.onnx", data=data_of(left, np.random.default_rng(0)), trace=True)
    codes = [(finding.code, finding.severity) for finding in found.findings]
    if scale == 1.0:
        assert codes == [("agrees", "info"), ("first-difference", "info")]
    else:
        assert codes == [("precision", "warning"), ("first-difference", "warning")]
        assert found.findings[1].where.nodes == ("/third/Mul",), "its operands are only rounded"


def test_the_same_model_under_other_names_agrees(tmp_path: Path) -> None:
    left = models.save(models.mlp(), tmp_path, "left.onnx")
    other = models.mlp()
    other.CopyFrom(onnx.load(str(left)))
    for k, node in enumerate(other.graph.node):
        node.name = f"n{k}"
        node.output[:] = [out if out == "y" else f"v_{out}" for out in node.output]
        node.input[:] = [
            f"v_{i}" if i in {o for n in onnx.load(str(left)).graph.node for o in n.output} else i for i in node.input
        ]
    right = models.save(other, tmp_path, "right.onnx")
    found = mptune.compare(left, right, data=data_of(left, np.random.default_rng(0)), trace=True)
    assert [finding.code for finding in found.findings] == ["agrees"]


@pytest.mark.slow
def test_a_reference_that_is_mixed_itself_is_named(tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    mixed = mptune.apply(model, None, tmp_path / "mixed.onnx", keep_fp32=["op:Softmax"])
    data = data_of(model, np.random.default_rng(1))
    found = mptune.compare(mixed, model, data=data)
    (named,) = [finding for finding in found.findings if finding.code == "already-mixed"]
    assert "6 of 7 layers are FP16 already" in named.text
    assert "the reference holds the rounding of these layers" in named.text
    assert not any(finding.code == "already-mixed" for finding in mptune.compare(model, mixed, data=data).findings)


def test_check_passes_a_mixed_model_within_its_limit_and_exits_with_3_beyond(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models.save(models.mlp(), tmp_path)
    mixed = mptune.apply(model, None, tmp_path / "mixed.onnx")
    np.savez(tmp_path / "val.npz", **data_of(model, np.random.default_rng(1)))
    command = ["check", str(mixed), "--against", str(model), "--data", str(tmp_path / "val.npz"), "--max-error"]
    assert main([*command, "1e-2"]) == 0
    capsys.readouterr()
    assert main([*command, "1e-5"]) == 3
    gate = capsys.readouterr()
    assert "--explain names what makes the difference" in gate.out
    assert "precision" not in gate.out
    assert gate.err.splitlines() == [f"running {model}", f"running {mixed}"], "two runs of the samples, and no more"
    assert main([*command, "1e-5", "--explain", "--json"]) == 3
    explained = capsys.readouterr()
    assert "precision" in [finding["code"] for finding in json.loads(explained.out)["findings"]]
    assert "emulating FP16" in explained.err.splitlines()
    assert main([*command, "0"]) == 2


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "tests/graph/corpus" / f"{name}.onnx" for name in ("constants", "dynamic_sequence", "mask_1e9")),
        FILES["lstm_torchscript_9"],
    ],
    ids=lambda path: path.stem,
)
def test_a_plan_of_a_model_differs_from_it_in_precision_alone(path: Path, tmp_path: Path) -> None:
    """Integers are cast once for each type, own Casts change theirs, and recurrent layers may have ``x - 0`` before."""
    whole = tmp_path / path.name
    onnx.save(load_filled(path), whole)
    model = load_model(whole)
    grouped = GroupedModel(model, find_groups(model))
    rewriter = Rewriter(grouped, WeightBank.write(model, tmp_path))
    for plan in plans(model, grouped.groups, 4, seed=1):
        mixed = load_model(rewriter.write(plan, tmp_path / "mixed.onnx"))
        assert align(model, mixed).differences == ()


def test_runs_that_differ_are_not_deterministic(tmp_path: Path) -> None:
    graph = "(float[batch,8] x) => (float[batch,8] y) { n = RandomNormalLike(x) h = MatMul(x, w) y = Add(h, n) }"
    model = models.save(models.text(graph, models.weight("w", 8, 8)), tmp_path)
    found = mptune.compare(model, data=data_of(model, np.random.default_rng(2)), repeat=2)
    assert "not-deterministic" in {finding.code for finding in found.findings}
    assert found.verdict == "differs"


@pytest.mark.slow
def test_the_precisions_of_a_candidate_with_operators_of_onnx_runtime_are_known(tmp_path: Path) -> None:
    """Their types come from ONNX Runtime: without them, what is FP16 in the candidate was not known."""
    model = optimised(transformer(1), tmp_path)
    mixed = mptune.apply(model, None, tmp_path / "mixed.onnx", keep_fp32=["op:SkipLayerNormalization", "op:BiasGelu"])
    data = {"x": np.random.default_rng(1).standard_normal((2, 8, 32)).astype(np.float32)}
    found = mptune.compare(model, mixed, data=data, max_error=1e-6)
    (finding,) = [each for each in found.findings if each.code == "precision"]
    groups = mptune.find_groups(load_typed_model(model))
    kept = [g for g in groups if {"SkipLayerNormalization", "BiasGelu"} & set(g.ops)]
    assert kept
    assert finding.evidence["fp16_groups"] == len(groups) - len(kept)


def bf16_model(mlp_path: Path, folder: Path) -> tuple[Path, Path, dict[str, np.ndarray]]:
    mixed = mptune.apply(mlp_path, None, folder / "bf16.onnx", reduced="bf16")
    return mlp_path, mixed, {"x": np.random.default_rng(1).standard_normal((16, 32)).astype(np.float32)}


@pytest.mark.slow
def test_a_difference_that_bf16_makes(mlp_path: Path, tmp_path: Path) -> None:
    """FP16 would make an eighth of it, and explains nothing of it."""
    model, mixed, data = bf16_model(mlp_path, tmp_path)
    found = mptune.compare(model, mixed, data=data, max_error=1e-4)
    (finding,) = found.findings
    assert finding.code == "precision"
    groups = mptune.find_groups(load_typed_model(model))
    assert finding.evidence["bf16_groups"] == len(groups)
    assert finding.evidence["fp16_groups"] == 0
    assert "emulating BF16 reproduces it" in finding.text
    assert "BF16 keeps 8 bits where FP16 keeps 11" in finding.text
    found = mptune.compare(model, mixed, data=data, max_error=3e-3)
    (finding,) = [each for each in found.findings if each.code == "precision"]
    assert finding.evidence["error_with_kept"] <= 3e-3
    assert "--bf16-all --keep-fp32" in finding.cure


def test_outputs_of_an_engine_in_bf16_are_known_as_such(mlp_path: Path, tmp_path: Path) -> None:
    model, _, data = bf16_model(mlp_path, tmp_path)
    loaded = load_typed_model(model)
    grouped = GroupedModel(loaded, mptune.find_groups(loaded))
    bank = WeightBank.write(loaded, tmp_path / "bank", precisions=REDUCED)
    path = Emulator(grouped, bank).write(grouped.uniform(Precision.BF16), tmp_path / "bank" / "emulated.onnx")
    np.savez(tmp_path / "recorded.npz", **run(path, data))
    found = mptune.compare(model, data=data, outputs=tmp_path / "recorded.npz", max_error=1e-4, batch=16)
    (finding,) = [each for each in found.findings if each.code == "precision"]
    assert "emulating BF16 reproduces it" in finding.text


@pytest.mark.slow
def test_a_sparse_weight_is_the_same_in_both(tmp_path: Path) -> None:
    places = numpy_helper.from_array(np.array([1, 6, 11], np.int64), "places")
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(np.ones(3, np.float32), "s"), places, [4, 4])
    graph = "(float[1,4] x) => (float[1,4] y) { h = MatMul(x, s) y = MatMul(h, w) }"
    proto = models.text(graph, models.weight("w", 4, 4))
    proto.graph.sparse_initializer.append(sparse)
    path = models.save(proto, tmp_path)
    mixed = mptune.apply(path, None, tmp_path / "fp16.onnx")
    data = {"x": np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)}
    assert {finding.code for finding in mptune.compare(path, mixed, data=data).findings} == {"agrees"}
    assert mptune.inspect(path, data=data).groups
