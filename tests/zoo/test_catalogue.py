"""Every situation that the list of findings describes has a case that shows it, and a sound twin (``LINES``)."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest

from mptune.finding import CODES
from tests.diagnosis.test_recordings import CASES
from tests.zoo.fp32 import specimens
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS
from tests.zoo.lines import LINES, Line
from tests.zoo.numbers import SHOWN
from tests.zoo.numbers.further import FURTHER
from tests.zoo.plans import PLANS

TESTS = Path(__file__).resolve().parents[1]

ON_A_DEVICE = {"no-fp16-kernel", "no-bf16-kernel", "engine-differs", "emulation-differs"}
"""Only an engine that a GPU runs shows these; what reads its answer is tested with answers that are recorded."""

PAIRED: Mapping[str, Collection[str]] = {
    "numbers": {*SHOWN, *FURTHER},
    "graphs": {*GRAPHS, *FURTHER_GRAPHS},
    "plans": set(PLANS),
    "recordings": {fault for _, fault, _ in CASES},  # the twin is a recording that is equal
}
"""Table -> its cases; each has its twin beside it."""


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.code} {line.situation}".strip().replace(" ", "-"))
def test_each_situation_has_a_case_and_a_sound_twin(line: Line) -> None:
    assert line.code in CODES
    if line.table == "device":
        assert line.code in ON_A_DEVICE
    elif line.table == "tests":
        for test in (line.case, line.twin):
            path, name = test.split("::")
            assert name in _tests_of(path), f"{test} is not there"
    elif line.table == "fp32":
        twin = line.twin or f"{line.case}_twin"
        assert specimens()[line.case].code
        assert not specimens()[twin].code
    else:
        assert line.case in PAIRED[line.table]


def test_no_code_and_no_case_is_without_a_line() -> None:
    assert {line.code for line in LINES} == set(CODES)
    used = {(line.table, line.case) for line in LINES}
    assert {(table, case) for table, cases in PAIRED.items() for case in cases} - used == set()
    broken = {name for name, one in specimens().items() if one.code}
    assert broken == {line.case for line in LINES if line.table == "fp32"}
    assert len({(line.code, line.situation) for line in LINES}) == len(LINES)
