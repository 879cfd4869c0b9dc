"""The spread between sessions: learnt where plans are measured again, kept with the study, and in every interval."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from mptune.engines.latency import Latency
from mptune.settings import SearchSettings
from mptune.tuning.record.record import Sessions, StudyRecord
from mptune.tuning.remeasure import candidates, confirmed_evaluations, remeasure
from mptune.tuning.sampler.trials import timing_of
from mptune.tuning.space import SearchSpace
from tests.fakes import FAST
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import Tuned, make_bench, make_toolchain, tune

SPREAD = 3e-3
SETTINGS = SearchSettings(budget=8, sampler="tpe", latency=FAST)


def tune_noisily(record: StudyRecord, settings: SearchSettings = SETTINGS, **options: Any) -> Tuned:
    return tune(record, settings=settings, **{"session_spread": SPREAD, **options})


def half_width(latency: Latency) -> float:
    low, high = latency.ci95_ms
    return (high - low) / 2 / latency.median_ms


def test_nothing_was_timed_twice_and_a_spread_is_assumed(record: StudyRecord) -> None:
    tune_noisily(record)
    spread = Sessions(record).spread
    assert (spread.degrees, spread.sd) == (0, 2.5e-3)
    for trial in record.settled():
        latency_ms, sd_ms = timing_of(trial)
        assert sd_ms > 0.7 * spread.sd * latency_ms


def test_a_resumed_search_knows_the_spread(open_record: OpenRecord) -> None:
    first, toolchain, *_ = tune_noisily(open_record())
    remeasure(make_bench(first, toolchain, SETTINGS), rounds=3)
    known = Sessions(first).spread
    first.close()
    resumed = open_record()
    assert Sessions(resumed).spread.sd == known.sd == pytest.approx(SPREAD, rel=0.6)
    tune_noisily(resumed, replace(SETTINGS, budget=12), restarts=50)
    later = half_width(resumed.evaluations()[-1].latency)
    assert 1.9 * known.sd < later < 4.5 * known.sd, "beside a baseline's session of its own"


def test_measuring_again_shows_the_spread(record: StudyRecord) -> None:
    toolchain = tune_noisily(record).toolchain
    remeasure(make_bench(record, toolchain, SETTINGS), rounds=3)
    spread = Sessions(record).spread
    assert spread.degrees > 4
    points, _ = confirmed_evaluations(record, 3, FAST, candidates(record.evaluations()))
    truth = {e.plan: toolchain.law.latency_ms(e.plan) for e in points}
    anchor = points[0].latency.median_ms / truth[points[0].plan]
    for point in points:
        assert point.remeasured
        assert 0.5 * spread.sd < half_width(point.latency) < 4.5 * spread.sd
        assert point.latency.median_ms == pytest.approx(anchor * truth[point.plan], rel=3 * SPREAD)


def test_predictions_have_no_spread(record: StudyRecord) -> None:
    tune_noisily(record, latency_source="predicted", error_source="emulated")
    assert all(math.isclose(half_width(e.latency), 0.0) for e in record.evaluations())
    predicted = Latency.predicted(3.0)
    assert Sessions(record).corrected(predicted) == predicted


def test_a_kill_before_a_trial_is_finished_loses_no_evaluation(open_record: OpenRecord, space: SearchSpace) -> None:
    record, killed = open_record(), make_toolchain(space)
    with mock.patch.object(StudyRecord, "_finish", side_effect=SystemExit), pytest.raises(SystemExit):
        tune(record, killed, SETTINGS)
    assert record.spent == 0
    record, again, _, _ = tune_noisily(open_record(), restarts=1)
    assert killed.built == [space.seeds[0].plan.fingerprint]
    assert space.seeds[0].plan.fingerprint not in again.built
    assert record.spent == SETTINGS.budget
