"""The durable record of a search, kept by Optuna; here is who hears that a call waits for its database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

tell_wait: ContextVar[Callable[[str], None]] = ContextVar("tell_wait", default=lambda text: None)
"""Takes what a call waits for: the listener of the run, or the terminal."""


@contextmanager
def waits_told_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass on what this thread's calls wait for, one line each, meanwhile; other threads are silent."""
    token = tell_wait.set(tell)
    try:
        yield
    finally:
        tell_wait.reset(token)
