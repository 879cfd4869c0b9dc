"""Parts of a search on the fake toolchain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mptune.graph.plan import Precision, PrecisionPlan
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import open_study
from mptune.tuning.space import SearchSpace, Seed
from tests.fakes import SHA, make_groups

OpenRecord = Callable[..., StudyRecord]


def make_small_space(count: int) -> SearchSpace:
    groups = make_groups(count)
    ids = [g.id for g in groups]
    seeds = tuple(
        Seed(origin, PrecisionPlan.uniform(SHA, ids, precision))
        for origin, precision in ((ORIGIN_FP32, Precision.FP32), (ORIGIN_FP16, Precision.FP16))
    )
    return SearchSpace(SHA, groups, tuple(ids), {}, seeds)


@pytest.fixture
def space() -> SearchSpace:
    return make_small_space(8)


@pytest.fixture
def open_record(tmp_path: Path, space: SearchSpace) -> Iterator[OpenRecord]:
    """Opens the same journal again and again, as one run after another would."""
    opened: list[StudyRecord] = []

    def open_one(space: SearchSpace = space, metric: str = "relative_l2", **options: object) -> StudyRecord:
        usual = {"sampler": "tpe", "identity": {"model": SHA}, "journal": tmp_path / "study.journal"}
        record = open_study(space, metric=metric, **{"name": "test", **usual, **options})
        opened.append(record)
        return record

    yield open_one
    for record in opened:
        record.close()


@pytest.fixture
def record(open_record: OpenRecord) -> StudyRecord:
    """Of ``space``, with nothing in it."""
    return open_record()
