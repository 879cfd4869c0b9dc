"""The checks before the search: each broken baseline has its own message and hint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, ReferenceReport, Stage
from mptune.engines.jobs.ranges import TensorRange
from mptune.errors import BaselineError
from mptune.tuning.steps.baseline import check_baseline, check_reference
from mptune.tuning.steps.prepare import Observations, observe
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.factory import make_error

SOUND = {"non_finite": 0.0, "zero_fraction": 0.1, "absmax": 3.0}
GOOD = ReferenceReport("CPUExecutionProvider", {"y": SOUND, "z": SOUND}, repeat_error=0.0)


def test_a_sound_reference_passes() -> None:
    assert check_reference(GOOD) == ()
    rows = replace(GOOD, identical_rows_error=1e-7, batch_size_error=0.0, repeat_error=1e-6, warnings=("mind the gap",))
    assert check_reference(rows) == ("mind the gap",)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (replace(GOOD, outputs={"y": {**SOUND, "non_finite": 4.0}}), "'y' holds 4 NaN or Inf"),
        (replace(GOOD, outputs={"y": {**SOUND, "zero_fraction": 1.0}}), "all zero in every output"),
        (replace(GOOD, repeat_error=0.5), "not deterministic"),
        (replace(GOOD, repeat_error=math.nan), "not deterministic"),
        (replace(GOOD, identical_rows_error=0.5), "identical rows"),
        (replace(GOOD, batch_size_error=math.nan), "alone than in a larger batch"),
    ],
)
def test_a_broken_reference_stops_everything(report: ReferenceReport, message: str) -> None:
    with pytest.raises(BaselineError, match=message) as caught:
        check_reference(report)
    assert "precision is not the problem" in caught.value.message
    assert caught.value.hint


def test_small_flaws_of_the_reference_are_warnings() -> None:
    report = replace(
        GOOD,
        outputs={"y": SOUND, "z": {**SOUND, "zero_fraction": 1.0}},
        repeat_error=1e-4,
        identical_rows_error=1e-3,
        batch_size_error=2e-3,
    )
    assert len(check_reference(report)) == 4


@pytest.mark.parametrize("kind", list(FailureKind))
def test_a_model_that_does_not_run_is_told_with_its_log(kind: FailureKind) -> None:
    with pytest.raises(BaselineError, match="does not run in FP32") as caught:
        check_reference(Failure(Stage.RUN, kind, "it broke", Path("run/logs/1.log")))
    assert "it broke" in caught.value.message
    assert str(Path("run/logs/1.log")) in caught.value.hint


def test_the_fp32_engine_must_agree_with_the_reference() -> None:
    assert check_baseline(make_error(2e-7), tf32=False) == ()
    assert "TF32" in check_baseline(make_error(5e-4), tf32=False)[0]
    assert check_baseline(make_error(5e-3), tf32=True) == ()
    with pytest.raises(BaselineError, match=r"off by 5.0e-03 .*precision is not the problem"):
        check_baseline(make_error(5e-3), tf32=False)
    with pytest.raises(BaselineError, match="2 NaN or Inf"):
        check_baseline(make_error(math.nan), tf32=False)
    with pytest.raises(BaselineError, match="off by inf"):
        check_baseline(OutputError({"y": {"relative_l2": (math.inf,), "non_finite": (0.0,)}}), tf32=False)


def test_observations_survive_their_file(tmp_path: Path) -> None:
    ranges = {"t": TensorRange(600.0, (2, 3)), "u": TensorRange(math.inf, (), 7)}
    toolchain, diary = FakeToolchain(Law(()), ranges=ranges), Diary()
    seen = observe(toolchain, diary)
    assert diary.stages == ["reference", "observing ranges"]
    assert seen.absmax == {"t": 600.0, "u": math.inf}
    assert seen.shapes == {"t": (2, 3), "u": ()}
    assert "'u' holds NaN or Inf" in seen.warnings[0]
    path = tmp_path / "observed.json"
    seen.save(path)
    assert Observations.load(path) == seen
    path.write_text(path.read_text()[:-10])
    assert Observations.load(path) is None
    assert Observations.load(tmp_path / "none.json") is None


def test_a_model_that_cannot_be_observed_is_told() -> None:
    broken = FakeToolchain(Law(()), ranges=Failure(Stage.RUN, FailureKind.OUT_OF_MEMORY, "too large"))
    with pytest.raises(BaselineError, match="cannot be observed"):
        observe(broken, Diary())
