"""The page as a file: well formed, self-contained, escaped, written whole."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mptune.choice import Choice
from mptune.errors import RunError
from mptune.graph.groups import LayerGroup
from mptune.reporting.page import PageContent, embedded_json, render, write_report
from mptune.tuning.front import Front
from tests.reporting.conftest import Bench, Evaluations
from tests.reporting.page.reading import data_of

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Balance(HTMLParser):
    """Fails on tags that do not match, and on what fetches or runs anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            assert name != "src", f"{tag} fetches {value}"
            assert name != "href" or value == "data:,", f"{tag} fetches {value}"
            assert not name.startswith("on"), f"{tag} runs {value}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained(content: PageContent) -> None:
    page = render(content)
    balance = Balance()
    balance.feed(page)
    assert (balance.open, balance.tags.count("script")) == ([], 2)
    assert not set(balance.tags) & {"img", "iframe", "object", "a"}
    outside = page.replace("http://www.w3.org/2000/svg", "")  # a namespace, which nobody fetches
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", outside)
    assert "prefers-color-scheme: dark" in page


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(content: PageContent) -> None:
    page = render(content)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    ((_, style), (_, script)) = re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}'"


def test_what_comes_from_outside_is_escaped(front: Front, evaluations: Evaluations) -> None:
    nasty = "</script><script>alert(1)</script><!--$title"
    choice, names = Choice(tolerance=(nasty,), kind="limits"), dict.fromkeys(("target", "engine", "device"), nasty)
    front = replace(front, model_path=Path("m<b>.onnx"), warnings=(nasty,), choice=choice, **names)
    groups = tuple(LayerGroup(g, nasty, nasty, (nasty,), {nasty: 1}, nasty) for g in front.chosen.plan.precision)
    page = render(PageContent(front, evaluations, groups))
    assert [page.count(text) for text in ("<script", "</script>", "<!--")] == [2, 2, 0]
    assert "m&lt;b&gt;.onnx" in page
    assert "<li>&lt;/script&gt;&lt;script&gt;alert(1)" in page
    document = data_of(page)
    assert document["groups"][0]["name"] == document["target"] == nasty


def test_a_page_that_cannot_be_written(front: Front, bench: Bench, run_dir: Path) -> None:
    with pytest.raises(RunError, match="cannot write"):
        write_report(PageContent(front, (), bench.groups), run_dir / "nowhere" / "report.html")


def test_json_that_stands_in_a_script_element() -> None:
    text = embedded_json({"a": "</script>&<!--", "b": [1.5, None]})
    assert not set(text) & set("<>&")
    with pytest.raises(ValueError, match="JSON compliant"):
        embedded_json({"a": float("nan")})
