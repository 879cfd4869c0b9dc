"""Searches where there is little to find: each ends well, and says in plain words what it found."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
from onnx import TensorProto

import mptune
from mptune.errors import ModelError
from mptune.graph.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.reporting.terminal.front import print_front
from mptune.tuning.front import Front
from tests.fakes import FAST, Diary, FakeToolchain, Law
from tests.graph import models

pytestmark = pytest.mark.usefixtures("opened_here", "place")


class Search(NamedTuple):
    """What one search did and said."""

    front: Front
    toolchain: FakeToolchain
    diary: Diary


Options = Callable[[list[str]], dict[str, object]]


def search(law: Options | None = None, toolchain: Options | None = None, **settings: object) -> Search:
    """Search ``model.onnx`` on a fake toolchain; its law and options are given by the groups' ids."""
    ids = [g.id for g in find_groups(load_model("model.onnx"))]
    fake = FakeToolchain(Law(ids, **(law(ids) if law else {})), **(toolchain(ids) if toolchain else {}))  # type: ignore[arg-type]
    diary = Diary()
    wanted = {"data": "data.npz", "budget": 14, "target": "cpu", "latency": FAST, **settings}
    front = mptune.search("model.onnx", listener=diary, open_toolchain=fake.open, **wanted)
    assert front.chosen is not None
    assert front.limits_met
    assert (front.run_dir / "chosen" / "model.onnx").exists()
    assert mptune.report(front.run_dir).to_json() == front.to_json()
    print_front(front, io.StringIO())
    return Search(front, fake, diary)


def test_no_free_group() -> None:
    Path("space.toml").write_text("format = 1\n[pin]\nfp32 = ['*']")
    done = search(space="space.toml")
    assert "every layer group is pinned, so there was nothing to search" in "\n".join(done.front.warnings)
    assert "stopped: every plan of the search space has been evaluated" in done.diary.stages
    assert done.front.chosen == done.front.fp32
    assert len(done.toolchain.built) == 1
    assert done.toolchain.emulated == []


def test_one_free_group() -> None:
    Path("space.toml").write_text("format = 1\n[pin]\nfp32 = ['block*', 'mixing*']")
    done = search(space="space.toml")
    assert "stopped: every plan of the search space has been evaluated" in done.diary.stages
    assert len(done.toolchain.built) == 2
    assert done.front.warnings == (), "that is all there is, and a larger budget would find no more"
    assert [len(p.plan.fp16_groups) for p in done.front.points] == [1, 0]


def test_every_group_overflows() -> None:
    done = search(toolchain=lambda ids: {"non_finite": set(ids)}, budget=20)
    kept = done.front.explanation.fp32_groups(done.front.fp32.plan.fingerprint)
    assert {group.because.partition(",")[0] for group in kept} == {"error: NaN or Inf alone"}
    assert done.front.chosen == done.front.fp32
    assert "stopped: no plan is expected to improve the front beyond the noise" in done.diary.stages
    assert len(done.toolchain.built) < 20


def test_every_group_fails_to_build() -> None:
    done = search(toolchain=lambda ids: {"fails": set(ids)}, budget=20)
    (warning,) = done.front.warnings
    failures = done.front.failures
    assert warning.startswith(f"{failures} of {failures + 1} plans failed and are not judged; the first with: build, ")
    assert "no kernel for this" in warning
    assert done.front.chosen == done.front.fp32


@pytest.mark.parametrize("source", ["measured", "predicted"])
def test_fp16_is_slower_everywhere(source: str) -> None:
    done = search(law=lambda ids: {"gains": dict.fromkeys(ids, -0.5)}, toolchain=lambda _: {"latency_source": source})
    assert done.front.chosen == done.front.fp32
    assert [p.plan for p in done.front.points] == [done.front.fp32.plan]


def test_all_errors_are_zero() -> None:
    done = search(law=lambda ids: {"errors": dict.fromkeys(ids, 0.0), "fp32_error": 0.0})
    assert done.front.chosen == done.front.fp16
    assert done.front.points == (done.front.fp16,)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_budget_below_the_number_of_seeds(budget: int) -> None:
    done, says = search(budget=budget), "only the baseline and the seeds were evaluated, and nothing was searched"
    assert says in "\n".join(done.front.warnings)
    assert "larger --budget" in "\n".join(done.front.warnings)
    assert done.diary.stages[2] == "stopped: the budget is spent"
    assert done.front.evaluations == budget
    more = search(budget=8)
    assert says not in "\n".join(more.front.warnings)
    assert len(more.toolchain.built) == 8 - budget


def save_model(node: onnx.NodeProto, x: int, y: int, *constants: onnx.TensorProto) -> None:
    values = [models.value("x", [1, 8], x)], [models.value("y", [1, 8], y)]
    Path("model.onnx").write_bytes(models.model([node], *values, list(constants)).SerializeToString())


def test_a_model_that_computes_nothing_in_fp32_is_refused() -> None:
    save_model(models.node("Add", ["x", "x"], "y", "twice/Add"), TensorProto.INT64, TensorProto.INT64)
    with pytest.raises(ModelError, match="no FP32 layer to tune") as caught:
        search(data=None)
    assert caught.value.hint


def test_a_model_without_layer_groups() -> None:
    """All that is FP32 in it is made by an operator that has no precision of its own."""
    node = models.node("DequantizeLinear", ["x", "scale"], "y", "dequantize")
    save_model(node, TensorProto.UINT8, TensorProto.FLOAT, models.constant("scale", 0.1))
    done = search(data=None)
    assert "no layer group can have another precision; nothing to tune" in [f.text for f in done.front.findings]
    assert done.front.fp32.plan.precision == {}


def test_a_model_that_is_predicted_to_take_no_time() -> None:
    save_model(models.node("Identity", ["x"], "y", "same"), TensorProto.FLOAT, TensorProto.FLOAT)
    found = mptune.search("model.onnx", target="jetson-orin-nano-8gb", budget=4, progress=False)
    assert not found.chosen.plan.reduced_groups
    assert (found.fp32.latency.median_ms, found.fp32.speedup, found.hypervolume) == (0.0, 1.0, 0.0)
    json.loads(Path("model.mptune/front.json").read_text(), parse_constant=pytest.fail)
