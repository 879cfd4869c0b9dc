"""Several workers on one study: as good a front as one worker's in one go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mptune.engines.base import Failure, Measurement, SampleSet
from mptune.graph.plan import PrecisionPlan
from mptune.settings import SearchSettings
from mptune.tuning.evaluation import ORIGIN_FP16, ORIGIN_FP32, Origin
from mptune.tuning.front import hypervolume, pareto
from mptune.tuning.listener import Silent
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.record.study import open_study
from mptune.tuning.steps.prior import make_prior
from mptune.tuning.steps.tuner import Tuner
from tests.fakes import SHA, FakeToolchain, Law, make_plan
from tests.tuning.conftest import make_small_space
from tests.tuning.factory import find_sensitivity

GROUPS, BUDGET = 10, 20


def open_record(folder: Path) -> StudyRecord:
    space, journal = make_small_space(GROUPS), folder / "study.journal"
    return open_study(space, name="shared", metric="relative_l2", identity={"model": SHA}, journal=journal)


@dataclass
class InStep(FakeToolchain):
    """Builds no faster than the others, as devices of one kind do; else whoever gets the journal's lock does it all."""

    folder: Path = Path()
    workers: int = 1

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        result = super().evaluate(plan, which, profile=profile)
        while self.workers > 1 and not list(self.folder.glob("done.*")):
            counts = built(self.folder)
            if len(counts) == self.workers and min(counts) >= len(self.calls) - 1:
                break
            if sum(counts) >= BUDGET:  # The others wait for this evaluation: there is nothing left to begin.
                break
            time.sleep(0.005)
        return result


def work(folder: Path, workers: int) -> None:
    """What one process does: it knows the errors, a poor roofline, and what the study holds."""
    space = make_small_space(GROUPS)
    diary = folder / f"diary.{os.getpid()}"
    law = Law([g.id for g in space.groups], boundary_ms=0.1)
    toolchain = InStep(law, noise=0.0, delay_s=0.01, diary=diary, folder=folder, workers=workers)
    record = open_record(folder)
    # A run's lock keeps a second process away from its journal. Here two share it as they would share a database.
    record.is_alone = workers == 1
    own = folder / f"worker.{os.getpid()}"
    sensitivity = find_sensitivity(space, toolchain, "relative_l2", own, Silent())
    terms = toolchain.latency_terms()
    rough = {g: gain * (0.3 + 0.2 * (index % 7)) for index, (g, gain) in enumerate(terms.gains_ms.items())}
    record.guide(make_prior(space, sensitivity, replace(terms, gains_ms=rough), exact=False), 0)
    while len(list(folder.glob("worker.*"))) < workers:  # All begin together, so that each has its share.
        time.sleep(0.002)
    Tuner(record, space, toolchain, SearchSettings(budget=BUDGET), Silent()).run()
    (folder / f"done.{os.getpid()}").touch()
    record.close()


def built(folder: Path) -> list[int]:
    """How many evaluations each process has begun."""
    return [len(diary.read_text().splitlines()) for diary in folder.glob("diary.*")]


def quality(record: StudyRecord) -> float:
    """The hypervolume after the budget."""
    evaluations = record.evaluations()
    baseline = record.baseline()
    assert baseline is not None
    return hypervolume(pareto(evaluations), baseline)


def start(folder: Path, workers: int) -> subprocess.Popen[str]:
    module = "tests.tuning.record.test_workers"
    code = f"from pathlib import Path\nfrom {module} import work\nwork(Path({str(folder)!r}), {workers})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, error = process.communicate()
    assert process.returncode == 0, error


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What one worker reaches in one go."""
    folder = tmp_path_factory.mktemp("alone")
    work(folder, 1)
    record = open_record(folder)
    reached = quality(record)
    record.close()
    return reached


def test_two_workers_reach_what_one_reaches(tmp_path: Path, alone: float) -> None:
    open_record(tmp_path).close()  # The study is there before they come.
    for process in [start(tmp_path, 2) for _ in range(2)]:
        finish(process)
    record = open_record(tmp_path)
    plans = [e.plan.fingerprint for e in record.evaluations()]
    assert record.spent == len(plans) == BUDGET
    assert len(set(plans)) == len(plans), "no plan is built by both"
    origins = [e.origin for e in record.evaluations()]
    assert (origins.count(ORIGIN_FP32), origins.count(ORIGIN_FP16)) == (1, 1)
    shares = built(tmp_path)
    assert len(shares) == 2
    assert min(shares) >= BUDGET // 3
    assert sum(shares) == record.spent
    assert quality(record) >= 0.97 * alone
    record.close()


def test_a_plan_that_another_has_in_work_is_seen_by_one_at_least(tmp_path: Path) -> None:
    one, other = open_record(tmp_path), open_record(tmp_path)
    plan = make_plan("01" * (GROUPS // 2))
    proposals = []
    for record in (one, other):  # Both thought at the same time.
        record.enqueue(plan, Origin("seed", "mine"))
        proposals.append(record.ask())
    assert [p.plan for p in proposals] == [plan, plan]
    assert proposals[1].plan.fingerprint in other.states(but=proposals[1].number)
    other.tell_duplicate(proposals[1])
    assert proposals[0].plan.fingerprint not in one.states(but=proposals[0].number)
    for record in (one, other):
        record.close()


def test_while_another_builds_the_baseline_the_seeds_are_built(tmp_path: Path) -> None:
    other, record = open_record(tmp_path), open_record(tmp_path)
    record.is_alone = False
    space = make_small_space(GROUPS)
    other.enqueue(space.seeds[0].plan, ORIGIN_FP32)
    other.ask()
    toolchain = FakeToolchain(Law([g.id for g in space.groups]))

    def give_up(seconds: float) -> None:  # The baseline is the last of the budget, and still in work.
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Tuner(record, space, toolchain, SearchSettings(budget=2), Silent(), sleep=give_up).run()
    assert toolchain.built[0] == space.seeds[1].plan.fingerprint
    assert space.seeds[0].plan.fingerprint not in toolchain.built
    for one in (other, record):
        one.close()
