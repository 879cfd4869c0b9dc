"""Peak memory against models whose peak is known by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import load_model
from mptune.graph.plan import Precision
from mptune.graph.value_types import ValueTypes
from mptune.targets.costs import default_workspace_mb, memory_need, memory_warnings, plan_memory
from mptune.targets.target import EngineMemory, load_target
from tests.targets.conftest import Build

KB = 1024


def test_a_chain_holds_its_input_and_two_values(build: Build) -> None:
    """x and y are 1 KiB, a and b 4 KiB: at b all of x, a and b are alive."""
    nodes = "a = Concat<axis=0>(x, x, x, x) [relu] b = Relu(a) [pool] y = MaxPool<kernel_shape=[4]>(b)"
    need = memory_need(build(f"(float[1,1,256] x) => (float[4,1,253] y) {{ {nodes} }}"), {})
    assert (need.fp32_activations, need.fp32_peak) == (KB + 4 * KB + 4 * KB, "relu")
    # In FP16 a and b are halved, x stays; the output, which stays FP32, makes the last node the peak.
    assert (need.fp16_activations, need.fp16_peak) == (KB + 2 * KB + 4 * 253 * 4, "pool")
    assert need.fp32_weights == need.fp16_weights == 0
    model = build("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }")
    assert memory_need(model, {"x": (32, 4), "y": (32, 4)}).fp32_activations == 2 * 32 * 4 * 4, "observed shapes count"


@pytest.mark.parametrize(
    ("nodes", "outputs", "kib", "peak"),
    [
        # a is read by the last node, so at c all of x, a, b and c are alive; at y b is gone.
        ("a = Relu(x) b = Sigmoid(a) [peak] c = Tanh(b) y = Add(a, c)", "y", 4, "peak"),
        # A view has no memory of its own, but keeps what it looks at.
        ("a = Relu(x) v = Reshape(a, flat) b = Sigmoid(x) w = Reshape(b, flat) [peak] y = Add(v, w)", "y", 4, "peak"),
        # A view that is an output is a copy.
        ("a = Relu(x) y = Reshape(a, flat)", "y", 3, None),
        # Outputs stay to the end.
        ("y = Relu(x) a = Sigmoid(x) z = Tanh(a)", "yz", 4, None),
    ],
    ids=["skip", "view", "view that is an output", "output"],
)
def test_what_is_alive_at_once(build: Build, nodes: str, outputs: str, kib: int, peak: str | None) -> None:
    results = ", ".join(f"float[256] {name}" for name in outputs)
    need = memory_need(build(f"(float[256] x) => ({results}) {{ {nodes} }}", flat=np.array([256])), {})
    assert need.fp32_activations == kib * KB
    assert peak in (None, need.fp32_peak)


def test_weights_and_other_types(build: Build) -> None:
    """TopK's indices are 8 bytes each whatever the precision; FP32 weights are halved, integers not."""
    nodes = "a = MatMul(x, w) best, places = TopK<axis=1>(a, k) p = Cast<to=1>(places) y = Add(best, p)"
    need = memory_need(
        build(f"(float[1,64] x) => (float[1,32] y) {{ {nodes} }}", w=(64, 256), k=np.array([32], np.int64)), {}
    )
    assert (need.fp32_weights, need.fp16_weights) == (64 * 256 * 4 + 8, 64 * 256 * 2 + 8)
    assert need.fp32_activations == 64 * 4 + 256 * 4 + 32 * 4 + 32 * 8  # at TopK
    assert need.fp16_activations == 64 * 4 + 256 * 2 + 32 * 2 + 32 * 8
    assert need.total(Precision.FP16) == need.fp16_weights + need.fp16_activations
    assert need.total(Precision.FP32) == need.fp32_weights + need.fp32_activations


def test_a_warning_where_a_model_does_not_fit(build: Build) -> None:
    need = memory_need(build("(float[1] x) => (float[1] y) { y = Relu(x) }"), {})
    nano4, nano8, h200 = map(load_target, ("jetson-orin-nano-4gb", "jetson-orin-nano-8gb", "h200"))
    assert [memory_warnings(need, target) for target in (nano4, h200, load_target("cpu"))] == [()] * 3
    large = replace(need, fp32_weights=3_000_000_000, fp16_weights=1_500_000_000, fp32_activations=1_200_000_000)
    (text,) = memory_warnings(large, nano4)
    for words in ("all-FP32 needs about 4.2 GB of memory (weights 3, activations 1.2", "all-FP16 1.5 GB", "--batch"):
        assert words in text
    huge = replace(need, fp32_weights=400_000_000_000, fp16_weights=200_000_000_000)
    assert len(memory_warnings(huge, h200)) == 1
    # Where latency is measured, the baseline stays loaded beside each candidate.
    assert memory_warnings(large, nano8) == ()
    (text,) = memory_warnings(large, nano8, measured=True)
    for words in ("baseline beside a candidate needs about 8.4 GB", "about 6 GB are free", ": close other programs"):
        assert words in text
    (text,) = memory_warnings(large, nano4, measured=True)
    assert "all-FP32 needs about 4.2 GB" in text
    assert memory_warnings(large, load_target("jetson-agx-orin-64gb"), measured=True) == ()


def test_the_workspace_is_limited_where_memory_is_shared() -> None:
    assert default_workspace_mb(None) is None
    assert default_workspace_mb(7.8) == 1859
    assert default_workspace_mb(0.001) == 1
    assert EngineMemory(1000, 50, 900, "measured").total_bytes == 1050, "the file holds the weights"
    assert EngineMemory(None, 50, 900, "predicted").total_bytes == 950


def test_a_plan_lies_between_all_fp16_and_all_fp32(mlp_path: Path, cnn_path: Path) -> None:
    for path in (mlp_path, cnn_path):
        model = load_model(path)
        grouped = GroupedModel(model, find_groups(model))
        types = ValueTypes(grouped)
        need = memory_need(model, {})
        assert need.fp16_weights == pytest.approx(need.fp32_weights / 2)
        assert need.fp32_activations / 2 <= need.fp16_activations < need.fp32_activations
        fp32 = plan_memory(types, grouped.uniform(Precision.FP32), {})
        fp16 = plan_memory(types, grouped.uniform(Precision.FP16), {})
        assert (fp32.weight_bytes, fp32.context_bytes) == (need.fp32_weights, need.fp32_activations)
        assert need.fp16_weights <= fp16.weight_bytes < fp32.weight_bytes
        assert need.fp16_activations <= fp16.context_bytes <= fp32.context_bytes
        first = grouped.uniform(Precision.FP32).replace({grouped.groups[0].id: Precision.FP16})
        mixed = plan_memory(types, first, {})
        assert fp16.weight_bytes < mixed.weight_bytes < fp32.weight_bytes
        assert (mixed.source, mixed.engine_bytes) == ("predicted", None)
        assert EngineMemory.from_json(mixed.to_json()) == mixed
