"""The spread between sessions: learnt at the start of a search, kept with the study, and in every interval."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from mptune.engines.base import Failure, FailureKind, Stage
from mptune.engines.latency import Latency
from mptune.settings import SearchSettings
from mptune.tuning.record.record import Sessions, StudyRecord
from mptune.tuning.remeasure import candidates, confirmed_evaluations, remeasure
from mptune.tuning.sampler.trials import timing_of
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import REOPENED
from tests.fakes import FAST, FakeToolchain
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import Tuned, make_bench, make_toolchain, tune

SPREAD = 3e-3
SETTINGS = SearchSettings(budget=8, sampler="tpe", latency=FAST)


def tune_noisily(record: StudyRecord, settings: SearchSettings = SETTINGS, **options: Any) -> Tuned:
    return tune(record, settings=settings, **{"session_spread": SPREAD, **options})


def half_width(latency: Latency) -> float:
    low, high = latency.ci95_ms
    return (high - low) / 2 / latency.median_ms


def test_both_baselines_are_opened_anew_and_intervals_hold_the_spread(record: StudyRecord, space: SearchSpace) -> None:
    toolchain = tune_noisily(record).toolchain
    fp32, fp16 = (seed.plan.fingerprint for seed in space.seeds)
    assert toolchain.reopened == [fp32] * REOPENED + [fp16] * REOPENED
    assert Sessions(record).spread.degrees == 2 * REOPENED
    spread = Sessions(record).spread.sd
    assert spread == pytest.approx(SPREAD, rel=0.6)
    for evaluation in record.evaluations()[2:]:
        assert 1.9 * spread < half_width(evaluation.latency) < 3.0 * spread
    for trial in record.settled():
        latency_ms, sd_ms = timing_of(trial)
        assert sd_ms > 0.7 * spread * latency_ms


def test_a_resumed_search_knows_the_spread(open_record: OpenRecord) -> None:
    first = tune_noisily(open_record()).record
    known = Sessions(first).spread
    first.close()
    resumed = open_record()
    assert Sessions(resumed).spread.sd == known.sd
    assert tune_noisily(resumed, replace(SETTINGS, budget=12), restarts=5).toolchain.reopened == []
    later, before = (half_width(resumed.evaluations()[index].latency) for index in (-1, 3))
    assert later > before


def test_confirming_adds_degrees_of_freedom_and_narrows(record: StudyRecord) -> None:
    toolchain, before = tune_noisily(record).toolchain, Sessions(record)
    remeasure(make_bench(record, toolchain, SETTINGS), rounds=3)
    assert Sessions(record).spread.degrees > before.spread.degrees
    points, _ = confirmed_evaluations(record, 3, FAST, candidates(record.evaluations()))
    truth = {e.plan: toolchain.law.latency_ms(e.plan) for e in points}
    anchor = points[0].latency.median_ms / truth[points[0].plan]
    searched = {e.plan: e.latency for e in record.evaluations()}
    for point in points:
        assert point.remeasured
        rounds = len(point.latency.raw_ms) // len(searched[point.plan].raw_ms)
        assert rounds in (1, 2, 3)
        # One session beside a baseline's session of its own tells less than one beside the first baseline's.
        assert half_width(point.latency) < (1.5 if rounds == 1 else 1.0) * half_width(searched[point.plan])
        assert point.latency.median_ms == pytest.approx(anchor * truth[point.plan], rel=3 * SPREAD)


def test_predictions_are_never_opened_anew(record: StudyRecord) -> None:
    assert tune_noisily(record, latency_source="predicted", error_source="emulated").toolchain.reopened == []
    assert all(math.isclose(half_width(e.latency), 0.0) for e in record.evaluations())
    predicted = Latency.predicted(3.0)
    assert Sessions(record).corrected(predicted) == predicted


@pytest.mark.parametrize("times", [1, 99])
def test_where_reopening_fails_the_search_goes_on(record: StudyRecord, space: SearchSpace, times: int) -> None:
    """The worker is killed from outside when sessions are opened anew, for the first times."""
    toolchain, kills = make_toolchain(space), [Failure(Stage.TIME, FailureKind.CRASH, "killed by SIGKILL")] * times
    toolchain.reopen = lambda plan, count: kills.pop() if kills else FakeToolchain.reopen(toolchain, plan, count)
    diary = tune(record, toolchain, SETTINGS).diary
    assert record.spent == SETTINGS.budget
    assert (Sessions(record).spread.sd is None) == (times > 1)
    warned = sum("how far sessions differ" in text for text in diary.warnings)
    assert warned == (2 if times > 1 else 0), "of both baselines"


def test_a_kill_while_reopening_loses_no_evaluation(open_record: OpenRecord, space: SearchSpace) -> None:
    record, killed = open_record(), make_toolchain(space)
    dies = mock.patch.object(FakeToolchain, "reopen", side_effect=SystemExit)
    with dies, mock.patch.object(StudyRecord, "_finish", side_effect=SystemExit), pytest.raises(SystemExit):
        tune(record, killed, SETTINGS)
    assert record.spent == 0
    record, again, _, _ = tune_noisily(open_record(), restarts=1)
    assert killed.built == [space.seeds[0].plan.fingerprint]
    assert space.seeds[0].plan.fingerprint not in again.built
    assert record.spent == SETTINGS.budget
