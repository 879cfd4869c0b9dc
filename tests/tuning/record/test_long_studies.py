"""What a plan costs the process that searches does not grow with the plans before it: work, memory, lines written."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import optuna

from mptune.graph.plan import PrecisionPlan
from tests.tuning.conftest import OpenRecord, make_small_space
from tests.tuning.factory import tune

EARLY, LATE, AROUND = 20, 70, 10


def test_the_work_and_the_lines_of_a_plan_do_not_grow(open_record: OpenRecord, tmp_path: Path) -> None:
    record = open_record(make_small_space(40))
    record._study.sampler = optuna.samplers.RandomSampler(seed=1)
    calls, lines = [0], []  # of Python functions between one evaluation and the next; of the journal

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    def begin_next(plan: PrecisionPlan) -> None:
        sys.setprofile(None)
        lines.append((tmp_path / "study.journal").read_bytes().count(b"\n"))
        calls.append(0)
        if any(at - AROUND <= len(lines) < at for at in (EARLY, LATE)):
            sys.setprofile(count)

    try:
        tune(record, budget=LATE, before=begin_next)
    finally:
        sys.setprofile(None)
    early, late = (median(calls[at - AROUND : at]) for at in (EARLY, LATE))
    assert 0 < late < 1.2 * early
    assert len(set(np.diff(lines)[EARLY:])) == 1
