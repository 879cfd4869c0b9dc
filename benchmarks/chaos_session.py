"""One process of ``benchmarks.chaos``: a search whose worker meets faults, and which the benchmark kills.

Every job begins and ends with a line in the diary, which the benchmark reads: what was begun, what was finished, and
so what was in flight when a kill came. The toolchain is the tests' fake one, whose jobs run in a real worker process
and leave real files.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import mptune
from benchmarks.chaos_jobs import FAULTS, Busy, Faulty
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement, ReferenceReport, SampleSet
from mptune.engines.context import RunContext
from mptune.engines.spread import SessionTiming
from mptune.errors import MptuneError
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.child import Job
from mptune.processes.parent import Worker
from mptune.settings import LatencySettings, WorkerSettings
from mptune.tuning.bench import TRIES, Silent
from tests.fakes import FakeToolchain, Law

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """What one process does.

    Attributes:
        model: path of the model.
        data: path of the samples.
        out: the run directory.
        diary: file of the jobs.
        seed: of the search; with ``number`` also of the faults.
        number: of this process in its run, from 0.
        budget: of the search.
        fault_rate: share of the jobs that meet a fault.
        confirm_points: points of the front that are measured again.
        job_s: how long a job of the fake toolchain takes.
        timeout_s: how long a job may take.
    """

    model: str
    data: str
    out: str
    diary: str
    seed: int
    number: int
    budget: int
    fault_rate: float
    confirm_points: int
    job_s: float
    timeout_s: float

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class Diary:
    """Appends one line for the begin and one for the end of each job."""

    def __init__(self, path: Path, session: int) -> None:
        self._path = path
        self._session = session

    def write(self, state: str, what: str, plan: str = "") -> None:
        """``state`` is "begun", "done" or "failed"; ``what`` a set of samples or the name of another job."""
        line = json.dumps([self._session, state, what, plan]) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def around(self, what: str, plan: PrecisionPlan, job: Callable[[], T | Failure]) -> T | Failure:
        """Do a job, with its lines."""
        self.write("begun", what, plan.fingerprint)
        result = job()
        self.write("failed" if isinstance(result, Failure) else "done", what, plan.fingerprint)
        return result


class KilledToolchain(FakeToolchain):
    """The fake toolchain, whose jobs take place in a real worker process and need a typed model on the disk."""

    log: Diary
    session: Session
    context: RunContext
    worker: Worker
    last_pid: int | None = None

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        return self._work() or super().reference(which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        return self._work() or super().observe(stage)

    def emulate(self, plans: Sequence[PrecisionPlan]) -> tuple[OutputError, ...] | Failure:
        return self._work() or super().emulate(plans)

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        def job() -> Measurement | Failure:
            return self._work(plan) or super(KilledToolchain, self).evaluate(plan, which, profile=profile)

        return self.log.around(which, plan, job)

    def reopen(self, plan: PrecisionPlan, count: int) -> tuple[SessionTiming, ...] | Failure:
        def job() -> tuple[SessionTiming, ...] | Failure:
            return self._work(plan, count) or super(KilledToolchain, self).reopen(plan, count)

        return self.log.around("reopen", plan, job)

    def restart(self) -> None:
        self.worker.restart()
        super().restart()

    def close(self) -> None:
        self.worker.close()
        super().close()

    def _work(self, plan: PrecisionPlan | None = None, count: int = 1) -> Failure | None:
        """Have the worker read a typed model; None where that works."""
        plan = plan or self.context.grouped.uniform(Precision.FP32)
        path = self.context.rewriter.write(plan, self.context.scratch(plan.fingerprint))
        try:
            seconds = count * self.session.job_s
            result = self.worker.call(Busy(path, seconds), self.session.timeout_s + seconds)
        finally:
            path.unlink(missing_ok=True)
        if self.last_pid not in (None, self.worker.pid):
            self.restarts += 1  # another process, another session of the baseline
        self.last_pid = self.worker.pid or self.last_pid
        return result


class Stages(Silent):
    """Keeps why the search stopped."""

    stopped = ""

    def stage(self, text: str) -> None:
        if text.startswith("stopped: "):
            self.stopped = text.removeprefix("stopped: ")


def open_toolchain(session: Session, context: RunContext) -> FakeToolchain:
    """The fake toolchain with its diary."""
    fake = KilledToolchain(Law([group.id for group in context.groups]))
    fake.log, fake.session, fake.context = Diary(Path(session.diary), session.number), session, context
    fake.worker = Worker(context.logs_dir, context.settings.worker)
    fake.restarts = 1000 * session.number  # a process of its own has a session of the baseline of its own
    return fake


def meet_faults(session: Session) -> Any:
    """A patch of ``Worker.call`` that lets a share of the jobs meet a fault.

    Never as many in a row as a plan has tries: after these a failure counts as the plan's, whatever has caused it.
    """
    generator = random.Random(f"{session.seed} {session.number}")
    original, in_a_row = Worker.call, 0

    def call(worker: Worker, job: Job[Any], timeout_s: float | None = None) -> Any:
        nonlocal in_a_row
        meets_fault = generator.random() < session.fault_rate and in_a_row < TRIES - 1
        in_a_row = in_a_row + 1 if meets_fault else 0
        if meets_fault:
            (fault,) = generator.choices(list(FAULTS), list(FAULTS.values()))
            job = Faulty(job, fault)
        # A job that brings a deadline of its own, a minute to open a model, has the run's here.
        return original(worker, job, None if timeout_s is None else min(timeout_s, session.timeout_s))

    return mock.patch.object(Worker, "call", call)


def search(session: Session) -> None:
    """Search to the end, unless something ends this process."""
    limits = WorkerSettings(session.timeout_s / 2, session.timeout_s / 2, max_jobs=25)
    stages = Stages()
    with meet_faults(session):
        front = mptune.search(
            session.model,
            data=session.data,
            out=session.out,
            budget=session.budget,
            target="cpu",
            seed=session.seed,
            latency=LatencySettings(warmup_ms=2.0, duration_ms=5.0),
            worker=limits,
            confirm_points=session.confirm_points,
            listener=stages,
            open_toolchain=partial(open_toolchain, session),
        )
    print(json.dumps({"hypervolume": front.hypervolume, "stopped": stages.stopped}))


def main() -> None:
    session = Session(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        search(session)
    except MptuneError as error:
        sys.exit(f"{type(error).__name__}: {error.message}")
