"""The checks before the search: each broken baseline has its own message and hint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, Place, ReferenceReport, RowReport, Stage
from mptune.errors import BaselineError
from mptune.finding import Finding
from mptune.settings import SearchSettings
from mptune.tuning.baseline import check_reference, checked_findings
from tests.tuning.factory import make_error, make_evaluation

SOUND = {"non_finite": 0.0, "zero_fraction": 0.1, "absmax": 3.0}
GOOD = ReferenceReport("CPUExecutionProvider", {"y": SOUND, "z": SOUND}, repeat_error=0.0)


def test_small_flaws_of_the_reference_are_warnings() -> None:
    assert check_reference(GOOD) == ()
    assert check_reference(replace(GOOD, rows=RowReport(2, {"y": 1e-6}), repeat_error=1e-6)) == ()
    (finding,) = check_reference(replace(GOOD, rows=RowReport(2, failure="node. Name:'r' Status: mind the gap")))
    assert (finding.code, finding.severity, finding.where.nodes) == ("batch-not-kept", "warning", ("r",))
    zero, rows = {"y": SOUND, "z": {**SOUND, "zero_fraction": 1.0}}, RowReport(2, {"y": 2e-3})
    findings = check_reference(replace(GOOD, outputs=zero, repeat_error=1e-4, rows=rows))
    assert [f.code for f in findings] == ["output-constant", "not-deterministic", "rows-mix"]
    assert {f.severity for f in findings} == {"warning"}


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (replace(GOOD, outputs={"y": {**SOUND, "non_finite": 4.0}}), "'y' has 4 NaN or Inf"),
        (replace(GOOD, outputs={"y": {**SOUND, "zero_fraction": 1.0}}), "all zero in every output"),
        (replace(GOOD, repeat_error=0.5), "not deterministic"),
        (replace(GOOD, repeat_error=math.nan), "not deterministic"),
        (replace(GOOD, rows=RowReport(2, {"y": math.nan})), "output depends on the other rows"),
        (replace(GOOD, rows=RowReport(2, {"y": 0.5})), "output depends on the other rows"),
        (replace(GOOD, rows=RowReport(4, lost={"y": (1, 10)}, declared={"y": "[B, 10]"})), r"\[1, 10\] for 4 rows"),
    ],
)
def test_a_broken_reference_stops_everything(report: ReferenceReport, message: str) -> None:
    with pytest.raises(BaselineError, match=message) as caught:
        check_reference(report)
    assert "precision is not the problem" in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 4
    assert caught.value.findings[0].severity == "error"
    assert check_reference(report, skip=True) == caught.value.findings


@pytest.mark.parametrize(("operator", "severity"), [("QuantizeLinear", "info"), ("Reshape", "error")])
def test_rows_that_a_step_of_int8_tells_apart_are_not_mixed(operator: str, severity: str) -> None:
    """Kernels for another batch size round in another order, and a value between two steps goes to the other one."""
    rows = RowReport(2, {"y": 1.3e-2})
    place = Place("quantize", operator, "q", 1.3e-2)
    (finding,) = check_reference(replace(GOOD, rows=rows, places={("rows-mix", "y"): place}), skip=True)
    assert (finding.code, finding.severity, finding.where.nodes) == ("rows-mix", severity, ("quantize",))


@pytest.mark.parametrize("kind", list(FailureKind))
def test_a_model_that_does_not_run_is_told_with_its_log(kind: FailureKind) -> None:
    with pytest.raises(BaselineError, match=r"does not run in FP32.*it broke") as caught:
        check_reference(Failure(Stage.RUN, kind, "it broke", Path("run/logs/1.log")))
    assert str(Path("run/logs/1.log")) in caught.value.hint


def check_engine(error: OutputError, *, tf32: bool = False) -> tuple[Finding, ...]:
    fp32 = replace(make_evaluation(1.0, 0.0), error=error)
    return checked_findings((), fp32, SearchSettings(tf32=tf32), "search")


def test_the_fp32_engine_must_agree_with_the_reference() -> None:
    assert check_engine(make_error(2e-7)) == ()
    (finding,) = check_engine(make_error(5e-4))
    assert (finding.code, finding.severity) == ("engine-differs", "warning")
    assert "TF32" in finding.cure
    assert check_engine(make_error(5e-3), tf32=True) == ()
    with pytest.raises(BaselineError, match=r"off by 5.0e-03 .*precision is not the problem"):
        check_engine(make_error(5e-3))
    with pytest.raises(BaselineError, match="2 NaN or Inf"):
        check_engine(make_error(math.nan))
    with pytest.raises(BaselineError, match="off by inf"):
        check_engine(OutputError({"y": {"relative_l2": (math.inf,), "non_finite": (0.0,)}}))
