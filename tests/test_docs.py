"""The documentation against the program: what it names exists, and what exists is named."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import typer.main

import mptune
from mptune.cli import app
from tests.docs.pages import PAGES as READ, ROOT, blocks_of, prose_of, read
from tests.test_architecture import LAYERS

PAGES = (*READ, "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/models/README.md")

SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install "

GROUP = typer.main.get_command(app)
COMMANDS = dict(GROUP.commands)  # type: ignore[attr-defined]
GLOBAL_OPTIONS = {name for parameter in GROUP.params for name in parameter.opts} | {"--help"}


def options_of(command: str) -> set[str]:
    """Every spelling of every option of a command."""
    return {name for p in COMMANDS[command].params for name in p.opts if name.startswith("-")}


def code_of(text: str) -> list[str]:
    """The lines of fenced shell blocks and the inline code of a page."""
    lines = [line for block in blocks_of(text) for line in block.body.replace("\\\n", " ").splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", prose_of(text))


def invocations(text: str) -> list[list[str]]:
    """Every ``mptune ...`` command in a page, as words."""
    named = []
    for line in code_of(text):
        for part in line.split(" && "):
            match = re.match(r"(?:\$ |then |else |ExecStart=\S*/)?(mptune [a-z-].*)", part.strip())
            if match:
                named.append(shlex.split(re.split(r"\s(?:#|\||>)", match.group(1))[0]))
    return named


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_stands_in_the_readme(name: str) -> None:
    command = COMMANDS[name]
    assert command.help
    assert f"mptune {name}" in command.help, "an example"
    assert f"mptune {name}" in read("README.md")
    for parameter in command.params:
        if "--help" not in parameter.opts:
            assert getattr(parameter, "help", None), f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_the_pages_exist(page: str) -> None:
    for words in invocations(read(page)):
        command = next((word for word in words[1:] if not word.startswith("-")), None)
        options = GLOBAL_OPTIONS
        if command is not None:
            assert command in COMMANDS, f"{page} names `{shlex.join(words)}`"
            options = options | options_of(command)
        for word in words[1:]:
            if word.startswith("-") and len(word) > 1:
                assert word.split("=")[0] in options, f"{page} names {word} in `{shlex.join(words)}`"


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    text = read(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), f"{page} links {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page} links {target}"


def test_the_layers_and_packages_in_contributing_are_those() -> None:
    text = read("CONTRIBUTING.md")
    for module in LAYERS:
        name = module.removeprefix("mptune.")
        assert f"`{name}`" in text or module in {"mptune", "mptune.__main__"}, f"CONTRIBUTING.md does not name {name}"
    files = (ROOT / "mptune").glob("*/*/__init__.py")
    packages = {path.parent.relative_to(ROOT / "mptune").as_posix() for path in files}
    assert sorted(re.findall(r"^\| `([a-z_]+/[a-z_]+)` \|", text, re.MULTILINE)) == sorted(packages)


def test_the_python_of_the_readme_exists() -> None:
    (block,) = (block.body for block in blocks_of(read("README.md")) if block.language == "python")
    compile(block, "README.md", "exec")
    owners = {"mptune": set(mptune.__all__), "front": set(dir(mptune.Front)), "run": set(dir(mptune.Run))}
    used = re.findall(r"\b(mptune|front|run)\.(\w+)", re.sub(r"\"[^\"]*\"|#.*", "", block))
    assert {owner for owner, _ in used} == set(owners)
    for owner, name in used:
        assert name in owners[owner], f"README.md uses {owner}.{name}"


def test_the_test_command_of_readme_is_what_ci_runs() -> None:
    script = read(".ci/run")
    (extraction,) = re.findall(r"^command=\$\((.*)\)$", script, re.MULTILINE)
    done = subprocess.run(["bash", "-c", extraction], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == f"{SETUP}-e '.[test]' && pytest -n 3\n"
    assert done.stdout in read("CONTRIBUTING.md")
    assert f"{SETUP}. && mptune demo" in code_of(read("README.md")), "one line: a Debian's own Python refuses pip"
    before = script[: script.index('bash -euc "$command"')]
    assert "pip install" not in before
    assert "apt-get install -qq -y python3-venv" in before, "nothing else is installed before"
    assert before.count("apt-get install") == 1


def test_the_help_has_the_exit_codes_of_the_page() -> None:
    page = read("docs/guide/troubleshooting.md").partition("## Exit codes")[2].partition("\n## ")[0]
    listed = (GROUP.help or "").partition("Exit codes:")[2]
    assert re.findall(r"(?:^|,)\s+(\d+)\s", listed) == re.findall(r"^\| (\d+) \|", page, re.MULTILINE)


def test_the_pages_that_the_code_names_exist() -> None:
    folders = ("mptune", "benchmarks", "tests", "search_spaces")
    sources = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml", ".in")
    ]
    named = {name for path in sources for name in re.findall(r"\b[A-Z_]+\.md\b", path.read_text(encoding="utf-8"))}
    assert "CONTRIBUTING.md" in named
    assert {name for name in named if not list(ROOT.glob(f"**/{name}"))} == set()


def test_the_pages_and_benchmarks_name_each_other() -> None:
    """Files of results and modules that pages name exist, and every script with figures stands beside its command."""
    text = read("benchmarks/README.md")
    for page in PAGES:
        for name in re.findall(r"\bbenchmarks(?:\.\w+)+", read(page)):
            path = ROOT / name.replace(".", "/")
            files = (path.with_suffix(".py"), path.with_suffix(".json"), path / "__main__.py")
            assert any(file.is_file() for file in files), f"{page} names {name}"
    for name in re.findall(r"[\w/]*\bresults/[\w*.]+\b", text):
        assert any((ROOT / "benchmarks").glob(name.removeprefix("benchmarks/"))), f"benchmarks/README.md names {name}"
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
            assert f"benchmarks.{path.stem}" in text, f"benchmarks/README.md does not name benchmarks.{path.stem}"


def words_of(page: str) -> int:
    """How many words a page has without its code blocks and tables."""
    return len(re.sub(r"^ *\|.*?$", "", prose_of(read(page)), flags=re.MULTILINE).split())


def test_the_pages_are_short() -> None:
    assert words_of("README.md") <= 700
    assert sum(words_of(page) for page in PAGES if page.startswith("docs/")) <= 10_000
    assert len(read("CONTRIBUTING.md").splitlines()) <= 150


def test_the_readme_has_one_table_of_measurements() -> None:
    """The others are in ``benchmarks/README.md``: figures that stand twice come to differ."""
    tables = re.findall(r"(?:^\|.*\n)+", read("README.md"), re.MULTILINE)
    assert len([table for table in tables if re.search(r"\| ms \||\d\.\d{3} \|", table)]) == 1
