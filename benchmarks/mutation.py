"""Which single-line changes of the code do the tests notice? The tests may become fewer; what they protect may not.

    python -m benchmarks.mutation --seed 1 --count 60 --out mutation.jsonl
    python -m benchmarks.mutation --count 0 --out mutation.jsonl              # only the summary

The seed draws lines of ``mptune/`` and a change for each: a comparison turned, a constant changed, a branch removed.
Each is made in a copy of the tree, never in the checkout, and tests run until one fails: first those named after the
module, then those that import it, then the folder of ``tests/`` of the same name and those above it; small files first.
A test that fails without the change, too, is left out. Changes that the file holds already are skipped, unless their
tests reached a limit below this one. Rows marked ``"equivalent": true`` by hand, as without effect, are not counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = ("comparison", "constant", "branch")
TURNED = {"<": ">=", "<=": ">", "==": "!=", "in": "not in", "is": "is not"}
TURNED |= {after: before for before, after in TURNED.items()}
Change = tuple[str, int, str, str]  # file, line number, the line before and after


def changes(path: Path) -> Iterator[tuple[str, Change]]:
    """All changes of a file, with their kinds. Decorators and annotations stay; so do f-strings (see ``_edits``)."""
    lines = path.read_text().splitlines()
    nodes = list(ast.walk(ast.parse("\n".join(lines))))
    kept = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    kept += [part for node in nodes for part in getattr(node, "decorator_list", ())]
    kept += [node for node in nodes if isinstance(node, ast.JoinedStr)]
    left_out = {id(inner) for part in kept if part is not None for inner in ast.walk(part)}
    for node in (node for node in nodes if id(node) not in left_out):
        for kind, line, start, end, new in _edits(node, lines):
            before = lines[line - 1].encode()
            after = before[:start] + new.encode() + before[end:]
            if b"TYPE_CHECKING" not in before:
                yield kind, (path.relative_to(ROOT).as_posix(), line, before.decode(), after.decode())


def _edits(node: ast.AST, lines: list[str]) -> Iterator[tuple[str, int, int, int, str]]:
    """Kind, line, first and last byte, and what stands there then; inside f-strings Python 3.11 has wrong columns."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        line, start, end = node.comparators[0].lineno, node.left.end_col_offset or 0, node.comparators[0].col_offset
        between = lines[line - 1].encode()[start:end].decode()
        old = between.strip(" ()")
        if node.left.end_lineno == line and old in TURNED:
            yield "comparison", line, start, end, between.replace(old, TURNED[old])
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = node.value
        larger = value + 1 if isinstance(value, int) and value < 10 else 2 * value or 1.0
        other = repr(not value if isinstance(value, bool) else larger)
        yield "constant", node.lineno, node.col_offset, node.end_col_offset or 0, other
    elif isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
        yield "branch", node.test.lineno, node.test.col_offset, node.test.end_col_offset or 0, "False"


def draw(seed: int, count: int) -> list[tuple[str, Change]]:
    """As many changes of each kind, in a random order; a smaller count draws the first ones of a larger."""
    paths = (path for path in (ROOT / "mptune").rglob("*.py") if "templates" not in path.parts)
    found = sorted(row for path in paths for row in changes(path))
    random.Random(seed).shuffle(found)
    of_kind = [[row for row in found if row[0] == kind] for kind in KINDS]
    return [of_kind[number % len(KINDS)][number // len(KINDS)] for number in range(count)]


def tests_of(file: str) -> list[str]:
    """The files of tests for a module, the nearest first."""
    parts = Path(file).with_suffix("").parts[1:]
    package, _, stem = ".".join(("mptune", *parts)).removesuffix(".__init__").rpartition(".")
    imports = re.compile(rf"{re.escape(package)}(\.{stem}\b| import .*\b{stem}\b)")
    rooms = [room for depth in range(len(parts) - 1, 0, -1) if (room := Path(ROOT, "tests", *parts[:depth])).is_dir()]
    ranked = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text, name = path.read_text(), path.relative_to(ROOT).as_posix()
        near = [depth for depth, room in enumerate(rooms) if room in path.parents]
        near = near if rooms or path.parent != ROOT / "tests" else [0]
        is_reader = imports.search(text) is not None and "tests/benchmarks" not in name
        if near or is_reader:
            rank = 0 if near and path.stem.startswith(f"test_{stem}") else 1 if is_reader else 2 + near[0]
            ranked.append((rank, len(text), name))
    return [name for *_, name in sorted(ranked)]


def run_tests(tree: Path, tests: list[str], limit_s: float, without: list[str]) -> tuple[str, str]:
    """``caught`` and by which test; or ``survived``, or ``limit``."""
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={tree.parent / 'temporary'}"]
    options += [f"--deselect={test}" for test in without]
    words = ["timeout", "--signal=KILL", str(10 * limit_s), sys.executable, "-m", "pytest", *options, *tests]
    own = {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(tree.parent / "bytecode"), "CI": "1"}
    with (tree.parent / "log").open("w+") as log:  # no pipe: a process that a killed test leaves would hold it open
        code = subprocess.call(
            words,
            cwd=tree,
            env={**os.environ, **own},
            stdout=log,
            stderr=log,
            # Seconds of the processor, which a busy machine does not change; of each process that a test starts, too.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s))),
        )
        log.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", log.read(), re.MULTILINE)
    # 5: none were collected.
    outcome = "survived" if code in (0, 5) else "limit" if code in (-9, 137, -24, 152) else "caught"
    return outcome, "" if outcome != "caught" else failed[1] if failed else f"pytest ends with {code}"


def judge(tree: Path, change: Change, limit_s: float, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the tests say of a change; the copy is as before afterwards."""
    file, line, before, after = change
    lines = (ROOT / file).read_text().splitlines()
    (tree / file).write_text("\n".join((*lines[: line - 1], after, *lines[line:], "")))
    started = time.monotonic()
    outcome, by = run_tests(tree, tests_of(file), limit_s, list(without))
    seconds = round(time.monotonic() - started, 1)
    shutil.copy2(ROOT / file, tree / file)
    if "::" in by and run_tests(tree, [by], limit_s, [])[0] == "caught":
        return judge(tree, change, limit_s, (*without, by))
    row = {"file": file, "line": line, "before": before, "after": after, "outcome": outcome, "by": by}
    return {**row, "seconds": seconds, "limit": limit_s, "without": without}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--seed", 1), ("--count", 60), ("--limit", 90)):
        parser.add_argument(name, type=int, default=default, help="CPU seconds" if name == "--limit" else None)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    rows = [row for row in rows if row["outcome"] != "limit" or row["limit"] >= options.limit or not options.count]
    done = [(row["file"], row["line"], row["before"], row["after"]) for row in rows]
    with tempfile.TemporaryDirectory(prefix="mptune-mutation-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for kind, change in draw(options.seed, options.count):
            if change not in done:
                rows.append({"kind": kind, **judge(tree, change, options.limit)})
                options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
                print("{outcome:<9}{file}:{line} {after}  {by}".format(**rows[-1]), flush=True)
    for kind in ("", *KINDS):
        found = Counter(row["outcome"] for row in rows if kind in row["kind"] and not row.get("equivalent"))
        print(f"{kind or 'all'}: {found['caught']} of {found.total()} caught, {found['limit']} at the limit")


if __name__ == "__main__":
    main()
