"""What ends a search before its budget is spent, and that the same command goes on with it."""

from __future__ import annotations

import os
from pathlib import Path

from mptune.settings import SearchSettings
from mptune.tuning.bench import Limits, Stop, size_of
from mptune.tuning.remeasure import remeasure, to_measure
from mptune.tuning.space import SearchSpace
from mptune.tuning.tuner import Tuner
from tests.fakes import Diary, FakeToolchain, Law
from tests.tuning.conftest import OpenRecord
from tests.tuning.factory import make_bench


def test_the_size_of_a_run_counts_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "engines" / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to(tmp_path / "b")
    assert 1000 < size_of(tmp_path) < 1500


def test_the_run_directory_does_not_grow_beyond_its_limit(tmp_path: Path) -> None:
    limits = Limits(SearchSettings(max_disk_bytes=1000), tmp_path)
    for number in range(3):
        assert limits.reached() is None
        (tmp_path / f"engine{number}").write_bytes(b"x" * 300)
    assert limits.reached() is Stop.DISK, "another one of 300 bytes is more than 1000"


def test_a_search_stops_at_the_size_and_goes_on(open_record: OpenRecord, space: SearchSpace, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    class Builds(FakeToolchain):
        def evaluate(self, plan, which="search", *, profile=False):  # type: ignore[no-untyped-def]
            (folder / plan.fingerprint).write_bytes(b"x" * 100)
            return super().evaluate(plan, which, profile=profile)

    record, toolchain = open_record(), Builds(Law([g.id for g in space.groups]))
    settings = SearchSettings(budget=12, max_disk_bytes=450)
    stop = Tuner(make_bench(record, toolchain, settings, Diary(), Limits(settings, folder))).run()
    assert (stop, record.spent) == (Stop.DISK, 4)
    larger = SearchSettings(budget=6, max_disk_bytes=10_000)
    assert Tuner(make_bench(record, toolchain, larger, Diary(), Limits(larger, folder))).run() is Stop.BUDGET


def test_the_time_ends_a_confirmation_and_it_goes_on(open_record: OpenRecord, space: SearchSpace) -> None:
    record, toolchain = open_record(), FakeToolchain(Law([g.id for g in space.groups]))
    settings = SearchSettings(budget=8, timeout_s=100.0)
    Tuner(make_bench(record, toolchain, settings)).run()
    now, diary = [0.0], Diary()
    limits = Limits(settings, clock=lambda: now[0])
    points = len(to_measure(record, settings, 3))

    class Slow(FakeToolchain):
        def evaluate(self, plan, which="search", *, profile=False):  # type: ignore[no-untyped-def]
            now[0] += 40.0
            return super().evaluate(plan, which, profile=profile)

    remeasure(make_bench(record, Slow(toolchain.law), settings, diary, limits), 3)
    assert len(to_measure(record, settings, 3)) == points - 3
    assert "the time is over" in diary.stages[-1]
    remeasure(make_bench(record, toolchain, settings, Diary(), Limits(settings)), 3)
    assert not to_measure(record, settings, 3)


def test_workers_share_the_start_of_the_time() -> None:
    now = [7.0]
    limits = Limits(SearchSettings(timeout_s=5.0), clock=lambda: now[0], elapsed_s=3.0)
    assert limits.reached() is None
    now[0] = 9.0
    assert limits.reached() is Stop.TIMEOUT
    ahead = Limits(SearchSettings(timeout_s=5.0), clock=lambda: now[0], elapsed_s=-60.0)
    assert ahead.elapsed_s == 0.0, "a clock that is ahead gives no more time"
