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


def test_every_code_of_a_finding_has_its_section() -> None:
    titles = re.findall(r"^### ([a-z0-9-]+)$", read("docs/reference/findings.md"), re.MULTILINE)
    assert titles == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_section_says_what_the_code_means_what_proves_it_and_what_to_do(code: str) -> None:
    section = re.split(r"##|```", FINDINGS.partition(f"### {code} ")[2])[0]
    meaning = f"*{CODES[code].severity}*: {CODES[code].meaning}. - **Evidence:** "
    assert section.startswith(meaning)
    assert section.count(" - **Fix:** ") == 1
    assert len(section.split()) <= 42, "40 words and two bullets"


def test_every_public_name_is_in_the_api_reference() -> None:
    named = re.findall(r"^::: mptune\.(\w+)$", read("docs/reference/api.md"), re.MULTILINE)
    assert sorted(named) == sorted(set(mptune.__all__) - {"__version__"})


def test_the_tables_of_the_api_say_what_the_docstrings_say() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", read("docs/reference/api.md"), re.MULTILINE)
    assert {name for name, _ in rows} == set(mptune.__all__) - {"__version__"}
    for name, text in rows:
        first = (inspect.getdoc(getattr(mptune, name)) or "").partition("\n")[0]
        assert text == first.rstrip(".").replace("``", "`"), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_section_of_its_command(command: str) -> None:
    section = COMMAND_LINE.partition(f"## mptune {command}\n")[2].partition("\n## ")[0]
    assert section, f"docs/reference/command-line.md has no section of mptune {command}"
    for option in options_of(command) - {"--help", "-h"}:
        assert re.search(rf"`{re.escape(option)}(?![\w-])", section), f"its section does not name {option}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_reference_says_of_an_option_what_its_help_says(command: str) -> None:
    """More may stand behind it."""
    section = COMMAND_LINE.partition(f"## mptune {command}\n")[2].partition("\n## ")[0]
    declared = declarations(SearchSettings)
    for parameter in COMMANDS[command].params:
        is_metric = parameter.name == "metric" and command == "search"  # whose help lists the names
        text = declared["metric"].help if is_metric else getattr(parameter, "help", None) or ""
        if "--help" not in parameter.opts:
            words = " ".join(text.split()).rstrip(".")
            assert f" | {words}" in section, f"the section of mptune {command} says otherwise of {parameter.name}"


def test_every_named_metric_is_on_the_page_of_metrics() -> None:
    text = read("docs/guide/metrics.md")
    for name in METRICS.keys() - {"non_finite"}:
        assert f"`{name}`" in text, f"docs/guide/metrics.md does not name {name}"
