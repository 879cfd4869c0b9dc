"""``compare MODEL ENGINE --trace`` where the builder is wrong: the fusion is found, and the output that cures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import mptune
from mptune.engines.marks import Mark, Marks
from mptune.engines.ort.cuda_session import open_session
from mptune.engines.ort.session import SessionOptions
from mptune.engines.tensorrt.library import is_installed
from mptune.errors import BaselineError, RunError
from mptune.finding import Finding
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading import model as loading
from mptune.graph.plan import Precision
from mptune.settings import LatencySettings
from mptune.tuning.listener import Silent
from tests.conftest import save_mlp
from tests.device import building
from tests.device.blueprint import Blueprint
from tests.device.machines import ORIN, become
from tests.device.program import load_model

pytestmark = pytest.mark.skipif(not is_installed("tensorrt-rtx"), reason="tensorrt-rtx is not installed")

Load = Callable[[str], ModelProto]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[None]:
    with become("orin", tmp_path / "machine", is_alone=True) as here:
        yield
        assert here.broken() == []


def miscompiled(first: str, last: str, factor: float, base: Load = load_model, code: int = TensorProto.FLOAT) -> Load:
    """A builder that fuses two nodes by name, and then computes ``factor`` times what it should.

    It does not fuse them where the value between them is an output. Only in the type ``code`` it is wrong.
    """

    def load(path: str) -> ModelProto:
        model = base(path)
        nodes = {node.name: node for node in model.graph.node}
        types = {constant.name: constant.data_type for constant in model.graph.initializer}
        if not any(types.get(name) == code for node in (first, last) for name in nodes[node].input):
            return model
        between, end = nodes[first].output[0], nodes[last]
        assert between in end.input
        if between not in {output.name for output in model.graph.output}:
            true = end.output[0]
            end.output[0] = f"{true}/fused"
            by = f"{true}/factor"
            dtype = helper.tensor_dtype_to_np_dtype(code)
            model.graph.initializer.append(numpy_helper.from_array(np.array(factor, dtype), by))
            at = list(model.graph.node).index(end) + 1
            model.graph.node.insert(at, helper.make_node("Mul", [f"{true}/fused", by], [true]))
        return model

    return load


def wrong_everywhere(node: str, factor: float) -> Load:
    """A builder whose kernel for one node is wrong whatever is marked."""

    def load(path: str) -> ModelProto:
        model = load_model(path)
        (found,) = [one for one in model.graph.node if one.name == node]
        true, found.output[0] = found.output[0], f"{found.output[0]}/raw"
        model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
        at = list(model.graph.node).index(found) + 1
        model.graph.node.insert(at, helper.make_node("Mul", [f"{true}/raw", "factor"], [true]))
        return model

    return load


def save_branches(path: Path) -> Path:
    """Two branches of three nodes each, joined; a branch without a fault comes first in the order of the nodes."""
    rng = np.random.default_rng(1)
    weights = [numpy_helper.from_array(rng.normal(0, 0.3, (32, 32)).astype(np.float32), f"w{k}") for k in range(4)]
    nodes = []
    for side, offset in (("left", 0), ("right", 2)):
        nodes += [
            helper.make_node("MatMul", ["x", f"w{offset}"], [f"{side}.a"], f"{side}/a"),
            helper.make_node("Sigmoid", [f"{side}.a"], [f"{side}.b"], f"{side}/b"),
            helper.make_node("MatMul", [f"{side}.b", f"w{offset + 1}"], [f"{side}.c"], f"{side}/c"),
        ]
    nodes += [
        helper.make_node("Add", ["left.c", "right.c"], ["sum"], "join"),
        helper.make_node("Tanh", ["sum"], ["y"], "end"),
        helper.make_node("Neg", ["left.c"], ["z"], "other"),
    ]
    infos = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 32])] for n in ("x", "y", "z")]
    graph = helper.make_graph(nodes, "g", infos[0], infos[1] + infos[2], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def traced(model: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[Finding]:
    """What a comparison with the engine that this builder makes of the model says of fusions."""
    monkeypatch.setattr(building, "load_model", load)
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(3).standard_normal((4, 32)).astype(np.float32))
    shapes = {"x": ((1, 32), (1, 32), (1, 32))}
    made = Blueprint.of_model(load(str(model)), shapes=shapes, version=ORIN.tensorrt, capability=ORIN.capability)
    (tmp_path / "m.engine").write_bytes(made.to_bytes())
    found = mptune.compare(model, tmp_path / "m.engine", data=tmp_path / "data.npz", trace=True, **more)
    return fusions(found.findings)


def fusions(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.code in ("engine-differs", "fusion")]


FUSIONS = [
    ("block0/fc1/Gemm", "block0/fc1/Relu"),
    pytest.param("block0/norm", "block0/fc1/Gemm", marks=pytest.mark.slow),
    pytest.param("block1/fc1/Relu", "block1/fc2/Gemm", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("first", "last"), FUSIONS)
def test_the_output_that_cures_a_fusion_is_named(
    first: str, last: str, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")
    (finding,) = traced(model, miscompiled(first, last, 1.3), tmp_path, monkeypatch)
    between = next(node.output[0] for node in onnx.load(model).graph.node if node.name == first)
    assert finding.where.tensors == (between,)
    assert finding.where.nodes == (first, last)
    assert [one.name for one in finding.where.outputs] == ["y"]
    assert (finding.code, finding.severity, finding.evidence["marked"]) == ("fusion", "warning", between)
    layers = str(finding.evidence["layers"]).split(", ")
    assert [layer.partition("_myl")[0] for layer in layers] == [first, last]
    assert float(finding.evidence["relative_l2"]) > 1e-3 > float(finding.evidence["relative_l2_marked"])
    assert repr(between) in finding.cure


def test_a_fault_in_one_of_two_branches(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_branches(tmp_path / "branches.onnx")
    (finding,) = traced(model, miscompiled("right/a", "right/b", 1.2), tmp_path, monkeypatch)
    assert (finding.where.tensors, finding.where.nodes) == (("right.a",), ("right/a", "right/b"))
    assert [one.name for one in finding.where.outputs] == ["y"]


def test_without_a_cure_the_node_is_named(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_branches(tmp_path / "branches.onnx")
    (finding,) = traced(model, wrong_everywhere("left/b", 1.5), tmp_path, monkeypatch)
    assert (finding.code, finding.severity) == ("engine-differs", "error")
    assert (finding.where.tensors, finding.where.nodes) == ((), ("left/b",))
    assert {one.name for one in finding.where.outputs} == {"y", "z"}


def test_a_builder_that_is_right_gives_no_finding(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(save_branches(tmp_path / "branches.onnx"), load_model, tmp_path, monkeypatch) == []


def test_outputs_that_are_ignored_are_not_judged(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, load = save_branches(tmp_path / "branches.onnx"), wrong_everywhere("right/b", 1.5)
    assert traced(model, load, tmp_path, monkeypatch, ignore=["y"]) == []


def test_the_same_value_is_marked_in_every_block_where_one_is_not_enough(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_mlp(tmp_path / "mlp.onnx")

    def load(path: str) -> ModelProto:
        first = miscompiled("block0/fc1/Gemm", "block0/fc1/Relu", 1.3, load_model)(path)
        return miscompiled("block1/fc1/Gemm", "block1/fc1/Relu", 1.3, lambda _: first)(path)

    (finding,) = traced(model, load, tmp_path, monkeypatch)
    nodes = {node.name: node for node in onnx.load(model).graph.node}
    assert finding.code == "fusion"
    assert finding.where.tensors == tuple(nodes[f"block{k}/fc1/Gemm"].output[0] for k in (0, 1))
    assert " and 1 value like it in other blocks marked as outputs" in finding.text


QUICK = LatencySettings(warmup_ms=0.0, duration_ms=1.0, min_iterations=10)
FUSED = ("block0/fc1/Gemm", "block0/fc1/Relu")


@pytest.mark.parametrize("code", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_search_builds_its_engines_with_the_output_that_cures_them(
    code: int, here: None, mlp_path: Path, mlp_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all-FP32 (NVIDIA/TensorRT#4813) and of all-FP16 (#4854): the other one is right, and stays as it is."""
    is_half, run = code == TensorProto.FLOAT16, tmp_path / "run"
    monkeypatch.setattr(building, "load_model", miscompiled(*FUSED, 1.3, code=code))
    front = mptune.search(mlp_path, data=mlp_data, out=run, confirm_rounds=1, latency=QUICK, budget=2)
    (finding,) = fusions(front.findings)
    assert (finding.code, finding.severity, finding.where.tensors) == ("fusion", "warning", ("block0.wide",))
    assert finding.where.nodes == FUSED
    assert "block0/fc1/Gemm_myl" in finding.text
    assert front.fp32 is not None
    assert front.fp16 is not None
    assert front.fp32.error_value < 1e-5
    assert 1e-5 < front.fp16.error_value < 1e-2
    assert len(list((run / "engines").glob("*.engine"))) == 2
    outputs = [_outputs_of(each.engine_path) for each in (front.fp32, front.fp16)]
    marked = ["y", "block0.wide"]
    assert outputs == ([["y"], marked] if is_half else [marked, ["y"]])

    wrong, right = (front.fp16, front.fp32) if is_half else (front.fp32, front.fp16)
    mptune.pick(run, plan=wrong.plan.fingerprint)
    chosen = run / "chosen"
    model, twin = onnx.load(chosen / "model.onnx"), onnx.load(chosen / "marked.onnx")
    assert [output.name for output in model.graph.output] == ["y"]
    assert [(output.name, output.type.tensor_type.elem_type) for output in twin.graph.output] == [
        ("y", TensorProto.FLOAT),
        ("block0.wide", code),
    ]
    assert "--onnx=marked.onnx" in (chosen / "build.sh").read_text()
    assert "marked.onnx  model.onnx with further outputs" in (chosen / "README.txt").read_text()
    feeds = {"x": np.load(mlp_data)["x"][:1]}
    ours, theirs = (
        open_session(chosen / f"{name}.onnx", SessionOptions(timing=False)).run(feeds)["y"]
        for name in ("model", "marked")
    )
    np.testing.assert_array_equal(ours, theirs)
    assert _outputs_of(chosen / "model.engine") == marked
    mptune.pick(run, plan=right.plan.fingerprint)
    assert not (chosen / "marked.onnx").exists()
    assert "--onnx=model.onnx" in (chosen / "build.sh").read_text()

    monkeypatch.setattr(building, "load_model", load_model)
    again = mptune.search(mlp_path, data=mlp_data, out=run, confirm_rounds=1, latency=QUICK, budget=3)
    assert fusions(again.findings) == [finding]


def test_a_search_stops_where_nothing_cures_the_fp32_engine(
    here: None, mlp_path: Path, mlp_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "load_model", wrong_everywhere("block0/fc1/Relu", 1.5))
    said = Said()
    with pytest.raises(BaselineError, match="the all-FP32 engine is off by") as error:
        mptune.search(mlp_path, data=mlp_data, out=tmp_path / "run", latency=QUICK, budget=2, listener=said)
    assert [finding.code for finding in error.value.findings] == ["engine-differs"]
    (warning,) = [text for text in said.warnings if "cures it" in text]
    assert warning.endswith("what is wrong begins among 'block0/fc1/Relu'")
    assert Marks.load(tmp_path / "run" / "engines") == Marks()
    assert not list((tmp_path / "run" / "engines").glob("marked*"))


def test_a_sound_builder_is_not_looked_into(here: None, mlp_path: Path, mlp_data: Path, tmp_path: Path) -> None:
    said = Said()
    front = mptune.search(
        mlp_path, data=mlp_data, out=tmp_path / "run", confirm_rounds=1, latency=QUICK, budget=2, listener=said
    )
    assert fusions(front.findings) == []
    assert not any("is far off" in text for text in said.stages)


class Said(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.stages: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def stage(self, text: str) -> None:
        self.stages.append(text)


def test_a_mark_is_for_plans_with_the_precisions_that_it_was_seen_with(mlp_path: Path, tmp_path: Path) -> None:
    network = loading.load_model(mlp_path)
    grouped = GroupedModel(network, find_groups(network))
    first, second = (group.id for group in grouped.groups[:2])
    half, full = grouped.uniform(Precision.FP16), grouped.uniform(Precision.FP32)
    marks = Marks((Mark("a", {first: Precision.FP16, second: Precision.FP16}), Mark("b", {first: Precision.FP32})))
    marks.save(tmp_path)
    read = Marks.load(tmp_path)
    assert read == marks
    assert [read.of(plan) for plan in (half, full, full.replace({second: Precision.FP16}))] == [("a",), ("b",), ("b",)]
    assert read.of(half.replace({second: Precision.FP32})) == ()
    (tmp_path / "marks.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read") as error:
        Marks.load(tmp_path)
    assert "delete it" in error.value.hint


def _outputs_of(engine: Path | str | None) -> list[str]:
    blueprint = Blueprint.from_bytes(Path(str(engine)).read_bytes())
    assert blueprint is not None
    return [tensor.name for tensor in blueprint.tensors if not tensor.is_input]
