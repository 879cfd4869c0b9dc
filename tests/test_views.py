"""One run in every view: one choice, which is one record, one pair of neighbours, one list of reasons in one order.

What is shown is compared, as a person reads it: the terminal's lines, the page as a browser draws it, the files.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import mptune
from benchmarks.browser import missing, open_browser, show
from mptune.cli import main
from mptune.graph.plan import PrecisionPlan
from mptune.reporting.terminal.front import print_explanation, print_front
from mptune.rundir import read_run
from mptune.settings import LatencySettings
from mptune.tuning.front import Front
from tests.conftest import save_mlp
from tests.fakes import Diary, make_toolchain, search
from tests.reporting.conftest import Terminal
from tests.zoo.detector import LAYOUTS, detector, images

pytestmark = pytest.mark.usefixtures("opened_here")


@dataclass
class View:
    """What a view says of a run."""

    chosen: str  # id of the plan
    beside: dict[str, str]  # role -> id and what the plan gives instead
    reasons: list[str] | None = None  # of its FP32 groups, perhaps the first of them; in front.json without figures
    counts: str | None = None  # the same by reason
    breaks: list[str] | None = None  # what breaks in FP16, code by code
    labels: set[str] | None = None  # of the page's picture


@pytest.fixture(scope="module", params=("digits", "detector", "measured"))
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "digits":
        folder: Path = request.getfixturevalue("digits_run")
        return folder / "digits_vit.mptune"
    folder = tmp_path_factory.mktemp(request.param)
    given: dict[str, Any] = {"out": folder / "run", "confirm_rounds": 1}
    if request.param == "detector":
        onnx.save(detector(LAYOUTS[0]), folder / "detector.onnx")
        given |= {"data": {"image": images(16)}, "target": "jetson-orin-nano-8gb", "budget": 12}
        points = mptune.search(folder / "detector.onnx", **given).points
        plan = points[len(points) // 2].plan  # between two neighbours
    else:
        path, x = save_mlp(folder / "mlp.onnx"), np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)
        given |= {"data": x, "target": "cpu", "budget": 3, "latency": LatencySettings(warmup_ms=1.0, duration_ms=2.0)}
        plan = mptune.search(path, **given).fp16.plan  # off the front: FP16 is slower on a CPU
    mptune.pick(folder / "run", plan=plan.fingerprint)
    return folder / "run"


def words(text: str) -> str:
    """A paragraph on one line."""
    return " ".join(text.split())


def of_json(run_dir: Path) -> View:
    front = json.loads((run_dir / "front.json").read_text())
    shown = (*front["points"], *front["baseline"].values())
    chosen = next(point for point in shown if point["plan"] == front["chosen"])
    kept = [] if chosen["plan"] == front["baseline"]["fp32"]["plan"] else chosen["fp32"]
    reasons = [f"{group['group']}: {group['finding'] or group['reason']}" for group in kept]
    counts = Counter(reason.partition(": ")[2] for reason in reasons)
    beside = {
        "faster" if each["latency_ms_delta"] < 0 else "more exact": each["plan"]
        for each in front["choice"]["neighbours"]
    }
    codes = [finding["code"] for finding in front["findings"]]
    return View(front["chosen"], beside, reasons, ", ".join(f"{n} {word}" for word, n in counts.items()), codes)


def of_csv(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> View:
    assert main(["report", str(run_dir), "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    (chosen,) = [row for row in rows if row["chosen"] == "True"]
    beside = {row["neighbour"]: row["plan"] for row in rows if row["neighbour"]}
    return View(chosen["plan"], beside, counts=chosen["fp32_because"])


def of_readme(run_dir: Path) -> View:
    text = (run_dir / "chosen" / "README.txt").read_text()
    (chosen,) = re.findall(r"^plan +(\w+)", text, re.MULTILINE)
    kept = text.partition("Kept in FP32 because\n")[2].partition("\n\n")[0].splitlines()[1:]
    reasons = [line.removeprefix("  - ") for line in kept if re.match(r"  - g\d+ ", line)]
    section = text.partition("What was found\n")[2].partition("\n\n")[0]
    return View(
        chosen, dict(BESIDE.findall(text)), reasons, breaks=re.findall(r"^  - \w+: ([\w-]+):", section, re.MULTILINE)
    )


BESIDE = re.compile(r"^(faster|more exact) +(\w{12}: .*)$", re.MULTILINE)


def of_terminal(run_dir: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> View:
    """The lines of a terminal so wide; what it wraps is indented, and is put together again."""
    for name, value in (("COLUMNS", columns), ("LINES", 60), ("TERM", "xterm")):
        monkeypatch.setenv(name, str(value))
    stream = Terminal()
    front = mptune.report(run_dir)
    print_explanation(front, stream)
    print_front(front, stream)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= columns
    whole: list[str] = []
    for line in lines:
        if re.match(r" {3,}\S", line) and whole and re.match(r"(faster|more exact|chosen) ", whole[-1]):
            whole[-1] += " " + line.strip()
        else:
            whole.append(line)
    text = "\n".join(whole)
    (chosen,) = re.findall(r"^chosen +(\w+):", text, re.MULTILINE)
    (row,) = re.findall(r"^>  (\w+) (.*)$", text, re.MULTILINE)
    assert row[0] == chosen
    block = text.partition(": kept in FP32 because\n")[2].partition("\n\n")[0]
    listed = words(block)
    reasons = re.split(r" (?=g\d{3} )", listed) if listed else []
    cells = re.split(r" {2,}", row[1].strip())
    counts = next((cell for cell in cells if re.match(r"\d+ [a-zC]", cell)), None)
    breaks = re.findall(r"^  (?:warning|info): ([a-z-]+) \(g\d+", text, re.MULTILINE)
    return View(chosen, dict(BESIDE.findall(text)), reasons, counts, breaks)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("selenium.webdriver", reason="needs the extra test-browser")
    if lacking := missing():
        pytest.skip(lacking)
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def of_page(run_dir: Path, driver: Any) -> View:
    """The page as Chromium draws it, with the chosen plan selected and everything unfolded."""
    show(driver, run_dir / "report.html")

    def texts(selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return [words(text) for text in driver.execute_script(script, selector)]

    driver.execute_async_script(
        "document.querySelectorAll('details').forEach((box) => (box.open = true)); setTimeout(arguments[0], 0)"
    )
    (chosen,) = texts("#decide tr.is-chosen th code")
    assert texts(".selected-body h3 code") == [chosen]
    beside = {}
    for row in driver.find_elements("css selector", "#decide tbody tr[data-plan]"):
        cells = [words(row.find_element("css selector", part).text) for part in ("button", "code", "td:last-child")]
        beside |= {role: f"{cells[1]}: {cells[2]}" for role in cells[0].split(", ") if role in ("faster", "more exact")}
    labels = {role for text in texts(".chart text.label") for role in text.split(", ")}
    (counts,) = texts(f"#points tr[data-plan='{chosen}'] td.because")
    return View(chosen, beside, texts("#reasons li"), counts, texts("#breaks .finding-head code"), labels)


def test_every_view_says_the_same(
    run_dir: Path, browser: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document, page, readme = of_json(run_dir), of_page(run_dir, browser), of_readme(run_dir)
    if not run_dir.parent.name.startswith("measured"):  # the predicted runs show all that is compared
        assert set(document.beside) == {"faster", "more exact"}
        assert len(document.reasons or ()) > 2
        assert document.breaks
    narrow, wide = (of_terminal(run_dir, monkeypatch, columns) for columns in (80, 130))
    table = of_csv(run_dir, capsys)
    assert {view.chosen for view in (page, readme, narrow, wide, table)} == {document.chosen}
    assert PrecisionPlan.from_json((run_dir / "chosen" / "plan.json").read_text()).fingerprint == document.chosen
    assert page.beside == readme.beside == narrow.beside == wide.beside
    assert table.beside == document.beside == {role: text.partition(":")[0] for role, text in page.beside.items()}
    assert page.reasons is not None
    assert [re.sub(r"^(g\d+) .*?: ([\w-]+)\b.*", r"\1: \2", line) for line in page.reasons] == document.reasons
    for view in (readme, narrow, wide):
        assert view.reasons is not None
        assert view.reasons == page.reasons[: len(view.reasons)]
        assert bool(view.reasons) == bool(document.reasons)
    assert wide.counts or not document.reasons
    assert {view.counts or "" for view in (page, table, wide)} == {document.counts}
    codes = list(dict.fromkeys(wide.breaks or ()))
    for view in (page, readme, narrow):
        assert [code for code in dict.fromkeys(view.breaks or ()) if code in codes] == codes
    assert page.labels is not None
    assert page.labels >= {"chosen", *page.beside}


RUN = Path("model.mptune")
IMPOSSIBLE = {"max_latency_ms": 1e-3, "max_error": 1e-9}


def written(run: Path = RUN) -> str:
    """The plan that lies in ``chosen/``."""
    return PrecisionPlan.from_json((run / "chosen" / "plan.json").read_text()).fingerprint


def named(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """View -> the plan that it names as chosen; tests/test_views.py compares what else they show."""
    page = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', (run / "report.html").read_text())
    document = json.loads(page[1])
    front = mptune.open_run(run).front
    views = {f"terminal, {width} columns": of_terminal(run, monkeypatch, width).chosen for width in (80, 130)}
    capsys.readouterr()
    main(["report", str(run), "--json"])
    return views | {
        "front.json": json.loads((run / "front.json").read_text())["chosen"],
        "page": document["plans"][document["chosen"]][document["plan_fields"].index("plan")],
        "README.txt": of_readme(run).chosen,
        "--json": json.loads(capsys.readouterr().out)["chosen"],
        "--csv": of_csv(run, capsys).chosen,
        "Python": front.chosen.plan.fingerprint,
        "repr": re.search(r"chosen: ([0-9a-f]{12})", repr(front))[1],
    }


@pytest.fixture
def agree(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """In a working directory with a model: asserts that all views of a run name what lies in its ``chosen/``."""

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
    assert main(["report", str(RUN), "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["points"]
    assert "no plan has error <= 1e-09 and latency <= 0.001 ms" in err
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
    diary = Diary()
    front = search(make_toolchain(), budget=20, listener=diary)
    assert front.choice.max_error == 1e-3
    within = [p for p in front.points if p.judged_error <= 1e-3]
    assert front.chosen == min(within, key=lambda p: p.latency.median_ms)
    assert agree() != before, "a faster one was found"
    assert front.chosen_reason == "the fastest with error <= 0.001"
    replaces = f"{front.chosen.plan.fingerprint} replaces {before}, which was chosen before"
    assert replaces in diary.warnings
    assert search(make_toolchain(), budget=None, listener=(later := Diary())) == front, "the run's budget"
    assert replaces not in later.warnings, "said once"
    assert (front.choice.replaced, front.evaluations) == (before, 20)
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
