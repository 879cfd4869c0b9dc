"""The page in a browser: what a person does with it, without a request, at every width, in both colour schemes.

Needs Chromium with its driver (Debian: ``chromium chromium-driver``) and the extra ``test-browser``.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import NEXT_FRAME, missing, open_browser, show
from mptune.choice import Choice, ChoiceLimits
from mptune.engines.environment import Environment
from mptune.reporting.page import PageContent, write_report
from mptune.tuning.choosing import choose
from mptune.tuning.confirmation import Confirmation
from tests.reporting.conftest import Bench, make_error
from tests.reporting.page.rich import FORGED, HOSTILE, rich_content

webdriver = pytest.importorskip("selenium.webdriver", reason="needs the extra test-browser")

AXE_LOOKS = ((1280, "light"), (390, "dark"))
"""An axe-core run takes seconds: one for each layout and each scheme."""
CHART = ".chart svg"
OVERLAPS = """
const box = (node) => node.getBoundingClientRect();
const shared = (a, b, low, high) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]);
const overlap = (a, b) => shared(a, b, "left", "right") > 1 && shared(a, b, "top", "bottom") > 3;
return [...document.querySelectorAll(".chart svg, .strip svg, .map svg, .plots svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")];
  const others = [...texts, ...svg.querySelectorAll("circle.front, circle.chosen, circle.baseline, .grip")];
  return texts.flatMap((text, k) => others.slice(k + 1).filter((other) => overlap(box(text), box(other)))
    .map((other) => [text.textContent, other.textContent || other.getAttribute("class")]));
});
"""
"""Texts of a drawing that lie on another text, on a point or on a handle."""


class Browser:
    """One Chromium for all tests of this file."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def ask(self, command: str, **parameters: object) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)

    def show(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        self.logs()
        show(self.driver, page, width, scheme)
        assert self.run("return document.querySelectorAll('main section').length") > 4, self.logs()

    def logs(self) -> tuple[list[str], list[str]]:
        """What the console says, and the addresses of all requests, since this was asked last."""
        console = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        own = "data:", "chrome:", "chrome-untrusted:"  # Chromium's
        return console, [url for url in sent if not url.startswith(own)]

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def type_into(self, selector: str, text: str) -> None:
        field = self.driver.find_element("css selector", selector)
        field.clear()
        field.send_keys(text)

    def mouse(self, *steps: tuple[str, float, float]) -> None:
        for kind, x, y in steps:
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        self.driver.execute_async_script(NEXT_FRAME)  # until everything is drawn

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view, in pixels of the window."""
        script = """const node = document.querySelector(arguments[0]);
            node.scrollIntoView({block: 'center'});
            const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]"""
        x, y = self.run(script, selector)
        return float(x), float(y)

    def unfold(self, selector: str = "details") -> None:
        """Open what is folded, and wait until it is there."""
        opens = "for (const box of document.querySelectorAll(arguments[0])) box.open = true;"
        self.driver.execute_async_script(f"{opens} setTimeout(arguments[1], 30)", selector)

    def selected(self) -> str:
        return self.text("#selected h3 code")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if missing():
        pytest.skip(missing())
    with open_browser(tmp_path_factory.mktemp("browser")) as driver:
        yield Browser(driver)


@pytest.fixture
def content(bench: Bench, tmp_path: Path, environment: Environment) -> PageContent:
    return rich_content(bench, tmp_path, environment)


@pytest.fixture
def page(content: PageContent, tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    write_report(content, path)
    return path


def test_nothing_is_fetched_and_names_stay_text(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.unfold()
    browser.unfold()
    assert browser.logs() == ([], [page.as_uri()])
    assert browser.run("return [window.forged, document.images.length, document.scripts.length]") == [None, 0, 2]
    assert browser.run("return document.querySelector('h1').textContent") == "m<i>.onnx"
    shown = browser.text("main")
    assert all(text in shown for text in (FORGED, "\\x1b[31m\U0001f600"))
    assert not any(text in shown for text in ("\x1b", HOSTILE, "`"))
    assert "mptune confirm RUN" in browser.run("return [...document.querySelectorAll('code')].map(c => c.textContent)")
    assert browser.run("return [...document.querySelectorAll('section')].map(s => s.id)")[:2] == ["decide", "breaks"]
    assert "wrong already, and no plan repairs that" in browser.text("#decide")


def test_a_typed_limit_changes_selection_and_command(browser: Browser, page: Path, content: PageContent) -> None:
    browser.show(page)
    front = content.front
    assert browser.selected() == front.chosen.plan.fingerprint  # type: ignore[union-attr]
    browser.type_into("#limit-error", "5e-4")
    wanted = front.best(max_error=5e-4)
    assert browser.selected() == wanted.plan.fingerprint
    run = front.run_dir.name.replace("'", "'\"'\"'")
    assert browser.text("#pick") == f"mptune pick '{run}' --plan {wanted.plan.fingerprint}"
    browser.type_into("#limit-ms", "1,3")
    assert "No point of the front has error <= 0.0005 and latency <= 1.3 ms" in browser.text("#selected")
    browser.type_into("#limit-error", "")
    browser.run("document.querySelector('#limit-error').dispatchEvent(new Event('input'))")
    assert browser.selected() == front.best(max_latency_ms=1.3).plan.fingerprint
    browser.driver.find_element("css selector", ".quiet-button").click()
    assert browser.selected() == front.chosen.plan.fingerprint  # type: ignore[union-attr]
    assert browser.logs()[0] == []


def test_a_limit_may_be_a_share_and_an_error_leaves_nothing_to_copy(browser: Browser, page: Path) -> None:
    browser.show(page)
    copy = browser.driver.find_element("css selector", "#copy")
    browser.type_into("#limit-error", "0.7%")
    for field, text in (("#limit-error", "abc"), ("#limit-ms", "1%")):
        browser.type_into(field, text)
        box = browser.driver.find_element("css selector", field)
        assert (box.get_attribute("value"), box.get_attribute("aria-invalid")) == (text, "true")
        assert browser.text("#pick") == ""
        assert not copy.is_displayed()
        assert "a number above 0, e.g. " in browser.text("#selected")
        browser.driver.find_element("css selector", ".quiet-button").click()
        assert box.get_attribute("aria-invalid") == "false"
        assert copy.is_displayed()
    assert browser.logs()[0] == []


def test_limits_select_what_pick_takes(browser: Browser, page: Path, content: PageContent) -> None:
    browser.show(page)
    type_both = (
        "for (const [id, text] of Object.entries(arguments[0])) { const field = document.getElementById(id);"
        "field.value = text; field.dispatchEvent(new Event('input')); }"
        "const one = (selector) => document.querySelector('#selected' + selector);"
        "return [one(' h3 code').textContent, one(' > .bad').hidden]"
    )
    both = itertools.product((None, 1e-9, 3e-4, 1e-3, 1.0), (None, 0.1, 0.9, 1.3, 5.0))
    for max_error, max_ms in list(both)[1:]:
        asked = Choice(max_error=max_error, max_latency_ms=max_ms)
        choice = choose(content.front.points, asked, ("relative_l2",))
        texts = {"limit-error": str(max_error or ""), "limit-ms": str(max_ms or "")}
        assert browser.run(type_both, texts) == [choice.chosen, choice.unmet is None], texts


def test_a_click_changes_table_strip_and_histogram(browser: Browser, page: Path, content: PageContent) -> None:
    browser.show(page)
    browser.unfold("#points")

    def look() -> list[str]:
        rows = "return [...document.querySelectorAll('#points tr.is-selected')].map(r => r.dataset.plan).join()"
        cells = browser.run("return document.querySelector('.strip .fp16:not(.pinned)').getAttribute('d')")
        bars = browser.run("return document.querySelector('.histogram.plan').getAttribute('d')")
        return [browser.run(rows), cells, bars, browser.text("#reasons"), browser.text("#pick")]

    before = look()
    x, y = browser.place(f"{CHART} circle.front")
    browser.mouse(("mousePressed", x, y), ("mouseReleased", x, y))
    after = look()
    fingerprints = {point.plan.fingerprint for point in content.front.points}
    assert after[0] in fingerprints
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert after[4].endswith(f"--plan {after[0]}")


def test_keys_and_taps_select_points(browser: Browser, page: Path, content: PageContent) -> None:
    browser.show(page, 390)
    fastest = content.front.points[0].plan.fingerprint
    chart = browser.driver.find_element("css selector", ".chart")
    chart.send_keys(webdriver.Keys.HOME)
    assert browser.selected() == fastest
    assert fastest in chart.get_attribute("aria-valuetext")
    chart.send_keys(webdriver.Keys.ARROW_RIGHT)
    assert browser.selected() == content.front.points[1].plan.fingerprint
    strip = browser.driver.find_element("css selector", ".strip")
    strip.send_keys(webdriver.Keys.END)
    assert content.groups[-1].id in browser.text(".about")
    x, y = browser.place(f"{CHART} circle.chosen")
    browser.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x + 6, "y": y + 6}])
    browser.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert browser.selected() == content.front.chosen.plan.fingerprint  # type: ignore[union-attr]


def test_handles_of_the_limits_can_be_dragged(browser: Browser, page: Path) -> None:
    browser.show(page)
    x, y = browser.place(".error-handle .grip")
    browser.mouse(("mousePressed", x, y), ("mouseMoved", x, y + 120), ("mouseReleased", x, y + 120))
    typed = "return document.querySelector('#limit-error').value"
    assert 0 < float(browser.run(typed)) < 2e-2
    x, y = browser.place(".ms-handle .grip")
    browser.mouse(("mousePressed", x, y), ("mouseMoved", x - 200, y), ("mouseReleased", x - 200, y))
    assert 0 < float(browser.run("return document.querySelector('#limit-ms').value")) < 2.0
    x, y = browser.place(".error-handle .grip")
    browser.mouse(("mousePressed", x, y), ("mouseMoved", x, y - 400), ("mouseReleased", x, y - 400))
    assert browser.run(typed) == "", "at its end there is no limit"


def test_the_table_sorts(browser: Browser, page: Path) -> None:
    browser.show(page)
    browser.unfold("#points")
    browser.run("document.querySelector('#every-plan').click()")
    column = "return [...document.querySelectorAll('#points tbody td:first-child')].map(c => parseFloat(c.textContent))"
    assert browser.run(column) == sorted(browser.run(column))
    button = browser.driver.find_element("css selector", "#points thead button")
    browser.run("arguments[0].click()", button)
    assert browser.run(column) == sorted(browser.run(column), reverse=True)
    assert browser.run("return document.querySelector('#points th').getAttribute('aria-sort')") == "descending"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_overflows_and_axe_finds_nothing_serious(browser: Browser, page: Path, scheme: str) -> None:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("needs axe-playwright-python, of the extra test-browser")
    axe = (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    for width in (390, 768, 1280):
        browser.show(page, width, scheme)
        browser.unfold()
        assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.run("document.querySelector('.chart').scrollIntoView()")
        assert browser.run(OVERLAPS) == []
        if (width, scheme) not in AXE_LOOKS:
            continue
        browser.run(axe)
        result = browser.driver.execute_async_script("axe.run({resultTypes: ['violations']}).then(arguments[0])")
        serious = [v for v in result["violations"] if v["impact"] in ("serious", "critical")]
        assert [(v["id"], v["help"], v["nodes"][0]["html"][:200]) for v in serious] == []
        assert len(result["passes"]) > 15


def test_other_pages_draw(browser, bench, content: PageContent, confirmation: Confirmation, tmp_path: Path) -> None:
    front: Any = content.front
    nothing = replace(front, chosen=None, points=(), fp16=None, choice=Choice(unmet=ChoiceLimits(max_error=1e-9)))
    only = replace(front, points=(front.fp32,), chosen=front.fp32, fp16=None)
    latency = replace(front.chosen.latency, median_ms=0.99 * front.chosen.latency.median_ms)
    near = replace(front.fp16, latency=latency, error=front.chosen.error)
    points = tuple(near if point.plan == near.plan else point for point in front.points)
    pages = {
        "nothing chosen": PageContent(nothing, (), bench.groups),
        "one point": PageContent(only, (), bench.groups),
        "no groups": PageContent(front, (), ()),
        "a plan within noise": replace(content, front=replace(front, fp16=near, points=points)),
        "a confirmation": PageContent(confirmation.front, (), bench.groups, confirmation=confirmation),
    }
    for name, one in pages.items():
        path = tmp_path / "page.html"
        write_report(one, path)
        browser.show(path)
        assert browser.logs()[0] == [], name
        assert ("the same latency within noise" in browser.text("main")) == (name == "a plan within noise"), name
    assert "the predicted ranking held" in browser.text("#confirmation")
    assert len(browser.ask("Page.printToPDF")["data"]) > 10_000


@pytest.mark.parametrize(("low", "high"), [(5.1e-3, 6e-3), (2.2e-3, 4.6e-3), (1.5e-4, 5e-3)])
def test_the_error_axis_has_two_ticks_and_the_panel_one_error(
    browser: Browser, bench: Bench, tmp_path: Path, low: float, high: float
) -> None:
    front, _ = bench.front(tmp_path)
    both = replace(bench.evaluation(2, 1.2, 4 * low), held_out=make_error(low))
    front = replace(front, points=(bench.evaluation(3, 1.0, high), both), fp16=None, chosen=both)
    write_report(PageContent(front, (), bench.groups), tmp_path / "page.html")
    browser.show(tmp_path / "page.html")
    assert browser.run("return document.querySelectorAll('.chart .tick[text-anchor=end]').length") >= 3, (
        "exact, and two"
    )
    facts = browser.text("#selected .figures")
    assert f"{low:.1e}" in facts
    assert "samples" not in facts


def test_far_and_nearly_exact_points_do_not_squeeze_the_others(browser: Browser, bench: Bench, tmp_path: Path) -> None:
    front, evaluations = bench.front(tmp_path)
    exact = replace(front.fp32, error=make_error(1.2e-7))
    far = bench.evaluation(5, 90.0, 4.0, number=77)
    points = tuple(exact if point.plan == front.fp32.plan else point for point in front.points)
    content = PageContent(replace(front, fp32=exact, points=points), (*evaluations[1:], far), bench.groups)
    write_report(content, tmp_path / "page.html")
    browser.show(tmp_path / "page.html")
    places = browser.run(
        "return [...document.querySelectorAll('.chart circle.front, .chart circle.chosen')]"
        ".map(c => [Number(c.getAttribute('cx')), Number(c.getAttribute('cy'))])"
    )
    box = browser.run("const s = document.querySelector('.chart svg'); return [s.clientWidth, s.clientHeight]")
    for values, length in zip(zip(*places, strict=True), box, strict=True):
        assert max(values) - min(values) > 0.6 * length
    ticks = browser.run("return [...document.querySelectorAll('.chart .tick')].map(t => t.textContent)")
    assert {"exact", "far"} <= set(ticks)
    assert browser.run("return document.querySelectorAll('.chart path.faint').length") == 1
    legend = browser.text(".chart-box .legend")
    assert all(mark in legend for mark in ("other plans", "beyond the edge", "drag to set a limit")), legend
