"""What ONNX Runtime folds is folded once: typed models without it compute the same, bit by bit, in the same kernels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from mptune.data.samples import CalibrationSet
from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.jobs.observing import ObserveJob
from mptune.engines.ort.fusions import FoldJob
from mptune.engines.toolchains.toolchain import Toolchain
from mptune.graph.folded import FoldedValues, is_worthwhile, write_without_weights
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision
from mptune.graph.writing.observe import observed_parts, write_with_outputs
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.settings import SearchSettings
from mptune.targets.target import load_target
from tests.engines.engine_support import make_context, run_here
from tests.graph.helpers import feeds, plans, run
from tests.networks.networks import filled

CORPUS = Path(__file__).resolve().parents[2] / "graph" / "corpus"
SHAPES = "shapes"


def folded(model: Model, folder: Path) -> FoldedValues:
    folder.mkdir(exist_ok=True)
    run_here(FoldJob(write_without_weights(model, folder / "unfolded.onnx"), folder / "folded.onnx"))
    return FoldedValues.read(folder / "folded.onnx", model)


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
    groups = find_groups(model)
    values = folded(model, tmp_path / "work")
    assert values.values
    rewriter = Rewriter(GroupedModel(model, groups), WeightBank.write(model, tmp_path / "weights"))
    feed = feeds(model)
    for plan in plans(model, groups, 1):
        whole = rewriter.write(plan, tmp_path / "weights" / "whole.onnx")
        short = rewriter.write(plan, tmp_path / "weights" / "short.onnx", values)
        assert len(nodes_of(short)) <= len(nodes_of(whole))
        assert optimised(short) == optimised(whole)
        expected = run(whole, feed)
        for output, found in run(short, feed).items():
            assert found.dtype == expected[output].dtype
            assert np.array_equal(found, expected[output], equal_nan=found.dtype.kind == "f"), output


def make_chains(path: Path, count: int, *, is_fixed: bool = True) -> Path:
    """``count`` times three nodes that compute the shape of x, and a product of x and a weight, in FP16 or not.

    A float is computed from each shape and added, whose group a plan may put in FP16.
    """
    helper, number = onnx.helper, onnx.TensorProto
    nodes, last = [], "x"
    for k in range(count):
        nodes += [
            helper.make_node("Shape", [last], [f"s{k}"], f"shape{k}"),
            helper.make_node("Concat", [f"s{k}", "none"], [f"c{k}"], f"concat{k}", axis=0),
            helper.make_node("Cast", [f"s{k}"], [f"f{k}"], f"cast{k}", to=number.FLOAT),
            helper.make_node("ReduceMax", [f"f{k}"], [f"m{k}"], f"max{k}", keepdims=0),
            helper.make_node("MatMul", [last, "w"], [f"p{k}"], f"product{k}"),
            helper.make_node("Div", [f"p{k}", f"m{k}"], [f"d{k}"], f"scale{k}"),
            helper.make_node("Reshape", [f"d{k}", f"c{k}"], [f"r{k}"], f"reshape{k}"),
        ]
        last = f"r{k}"
    nodes.append(helper.make_node("Identity", [last], ["y"], "last"))
    nodes.append(helper.make_node("Shape", ["y"], [SHAPES], "shapes"))
    rows: int | str = 2 if is_fixed else "rows"
    weights = [
        onnx.numpy_helper.from_array(np.eye(96, dtype=np.float32), "w"),
        onnx.numpy_helper.from_array(np.zeros(0, np.int64), "none"),
    ]
    graph = helper.make_graph(
        nodes,
        "chains",
        [helper.make_tensor_value_info("x", number.FLOAT, [rows, 96])],
        [
            helper.make_tensor_value_info("y", number.FLOAT, None),
            helper.make_tensor_value_info(SHAPES, number.INT64, [2]),
        ],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_outputs_stay_and_what_only_shapes_read_goes(tmp_path: Path) -> None:
    model = load_model(make_chains(tmp_path / "chains.onnx", 40))
    grouped = GroupedModel(model, find_groups(model))
    values = folded(model, tmp_path / "work")
    rewriter = Rewriter(grouped, WeightBank.write(model, tmp_path / "weights"))
    assert is_worthwhile(model)
    assert "w" not in values.values
    path = rewriter.write(grouped.uniform(Precision.FP32), tmp_path / "weights" / "fp32.onnx", values)
    proto = onnx.load(path, load_external_data=False)
    left = Counter(node.op_type for node in proto.graph.node)
    assert left == {"MatMul": 40, "Div": 40, "Reshape": 40, "Identity": 1, "Shape": 1}
    assert "none" not in {tensor.name for tensor in proto.graph.initializer}
    assert run(path, {"x": np.ones((2, 96), np.float32)})[SHAPES].tolist() == [2, 96]
    assert path.stat().st_size < 100_000, "weights lie in the bank"


@pytest.mark.parametrize("name", ["detr_torchscript_17", "constants", "scan_sum", "chains"])
def test_what_is_observed_is_the_same(name: str, tmp_path: Path) -> None:
    corpus = CORPUS / f"{name}.onnx"
    path = corpus if corpus.exists() else make_chains(tmp_path / f"{name}.onnx", 40)
    model = load_model(path if corpus.exists() or name == "chains" else filled(name, tmp_path))
    (tmp_path / "bank").mkdir()
    bank, place = WeightBank.write(model, tmp_path / "bank"), tmp_path / "bank" / "observing.onnx"
    CalibrationSet((feeds(model),), "test", False).save(tmp_path / "samples.npz")
    seen, nodes = [], []
    (part,) = observed_parts(model, dict.fromkeys(model.tensors, (1,)))
    for values in (None, folded(model, tmp_path / "work")):
        write_with_outputs(model, bank, place, part.outputs, values)
        nodes.append(len(nodes_of(place)))
        seen.append(run_here(ObserveJob(place, part, tmp_path / "samples.npz", "cpu")))
    assert seen[0] == seen[1]
    assert nodes[0] > nodes[1]


class Calls:
    """Counts the jobs that fold, and lets them fail where asked."""

    def __init__(self, toolchain: Toolchain, *, fails: bool) -> None:
        self.folds = 0
        self._call, self._fails = toolchain.worker.call, fails

    def call(self, job: object) -> object:
        self.folds += isinstance(job, FoldJob)
        if self._fails and isinstance(job, FoldJob):
            return Failure(Stage.BUILD, FailureKind.ERROR, "no kernel")
        return self._call(job)  # type: ignore[arg-type]


@pytest.mark.parametrize(("chains", "fails", "kept", "folds"), [(40, False, 0, 1), (40, True, 40, 1), (3, False, 3, 0)])
def test_a_search_folds_once_and_where_it_pays(
    chains: int, fails: bool, kept: int, folds: int, settings: SearchSettings, tmp_path: Path
) -> None:
    path = make_chains(tmp_path / "chains.onnx", chains)
    context = make_context(load_model(path), tmp_path, {"x": np.ones((2, 96), np.float32)}, settings=settings)
    with Toolchain(ONNXRUNTIME, load_target("cpu"), context) as toolchain:
        toolchain.reference_model.worker = calls = Calls(toolchain, fails=fails)
        for precision in (Precision.FP32, Precision.FP16):
            typed = toolchain.builder.write(context.grouped.uniform(precision), str(precision))
            assert sum(node.op_type == "Concat" for node in nodes_of(typed)) == kept
        assert calls.folds == folds
        assert not list(tmp_path.rglob("*folded*")), "what was written to fold is gone"
