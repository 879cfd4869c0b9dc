"""One process of ``benchmarks.chaos``: a search whose worker meets faults, and which the benchmark kills.

Every job begins and ends with a line in the diary, which the benchmark reads: what was begun, what was finished, and
so what was in flight when a kill came. The toolchain is the tests' fake one, whose jobs run in a real worker process
and leave real files.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import mptune
from benchmarks.chaos_jobs import FAULTS, Busy, Faulty
from mptune.data.metrics.accuracy import OutputError
from mptune.engines.base import Failure, Measurement, ReferenceReport, SampleSet
from mptune.engines.context import RunContext
from mptune.errors import MptuneError
from mptune.graph.groups import GroupedModel
from mptune.graph.hazards.hazard import TensorRange
from mptune.graph.plan import Precision, PrecisionPlan
from mptune.processes.child import Job
from mptune.processes.parent import Worker
from mptune.settings import LatencySettings, WorkerSettings
from mptune.tuning.bench import TRIES, Listener
from tests.fakes import FakeToolchain, Law

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """What one process does."""

    model: str
    data: str
    out: str
    diary: str
    seed: int
    """Of the search; with ``number`` also of the faults."""
    number: int
    """Of this process in its run, from 0."""
    budget: int
    fault_rate: float
    confirm_points: int
    job_s: float
    """How long a job of the fake toolchain takes."""
    timeout_s: float

    def write(self, state: str, what: str, plan: str) -> None:
        """A line of the diary: ``state`` is "begun", "done" or "failed", ``what`` a set of samples or another job."""
        line = json.dumps([self.number, state, what, plan]) + "\n"
        with Path(self.diary).open("ab", buffering=0) as file:
            file.write(line.encode())


class KilledToolchain(FakeToolchain):
    """The fake toolchain, whose jobs take place in a real worker process and need a typed model on the disk."""

    last_pid: int | None = None

    def __init__(self, session: Session, context: RunContext) -> None:
        super().__init__(Law([group.id for group in context.grouped.groups]))
        self.session, self.context = session, context
        self.worker = Worker(context.logs_dir, context.settings.worker)
        self.restarts = 1000 * session.number  # a process of its own has a session of the baseline of its own

    def reference(self, which: SampleSet) -> ReferenceReport | Failure:
        return self._work() or super().reference(which)

    def observe(self, stage: Callable[[str], object] | None = None) -> Mapping[str, TensorRange] | Failure:
        return self._work() or super().observe(stage)

    def emulate(
        self, plans: Sequence[PrecisionPlan], part: range | None = None, grouped: GroupedModel | None = None
    ) -> tuple[OutputError, ...] | Failure:
        return self._work() or super().emulate(plans, part, grouped)

    def evaluate(
        self, plan: PrecisionPlan, which: SampleSet = "search", *, profile: bool = False
    ) -> Measurement | Failure:
        evaluate = partial(super().evaluate, plan, which, profile=profile)
        return self._noted(which, plan, lambda: self._work(plan) or evaluate())

    def _noted(self, what: str, plan: PrecisionPlan, job: Callable[[], T | Failure]) -> T | Failure:
        """Do a job, with its lines in the diary."""
        self.session.write("begun", what, plan.fingerprint)
        result = job()
        self.session.write("failed" if isinstance(result, Failure) else "done", what, plan.fingerprint)
        return result

    def restart(self) -> None:
        self.worker.restart()
        super().restart()

    def close(self) -> None:
        self.worker.close()
        super().close()

    def _work(self, plan: PrecisionPlan | None = None) -> Failure | None:
        """Have the worker read a typed model; None where that works."""
        plan = plan or self.context.grouped.uniform(Precision.FP32)
        path = self.context.rewriter.write(plan, self.context.scratch(plan.fingerprint))
        try:
            job_s = self.session.job_s
            result = self.worker.call(Busy(path, job_s), self.session.timeout_s + job_s)
        finally:
            path.unlink(missing_ok=True)
        if self.last_pid not in (None, self.worker.pid):
            self.restarts += 1  # another process, another session of the baseline
        self.last_pid = self.worker.pid or self.last_pid
        return result


class Stages(Listener):
    """Prints why the search stopped."""

    def stage(self, text: str) -> None:
        if text.startswith("stopped: "):
            print(text, flush=True)


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
    with meet_faults(session):
        mptune.search(
            session.model,
            data=session.data,
            out=session.out,
            budget=session.budget,
            knee=True,  # within a limit it may end before its budget
            target="cpu",
            seed=session.seed,
            latency=LatencySettings(warmup_ms=2.0, duration_ms=5.0),
            worker=WorkerSettings(session.timeout_s / 2, session.timeout_s / 2, max_jobs=25),
            confirm_points=session.confirm_points,
            listener=Stages(),
            open_toolchain=partial(KilledToolchain, session),
        )


def main() -> None:
    session = Session(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        search(session)
    except MptuneError as error:
        sys.exit(f"{type(error).__name__}: {error.message}")
