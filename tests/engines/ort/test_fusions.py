"""What ONNX Runtime says that it fuses, of real sessions; and what it folds is folded once: typed models without it
compute the same, bit by bit, in the same kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from mptune.engines.base import Failure, FailureKind, MissingKernel, Stage
from mptune.engines.context import RunContext
from mptune.engines.ort import fusions as placement
from mptune.engines.ort.backend import ONNXRUNTIME
from mptune.engines.ort.fusions import FoldJob, FusionsJob, PlacementJob, fused_nodes, may_fuse
from mptune.engines.ort.session import PROVIDERS, SessionOptions
from mptune.engines.samples import Scoring
from mptune.engines.toolchains.jobs import ReferenceJob, SwitchedErrorsJob
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.facts import FusedNodes
from mptune.graph.folded import FoldedValues, folded_model, is_worthwhile, read_folded, write_without_weights
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.processes.child import WorkerState
from mptune.settings import SearchSettings
from mptune.targets.target import load_target
from mptune.tuning.facts import MissingKernels
from tests.engines.engine_support import make_context, run_here
from tests.graph import models
from tests.graph.helpers import feeds, plans, run
from tests.graph.norms_written_out import FORMS, LARGE, X, layer_norm, rms_norm, save
from tests.networks.networks import filled

STEPS = ("n_q", "n_m", "n_a", "n_s", "n_d", "n_y")


def grouped_of(model: Model) -> GroupedModel:
    return GroupedModel(model, find_groups(model))


def asked(model: Model, folder: Path) -> tuple[FusedNodes, ...]:
    grouped, empty = grouped_of(model), folder / "optimised"
    empty.mkdir()
    typed = Rewriter(grouped).write(grouped.uniform(Precision.FP16), folder / "typed.onnx")
    return fused_nodes(grouped, FusionsJob(typed, empty, "cpu").run(WorkerState()))


@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("end", FORMS)
def test_an_rms_norm_is_fused(tmp_path: Path, opset: int, end: str) -> None:
    steps = STEPS if end == "divided" else ("n_q", "n_m", "n_a", "n_s", "n_r", "n_d", "n_y")
    assert asked(rms_norm(tmp_path, opset=opset, end=end), tmp_path) == (FusedNodes(steps),)


def test_a_layer_norm_that_a_cast_before_it_would_break_does_not_count(tmp_path: Path) -> None:
    assert asked(layer_norm(tmp_path, opset=17), tmp_path) == ()


NORM = ("n_mu", "n_c", "n_q", "n_m", "n_a", "n_s", "n_d", "n_e", "n_y")
GELU = "div = Div(x, root) erf = Erf(div) sum = Add(erf, one) mul = Mul(x, sum) y = Mul(mul, half)"
GELU_NODES = ("n_div", "n_erf", "n_sum", "n_mul", "n_y")
BIASED = "k = Transpose(x) h = MatMul(x, k) mask = Add(h, half) weights = Softmax(mask) y = MatMul(weights, x)"


@pytest.mark.parametrize(
    ("steps", "op_type", "nodes", "expected"),
    [
        (None, "LayerNormalization", NORM, NORM),
        (None, "LayerNormalization", (*NORM, "n_h"), None),
        (None, "SkipLayerNormalization", (*NORM, "n_h"), NORM),
        (BIASED, "BiasSoftmax", ("n_mask", "n_weights"), ("n_mask", "n_weights")),
        (GELU, "Gelu", GELU_NODES, GELU_NODES),
    ],
)
def test_what_a_provider_says_it_fused(
    steps: str | None, op_type: str, nodes: tuple[str, ...], expected: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Below opset 17 a LayerNorm counts, as the CUDA provider says it. A sum that is fused with it may be of another
    group: under a plan that has the sum in FP32 a SkipLayerNormalization is a LayerNormalization."""
    grouped = grouped_of(layer_norm(tmp_path, opset=13) if steps is None else save(tmp_path, steps))
    assert may_fuse(grouped)
    last = next(name for name in reversed(nodes) if name != "n_h")
    assert fused_nodes(grouped, [(op_type, nodes[::-1], last)]) == (() if expected is None else (FusedNodes(expected),))


@pytest.fixture
def toolchain(tmp_path: Path) -> Iterator[Toolchain]:
    """Of a norm whose squares FP16 does not hold: ONNX Runtime keeps them in FP32."""
    context = make_context(rms_norm(tmp_path), tmp_path, {"x": X}, count=1)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), context) as toolchain:
        yield toolchain


def test_an_error_is_emulated_as_the_engine_computes(toolchain: Toolchain) -> None:
    assert not isinstance(toolchain.reference("search"), Failure)
    assert not isinstance(toolchain.observe(), Failure)
    errors = toolchain.emulate([toolchain.context.grouped.uniform(Precision.FP16)])
    assert not isinstance(errors, Failure), errors
    assert 1e-5 < errors[0].value("relative_l2") < 1e-3
    assert not list(toolchain.context.weights_dir.glob("*fusions*"))


def test_an_engine_that_does_not_open_is_asked_once(toolchain: Toolchain, tmp_path: Path) -> None:
    toolchain.builder.write = lambda *arguments: tmp_path / "gone.onnx"
    failure = toolchain.fused_nodes()
    assert isinstance(failure, Failure)
    assert toolchain.fused_nodes() is failure


def test_a_switched_epsilon_is_the_models(tmp_path: Path) -> None:
    """A norm that is fused in the emulation's own session would take 1e-5 for it."""
    context = make_context(rms_norm(tmp_path, eps=0.5), tmp_path, {"x": X / LARGE}, count=1)
    grouped, scoring = context.grouped, Scoring(context.samples("search"), context.reference("search"))
    run_here(ReferenceJob(context.model_path, scoring.samples, scoring.reference, "cpu"))
    emulator = Emulator(grouped, context.bank, fused=(FusedNodes(STEPS),))
    path = emulator.write_switched(context.scratch("switched"), [group.id for group in grouped.groups])
    on = emulator.on(grouped.uniform(Precision.FP16))
    switches = tuple(emulator.switches[Precision.FP16].values())
    (error,) = run_here(SwitchedErrorsJob(path, (on,), switches, scoring))
    assert 1e-5 < error.value("relative_l2") < 1e-3


CORPUS = Path(__file__).resolve().parents[2] / "graph" / "corpus"
SHAPES = "shapes"


def folded(grouped: GroupedModel, folder: Path) -> FoldedValues:
    folder.mkdir(exist_ok=True)
    run_here(FoldJob(write_without_weights(grouped, folder / "unfolded.onnx"), folder / "folded.onnx"))
    return read_folded(folder / "folded.onnx", grouped.model)


def nodes_of(path: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(path, load_external_data=False).graph.node)


def optimised(path: Path) -> Counter[tuple[str, str]]:
    """The operators that a session runs, by domain and type."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimised"))
    onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["MatmulTransposeFusion"]
    )
    return Counter((node.domain, node.op_type) for node in nodes_of(path.with_suffix(".optimised")))


@pytest.mark.parametrize("name", ["detr_torchscript_17", "constants", "scan_sum", "dynamic_sequence"])
def test_every_plan_computes_the_same_bits_with_the_same_operators(name: str, tmp_path: Path) -> None:
    corpus = CORPUS / f"{name}.onnx"
    model = load_model(corpus if corpus.exists() else filled(name, tmp_path))
    grouped = grouped_of(model)
    values, bank = folded(grouped, tmp_path / "work"), WeightBank.write(model, tmp_path / "weights")
    assert values
    feed = feeds(model)
    for plan in plans(model, grouped.groups, 1):
        whole = Rewriter(grouped, bank).write(plan, tmp_path / "weights" / "whole.onnx")
        short = Rewriter(folded_model(grouped, values), bank).write(plan, tmp_path / "weights" / "short.onnx")
        assert len(nodes_of(short)) <= len(nodes_of(whole))
        assert optimised(short) == optimised(whole)
        expected = run(whole, feed)
        for output, found in run(short, feed).items():
            assert found.dtype == expected[output].dtype
            assert np.array_equal(found, expected[output], equal_nan=found.dtype.kind == "f"), output


def make_chains(folder: Path, count: int) -> Path:
    """``count`` times three nodes that compute the shape of x, and a product of x and a weight, in FP16 or not.

    A float is computed from each shape and added, whose group a plan may put in FP16.
    """
    steps = [
        f"""s{k} = Shape (r{k}) c{k} = Concat <axis = 0> (s{k}, none) f{k} = Cast <to = 1> (s{k})
        m{k} = ReduceMax <keepdims = 0> (f{k}) p{k} = MatMul (r{k}, w) d{k} = Div (p{k}, m{k})
        r{k + 1} = Reshape (d{k}, c{k})"""
        for k in range(count)
    ]
    steps.append(f"y = Identity (r{count}) {SHAPES} = Shape (y)")
    graph = f"(float[2, 96] r0) => (float[] y, int64[2] {SHAPES}) {{ {' '.join(steps)} }}"
    weights = [models.constant("w", np.eye(96)), models.constant("none", np.zeros(0), np.int64)]
    return models.save(models.text(graph, *weights), folder, "chains.onnx")


def test_outputs_stay_and_what_only_shapes_read_goes(tmp_path: Path) -> None:
    model = load_model(make_chains(tmp_path, 40))
    grouped = grouped_of(model)
    values = folded(grouped, tmp_path / "work")
    rewriter = Rewriter(folded_model(grouped, values), WeightBank.write(model, tmp_path / "weights"))
    assert is_worthwhile(model)
    assert "w" not in values
    path = rewriter.write(grouped.uniform(Precision.FP32), tmp_path / "weights" / "fp32.onnx")
    proto = onnx.load(path, load_external_data=False)
    left = Counter(node.op_type for node in proto.graph.node if node.op_type != "Constant")
    computed = {"MatMul": 40, "Div": 40, "Reshape": 40, "Identity": 1, "Shape": 1}
    assert left == {**computed, "Cast": 40, "ReduceMax": 40}, "a plan may put these in FP16"
    assert "none" not in {tensor.name for tensor in proto.graph.initializer}
    assert run(path, {"r0": np.ones((2, 96), np.float32)})[SHAPES].tolist() == [2, 96]
    assert path.stat().st_size < 100_000, "weights lie in the bank"


@pytest.mark.parametrize(("chains", "fails", "kept", "jobs"), [(40, False, 0, 1), (40, True, 40, 1), (3, False, 3, 0)])
def test_a_search_folds_once_and_where_it_pays(
    chains: int, fails: bool, kept: int, jobs: int, settings: SearchSettings, tmp_path: Path
) -> None:
    path = make_chains(tmp_path, chains)
    context = make_context(load_model(path), tmp_path, {"r0": np.ones((2, 96), np.float32)}, settings=settings)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), context) as toolchain:
        folds, call = list[FoldJob](), toolchain.worker.call

        def heard(job: object) -> object:
            if not isinstance(job, FoldJob):
                return call(job)
            folds.append(job)
            return Failure(Stage.BUILD, FailureKind.ERROR, "no kernel") if fails else call(job)

        toolchain.reference_model.worker = SimpleNamespace(call=heard)
        for precision in (Precision.FP32, Precision.FP16):
            typed = toolchain.builder.write(context.grouped.uniform(precision), str(precision))
            assert sum(node.op_type == "Concat" for node in nodes_of(typed)) == kept
        assert len(folds) == jobs
        assert not list(tmp_path.rglob("*folded*")), "what was written to fold is gone"


CPU, CUDA = PROVIDERS["cpu"], PROVIDERS["cuda"]


def test_nodes_that_leave_the_provider_in_fp16_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fp16 = {"a/Conv": CUDA, "b/GridSample": CPU, "c/Gather": CPU, "d/Fused": CPU, "e/Cast": CUDA}
    fp32 = {"a/Conv": CUDA, "b/GridSample": CUDA, "c/Gather": CPU, "other/Fused": CUDA}
    placed = {"fp16.onnx": fp16, "fp32.onnx": fp32}
    asked: list[SessionOptions] = []
    closed: list[str] = []

    def open_one(model: Path, options: SessionOptions) -> Any:
        asked.append(options)
        placement = {name: (name.split("/")[-1], provider) for name, provider in placed[model.name].items()}
        return SimpleNamespace(placement=lambda: placement, close=lambda: closed.append(model.name))

    monkeypatch.setattr(placement, "open_session", open_one)
    found = run_here(PlacementJob(Path("fp16.onnx"), Path("fp32.onnx"), "cuda"))
    assert found == (MissingKernel("b/GridSample", "GridSample", CUDA, CPU),)
    assert all(options == SessionOptions("cuda") for options in asked)
    assert set(closed) == placed.keys()


@pytest.mark.gpu
def test_many_measurements_on_a_gpu_crash_no_worker(mlp_context: RunContext) -> None:
    """Sessions that outlived their streams ended one of about twenty measurements in SIGSEGV on an H200."""
    target = load_target("h200")
    with Toolchain(ONNXRUNTIME, target, mlp_context, "cuda") as toolchain:
        assert not isinstance(toolchain.reference("search"), Failure)
        pids = set()
        for precision in [Precision.FP32, Precision.FP16] * 75:
            result = toolchain.evaluate(mlp_context.grouped.uniform(precision))
            assert not isinstance(result, Failure), result
            pids.add(toolchain.worker.pid)
    assert len(pids) == 1, "the worker died between two jobs"


@pytest.mark.gpu
def test_grid_sample_leaves_the_cuda_provider_in_fp16(tmp_path: Path) -> None:
    grid = models.constant("grid", np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 2)))
    graph = """(float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
        ["before"] a = Conv <pads = [1, 1, 1, 1]> (x, w)
        ["sample"] b = GridSample (a, grid)
        ["after"] y = Conv <pads = [1, 1, 1, 1]> (b, w)
    }"""
    path = models.save(models.text(graph, grid, models.weight("w", 4, 4, 3, 3)), tmp_path)
    context = make_context(load_model(path), tmp_path, {"x": np.ones((1, 4, 8, 8), np.float32)})
    with Toolchain(ONNXRUNTIME, load_target("h200"), context, "cuda") as toolchain:
        assert toolchain.missing_kernels(Precision.FP16) == (MissingKernel("sample", "GridSample", CUDA, CPU),)


def test_operators_that_no_provider_runs_in_bf16_are_named(mlp_context: RunContext) -> None:
    """By the CPU provider, which has next to no BF16 kernels: its session names one node after the other."""
    grouped = mlp_context.grouped
    with Toolchain(ONNXRUNTIME, load_target("cpu"), mlp_context, "cpu") as toolchain:
        assert toolchain.missing_kernels(Precision.BF16) == ()
        missing = toolchain.builder.nodes_without_kernel(Precision.BF16)
    assert not isinstance(missing, Failure), missing
    assert {"MatMul", "Gemm"} & {node.op_type for node in missing}
    operators = {node.name: node.op_type for node in grouped.model.nodes}
    assert missing == tuple(MissingKernel(each.node, operators[each.node], CPU, "") for each in missing)
    kernels = MissingKernels({Precision.BF16: missing})
    assert kernels.pins(grouped) == {}
    assert kernels.pins(grouped, Precision.BF16).keys() == {grouped.owners[each.node] for each in missing}
    findings = kernels.findings(grouped)
    assert {finding.code for finding in findings} == {"no-bf16-kernel"}
    assert {finding.evidence["operator"] for finding in findings} == {each.op_type for each in missing}
