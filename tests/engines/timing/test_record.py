from __future__ import annotations

from pathlib import Path

from mptune.engines.timing.latency import Repetitions
from mptune.engines.timing.record import TimingRecord
from mptune.settings import LatencySettings

(OLD,) = (Path(__file__).parents[2] / "old_runs/0.1.0/precision/confirmed").glob("*/data/timing-*.json")


def test_a_record_of_version_0_1_0_is_read_though_some_of_its_settings_were_removed() -> None:
    record = TimingRecord.read(OLD, LatencySettings())
    assert record == TimingRecord(Repetitions(23, 23, 2, 200.0), 10.514083000016399)


def test_a_record_counts_for_the_settings_that_it_was_taken_with(tmp_path: Path) -> None:
    path, record = tmp_path / "timing.json", TimingRecord(Repetitions(1, 2), 3.0)
    record.write(path, LatencySettings())
    assert TimingRecord.read(path, LatencySettings()) == record
    assert TimingRecord.read(path, LatencySettings(duration_ms=1.0)) is None
    assert TimingRecord.read(tmp_path / "absent.json", LatencySettings()) is None
