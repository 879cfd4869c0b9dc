"""A Jetson's clocks, event counters and temperatures, under a root directory that holds such files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mptune.engines.jobs import measure
from mptune.processes.child import WorkerState
from mptune.targets.detect import Throttling, read_throttling, throttling_warnings
from tests.targets.jetson_files import put_files

ORIN = {
    "sys/class/devfreq/17000000.gpu/cur_freq": "1020000000\n",
    "sys/class/devfreq/17000000.gpu/min_freq": "306000000\n",
    "sys/class/devfreq/17000000.gpu/max_freq": "1020000000\n",
    "sys/class/hwmon/hwmon3/name": "soctherm_oc\n",
    "sys/class/hwmon/hwmon3/oc1_event_cnt": "0\n",
    "sys/class/hwmon/hwmon3/oc2_event_cnt": "15\n",
    "sys/class/hwmon/hwmon3/oc3_event_cnt": "37\n",
}
CALM = Throttling(1020.0, {"oc1": 0, "oc2": 15, "oc3": 37})


def test_clocks_and_counters_are_read(tmp_path: Path) -> None:
    """Counters count from the start of the device; what cannot be read is no event, and a workstation is no Jetson."""
    assert read_throttling(put_files(tmp_path / "orin", ORIN)) == CALM
    assert throttling_warnings(CALM, CALM, CALM) == ()
    thor = put_files(tmp_path / "thor", {"sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000"})
    assert read_throttling(thor) == Throttling(1575.0, {})
    garbled = dict.fromkeys((name for name in ORIN if "hwmon" in name), "not a number")
    assert read_throttling(put_files(tmp_path / "garbled", {**ORIN, **garbled})) == replace(CALM, events={})
    assert read_throttling(put_files(tmp_path / "pc", {"sys/class/hwmon/hwmon3/oc1_event_cnt": "0"})) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hwmon3_oc1_event_cnt": "1"}, "over-current, oc1: 1 times"),
        ({"hwmon3_oc2_event_cnt": "18"}, "over-current, oc2: 3 times"),
        ({"hwmon3_oc3_event_cnt": "216"}, "over-current, oc3: 179 times"),
        ({"17000000_gpu_cur_freq": "612000000"}, "fell from 1020 to 612 MHz since the first timing"),
    ],
)
def test_what_lowers_the_clocks_is_a_warning_of_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(measure, "read_throttling", lambda: read_throttling(tmp_path))
    state = WorkerState()
    before = read_throttling(put_files(tmp_path, ORIN))
    assert measure._jetson_warnings(state, before) == ()  # the first timing
    put_files(tmp_path, ORIN, **changed)
    (warning,) = measure._jetson_warnings(state, before)
    assert words in warning
    assert ": " in warning
    still = read_throttling(tmp_path)
    later = measure._jetson_warnings(state, still)
    assert (later == ()) is ("oc" in next(iter(changed)))  # events that happened before are none of this timing
