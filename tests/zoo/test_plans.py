"""What the evaluation of a plan shows of its outputs and samples is named; a sound twin says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.tuning.output_findings import SampleIndices, plan_findings
from tests.zoo.plans import PLANS, SEARCH, evaluated

INDICES = SampleIndices(tuple(range(SEARCH)), tuple(range(SEARCH, 12)))
PLACES = {"one-sample-decides": (3,), "held-out-differs": (8, 9, 10, 11)}
COLUMNS = {"column-hidden": {4}, "column-hidden in a channel": {4}, "near-zero": {6, 7}}


@pytest.mark.parametrize("name", PLANS)
def test_what_a_plan_shows_is_named(name: str, tmp_path: Path) -> None:
    code = name.split()[0]
    found = plan_findings(evaluated(PLANS[name][0](), tmp_path), INDICES)
    (finding,) = [f for f in found if f.code == code]
    assert finding.where.samples == PLACES.get(name, ())
    columns = {column for output in finding.where.outputs for column in output.columns or ()}
    assert COLUMNS.get(name, set()) <= columns
    assert finding.evidence
    assert finding.severity == ("info" if code == "near-zero" else "warning")


@pytest.mark.parametrize("name", PLANS)
def test_a_sound_twin_shows_nothing(name: str, tmp_path: Path) -> None:
    assert plan_findings(evaluated(PLANS[name][1](), tmp_path), INDICES) == ()
