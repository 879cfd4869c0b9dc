"""The reference pages against the program: every code of a finding, every public name, every option is there."""

from __future__ import annotations

import inspect
import re

import pytest

import mptune
from mptune.data.metrics.table import METRICS
from mptune.finding import CODES
from mptune.settings import SearchSettings, declarations
from tests.docs.pages import read
from tests.test_docs import COMMANDS, options_of

FINDINGS = re.sub(r"\s+", " ", read("docs/reference/findings.md"))
COMMAND_LINE = read("docs/reference/command-line.md")


def test_each_code_of_a_finding_has_a_section_that_says_what_it_means_what_proves_it_and_what_to_do() -> None:
    titles = re.findall(r"^### ([a-z0-9-]+)$", read("docs/reference/findings.md"), re.MULTILINE)
    assert titles == list(CODES)
    for code, info in CODES.items():
        section = re.split(r"##|```", FINDINGS.partition(f"### {code} ")[2])[0]
        assert section.startswith(f"*{info.severity}*: {info.meaning}. - **Evidence:** ")
        assert section.count(" - **Fix:** ") == 1
        assert len(section.split()) <= 42, "40 words and two bullets"


def test_the_api_reference_has_every_public_name_with_its_docstring() -> None:
    page, public = read("docs/reference/api.md"), sorted(set(mptune.__all__) - {"__version__"})
    assert sorted(re.findall(r"^::: mptune\.(\w+)$", page, re.MULTILINE)) == public
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert sorted(rows) == public
    for name, words in rows.items():
        first = (inspect.getdoc(getattr(mptune, name)) or "").partition("\n")[0]
        assert words == first.rstrip(".").replace("``", "`"), name


@pytest.mark.parametrize("command", COMMANDS)
def test_the_section_of_a_command_has_every_option_and_says_what_its_help_says(command: str) -> None:
    """More may stand behind it."""
    section = COMMAND_LINE.partition(f"## mptune {command}\n")[2].partition("\n## ")[0]
    assert section, f"docs/reference/command-line.md has no section of mptune {command}"
    for option in options_of(command) - {"--help", "-h"}:
        assert re.search(rf"`{re.escape(option)}(?![\w-])", section), f"its section does not name {option}"
    for parameter in COMMANDS[command].params:
        is_metric = parameter.name == "metric" and command == "search"  # whose help lists the names
        text = declarations(SearchSettings)["metric"].help if is_metric else getattr(parameter, "help", None) or ""
        if "--help" not in parameter.opts:
            words = " ".join(text.split()).rstrip(".")
            assert f" | {words}" in section, f"the section of mptune {command} says otherwise of {parameter.name}"


def test_every_named_metric_is_on_the_page_of_metrics() -> None:
    text = read("docs/guide/metrics.md")
    assert [name for name in METRICS.keys() - {"non_finite"} if f"`{name}`" not in text] == []
