"""``mptune compare MODEL CANDIDATE``: the first group that diverges, and the nodes that have an effect, are named."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from onnx import helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import mptune
from mptune.cli import main
from mptune.diagnosis.structure import align, constant_difference
from mptune.engines.loading import load_typed_model
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import REDUCED, Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from tests.contrib_models import optimised, transformer
from tests.diagnosis import recordings
from tests.diagnosis.recordings import data_of
from tests.graph import models
from tests.graph.exported.stripped import load_filled
from tests.graph.helpers import plans, run
from tests.graph.models import constant, node, save, text, weight
from tests.graph.test_large_norms import CHANNELS, batch_norm
from tests.networks.networks import FILES

ROOT = Path(__file__).resolve().parents[2]
EXPORTED = ROOT / "tests/graph/exported"


Plant = Callable[[onnx.ModelProto, np.random.Generator], str]


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
    half, back = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    model.graph.node.insert(at + 1, helper.make_node("Cast", [f"{out}_raw"], [f"{out}_half"], to=half))
    model.graph.node.insert(at + 2, helper.make_node("Cast", [f"{out}_half"], [out], to=back))
    return node.name


def attribute(operator: str, name: str, value: object) -> Plant:
    """One attribute of one node of an operator."""

    def change(model: onnx.ModelProto, rng: np.random.Generator) -> str:
        nodes = [n for n in model.graph.node if n.op_type == operator]
        node = nodes[int(rng.integers(len(nodes)))]
        attributes = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*attributes, helper.make_attribute(name, value)])
        return node.name

    return change


def permuted(model: onnx.ModelProto, rng: np.random.Generator) -> str:
    """The output channels of a weight in another order."""
    constants = {t.name: t for t in model.graph.initializer}
    weighted = [n for n in model.graph.node if n.op_type in ("Conv", "MatMul", "Gemm")]
    nodes = [n for n in weighted if n.input[1] in constants]
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


def compared(model: Path, candidate: Path | None = None, **options: object) -> mptune.Comparison:
    return mptune.compare(model, candidate, data=data_of(model, np.random.default_rng(1), 16), **options)


def the_finding(code: str, comparison: mptune.Comparison) -> mptune.Finding:
    (finding,) = [each for each in comparison.findings if each.code == code]
    return finding


def load(name: str) -> onnx.ModelProto:
    made = {"mlp": models.mlp, "cnn": models.cnn, "attention": models.attention, "resize": resized}
    if name in made:
        return made[name]()
    files = {"vit": ROOT / "benchmarks/models/digits_vit.onnx", "exported": EXPORTED / "cnn_torchscript_17.onnx"}
    return onnx.load(str(files.get(name, EXPORTED / f"{name}.onnx")))


TRANSFORMER = "transformer_torchscript_17"
PAIRS = [
    *((name, perturbed) for name in ("mlp", "cnn", "vit", "exported", TRANSFORMER)),
    *((name, cast) for name in ("mlp", "attention", "exported", TRANSFORMER, "vit")),
    ("mlp", attribute("LayerNormalization", "epsilon", 1e-3)),
    (TRANSFORMER, attribute("LayerNormalization", "epsilon", 1e-4)),
    ("cnn", attribute("BatchNormalization", "epsilon", 1e-2)),
    *((name, attribute("Softmax", "axis", 1)) for name in ("attention", TRANSFORMER)),
    ("resize", attribute("Resize", "mode", "nearest")),
    ("resize", attribute("Resize", "coordinate_transformation_mode", "align_corners")),
    *((name, permuted) for name in ("cnn", "mlp", "exported")),
]


LONG = [k for k, (name, plant) in enumerate(PAIRS) if name in ("vit", TRANSFORMER) and plant in (perturbed, cast)]
"""Pairs that take long, and whose difference other pairs have, too."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(k, marks=[pytest.mark.slow] if k in LONG else []) for k in range(len(PAIRS))],
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
    first = the_finding("first-difference", found)
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
    found = compared(left, tmp_path / "right.onnx", trace=True)
    codes = [(finding.code, finding.severity) for finding in found.findings]
    if scale == 1.0:
        assert codes == [("agrees", "info"), ("first-difference", "info")]
    else:
        assert codes == [("precision", "warning"), ("first-difference", "warning")]
        assert found.findings[1].where.nodes == ("/third/Mul",), "its operands are only rounded"


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_group_to_blame_is_cut_out(is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, piece, other = save(resized(), tmp_path), tmp_path / "piece", resized()
    data = data_of(left, np.random.default_rng(2), 6)
    attribute("Resize", "mode", "nearest")(other, np.random.default_rng(0))
    right: dict[str, object] = {"candidate": save(other, tmp_path, "right.onnx"), "trace": True}
    if is_recorded:
        np.savez(tmp_path / "half.npz", **recordings.NodeByNode(left).run(data, 6, result=recordings.to_half))
        right = {"outputs": tmp_path / "half.npz", "tolerance": {"y": 1e-5}}
    monkeypatch.chdir(tmp_path)
    mptune.compare(left, data=data, extract=piece, **right)  # type: ignore[arg-type]
    monkeypatch.chdir(piece)
    assert len(list(Path("inputs").iterdir())) == 4
    exact = mptune.compare("model.onnx", data="inputs", outputs="expected")
    assert all(each["error"] < 1e-6 for each in exact.outputs.values())
    commands = [line for line in Path("show.sh").read_text().splitlines() if line.startswith("mptune")]
    assert [main(shlex.split(each)[1:]) for each in commands] == ([0, 3] if is_recorded else [3]), "it shows"


def test_the_same_model_under_other_names_agrees(tmp_path: Path) -> None:
    left, other = models.save(models.mlp(), tmp_path, "left.onnx"), models.mlp()
    names = {name: f"v_{name}" for node in other.graph.node for name in node.output if name != "y"}
    for k, each in enumerate(other.graph.node):
        each.name = f"n{k}"
        each.output[:] = [names.get(name, name) for name in each.output]
        each.input[:] = [names.get(name, name) for name in each.input]
    found = compared(left, models.save(other, tmp_path, "right.onnx"), trace=True)
    assert [finding.code for finding in found.findings] == ["agrees"]


@pytest.mark.slow
def test_a_reference_that_is_mixed_itself_is_named(tmp_path: Path) -> None:
    model = models.save(models.mlp(), tmp_path)
    mixed = mptune.apply(model, None, tmp_path / "mixed.onnx", keep_fp32=["op:Softmax"])
    named = the_finding("already-mixed", compared(mixed, model))
    assert "6 of 7 layers are FP16 already" in named.text
    assert "the reference includes the rounding of these layers" in named.text
    assert "already-mixed" not in {finding.code for finding in compared(model, mixed).findings}


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


@pytest.mark.slow
def test_the_precisions_of_a_candidate_with_operators_of_onnx_runtime_are_known(tmp_path: Path) -> None:
    """Their types come from ONNX Runtime: without them, what is FP16 in the candidate was not known."""
    model = optimised(transformer(1), tmp_path)
    mixed = mptune.apply(model, None, tmp_path / "mixed.onnx", keep_fp32=["op:SkipLayerNormalization", "op:BiasGelu"])
    finding = the_finding("precision", compared(model, mixed, max_error=1e-6))
    groups = mptune.find_groups(load_typed_model(model))
    fp32 = [g for g in groups if {"SkipLayerNormalization", "BiasGelu"} & set(g.ops)]
    assert fp32
    assert finding.evidence["fp16_groups"] == len(groups) - len(fp32)


@pytest.mark.slow
def test_a_difference_that_bf16_makes(mlp_path: Path, tmp_path: Path) -> None:
    """FP16 would make an eighth of it, and explains nothing of it."""
    mixed = mptune.apply(mlp_path, None, tmp_path / "bf16.onnx", reduced="bf16")
    finding = the_finding("precision", compared(mlp_path, mixed, max_error=1e-4))
    assert finding.evidence["bf16_groups"] == len(mptune.find_groups(load_typed_model(mlp_path)))
    assert finding.evidence["fp16_groups"] == 0
    assert "emulating BF16 reproduces it" in finding.text
    assert "BF16 keeps 8 bits where FP16 keeps 11" in finding.text
    finding = the_finding("precision", compared(mlp_path, mixed, max_error=3e-3))
    assert finding.evidence["error_with_kept"] <= 3e-3
    assert "--bf16-all --keep-fp32" in finding.cure


def test_outputs_of_an_engine_in_bf16_are_known_as_such(mlp_path: Path, tmp_path: Path) -> None:
    loaded = load_typed_model(mlp_path)
    grouped = GroupedModel(loaded, mptune.find_groups(loaded))
    bank = WeightBank.write(loaded, tmp_path / "bank", precisions=REDUCED)
    path = Emulator(grouped, bank).write(grouped.uniform(Precision.BF16), tmp_path / "bank" / "emulated.onnx")
    np.savez(tmp_path / "recorded.npz", **run(path, data_of(mlp_path, np.random.default_rng(1), 16)))
    found = compared(mlp_path, outputs=tmp_path / "recorded.npz", max_error=1e-4, batch=16)
    assert "emulating BF16 reproduces it" in the_finding("precision", found).text


@pytest.mark.slow
def test_a_sparse_weight_is_the_same_in_both(tmp_path: Path) -> None:
    places = numpy_helper.from_array(np.array([1, 6, 11], np.int64), "places")
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(np.ones(3, np.float32), "s"), places, [4, 4])
    graph = "(float[1,4] x) => (float[1,4] y) { h = MatMul(x, s) y = MatMul(h, w) }"
    proto = models.text(graph, models.weight("w", 4, 4))
    proto.graph.sparse_initializer.append(sparse)
    path = models.save(proto, tmp_path)
    mixed = mptune.apply(path, None, tmp_path / "fp16.onnx")
    assert {finding.code for finding in compared(path, mixed).findings} == {"agrees"}


TYPES = {"FP32": (np.float32, "float", 1), "FP16": (np.float16, "float16", 10)}


def save_layers(folder: Path, name: str, inputs: str, inside: str) -> Path:
    """Two layers, with inputs and outputs of one type and all else in the other."""
    (_, outer, outer_number), (dtype, _, inner_number) = TYPES[inputs], TYPES[inside]
    nodes = f"""i = Cast<to = {inner_number}>(x) [first] a = MatMul(i, w0) b = Relu(a) [second] c = MatMul(b, w1)
        y = Cast<to = {outer_number}>(c)"""
    rng = np.random.default_rng(0)
    weights = [models.constant(f"w{k}", rng.normal(size=(16, n)) / 4, dtype) for k, n in enumerate((16, 8))]
    return models.save(models.text(f"({outer}[4,16] x) => ({outer}[4,8] y) {{ {nodes} }}", *weights), folder, name)


def samples(inputs: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(4, 16)).astype(TYPES[inputs][0])} for _ in range(4)]


@pytest.mark.parametrize(("of_model", "of_candidate"), [("FP32", "FP16"), ("FP16", "FP32"), ("FP16", "FP16")])
def test_models_with_fp16_inputs_are_fed_what_the_samples_say(of_model: str, of_candidate: str, tmp_path: Path) -> None:
    model = save_layers(tmp_path, "model.onnx", of_model, "FP32")
    candidate = save_layers(tmp_path, "candidate.onnx", of_candidate, "FP16")
    found = mptune.compare(model, candidate, data=samples(of_model), trace=True)
    assert found.verdict == "agrees"
    assert found.findings[0].evidence


def test_recorded_outputs_of_a_model_with_fp16_inputs(tmp_path: Path) -> None:
    model, fed = save_layers(tmp_path, "model.onnx", "FP16", "FP32"), samples("FP16")
    recorded = np.concatenate([recordings.session(model.read_bytes()).run(None, dict(one))[0] for one in fed])
    for name, values, agrees in (("sound", recorded, True), ("wrong", recorded * np.float16(1.5), False)):
        np.savez(tmp_path / f"{name}.npz", y=values)
        found = mptune.compare(model, data=fed, outputs=tmp_path / f"{name}.npz")
        assert (found.verdict == "agrees") == agrees, name


ROWS = {"x": np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)}
MASKS = 12
VARIANCES = np.random.default_rng(1).uniform(1e7, 9.8e7, 8)
LIMITED = {"limited variances": (VARIANCES, "attribute-differs"), "limited masks": (np.full(8, 9e3), "")}
"""Variances of the norm -> the code that is right where a converter limits constants to 10000."""


def masked_and_normed(variances: np.ndarray = VARIANCES) -> onnx.ModelProto:
    """Masks of -1e9 before a softmax, which may as well be -1e4, and a norm of large values with a tiny mean."""
    masks = " ".join(f'["/mask{k}"] m{k + 1} = Add(m{k}, mask{k})' for k in range(MASKS))
    graph = f"""(float[batch,16] x) => (float[batch,8] y) {{
        ["/fc"] m0 = MatMul(x, w) {masks} ["/softmax"] s = Softmax(m{MASKS}) ["/wide"] h = MatMul(s, v)
        ["/norm"] y = BatchNormalization(h, gamma, beta, mean, var) }}"""
    mask = np.where(np.arange(16) > 13, -1e9, 0.0)
    constants = {"gamma": np.linspace(0.5, 1.5, 8), "beta": [1e-8] * 8, "mean": [2e-9] * 8, "var": variances}
    constants |= {f"mask{k}": mask for k in range(MASKS)}
    weights = weight("w", 16, 16), weight("v", 16, 8, scale=2e3)
    return text(graph, *weights, *(constant(name, values) for name, values in constants.items()))


def converted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """As the converter's defaults do it: no constant beyond 10000, and none nearer to 0 than 1e-7."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return convert_float_to_float16(copy, keep_io_types=True, max_finite_val=1e4, min_positive_val=1e-7)


def with_factors(proto: onnx.ModelProto, factors: dict[str, float]) -> onnx.ModelProto:
    """Constants times factors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in copy.graph.initializer:
        if tensor.name in factors:
            values = onnx.numpy_helper.to_array(tensor) * np.float32(factors[tensor.name])
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return copy


def test_of_many_changed_constants_the_one_that_matters_is_named(tmp_path: Path) -> None:
    proto = masked_and_normed()
    left, right = save(proto, tmp_path), save(converted(proto), tmp_path, "half.onnx")
    found = mptune.compare(left, right, data=ROWS, trace=True)
    assert found.verdict == "differs"
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert finding.where.nodes == ("/norm",)
    assert finding.evidence["what"] == "var"
    assert finding.evidence["alone"] == pytest.approx(finding.evidence["error"], rel=0.1)
    named = [each.where.nodes for each in found.findings if each.severity != "info"]
    assert set(named) <= {("/norm",)}, "the trace adds no rounding as a cause"


def test_changed_constants_that_do_not_matter_are_no_difference(tmp_path: Path) -> None:
    proto = masked_and_normed(LIMITED["limited masks"][0])
    left, right = save(proto, tmp_path), save(converted(proto), tmp_path, "half.onnx")
    found = mptune.compare(left, right, data=ROWS, trace=True)
    assert {each.code: each.severity for each in found.findings} == {"agrees": "info", "first-difference": "info"}


def with_epsilon(proto: onnx.ModelProto) -> onnx.ModelProto:
    (norm,) = [each for each in proto.graph.node if each.name == "/norm"]
    norm.attribute.append(onnx.helper.make_attribute("epsilon", 1e-3))
    return proto


def with_zero_added(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same with another node."""
    next(each for each in proto.graph.node if each.name == "/mask0").input[0] = "plus"
    proto.graph.node.insert(1, node("Add", ["m0", "nothing"], "plus", "/plus"))
    proto.graph.initializer.append(constant("nothing", [0.0]))
    return proto


def with_tanh(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Another operator in the norm's place."""
    del proto.graph.node[-1:]
    proto.graph.node.append(node("Tanh", ["h"], "y", "/norm"))
    return proto


LITTLE = {f"mask{k}": 1e-3 for k in range(MASKS)}


@pytest.mark.parametrize(
    ("factors", "change", "nodes"),
    [
        ({"v": 1.3, "gamma": 3.0, "w": 1.0001, **LITTLE}, lambda proto: proto, ("/norm", "/wide")),
        ({"v": 1.3}, with_epsilon, ("/wide",)),
        ({"v": 1.3}, with_zero_added, ("/wide",)),
        (LITTLE, with_tanh, ("/norm",)),
    ],
    ids=["the largest effect first", "no attribute without effect", "no structure without effect", "another structure"],
)
def test_what_has_an_effect_is_named(
    factors: dict[str, float],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    nodes: tuple[str, ...],
    tmp_path: Path,
) -> None:
    proto = masked_and_normed(np.full(8, 4e7))
    other = save(change(with_factors(proto, factors)), tmp_path, "other.onnx")
    found = mptune.compare(save(proto, tmp_path), other, data=ROWS, trace=True)
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert finding.where.nodes == nodes
    assert [finding.text.index(name) for name in nodes] == sorted(finding.text.index(name) for name in nodes)


def test_where_none_makes_a_tenth_none_is_named(tmp_path: Path) -> None:
    """Every step of a long product has a little more."""
    count = 24
    nodes = " ".join(f'["/step{k}"] x{k + 1} = Mul(x{k}, c{k})' for k in range(count))
    constants = [constant(f"c{k}", [1.0] * 16) for k in range(count)]
    proto = text(f"(float[batch,16] x0) => (float[batch,16] x{count}) {{ {nodes} }}", *constants)
    other = with_factors(proto, {f"c{k}": 1.01 for k in range(count)})
    found = mptune.compare(save(proto, tmp_path), save(other, tmp_path, "other.onnx"), data={"x0": ROWS["x"]})
    (finding,) = [each for each in found.findings if each.code == "attribute-differs"]
    assert (found.verdict, finding.severity, finding.where.nodes) == ("differs", "warning", ())
    assert "none" in finding.text
    assert finding.evidence["together"] == pytest.approx(finding.evidence["error"], rel=0.01)


def test_a_norm_that_fp16_cannot_hold_makes_no_difference(tmp_path: Path) -> None:
    left = save(batch_norm(5e5), tmp_path)
    right = mptune.apply(left, None, tmp_path / "half.onnx")
    data = {"x": np.random.default_rng(0).standard_normal((8, CHANNELS, 8)).astype(np.float32)}
    found = mptune.compare(left, right, data=data, trace=True)
    assert found.verdict == "agrees"
    assert {each.severity for each in found.findings} == {"info"}


WEIGHT = np.random.default_rng(2).standard_normal((16, 16))


def replaced(array: np.ndarray, place: object, value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("left", "right", "dtype", "words"),
    [
        ([3.0], [2.0], np.float32, "1 of 1 values differ"),
        ([0.1, 22000.0, -18000.0, 1e-9], [0.1, 1e4, -1e4, 0.0], np.float16, "2 of 4 values differ"),
        ([0.1, -1e9], [0.1, -np.inf], np.float16, "1 are NaN or Inf in the candidate"),
        (WEIGHT, replaced(WEIGHT, (3, slice(4)), np.nan), np.float32, "4 are NaN or Inf in the candidate"),
    ],
)
def test_how_a_constant_differs(left: object, right: object, dtype: type, words: str) -> None:
    difference = constant_difference(np.array(left, np.float32), np.array(right, np.float32).astype(dtype))
    assert difference is not None
    said, values, _ = difference
    assert words in said
    assert values is not None
    if dtype is np.float32:
        np.testing.assert_array_equal(values, np.array(right, np.float32))


def test_a_rounded_constant_is_the_same() -> None:
    rounded = np.array([0.1, 65504], np.float16)
    for values in (rounded, rounded.astype(np.float32)):
        assert constant_difference(np.array([0.1, 7e4], np.float32), values) is None


def test_check_does_not_agree_where_onnx_runtime_differs(tmp_path: Path) -> None:
    """ONNX Runtime drops the rounding of what is compared, and compares 2093.75 with 2094."""
    graph, edge = (
        "(float[n,4] x) => (float[n,4] y) {{ {} c = GreaterOrEqual({}, edge) y = Cast<to = 1>(c) }}",
        [2093.75],
    )
    left = save(text(graph.format("", "x"), constant("edge", edge)), tmp_path)
    half = text(graph.format("h = Cast<to = 10>(x)", "h"), constant("edge", edge, np.float16))
    limits = {"data": {"x": np.float32([[100, *edge, 7, 3], [1, *edge, 2, 3e3]])}, "max_error": 1e-3, "against": left}
    found = mptune.check(save(half, tmp_path, "half.onnx"), **limits)
    assert (found.verdict, mptune.check(left, **limits).verdict) == ("differs", "agrees")
    assert "agrees node by node" in found.warnings[0]


def test_one_sample_far_beyond_the_limit_does_not_agree(tmp_path: Path) -> None:
    model, data = save(models.mlp(), tmp_path), data_of(save(models.mlp(), tmp_path), np.random.default_rng(3), 12)
    right = recordings.run(model, data, 1)
    right["y"][7] += 0.27 * right["y"].std()
    np.savez(tmp_path / "one.npz", **right)
    for limit, verdict in ((0.03, "differs"), (0.06, "agrees")):  # the mean over the samples is 0.0225
        found = mptune.compare(model, data=data, outputs=tmp_path / "one.npz", tolerance={"y": limit})
        assert (found.verdict, "sample 7 has an error of 0.27" in str(found.warnings)) == (
            verdict,
            verdict == "differs",
        )
