"""Who is told that a call waits for its database: the listener of the run, or the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_tell: ContextVar[Callable[[str], None]] = ContextVar("tell", default=lambda text: None)


@contextmanager
def waits_told_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass on what this thread's calls wait for, one line each, meanwhile; other threads are silent."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def tell_wait(text: str) -> None:
    """Say what a call waits for."""
    _tell.get()(text)
