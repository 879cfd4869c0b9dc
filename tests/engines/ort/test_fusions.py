"""What ONNX Runtime says that it fuses, of real sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.engines.base import Failure
from mptune.engines.ort.fusions import FusionsJob, OptimisedNode, fused_nodes, may_fuse
from mptune.engines.toolchains.onnxruntime import OnnxRuntimeToolchain
from mptune.engines.toolchains.predicted import PredictedToolchain
from mptune.engines.worker.child import WorkerState
from mptune.engines.workload import Workload
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision
from mptune.graph.writing.rewrite import Rewriter
from mptune.settings import SearchSettings
from mptune.targets.target import load_target
from tests.engines.engine_support import make_workspace
from tests.graph.norms_written_out import FORMS, X, layer_norm, rms_norm

STEPS = ("n_q", "n_m", "n_a", "n_s", "n_d", "n_y")


def asked(model: Model, folder: Path) -> tuple[FusedNodes, ...]:
    grouped = GroupedModel(model, find_groups(model))
    typed = Rewriter(grouped).write(grouped.uniform(Precision.FP16), folder / "typed.onnx")
    empty = folder / "optimised"
    empty.mkdir()
    found = FusionsJob(typed, empty, "cpu").run(WorkerState())
    assert not list(empty.iterdir())
    return fused_nodes(grouped, found)


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("end", FORMS)
def test_an_rms_norm_is_fused(tmp_path: Path, opset: int, end: str) -> None:
    (norm,) = asked(rms_norm(tmp_path, opset=opset, end=end), tmp_path)
    steps = STEPS if end == "divided" else ("n_q", "n_m", "n_a", "n_s", "n_r", "n_d", "n_y")
    assert norm == FusedNodes(steps, "h")


def test_one_whose_square_is_a_product_is_not(tmp_path: Path) -> None:
    model = rms_norm(tmp_path, square="Mul")
    assert may_fuse(GroupedModel(model, find_groups(model)))
    assert asked(model, tmp_path) == ()


def test_a_layer_norm_that_a_cast_before_it_would_break_does_not_count(tmp_path: Path) -> None:
    assert asked(layer_norm(tmp_path, opset=17), tmp_path) == ()


@pytest.mark.parametrize("operator", ["LayerNormalization", "SkipLayerNormalization"])
def test_below_opset_17_it_counts(tmp_path: Path, operator: str) -> None:
    """As the CUDA provider says; the CPU provider fuses a part of it."""
    model = layer_norm(tmp_path, opset=13)
    steps = ("n_mu", "n_c", "n_q", "n_m", "n_a", "n_s", "n_d", "n_e", "n_y")
    beside = ("n_h",) if operator.startswith("Skip") else ()
    found = OptimisedNode(operator, (*beside, *reversed(steps)), "n_y", beside, 1e-5)
    grouped = GroupedModel(model, find_groups(model))
    assert fused_nodes(grouped, [found]) == (FusedNodes(steps, "h"),)
    assert fused_nodes(grouped, [OptimisedNode(operator, ("n_h", *steps), "n_y", (), 1e-5)]) == ()  # of two groups


def test_a_model_without_such_norms_is_not_asked(mlp_workload: Workload) -> None:
    assert not may_fuse(mlp_workload.grouped)
    toolchain = OnnxRuntimeToolchain(load_target("cpu"), mlp_workload, SearchSettings())
    assert toolchain.fused_nodes() == ()
    assert toolchain._worker.pid is None  # no process was started


def test_an_error_is_emulated_as_the_engine_computes(tmp_path: Path) -> None:
    """Of a norm whose squares FP16 does not hold: ONNX Runtime keeps them in FP32."""
    workload = workload_of(rms_norm(tmp_path), tmp_path)
    with OnnxRuntimeToolchain(load_target("cpu"), workload, SearchSettings()) as toolchain:
        assert not isinstance(toolchain.reference("search"), Failure)
        assert not isinstance(toolchain.observe(), Failure)
        found = toolchain.emulate([workload.grouped.uniform(Precision.FP16)])
        assert not isinstance(found, Failure), found
        assert 1e-5 < found[0].value("relative_l2") < 1e-3
        assert not list(workload.workspace.weights_dir.glob("*fusions*"))


def test_of_an_engine_that_is_built_elsewhere_each_step_is_emulated(tmp_path: Path) -> None:
    workload = workload_of(rms_norm(tmp_path), tmp_path)
    toolchain = PredictedToolchain(load_target("jetson-orin-nano-8gb"), workload, SearchSettings())
    assert toolchain.fused_nodes() == ()
    assert toolchain._as_computed() is workload.grouped


def workload_of(model: Model, folder: Path) -> Workload:
    return Workload(GroupedModel(model, find_groups(model)), make_workspace(model.path, folder, {"x": X}, count=1))
