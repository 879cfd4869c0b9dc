"""The next plan is looked for while one is measured, where that disturbs nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mptune.settings import SearchSettings
from mptune.targets.roofline import LatencyTerms
from mptune.tuning.evaluation import ORIGIN_SAMPLER
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.sampler import precision
from mptune.tuning.space import SearchSpace
from mptune.tuning.steps import guide
from mptune.tuning.steps.guide import Guide
from mptune.tuning.steps.sensitivity import OneGroupErrors
from mptune.tuning.steps.tuner import Tuner
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space

METRIC = "relative_l2"
BUDGET = 10


def searched(record: StudyRecord, space: SearchSpace, folder: Path, *, leaves_cores: bool) -> list[str]:
    """Names of the threads that looked for plans."""
    toolchain, diary, settings = FakeToolchain(Law(space.free)), Diary(), SearchSettings(budget=BUDGET)
    toolchain.leaves_cores = leaves_cores
    terms, threads, find = toolchain.latency_terms(), list[str](), precision.find_candidates
    assert isinstance(terms, LatencyTerms)
    errors = OneGroupErrors(space, toolchain, METRIC, folder / "s.json", diary)
    told = Guide(record, space, toolchain, settings, diary, errors, terms)

    def watched(*arguments: object) -> object:
        threads.append(threading.current_thread().name)
        return find(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "find_candidates", watched)
        Tuner(record, space, toolchain, settings, diary, before_proposal=told.before_proposal, beside=told.beside).run()
    assert [e.origin for e in record.evaluations()].count(ORIGIN_SAMPLER) == BUDGET - len(space.seeds)
    return threads


@pytest.mark.parametrize(
    ("cores", "leaves_cores", "is_beside"), [(4, True, True), (3, True, False), (64, False, False)]
)
def test_with_cores_to_spare_it_is_looked_for_beside(
    cores: int, leaves_cores: bool, is_beside: bool, open_record: OpenRecord, tmp_path: Path
) -> None:
    space = make_small_space(24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guide, "usable_cores", lambda: cores)
        threads = searched(open_record(space), space, tmp_path, leaves_cores=leaves_cores)
    beside = [name for name in threads if name != threading.main_thread().name]
    assert len(beside) == (BUDGET - len(space.seeds) - 1 if is_beside else 0), "for each plan behind the first"
    assert len(threads) - len(beside) == BUDGET - len(space.seeds)


def test_nothing_is_thought_ahead_in_a_study_that_others_write(
    open_record: OpenRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide, "usable_cores", lambda: 64)
    space = make_small_space(24)
    threads = searched(open_record(space, is_shared=True), space, tmp_path, leaves_cores=True)
    assert set(threads) == {threading.main_thread().name}


def test_what_fails_beside_a_measurement_does_not_lose_it(
    open_record: OpenRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide, "usable_cores", lambda: 64)
    space = make_small_space(24)
    record, failed = open_record(space), list[str]()

    def fail() -> None:
        failed.append("once more")
        raise MemoryError

    monkeypatch.setattr(record, "think_ahead", fail)
    searched(record, space, tmp_path, leaves_cores=True)
    assert len(failed) == BUDGET - len(space.seeds) - 1
    assert len(record.evaluations()) == BUDGET
