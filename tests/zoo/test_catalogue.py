"""Every code has a case that shows it, and a sound twin: in a table of the zoo, or in a test (``LINES``)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from mptune.finding import CODES
from tests.diagnosis.test_recordings import CASES
from tests.zoo.fp32 import specimens
from tests.zoo.graphs import FURTHER_GRAPHS, GRAPHS
from tests.zoo.lines import LINES, ON_A_DEVICE, Line
from tests.zoo.numbers import SHOWN
from tests.zoo.numbers.further import FURTHER
from tests.zoo.plans import PLANS

TESTS = Path(__file__).resolve().parents[1]


@cache
def _tests_of(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.code)
def test_each_situation_has_a_test_that_shows_it_and_one_of_its_twin(line: Line) -> None:
    for test in (line.case, line.twin):
        path, name = test.split("::")
        assert name in _tests_of(path), f"{test} is not there"


def test_no_code_is_without_a_case() -> None:
    paired = {**SHOWN, **FURTHER, **GRAPHS, **FURTHER_GRAPHS, **PLANS}
    shown = {name.split()[0].rstrip(",:") for name in paired}
    shown |= {code for _, _, code in CASES}  # the twin is a recording that is equal
    zoo = specimens()
    broken = {name for name, one in zoo.items() if one.code}
    shown |= {zoo[name].code for name in broken}
    assert {f"{name}_twin" for name in broken - set(OTHER_TWINS)} | set(OTHER_TWINS.values()) <= zoo.keys() - broken
    assert shown | {line.code for line in LINES} | ON_A_DEVICE == set(CODES)


OTHER_TWINS = {"faint_noise": "noise_twin", "max_over_batch": "pooled_twin"}
"""Specimens of FP32 that share a twin with another."""
