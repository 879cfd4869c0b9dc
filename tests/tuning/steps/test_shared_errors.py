"""One-group errors that several workers share out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.tuning.record.owner import this_process
from mptune.tuning.steps.shared_errors import SharedErrors
from tests.fakes import Diary
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity
from tests.tuning.steps.test_tuner import make_toolchain

METRIC = "relative_l2"


def other_process() -> dict[str, object]:
    """A process of this host that has ended."""
    code = "import json; from mptune.tuning.record.owner import this_process; print(json.dumps(this_process()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_what_one_worker_found_the_other_does_not_emulate(open_record: OpenRecord, tmp_path: Path) -> None:
    space = make_small_space(8)
    one, two = SharedErrors(open_record(), METRIC), SharedErrors(open_record(), METRIC)
    first, second = make_toolchain(space), make_toolchain(space)
    found = find_sensitivity(space, first, METRIC, tmp_path / "one.json", Diary(), shared=one)
    assert find_sensitivity(space, second, METRIC, tmp_path / "two.json", Diary(), shared=two) == found
    assert len(first.emulated) == 8
    assert second.emulated == []
    assert (tmp_path / "two.json").exists(), "explanations read it"
    other = SharedErrors(open_record(), "max_abs")
    find_sensitivity(space, second, "max_abs", tmp_path / "other.json", Diary(), shared=other)
    assert len(second.emulated) == 8, "another metric has other errors"


def test_what_another_worker_has_in_work_is_waited_for(open_record: OpenRecord, tmp_path: Path) -> None:
    space, record = make_small_space(8), open_record()
    other, mine = SharedErrors(record, METRIC), SharedErrors(open_record(), METRIC)
    other._mine = {**this_process(), "host": "elsewhere"}
    assert other.claim(["0:0"]) == "0:0"
    assert mine.claim(["0:0"]) is None
    toolchain = make_toolchain(space)
    errors = dict.fromkeys(space.free, 0.25)
    waits: list[float] = []

    def other_ends(seconds: float) -> None:
        waits.append(seconds)
        other.keep("0:0", range(2), {g: OutputError({"y": {METRIC: (e, e)}}) for g, e in errors.items()})

    found = find_sensitivity(space, toolchain, METRIC, tmp_path / "s.json", Diary(), shared=mine, sleep=other_ends)
    assert found.errors == errors
    assert toolchain.emulated == []
    assert len(waits) == 1


def test_other_groups_of_a_job_can_be_claimed_after_it_is_kept(open_record: OpenRecord) -> None:
    one, two = SharedErrors(open_record(), METRIC), SharedErrors(open_record(), METRIC)
    errors = {group: OutputError({"y": {METRIC: (0.25,)}}) for group in ("g000", "g001", "g002")}
    for worker, group in ((one, "g000"), (one, "g001"), (two, "g002")):
        assert worker.claim(["1:0"]) == "1:0"
        worker.keep("1:0", range(1, 2), {group: errors[group]})
    assert one.results() == [(range(1, 2), errors)]


@pytest.mark.parametrize("how", ["dead", "old"])
def test_what_a_dead_worker_had_in_work_is_taken_up(
    open_record: OpenRecord, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    record = open_record()
    other, mine = SharedErrors(record, METRIC), SharedErrors(record, METRIC)
    other._mine = other_process() if how == "dead" else {**this_process(), "host": "elsewhere"}
    assert other.claim(["0:0"]) == "0:0"
    if how == "old":
        monkeypatch.setattr("mptune.tuning.steps.shared_errors._ABANDONED_S", 0.0)
    assert mine.claim(["0:0"]) == "0:0"
