"""The choice of a plan is one record: what lies in ``chosen/`` is what every view names, whatever was asked for."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

import mptune
from mptune.cli import main
from mptune.graph.plan import PrecisionPlan
from mptune.rundir import read_run
from mptune.tuning.front import Front
from tests.fakes import make_toolchain, search

pytestmark = pytest.mark.usefixtures("opened_here")

RUN = Path("model.mptune")
IMPOSSIBLE = {"max_latency_ms": 1e-3, "max_error": 1e-9}


@pytest.fixture(autouse=True)
def here(place: Path) -> None:
    """A model and its data, as the working directory."""


def written(run: Path = RUN) -> str:
    """The plan that lies in ``chosen/``."""
    return PrecisionPlan.from_json((run / "chosen" / "plan.json").read_text()).fingerprint


def named(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """View -> the plan that it names as chosen."""
    views = {"front.json": json.loads((run / "front.json").read_text())["chosen"]}
    page = json.loads(
        re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', (run / "report.html").read_text())[1]
    )
    views["page"] = page["plans"][page["chosen"]][page["plan_fields"].index("plan")]
    views["README.txt"] = re.search(r"^plan +([0-9a-f]{12})", (run / "chosen" / "README.txt").read_text(), re.M)[1]
    capsys.readouterr()
    for width in ("80", "130"):
        monkeypatch.setenv("COLUMNS", width)
        main(["report", str(run)])
        text = capsys.readouterr().out
        views[f"terminal, {width} columns"] = re.search(r"^chosen +([0-9a-f]{12}):", text, re.M)[1]
        views[f"table, {width} columns"] = re.search(r"^> +([0-9a-f]{12}) ", text, re.M)[1]
    main(["report", str(run), "--json"])
    views["--json"] = json.loads(capsys.readouterr().out)["chosen"]
    main(["report", str(run), "--csv"])
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    (views["--csv"],) = (row["plan"] for row in rows if row["chosen"] == "True")
    front = mptune.open_run(run).front
    views["Python"] = front.chosen.plan.fingerprint
    views["repr"] = re.search(r"chosen: ([0-9a-f]{12})", repr(front))[1]
    return views


@pytest.fixture
def agree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Asserts that all views of a run name what lies in its ``chosen/``; gives it."""

    def check(run: Path = RUN) -> str:
        views = named(run, capsys, monkeypatch)
        assert set(views.values()) == {written(run)}, views
        return written(run)

    return check


def test_limits_that_nothing_meets_leave_the_choice(searched: Front, agree, capsys: pytest.CaptureFixture[str]) -> None:
    assert mptune.pick(RUN, knee=True).limits_met
    knee = agree()
    model = (RUN / "chosen" / "model.onnx").read_bytes()
    assert main(["pick", str(RUN), "--max-latency-ms", "0.001", "--max-error", "1e-9"]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert agree() == knee
    fp32 = searched.fp32.plan.fingerprint
    assert last.startswith("limits not met: no plan has error <= 1e-09 and latency <= 0.001 ms; the nearest is " + fp32)
    assert last.endswith(f"chosen/ still holds {knee}")
    assert (RUN / "chosen" / "model.onnx").read_bytes() == model
    choice = json.loads((RUN / "front.json").read_text())["choice"]
    assert (choice["reason"], choice["limits_met"], choice["nearest"]) == ("knee", False, fp32)
    assert mptune.pick(RUN, knee=True).limits_met
    assert agree() == knee


def test_a_search_with_limits_that_nothing_meets_leaves_the_choice(searched: Front, agree) -> None:
    knee = searched.chosen.plan.fingerprint
    front = search(make_toolchain(), budget=20, **IMPOSSIBLE)
    assert not front.limits_met
    assert front.unmet.endswith(f"chosen/ still holds {knee}")
    assert agree() == front.chosen.plan.fingerprint == knee
    again = search(make_toolchain(), budget=20, **IMPOSSIBLE)
    assert again == front == mptune.report(RUN), "asked again, they are unmet again"
    assert search(make_toolchain(), budget=20).limits_met, "nothing is asked for: the knee stands"
    agree()


def test_only_a_first_search_writes_the_nearest_plan(agree) -> None:
    front = search(make_toolchain(), **IMPOSSIBLE)
    assert not front.limits_met
    assert front.choice.nearest == agree() == front.fp32.plan.fingerprint
    assert front.unmet.endswith("; chosen/ holds it")
    assert search(make_toolchain(), **IMPOSSIBLE) == front
    met = search(make_toolchain(), max_error=1e-2)
    assert met.limits_met
    assert agree() == met.chosen.plan.fingerprint
    assert met.choice.replaced == front.fp32.plan.fingerprint
    assert f"it replaces {met.choice.replaced}" in met.chosen_reason


@pytest.mark.parametrize("limits", [{}, {"max_error": 1e-2}], ids=["no limits", "limits"])
@pytest.mark.usefixtures("spends_budget")
def test_a_pick_by_id_outlives_further_searches(agree, limits: dict[str, float]) -> None:
    front = search(make_toolchain(), **limits)
    other = next(p.plan.fingerprint for p in reversed(front.points) if p != front.chosen and p != front.fp32)
    held_out = mptune.pick(RUN, plan=other[:6]).chosen.held_out
    assert agree() == other
    for budget in (16, 20):
        before, front = front, search(make_toolchain(), budget=budget, **limits)
        assert front.evaluations > before.evaluations
        assert agree() == front.chosen.plan.fingerprint == other
        assert (front.choice.kind, front.choice.replaced) == ("plan", None)
        assert front.chosen.held_out == held_out, "also where it is off the front now"
    met = search(make_toolchain(), budget=20, max_error=1e-3)
    assert met.choice.kind == "limits"
    assert met.choice.replaced == other != agree()


@pytest.mark.smoke
def test_a_kind_of_choice_is_applied_again(agree) -> None:
    first = search(make_toolchain(), budget=4)
    picked = mptune.pick(RUN, max_error=1e-3).chosen
    assert picked != first.chosen
    before = agree()
    front = search(make_toolchain(), budget=20)
    assert front.choice.max_error == 1e-3
    within = [p for p in front.points if p.judged_error <= 1e-3]
    assert front.chosen == min(within, key=lambda p: p.latency.median_ms)
    assert agree() != before, "a faster one was found"
    assert front.chosen_reason == f"the fastest with error <= 0.001; it replaces {before}, which was chosen before"
    assert search(make_toolchain(), budget=20) == front, "said until it is chosen anew"
    assert mptune.pick(RUN, knee=True).choice.replaced is None
    knee = search(make_toolchain(), budget=24)
    assert knee.choice.kind in ("knee", "fastest")
    agree()


def test_a_plan_that_is_no_longer_sound_gives_way(agree) -> None:
    front = search(make_toolchain(), budget=4)
    other = next(p for p in front.points if p not in (front.fp32, front.chosen))
    mptune.pick(RUN, plan=other.plan.fingerprint)
    directory, file = read_run(RUN)
    directory.save(file.model_copy(update={"choice": file.choice.model_copy(update={"plan": "0" * 12})}))
    again = search(make_toolchain(), budget=8)
    assert again.choice.replaced == other.plan.fingerprint
    assert agree() == again.chosen.plan.fingerprint


def test_an_interrupted_search_names_what_lies_in_chosen(agree, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(make_toolchain(interrupt_after=6))
    assert mptune.report(RUN).chosen is None
    assert main(["report", str(RUN)]) == 0
    assert "chosen     none: nothing is in chosen/ yet; as the search stands it would be " in capsys.readouterr().out
    search(make_toolchain(), budget=6)
    before = agree()
    with pytest.raises(KeyboardInterrupt):
        search(make_toolchain(interrupt_after=4), budget=40, max_error=1e-6)
    front = mptune.report(RUN)
    assert front.evaluations > 6
    assert front.chosen.plan.fingerprint == before == written()


def test_a_confirmation_keeps_its_pick(searched: Front, agree) -> None:
    confirmed = mptune.confirm(RUN, open_toolchain=make_toolchain().open).front
    assert confirmed.chosen.plan == searched.chosen.plan
    device = confirmed.run_dir
    other = next(p.plan.fingerprint for p in confirmed.points if p.plan != confirmed.chosen.plan)
    mptune.pick(device, plan=other)
    again = mptune.confirm(RUN, open_toolchain=make_toolchain().open).front
    assert agree(device) == again.chosen.plan.fingerprint == other
    (output,) = searched.fp32.counted.per_output
    limited = mptune.confirm(RUN, open_toolchain=make_toolchain().open, tolerance=[f"{output}=1e-3"]).front
    assert limited.choice.kind == "limits"
    agree(device)
