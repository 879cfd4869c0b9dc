"""The baseline that TensorRT 10's builder chooses: measured once, a failure is a value, and it is never a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import mptune
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, FailureKind, Measurement, Stage
from mptune.reporting.terminal.explanation import print_explanation
from mptune.settings import SearchSettings
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps.free_engine import measure_builders_choice, read_builders_choice
from mptune.tuning.steps.tuner import Tuner
from tests.fakes import FAST, Diary, FakeToolchain, Law, make_toolchain, search
from tests.reporting.conftest import printed
from tests.tuning.conftest import OpenRecord

REFUSED = Failure(Stage.BUILD, FailureKind.NO_TACTIC, "no tactics to implement node 'a'")
LOST = Failure(Stage.RUN, FailureKind.DEVICE_LOST, "gone")
SETTINGS = SearchSettings(budget=4, sampler="tpe", latency=FAST, metric="relative_l2")


@dataclass
class Choosing(FakeToolchain):
    """Its builder's choice is half as long as all-FP32, with an error of 0.5; or what else it is to answer first."""

    answers: list[Failure | None] = field(default_factory=list)
    asked: int = 0

    def measure_free_engine(self) -> Measurement | Failure | None:
        self.asked += 1
        if self.answers:
            return self.answers.pop(0)
        error = dict.fromkeys(self.statistics, (0.5,) * 2) | {"non_finite": (0.0,) * 2}
        own, baseline = self._timed(self.law.base_ms / 2, 1), self._timed(self.law.base_ms, 0)
        return Measurement(own, baseline, 1.0, OutputError({"y": error}), "measured", build_s=1.0)


def choosing(space: SearchSpace, *answers: Failure | None) -> Choosing:
    return Choosing(Law(space.free), answers=list(answers))


def test_it_is_measured_once(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(), choosing(space)
    measure_builders_choice(record, toolchain, SETTINGS, Diary())
    assert toolchain.asked == 0, "there is nothing yet to compare with"
    Tuner(record, space, toolchain, SETTINGS, Diary()).run()
    before = [e.plan for e in record.evaluations()]
    for _ in range(2):
        measure_builders_choice(record, toolchain, SETTINGS, Diary())
    assert toolchain.asked == 1
    fp32 = record.baseline()
    assert fp32 is not None
    choice = read_builders_choice(record, fp32)
    assert choice is not None
    assert choice.evaluation is not None
    assert choice.evaluation.speedup == pytest.approx(2.0, rel=1e-2)
    assert choice.evaluation.error_value == 0.5
    assert [e.plan for e in record.evaluations()] == before


def test_a_failure_is_a_value_and_one_of_the_machine_is_tried_again(
    open_record: OpenRecord, space: SearchSpace
) -> None:
    record, toolchain, diary = open_record(), choosing(space, LOST, None, REFUSED), Diary()
    Tuner(record, space, toolchain, SETTINGS, diary).run()
    fp32 = record.baseline()
    assert fp32 is not None
    for _ in range(2):  # the device was lost; a version without such networks
        measure_builders_choice(record, toolchain, SETTINGS, diary)
        assert read_builders_choice(record, fp32) is None
    for _ in range(2):
        measure_builders_choice(record, toolchain, SETTINGS, diary)
    assert toolchain.asked == 3
    choice = read_builders_choice(record, fp32)
    assert choice is not None
    assert choice.to_point() == {
        "latency": None,
        "error": None,
        "speedup": None,
        "failure": "build, no tactic: no tactics to implement node 'a'",
    }


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("answers", [(), (REFUSED,)])
def test_every_view_has_it_and_no_choice_takes_it(
    answers: tuple[Failure, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    front = search(Choosing(make_toolchain().law, answers=list(answers)))
    point = json.loads(Path("model.mptune/front.json").read_text())["builders_choice"]
    text = " ".join(printed(print_explanation, front, monkeypatch, 100).split())
    page = Path("model.mptune/report.html").read_text()
    if answers:
        assert point["failure"] == "build, no tactic: no tactics to implement node 'a'"
        assert f"builder's choice: failed: {point['failure']}" in text
    else:
        assert point["latency"]["median_ms"] == pytest.approx(front.fp32.latency.median_ms / 2, rel=1e-2)
        assert "builder's choice: 5.0" in text
        assert "error 0.5" in text, text
        assert "no plan" in text
        fastest = mptune.pick("model.mptune", max_latency_ms=front.points[0].latency.median_ms * 1.001)
        assert fastest.chosen is not None
        assert fastest.chosen.plan in {point.plan for point in front.points}
        assert mptune.report("model.mptune").builders_choice == front.builders_choice
    assert "Builder's choice: " in page
