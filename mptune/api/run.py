"""``open_run``: a run directory as an object to read from, choose from and confirm."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from mptune.api import choosing, deploying, reading
from mptune.files import PathLike
from mptune.rundir import read_run
from mptune.tuning.evaluation import Evaluation
from mptune.tuning.front import Front
from mptune.tuning.record.storage import storage_url
from mptune.tuning.record.study import Study, copy_study
from mptune.tuning.result import read_record

P = ParamSpec("P")
T = TypeVar("T")


def open_run(path: PathLike) -> Run:
    """Open the run directory of a search, or of a confirmation. Nothing is locked, written or measured.

    Args:
        path: The run directory. A search may be writing to it at the same time.

    Raises:
        RunError: It is no run directory, or one of another version of mptune.
    """
    read_run(Path(path))
    return Run(path)


def _for_run(function: Callable[Concatenate[PathLike, P], T]) -> Callable[Concatenate[Run, P], T]:
    """A function of a run directory as a method of ``Run``, with the other arguments as they are."""

    @functools.wraps(function)
    def method(self: Run, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(self.path, *args, **kwargs)

    method.__qualname__ = f"Run.{function.__name__}"
    return method


class Run:
    """A run directory. Every attribute is read from the disk when it is asked for, so it is never out of date.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: PathLike) -> None:
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
        return copy_study(file.study, directory.journal, url)

    report = _for_run(reading.report)
    pick = _for_run(choosing.pick)
    confirm = _for_run(deploying.confirm)
    export = _for_run(deploying.export)
