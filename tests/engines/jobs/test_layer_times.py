from __future__ import annotations

from pathlib import Path

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, Measurement, Stage
from mptune.engines.latency import Latency
from mptune.engines.tensorrt.layers import LayerTime, group_times, with_group_times
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model

OWNERS = {"a/MatMul": "g0", "a/Add": "g0", "b/Norm": "g1", "c/Conv": "g2", "d/Mul": "g3"}


def test_the_layers_of_a_group_add_up() -> None:
    """Groups that nothing tells apart are left out; one that is mostly alone keeps its share of the rest."""
    layers = [LayerTime(("a/MatMul",), 2.0), LayerTime(("a/Add",), 0.5), LayerTime(("b/Norm",), 1.0)]
    assert group_times(layers, OWNERS) == {"g0": 2.5, "g1": 1.0}
    block = LayerTime(("a/MatMul", "b/Norm", "c/Conv"), 9.0)
    assert group_times([block], OWNERS) == {}
    assert group_times([block, LayerTime(("d/Mul",), 1.0)], OWNERS) == {"g3": 1.0}
    shared = [LayerTime(("a/MatMul", "b/Norm"), 2.0), LayerTime(("a/Add",), 5.0)]
    assert group_times(shared, OWNERS) == {"g0": 6.0}


def test_what_only_goes_along_takes_no_share_but_is_seen() -> None:
    fused = LayerTime(("a/Add", "b/Norm"), 3.0)
    assert group_times([fused], OWNERS, minor={"a/Add"}) == {"g0": 0.0, "g1": 3.0}
    whole = [LayerTime(("a/MatMul",), 40.0), fused]
    assert group_times(whole, OWNERS, minor={"a/Add"}) == {"g0": 40.0, "g1": 3.0}
    assert group_times([LayerTime(("a/Add", "d/Mul"), 3.0)], OWNERS, minor={"a/Add", "d/Mul"}) == {"g0": 1.5, "g3": 1.5}


def test_a_profile_becomes_group_times_scaled_as_the_latency_and_a_failed_one_a_warning(mlp_path: Path) -> None:
    model = load_model(mlp_path)
    grouped = GroupedModel(model, find_groups(model))
    latency = Latency.predicted(1.0)
    measured = Measurement(latency, None, 0.5, OutputError({}), "measured", 0.0, warnings=("a: b",))
    failure = Failure(Stage.TIME, FailureKind.CRASH, "killed by SIGSEGV", Path("/logs/7-EngineProfileJob.log"))
    failed = with_group_times(measured, failure, grouped)
    assert failed.group_times_ms is None
    kept, warning = failed.warnings
    assert kept == "a: b"
    assert warning.startswith("the engine's layers could not be profiled (crash: killed by SIGSEGV): ")
    assert "\n" not in warning
    layers = [LayerTime(("head/Gemm",), 2.0)]
    (head,) = (group.id for group in grouped.groups if "head/Gemm" in group.nodes)
    profiled = with_group_times(measured, layers, grouped)
    assert profiled.group_times_ms == {head: 1.0}
    assert profiled.warnings == ("a: b",)
