"""Searches where there is little to find: each ends well, and says in plain words what it found."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto

import mptune
from mptune.errors import ModelError
from mptune.reporting.terminal.front import print_front
from mptune.tuning.front import Front
from tests import fakes
from tests.fakes import Diary, FakeToolchain, Law
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here", "place")


def search(toolchain: FakeToolchain, **settings: Any) -> tuple[Front, Diary]:
    """What a search found, and what it said."""
    diary = Diary()
    front = fakes.search(toolchain, listener=diary, **{"budget": 14, **settings})
    assert front.limits_met
    assert (front.run_dir / "chosen" / "model.onnx").exists()
    assert mptune.report(front.run_dir).to_json() == front.to_json()
    print_front(front, io.StringIO())
    return front, diary


EVERY_PLAN = "stopped: every plan of the search space has been evaluated"
ALL_PINNED = "every layer group is pinned, so there was nothing to search"


@pytest.mark.parametrize(("pinned", "plans"), [("'*'", 1), ("'block*', 'mixing*'", 2)])
def test_no_free_group_or_one(pinned: str, plans: int) -> None:
    Path("space.toml").write_text(f"format = 1\n[pin]\nfp32 = [{pinned}]")
    toolchain = fakes.make_toolchain()
    front, diary = search(toolchain, space="space.toml")
    assert EVERY_PLAN in diary.stages
    assert len(toolchain.built) == plans
    assert [len(p.plan.fp16_groups) for p in front.points] == [1, 0][-plans:]
    assert toolchain.emulated == []
    # With one that is all there is, and a larger budget would find no more.
    assert [ALL_PINNED in text for text in front.warnings] == [True] * (2 - plans)


def test_every_group_overflows() -> None:
    toolchain = fakes.make_toolchain()
    toolchain.non_finite = set(toolchain.law.groups)
    front, diary = search(toolchain, budget=20)
    kept = front.explanation.fp32_groups(front.fp32.plan.fingerprint)
    assert {group.because.partition(",")[0] for group in kept} == {"error: NaN or Inf alone"}
    assert front.chosen == front.fp32
    assert "stopped: no plan is expected to improve the front beyond the noise" in diary.stages
    assert len(toolchain.built) < 20


def test_every_group_fails_to_build() -> None:
    toolchain = fakes.make_toolchain()
    toolchain.fails = set(toolchain.law.groups)
    front, _ = search(toolchain, budget=20)
    (warning,) = front.warnings
    assert warning.startswith(
        f"{front.failures} of {front.failures + 1} plans failed and are not judged; the first with: "
    )
    assert "no kernel for this" in warning
    assert front.chosen == front.fp32


@pytest.mark.parametrize(
    ("source", "law", "best"),
    [
        ("measured", {"gains": -0.5}, "fp32"),  # FP16 is slower everywhere
        ("predicted", {"gains": -0.5}, "fp32"),
        ("measured", {"errors": 0.0}, "fp16"),
    ],
)
def test_all_groups_are_alike(source: str, law: dict[str, float], best: str) -> None:
    toolchain = fakes.make_toolchain(latency_source=source)
    groups = toolchain.law.groups
    toolchain.law = Law(groups, fp32_error=0.0, **{name: dict.fromkeys(groups, value) for name, value in law.items()})
    front, _ = search(toolchain)
    assert front.points == (getattr(front, best),) == (front.chosen,)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_budget_below_the_number_of_seeds(budget: int) -> None:
    first, second = fakes.make_toolchain(), fakes.make_toolchain()
    front, diary = search(first, budget=budget)
    says = "only the baseline and the seeds were evaluated, and nothing was searched"
    assert any(says in text and "larger --budget" in text for text in front.warnings)
    assert diary.stages[2] == "stopped: the budget is spent"
    assert front.evaluations == budget
    front, _ = search(second, budget=8)
    assert not any(says in text for text in front.warnings)
    assert len(second.built) == 8 - budget


def save_model(node: onnx.NodeProto, x: int, y: int, *constants: onnx.TensorProto) -> None:
    values = [models.value("x", [1, 8], x)], [models.value("y", [1, 8], y)]
    Path("model.onnx").write_bytes(models.model([node], *values, list(constants)).SerializeToString())


def test_a_model_that_computes_nothing_in_fp32_is_refused() -> None:
    save_model(models.node("Add", ["x", "x"], "y", "twice/Add"), TensorProto.INT64, TensorProto.INT64)
    with pytest.raises(ModelError, match="no FP32 layer to tune") as caught:
        search(fakes.make_toolchain(), data=None)
    assert caught.value.hint


def test_a_model_without_layer_groups() -> None:
    """All that is FP32 in it is made by an operator that has no precision of its own."""
    node = models.node("DequantizeLinear", ["x", "scale"], "y", "dequantize")
    save_model(node, TensorProto.UINT8, TensorProto.FLOAT, models.constant("scale", 0.1))
    front, _ = search(fakes.make_toolchain(), data=None)
    assert "no layer group can have another precision; nothing to tune" in [f.text for f in front.findings]
    assert front.fp32.plan.precision == {}


def test_a_model_that_is_predicted_to_take_no_time() -> None:
    save_model(models.node("Identity", ["x"], "y", "same"), TensorProto.FLOAT, TensorProto.FLOAT)
    front = mptune.search("model.onnx", target="jetson-orin-nano-8gb", budget=4, progress=False)
    assert not front.chosen.plan.reduced_groups
    assert (front.fp32.latency.median_ms, front.fp32.speedup, front.hypervolume) == (0.0, 1.0, 0.0)
    json.loads(Path("model.mptune/front.json").read_text(), parse_constant=pytest.fail)
