"""The benchmark of false alarms: what it judges, and six networks without a false alarm or a missed fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.false_alarms import Case, judged, main
from mptune.finding import CODES, Finding, Where


def finding(code: str) -> Finding:
    return Finding(code, CODES[code].severity, "inspect", Where(), {}, code, "")


def test_a_finding_is_false_where_its_code_is_not_the_models() -> None:
    case = Case("m", Path("m"), None, frozenset({"rows-mix"}), frozenset({"overflow", "underflow"}))
    every = [finding(code) for code in ("overflow", "overflow", "rows-mix", "mask", "near-zero")]
    rows, missed = judged(case, tuple(every))
    assert {row.code: row.is_false for row in rows} == {"overflow": False, "rows-mix": False, "mask": True}
    assert missed == ["underflow"]


@pytest.mark.slow
def test_six_networks_have_no_false_alarm_and_no_missed_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--only", " 0"]) == 0
    shown = capsys.readouterr().out
    for words in ("18 models", " 0 false", "0 planted faults missed"):
        assert words in shown
