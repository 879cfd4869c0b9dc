"""A call in a thread of its own, beside what the caller does: for what waits for files, or for a worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def meanwhile(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Begin a call; ``result()`` waits for it, and raises what it raised. The thread ends with the call."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=f"mptune-{getattr(function, '__name__', 'call')}")
    try:
        return pool.submit(function, *args, **kwargs)
    finally:
        pool.shutdown(wait=False)
