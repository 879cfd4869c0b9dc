"""Models as they are given and written: plans by nodes and patterns, what is never overwritten, what must load."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, version_converter

import mptune
import mptune.graph.writing.weights
from mptune.cli import main
from mptune.engines import loading
from mptune.errors import ModelError, PlanError, RunError
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import PRECISIONS, Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.processes.parent import Worker
from tests.graph import models
from tests.graph.helpers import relative_l2, run
from tests.graph.models import constant, text, weight
from tests.zoo.numbers import SHOWN, weights


@dataclass(frozen=True)
class Applied:
    """A mixed model, which of its constants are reduced, and what was said: warnings, and that nothing was tried."""

    path: Path
    fp16: set[str]
    bf16: set[str]
    warnings: list[str]
    untried: str

    def errs(self, source: Path, feed: dict[str, np.ndarray]) -> float:
        return relative_l2(run(self.path, feed)["y"], run(source, feed)["y"])

    @property
    def doubts(self) -> list[str]:
        return [text for text in self.warnings if "FP16 cannot be right there" in text]


Apply = Callable[..., Applied]


@pytest.fixture
def apply(tmp_path: Path) -> Apply:
    """Apply a plan, which may be a plan's document, to a model or its file; None is all FP16."""
    numbers = count()

    def applied(model: Path | onnx.ModelProto, plan: object = None, **options: object) -> Applied:
        source = models.save(model, tmp_path) if isinstance(model, onnx.ModelProto) else model
        if isinstance(plan, dict):
            (tmp_path / "plan.json").write_text(json.dumps(plan))
            plan = tmp_path / "plan.json"
        warnings: list[str] = []
        out = tmp_path / f"out{next(numbers)}.onnx"
        mptune.apply(source, plan, out, warn=warnings.append, **options)  # type: ignore[arg-type]
        reduced = [(c.name.rpartition("__"), c.dtype) for c in load_model(out).initializers.values()]
        fp16, bf16 = ({name for (name, _, _), dtype in reduced if dtype == d} for d in ("float16", "bfloat16"))
        untried = [text for text in warnings if "nothing was tried" in text]
        return Applied(out, fp16, bf16, [text for text in warnings if text not in untried], "\n".join(untried))

    return applied


def uniform(path: Path) -> PrecisionPlan:
    model = load_model(path)
    return PrecisionPlan.uniform(model.sha256, [g.id for g in find_groups(model)], Precision.FP16)


def test_a_plan_by_nodes(mlp_path: Path, apply: Apply) -> None:
    mixed = apply(mlp_path, {"nodes": {"block0/*": "fp16", "block0/fc2/*": "fp32"}})
    assert mixed.fp16 == {"block0.w1", "block0.b1", "block0.gain", "block0.shift"}
    feed = {"x": np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)}
    assert 0 < mixed.errs(mlp_path, feed) < 1e-2


def test_a_precision_where_it_can_be_right(apply: Apply) -> None:
    """A mask of -1e9 is held as -65504; a weight of 1e5 would be, and nothing here shows what that does."""
    every = {"wq", "wk", "wv", "scale", "huge", "one"}
    mixed = apply(models.attention(mask=-1e9))
    assert (mixed.fp16, mixed.bf16, mixed.warnings) == (every, set(), [])
    mixed = apply(models.attention(mask=-1e9), reduced="bf16")
    assert (mixed.fp16, mixed.bf16, mixed.warnings) == (set(), every, [])
    mixed = apply(models.product(np.eye(4) * 1e5))
    (warning,) = mixed.warnings
    assert not mixed.fp16
    assert "stays in FP32: w: 4 of 16 values exceed FP16's 65504 and are held as 65504" in warning
    mixed = apply(models.product(np.eye(4) * 1e5), {"nodes": {"*": "fp16"}})
    assert mixed.fp16 == {"w"}, "a plan by nodes is obeyed, and doubted"
    assert mixed.doubts
    mixed = apply(models.product(np.eye(4) * np.finfo(np.float32).max), reduced="bf16")
    assert not mixed.bf16
    assert [text for text in mixed.warnings if "stays in FP32" in text]


@pytest.mark.parametrize(
    ("patterns", "fp32"),
    [
        (["kind:norm"], {"block0.gain", "block0.shift", "block1.gain", "block1.shift"}),
        (["op:Softmax", "head/*"], {"head.w", "head.b"}),
        (["block1/*"], {f"block1.{n}" for n in ("gain", "shift", "w1", "b1", "w2", "b2")}),
    ],
)
def test_patterns_that_stay_in_fp32(patterns: list[str], fp32: set[str], mlp_path: Path, apply: Apply) -> None:
    weights = {c.name for c in load_model(mlp_path).initializers.values()}
    for plan in (None, {"nodes": {"*": "fp16"}}, uniform(mlp_path)):
        assert apply(mlp_path, plan, keep_fp32=patterns).fp16 == weights - fp32


@pytest.mark.parametrize("granularity", ["op", "fusion", "block"])
def test_a_plan_of_any_granularity_is_known_by_its_nodes(granularity: str, tmp_path: Path, apply: Apply) -> None:
    """Two granularities may have equally many groups; the nodes tell which one is meant."""
    path = models.save(models.decomposed_norm(), tmp_path)
    model = load_model(path)
    groups = find_groups(model, granularity)  # type: ignore[arg-type]
    rewriter = Rewriter(GroupedModel(model, groups))
    plan = PrecisionPlan(model.sha256, {g.id: list(PRECISIONS)[k % 2] for k, g in enumerate(groups)})
    expected = rewriter.export(plan, tmp_path / "expected.onnx").read_bytes()
    assert apply(path, plan.to_json(rewriter.types.node_precisions(plan))).path.read_bytes() == expected


def test_a_plan_of_other_groups_is_carried_out_by_its_nodes(mlp_path: Path, apply: Apply) -> None:
    nodes = {"head/Gemm": "fp16", "mixing/Softmax": "fp32"}
    mixed = apply(mlp_path, {"format": 1, "precision": {"g000": "fp16"}, "nodes": nodes})
    assert mixed.fp16 == {"head.w", "head.b"}
    assert "another version's" in mixed.warnings[0]


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


def test_precision_and_nodes_that_contradict_each_other(mlp_path: Path, apply: Apply) -> None:
    with pytest.raises(PlanError, match="contradict"):
        apply(mlp_path, {**uniform(mlp_path).to_json(), "nodes": {"head/Gemm": "fp32"}})


def big(folder: Path) -> Path:
    """A model whose weights lie in big.onnx.data."""
    proto = text("(float[2,64] x) => (float[2,64] y) { y = MatMul(x, w) }", weight("w", 64, 64))
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


def trained(seed: int, scale: float, folder: Path, name: str = "second") -> Path:
    """A product, its squares and another product, with weights of this seed and size."""
    rng = np.random.default_rng(seed)
    graph = f"""(float[1,32] x) => (float[1,8] y) <float two = {{2}}> {{
        ["first"] h = MatMul(x, w) ["power"] p = Pow(h, two) ["{name}"] y = MatMul(p, v) }}"""
    weights = constant("w", rng.normal(0, scale, (32, 32))), constant("v", rng.normal(0, 0.1, (32, 8)))
    return models.save(text(graph, *weights), folder, f"trained{seed}{name}.onnx")


@pytest.fixture
def all_half(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """A model and the document of a plan of a search, all in FP16."""
    path = trained(1, 0.2, tmp_path)
    model = load_model(path)
    rewriter = Rewriter(GroupedModel(model, find_groups(model)))
    plan = uniform(path)
    return path, plan.to_json(rewriter.types.node_precisions(plan))


DATA = {"x": np.random.default_rng(5).standard_normal((8, 32)).astype(np.float32)}


def test_a_plan_of_a_model_that_was_trained_again(all_half: tuple[Path, dict], tmp_path: Path, apply: Apply) -> None:
    searched, plan = all_half
    retrained = trained(2, 0.2, tmp_path)
    mixed = apply(retrained, plan)
    assert len(mixed.fp16) == len(apply(searched, plan).fp16) > 0
    assert 0 < mixed.errs(retrained, {"x": DATA["x"][:1]}) < 1e-2
    (same_nodes,) = mixed.warnings
    assert "with the same nodes: its precisions are used" in same_nodes
    assert "give --data PATH" in mixed.untried
    assert apply(retrained, plan, data=DATA).warnings == [same_nodes], "its values fit FP16"
    assert apply(searched, plan, data=DATA).warnings == []
    assert not apply(searched, plan).untried, "a search has tried it"
    (doubt, *_) = apply(searched, plan, data={"x": DATA["x"] * 1000}).doubts
    assert "p: reached" in doubt
    with pytest.raises(PlanError, match="with other nodes, such as 'second'") as caught:
        apply(trained(2, 0.2, tmp_path, "third"), plan)
    assert "trained again" in caught.value.hint


def test_a_pin_that_is_missing_in_the_plan_is_named(all_half: tuple[Path, dict], tmp_path: Path, apply: Apply) -> None:
    wild = trained(3, 40.0, tmp_path)
    doubts = apply(wild, all_half[1], data=DATA).doubts
    assert any("p: reached" in text for text in doubts)
    mixed = apply(wild, all_half[1], keep_fp32=[text.rsplit("--keep-fp32 ", 1)[1] for text in doubts], data=DATA)
    assert mixed.doubts == [], "the option that is named cures it"
    assert np.isfinite(mixed.errs(wild, {"x": DATA["x"][:1]}))
    mixed = apply(wild, data=DATA)
    (stays,) = mixed.warnings
    assert "stay in FP32: p: reached" in stays, "all FP16 keeps what the data show"
    assert np.isfinite(mixed.errs(wild, {"x": DATA["x"][:1]}))


def test_fp16_all_warns_with_what_the_structure_shows(apply: Apply) -> None:
    mixed = apply(models.decomposed_norm(1e-9))
    assert [text.split(": ")[0] for text in mixed.warnings] == ["vanishing-epsilon", "norm-written-out"]
    assert "the constant 1e-09 is zero in FP16" in mixed.warnings[0]
    assert "wrote 3 groups in FP16; nothing was tried" in mixed.untried
    mixed = apply(models.product(np.eye(4) * 1e5))
    assert "wrote 1 group in FP32 (1 pinned); nothing was tried" in mixed.untried
    assert apply(models.decomposed_norm(1e-9), keep_fp32=["/norm/*"]).warnings == [], "kept, hence no doubt"


def test_equal_norms_are_one_line(apply: Apply) -> None:
    norm = "q{k} = Mul(h{k}, h{k}) v{k} = ReduceMean<axes = [-1]>(q{k}) e{k} = Add(v{k}, eps) s{k} = Sqrt(e{k})"
    blocks = [f"{norm} n{{k}} = Div(h{{k}}, s{{k}}) h{{n}} = MatMul(n{{k}}, w)".format(k=k, n=k + 1) for k in range(7)]
    nodes = f"h0 = MatMul(x, w) {' '.join(blocks)} y = Identity(h7)"
    proto = text(f"(float[n,8] x) => (float[n,8] y) <float eps = {{1e-3}}> {{ {nodes} }}", weight("w", 8, 8))
    (line,) = apply(proto).warnings
    assert line.startswith("norm-written-out: value 'q0'")
    assert line.endswith("and 3 more")


@pytest.mark.parametrize("name", ["vanishing-epsilon", "spacing before ArgMax", "cancellation"])
def test_what_samples_show_stays_in_fp32_unless_a_plan_asks(name: str, apply: Apply, tmp_path: Path) -> None:
    """A denominator that reaches zero, an ArgMax that changes: nothing is written that would be warned of."""
    show = SHOWN[name][0]()
    source = models.save(show.proto, tmp_path)
    mixed = apply(source, data=show.data)
    assert mixed.fp16
    assert not mixed.untried
    assert [text for text in mixed.warnings if not re.search("stays? in FP32: ", text)] == []
    assert mptune.check(mixed.path, against=source, data=show.data, max_error=1e-3).agrees
    obeyed = apply(source, {"nodes": {"*": "fp16"}}, data=show.data)
    assert obeyed.fp16 > mixed.fp16
    assert obeyed.warnings


def test_groups_that_are_kept_in_bf16(apply: Apply) -> None:
    proto = models.attention(mask=-1e9)
    mixed = apply(proto, keep_bf16=["*mask*"])
    assert (mixed.bf16, mixed.fp16) == ({"huge", "one"}, {"wq", "wk", "wv", "scale"})
    mixed = apply(proto, {"nodes": {"*": "fp16"}}, keep_bf16=["*"], keep_fp32=["*mask*"])
    assert mixed.bf16 == {"wq", "wk", "wv", "scale"}
    with pytest.raises(PlanError, match="keep_bf16= nowhere/\\* matches nothing"):
        apply(proto, keep_bf16=["nowhere/*"])


def test_what_has_no_bf16_stays_and_is_said(apply: Apply) -> None:
    plan = {"nodes": {"*": "bf16"}}
    mixed = apply(models.cnn(), plan)
    assert "w" not in mixed.bf16, "the convolution's"
    (warning,) = [text for text in mixed.warnings if "BF16" in text]
    assert "ONNX has no BF16 for Conv" in warning
    assert "--opset 22" in warning
    raised = apply(models.cnn(), plan, opset=22)
    assert "w" in raised.bf16
    assert load_model(raised.path).opset == 22
    assert not [text for text in raised.warnings if "has no BF16" in text]


LAYERNORM = Path(__file__).parent / "graph" / "corpus" / "layernorm_13.onnx"


def stale(proto: onnx.ModelProto) -> None:
    """The file says FP16 of a value that the nodes compute in FP32."""
    proto.graph.value_info.append(models.value("h", ["batch", 16], TensorProto.FLOAT16))


def unknown_operator(proto: onnx.ModelProto) -> None:
    proto.graph.node[3].domain, proto.graph.node[3].op_type = "com.example", "MyRelu"


def mixed_operands(proto: onnx.ModelProto) -> None:
    """An Add of FP32 and FP16."""
    proto.graph.initializer[3].CopyFrom(models.constant("b1", np.zeros(16), np.float16))


def shared_name(proto: onnx.ModelProto) -> None:
    """ONNX lets nodes share a name, ONNX Runtime does not."""
    proto.graph.node[2].name = proto.graph.node[1].name


def lost_weights(proto: onnx.ModelProto) -> None:
    tensor = proto.graph.initializer[2]
    onnx.external_data_helper.set_external_data(tensor, "weights.bin")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL


@pytest.fixture
def mlp(tmp_path: Path) -> tuple[Path, Path]:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    return models.save(models.mlp(), tmp_path), tmp_path / "data.npz"


@pytest.mark.parametrize(
    ("command", "spoil", "says"),
    [
        ("check", stale, "candidate.onnx does not load: Type Error"),
        ("compare", unknown_operator, "candidate.onnx does not load: Fatal error: com.example:MyRelu"),
        ("check", shared_name, "candidate.onnx does not load: "),
        ("compare", mixed_operands, "candidate.onnx does not type-check"),
        ("check", lost_weights, "weights.bin"),
    ],
)
def test_a_candidate_that_does_not_load_is_an_error(
    command: str,
    spoil: Callable[[onnx.ModelProto], None],
    says: str,
    mlp: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, data = mlp
    proto = models.mlp()
    spoil(proto)
    candidate = models.save(proto, path.parent, "candidate.onnx")
    words = f"{candidate} --against {path} --max-error 0.1" if command == "check" else f"{path} {candidate}"
    assert main([command, *words.split(), "--data", str(data)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_a_candidate_with_external_data_and_one_without_cpu_kernels_are_compared(
    mlp: tuple[Path, Path], tmp_path: Path
) -> None:
    path, data = mlp
    (tmp_path / "other").mkdir()
    outside = tmp_path / "other" / "model.onnx"
    onnx.save(models.mlp(), outside, save_as_external_data=True, size_threshold=0)
    assert mptune.check(outside, against=path, data=data, max_error=1e-6).agrees
    bf16 = mptune.apply(path, None, tmp_path / "bf16.onnx", reduced="bf16")
    assert mptune.check(bf16, against=path, data=data, max_error=0.1).agrees


def test_what_only_an_optimisation_breaks_is_a_warning(tmp_path: Path) -> None:
    """A valid model that ONNX Runtime's LayerNormFusion breaks."""
    source = tmp_path / "raised.onnx"
    onnx.save(version_converter.convert_version(onnx.load(LAYERNORM), 17), source)
    warned: list[str] = []
    mixed = mptune.apply(source, None, tmp_path / "mixed.onnx", keep_fp32=["kind:norm"], warn=warned.append)
    with pytest.raises(Exception, match="/LayerNormFusion/"):  # where this no longer fails, nothing is to be said
        onnxruntime.InferenceSession(str(mixed), providers=["CPUExecutionProvider"])
    assert any("without graph optimisations only" in text for text in warned)
    data = np.random.default_rng(0).standard_normal((6, 9, 16), np.float32)
    comparison = mptune.compare(source, mixed, data=data)
    assert comparison.agrees
    assert f"{mixed} loads in ONNX Runtime without graph optimisations only" in comparison.warnings[0]


def test_apply_says_where_the_source_does_not_load_either(mlp: tuple[Path, Path], tmp_path: Path) -> None:
    proto = models.mlp()
    unknown_operator(proto)
    warned: list[str] = []
    out = mptune.apply(models.save(proto, tmp_path), None, tmp_path / "out.onnx", warn=warned.append)
    assert out.exists()
    assert "out.onnx does not load: Fatal error: com.example:MyRelu" in warned[-1]
    assert "nor does" in warned[-1]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewriter has a fault: what it exports contradicts its own types."""
    export = Rewriter.export

    def spoil(self: Rewriter, plan: mptune.PrecisionPlan, path: Path, *others: object) -> Path:
        export(self, plan, path, *others)  # type: ignore[arg-type]
        proto = onnx.load(path)
        proto.graph.value_info.append(models.value(proto.graph.node[0].output[0], None, TensorProto.DOUBLE))
        onnx.save(proto, path)
        return path

    monkeypatch.setattr(Rewriter, "export", spoil)


@pytest.mark.usefixtures("spoilt")
def test_apply_writes_nothing_that_does_not_load(mlp: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = mlp
    out = tmp_path / "new" / "out.onnx"
    with pytest.raises(ModelError, match=r"out\.onnx does not load") as caught:
        mptune.apply(path, None, out)
    assert caught.value.exit_code == 1
    assert "a fault of mptune" in caught.value.hint
    assert list(out.parent.iterdir()) == []
    out.write_text("what was there")
    with pytest.raises(ModelError):
        mptune.apply(path, None, out, force=True)
    assert [each.read_text() for each in out.parent.iterdir()] == ["what was there"]


@pytest.mark.usefixtures("spoilt")
def test_a_search_ships_nothing_that_does_not_load(mlp: tuple[Path, Path], tmp_path: Path) -> None:
    path, data = mlp
    with pytest.raises(ModelError, match="does not load: Type Error"):
        mptune.search(path, data=data, out=tmp_path / "run", budget=3, target="jetson-orin-nano-8gb")
    assert not (tmp_path / "run" / "chosen").exists()


def test_a_search_opens_its_model_once(mlp: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    call = Worker.call

    def noted(worker: Worker, job: object, timeout_s: float | None = None) -> object:
        opened.extend([job.model] if isinstance(job, loading.OpenJob) else [])
        return call(worker, job, timeout_s)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "call", noted)
    path, data = mlp
    for _ in range(2):
        mptune.search(path, data=data, out=tmp_path / "run", budget=3, target="jetson-orin-nano-8gb")
    assert [each.name for each in opened] == ["model.onnx"]


def save_pooled(pool: str) -> None:
    """Features of an image, pooled: their sum leaves FP16's range where the image is large, their mean does not."""
    graph = f"""(float[n,3,h,w_] image) => (float[n,1024] y) <float one = {{1}}> {{
        c = Conv(image, w) r = Relu(c) s = Add(r, one) p = {pool}(s) y = MatMul(p, v) }}"""
    constants = weights("w", 256, 3, 1, 1), weights("v", 256, 1024), constant("axes", [2, 3], np.int64)
    models.save(text(graph.replace("(s)", "(s, axes)" if "Sum" in pool else "(s)"), *constants), Path())


def images(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    return (rng.uniform(0.2, 1, (3, 3, 1, 1)) * rng.uniform(0.9, 1, (3, 3, size, size))).astype(np.float32)


SUM, MEAN = "ReduceSum<keepdims = 0>", "ReduceMean<axes = [2, 3], keepdims = 0>"


@pytest.mark.parametrize(("pool", "exit_code"), [(SUM, 3), (MEAN, 0)])
def test_check_shows_another_size(pool: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_pooled(pool)
    assert main(["apply", "model.onnx", "--fp16-all", "-o", "mixed.onnx"]) == 0
    for size, wanted in ((16, 0), (256, exit_code)):
        np.savez("data.npz", image=images(size))
        words = ["check", "mixed.onnx", "--against", "model.onnx", "--data", "data.npz", "--max-error", "1e-2"]
        assert main(words) == wanted


def test_a_search_says_that_one_size_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_pooled(MEAN)
    given = {"budget": 1, "target": "jetson-orin-nano-8gb"}
    front = mptune.search("model.onnx", data=images(16), **given)
    (finding,) = [f for f in front.findings if f.code == "one-size-tried"]
    assert (finding.severity, finding.where.inputs) == ("info", ("image",))
    assert "image 1x3x16x16" in finding.text
    assert "--data other.npz --max-error 1e-2" in finding.cure
    assert "one-size-tried" not in capsys.readouterr().err, "it is no warning"
    several = [{"image": images(size)[:1]} for size in (16, 32)] * 2
    front = mptune.search("model.onnx", data=several, out="several.mptune", **given)
    assert "one-size-tried" not in {f.code for f in front.findings}
