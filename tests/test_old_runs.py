"""Run directories that mptune 0.1.0 made (tests/old_runs) open, resume, report, pick and confirm as they did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mptune
from mptune.graph.grouping.groups import find_groups
from mptune.graph.loading.model import load_model
from mptune.rundir import read_run
from mptune.tuning.front import Front
from tests.fakes import FakeToolchain, Law

OLD = Path(__file__).parent / "old_runs" / "0.1.0"
TARGET = "jetson-orin-nano-8gb"

HYPERVOLUME_AT_14 = 0.26992996
"""What 0.1.0 reaches when it resumes ``precision`` with a budget of 14."""


KNEES = {"precision": "ef4dd3436a0b"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, their model and data beside them, as the working directory."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(run: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((Path(run) / "front.json").read_text())
    return document


def written_by_0_1_0(run: str) -> dict[str, Any]:
    """The front as 0.1.0 wrote it, with the plan that is the knee since all-FP32 takes no part in finding it."""
    document = written(run)
    return {**document, "chosen": KNEES.get(run, document["chosen"])}


def of_before(document: dict[str, Any], now: dict[str, Any]) -> None:
    """Every figure that 0.1.0 wrote is there still; what came later is not looked at, and texts may differ."""
    for key, value in document.items():
        if key in ("warnings", "neighbours"):  # the plans that are named beside the chosen one follow a newer rule
            continue
        if key == "confirmed":  # what a search measured again is called so by now
            assert now["remeasured"] == value
            continue
        if isinstance(value, dict):
            of_before(value, now[key])
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            assert len(value) == len(now[key]), key
            pairs = [value, now[key]]
            if key == "fp32":  # the largest one-group error first, by now
                pairs = [sorted(groups, key=lambda group: str(group["group"])) for groups in pairs]
            for one, other in zip(*pairs, strict=True):
                of_before(one, other)
        elif key not in ("why", "path"):  # the model lies elsewhere in a test
            # A saving is fitted by least squares and rounded: the last place is the processor's.
            last_place = 2e-6 if key == "saves_ms" else 0.0
            assert now[key] == (pytest.approx(value, rel=1e-12, abs=last_place) if isinstance(value, float) else value)


def resume(run: str, budget: int) -> Front:
    return mptune.search("model.onnx", data="data.npz", target=TARGET, out=Path(run), budget=budget)


@pytest.mark.parametrize(("run", "displaced"), [("precision", 0), ("local", 1)])
def test_the_front_is_the_same(place: Path, run: str, displaced: int) -> None:
    """But for a plan that another displaces since errors are compared sample by sample (``fronts.dominance``)."""
    before = written_by_0_1_0(run)
    front = mptune.report(run)
    now = front.to_json()
    points = {point["plan"]: point for point in before["points"]}
    assert len(now["points"]) == len(points) - displaced
    before["points"] = [points[point["plan"]] for point in now["points"]]
    if displaced:
        del before["hypervolume"]
    of_before(before, now)
    assert front.evaluations == 8


def test_the_front_of_a_confirmation_is_the_same(place: Path) -> None:
    (confirmed,) = (place / "precision" / "confirmed").iterdir()
    of_before(
        {k: v for k, v in written(confirmed).items() if k != "plans"},
        {**written(confirmed), **mptune.report(confirmed).to_json()},
    )


@pytest.mark.parametrize("run", ["precision", "local"])
def test_reading_writes_nothing(place: Path, run: str) -> None:
    content = {path: path.read_bytes() for path in (place / run).rglob("*") if path.is_file()}
    mptune.report(run)
    assert {path: path.read_bytes() for path in (place / run).rglob("*") if path.is_file()} == content


def test_the_same_search_again_measures_nothing(place: Path) -> None:
    before = written_by_0_1_0("precision")
    journal = Path("precision/study.journal").read_bytes()
    front = resume("precision", budget=8)
    of_before(before, front.to_json())
    assert Path("precision/study.journal").read_bytes() == journal
    assert Path("precision/run.json").read_bytes().count(b'"format": 2') == 1, "its model lies elsewhere now"


def test_a_larger_budget_goes_on_where_it_stopped(place: Path) -> None:
    before = mptune.report("precision")
    known = {point.plan.fingerprint for point in before.points}
    front = resume("precision", budget=14)
    assert front.evaluations == 14
    assert front.fp32 == before.fp32
    assert front.hypervolume > 0.99 * HYPERVOLUME_AT_14 > before.hypervolume
    file = read_run("precision")[1]
    assert (file.search.budget, file.fixed_settings.target, file.mptune) == (14, TARGET, "0.1.0")
    assert mptune.report("precision") == front
    assert known <= {point.plan.fingerprint for point in front.points}, "nothing dominates them on this model"


def test_a_run_of_a_sampler_that_was_removed_goes_on_with_another(place: Path) -> None:
    before = mptune.report("local")
    front = resume("local", budget=12)
    assert front.evaluations == 12
    assert front.fp32 == before.fp32
    assert front.hypervolume >= before.hypervolume


@pytest.mark.parametrize("run", ["precision", "local"])
def test_another_plan_can_be_picked(place: Path, run: str) -> None:
    before = written(run)
    other = next(p["plan"] for p in before["points"] if p["plan"] != before["chosen"])
    Path("model.onnx").unlink()
    front = mptune.pick(run, plan=other[:8])
    assert front.chosen is not None
    assert front.chosen.plan.fingerprint == other == written(run)["chosen"]
    assert json.loads(Path(run, "chosen/plan.json").read_text())["precision"] == {
        group: str(precision) for group, precision in front.chosen.plan.precision.items()
    }
    assert mptune.pick(run, knee=True).to_json()["chosen"] == KNEES.get(run, before["chosen"])


def test_a_confirmation_can_be_picked_of(place: Path) -> None:
    (confirmed,) = (place / "precision" / "confirmed").iterdir()
    before = written(confirmed)
    other = next(p["plan"] for p in before["points"] if p["plan"] != before["chosen"])
    mptune.pick(confirmed, plan=other)
    now = written(confirmed)
    assert now["chosen"] == other
    of_before({k: before[k] for k in ("points", "plans", "agreement", "search")}, now)


@pytest.mark.parametrize("run", ["precision", "local"])
def test_it_is_confirmed_on_another_device(place: Path, run: str) -> None:
    before = mptune.report(run)
    fake = FakeToolchain(Law([group.id for group in find_groups(load_model("model.onnx"))]))
    found = mptune.confirm(run, open_toolchain=fake.open)
    confirmed = {plan.searched.plan.fingerprint for plan in found.plans}
    assert {point.plan.fingerprint for point in (*before.points, before.fp32)} <= confirmed
    assert all(plan.measured is not None and plan.measured.confirmed for plan in found.plans)
    if run == "precision":
        (kept,) = (path for path in Path(run, "confirmed").iterdir() if "fake" not in path.name)
        assert {plan["plan"] for plan in written(kept)["plans"]} == confirmed


def test_an_old_confirmation_of_the_same_device_goes_on(place: Path) -> None:
    """Its run.json is of format 1, and what it must agree with was read from format 1, too."""
    (confirmed,) = (place / "precision" / "confirmed").iterdir()
    search, confirmation = read_run("precision")[1], read_run(confirmed)[1]
    assert (
        confirmation.fixed_settings.model_copy(
            update={"target": search.fixed_settings.target, "engine": search.fixed_settings.engine}
        )
        == search.fixed_settings
    )
    assert confirmation.search == search.search
