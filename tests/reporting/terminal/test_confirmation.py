"""A confirmation in words: both figures of every plan, the verdicts, and what failed."""

from __future__ import annotations

import pytest

from mptune.reporting.terminal.front import print_confirmation
from mptune.tuning.confirmation import Confirmation
from tests.reporting.conftest import printed


def test_both_figures_of_every_plan(confirmation: Confirmation) -> None:
    text = printed(confirmation, 130, show=print_confirmation)
    chosen = confirmation.front.chosen
    for plan in confirmation.plans:
        (line,) = (row for row in text.splitlines() if row.startswith(plan.searched.plan.fingerprint))
        assert f"{plan.searched.latency.median_ms:.3f}" in line
        assert plan.measured is None or f"{plan.measured.latency.median_ms:.3f} +-0.5%" in " ".join(line.split())
        assert (" chosen " in line) == (plan.searched.plan == chosen.plan)
    (failed,) = (p for p in confirmation.plans if p.measured is None)
    assert f"failed: {failed.searched.plan.fingerprint} (sampler): its outputs are <not> finite" in text
    assert "searched   h200, latency predicted, error emulated" in text
    assert "onnxruntime on NVIDIA H200" in text
    assert "warning: the calibration data are random" in text


@pytest.mark.parametrize("columns", [80, 100, 130])
def test_no_line_of_the_table_is_cut(confirmation: Confirmation, columns: int) -> None:
    lines = printed(confirmation, columns, show=print_confirmation).splitlines()
    rows = [line for line in lines if line.startswith(tuple(p.searched.plan.fingerprint for p in confirmation.plans))]
    assert len(rows) == len(confirmation.plans)
    assert all(len(line.rstrip()) <= columns for line in rows)
