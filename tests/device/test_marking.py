"""``compare MODEL ENGINE --trace`` where the builder is wrong: the fusion is found, and the output that cures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import mptune
from mptune.engines.tensorrt.library import is_installed
from mptune.finding import Finding
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


def miscompiled(first: str, last: str, factor: float) -> Load:
    """A builder that fuses two nodes by name, and then computes ``factor`` times what it should.

    It does not fuse them where the value between them is an output.
    """

    def load(path: str) -> ModelProto:
        model = load_model(path)
        nodes = {node.name: node for node in model.graph.node}
        between, end = nodes[first].output[0], nodes[last]
        assert between in end.input
        if between not in {output.name for output in model.graph.output}:
            true = end.output[0]
            end.output[0] = f"{true}/fused"
            model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
            at = list(model.graph.node).index(end) + 1
            model.graph.node.insert(at, helper.make_node("Mul", [f"{true}/fused", "factor"], [true]))
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
    """The findings ``engine-differs`` of a comparison with the engine that this builder makes of the model."""
    monkeypatch.setattr(building, "load_model", load)
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(3).standard_normal((4, 32)).astype(np.float32))
    shapes = {"x": ((1, 32), (1, 32), (1, 32))}
    made = Blueprint.of_model(load(str(model)), shapes=shapes, version=ORIN.tensorrt, capability=ORIN.capability)
    (tmp_path / "m.engine").write_bytes(made.to_bytes())
    found = mptune.compare(model, tmp_path / "m.engine", data=tmp_path / "data.npz", trace=True, **more)
    return [finding for finding in found.findings if finding.code == "engine-differs"]


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
    assert (finding.severity, finding.evidence["marked"]) == ("error", between)
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
    assert (finding.where.tensors, finding.where.nodes) == ((), ("left/b",))
    assert {one.name for one in finding.where.outputs} == {"y", "z"}


def test_a_builder_that_is_right_gives_no_finding(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(save_branches(tmp_path / "branches.onnx"), load_model, tmp_path, monkeypatch) == []


def test_outputs_that_are_ignored_are_not_judged(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, load = save_branches(tmp_path / "branches.onnx"), wrong_everywhere("right/b", 1.5)
    assert traced(model, load, tmp_path, monkeypatch, ignore=["y"]) == []
