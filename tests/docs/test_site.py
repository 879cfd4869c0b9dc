"""The website: builds without a warning and without a network, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs: pip install '.[docs]'")

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}


class Loads(HTMLParser):
    """What a page makes a browser load: scripts, styles, images, fonts."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and {*given.get("rel", "").split()} & {"stylesheet", "icon", "preload", "modulepreload"}:
            self.targets.append(given.get("href", ""))
        elif tag in LOADS:
            self.targets.append(given.get(LOADS[tag], ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; ``MPTUNE_SITE`` names one that is there already, as in ``.ci/run``."""
    if os.environ.get("MPTUNE_SITE"):
        return Path(os.environ["MPTUNE_SITE"])
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return place


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.targets, page
        for target in loads.targets:
            assert "//" not in target.partition("?")[0].removeprefix("data:"), f"{page.name} loads {target}"
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8").replace('"', "").replace("'", "")


def test_the_api_reference_has_the_docstrings(site: Path) -> None:
    text = (site / "reference/api/index.html").read_text(encoding="utf-8")
    assert all(words in text for words in ("mptune.search", "Raises"))
