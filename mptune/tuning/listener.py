"""Listener: who is called while a run goes on, such as a progress bar."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mptune.engines.base import Failure, Progress
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Evaluation, Origin


class Listener(Protocol):
    """Is called at each step of a search or confirmation, from the thread that runs it; must return soon."""

    def stage(self, text: str) -> None:
        """A part of the work begins, such as ``reference`` or ``re-measuring 7 plans``."""
        ...

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """A plan was evaluated and is finite; ``done`` of ``budget`` are spent."""
        ...

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """A plan failed through its own fault, or (text) its outputs are not finite."""
        ...

    def building(self, progress: Progress) -> None:
        """How far a long build is."""
        ...

    def warning(self, text: str) -> None:
        """Something that a person should know, one line."""
        ...


@runtime_checkable
class CountsDown(Protocol):
    """What a ``Listener`` may have beside: how much is left to measure, for an estimate of the time."""

    def remaining(self, done: int, left: int) -> None:
        """So many measurements are done, of this search or confirmation, and so many left, re-measuring counted in."""
        ...


def count_down(listener: Listener, done: int, left: int) -> None:
    """Say how much is left, where the listener asks for it."""
    if isinstance(listener, CountsDown):
        listener.remaining(done, left)


class Silent:
    """The listener that does nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """Nothing."""

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """Nothing."""

    def building(self, progress: Progress) -> None:
        """Nothing."""

    def warning(self, text: str) -> None:
        """Nothing."""


class Both:
    """Passes everything on to two listeners."""

    def __init__(self, first: Listener, second: Listener) -> None:
        self._listeners = (first, second)

    def stage(self, text: str) -> None:
        """See ``Listener``."""
        for listener in self._listeners:
            listener.stage(text)

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """See ``Listener``."""
        for listener in self._listeners:
            listener.evaluated(evaluation, done, budget)

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """See ``Listener``."""
        for listener in self._listeners:
            listener.failed(plan, origin, failure, done, budget)

    def building(self, progress: Progress) -> None:
        """See ``Listener``."""
        for listener in self._listeners:
            listener.building(progress)

    def warning(self, text: str) -> None:
        """See ``Listener``."""
        for listener in self._listeners:
            listener.warning(text)

    def remaining(self, done: int, left: int) -> None:
        """See ``CountsDown``."""
        for listener in self._listeners:
            count_down(listener, done, left)
