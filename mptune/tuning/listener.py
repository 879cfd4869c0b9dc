"""Listener: who is called while a run goes on, such as a progress bar."""

from __future__ import annotations

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
        return

    def evaluated(self, evaluation: Evaluation, done: int, budget: int) -> None:
        """A plan was evaluated and is finite; ``done`` of ``budget`` are spent."""
        return

    def failed(self, plan: PrecisionPlan, origin: Origin, failure: Failure | str, done: int, budget: int) -> None:
        """A plan failed through its own fault, or (text) its outputs are not finite."""
        return

    def building(self, progress: Progress) -> None:
        """How far a long build is."""
        return

    def warning(self, text: str) -> None:
        """Something that a person should know, one line."""
        return


class Silent(Listener):
    """The listener that does nothing."""


def tell_outcome(
    listener: Listener, plan: PrecisionPlan, origin: Origin, outcome: Evaluation | Failure, done: int, budget: int
) -> None:
    """Tell a listener what came of a plan: evaluated where it is finite, else failed, and why."""
    if isinstance(outcome, Evaluation) and outcome.is_finite:
        listener.evaluated(outcome, done, budget)
    elif isinstance(outcome, Failure):
        listener.failed(plan, origin, outcome, done, budget)
    else:
        count = outcome.counted.non_finite
        why = f"{count} values are NaN or Inf where the reference has none"
        listener.failed(plan, origin, why if count else f"its {outcome.metric} is not finite", done, budget)


def count_down(listener: Listener, done: int, left: int) -> None:
    """Say how much is left, where the listener asks for it."""
    if hasattr(listener, "remaining"):
        listener.remaining(done, left)


def passed_on(*listeners: Listener) -> Listener:
    """A listener that calls several: each warning once, and ``remaining`` of those that have it."""
    warned: set[str] = set()

    class Several:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> None:
                is_repeated = name == "warning" and arguments[0] in warned
                warned.update(arguments[:1] if name == "warning" else ())
                for listener in () if is_repeated else listeners:
                    if name != "remaining" or hasattr(listener, name):
                        getattr(listener, name)(*arguments)

            return call

    return cast("Listener", Several())
