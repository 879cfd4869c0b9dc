"""One-group errors that several workers share."""

from __future__ import annotations

from pathlib import Path

from mptune.data.metrics.accuracy import OutputError
from mptune.tuning.steps.shared_errors import SharedErrors
from tests.fakes import Diary
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import find_sensitivity
from tests.tuning.steps.test_tuner import make_toolchain

METRIC = "relative_l2"


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


def test_batches_stand_beside_each_other(open_record: OpenRecord) -> None:
    one, two = SharedErrors(open_record(), METRIC), SharedErrors(open_record(), METRIC)
    error = OutputError({"y": {METRIC: (0.25,)}})
    one.keep(range(1, 2), {"g000": error, "g001": None})
    two.keep(range(1, 2), {"g000": error, "g002": error})
    two.keep(range(1), {"g002": error})
    found = one.results()
    assert [part for part, _ in found] == [range(1), range(1, 2), range(1, 2)]
    assert {"g000": error, "g001": None} in [errors for _, errors in found]
