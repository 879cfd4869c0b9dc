from __future__ import annotations

from pathlib import Path

from mptune.engines.timing.latency import Repetitions, TimingRecord
from mptune.files import write_json
from mptune.settings import LatencySettings


def test_a_record_counts_for_the_settings_that_it_was_taken_with(tmp_path: Path) -> None:
    path, record = tmp_path / "timing.json", TimingRecord(Repetitions(1, 2), 3.0, LatencySettings())
    write_json(path, record.to_json())
    assert TimingRecord.read(path, LatencySettings()) == record
    assert TimingRecord.read(path, LatencySettings(duration_ms=1.0)) is None
    assert TimingRecord.read(tmp_path / "absent.json", LatencySettings()) is None
