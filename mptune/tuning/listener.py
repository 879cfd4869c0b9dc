"""Listener: who is called while a run goes on, such as a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from mptune.engines.base import Failure, Progress
from mptune.graph.plan import PrecisionPlan
from mptune.tuning.evaluation import Evaluation, Origin


class Listener(Protocol):
    """Is called at each step of a search or confirmation, from the thread that runs it; must return soon.

    It may have ``remaining(done, left)``, too: how many measurements are done, and how many are left, re-measuring
    counted in.
    """

    def stage(self, text: str) -> None:
        """A part of the work begins, such as ``reference`` or ``re-measuring 7 plans``."""

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """A plan was evaluated and is finite; ``done`` of ``budget`` are spent."""

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """A plan failed through its own fault, or (text) its outputs are not finite."""

    def building(self, progress: Progress) -> None:
        """How far a long build is."""

    def warning(self, text: str) -> None:
        """Something that a person should know, one line."""


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


def count_down(listener: Listener, done: int, left: int) -> None:
    """Say how much is left, where the listener asks for it."""
    remaining: Callable[[int, int], None] | None = getattr(listener, "remaining", None)
    if remaining is not None:
        remaining(done, left)


def passed_on(*listeners: Listener) -> Listener:
    """A listener that calls several."""
    return cast("Listener", _Several(listeners))


class _Several:
    """Passes every call on; ``remaining`` to those that have it."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            for listener in self._listeners:
                if name != "remaining" or hasattr(listener, name):
                    getattr(listener, name)(*arguments)

        return call
