"""The workers that one search starts on the GPUs of its host: started, watched, started again when they die."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mptune.errors import MptuneError, RunError
from mptune.files import RESUME_HINT
from mptune.settings import SearchSettings
from mptune.tuning.listener import Listener
from mptune.tuning.record.record import StudyRecord
from mptune.tuning.runs.worker_process import WorkerProcess, error_of
from mptune.tuning.steps.remeasure import announce

StartWorker = Callable[[int], WorkerProcess]
"""Starts the worker of a GPU."""

_POLL_S = 0.2


class Crew:
    """Runs a worker for each GPU until the search stops. The study is all that they share."""

    def __init__(
        self,
        start: StartWorker,
        gpus: Sequence[int],
        record: StudyRecord,
        settings: SearchSettings,
        listener: Listener,
    ) -> None:
        self._start = start
        self._gpus = gpus
        self._record = record
        self._settings = settings
        self._listener = listener
        self._deaths = dict.fromkeys(gpus, 0)
        self._seen = {e.number for e in record.evaluations()}
        self._failed = len(record.failures())
        self._stages: dict[int, str] = {}

    def run(self) -> None:
        """Until every worker has ended.

        A worker that dies is started again, as often as a job is tried again; one that stops with an error is not.
        """
        workers: list[WorkerProcess] = []
        errors: list[MptuneError] = []
        finished = 0
        try:
            workers += [self._start(gpu) for gpu in self._gpus]
            while workers:
                for worker in list(workers):
                    ended = self._listen(worker)
                    if ended is None and worker.is_alive:
                        continue
                    workers.remove(worker)
                    worker.close()
                    if isinstance(ended, MptuneError):
                        errors.append(ended)
                        self._listener.warning(f"the worker on GPU {worker.gpu} stopped: {ended.message}")
                    elif ended:
                        finished += 1
                    else:
                        workers += self._replace(worker, errors)
                self._report()
                time.sleep(_POLL_S)
        finally:
            for worker in workers:
                worker.interrupt()
            for worker in workers:
                worker.close()
        self._report()
        if errors and not finished:
            raise errors[0]

    def _listen(self, worker: WorkerProcess) -> bool | MptuneError | None:
        """Pass on what a worker sent; None while it goes on, True once it has come to an end, else its error."""
        ended: bool | MptuneError | None = None
        while not worker.events.empty():
            event = worker.events.get()
            if "warning" in event:
                self._listener.warning(f"GPU {worker.gpu}: {event['warning']}")
            elif "stage" in event:
                self._stages[worker.gpu] = event["stage"]
                self._listener.stage("; ".join(f"GPU {gpu}: {text}" for gpu, text in sorted(self._stages.items())))
            elif "error" in event:
                ended = error_of(event)
            else:
                ended = bool(event["done"])
        return ended

    def _replace(self, worker: WorkerProcess, errors: list[MptuneError]) -> list[WorkerProcess]:
        self._deaths[worker.gpu] += 1
        deaths, retries = self._deaths[worker.gpu], self._settings.worker.retries
        what = f"the worker on GPU {worker.gpu} died (exit status {worker.process.returncode})"
        if deaths <= retries:
            self._listener.warning(f"{what}; its plan goes back, and it is started again ({deaths} of {retries})")
            return [self._start(worker.gpu)]
        errors.append(
            RunError(f"{what} {deaths} times; its log is {worker.log}", f"when that is repaired, {RESUME_HINT}")
        )
        self._listener.warning(errors[-1].message)
        return []

    def _report(self) -> None:
        """Pass on the outcomes that are new in the study, also those of workers that other hosts run."""
        before = done = self._failed + len(self._seen)
        budget = self._settings.budget
        for evaluation in self._record.evaluations():
            if evaluation.number in self._seen:
                continue
            self._seen.add(evaluation.number)
            done += 1
            if evaluation.is_finite:
                self._listener.evaluated(evaluation, done, budget)
            else:
                text = f"its {evaluation.metric} is {evaluation.error_value}"
                self._listener.failed(evaluation.plan, evaluation.origin, text, done, budget)
        failures = self._record.failures()
        for plan, origin, failure in failures[self._failed :]:
            done += 1
            self._listener.failed(plan, origin, failure, done, budget)
        self._failed = len(failures)
        if done > before:
            announce(self._listener, self._record, self._settings)
