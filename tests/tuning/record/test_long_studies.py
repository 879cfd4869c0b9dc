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

from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.graph.plan import PrecisionPlan
from tests.fakes import FakeToolchain, Law
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.test_tuner import make_tuner

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

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.called += event == "call"

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        sys.setprofile(None)
        self.calls_of.append(self.called)
        self.lines_of.append(self.journal.read_bytes().count(b"\n"))
        result, self.called = super().evaluate(plan, which, profile=profile), 0
        if any(at - AROUND <= len(self.calls_of) < at for at in (EARLY, LATE)):
            sys.setprofile(self._count)
        return result


def test_the_work_and_the_lines_of_a_plan_do_not_grow(open_record: OpenRecord, tmp_path: Path) -> None:
    space = make_small_space(GROUPS)
    toolchain = Counting(Law([group.id for group in space.groups]), journal=tmp_path / "study.journal")
    record = open_record(space=space)
    record._study.sampler = optuna.samplers.RandomSampler(seed=1)
    try:
        make_tuner(record, space, toolchain, budget=LATE).run()
    finally:
        sys.setprofile(None)
    early, late = (median(toolchain.calls_of[at - AROUND : at]) for at in (EARLY, LATE))
    assert late < 1.2 * early
    lines = np.diff(toolchain.lines_of)
    assert set(lines[EARLY:]) == {lines[EARLY]}
