"""Norms that an engine computes as one: their emulation, and no hazards inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mptune.graph.facts import FusedNodes, values_inside
from mptune.graph.groups import GroupedModel, find_groups
from mptune.graph.hazards.find import find_hazards, pinned_by_hazards
from mptune.graph.loading.model import Model
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.graph.writing.emulate import Emulator
from mptune.graph.writing.rounding_steps import with_rounding_steps
from mptune.graph.writing.weights import WeightBank
from tests.graph.hazards.observed import magnitudes_of
from tests.graph.helpers import half, run
from tests.graph.norms_written_out import GAIN, LARGE, X, rms_norm

NORM = FusedNodes(("n_q", "n_m", "n_a", "n_s", "n_d", "n_y"))
INSIDE = {"q", "m", "a", "s", "d"}
H = X  # the product before the norm is one with the identity


def kernel(values: np.ndarray) -> np.ndarray:
    """FP32 inside, rounded once."""
    wide = values.astype(np.float64)
    return half(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * half(GAIN))


def same(values: np.ndarray, others: np.ndarray) -> float:
    """The share of identical values: FP32 and FP64 round some of them to different neighbours."""
    return float(np.mean(values == others))


class Case:
    def __init__(self, model: Model, folder: Path, norms: tuple[FusedNodes, ...], x: np.ndarray = X) -> None:
        self.grouped = GroupedModel(model, find_groups(model))
        self.norms, self.folder, self.x = norms, folder, x
        self.bank = WeightBank.write(model, folder)

    def plan(self, *nodes: str) -> PrecisionPlan:
        chosen = {self.grouped.owners[node]: Precision.FP16 for node in nodes}
        return self.grouped.uniform(Precision.FP32).replace(chosen)

    def emulated(self, plan: PrecisionPlan) -> dict[str, np.ndarray]:
        """By one model for the plan, and the same by switches."""
        emulator = Emulator(self.grouped, self.bank, self.norms)
        values = run(emulator.write(plan, self.folder / "emulated.onnx"), {"x": self.x})
        path = emulator.write_switched(self.folder / "switched.onnx", [group.id for group in self.grouped.groups])
        on = emulator.on(plan)
        switches = {name: np.array(name in on) for name in emulator.switches[Precision.FP16].values()}
        for name, other in run(path, {"x": self.x, **switches}, ["SimplifiedLayerNormFusion"]).items():
            np.testing.assert_allclose(other, values[name], rtol=1e-6, err_msg=name)
        return values


def test_its_steps_are_not_rounded_and_what_it_reads_is(tmp_path: Path) -> None:
    case = Case(rms_norm(tmp_path, read_twice=True), tmp_path, (NORM,))
    ops = [n.op_type for n in with_rounding_steps(case.grouped, (NORM,)).model.nodes]
    assert "ReduceMean" in ops, "no mean as the CUDA provider divides it"
    for nodes in (["n_y"], ["n_y", "n_z"], ["n_h", "n_y"]):
        assert same(case.emulated(case.plan(*nodes))["y"], kernel(half(H))) > 0.99 > same(kernel(H), kernel(half(H)))
    np.testing.assert_array_equal(case.emulated(case.plan("n_y"))["z"], H * GAIN)


def test_in_bf16_each_step_is_rounded(tmp_path: Path) -> None:
    """There are norms that ONNX Runtime fuses in FP16 alone."""
    fused, node_by_node = (Case(rms_norm(tmp_path), tmp_path, norms) for norms in ((NORM,), ()))
    plan = fused.grouped.uniform(Precision.BF16)
    (one,), (other,) = (
        run(Emulator(case.grouped, case.bank, case.norms).write(plan, tmp_path / "bf16.onnx"), {"x": X}).values()
        for case in (fused, node_by_node)
    )
    np.testing.assert_array_equal(one, other)


def test_values_inside_are_no_hazard(tmp_path: Path) -> None:
    model = rms_norm(tmp_path, eps=1e-9)
    grouped = GroupedModel(model, find_groups(model))
    assert values_inside(model, (NORM,)) == INSIDE
    ranges = {"h": LARGE, "q": LARGE**2, "m": LARGE**2, "a": LARGE**2, "s": LARGE, "d": 3.0, "y": 3.0}
    owner = grouped.owners["n_y"]
    assert owner in pinned_by_hazards(find_hazards(grouped, magnitudes_of(ranges)))
    assert not [
        hazard for hazard in find_hazards(grouped, magnitudes_of(ranges), fused=(NORM,)) if hazard.place.group == owner
    ]


def test_what_it_reads_is_one_all_the_same(tmp_path: Path) -> None:
    model = rms_norm(tmp_path)
    grouped = GroupedModel(model, find_groups(model))
    pinned = pinned_by_hazards(find_hazards(grouped, magnitudes_of({"h": 7e4, "q": 5e9}), fused=(NORM,)))
    assert set(pinned) == {grouped.owners["n_h"], grouped.owners["n_y"]}
    assert "h: " in pinned[grouped.owners["n_y"]]
