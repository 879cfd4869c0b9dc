"""ONNX Runtime's own profiler on the CPU provider, whose names of nodes are as strange as the CUDA provider's."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from mptune.data.calibration import CalibrationSet
from mptune.engines.backends import onnxruntime as ort_toolchain
from mptune.engines.backends.onnxruntime import ONNXRUNTIME
from mptune.engines.base import EngineError, Failure, Measurement
from mptune.engines.jobs.layer_times import (
    PROFILED_RUNS,
    UNTIMED_RUNS,
    LayerTime,
    OrtProfileJob,
    group_times,
    layer_times,
    minor_nodes,
)
from mptune.engines.ort.fusions import computed_nodes
from mptune.engines.toolchains.toolchain import MeasuredToolchain
from mptune.engines.worker.child import WorkerState
from mptune.engines.workload import Workload
from mptune.graph.grouping.grouped import GroupedModel
from mptune.graph.grouping.groups import LayerGroup, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.rewrite import Rewriter
from mptune.graph.writing.weights import WeightBank
from mptune.settings import SearchSettings
from mptune.targets.target import load_target
from tests.engines.engine_support import make_workspace
from tests.engines.faults import RaiseModelError, Signalled

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "benchmarks" / "models" / "digits_vit.onnx"
CORPUS = Path(__file__).parents[2] / "graph" / "corpus"


def plan_of(model: Model, groups: tuple[LayerGroup, ...], every: int) -> PrecisionPlan:
    """Every so many of the free groups in FP16; none for 0."""
    free = [group.id for group in groups if group.pinned is None]
    half = set(free[::every]) if every else set()
    return PrecisionPlan(
        model.sha256, {group.id: Precision.FP16 if group.id in half else Precision.FP32 for group in groups}
    )


def feed_of(model: Model) -> dict[str, np.ndarray]:
    return {
        info.name: np.ones([dim if isinstance(dim, int) else 2 for dim in info.shape or ()], info.numpy_dtype)
        for info in model.inputs
    }


class Profiled:
    """A model, profiled under a plan, as the worker does it."""

    def __init__(self, path: Path, folder: Path, every: int = 0) -> None:
        self.model = load_model(path)
        self.groups = find_groups(self.model)
        weights, empty = folder / "weights", folder / "profile"
        empty.mkdir()
        rewriter = Rewriter(GroupedModel(self.model, self.groups), WeightBank.write(self.model, weights))
        typed = rewriter.write(plan_of(self.model, self.groups, every), weights / "typed.onnx")
        samples = folder / "samples.npz"
        CalibrationSet((feed_of(self.model),), "test", False).save(samples)
        before = sorted(weights.iterdir())
        self.layers = OrtProfileJob(typed, samples, empty).run(WorkerState())
        assert not list(empty.iterdir())
        assert sorted(weights.iterdir()) == before

    def times(self) -> dict[str, float]:
        owners = {node: group.id for group in self.groups for node in group.nodes}
        return group_times(self.layers, owners, minor=minor_nodes(GroupedModel(self.model, self.groups)))


@pytest.mark.parametrize("every", [0, 1, 2])
def test_every_group_of_a_real_model_is_seen(every: int, tmp_path: Path) -> None:
    profiled = Profiled(DIGITS, tmp_path, every)
    times = profiled.times()
    assert times.keys() == {group.id for group in profiled.groups}
    assert all(ms > 0 for ms in times.values())


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.onnx")), ids=lambda path: path.stem)
def test_all_that_is_not_folded_is_seen(path: Path, every: int, tmp_path: Path) -> None:
    """Subgraphs, functions, sequences, external data, custom operators: each has its groups traced."""
    profiled = Profiled(path, tmp_path, every)
    folded = {group.id for group in profiled.groups if group.pinned and "folded" in group.pinned}
    assert profiled.times().keys() >= {group.id for group in profiled.groups} - folded


def save(path: Path, nodes: list[NodeProto], weights: Mapping[str, np.ndarray], shape: list[int]) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, shape).astype(np.float32)


def test_the_largest_product_takes_the_most(tmp_path: Path) -> None:
    # With 4 rows the large product has 256 times the FLOPs and 128 times the bytes of either other one.
    sizes = {"small": (4, 1024), "large": (1024, 1024), "last": (1024, 4)}
    nodes, value = [], "x"
    for name in sizes:
        result = "y" if name == "last" else name
        nodes.append(helper.make_node("MatMul", [value, f"{name}.w"], [result], name))
        value = result
    weights = {f"{name}.w": noise(*shape) for name, shape in sizes.items()}
    profiled = Profiled(save(tmp_path / "m.onnx", nodes, weights, [4, 4]), tmp_path)
    times = profiled.times()
    largest = max(times, key=lambda group: times[group])
    assert [group.nodes for group in profiled.groups if group.id == largest] == [("large",)]


# -- tracing --------------------------------------------------------------------------------------------------------


def graph_of(*nodes: tuple[str, str, str, str], constants: tuple[str, ...] = ()) -> onnx.GraphProto:
    """Nodes as (name, operator, inputs, outputs); the input is x."""
    graph = onnx.GraphProto()
    graph.input.add(name="x")
    for name, op, inputs, outputs in nodes:
        graph.node.add(name=name, op_type=op, input=inputs.split(), output=outputs.split())
    for name in constants:
        graph.initializer.add(name=name)
    return graph


def test_what_was_fused_is_found_between_the_tensors_that_are_left() -> None:
    typed = graph_of(
        ("product", "MatMul", "x w", "p"),
        ("bias", "Add", "p b", "q"),
        ("residual", "Add", "q x", "r"),
        ("norm", "LayerNormalization", "r s", "n"),
        ("shape", "Transpose", "w", "v"),
        ("last", "MatMul", "n v", "y"),
        constants=("w", "b", "s"),
    )
    optimised = graph_of(
        ("gemm_input_reshape", "Reshape", "x k", "t1"),
        ("fused", "Gemm", "t1 w b", "t2"),
        ("gemm_output_reshape", "Reshape", "t2 l", "q"),
        ("", "SkipLayerNormalization", "q x s", "n"),
        ("last", "MatMul", "n folded", "y"),
    )
    assert computed_nodes(typed, optimised) == [
        ("bias", "product"),
        ("bias", "product"),
        ("bias", "product"),
        ("norm", "residual"),
        ("last",),
    ]


def test_what_onnx_runtime_casts_counts_for_the_value_that_it_casts() -> None:
    typed = graph_of(("a", "Erf", "x", "p"), ("b", "Erf", "p", "q"), ("q__fp32", "Cast", "q", "y"))
    optimised = graph_of(
        ("", "Cast", "x", "InsertedPrecisionFreeCast_x"),
        ("a", "Erf", "InsertedPrecisionFreeCast_x", "InsertedPrecisionFreeCast_p_token_3"),
        ("b", "Erf", "InsertedPrecisionFreeCast_p_token_3", "InsertedPrecisionFreeCast_q"),
        ("", "Cast", "InsertedPrecisionFreeCast_q", "q"),
        ("q__fp32", "Cast", "q", "y"),
    )
    assert computed_nodes(typed, optimised) == [("a",), ("a",), ("b",), ("b",), ("q__fp32",)]


def test_what_nobody_reads_serves_what_it_reads() -> None:
    typed = graph_of(("a", "Erf", "x", "p"))
    optimised = graph_of(("a", "Erf", "x", "p"), ("copy", "MemcpyToHost", "p", "t"), ("odd", "Odd", "u", "v"))
    assert computed_nodes(typed, optimised) == [("a",), ("a",), ()]


def event(name: str, op: str, number: int, us: int, at_us: int = 0) -> dict[str, object]:
    facts = {"node_index": str(number), "op_name": op, "provider": "CPUExecutionProvider"}
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": us, "ts": at_us, "args": facts}


def test_blank_and_repeated_names_are_told_apart_by_their_order() -> None:
    optimised = graph_of(("", "Max", "", ""), ("r", "Reorder", "", ""), ("", "Max", "", ""), ("r", "Reorder", "", ""))
    run = [
        event("Max_7", "Max", 7, 1),
        event("r", "Reorder", 9, 2),
        event("Max_3", "Max", 3, 4),
        event("r", "Reorder", 8, 8),
    ]
    session = {"cat": "Session", "name": "model_run", "dur": 99, "ts": 0}
    found = layer_times([session, *run, *run, session], optimised, [("a",), ("b",), ("c",), ("d",)])
    assert found == tuple(
        LayerTime((name,), ms) for name, ms in (("a", 0.001), ("b", 0.002), ("c", 0.004), ("d", 0.008))
    )


def test_the_first_runs_and_the_longest_are_left_out() -> None:
    optimised = graph_of(("a", "Erf", "", ""))
    durations = [900] * UNTIMED_RUNS + [4] * (PROFILED_RUNS - 2) + [700, 42]
    found = layer_times([event("a", "Erf", 0, us) for us in durations], optimised, [("a",)])
    (layer,) = found
    assert layer.ms == pytest.approx(1e-3 * (4 * (PROFILED_RUNS - 2) + 42) / (PROFILED_RUNS - 1))


def test_the_nodes_of_a_subgraph_are_in_the_time_of_the_node_around_it() -> None:
    optimised = graph_of(("a", "Erf", "", ""), ("loop", "Loop", "", ""))
    events = [
        event("a", "Erf", 0, 5, 10),
        event("a", "Erf", 0, 2, 21),
        event("b", "Add", 1, 2, 25),
        event("loop", "Loop", 4, 30, 20),
    ]
    found = layer_times(events, optimised, [("a",), ("loop",)])
    assert found == (LayerTime(("a",), 0.005), LayerTime(("loop",), 0.03))


def test_a_node_that_the_graph_does_not_know_belongs_to_nobody() -> None:
    (layer,) = layer_times([event("b", "Erf", 0, 5)], graph_of(("a", "Erf", "", "")), [("a",)])
    assert layer.nodes == ()


def test_a_profile_of_nothing_is_an_error() -> None:
    with pytest.raises(EngineError, match="names no node"):
        layer_times([], graph_of(), [])


# -- the toolchain --------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(mlp_workload: Workload, settings: SearchSettings) -> MeasuredToolchain:
    found = MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), mlp_workload, settings)
    assert not isinstance(found.reference_model.reference("search"), Failure)
    return found


def evaluated(tools: MeasuredToolchain, every: int, *, profile: bool = True) -> Measurement:
    found = tools.evaluate(plan_of(tools.workload.model, tools.workload.groups, every), profile=profile)
    assert isinstance(found, Measurement), found
    return found


def test_a_measurement_holds_the_groups_times_where_they_are_asked_for(tools: MeasuredToolchain) -> None:
    with tools:
        assert tools.profiling == "apart"
        assert evaluated(tools, 0, profile=False).group_times_ms is None
        for every in (0, 2):
            times = evaluated(tools, every).group_times_ms
            assert times is not None
            assert times.keys() == {group.id for group in tools.workload.groups}
            assert all(ms > 0 for ms in times.values())
    assert {path.suffix for path in tools.workload.workspace.weights_dir.iterdir()} <= {".bin", ".json"}
    assert not list(tools.workload.workspace.logs_dir.glob("*"))


@pytest.mark.parametrize(
    ("fault", "words"), [(Signalled(signal.SIGSEGV), "crash: killed by SIGSEGV"), (RaiseModelError(), "error: ")]
)
def test_a_profile_that_fails_in_the_worker_is_a_warning(
    fault: Any, words: str, tools: MeasuredToolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_toolchain, "OrtProfileJob", lambda *fields: fault)
    with tools:
        failed = evaluated(tools, 2)
        assert failed.group_times_ms is None
        (warning,) = [text for text in failed.warnings if "could not be profiled" in text]
        assert words in warning
        assert tools.profiling == "none"
        again = evaluated(tools, 2)
        assert again.group_times_ms is None
        assert not any("could not be profiled" in text for text in again.warnings)
    assert {path.suffix for path in tools.workload.workspace.weights_dir.iterdir()} <= {".bin", ".json"}


def test_a_profile_that_cannot_even_begin_is_a_warning(tools: MeasuredToolchain) -> None:
    plan = plan_of(tools.workload.model, tools.workload.groups, 2)
    with tools:
        evaluated(tools, 2, profile=False)
        tools.workload.workspace.scratch(plan.fingerprint).with_suffix(".session").write_text("in the way")
        failed = evaluated(tools, 2)
    assert failed.group_times_ms is None
    assert sum("could not be profiled" in text for text in failed.warnings) == 1


def test_weights_outside_of_the_model_are_profiled_and_not_left_behind(
    tmp_path: Path, settings: SearchSettings
) -> None:
    path = CORPUS / "external_data.onnx"
    model = load_model(path)
    groups = find_groups(model)
    workload = Workload(GroupedModel(model, groups), make_workspace(path, tmp_path, feed_of(model), count=1))
    with MeasuredToolchain(ONNXRUNTIME, load_target("cpu"), workload, settings) as tools:
        assert not isinstance(tools.reference_model.reference("search"), Failure)
        evaluated(tools, 1, profile=False)
        before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
        times = evaluated(tools, 1).group_times_ms
        assert times is not None
        assert times.keys() == {group.id for group in groups}
        assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


@pytest.mark.gpu
def test_nothing_is_profiled_on_the_cuda_provider(mlp_workload: Workload, settings: SearchSettings) -> None:
    with MeasuredToolchain(ONNXRUNTIME, load_target("h200"), mlp_workload, settings, "cuda") as tools:
        assert tools.profiling == "none"
        assert not isinstance(tools.reference_model.reference("search"), Failure)
        assert evaluated(tools, 0).group_times_ms is None
