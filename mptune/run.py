"""``open_run``: a run directory as an object to read from, choose from and confirm."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from mptune import api
from mptune.data.metrics.accuracy import TaskMetric
from mptune.rundir import read_run
from mptune.settings import EngineChoice
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.listener import Listener
from mptune.tuning.record.storage_urls import storage_url
from mptune.tuning.record.study import Study, copy_to_memory
from mptune.tuning.runs.confirmation import Confirmation
from mptune.tuning.runs.measuring_run import OpenToolchain
from mptune.tuning.runs.result import read_record


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the run directory of a search, or of a confirmation. Nothing is locked, written or measured.

    Args:
        path: The run directory. A search may be writing to it at the same time.

    Raises:
        RunError: It is no run directory, or one of a newer version of mptune.
    """
    read_run(Path(path))
    return Run(path)


class Run:
    """A run directory. Every attribute is read from the disk when it is asked for, so it is never out of date.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def front(self) -> Front:
        """The Pareto front, with the plan that was chosen last.

        Raises:
            RunError: Nothing has been evaluated yet.
        """
        return self.report()

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Every plan that was evaluated, in order, also those that are not on the front or not finite.

        Raises:
            RunError: The record cannot be read, or there is none yet.
        """
        with contextlib.closing(read_record(*read_run(self.path))) as record:
            return record.evaluations()

    @property
    def study(self) -> Study:
        """A copy of the run's Optuna study, in memory: what is done to it does not change the run.

        Its trials hold latency in milliseconds and error as values, for ``optuna.visualization`` and the like.

        Raises:
            RunError: The record cannot be read, or there is none yet.
        """
        directory, file = read_run(self.path)
        url = storage_url(file.storage)
        return copy_to_memory(name=file.study, metric=file.search.metric, journal=directory.journal, url=url)

    def report(self) -> Front:
        """Read the front. See ``mptune.report``."""
        return api.report(self.path)

    def pick(
        self,
        *,
        max_error: float | None = None,
        max_latency_ms: float | None = None,
        max_memory_bytes: int | None = None,
        knee: bool = False,
        plan: str | None = None,
    ) -> Front:
        """Choose another plan and write ``chosen/`` anew. See ``mptune.pick``."""
        return api.pick(
            self.path,
            max_error=max_error,
            max_latency_ms=max_latency_ms,
            max_memory_bytes=max_memory_bytes,
            knee=knee,
            plan=plan,
        )

    def confirm(
        self,
        *,
        target: str = "auto",
        engine: EngineChoice = "auto",
        metric: str | TaskMetric | None = None,
        timeout_s: float | None = None,
        max_disk_bytes: int | None = None,
        progress: bool | None = None,
        listener: Listener | None = None,
        open_toolchain: OpenToolchain | None = None,
    ) -> Confirmation:
        """Build and measure the front on the device here. See ``mptune.confirm``."""
        return api.confirm(
            self.path,
            target=target,
            engine=engine,
            metric=metric,
            timeout_s=timeout_s,
            max_disk_bytes=max_disk_bytes,
            progress=progress,
            listener=listener,
            open_toolchain=open_toolchain,
        )

    def export(
        self, out: str | Path | None = None, *, force: bool = False, warn: Callable[[str], object] | None = None
    ) -> Path:
        """Pack what a confirmation on another device needs into one file. See ``mptune.export``."""
        return api.export(self.path, out, force=force, warn=warn)
