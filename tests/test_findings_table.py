"""A finding is a row of one table: whoever detects it gives code, place and evidence, and writes no sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mptune.finding import CODES, Finding, Where
from mptune.findings.wording import Wording, fill, listed

PACKAGE = Path(__file__).resolve().parent.parent / "mptune"
TABLE = PACKAGE / "findings"
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if TABLE not in path.parents and path.name != "finding.py")

SENTENCE = 45
"""Characters from which a part of a wording between two names is a sentence of its own."""

WORDINGS = [
    pytest.param(code, kind, wording, id=f"{code} {kind}".strip())
    for code, row in CODES.items()
    for kind, wording in row.wordings.items()
]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _place(path: Path, node: ast.expr) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"


def _sentences() -> Iterator[str]:
    for row in CODES.values():
        for wording in row.wordings.values():
            for part in re.split(r"\[\w+\?|[\[\]]|\{[^{}]*\}", f"{wording.text}|{wording.cure}".replace("|", "{}")):
                if len(part) >= SENTENCE:
                    yield part


def test_no_finding_is_built_without_the_table() -> None:
    faults = []
    for path in OTHERS:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == "Finding" or name.endswith(".Finding"):
                faults.append(f"{_place(path, node)} builds a finding: use Finding.of")
            if name in ("replace", "dataclasses.replace") and {word.arg for word in node.keywords} & {"text", "cure"}:
                faults.append(f"{_place(path, node)} changes the words of a finding")
    assert faults == []


def test_no_wording_of_the_table_is_anywhere_else() -> None:
    sentences = set(_sentences())
    assert len(sentences) > 100
    faults = []
    for path in OTHERS:
        nodes = list(ast.walk(_tree(path)))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                faults += [f"{_place(path, node)}: {part!r}" for part in sentences if part in node.value]
    assert faults == []


@pytest.mark.parametrize(("code", "kind", "wording"), WORDINGS)
def test_a_wording_is_one_sentence_that_can_be_filled(code: str, kind: str, wording: Wording) -> None:
    names = re.findall(r"\{(\w+)", wording.at + wording.text + wording.cure)
    text, cure = wording.filled(dict.fromkeys(names, 2))
    assert text
    assert not re.search(r"[{}\[\]\n]|  |\.$", text + cure), (text, cure)


def test_what_is_not_known_is_left_out_and_counts_have_their_words() -> None:
    template = "{rows:/# row is/# rows are} off[, first in sample {sample}][worse?; it is worse], by {share:.2g%}"
    assert fill(template, {"rows": 1, "share": 0.25}) == "1 row is off, by 25 %"
    full = {"rows": 3, "share": 0.001, "sample": 0, "worse": True}
    assert fill(template, full) == "3 rows are off, first in sample 0; it is worse, by 0.1 %"
    assert listed("abcd", 2, " and {others} more") == "a, b and 2 more"


def test_an_unknown_code_or_an_unnamed_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        Finding.of("no-such-code", "search", Where(), {})
    with pytest.raises(KeyError, match="target"):
        Finding.of("target-not-here", "search", Where(), {})
