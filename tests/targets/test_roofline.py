"""The additive law: its terms follow the device, its boundaries follow the rewriter's rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.loading.model import Model, load_model
from mptune.graph.plan import PRECISIONS, Precision, PrecisionPlan
from mptune.graph.value_types import ValueTypes
from mptune.settings import Granularity
from mptune.targets.costs import GroupCost, ShapeTable
from mptune.targets.roofline import NETWORK_SHARE, TILE_ELEMENTS, Kernels, roofline
from mptune.targets.target import Target, list_targets, load_target
from tests.graph import models

DEVICE = load_target("h200").model_copy(
    update={
        "fp16_tflops": 100.0, "fp32_tflops": 10.0, "bandwidth_gbps": 100.0, "launch_us": 2.0, "sm_count": 10,
        "bf16_tflops": None, "tf32_tflops": None, "l2_mb": None,
    }
)  # fmt: skip
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOT = Path(__file__).parents[1]
MODELS = [
    *sorted((BENCHMARKS / "models").glob("*.onnx")),
    *sorted((ROOT / "graph/exported").glob("*.onnx")),
    *(ROOT / f"graph/corpus/{name}.onnx" for name in ("detector", "layernorm_13", "mask_1e9", "vit", "windows_roll")),
]
"""Transformers and convolutional networks of both exporters, with masks and with outputs that are read inside, too."""
KERNELS = Kernels(DEVICE)
FULL = 10 * TILE_ELEMENTS
"""Output elements that keep every multiprocessor of DEVICE busy for one wave."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """Matrix product, activation, a branch that joins, a captured tensor, many outputs, a custom operator."""
    graph = """(float[b,64] x, bool c) => (float[b,64] y, float[b,64] k, float[b,64] z, float[b,64] n, int64[2] size)
        <float[b,64] o> {
            [mm1] h = MatMul(x, w) [act] s = Tanh(h) [mm2] k = MatMul(s, w) [join] r = Add(k, h)
            [odd] o = com.example.Odd(r) [mm3] y = MatMul(o, w) [shape] size = Shape(k)
            [if] z = If(c) <then_branch = then () => (float[b,64] t) { t = Identity(h) },
                            else_branch = other () => (float[b,64] t) { t = Identity(h) }>
            [ln] n = LayerNormalization(k, one)
        }"""
    proto = models.text(graph, models.constant("w", np.eye(64)), models.constant("one", np.ones(64)))
    return load_model(models.save(proto, tmp_path_factory.mktemp("roofline")))


@pytest.fixture(scope="module")
def grouped(model: Model) -> GroupedModel:
    return GroupedModel(model, find_groups(model, "op"))


def plan_of(grouped: GroupedModel, fp16) -> PrecisionPlan:
    return grouped.uniform(Precision.FP32).replace(dict.fromkeys(fp16, Precision.FP16))


class TestKernels:
    LAUNCH = 2e-3 / NETWORK_SHARE

    def test_computing_is_bound_by_the_peak_of_the_precision_and_moving_by_the_bandwidth(self) -> None:
        cost = GroupCost(matrix_flops=8e9, fp32_bytes=4, fp16_bytes=2, matrix_elements=FULL, kernels=1)
        assert KERNELS.ms(cost, Precision.FP32) == pytest.approx(8e9 / (10e9 * 0.8) + self.LAUNCH)
        assert KERNELS.ms(cost, Precision.FP16) == pytest.approx(8e9 / (100e9 * 0.8 * NETWORK_SHARE) + self.LAUNCH)
        cost, ms = GroupCost(vector_flops=10, fp32_bytes=4e8, fp16_bytes=2e8, kernels=1), 4e6 / (0.9e6 * NETWORK_SHARE)
        assert KERNELS.ms(cost, Precision.FP32) == pytest.approx(ms + self.LAUNCH)
        assert KERNELS.ms(cost, Precision.FP16) == pytest.approx(ms / 2 + self.LAUNCH)
        # A Cast reads four bytes and writes two.
        assert KERNELS.cast_ms(1_000_000) == pytest.approx(6e6 / (100e6 * 0.9 * NETWORK_SHARE) + 0.5 * self.LAUNCH)

    def test_a_small_product_leaves_multiprocessors_idle(self) -> None:
        one = GroupCost(8e9, matrix_elements=TILE_ELEMENTS)
        full, more = replace(one, matrix_elements=FULL), replace(one, matrix_elements=FULL + 1)
        time = {c.matrix_elements: KERNELS.ms(c, Precision.FP32) for c in (one, full, more)}
        assert time[TILE_ELEMENTS] == pytest.approx(10 * time[FULL])
        assert time[FULL + 1] == pytest.approx(20 / 11 * time[FULL])
        whole = Kernels(DEVICE.model_copy(update={"sm_count": None}))
        assert whole.ms(one, Precision.FP32) == pytest.approx(time[FULL])

    @pytest.mark.parametrize("name", ["digits_vit", "line_encoder"])
    def test_it_orders_plans_measured_in_another_engine(self, name: str) -> None:
        """ONNX Runtime's CUDA provider on an H200, which fuses less than TensorRT; small models, all launches."""
        measured = json.loads((BENCHMARKS / f"results/h200_plans_{name}.json").read_text())
        model = load_model(BENCHMARKS / f"models/{name}.onnx")
        grouped = GroupedModel(model, find_groups(model))
        shapes = {name: tuple(shape) for name, shape in measured["shapes"].items()}
        terms = roofline(grouped, load_target("h200"), shapes)
        fp16 = [{grouped.groups[k].id for k, bit in enumerate(p["precision"]) if bit == "1"} for p in measured["plans"]]
        predicted = np.array([terms.predict(plan_of(grouped, chosen)) for chosen in fp16])
        taken = np.array([plan["latency_ms"] for plan in measured["plans"]])
        assert np.all((predicted > 0.5 * taken) & (predicted < 2.0 * taken))
        random = [k for k, plan in enumerate(measured["plans"]) if plan["kind"] == "random"]
        signs = [np.sign(ms[random][:, None] - ms[random]) for ms in (predicted, taken)]
        assert np.mean(signs[0] * signs[1]) > 0.7  # Kendall's tau


def granularities(model: Model) -> list[GroupedModel]:
    return [GroupedModel(model, find_groups(model, granularity)) for granularity in get_args(Granularity)[:3]]


def all_fp16(grouped: GroupedModel) -> PrecisionPlan:
    return plan_of(grouped, {group.id for group in grouped.groups if group.pinned is None})


class TestGranularity:
    @pytest.mark.parametrize("tf32", [False, True])
    @pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
    def test_uniform_plans_take_as_long_whatever_it_is(self, path: Path, tf32: bool) -> None:
        model = load_model(path)
        for_each = granularities(model)
        assert len({len(grouped.groups) for grouped in for_each}) > 1
        terms = [roofline(grouped, load_target("jetson-orin-nano-8gb"), {}, tf32=tf32) for grouped in for_each]
        assert len({each.base_ms for each in terms}) == 1
        fp16 = [each.predict(all_fp16(grouped)) for each, grouped in zip(terms, for_each, strict=True)]
        assert fp16 == pytest.approx([fp16[0]] * len(fp16), rel=1e-9)

    def test_the_groups_of_a_kernel_share_what_fp16_saves_in_it(self, model: Model) -> None:
        op, fusion, _ = granularities(model)
        fine, coarse = (roofline(grouped, DEVICE, {"x": (4096, 64)}).gains_ms for grouped in (op, fusion))
        for group in fusion.groups:
            own = [fine[each.id] for each in op.groups if set(each.nodes) <= set(group.nodes)]
            assert min(own) > 0
            assert sum(own) == pytest.approx(coarse[group.id])

    def test_a_cast_inside_a_kernel_costs_twice_as_it_ends_the_fusion(self) -> None:
        op, fusion, _ = granularities(load_model(BENCHMARKS / "models/digits_vit.onnx"))
        fine, coarse = ({b.tensor: b.cost_ms for b in roofline(g, DEVICE, {}).boundaries} for g in (op, fusion))
        sizes, inside = ShapeTable(op.model, {}), {name: ms for name, ms in fine.items() if name not in coarse}
        assert inside == {tensor: pytest.approx(2 * KERNELS.cast_ms(sizes.elements(tensor))) for tensor in inside}
        assert coarse.items() < fine.items()


class TestTf32:
    def test_fp32_groups_of_a_mixed_plan_run_at_its_rate(self) -> None:
        model = load_model(BENCHMARKS / "models/digits_vit.onnx")
        grouped = GroupedModel(model, find_groups(model))
        only_computing = {"launch_us": 0.0, "bandwidth_gbps": 1e6}
        device = load_target("jetson-orin-nano-8gb").model_copy(update=only_computing)
        off, on = (roofline(grouped, device, {}, tf32=tf32) for tf32 in (False, True))
        assert on.base_ms == off.base_ms == on.predict(plan_of(grouped, ()))  # all-FP32 is true FP32
        assert on.predict(all_fp16(grouped)) == pytest.approx(off.predict(all_fp16(grouped)))
        half = [group.id for group in grouped.groups][::2]
        assert on.predict(plan_of(grouped, half)) < off.predict(plan_of(grouped, half))
        gains = {group: (off.gains_ms[group], on.gains_ms[group]) for group in off.gains_ms}
        assert all(tf32 <= fp32 for fp32, tf32 in gains.values())
        products = [group.id for group in grouped.groups if group.kind == "matmul"]
        fp32, tf32, fp16 = 1.3, 5.1 * NETWORK_SHARE, 10.2 * NETWORK_SHARE  # TFLOP/s
        ratio = (1 / tf32 - 1 / fp16) / (1 / fp32 - 1 / fp16)
        assert gains[products[0]][1] / gains[products[0]][0] == pytest.approx(ratio, rel=0.05)

    @pytest.mark.parametrize("name", ["t4", "rtx-4090", "cpu"])
    def test_where_it_is_no_faster_it_gains_nothing(self, grouped: GroupedModel, name: str) -> None:
        target, shapes = load_target(name), {"x": (4096, 64)}
        assert roofline(grouped, target, shapes, tf32=True) == roofline(grouped, target, shapes)


class TestLaw:
    def test_all_fp16_saves_all_gains_and_pays_the_fixed_boundaries(self, grouped: GroupedModel) -> None:
        pinned = tuple(replace(g, pinned="because") for g in grouped.groups)
        assert set(roofline(replace(grouped, groups=pinned), DEVICE, {}).gains_ms.values()) == {0.0}
        slow = DEVICE.model_copy(update={"fp16_tflops": 0.001, "fp32_tflops": 1.0, "sm_count": None})
        assert min(roofline(grouped, slow, {"x": (1024, 64)}).gains_ms.values()) < 0
        terms = roofline(grouped, DEVICE, {"x": (4096, 64)})
        assert terms.predict(plan_of(grouped, ())) == terms.base_ms > 0
        every = {g.id for g in grouped.groups}
        paid = sum(b.cost_ms for b in terms.boundaries if b.producer_group is None or b.fp32_consumer)
        expected = terms.base_ms - sum(terms.gains_ms.values()) + paid
        assert terms.predict(plan_of(grouped, every)) == pytest.approx(expected)
        assert all(gain > 0 for gain in terms.gains_ms.values())

    def test_one_group_pays_for_its_own_boundaries(self, grouped: GroupedModel) -> None:
        terms = roofline(grouped, DEVICE, {})
        name = next(g.id for g in grouped.groups if "act" in g.nodes)
        touched = [b for b in terms.boundaries if name == b.producer_group or name in b.consumer_groups]
        assert {b.tensor for b in touched} == {"h", "s"}
        expected = terms.base_ms - terms.gains_ms[name] + sum(b.cost_ms for b in touched)
        assert terms.predict(plan_of(grouped, {name})) == pytest.approx(expected)

    @hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    @pytest.mark.smoke
    def test_boundaries_are_crossed_exactly_where_the_rewriter_casts(self, model: Model, data) -> None:
        for granularity in ("op", "fusion"):
            grouped = GroupedModel(model, find_groups(model, granularity))
            types = ValueTypes(grouped)
            lacking = {grouped.groups[position].id for position in types.lacking(Precision.BF16)}
            drawn = {g.id: data.draw(st.sampled_from(tuple(PRECISIONS))) for g in grouped.groups}
            chosen = {g: Precision.FP32 if p is Precision.BF16 and g in lacking else p for g, p in drawn.items()}
            plan = PrecisionPlan(grouped.model.sha256, chosen)
            casts = {b.tensor: count for b in roofline(grouped, DEVICE, {}).boundaries if (count := b.casts(plan))}
            assert casts == {tensor: len(found) for tensor, found in types.resolve(plan).casts.items()}

    def test_fixed_readers_and_producers(self, grouped: GroupedModel) -> None:
        found = {b.tensor: b for b in roofline(grouped, DEVICE, {}).boundaries}
        # Inputs and what operators without a precision make; no weights, which are converted and never cast.
        assert {name for name, b in found.items() if b.producer_group is None} == {"x", "o"}
        # Captured by a subgraph; an output of the model; read only by an operator without a precision.
        assert {name for name in "hkrs" if found[name].fp32_consumer} == {"h", "k", "r"}
        assert found["r"].consumer_groups == ()
        # A Cast at the model's edge costs only what FP32 moves more.
        shapes = {"x": (64, 64), **dict.fromkeys("hskron", (64, 64))}
        costs_ms = {b.tensor: b.cost_ms for b in roofline(grouped, DEVICE, shapes).boundaries}
        edge_ms, whole_ms = KERNELS.moving_ms(64 * 64 * 2), KERNELS.cast_ms(64 * 64)
        expected = {"x": edge_ms, "n": edge_ms, "k": whole_ms, "o": whole_ms}  # of the outputs, k is read
        assert {name: costs_ms[name] for name in expected} == pytest.approx(expected)

    @pytest.mark.parametrize("target", list_targets(), ids=lambda target: target.name)
    def test_every_profile_predicts(self, grouped: GroupedModel, target: Target) -> None:
        terms = roofline(grouped, target, {"x": (1024, 64)})
        fp16 = terms.predict(plan_of(grouped, {g.id for g in grouped.groups}))
        assert 0 < fp16 < np.inf
