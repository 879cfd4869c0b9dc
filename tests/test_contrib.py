"""Operators that ONNX does not define, and what ONNX Runtime makes of a model: typed, grouped, written, searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import mptune
from mptune.engines.loading import load_typed_model
from mptune.engines.ort.fusions import OperatorTypesJob
from mptune.engines.ort.session import OrtSession, SessionOptions
from mptune.finding import Finding
from mptune.graph.facts import node_rule
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, RuntimeTypes, load_model
from mptune.graph.loading.shapes import static_shapes
from mptune.graph.plan import Precision
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.variants import write_widened
from mptune.graph.writing.weights import WeightBank
from mptune.processes.parent import Worker
from mptune.targets.costs import ShapeTable, group_costs, node_flops
from tests.contrib_models import (
    BATCH,
    BUILDERS,
    CHANNELS,
    HEADS,
    LENGTH,
    SIZE,
    X,
    between_products,
    growing_cache,
    growing_cache_feed,
    optimised,
    transformer,
)
from tests.graph import models
from tests.graph.helpers import feeds
from tests.graph.test_quantised import _residual
from tests.zoo.fp32 import specimens

pytestmark = pytest.mark.usefixtures("opened_here")

Load = Callable[[Path], Model]
Run = Callable[[Path, dict[str, np.ndarray]], np.ndarray]

KINDS = dict.fromkeys(BUILDERS, "matmul") | {  # activations and rotations: with the product that they read
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), "attention"),
    **{name: "norm" for name in BUILDERS if "LayerNormalization" in name},
    "FusedConv": "conv",
}
CACHE_TYPE = "GroupQueryAttention without a cache"
"""Nothing that it reads says which type the keys and values have that it returns."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One for all models: starting it takes most of the time."""
    with Worker(tmp_path_factory.mktemp("logs")) as started:
        yield started


@pytest.fixture
def load(worker: Worker) -> Load:
    """As ``load_typed_model``."""

    def ask(slim: onnx.ModelProto, values: Sequence[str]) -> RuntimeTypes:
        answer = worker.call(OperatorTypesJob(slim.SerializeToString(), tuple(values)), 60.0)
        assert isinstance(answer, RuntimeTypes)
        return answer

    return lambda path: load_model(path, ask)


def _run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    values: np.ndarray = session.run(["y"], feeds)[0]
    return values


def _run_as_a_search(path: Path, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = OrtSession(path, SessionOptions())
    y = session.run(feed)["y"]
    session.close()
    return y


def _middle(model: Model) -> int:
    return next(node.index for node in model.nodes if node.name == "middle")


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != CACHE_TYPE])
def test_an_operator_of_onnx_runtime_is_typed_grouped_and_runs_in_fp16(name: str, tmp_path: Path, load: Load) -> None:
    path = models.save(BUILDERS[name](), tmp_path)
    model = load(path)
    assert model.runtime.failure == ""
    assert all(model.info(out).dtype != "undefined" for node in model.nodes for out in node.outputs if out)
    groups = find_groups(model)
    grouped = GroupedModel(model, groups)
    assert {group.pinned for group in groups} == {None}
    kinds = {group.id: group.kind for group in groups}
    assert kinds[grouped.owners["middle"]] == KINDS[name]
    assert grouped.owners["behind"] != grouped.owners["middle"]

    feed = feeds(model, batch=BATCH)
    reference = _run(path, feed)
    fp16 = grouped.uniform(Precision.FP16)
    typed = _run(Rewriter(grouped).export(fp16, tmp_path / "fp16.onnx"), feed)
    emulated = _run(Emulator(grouped).write(fp16, tmp_path / "emulated.onnx"), feed)
    size = np.linalg.norm(reference)
    assert 1e-5 < np.linalg.norm(typed - reference) / size < 1e-2
    assert 1e-5 < np.linalg.norm(emulated - reference) / size < 1e-2

    # Each group alone in FP16: Casts on both sides of the operator.
    for group in groups:
        plan = grouped.uniform(Precision.FP32).replace({group.id: Precision.FP16})
        alone = _run(Rewriter(grouped).export(plan, tmp_path / "alone.onnx"), feed)
        assert np.linalg.norm(alone - reference) / size < 1e-2


@pytest.mark.parametrize(
    ("declared", "run"),
    [
        *(("named", _run), ("unnamed", _run)),
        *(("without a shape", _run_as_a_search), ("no output", _run_as_a_search)),
    ],
)
def test_plans_of_a_growing_cache_run_whatever_is_declared_of_it(
    declared: str, run: Run, tmp_path: Path, load: Load
) -> None:
    """ONNX Runtime infers that the new cache is as long as the old one, and would reuse a buffer of that size."""
    proto = growing_cache()
    for output in proto.graph.output:
        if declared == "unnamed":
            for dim in output.type.tensor_type.shape.dim:
                dim.Clear()
        elif declared == "without a shape" and output.name != "y":
            output.type.tensor_type.ClearField("shape")
    if declared == "no output":
        del proto.graph.output[1:]
    model = load(models.save(proto, tmp_path))
    grouped = GroupedModel(model, find_groups(model))
    bank = WeightBank.write(model, tmp_path)
    plan = grouped.uniform(Precision.FP16)
    switched = Emulator(grouped, bank)
    typed = load(Rewriter(grouped, bank).write(plan, tmp_path / "typed.onnx"))
    files = {
        "one plan": Emulator(grouped, bank).write(plan, tmp_path / "emulated.onnx"),
        "all plans": switched.write_switched(tmp_path / "switched.onnx", [group.id for group in grouped.groups]),
        "of the candidate": write_widened(
            typed, WeightBank.write(typed, tmp_path / "typed"), tmp_path / "typed/w.onnx"
        ),
    }
    on = dict.fromkeys(switched.on(plan), np.array(True))
    for past, length in ((0, 5), (3, 1)):
        feed = growing_cache_feed(past, length)
        one, all_, widened = (run(path, feed | (on if which == "all plans" else {})) for which, path in files.items())
        np.testing.assert_array_equal(one, all_)
        np.testing.assert_allclose(one, widened, atol=2e-3)


def test_an_output_whose_type_nothing_says_stays_fp32(tmp_path: Path, load: Load) -> None:
    model = load(models.save(BUILDERS[CACHE_TYPE](), tmp_path))
    node = model.nodes[_middle(model)]
    assert node_rule(model, node).fixed == (
        "the type of its output 'present_k' does not follow from those of its inputs"
    )
    assert all(model.info(out).is_float32 for out in node.outputs)
    assert "behind" in GroupedModel(model, find_groups(model)).owners


def test_an_operator_whose_input_has_no_known_rank_is_no_scalar(tmp_path: Path, load: Load) -> None:
    """A product cannot be of a scalar: taken for one, its own type and all behind it would be unknown."""
    proto = between_products(
        "com.microsoft.FusedMatMul(shaped, b)",
        models.weight("b", CHANNELS, CHANNELS),
        before="shaped = Reshape(h, sizes)",
        inputs=f"{X}, int64[rank] sizes",
    )
    model = load(models.save(proto, tmp_path))
    assert model.runtime.failure == ""
    assert all(model.info(out).is_float32 for node in model.nodes for out in node.outputs)
    assert "behind" in GroupedModel(model, find_groups(model)).owners
    assert model.info("r").shape is None


def test_without_a_runtime_to_ask_nothing_behind_the_operator_has_a_type(tmp_path: Path) -> None:
    model = load_model(models.save(BUILDERS["BiasGelu"](), tmp_path))
    assert model.info("r").dtype == "undefined"


def test_what_the_optimiser_wrote_is_searched_as_what_it_was_written_from(tmp_path: Path) -> None:
    raw = load_typed_model(models.save(transformer(), tmp_path))
    model = load_typed_model(optimised(transformer(), tmp_path))
    domains = {node.op_type for node in model.nodes if node.domain == "com.microsoft"}
    assert {"SkipLayerNormalization", "FusedMatMul", "BiasGelu"} <= domains
    kinds, costs = [], []
    for one in (raw, model):
        shapes = static_shapes(one)
        assert shapes.unknown == 0
        grouped = GroupedModel(one, find_groups(one))
        assert all(group.pinned is None for group in grouped.groups)
        kinds.append(sorted(group.kind for group in grouped.groups))
        costs.append(sum(cost.flops for cost in group_costs(grouped, shapes.shapes).values()))
    assert kinds[1] == kinds[0]
    assert costs[1] == pytest.approx(costs[0], rel=0.05)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("FusedMatMul", 2 * BATCH * LENGTH * CHANNELS * 24),
        ("FusedConv", 2 * BATCH * 6 * 8 * 8 * 27),
        ("MatMulNBits", 2 * BATCH * LENGTH * CHANNELS * CHANNELS),
        ("Attention", 2 * BATCH * LENGTH * CHANNELS * 3 * CHANNELS + 4 * BATCH * LENGTH * CHANNELS * LENGTH),
        ("MultiHeadAttention", 4 * BATCH * LENGTH * CHANNELS * LENGTH),
        ("GroupQueryAttention", 4 * BATCH * LENGTH * CHANNELS * LENGTH),
    ],
)
def test_matrix_flops_of_an_operator(name: str, flops: int, tmp_path: Path, load: Load) -> None:
    model = load(models.save(BUILDERS[name](), tmp_path))
    shapes = dict(static_shapes(model, BATCH).shapes)
    if name == "GroupQueryAttention":  # as observed: the cache was empty
        shapes["present_k"] = (BATCH, HEADS, LENGTH, SIZE)
    assert node_flops(model.nodes[_middle(model)], ShapeTable(model, shapes)) == (flops, True)


def test_scales_of_quantised_operators_stay_fp32(tmp_path: Path, load: Load) -> None:
    b = np.random.default_rng(0).integers(-100, 100, (CHANNELS, CHANNELS))
    constants = models.constant("b", b, np.int8), models.constant("s", 1e-3), models.constant("z", 0, np.int8)
    model = between_products("com.microsoft.DynamicQuantizeMatMul(h, b, s, z)", *constants)
    loaded = load(models.save(model, tmp_path))
    assert node_rule(loaded, loaded.nodes[_middle(loaded)]).inputs == ()
    assert loaded.info("r").is_float32


OUT_OF_REACH, DEPENDS = "operators-out-of-reach", "reference-depends-on-optimisation"


def findings_of(code: str, path: Path, data: object = None) -> list[Finding]:
    return [finding for finding in mptune.inspect(path, data=data).findings if finding.code == code]


@pytest.fixture
def unknown_operator(tmp_path: Path) -> Path:
    """An operator of a domain of the user's, which ONNX Runtime has no library for."""
    return models.save(between_products("com.example.Foo(h)"), tmp_path)


@pytest.fixture
def for_this_cpu(tmp_path: Path) -> Path:
    """A small convolutional network as ONNX Runtime's highest level of optimisation lays it out for a CPU."""
    import onnxruntime

    graph = """(float[1,3,16,16] x) => (float[] y) {
        h = Conv<pads = [1, 1, 1, 1]>(x, a) p = MaxPool<kernel_shape = [2, 2]>(h) q = Conv(p, b)
        y = GlobalAveragePool(q) }"""
    proto = models.text(graph, models.weight("a", 32, 3, 3, 3), models.weight("b", 32, 32, 3, 3))
    options, path = onnxruntime.SessionOptions(), tmp_path / "model.onnx"
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    if not any(node.domain == "com.microsoft.nchwc" for node in onnx.load(path).graph.node):
        pytest.skip("ONNX Runtime lays out nothing for this CPU")
    return path


def test_an_operator_that_nobody_knows_is_a_finding_with_its_share(unknown_operator: Path) -> None:
    (finding,) = findings_of(OUT_OF_REACH, unknown_operator)
    assert finding.severity == "warning"
    assert finding.where.nodes == ("middle", "behind")
    assert finding.evidence["operators"] == "com.example.Foo"
    assert finding.evidence["untyped_nodes"] == 2
    assert float(finding.evidence["flops_share"]) > 0.05  # of the product behind it, at least one row
    assert "com.example.Foo" in finding.text
    assert "at least" in finding.text
    assert "not a registered function/op" in finding.text
    assert "local function" in finding.cure


def test_a_search_of_a_model_that_onnx_runtime_does_not_load_ends_at_once(
    unknown_operator: Path, tmp_path: Path
) -> None:
    data = np.zeros((4, LENGTH, CHANNELS), np.float32)
    with pytest.raises(mptune.BaselineError, match=r"com.example:Foo.*is not a registered function/op") as caught:
        mptune.search(unknown_operator, data=data, budget=4, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert "\n" not in caught.value.message


def test_operators_laid_out_for_a_cpu_are_a_finding(for_this_cpu: Path, tmp_path: Path) -> None:
    (finding,) = findings_of(OUT_OF_REACH, for_this_cpu)
    assert finding.evidence["flops_share"] == pytest.approx(1.0)
    assert finding.evidence["untyped_nodes"] == 0
    assert finding.cure.startswith("give the model from before the optimiser")
    data = np.random.default_rng(0).random((4, 3, 16, 16)).astype(np.float32)
    front = mptune.search(for_this_cpu, data=data, budget=2, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert {OUT_OF_REACH, "nothing-to-tune"} <= {finding.code for finding in front.findings}


def test_a_search_of_an_optimised_model_reaches_every_group(tmp_path: Path) -> None:
    path = optimised(transformer(1), tmp_path)
    assert findings_of(OUT_OF_REACH, path) == []
    data = np.random.default_rng(0).standard_normal((BATCH * 2, LENGTH, CHANNELS)).astype(np.float32)
    front = mptune.search(path, data=data, budget=3, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    assert front.fp16 is not None
    assert front.fp16.is_finite
    assert 1e-5 < front.fp16.error_value < 1e-2
    assert len(front.fp16.plan.fp32_groups) == 0
    assert front.failures == 0
    (unparsed,) = [w for w in front.warnings if "TensorRT parses few of" in w]
    assert "com.microsoft.FusedMatMul" in unparsed
    assert "give the model from before" in unparsed


@pytest.mark.tensorrt_rtx
def test_an_engine_that_cannot_parse_an_operator_says_so_before_the_search(tmp_path: Path) -> None:
    path = optimised(transformer(1), tmp_path)
    data = np.zeros((4, LENGTH, CHANNELS), np.float32)
    with pytest.raises(mptune.TargetError, match=r"tensorrt-rtx cannot be used for .*\.FusedMatMul") as caught:
        mptune.search(path, data=data, budget=4, out=tmp_path / "run", target="rtx-4500-ada", engine="tensorrt-rtx")
    assert "before ONNX Runtime's optimiser" in str(caught.value.hint)


def test_a_plan_made_in_python_reaches_the_operators_that_the_commands_reach(tmp_path: Path) -> None:
    path = optimised(transformer(1), tmp_path)
    model = mptune.load_model(path)
    groups = mptune.find_groups(model)
    assert [group.id for group in groups] == [group["id"] for group in mptune.inspect(path).to_json()["groups"]]
    assert "com.microsoft" in {node.domain for node in model.nodes if any(node.name in g.nodes for g in groups)}
    plan = mptune.PrecisionPlan.uniform(model.sha256, [group.id for group in groups], Precision.FP16)
    written = mptune.load_model(mptune.apply(path, plan, tmp_path / "fp16.onnx"), any_precision=True)
    assert "float16" in {written.info(node.outputs[0]).dtype for node in written.nodes if not node.is_standard}


@pytest.mark.tensorrt_rtx
def test_a_norm_below_its_operator_set_is_parsed_by_tensorrt_rtx(tmp_path: Path) -> None:
    from mptune.engines.tensorrt.builder import ParseJob
    from mptune.processes.parent import run_once

    path = models.save(BUILDERS["LayerNormalization of opset 14"](), tmp_path)
    assert run_once(ParseJob("tensorrt-rtx", path), 60.0) is None


def _of_four_bits(folder: Path) -> Path:
    """A product with weights of 4 bits: the optimised kernel rounds its activations to 8 bits."""
    rng = np.random.default_rng(0)
    w = helper.make_tensor("w", onnx.TensorProto.INT4, [64, 32], rng.integers(-8, 8, 64 * 32).tolist())
    graph = """(float[batch,8,64] x) => (float[] y) {
        d = DequantizeLinear<axis = 0, block_size = 32>(w, s) h = MatMul(x, d) y = Relu(h) }"""
    proto = models.text(graph, w, models.constant("s", rng.random((2, 32)) * 0.05 + 0.02), opset=21)
    proto.ir_version = 10
    return models.save(proto, folder)


def _difference(path: Path, data: np.ndarray) -> float:
    """Relative L2 between ONNX Runtime with and without graph optimisations, taken here."""
    import onnxruntime

    results = []
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, {"x": data[:1]})[0])
    return float(np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1]))


def test_a_reference_that_depends_on_optimisation_is_a_finding(tmp_path: Path) -> None:
    path = _of_four_bits(tmp_path)
    data = np.random.default_rng(1).standard_normal((4, 8, 64)).astype(np.float32)
    expected = _difference(path, data)
    if expected < 1e-3:
        pytest.skip("this ONNX Runtime computes products with weights of 4 bits in FP32 here")
    (finding,) = findings_of(DEPENDS, path, data)
    assert (finding.severity, finding.origin) == ("warning", "inspect")
    assert finding.evidence["relative_l2"] == pytest.approx(expected, rel=0.05)
    assert [output.name for output in finding.where.outputs] == ["y"]

    front = mptune.search(path, data=data, budget=2, out=tmp_path / "run", target="jetson-orin-nano-8gb")
    (searched,) = [finding for finding in front.findings if finding.code == DEPENDS]
    assert (searched.origin, searched.evidence) == ("search", finding.evidence)


def test_rounding_alone_is_no_finding(tmp_path: Path) -> None:
    quantised = _residual()  # its activations have steps
    shape = [dim.dim_value or 4 for dim in quantised.graph.input[0].type.tensor_type.shape.dim]
    for proto, size in ((transformer(), (2 * BATCH, LENGTH, CHANNELS)), (quantised, shape)):
        data = np.random.default_rng(1).standard_normal(size).astype(np.float32)
        assert findings_of(DEPENDS, models.save(proto, tmp_path), data) == []


@pytest.mark.parametrize("name", ["dropout", "noise"])
def test_what_draws_random_numbers_differs_whatever_is_optimised(name: str, tmp_path: Path) -> None:
    one = specimens()[name]
    path = models.save(one.proto, tmp_path)
    codes = {finding.code for finding in mptune.inspect(path, data=dict(one.data)).findings}
    assert "not-deterministic" in codes
    assert DEPENDS not in codes
