"""What ONNX Runtime says that it fuses, of real sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.base import Failure
from mptune.engines.context import RunContext
from mptune.engines.jobs.emulation import SwitchedErrorsJob
from mptune.engines.jobs.reference import ReferenceJob
from mptune.engines.jobs.samples import Scoring
from mptune.engines.ort.fusions import FusionsJob, OptimisedNode, fused_nodes, may_fuse
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.fused import FusedNodes
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.processes.child import WorkerState
from mptune.targets.target import load_target
from tests.engines.engine_support import make_context, run_here
from tests.graph.norms_written_out import FORMS, LARGE, X, layer_norm, rms_norm, save

STEPS = ("n_q", "n_m", "n_a", "n_s", "n_d", "n_y")


def asked(model: Model, folder: Path) -> tuple[FusedNodes, ...]:
    grouped = GroupedModel(model, find_groups(model))
    typed = Rewriter(grouped).write(grouped.uniform(Precision.FP16), folder / "typed.onnx")
    empty = folder / "optimised"
    empty.mkdir()
    found = FusionsJob(typed, empty, "cpu").run(WorkerState())
    return fused_nodes(grouped, found)


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("end", FORMS)
def test_an_rms_norm_is_fused(tmp_path: Path, opset: int, end: str) -> None:
    (norm,) = asked(rms_norm(tmp_path, opset=opset, end=end), tmp_path)
    steps = STEPS if end == "divided" else ("n_q", "n_m", "n_a", "n_s", "n_r", "n_d", "n_y")
    assert norm == FusedNodes(steps)


def test_one_whose_square_is_a_product_is_not(tmp_path: Path) -> None:
    model = rms_norm(tmp_path, square="Mul")
    assert may_fuse(GroupedModel(model, find_groups(model)))
    assert asked(model, tmp_path) == ()


def test_a_layer_norm_that_a_cast_before_it_would_break_does_not_count(tmp_path: Path) -> None:
    assert asked(layer_norm(tmp_path, opset=17), tmp_path) == ()


def test_below_opset_17_it_counts(tmp_path: Path) -> None:
    """As the CUDA provider says; the CPU provider fuses a part of it."""
    model = layer_norm(tmp_path, opset=13)
    steps = ("n_mu", "n_c", "n_q", "n_m", "n_a", "n_s", "n_d", "n_e", "n_y")
    found = OptimisedNode("LayerNormalization", steps[::-1], "n_y")
    grouped = GroupedModel(model, find_groups(model))
    assert fused_nodes(grouped, [found]) == (FusedNodes(steps),)
    assert fused_nodes(grouped, [OptimisedNode(found.op_type, ("n_h", *steps), "n_y")]) == ()  # of two groups


def test_a_sum_that_is_fused_with_a_norm_may_be_of_another_group(tmp_path: Path) -> None:
    """SkipLayerNormalization; under a plan that has the sum in FP32 it is a LayerNormalization."""
    model = layer_norm(tmp_path, opset=13)
    steps = ("n_mu", "n_c", "n_q", "n_m", "n_a", "n_s", "n_d", "n_e", "n_y")
    found = OptimisedNode("SkipLayerNormalization", ("n_h", *steps), "n_y")
    assert fused_nodes(GroupedModel(model, find_groups(model)), [found]) == (FusedNodes(steps),)


@pytest.mark.parametrize(
    ("op_type", "nodes"), [("BiasSoftmax", ("mask", "weights")), ("Gelu", ("div", "erf", "sum", "mul", "y"))]
)
def test_other_operators_that_round_once(tmp_path: Path, op_type: str, nodes: tuple[str, ...]) -> None:
    if op_type == "Gelu":
        steps = [("Div", "x root", "div"), ("Erf", "div", "erf"), ("Add", "erf one", "sum"), ("Mul", "x sum", "mul")]
        model = save(tmp_path, [*steps, ("Mul", "mul half", "y")])
    else:
        steps = [("Transpose", "x", "k"), ("MatMul", "x k", "h"), ("Add", "h half", "mask")]
        model = save(tmp_path, [*steps, ("Softmax", "mask", "weights"), ("MatMul", "weights x", "y")])
    grouped = GroupedModel(model, find_groups(model))
    assert may_fuse(grouped)
    names = tuple(f"n_{name}" for name in nodes)
    found = OptimisedNode(op_type, names[::-1], names[-1])
    assert fused_nodes(grouped, [found]) == (FusedNodes(names),)


def test_an_error_is_emulated_as_the_engine_computes(tmp_path: Path) -> None:
    """Of a norm whose squares FP16 does not hold: ONNX Runtime keeps them in FP32."""
    context = context_of(rms_norm(tmp_path), tmp_path)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), context) as toolchain:
        assert not isinstance(toolchain.reference("search"), Failure)
        assert not isinstance(toolchain.observe(), Failure)
        found = toolchain.emulate([context.grouped.uniform(Precision.FP16)])
        assert not isinstance(found, Failure), found
        assert 1e-5 < found[0].value("relative_l2") < 1e-3
        assert not list(context.weights_dir.glob("*fusions*"))


def test_an_engine_that_does_not_open_is_asked_once(tmp_path: Path) -> None:
    context = context_of(rms_norm(tmp_path), tmp_path)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), context) as toolchain:
        toolchain.builder.write = lambda *arguments: tmp_path / "gone.onnx"
        failure = toolchain.fused_nodes()
        assert isinstance(failure, Failure)
        assert toolchain.fused_nodes() is failure


def test_a_switched_epsilon_is_the_models(tmp_path: Path) -> None:
    """A norm that is fused in the emulation's own session would take 1e-5 for it."""
    context = context_of(rms_norm(tmp_path, eps=0.5), tmp_path, large=False)
    grouped = context.grouped
    paths = context.model_path, context.samples("search"), context.reference("search")
    run_here(ReferenceJob(*paths, "cpu"))
    emulator = Emulator(grouped, context.bank, fused=(FusedNodes(STEPS),))
    path = emulator.write_switched(context.scratch("switched"), [group.id for group in grouped.groups])
    on = emulator.on(grouped.uniform(Precision.FP16))
    switches = tuple(emulator.switches[Precision.FP16].values())
    (error,) = run_here(SwitchedErrorsJob(path, None, (on,), switches, Scoring(*paths[1:])))
    assert 1e-5 < error.value("relative_l2") < 1e-3


def context_of(model: Model, folder: Path, *, large: bool = True) -> RunContext:
    samples = {"x": X if large else X / LARGE}
    return make_context(model, folder, samples, count=1)
