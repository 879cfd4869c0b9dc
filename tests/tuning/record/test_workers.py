"""Several workers on one study, turn by turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_FP32, Origin
from mptune.tuning.listener import Silent
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import open_study
from mptune.tuning.steps.tuner import Tuner
from tests.fakes import SHA, FakeToolchain, Law, make_plan
from tests.tuning.conftest import make_small_space

GROUPS = 10


def open_record(folder: Path) -> StudyRecord:
    space, journal = make_small_space(GROUPS), folder / "study.journal"
    return open_study(space, name="shared", metric="relative_l2", identity={"model": SHA}, journal=journal)


def test_a_plan_that_another_has_in_work_is_seen_by_one_at_least(tmp_path: Path) -> None:
    one, other = open_record(tmp_path), open_record(tmp_path)
    plan = make_plan("01" * (GROUPS // 2))
    proposals = []
    for record in (one, other):  # Both thought at the same time.
        record.enqueue(plan, Origin("seed", "mine"))
        proposals.append(record.ask())
    assert [p.plan for p in proposals] == [plan, plan]
    assert proposals[1].plan.fingerprint in other.states(but=proposals[1].number)
    other.tell_duplicate(proposals[1])
    assert proposals[0].plan.fingerprint not in one.states(but=proposals[0].number)
    for record in (one, other):
        record.close()


def test_while_another_builds_the_baseline_the_seeds_are_built(tmp_path: Path) -> None:
    other, record = open_record(tmp_path), open_record(tmp_path)
    record.is_alone = False
    space = make_small_space(GROUPS)
    other.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    other.ask()
    toolchain = FakeToolchain(Law([g.id for g in space.groups]))

    def give_up(seconds: float) -> None:  # The baseline is the last of the budget, and still in work.
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Tuner(record, space, toolchain, SearchSettings(budget=2), Silent(), sleep=give_up).run()
    assert toolchain.built[0] == space.seeds[1].plan.fingerprint
    assert space.seeds[0].plan.fingerprint not in toolchain.built
    for one in (other, record):
        one.close()
