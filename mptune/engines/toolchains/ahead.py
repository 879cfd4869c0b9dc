"""Plans that are opened side by side, each in a process of its own, before they are timed one after the other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mptune.engines.base import Failure, Stage
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
        self._waiting: dict[str, list[Worker]] = {}  # fingerprint of a plan -> where it is open, or being opened
        self._opening: list[tuple[str, Worker, Future[Failure | None]]] = []
        self._held = defaultdict[Worker, set[str]](set)  # plans that a process has had
        self._pool = ThreadPoolExecutor(2 + len(workers.beside), "mptune-opening")
        self.most: int | None = None

    @property
    def beside(self) -> tuple[Worker, ...]:
        """The processes beside the first one."""
        return self._workers.beside[: (self.most or 2) - 1]

    @property
    def unused(self) -> list[Worker]:
        """The processes beside the first that have had no plan, nor the baseline."""
        return [worker for worker in self.beside if not self._held[worker]]

    @property
    def is_opening(self) -> bool:
        """Whether some are not open yet."""
        return any(not answer.done() for _, _, answer in self._opening)

    def place(self, plans: Sequence[str]) -> list[Worker]:
        """A free process for each plan that has not had it, up to the first plan for which there is none."""
        busy = [worker for workers in self._waiting.values() for worker in workers]
        free, placed = [worker for worker in (*self.beside, self._workers.main) if worker not in busy], list[Worker]()
        for plan in plans:
            if (worker := next((each for each in free if plan not in self._held[each]), None)) is None:
                break
            free.remove(worker)
            placed.append(worker)
        return placed

    def open(self, plan: str, worker: Worker, job: MeasureJob, *, is_baseline: bool = False) -> None:
        """Begin to open a plan in a process, or the baseline alone."""
        self._held[worker].add(plan)
        if not is_baseline:
            self._waiting.setdefault(plan, []).append(worker)
        self._opening.append((plan, worker, self._pool.submit(worker.call, OpenAheadJob(job, is_baseline))))

    def finish(self) -> None:
        """Wait until all are open. What failed opens at its timing, as all does from then on: memory may be short."""
        began_s, opening, self._opening = time.monotonic(), self._opening, []
        failed = [(each, worker) for each, worker, answer in opening if answer.result() is not None]
        SECONDS[Stage.BUILD.value] += time.monotonic() - began_s
        for each, worker in failed:
            self._waiting[each] = [other for other in self._waiting.get(each, ()) if other is not worker]
        if failed:
            self.restart(*self.beside)
            self.most = self.most and 1  # not for good where ranges are observed meanwhile

    def take(self, plan: str) -> Worker:
        """Where a plan is to be timed: where it is open, else in the first process. All are open then."""
        self.finish()
        self._last = (self._waiting.get(plan) or [self._workers.main]).pop()
        self._held[self._last].add(plan)
        return self._last

    def turn_elsewhere(self, plan: str) -> None:
        """End the process in which a plan was timed last; the plan is opened and timed in another one."""
        last = self._last
        self.restart(last)
        self._waiting.setdefault(plan, []).extend([worker for worker in self.beside if worker is not last][:1])

    def restart(self, *workers: Worker) -> None:
        """End processes, and what is open in them."""
        for waiting in self._waiting.values():
            waiting[:] = [worker for worker in waiting if worker not in workers]
        for worker in workers:
            self._held.pop(worker, None)
        SideBySide(len(workers)).run([worker.restart for worker in workers])  # a process takes a while to end
