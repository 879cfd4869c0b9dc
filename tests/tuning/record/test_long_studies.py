"""What a plan costs the process that searches does not grow with the plans before it: work, memory, lines written."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import optuna
import pytest

from mptune.data.metrics.accuracy import OutputError
from mptune.data.metrics.table import STATISTICS
from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.graph.plan import PrecisionPlan
from tests.fakes import FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.steps.test_tuner import make_tuner

GROUPS, SAMPLES = 40, 24
EARLY, LATE = 30, 110
AROUND = 10


@dataclass
class Counting(FakeToolchain):
    """Counts, between one evaluation and the next, the calls of Python functions and the lines of the journal."""

    journal: Path = Path()
    calls_of: list[int] = field(default_factory=list)
    lines_of: list[int] = field(default_factory=list)
    called: int = 0
    is_counted: bool = True

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.called += event == "call"

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        sys.setprofile(None)
        self.calls_of.append(self.called)
        self.lines_of.append(self.journal.read_bytes().count(b"\n"))
        found = super().evaluate(plan, which, profile=profile)
        self.called = 0
        plans = len(self.calls_of)
        if self.is_counted and any(at - AROUND <= plans < at for at in (EARLY, LATE)):
            sys.setprofile(self._count)
        return found

    def _output_error(self, plan: PrecisionPlan, factor: float) -> OutputError:
        error = self.law.error(plan) * factor * np.random.default_rng(len(self.calls)).uniform(0.9, 1.1, SAMPLES)
        names = (name for name in STATISTICS if name != "non_finite")
        statistics = {name: tuple(map(float, error)) for name in names}
        return OutputError({"y": {**statistics, "non_finite": (0.0,) * SAMPLES}})


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "study.journal"


def search(open_record: OpenRecord, toolchain: Counting, budget: int) -> None:
    space = make_small_space(GROUPS)
    record = open_record(space=space)
    record._study.sampler = optuna.samplers.RandomSampler(seed=1)
    try:
        make_tuner(record, space, toolchain, budget=budget).run()
    finally:
        sys.setprofile(None)


def make_toolchain(journal: Path, **options: Any) -> Counting:
    return Counting(Law([group.id for group in make_small_space(GROUPS).groups]), journal=journal, **options)


def test_the_work_and_the_lines_of_a_plan_do_not_grow(open_record: OpenRecord, journal: Path) -> None:
    toolchain = make_toolchain(journal)
    search(open_record, toolchain, LATE)
    early, late = (median(toolchain.calls_of[at - AROUND : at]) for at in (EARLY, LATE))
    assert late < 1.2 * early
    lines = np.diff(toolchain.lines_of)
    assert set(lines[EARLY:]) == {lines[EARLY]}
