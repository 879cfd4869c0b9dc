"""Plans that are opened side by side, each in a process of its own, before they are timed one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mptune.engines.base import Stage
from mptune.engines.ort.session import SideBySide
from mptune.engines.toolchains.measuring import MeasureJob, OpenAheadJob
from mptune.engines.toolchains.reference import Workers
from mptune.processes.child import SECONDS
from mptune.processes.parent import Worker


class Ahead:
    """The processes in which plans are open, and wait for their timing.

    Attributes:
        most: how many there are at most; 1 where plans are opened as they are timed; None, for 2, as long as unknown.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, self._last = workers, workers.main
        self._waiting: dict[str, list[Worker]] = {}  # fingerprint of a plan -> where it is open
        self.most: int | None = None

    @property
    def beside(self) -> tuple[Worker, ...]:
        """The processes beside the first one."""
        return self._workers.beside[: (self.most or 2) - 1]

    def count(self, plan: str) -> int:
        """How often a plan is open, by its fingerprint."""
        return len(self._waiting.get(plan, ()))

    def free(self) -> list[Worker]:
        """Where no plan waits."""
        busy = [worker for workers in self._waiting.values() for worker in workers]
        return [worker for worker in (*self.beside, self._workers.main) if worker not in busy]

    def open(self, jobs: Sequence[tuple[str, MeasureJob]]) -> None:
        """Open plans, by their fingerprints, at most as many as are ``free``.

        What fails is opened anew when it is timed, and everything from then on: memory may be short.
        """
        opened = [(plan, worker, OpenAheadJob(job)) for (plan, job), worker in zip(jobs, self.free(), strict=False)]
        began_s = time.monotonic()
        pool = ThreadPoolExecutor(len(opened))  # after Ctrl-C, or an error of the user's script, nobody waits for it
        answers = list(pool.map(lambda each: each[1].call(each[2]), opened))
        pool.shutdown()
        SECONDS[Stage.BUILD.value] += time.monotonic() - began_s
        for (plan, worker, _), answer in zip(opened, answers, strict=True):
            if answer is None:
                self._waiting.setdefault(plan, []).append(worker)
        if any(answer is not None for answer in answers):
            self.restart(*self.beside)
            self.most = self.most and 1  # not for good where ranges are observed meanwhile

    def take(self, plan: str) -> Worker:
        """Where a plan is to be timed: where it is open, else in the first process."""
        self._last = (self._waiting.get(plan) or [self._workers.main]).pop()
        return self._last

    def turn_elsewhere(self, plan: str) -> bool:
        """Have a plan opened and timed in another process than the last one; False where there is none."""
        others = [worker for worker in self.beside if worker is not self._last]
        self._waiting.setdefault(plan, []).extend(others[:1])
        return bool(others)

    def restart(self, *workers: Worker) -> None:
        """End processes, and what is open in them."""
        for waiting in self._waiting.values():
            waiting[:] = [worker for worker in waiting if worker not in workers]
        SideBySide(len(workers)).run([worker.restart for worker in workers])  # a process takes a while to end
