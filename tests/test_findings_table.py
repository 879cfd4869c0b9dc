"""A finding: its record, and its row in the one table of words, so that whoever detects it writes no sentence."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mptune.finding import CODES, Finding, OutputColumns, Where
from mptune.findings.wording import SEVERITIES, counted, listed

PACKAGE = Path(__file__).resolve().parent.parent / "mptune"
TABLE = PACKAGE / "findings"
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if TABLE not in path.parents and path.name != "finding.py")

SENTENCE = 45
"""Characters from which a part of a wording between two names is a sentence of its own."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _place(path: Path, node: ast.expr) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"


def _strings(path: Path) -> Iterator[ast.Constant]:
    """All texts of a file, and parts of its f-strings, but for docstrings."""
    nodes = list(ast.walk(_tree(path)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node


def test_no_finding_is_built_without_the_table() -> None:
    faults = []
    for path in OTHERS:
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name == "Finding" or name.endswith(".Finding"):
                faults.append(f"{_place(path, node)} builds a finding: use Finding.from_code")
            if name in ("replace", "dataclasses.replace") and {word.arg for word in node.keywords} & {"text", "cure"}:
                faults.append(f"{_place(path, node)} changes the words of a finding")
    assert faults == []


def test_no_wording_of_the_table_is_anywhere_else() -> None:
    texts = (node.value for path in TABLE.glob("*.py") for node in _strings(path))
    sentences = {part for text in texts for part in re.split(r"\{\w+\}", text) if len(part) >= SENTENCE}
    assert len(sentences) > 100
    faults = []
    for path in OTHERS:
        for node in _strings(path):
            faults += [f"{_place(path, node)}: {part!r}" for part in sentences if part in node.value]
    assert faults == []


def test_lists_and_counts_in_words() -> None:
    assert listed("abcd", 2, " and {others} more") == "a, b and 2 more"
    assert (counted(1, "row"), counted(3, "row")) == ("1 row", "3 rows")


def test_a_text_that_lacks_a_value_gives_way_to_the_meaning() -> None:
    for code in CODES:
        finding = Finding.from_code(code, "search", Where(), {}, kind="no such kind")
        assert finding.text
        assert finding.severity in SEVERITIES
    assert Finding.from_code("target-not-here", "search", Where(), {}).text == CODES["target-not-here"].meaning


def make_finding(**changes: object) -> Finding:
    row = {"code": "overflow", "severity": "warning", "origin": "search", "text": "it is so", "cure": "do this"}
    return Finding(**{**row, "where": Where(), "evidence": {}, **changes})  # type: ignore[arg-type]


def test_every_part_of_a_finding_survives_json_as_plain_values() -> None:
    evidence = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": np.float32(0.5), "e": 3, "f": "TF32"}
    outputs = OutputColumns("boxes", (0, 3)), OutputColumns("scores")
    where = Where(("a", "b"), ("g001",), ("t",), outputs, ("x",), (0, 7))
    finding = make_finding(where=where, evidence=evidence)
    evidence["e"] = 4
    document = finding.to_json()
    assert document["evidence"] == {"a": "inf", "b": "-inf", "c": "nan", "d": 0.5, "e": 3, "f": "TF32"}
    assert document["where"]["outputs"] == [{"name": "boxes", "columns": [0, 3]}, {"name": "scores", "columns": None}]
    again = Finding.from_json(json.loads(json.dumps(document, allow_nan=False)))
    assert len({again, finding}) == 1
    assert (finding.message, make_finding(cure="").message) == ("it is so; do this", "it is so")


@pytest.mark.parametrize(
    ("field", "value"), [("code", "overfow"), ("code", ""), ("severity", "fatal"), ("origin", "report")]
)
def test_what_does_not_exist_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"no {field} '{value}'"):
        make_finding(**{field: value})
    with pytest.raises(ValueError, match=f"no {field} '{value}'"):
        Finding.from_json({**make_finding().to_json(), field: value})
