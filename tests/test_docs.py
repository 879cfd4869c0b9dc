"""README.md and CONTRIBUTING.md against the program: what they name exists, and what exists is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from mptune.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

GROUP = typer.main.get_command(app)
COMMANDS = dict(GROUP.commands)  # type: ignore[attr-defined]
GLOBAL_OPTIONS = {name for parameter in GROUP.params for name in parameter.opts} | {"--help"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def options_of(command: str) -> set[str]:
    """Every spelling of every option of a command."""
    return {name for p in COMMANDS[command].params for name in p.opts if name.startswith("-")}


def code_of(text: str) -> list[str]:
    """The lines of fenced shell blocks and the inline code of a page."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", prose)


def invocations(text: str) -> list[list[str]]:
    """Every ``mptune ...`` command in a page, as words."""
    found = []
    for line in code_of(text):
        match = re.match(r"(?:\$ )?(mptune [a-z-].*)", line.strip())
        if match:
            command = re.split(r"\s(?:#|\||&&|>)", match.group(1))[0]
            found.append(shlex.split(command))
    return found


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_has_help(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert f"mptune {name}" in command.help, "an example"
    for parameter in command.params:
        if "--help" not in parameter.opts:
            assert getattr(parameter, "help", None), f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"mptune {name}" in read("README.md")


@pytest.mark.parametrize("option", sorted(options_of("search") - {"--help"}))
def test_every_option_of_search_is_in_the_readme(option: str) -> None:
    assert re.search(rf"{re.escape(option)}(?![\w-])", read("README.md"))


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_the_pages_exist(page: str) -> None:
    for words in invocations(read(page)):
        command = next((word for word in words[1:] if not word.startswith("-")), None)
        known = GLOBAL_OPTIONS
        if command is not None:
            assert command in COMMANDS, f"{page} names `{shlex.join(words)}`"
            known = known | options_of(command)
        for word in words[1:]:
            if word.startswith("-") and len(word) > 1:
                assert word.split("=")[0] in known, f"{page} names {word} in `{shlex.join(words)}`"


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    text = read(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = ROOT / path if path else ROOT / page
        assert linked.exists(), f"{page} links {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page} links {target}"


def test_the_house_in_contributing_is_the_house() -> None:
    from tests.test_architecture import FLOORS

    text = read("CONTRIBUTING.md")
    for module in FLOORS:
        name = module.removeprefix("mptune.")
        assert f"`{name}`" in text or module in {"mptune", "mptune.__main__"}, f"CONTRIBUTING.md does not name {name}"


def test_the_test_command_of_the_readme_is_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for page in ("README.md", "CONTRIBUTING.md"):
        commands = [line.strip() for line in code_of(read(page)) if line.strip().startswith("pytest")]
        assert commands, f"{page} does not say how the tests are run"
        assert any(command in ci for command in commands), f"{page}: {commands} is not what .ci/run runs"
